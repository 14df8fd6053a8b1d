"""Connections: HTTP over trio, with its limits and timeouts.

`listener` accepts connections, `connection` speaks HTTP by h11 and calls the ASGI application, `client` is for the
application: it reads a request's body and notices when the client leaves.
"""
