"""Anthropic's API: `/v1/messages` and `/v1/messages/count_tokens`.

`requests` has the types of request bodies, and translates them to chats (`runtime.server.openai.requests`), from which
everything is generated. `responses` has the types of bodies and events, `serializer` makes them from the parts of an
answer. `api` is all this as `runtime.server.answers` serves it, and `token_count` counts without generating.
"""
