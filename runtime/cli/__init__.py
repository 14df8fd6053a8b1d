"""The command line: one module a command, and the arguments that commands share."""
