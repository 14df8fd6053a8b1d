"""The HTTP server: OpenAI's and Anthropic's APIs and web pages, over a runtime. It needs the extra `serve`.

A request passes through `connections/` (HTTP over trio), `middleware` (access log, host names, API key) and `app`,
which has the routes. `answers/` is of no API: it has `admission` say whether the request may run, makes prompts and
settings of it, starts the runtime's streams, and sends what a serializer makes of their tokens. The APIs are `openai/`,
`responses/` and `anthropic/`: each translates its requests, and makes its responses.

`operations` has what is said of each path, for the routes and for the description; `context` what all requests share;
`errors` makes error responses; `grammars/` compiles JSON schemas; `models/` loads and unloads the models;
`fair_threads` does what would hold up trio's thread. `metrics` counts for Prometheus, `timelines` records streams that
a client watches. `page/` and `docs/` are the web pages.
"""
