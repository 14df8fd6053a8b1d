"""OpenAI's newer API: `/v1/responses`.

`requests` has the types of request bodies, and translates them to chats, from which everything is generated. `bodies`
has the types of responses; `serializer` makes responses and events from the parts of an answer. `store` keeps
responses, so that later ones can continue them. `api` has the operations.
"""
