"""The target: verifies proposals in passes that sessions share, commits tokens, and decodes alone when nobody drafts.

* `target_actor`: the actor: a session, round by round.
* `target_session`: its state of one session.
* `drafter_link`: messages to the drafter, and how long its proposals are waited for.
* `round_runner`: a round's pass, from its proposal, or none, to its verdict.
* `scoring`: reading a prompt, and the scores of its last tokens.
* `pass_queue`: which rounds share the next pass, and when it begins.
* `verify`: a verify pass over several texts, on the model's thread.
* `plain_decoder`: decoding one text without a drafter, a pass ahead.
"""
