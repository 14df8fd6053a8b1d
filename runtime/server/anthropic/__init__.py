"""Anthropic's API: `/v1/messages` and `/v1/messages/count_tokens`.

`requests` has the types of request bodies, and translates them to chats, from which everything is generated. `bodies`
has the types of responses; `serializer` makes responses and events from the parts of an answer. `api` has the
operations.
"""
