"""Request bodies, in OpenAI's format, and the runtime's settings that they stand for.

A field that means something here is taken, also under the names that other servers have for it. One that means nothing
is ignored and named in a header of the response, or refused by a strict server. A value of the wrong type, or out of
its bounds, is an error, and so is one that asks for something unsupported.
"""

from runtime.server.openai.requests.chat import ChatRequest
from runtime.server.openai.requests.completions import CompletionRequest, FimRequest
from runtime.server.openai.requests.parsing import parse_request
from runtime.server.openai.requests.request import Request

__all__ = ["ChatRequest", "CompletionRequest", "FimRequest", "Request", "parse_request"]
