"""mlx-lm's models and caches, behind the interface of `actors.model`.

* `model`: an mlx-lm model (`MLXModel`), and what `outrider doctor` shows of it.
* `sequence`: one text in the caches of a model (`MLXSequence`): fed, rewound, reused, saved.
* `cache_options`: the options by which caches are made, rewound and quantised.
* `cache_kinds`: a class for each kind of cache: how it is rewound, copied, saved, and a row of a batch.
* `sequence_state`: the state of a sequence, and its description in a file.
* `layer_evaluation`: evaluation layer by layer, so that two models can share a CPU.
* `memory`: MLX's memory.

A new cache class gets a kind in `cache_kinds`. No other module tests for a cache class.
"""
