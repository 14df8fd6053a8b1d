"""The command line: one module a command, and the arguments that several commands share.

`main` parses the arguments and turns outcomes into exit statuses. A new command gets a module `NAME_command.py` with
its arguments and a function that returns a `CommandOutcome`, and an entry in `main`. The package
`arguments` has the arguments that commands share; `flags` translates the library's messages into flags.
Signals and output are in `runtime/terminal/`.
"""
