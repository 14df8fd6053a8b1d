"""Pure decisions of speculative decoding: no trio, threads, clocks, files or global random state.

What is hard about an asynchronous speculative decoder (stale proposals, rewinds, an end of text in the middle of a
proposal, who may look at what) is a decision over values. Kept apart from the I/O, these decisions are tested by
enumeration and by property tests, and the same code serves real models on threads and scripted models in simulated
time. The modules, each of which says what it is:

* messages and state of a session: `messages`, `session_state`, `cached_tokens`
* acceptance of drafted tokens: `acceptance`, `randomness`
* drafting: `lookahead_tree`, `lookahead_policy`, `auto_policy`, `draft_plan`, `copying`, `calibration`,
  `vocabulary_map`
* prices and time: `prices`, `pass_price`, `pass_plan`, `deadlines`, `prefill_chunks`
* texts and settings: `settings`, `settings_keywords`, `open_options`, `options`, `validation`, `argument_aliases`,
  `logits_processors`, `stop_strings`
* reporting: `statistics`, `scores`, `trace`, `errors`, `reprs`
* between processes: `wire`, `drafter_wire`, `rank_messages`, `tensor`
"""
