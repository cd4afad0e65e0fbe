"""wtransfer inside vLLM."""
