"""Follow a folder of versions: stage its current version, with no publisher alive."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from wtransfer.calls import forget_frames
from wtransfer.checkpoint.versions import CURRENT_NAME, VersionStore
from wtransfer.errors import AddressError, RoundAbortedError, WTransferError
from wtransfer.registry import hooks
from wtransfer.transport.layout import TensorLayout
from wtransfer.transport.memory import require_memory
from wtransfer.weight_sync.messages import Ack, Lost
from wtransfer.weight_sync.worker.hosted import engine_error
from wtransfer.weight_sync.worker.ledger import Held, Pending
from wtransfer.weight_sync.worker.schema import canonical_names, check_fit, check_whole
from wtransfer.weight_sync.worker.staging import Staging

if TYPE_CHECKING:
    from collections.abc import Mapping

    import msgspec

    from wtransfer.checkpoint.versions import Version
    from wtransfer.engines.interface import TensorSpec
    from wtransfer.weight_sync.worker.session import WorkerSession

logger = logging.getLogger(__name__)

SCHEME = "file:"
"""How addresses of folders begin."""
POLL_S = 0.5
"""Seconds between two looks at ``current.json``."""
RETRY_S = 2.0
"""Wait after the first failure with a version, in seconds; each further one doubles it."""
MAX_RETRY_S = 60.0
"""Longest wait after a failure, in seconds."""
CLOSE_GRACE_S = 1.0
"""How long closing waits for the thread, which may hang in a share that does not answer."""

Look = tuple[int, int, int]
"""Identity of a ``current.json``: inode, time of change, size."""


@dataclass
class Attempts:
    """State of one ``current.json``: tried, offered, settled."""

    look: Look
    """Identity of the file."""
    settled: bool = False
    """Whether its current version was committed or declined."""
    num_failed: int = 0
    """Failures in a row."""
    again_at: float = 0.0
    """When to try again, in monotonic seconds."""
    offered: str | None = None
    """Round in which the version was offered, until its ack."""

    @property
    def due(self) -> bool:
        """Whether to try now."""
        idle = not self.settled and self.offered is None
        return idle and time.monotonic() >= self.again_at

    def failed(self) -> None:
        """Wait before the next attempt, longer each time."""
        self.offered = None
        wait_s = min(RETRY_S * 2**self.num_failed, MAX_RETRY_S)
        self.num_failed += 1
        self.again_at = time.monotonic() + wait_s


class Follower:
    """Watches a folder of versions until closed, and brings its session to the current one.

    A version is offered once per change of ``current.json``. While a publisher is connected it
    decides what the worker holds, and the folder may be a round behind: then only a worker that
    holds no version yet takes one from the folder.

    Args:
        session: Receives the versions; its ledger decides when it may be changed.
        address: ``file:/absolute/path`` of the folder. It need not exist yet.

    Raises:
        AddressError: Not such an address.

    Cost: one look at the file's metadata twice a second. Clients of a share may cache that for half
    a minute.
    """

    def __init__(self, session: WorkerSession, address: str) -> None:
        self.address = address
        self.num_dropped = 0
        self.refusal: Exception | None = None
        """Why the current version is not taken; None if it was, or nothing was tried."""
        self._store = VersionStore(folder_of(address))
        self._session = session
        self._ledger = session.ledger
        self._connected = False
        self._attempts: Attempts | None = None
        # Rounds of which observers have seen the start: their labels; and those that have ended.
        self._rounds: dict[str, str] = {}
        self._ended: deque[tuple[str, WTransferError]] = deque()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="wtransfer-follow", daemon=True)
        self._thread.start()

    @property
    def connected(self) -> bool:
        """Whether there was a current version at the last look."""
        return self._connected

    def send(self, message: msgspec.Struct) -> None:
        """Take the ack of an offered version, or the news that it was lost."""
        attempts = self._attempts
        if isinstance(message, Lost) and attempts is not None and attempts.settled:
            attempts.settled, attempts.offered = False, None
        if not isinstance(message, Ack):
            return
        error = None if message.error is None else message.error.rebuild()
        if message.outcome == "committed":
            # There are no other ranks, so no rollback can follow. The session tells observers.
            self._ledger.release(message.round_id)
            self._rounds.pop(message.round_id, None)
        else:
            # Observers may be slow: they are called on the follower's thread.
            declined = RoundAbortedError("the host of the model declined the version")
            self._ended.append((message.round_id, error or declined))
        if attempts is None or attempts.offered != message.round_id:
            # Of a version that is not the current one any more.
            return
        if message.outcome in ("committed", "discarded"):
            attempts.settled = True
        else:
            self.refusal = error
            attempts.failed()

    def close(self) -> None:
        """Stop watching; an offered version can still be committed while the session is open."""
        self._closed.set()
        self._thread.join(CLOSE_GRACE_S)

    # -- on the follower's thread

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._look()
            except BaseException as error:
                self._refuse(error)
            self._closed.wait(POLL_S)
            while self._ended:
                self._notify_aborted(*self._ended.popleft())
        for round_id in list(self._rounds) if self._ledger.closed else ():
            self._notify_aborted(round_id, RoundAbortedError("the worker session was closed"))

    def _look(self) -> None:
        look = _look_at(self._store.root / CURRENT_NAME)
        self._connected = look is not None
        if look is None:
            return
        if self._attempts is None or self._attempts.look != look:
            self._attempts = Attempts(look)
        attempts = self._attempts
        if not attempts.due or self._ledger.busy:
            return
        versions = self._store.versions()
        with self._ledger.changed:
            # In one step: a loss in between would be settled with it.
            current = not versions or versions[-1].fingerprint == self._session.fingerprint
            attempts.settled = current
        if current:
            self.refusal = None
        elif self._session.version is None or not self._session.has_publisher:
            self._take(versions[-1], attempts)

    def _take(self, version: Version, attempts: Attempts) -> None:
        begun, before = time.monotonic(), self._session.fingerprint
        round_id = secrets.token_hex(8)
        self._rounds[round_id] = version.version
        hooks.notify(
            "wtransfer_round_started",
            round_id=round_id,
            version=version.version,
            worker=self._session.name,
        )
        try:
            held, schema = self._stage(version)
            pending = Pending(
                self, round_id, held, {"transfer": time.monotonic() - begun}, schema=schema
            )
            with self._ledger.changed:
                # In one step: no publisher's round can begin in between; and none did before.
                self._check_undisturbed()
                if self._session.fingerprint != before:
                    raise RoundAbortedError("a publisher's round was committed meanwhile")
                attempts.offered, self.refusal = round_id, None
                self._ledger.offer(pending)
        except BaseException as error:
            ours = _as_ours(error)
            self._notify_aborted(round_id, ours)
            raise ours from error

    def _stage(self, version: Version) -> tuple[Held, Mapping[str, TensorSpec] | None]:
        """Read a version, and prove that it is what was committed."""
        source = self._store.source(version)
        assert source.manifest is not None
        manifest = source.manifest.manifest
        found, casts = self._session.schema(), ""
        # A copy: what a target returns may be its own, and change.
        schema = None if found is None else dict(found)
        if schema is None:
            check_whole(manifest)
        else:
            casts = check_fit(
                manifest, schema, cast=self._session.cast, cast_hint=self._session.cast_hint
            )
        require_memory(manifest.nbytes, f"staging version {version.version!r}")
        layout = TensorLayout(manifest)
        staging = Staging(layout, copies=False, on_progress=self._check_undisturbed)
        for pair in source.iter_full():
            staging.load_weights([pair])
        staging.verify(source.manifest.digests, canonical_names(schema or {}))
        held = Held(
            version.version, version.fingerprint, manifest, staging.tensors, "digests", casts
        )
        return held, schema

    def _check_undisturbed(self, _nbytes: int = 0) -> None:
        # A live publisher makes the folder needless; and there may be no memory for both.
        if self._ledger.busy or self._closed.is_set():
            raise RoundAbortedError("a publisher's round has begun, or the worker leaves")

    def _notify_aborted(self, round_id: str, error: WTransferError) -> None:
        version = self._rounds.pop(round_id, None)
        if version is not None:
            facts = {"round_id": round_id, "version": version, "worker": self._session.name}
            error.add_facts(**facts)
            hooks.notify("wtransfer_round_aborted", error=error, **facts)

    def _refuse(self, error: BaseException) -> None:
        forget_frames(error)
        attempts = self._attempts
        if isinstance(error, RoundAbortedError) or attempts is None:
            return
        attempts.failed()
        ours = _as_ours(error)
        if ours.message != getattr(self.refusal, "message", None):
            logger.warning(
                "%s refuses the version in %s: %s", self._session.name, self._store.root, ours
            )
        self.refusal = ours


def is_folder(address: str) -> bool:
    """Return whether an address means a folder of versions, not a publisher."""
    return address.startswith(SCHEME)


def folder_of(address: str) -> Path:
    """Return the folder that an address means.

    Raises:
        AddressError: It is not absolute, or no path.
    """
    path = address[len(SCHEME) :]
    if not path.startswith("/") or "\0" in path:
        raise AddressError(f"{address!r} is no address of a folder; expected 'file:/absolute/path'")
    return Path(os.path.normpath(path))


def _look_at(file: Path) -> Look | None:
    try:
        status = file.stat()
    except OSError:
        # Not there yet, or not mounted at the moment.
        return None
    return (status.st_ino, status.st_mtime_ns, status.st_size)


def _as_ours(error: BaseException) -> WTransferError:
    if isinstance(error, WTransferError):
        return error
    return engine_error("reading a version", error, "engines:file")
