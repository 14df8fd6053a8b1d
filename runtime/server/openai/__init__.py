"""OpenAI's completions and chats, with the fields of other servers that have the same form.

`requests` has the types of request bodies, `bodies` those of responses; `serializers` makes responses and chunks from
tokens. `api` has the operations, except vLLM's for token ids, which are in `tokens`.
"""
