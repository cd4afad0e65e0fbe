"""KV cache in Valkey or Redis."""
