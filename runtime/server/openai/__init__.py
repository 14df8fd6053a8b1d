"""OpenAI's interface: bodies of requests and responses, and how they are read and written."""
