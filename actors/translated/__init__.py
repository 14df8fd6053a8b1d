"""A draft model of another vocabulary than its target's, behind the interface of `actors.model`."""
