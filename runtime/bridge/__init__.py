"""The way from a trio runtime in a thread of its own to callers outside of trio; shared by `runtime.aio` and
`runtime.sync`, which add only how a caller waits.

The way of a token: the target commits a round in the trio thread; a `CommitSource` receives it for a `BridgeStream`,
which sends everything that has arrived when the consumer requests more; `TrioThread` resolves the consumer's future; a
`StreamHandle`, an `IteratorHandle`, turns the commit into tokens in the consumer's thread. `BridgeCall` runs single
async functions, and `opener` opens the runtime in the thread.
"""
