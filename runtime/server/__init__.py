"""The HTTP server: OpenAI's and Anthropic's APIs and web pages, over a runtime. It needs the extra `serve`.

A request passes through `connections/` (HTTP over trio), `access_log`, `middleware` (host names, API key) and `app`
(the routes). `generation_endpoints` reads the body, asks `admission` whether the request may run, has
`prepared_prompts` make prompts and settings of it, and starts the runtime's streams, one for each choice.
`answers/` turns their tokens into a response, for all APIs. `openai/` has the bodies of requests and
responses of OpenAI's completions and chats, and the description; `responses/` and `anthropic/` are other APIs; `errors`
makes error responses; `grammars/` compiles JSON schemas; `models/` loads and unloads the models. `metrics` counts for
Prometheus, `timelines` records streams that a client watches, and `background` is the interface to threads. `page/` and
`docs/` are the web pages.

A new endpoint gets a route in `app`, with types of its request and its responses. Another API gets a package beside
`openai/`, which translates its requests to chats and the parts of an answer to its events (see `answers/`).
"""
