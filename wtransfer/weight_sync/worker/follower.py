"""Follow a folder of versions: its current version passes the steps of a publisher's round."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from wtransfer.calls import Flag, forget_frames
from wtransfer.checkpoint.versions import CURRENT_NAME, VersionStore
from wtransfer.engines.border import engine_error
from wtransfer.errors import AddressError, WTransferError
from wtransfer.weight_sync.messages import (
    Ack,
    Commit,
    Compare,
    Data,
    Fault,
    Lost,
    Plan,
    Prepare,
    Refuse,
    Vote,
)
from wtransfer.weight_sync.worker.engine_runner import EngineRunner
from wtransfer.weight_sync.worker.participant import Member, Participant

if TYPE_CHECKING:
    import msgspec

    from wtransfer.checkpoint.source import ManifestFile
    from wtransfer.checkpoint.versions import Version
    from wtransfer.weights import LoadWeights

logger = logging.getLogger(__name__)

SCHEME = "file:"
"""Prefix of folder addresses."""
POLL_S = 0.5
"""Seconds between two looks at ``current.json``."""
RETRY_S = 2.0
"""Wait after the first failure with a version, in seconds; doubled by each further failure."""
MAX_RETRY_S = 60.0
"""Longest wait after a failure, in seconds."""
CLOSE_GRACE_S = 1.0
"""Seconds that closing waits for the thread, which may hang in a share that does not answer."""

FileIdentity = tuple[int, int, int]
"""Identity of a ``current.json``: inode, time of change, size."""


@dataclass
class Attempts:
    """State of one ``current.json``: tried, offered, settled."""

    identity: FileIdentity
    """Identity of the file."""
    settled: bool = False
    """True if its current version was committed or declined."""
    num_failed: int = 0
    """Failures in a row."""
    again_at: float = 0.0
    """When to try again, in monotonic seconds."""
    round_id: str | None = None
    """Round in which the version is staged or pending."""
    offered: ManifestFile | None = None
    """Manifest of that round's version, until the worker's vote."""

    @property
    def due(self) -> bool:
        """True if an attempt is due now."""
        idle = not self.settled and self.round_id is None
        return idle and time.monotonic() >= self.again_at

    def failed(self) -> None:
        """Wait before the next attempt, longer each time."""
        self.round_id = None
        wait_s = min(RETRY_S * 2**self.num_failed, MAX_RETRY_S)
        self.num_failed += 1
        self.again_at = time.monotonic() + wait_s


class VersionReader:
    """Reads a version as an engine would receive it."""

    name: ClassVar[str] = "file"
    tensors_valid_until: ClassVar[str] = "round"
    writes_after_return: ClassVar[bool] = False
    allocates: ClassVar[bool] = True

    def receive_weights(self, update_info: dict[str, Any], load_weights: LoadWeights) -> None:
        """Read every tensor; stops between two of them when the round has ended."""
        for pair in update_info["source"].iter_full():
            load_weights([pair])

    def shutdown(self) -> None:
        """Do nothing: nothing is open between two calls."""


class Follower:
    """Watches a folder of versions until closed, and offers its worker the current version.

    A follower is a publisher in the same process: its messages and the worker's answers are those
    of a round, so a version on disk passes the same checks. A version is offered once per change of
    ``current.json``.

    Args:
        member: Receives the versions.
        address: ``file:/absolute/path`` of the folder, which need not exist yet.

    Raises:
        AddressError: Not such an address.

    Cost: one look at the file's metadata twice a second. Clients of a share may cache that for half
    a minute.
    """

    def __init__(self, member: Member, address: str) -> None:
        self.address = address
        self.connected_since: float | None = None
        self.refusal: Exception | None = None
        """Why the current version is refused; None if it was accepted, or before an attempt."""
        self._store = VersionStore(folder_of(address))
        self._member = member
        self._state = member.weight_state
        self._runner = EngineRunner(0, 1, None, VersionReader())
        self._participant = Participant(member, self, self._runner, self._refuse)
        self._attempts: Attempts | None = None
        self._closed = Flag()
        self._thread = threading.Thread(target=self._run, name="wtransfer-follow", daemon=True)

    def start(self) -> None:
        """Watch."""
        self._thread.start()

    @property
    def connected(self) -> bool:
        """True if there was a current version at the last look."""
        return self.connected_since is not None

    def send(self, message: msgspec.Struct) -> None:
        """Take the worker's answer; on any of its threads."""
        with self._state.changed:
            attempts = self._attempts
            if attempts is None:
                return
            if isinstance(message, Lost):
                attempts.settled = False
            elif attempts.round_id != getattr(message, "round_id", None):
                pass  # about a version that is not the current one any more
            elif isinstance(message, Vote):
                offered, attempts.offered = attempts.offered, None
                assert offered is not None, "a worker votes once in a round"
                if message.fingerprint != offered.fingerprint:
                    self._participant.handle(Compare(message.round_id, offered.digests))
                else:
                    self.refusal = None
                    self._participant.handle(Commit(message.round_id))
            elif isinstance(message, (Refuse, Fault)):
                attempts.failed()
            elif isinstance(message, Ack) and message.outcome in ("committed", "discarded"):
                attempts.settled, attempts.round_id = True, None
            elif isinstance(message, Ack):
                attempts.failed()
                self.refusal = None if message.error is None else message.error.rebuild()

    def close(self) -> None:
        """Stop watching; a version that is pending can still be committed."""
        self._closed.set()
        self._participant.ended(self._state.end_round("the worker leaves"))
        self._thread.join(CLOSE_GRACE_S)
        self._runner.shutdown()
        self.connected_since = None

    # -- on the follower's thread

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._look()
            except BaseException as error:
                forget_frames(error)
                ours = error if isinstance(error, WTransferError) else None
                self._refuse(ours or engine_error("reading a version", error, "engines:file"))
                if self._attempts is not None:
                    self._attempts.failed()
            self._closed.wait(POLL_S)

    def _look(self) -> None:
        identity = _identity(self._store.root / CURRENT_NAME)
        if identity is None:
            self.connected_since = None
            return
        self.connected_since = self.connected_since or time.monotonic()
        with self._state.changed:
            if self._attempts is None or self._attempts.identity != identity:
                self._attempts = Attempts(identity)
            attempts = self._attempts
            if not attempts.due or self._state.busy:
                return
        versions = self._store.versions()
        with self._state.changed:
            # Under one lock: a loss of the weights in between would be marked as settled.
            held = self._state.held.fingerprint
            attempts.settled = not versions or versions[-1].fingerprint == held
        if attempts.settled:
            self.refusal = None
        else:
            self._offer(versions[-1], attempts)

    def _offer(self, version: Version, attempts: Attempts) -> None:
        source = self._store.source(version)
        assert source.manifest is not None
        with self._state.changed:
            if self._closed.is_set():
                return
            # Under one lock: `close` ends a round that was planned before it.
            round_id = attempts.round_id = secrets.token_hex(8)
            attempts.offered = source.manifest
            self._participant.handle(Plan(round_id, version.version, source.manifest.manifest))
        # The engine's thread takes messages in order; after a failed one the rest are dropped.
        self._participant.handle(Data(round_id, 0, {"source": source}))
        self._participant.handle(Prepare(round_id, source.manifest.fingerprint))

    def _refuse(self, error: WTransferError) -> None:
        if error.message != getattr(self.refusal, "message", None):
            logger.warning(
                "%s refuses the version in %s: %s", self._member.name, self._store.root, error
            )
        self.refusal = error


def is_folder(address: str) -> bool:
    """Return whether an address means a folder of versions, not a publisher."""
    return address.startswith(SCHEME)


def folder_of(address: str) -> Path:
    """Return the folder that an address means.

    Raises:
        AddressError: The path is not absolute, or no path.
    """
    path = address[len(SCHEME) :]
    if not path.startswith("/") or "\0" in path:
        raise AddressError(f"{address!r} is no address of a folder; expected 'file:/absolute/path'")
    return Path(os.path.normpath(path))


def _identity(file: Path) -> FileIdentity | None:
    try:
        status = file.stat()
    except OSError:
        # The file is not there yet, or the share is not mounted at the moment.
        return None
    return (status.st_ino, status.st_mtime_ns, status.st_size)
