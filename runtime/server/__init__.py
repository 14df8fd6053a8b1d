"""The HTTP server: OpenAI's API and web pages, over a runtime. It needs the extra `serve`.

A request passes through `connections/` (HTTP over trio), `access_log`, `middleware` (host names, API key) and `app`
(the routes). `generation_endpoints` reads the body, asks `admission` whether the request may run, and starts the
runtime's stream. `openai/` has the bodies of requests and responses and the API's description; `errors` makes error
responses; `grammars/` compiles JSON schemas. `metrics` counts for Prometheus, `timelines` records streams that a client
watches, and `background` is the interface to threads. `page/` and `docs/` are the web pages.

A new endpoint gets a route in `app`, with types of its request and its responses. Endpoints of OpenAI's, such as
`/v1/responses`, belong in `openai/`; those of another API, such as Anthropic's `/v1/messages`, in a package beside it.
What serves several APIs, such as `generation_endpoints`, stays here.
"""
