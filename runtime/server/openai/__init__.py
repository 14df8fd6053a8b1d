"""OpenAI's completions and chats, with the fields of other servers that have the same form."""
