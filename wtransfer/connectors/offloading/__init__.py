"""Connector ``OffloadingConnector``: KV cache to a cheaper tier and back, by an offloading spec."""
