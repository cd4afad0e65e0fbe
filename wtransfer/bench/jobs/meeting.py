"""How two processes of a scene find each other: a line at the scene's address."""

from __future__ import annotations

import contextlib
import socket
import time
from typing import TYPE_CHECKING

from wtransfer.deadline import Deadline
from wtransfer.errors import StallError
from wtransfer.testing.mini_engine.channel import PATIENCE_S, Channel
from wtransfer.transport.address import check_same_user, parse_address

if TYPE_CHECKING:
    from collections.abc import Iterator

_RETRY_S = 0.01


@contextlib.contextmanager
def answer(address: str, name: str) -> Iterator[Channel]:
    """Yield the line to the first one that calls.

    Args:
        address: Where; an abstract Unix socket.
        name: Of the other end, for errors.

    Raises:
        StallError: Nobody calls.
    """
    with _unix_socket() as listener:
        listener.bind(parse_address(address).target)
        listener.listen(1)
        listener.settimeout(PATIENCE_S)
        try:
            connection, _ = listener.accept()
        except TimeoutError as error:
            raise StallError(
                f"{name} did not call within {PATIENCE_S:g} s", seconds=PATIENCE_S
            ) from error
    with _line(connection, name) as line:
        yield line


@contextlib.contextmanager
def call(address: str, name: str) -> Iterator[Channel]:
    """Yield the line to the one that answers, perhaps not at once.

    What fails meanwhile is raised at the other end, too.

    Args:
        address: Where; an abstract Unix socket.
        name: Of the other end, for errors.

    Raises:
        StallError: Nobody answers.
    """
    deadline, target = Deadline(PATIENCE_S), parse_address(address).target
    with _unix_socket() as connection:
        while True:
            try:
                connection.connect(target)
                break
            except ConnectionRefusedError:
                deadline.check(f"an answer of {name}")
                time.sleep(_RETRY_S)
        with _line(connection, name) as line:
            yield line


@contextlib.contextmanager
def _line(connection: socket.socket, name: str) -> Iterator[Channel]:
    check_same_user(connection)
    line = Channel(connection, name)
    # A round takes as long as it takes; the scene has a deadline, and an end that dies is noticed.
    line.wait_forever()
    try:
        yield line
    except Exception as error:
        if not line.is_lost:
            line.send_error(error)
        raise
    finally:
        line.close()


def _unix_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
