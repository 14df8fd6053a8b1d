"""The part that all APIs of the server share: from a request to one or more generations, and from tokens to an answer.

The way of a request: `endpoint` receives its body, which the API parses into one flat model (`body`, `request`, `chat`,
`content`), and takes from it a `GenerationRequest`, in the form of no API. `preparation` makes prompts and settings of
the request, with the tokenizer; the runtime generates; a serializer of the API (`api`) makes a body or events of the
tokens, and `endpoint` sends them.

An API is a package beside this one: the types of its requests and their translation (`requests`), a `Serializer` with
the types that it sends, and its operations (`api`), which `runtime.server.app` lists. Nothing here depends on a
particular API.
"""
