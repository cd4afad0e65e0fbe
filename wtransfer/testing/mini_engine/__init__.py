"""A reference serving host: a small transformer with a paged KV cache, served step by step."""
