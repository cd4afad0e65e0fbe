"""Weights: from a trainer to its workers. Entry-point group ``wtransfer.engines``."""
