"""Connections: HTTP over trio, with limits and timeouts.

`listener` accepts connections, and closes idle ones to make room; `connection` speaks HTTP/1.1 with h11 and calls the
ASGI application; `client` reads the body of a request for the application, and notices when its client leaves.
`address` checks addresses, keys and numbers of connections from the command line.
"""
