"""The parts of ``MultiConnector``."""
