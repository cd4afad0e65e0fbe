"""Weights in files: shards, manifests, and folders of versions."""
