"""The runtime itself: opening one, checking requests, admitting sessions, and the two actors at work.

`opening.py` loads the models and starts the actors, and `runtime.py` is the object that a user holds.
`request_validation.py` makes a session of a prompt and settings; `sessions.py` bounds how many are at work, and begins,
counts and ends each. `drafter_slot.py` attaches and detaches the drafter.
"""
