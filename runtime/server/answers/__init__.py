"""What the server's APIs share: a request of any of them becomes one or more generations, and their tokens an answer.

The way of a request: `endpoint` reads its body (`body`), which is, or is translated to, a `request`, mostly a `chat`.
`preparation` makes prompts and settings of it, with the tokenizer; the runtime generates; `splitting` tells text,
reasoning and calls apart; a serializer of the API (`api`) makes bodies or events of them, and `sending` sends these.

An API is a package beside this one: types of requests with their translation, a `Serializer`, the types of what it
sends, and its operations, which `runtime.server.app` lists. Nothing here knows any of them.
"""
