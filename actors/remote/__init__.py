"""A drafter in another process of this machine, or on another rank.

`drafting_end` has the drafter's actor there, and `remote_drafter` stands for it here. Over a `link` they exchange the
messages that the actors of one process do; see `protocol.drafter_wire`.
"""
