"""OpenAI's completions and chats: request and response bodies, and the description of the server.

`requests` has the types of request bodies, `responses` those of responses and chunks. `serializers` makes responses
from tokens, and `api` is all this as `runtime.server.answers` serves it. `openapi` makes the description of the server
from the same types.

A chat request is also the form into which requests of the other APIs are translated.
"""
