"""Connections: HTTP over trio, with limits and timeouts.

`listener` accepts connections; `connection` speaks HTTP/1.1 with h11 and calls the ASGI application; `client` is for
the application: it reads a request's body and notices when the client leaves; `body_memory` bounds the memory of all
bodies together; `places` says which connection makes room for a new one, and `file_limit` how many the system allows;
`pieces` sends bytes with a timeout. TLS would belong in `listener`; endpoints belong in `runtime.server.app`.
"""
