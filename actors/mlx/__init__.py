"""mlx-lm's models and caches, behind the interface of `actors.model`.

* `model`: an mlx-lm model (`MLXModel`), and what `outrider doctor` shows of it.
* `sequence`: one text in the caches of a model (`MLXSequence`): fed, rewound, reused, saved.
* `cache_options`: the options by which caches are made, rewound and quantised.
* `cache_rewind`: what each of mlx-lm's cache classes can undo.
* `cache_state`: how the state of each cache class is taken out, checked and put into another cache.
* `sequence_state`: the state of a sequence, and its description in a file.
* `layer_evaluation`: evaluation layer by layer, so that two models can share a CPU.
* `memory`: MLX's memory.

A new cache class goes into `cache_rewind` and `cache_state`, the only two modules that know cache classes.
"""
