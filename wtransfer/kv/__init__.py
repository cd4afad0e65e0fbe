"""KV cache: operations on keys and bytes that connectors and specs share."""
