"""The command line: one module for each command, and the arguments that several commands share.

`main` parses the arguments and turns outcomes into exit statuses. A new command is a module `NAME_command.py` with a
`COMMAND`, listed in `main`. The package `arguments` has the arguments that commands share; `flags` rewords the
library's error messages with flags. Signals and output are in `runtime/terminal/`.
"""
