"""The parts of ``SharedStorageConnector``."""
