"""What a consumer holds: token streams, completions, conversations, and the text that is made of tokens."""
