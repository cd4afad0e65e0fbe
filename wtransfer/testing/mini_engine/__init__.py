"""A small serving engine with vLLM's contract for connectors: the host of their tests."""
