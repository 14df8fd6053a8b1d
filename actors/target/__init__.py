"""The target: verifies proposals in passes that sessions share, commits tokens, and decodes alone when nobody drafts.

* `target_actor`: the actor, and the rounds of a session.
* `target_session`: its state of one session.
* `pass_queue`: which rounds share the next pass, and when it begins.
* `verify`: a verify pass over several texts, on the model's thread.
* `plain_decoder`: decoding one text without a drafter, a pass ahead.
"""
