"""A worker's side of a folder of versions: it takes the current one, with no publisher alive."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from wtransfer.checkpoint.stored import buckets
from wtransfer.checkpoint.versions import CURRENT_NAME, open_version, read_listing
from wtransfer.errors import AddressError, RoundAbortedError, WTransferError
from wtransfer.registry import hooks
from wtransfer.transport.files import Folder
from wtransfer.transport.memory import require_memory
from wtransfer.weight_sync.messages import Lost, Receipt
from wtransfer.weight_sync.worker.hosted import engine_error, forget_frames
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
"""What tells one ``current.json`` from another: inode, time of change, size."""


@dataclass
class Attempts:
    """How it went with one ``current.json``."""

    look: Look
    """Which."""
    settled: bool = False
    """Whether nothing is to be done about it any more."""
    num_failed: int = 0
    """Failures in a row."""
    again_at: float = 0.0
    """When to try again, in monotonic seconds."""
    offered: str | None = None
    """Round in which it was offered, while that one's receipt is awaited."""

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

    It goes by changes of ``current.json``: what was taken, or declined, is not offered again. While
    a publisher is reached, what the worker has is that one's affair, whose folder may be a round
    behind: only a worker that has nothing yet takes a version then.

    Args:
        session: Says what the worker is; its ledger decides when it may be changed.
        address: ``file:/absolute/path`` of the folder. It need not be there yet.

    Raises:
        AddressError: Not such an address.

    Cost: one look at the file's metadata twice a second. On a share, clients may keep what they
    know of a file for half a minute.
    """

    def __init__(self, session: WorkerSession, address: str) -> None:
        self.address = address
        self.num_dropped = 0
        self.refusal: Exception | None = None
        """Why the current version is not taken; None if it was, or nothing was tried."""
        self._root = folder_of(address)
        self._session = session
        self._ledger = session.ledger
        self._connected = False
        self._attempts: Attempts | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="wtransfer-follow", daemon=True)
        self._thread.start()

    @property
    def connected(self) -> bool:
        """Whether there was a current version at the last look."""
        return self._connected

    def send(self, message: msgspec.Struct) -> None:
        """Learn what became of an offered version, or that it is not held any more."""
        attempts = self._attempts
        if isinstance(message, Lost) and attempts is not None and attempts.settled:
            attempts.settled, attempts.offered = False, None
        if not isinstance(message, Receipt):
            return
        if message.outcome == "committed":
            # Nobody will ask to go back: there are no other ranks.
            self._ledger.release(message.round_id)
        if attempts is None or attempts.offered != message.round_id:
            # Of a version that is not the current one any more.
            return
        if message.outcome in ("committed", "discarded"):
            attempts.settled = True
        else:
            self.refusal = None if message.error is None else message.error.rebuild()
            attempts.failed()

    def close(self) -> None:
        """Stop watching; what was offered can still be committed."""
        self._closed.set()
        self._thread.join(CLOSE_GRACE_S)

    # -- on its own thread

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._look()
            except BaseException as error:
                self._refuse(error)
            self._closed.wait(POLL_S)

    def _look(self) -> None:
        look = _look_at(self._root / CURRENT_NAME)
        self._connected = look is not None
        if look is None:
            return
        if self._attempts is None or self._attempts.look != look:
            self._attempts = Attempts(look)
        if self._attempts.due and not self._ledger.busy:
            self._try(self._attempts)

    def _try(self, attempts: Attempts) -> None:
        with Folder(self._root) as root:
            versions = read_listing(root)
            with self._ledger.changed:
                # In one step: a loss in between would be settled with it.
                current = not versions or versions[-1].fingerprint == self._session.fingerprint
                attempts.settled = current
            if current:
                self.refusal = None
            elif self._session.version is None or not self._session.has_publisher:
                self._take(root, versions[-1], attempts)

    def _take(self, root: Folder, version: Version, attempts: Attempts) -> None:
        begun, before = time.monotonic(), self._session.fingerprint
        round_id = secrets.token_hex(8)
        facts = {"round_id": round_id, "version": version.version, "worker": self._session.name}
        hooks.notify("wtransfer_round_started", **facts)
        try:
            held, schema = self._stage(root, version)
        except BaseException as error:
            ours = _as_ours(error)
            ours.add_facts(**facts)
            hooks.notify("wtransfer_round_aborted", error=ours, **facts)
            raise ours from error
        seconds = {"transfer": time.monotonic() - begun}
        with self._ledger.changed:
            # In one step: no publisher's round can come in between; and none came before.
            undisturbed = not self._ledger.busy and self._session.fingerprint == before
            if undisturbed and not self._closed.is_set():
                attempts.offered, self.refusal = round_id, None
                self._ledger.offer(Pending(self, round_id, held, seconds, schema=schema))

    def _stage(
        self, root: Folder, version: Version
    ) -> tuple[Held, Mapping[str, TensorSpec] | None]:
        """Read the version and prove that it is what it was when it was committed."""
        folder, file = open_version(root, version)
        with folder:
            manifest = file.manifest
            # A copy: what a target hands out may be its own, and change.
            schema, casts = self._session.schema(), ""
            schema = None if schema is None else dict(schema)
            if schema is None:
                check_whole(manifest)
            else:
                casts = check_fit(
                    manifest, schema, cast=self._session.cast, cast_hint=self._session.cast_hint
                )
            require_memory(manifest.nbytes, f"staging version {version.version!r}")
            staging = Staging(manifest, copies=False, on_progress=self._check_undisturbed)
            for bucket in buckets(folder, file):
                staging.load_weights(bucket)
        staging.verify(file.digests, canonical_names(schema or {}))
        held = Held(version.version, file.fingerprint, manifest, staging.tensors, "digests", casts)
        return held, schema

    def _check_undisturbed(self, _nbytes: int) -> None:
        # Whoever has a live publisher needs no folder; and memory for both may not be there.
        if self._ledger.busy or self._closed.is_set():
            raise RoundAbortedError("a publisher's round has begun, or the worker leaves")

    def _refuse(self, error: BaseException) -> None:
        forget_frames(error)
        attempts = self._attempts
        if isinstance(error, RoundAbortedError) or attempts is None:
            return
        attempts.failed()
        ours = _as_ours(error)
        if ours.message != getattr(self.refusal, "message", None):
            logger.warning("%s refuses the version in %s: %s", self._session.name, self._root, ours)
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
