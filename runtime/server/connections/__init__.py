"""Connections: HTTP over trio, with limits and timeouts.

`connection` accepts connections, speaks HTTP/1.1 with h11 and calls the ASGI application. `address` checks addresses,
keys and numbers of connections from the command line.
"""
