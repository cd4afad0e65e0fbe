"""The bench: what moving weights and KV cache costs here, each number beside its goal."""
