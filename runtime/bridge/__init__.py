"""A trio runtime in a thread of its own, for callers outside of trio: what `runtime.aio` and `runtime.sync` share.

`portal` is the thread and the calls into it. `runtime` has the handles, written once as coroutines that wait only
through the portal: in asyncio they wait in its loop, in a plain thread they block.

The way of a token: the target commits a round in trio's thread; a handle that needs tokens calls there, once for all
commits that have arrived; the tokens are decoded in the consumer's thread as it takes them.
"""
