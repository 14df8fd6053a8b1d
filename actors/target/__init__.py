"""The target: verifies proposals in passes that sessions share, commits tokens, and decodes alone when nobody drafts.

* `target_actor`: the actor: a task for each session, which opens its cache, reads its prompt, and closes it.
* `target_session`: its state of one session.
* `drafter_link`: messages to the drafter, and how long its proposals are waited for.
* `round_loop`: the one task that decides on the passes of all rounds.
* `round_jobs`: runs them, and applies their verdicts.
* `rounds`: what one round feeds, and what becomes of its text.
* `scoring`: reading a prompt, and the scores of its last tokens.
* `verify`: a verify pass over several texts, on the model's thread.
* `plain_decoder`: decoding one text without a drafter, a pass ahead.
"""
