"""Connections: HTTP over trio, its limits and timeouts."""
