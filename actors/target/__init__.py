"""The target: verifies proposals in passes that sessions share, commits tokens, and decodes alone when nobody drafts.

* `target_actor`: the actor: the loop in which sessions are opened, read, decoded and closed.
* `target_session`: its state of one session.
* `drafter_link`: messages to the drafter, and how long its proposals are waited for.
* `round_jobs`: runs the passes over texts, and applies their verdicts.
* `reading`: reads prompts, short ones together.
* `parts`: one text's part in a pass: what it feeds, and the verdict that follows.
* `verify`: a pass that judges proposals, on the model's thread.
* `plain_rows`: decoding texts without drafts, one or several in a pass, a pass ahead.
* `scoring`: the scores of a prompt's last tokens.
"""
