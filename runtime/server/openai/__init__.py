"""OpenAI's API: request and response bodies, and their description.

`requests` has the types of request bodies, `responses` those of responses and chunks. `serializers` makes responses
from tokens, with `reasoning` to separate the reasoning from the answer, and `event_stream` sends them. `openapi` makes
the description of the API from the same types.

To add `/v1/responses`: its types in `requests` and `responses`, a `Serializer`, a route in `runtime.server.app`, and
its operation in `openapi`. To add tool calling: the field `tools` in `requests`, tool calls in the messages and deltas
of `responses`, and their parser beside `reasoning`, called by `ChatSerializer`.
"""
