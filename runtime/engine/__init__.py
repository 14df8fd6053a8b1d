"""The runtime: how it is opened, what it checks and admits, and its two actors at work."""
