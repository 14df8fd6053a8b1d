"""JSON schemas to grammars, within limits of CPU time and memory.

`schemas` says what an answer must match, compiles it to a logits processor, and has clients take turns. Before that,
`checker` measures the cost of the grammar in a process of its own, `checker_process`, which can be killed. Grammars
from other sources belong here too: a method of `Schemas` for each.
"""
