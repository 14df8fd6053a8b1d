"""What models can do on this machine, what to expect of a pair, and which draft models fit."""
