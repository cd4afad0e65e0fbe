"""KV cache from one serving instance to another."""
