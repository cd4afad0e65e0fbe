"""What torch keeps for the life of the process is made before a test is looked at."""

from __future__ import annotations

import pytest

from wtransfer.transport.rendezvous import host_rendezvous


@pytest.fixture(scope="session")
def libuv():
    """Let libuv, under torch's store, make the pipe that it keeps for the life of the process."""
    host_rendezvous("127.0.0.1").close()
