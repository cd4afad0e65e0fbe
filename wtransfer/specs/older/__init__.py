"""Specs in the shape of the seed, as specs of today."""
