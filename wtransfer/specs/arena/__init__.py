"""Slots of shared memory that the ranks of one host have in common."""
