"""Weights on disk: safetensors files, manifests, folders of versions."""
