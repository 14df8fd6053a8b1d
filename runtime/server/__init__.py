"""The HTTP server: OpenAI's and Anthropic's APIs and web pages, over a runtime. It needs the extra `serve`.

A request passes through `connections/` (HTTP over trio), `middleware` (access log, host names, API key) and `app`,
which holds the routes. `answers/` is shared by all APIs: it turns a request that is admitted into prompts and settings,
starts the runtime's streams, and sends what a serializer makes of their tokens. The APIs are `openai/`, `responses/`
and `anthropic/`: each translates its requests, and makes its responses.

`operations` declares each path once, for the routes and for the OpenAPI description; `context` is the state that all
requests share, admission included; `errors` makes error responses; `grammars/` compiles JSON schemas; `models/` loads
and unloads the models. `reports` tells of models and requests, also to Prometheus; `timelines` records streams that a
client watches. `page/` and `docs/` are the web pages.
"""
