"""Tier ``mooncake`` of wtransfer: KV cache in the Mooncake store."""
