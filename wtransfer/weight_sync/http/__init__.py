"""Workers behind HTTP: server, routes, client."""
