"""Names to classes: find backends, load each once, check them, notify observers."""
