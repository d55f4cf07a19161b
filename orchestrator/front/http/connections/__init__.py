"""Connections of HTTP clients: the server, and HTTP/1.1 and WebSockets on one connection."""
