"""A drafter on a rank of its own.

`remote_drafter` is that drafter as rank 0 sees it, `drafting_model` does its work there, and `draft_values` has what
they say to each other. The messages go over the control connection; see `actors.distributed.draft_rank_link`.
"""
