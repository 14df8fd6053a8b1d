"""A drafter in another process: a process of its own on this machine, or another rank.

`drafting_end` has the drafter's actor there, and `remote_drafter` stands for it here. Between them is a `link`, over
which they exchange the messages that the actors of one process do; see `protocol.drafter_wire`.
"""
