"""One end of a control channel in a process of its own, and the messages that the tests exchange.

Run as a script: ``dial ADDRESS`` or ``listen ADDRESS DEADLINE_S [fork]``, the token in
``WTRANSFER_TOKEN``. It sends every message back and writes one line on stdout for each thing that
happens.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import msgspec

from wtransfer.transport.channel import Codec, Dialer, Listener, MessageType, resolve_token

MIB = 1 << 20


class Note(msgspec.Struct):
    """A message with entries."""

    text: str = ""
    parts: list[bytes] = []

    def num_entries(self):
        """See `wtransfer.transport.framing.MessageType`."""
        return len(self.parts)


class Word(msgspec.Struct):
    """A message without entries."""

    text: str = ""


CODEC = Codec([MessageType(1, Note, 64 * MIB, max_entries=1000), MessageType(2, Word)])


def say(*words):
    """Write a line for the test to read."""
    print(*words, flush=True)  # noqa: T201 (stdout is how the test hears of it)


def callbacks():
    """Return callbacks that tell what happens and send notes back."""
    return {
        "on_open": lambda _connection: say("open"),
        "on_message": lambda connection, message: connection.send(message),
        "on_close": lambda _connection, error: say("close", type(error).__name__),
        "on_refused": lambda error: say("refused", type(error).__name__),
    }


def main():
    """Be one end until stdin ends."""
    token = resolve_token(None)
    if sys.argv[1] == "dial":
        end = Dialer(CODEC, address=sys.argv[2], token=token, **callbacks())
    else:
        deadline_s = float(sys.argv[3])
        end = Listener(
            CODEC, address=sys.argv[2], token=token, deadline_s=deadline_s, **callbacks()
        )
        say("address", end.address)
    if sys.argv[-1] == "fork":
        sys.stdin.readline()
        fork_a_bystander(end)
    sys.stdin.readline()
    end.close()


def fork_a_bystander(end):
    """Leave a child behind that tries to use what belongs to its parent, and then lingers."""
    pid = os.fork()
    if pid:
        return
    num_descriptors = sum(
        str(fd.readlink()).startswith(("socket:", "anon_inode:[event"))
        for fd in Path("/proc/self/fd").iterdir()
        if fd.is_symlink()
    )
    try:
        connection = next(iter(end._open))
        connection.send(Note("from the child"))
    except Exception as error:
        refusal = type(error).__name__
    else:
        refusal = "none"
    connection.close()
    end.close()
    say("child", os.getpid(), num_descriptors, refusal, connection.closed)
    signal.pause()


if __name__ == "__main__":
    main()
