"""Blocks between a cache and the arena: in the background, and proven."""
