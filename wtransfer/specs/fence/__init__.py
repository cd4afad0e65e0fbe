"""The fence around any spec: what it notes, and both of its sides."""
