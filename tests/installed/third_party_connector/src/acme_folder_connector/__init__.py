"""A connector of a third party."""
