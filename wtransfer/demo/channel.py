"""Messages between the demo's main process and its children, and both ends of their pipes.

Main writes commands to a child's standard input and reads reports from its standard output, one
JSON object per line. A closed standard input means "stop", so no child outlives main. Weights never
pass here. Times are seconds of `time.monotonic`, which all processes of a host share.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import tempfile
from threading import Thread
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, TypeAlias

import msgspec

from wtransfer.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from typing_extensions import Self

_TAIL_NBYTES = 4000


class Join(msgspec.Struct, frozen=True, tag=True):
    """To a worker: join the publisher."""

    address: str


class TakeDigest(msgspec.Struct, frozen=True, tag=True):
    """To a worker: digest the live model again."""


class Publish(msgspec.Struct, frozen=True, tag=True):
    """To the trainer: publish the weights as they are."""

    number: int
    """Number of the round, from 1."""
    hold: bool
    """Hold the transfer half way until `Resume`."""
    num_workers: int
    """Workers to wait for first."""


class Resume(msgspec.Struct, frozen=True, tag=True):
    """To the trainer: continue the held transfer."""


class Listening(msgspec.Struct, frozen=True, tag=True):
    """The publisher can be joined."""

    address: str
    num_parameters: int


class Trained(msgspec.Struct, frozen=True, tag=True):
    """One optimizer step was taken."""

    step: int
    """Counts from 1."""
    loss: float
    """Cross entropy, nats per byte."""


class Held(msgspec.Struct, frozen=True, tag=True):
    """Half of the tensors were handed to the engine; the transfer is held."""

    at: float
    num_sent: int
    num_tensors: int


class Receipt(msgspec.Struct, frozen=True):
    """One worker in the publisher's report."""

    worker: str
    outcome: str
    fingerprint: str
    digests_equal: bool
    waited_s: float
    """Seconds that the verified update waited for the worker's thread."""


class RoundOver(msgspec.Struct, frozen=True, tag=True):
    """A round was committed, or failed."""

    number: int
    version: str
    outcome: str
    """``committed``, ``mixed`` or ``aborted``."""
    step: int
    """Optimizer steps in the published weights."""
    loss: float
    digest: str
    """Digest of the trainer's live model, taken before the round."""
    memcpy_s: float
    """Seconds of a plain copy of as many bytes, just before the round."""
    started_at: float
    """Time of the call of ``publish``."""
    total_s: float = 0.0
    """Seconds from ``publish`` to the last receipt, or to the failure."""
    packed_s: float = 0.0
    """Seconds until the trainer could train on."""
    fingerprint: str | None = None
    nbytes: int = 0
    receipts: tuple[Receipt, ...] = ()
    error: str | None = None
    blamed: str | None = None
    """Worker that the error names."""
    failed_in: str | None = None
    """Phase that the error names."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A worker process has a session and begins to serve."""

    worker: str
    pid: int
    version: str | None
    fingerprint: str
    state: str


class Tokens(msgspec.Struct, frozen=True, tag=True):
    """Bytes were generated, all with the same weights."""

    worker: str
    version: str | None
    ended_at: tuple[float, ...]


class Applied(msgspec.Struct, frozen=True, tag=True):
    """A commit changed the weights; serving paused from `started_at` to `ended_at`."""

    worker: str
    version: str | None
    fingerprint: str
    started_at: float
    ended_at: float


class Proof(msgspec.Struct, frozen=True, tag=True):
    """The live model was digested."""

    worker: str
    version: str | None
    digest: str
    trained_steps: int
    """Optimizer steps according to the weights themselves."""
    tied: bool
    """Whether tied weights still share memory."""


class Sample(msgspec.Struct, frozen=True, tag=True):
    """Some of the text generated last."""

    worker: str
    version: str | None
    text: str


Command: TypeAlias = Join | TakeDigest | Publish | Resume
Report: TypeAlias = (
    Listening | Trained | Held | RoundOver | Ready | Tokens | Applied | Proof | Sample
)

_COMMANDS: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)
_REPORTS: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)


class Ended(NamedTuple):
    """A child's output ended, or is unreadable; no report follows."""

    child: Child
    error: Exception | None


class Child:
    """Main's end: a process that runs `wtransfer.demo.children`.

    Args:
        name: ``trainer``, or the name of a worker.
        millions: Size of the model, in million parameters.
        environ: Environment of the process.
        deliver: Called on a thread of its own with every report, and at last with `Ended`.
    """

    def __init__(
        self,
        name: str,
        millions: float,
        environ: Mapping[str, str],
        deliver: Callable[[Report | Ended], None],
    ) -> None:
        self.name = name
        self._deliver = deliver
        # An unlinked file, not a pipe: a pipe that is full would block the child.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # closed in `end`
        # A session of its own keeps the terminal's Ctrl-C from the child: main closes the pipe.
        self._process = subprocess.Popen(  # noqa: S603  # our own module, our own arguments
            [sys.executable, "-m", "wtransfer.demo.children", name, str(millions)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=environ,
            start_new_session=True,
        )
        self.pid = self._process.pid
        assert self._process.stdin is not None
        self._commands = self._process.stdin
        self._reader = Thread(target=self._read, name=f"demo-{name}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        error: Exception | None = None
        line = b""
        try:
            with self._process.stdout as lines:
                for line in lines:
                    self._deliver(_REPORTS.decode(line))
        except msgspec.MsgspecError as cause:
            error = ProtocolError(
                f"the demo's {self.name} wrote {line[:200]!r}, which is no report: {cause}"
            )
        except OSError as caught:
            error = caught
        self._deliver(Ended(self, error))

    def send(self, command: Command) -> None:
        """Send a command; it is dropped if the child has ended: `Ended` follows."""
        with contextlib.suppress(BrokenPipeError):
            self._commands.write(msgspec.json.encode(command) + b"\n")
            self._commands.flush()

    def ask_to_end(self) -> None:
        """Close the child's standard input."""
        with contextlib.suppress(BrokenPipeError):
            self._commands.close()

    def end(self, timeout_s: float) -> int:
        """Ask the child to end, and kill it if it does not; idempotent.

        Returns:
            Its exit status; negative: the signal that ended it.
        """
        self.ask_to_end()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
        status = self._process.wait()
        self._reader.join()
        self._stderr.close()
        return status

    def kill(self) -> None:
        """End the child with SIGKILL, and return when it is gone."""
        self._process.kill()
        self.end(0)

    def stderr_tail(self) -> str:
        """Return the end of what the child wrote to standard error."""
        if self._stderr.closed:
            return ""
        # Not `seek`: the child writes through the same file position.
        file = self._stderr.fileno()
        start = max(0, os.fstat(file).st_size - _TAIL_NBYTES)
        return os.pread(file, _TAIL_NBYTES, start).decode("utf-8", "replace").strip()


class StoppedError(Exception):
    """Main closed the pipe, or is gone: the process has to end."""


class Parent:
    """A child's end: commands come in on one thread, reports go out as lines."""

    def __init__(self, commands: BinaryIO, reports: BinaryIO) -> None:
        self._reports = reports
        # None stands for the end of the stream.
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        Thread(target=self._read, args=(commands,), name="demo-commands", daemon=True).start()

    @classmethod
    def of_stdio(cls) -> Self:
        """Take over standard input and output; what is printed later goes to standard error."""
        # A reader of its own: the interpreter takes the lock of `sys.stdin` when it ends, and
        # aborts if a thread still waits there.
        commands, reports = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)
        return cls(commands, reports)

    def _read(self, lines: BinaryIO) -> None:
        try:
            for line in lines:
                self._commands.put(_COMMANDS.decode(line))
        finally:
            self._commands.put(None)

    def wait(self, timeout_s: float | None = None) -> Command | None:
        """Return the next command, or None if none came in time.

        Raises:
            StoppedError: The stream has ended.
        """
        try:
            command = self._commands.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if command is None:
            # The next call, on any thread, has to see the end as well.
            self._commands.put(None)
            raise StoppedError
        return command

    def poll(self) -> Command | None:
        """Return the next command if there is one; raises as `wait`."""
        return None if self._commands.empty() else self.wait()

    def report(self, message: Report) -> None:
        """Send a report.

        Raises:
            StoppedError: Main is gone.
        """
        try:
            self._reports.write(msgspec.json.encode(message) + b"\n")
            self._reports.flush()
        except BrokenPipeError as error:
            raise StoppedError from error
