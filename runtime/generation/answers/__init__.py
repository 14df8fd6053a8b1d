"""The structure of answers beyond tags and calls: answers of several messages."""
