"""Workers behind HTTP: server and client."""
