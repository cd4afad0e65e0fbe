"""Stands in for vLLM: the signatures that matter, as published."""
