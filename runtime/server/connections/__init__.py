"""Connections: HTTP over trio, with limits and timeouts.

`listener` accepts connections, and says which one makes room for a new one; `connection` speaks HTTP/1.1 with h11 and
calls the ASGI application; `client` is for the application: it reads a request's body, within a bound on the memory of
all bodies, and notices when the client leaves. `address` checks what the command line says of addresses, keys and
numbers of connections. TLS would belong in `listener`; endpoints belong in `runtime.server.app`.
"""
