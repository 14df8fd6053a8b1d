"""The HTTP server: OpenAI's interface, and a page, over a runtime. It needs the extra `serve`."""
