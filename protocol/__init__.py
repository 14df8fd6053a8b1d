"""Pure decisions of speculative decoding: no trio, threads, clocks, files or global random state.

What is hard about an asynchronous speculative decoder (stale proposals, rewinds, an end of text in the middle of a
proposal, who may look at what) is a decision over values. Kept apart from the I/O, these decisions are tested by
enumeration and by property tests, and the same code serves real models on threads and scripted models in simulated
time.

Messages and state of a session:

* `messages`: what the two actors and the runtime send to each other.
* `session_state`: the state machine of a session, of which each actor keeps a copy.
* `cached_tokens`: which tokens a model's cache has processed, and how to bring it in line with a text.
* `replay`: when to settle the tokens that a restored checkpoint left to be fed again.

Acceptance of drafted tokens:

* `acceptance`: the rules match, rejection and block.
* `randomness`: every random number of a session, as a function of seed, purpose, position and text.

Drafting:

* `lookahead_tree`: the drafted tokens beyond the committed text.
* `lookahead_policy`: how far to draft ahead, when to send a proposal, when not to speculate; and the fixed lookahead.
* `auto_policy`: the same by measured prices.
* `draft_budget`: the policy's decisions for the next draft steps, made in advance.
* `copying`: drafting without a model, by what followed the same tokens earlier in the text.
* `copy_corpus`: other texts that may be copied from, each owner's apart.
* `calibration`: from the drafter's confidence to how often it is right.

Prices and time:

* `prices`: what forward passes cost and what speculating gains, as measured.
* `pass_price`: what a forward pass costs, by its rows.
* `pass_plan`: what the target does next: which texts share a pass, how many tokens of each it feeds, or a wait.
* `target_queue`: the passes that run and wait at the target.
* `deadlines`: how long the target waits for its drafter.
* `backoff`: how often something that has failed is left out, and how many sessions share a job after that.
* `prefill_chunks`: how many prompt tokens to read in one pass.

Texts and settings:

* `settings`: the settings of one generation.
* `validation`: checks of whole numbers and numbers that a user gives.
* `argument_aliases`: what arguments are called in other libraries.
* `logits_processors`: the interfaces of a user's logits processors and samplers.
* `stop_strings`: where a text ends by a stop string.

Reporting:

* `statistics`: counts and rates of a stream or a runtime.
* `advice`: what the statistics say would be faster.
* `trace`: events of the actors, as typed values.
* `reprs`: short representations of values, for messages.
* `errors`: the exceptions, by whose fault they are.
"""
