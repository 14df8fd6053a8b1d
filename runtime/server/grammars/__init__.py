"""JSON schemas to grammars, within limits of CPU time and memory.

`constraint` is what an answer must be; `schemas` compiles it to a logits processor, at which clients take turns, and
`checker` first measures the cost of a grammar in a process of its own, `checker_process`, which can be killed.
Grammars from other sources belong here too: a method of `Schemas` for each.
"""
