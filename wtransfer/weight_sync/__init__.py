"""The version that each worker holds: rounds on both sides, over the control channel."""
