"""The host: find backends, load each once, check them, tell observers. Imports no room."""
