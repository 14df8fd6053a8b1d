"""The target: verifies proposals in passes that sessions share, commits tokens, and decodes alone when nobody drafts.

* `target_actor`: the actor: the loop in which sessions are opened, read, decoded and closed.
* `target_session`: its state of one session, what the session feeds in the next pass, and the verdict that follows.
* `passes`: a pass, on the model's thread: rows that feed tokens and are judged; the next one may be launched ahead.
* `pass_prices`: learns from finished passes what passes and rounds cost.
* `drafter_link`: messages to the drafter, and how long its proposals are waited for.
* `reading`: reads prompts, short ones together, and scores the last tokens of those that are to be scored.
"""
