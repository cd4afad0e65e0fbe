"""KV cache: what connectors and specs both do to keys and bytes."""
