"""Pure decisions of speculative decoding: no trio, threads, clocks, files or global random state.

Everything that is hard about an asynchronous speculative decoder (stale proposals, rewinds, an end of
text in the middle of a proposal, who may look at what) is a decision over values. Kept here, apart
from the doing, it can be tested by enumeration and by property tests, and the same code serves real
models on threads and scripted ones in simulated time.

* `messages`: what the two actors say to each other.
* `session_state`: the state of one session, kept in two copies, one at each actor.
* `acceptance`: the rules match and rejection.
* `randomness`: where every random number comes from.
* `tree`, `lookahead`: what has been drafted ahead, and how far to go.
* `held`: what a cache has processed, and how to bring it in line with the text.
* `settings`, `statistics`, `trace`, `errors`: values that users see.
"""
