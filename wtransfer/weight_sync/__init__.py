"""Which worker holds which version: rounds on both sides, over the control channel."""
