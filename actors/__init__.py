"""The actors: the target and the drafter, as trio tasks that exchange messages and send jobs to their models' threads.

`CONTRIBUTING.md` says what is where. The base classes are in `actor`; the interface of a model and of a cached
sequence, in `model`.
"""
