"""Saved conversations and streams: the file, what it says, and how it is written and read."""
