"""OpenAI's completions and chats, with the fields of other servers that have the same form.

`requests` has the types of request bodies, `bodies` those of responses and chunks, which `serializers` makes from
tokens. `api` has the operations, except those of vLLM and llama.cpp for token ids, which are in `tokens`.
"""
