"""``wtransfer demo``: real processes, real training, real KV cache, and one process killed."""
