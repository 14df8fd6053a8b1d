"""JSON schemas to grammars, within limits of CPU time and memory.

`schemas` compiles a request's JSON schema to a logits processor, `client_slots` has clients take turns at it, and
`checker` first measures the cost of a grammar in a process of its own, `checker_process`, which can be killed.
Grammars from other sources belong here too: a method of `Schemas` for each.
"""
