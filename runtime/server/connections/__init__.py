"""Connections: HTTP over trio, with limits and timeouts.

`listener` accepts connections, and says which one makes room for a new one; `connection` speaks HTTP/1.1 with h11 and
calls the ASGI application; `client` is for the application: the body of a request, and whether its client leaves.
`address` checks what the command line says of addresses, keys and numbers of connections.
"""
