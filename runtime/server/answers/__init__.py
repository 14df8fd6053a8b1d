"""What the server's APIs share: a request of any of them becomes one generation, and its tokens become an answer.

`body` is the base of the types of request bodies. `api` is the interface of an API: it translates requests to the form
of `runtime.server.openai.requests`, from which everything is generated, and makes the serializer of each response.
`translation` has what APIs other than OpenAI's chats need for that. `parts` splits the tokens of an answer into text,
reasoning and tool calls. `serializer` is the interface that makes bodies and events of them, and `event_stream` sends
these.

The APIs are packages beside this one: `openai` (chats and completions), `responses` and `anthropic`.
"""
