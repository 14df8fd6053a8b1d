"""The command `outrider batch`: answers to the prompts in a file, in a file from which it can go on."""
