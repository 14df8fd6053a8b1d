"""A trio loop in a thread of its own, for callers that are not on trio; shared by `runtime.aio` and `runtime.sync`."""
