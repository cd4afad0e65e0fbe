"""Weights through a file."""
