"""KV cache in files."""
