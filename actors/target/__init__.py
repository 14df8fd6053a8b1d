"""The target: verifies proposals in passes that sessions share, commits tokens, and decodes alone when nobody drafts.

* `target_actor`: the actor: a task for each session, which opens its cache and closes it.
* `target_session`: its state of one session.
* `drafter_link`: messages to the drafter, and how long its proposals are waited for.
* `round_loop`: the one task that decides on the passes of all texts.
* `round_jobs`: runs them, and applies their verdicts.
* `reading`: reads prompts, short ones together.
* `parts`: one text's part in a pass: what it feeds, and the verdict that follows.
* `verify`: a pass that judges proposals, on the model's thread.
* `plain_rows`: decoding texts without drafts, one or several in a pass, a pass ahead.
* `scoring`: the scores of a prompt's last tokens.
"""
