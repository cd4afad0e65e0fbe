"""Name KV cache by the checkpoint that a serving engine has loaded, until other weights come.

A worker that has loaded a checkpoint from disk names its KV cache by the fingerprint that a push of
that checkpoint would have. So instances that have loaded equal weights share KV, a restarted
instance finds the KV that it has stored, and so does one that has received the same weights.

The fingerprint is read from the checkpoint's seal, or worked out once on a host and kept in a
folder of this user (``WTRANSFER_CACHE``, else ``$XDG_CACHE_HOME/wtransfer``, else
``~/.cache/wtransfer``), where it is believed for as long as the files are the same.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import xxhash

from wtransfer.checkpoint.file_state import FileState, file_states
from wtransfer.checkpoint.safetensors import INDEX_NAME, SUFFIX
from wtransfer.checkpoint.source import MANIFEST_NAME, CheckpointSource, Digest, describe
from wtransfer.errors import SourceError, StorageError, WTransferError
from wtransfer.manifest import local_fingerprint
from wtransfer.transport.files import Folder, FolderLock, storage_errors, temporary_of
from wtransfer.weight_version import process_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from wtransfer.weight_version import Vouch

logger = logging.getLogger(__name__)

VARIABLE = "WTRANSFER_CACHE"
"""Environment variable: the cache folder."""
LOCK_PATIENCE_S = 600.0
"""Longest wait for another process that reads the same checkpoint, in seconds."""
_CHECKPOINTS = "checkpoints"
_NAME = "fingerprint.json"
_MAX_NBYTES = 16 << 20


def vouch_for_checkpoint(
    model: object, find: Callable[[], Path], log: logging.Logger = logger
) -> None:
    """Name this process's KV cache by the checkpoint that its model was loaded from. Never raises.

    Called once in each worker process, right after the model was loaded and before any request.

    A sealed checkpoint's fingerprint is in its ``wtransfer.json``. The fingerprint of another is
    worked out in the background, by one process of the host, and stored for all; until it is known,
    the process has no weight version, and shares KV with no other. A commit, or
    `ProcessWeights.weights_replaced`, in the meantime counts. Where the fingerprint cannot be known
    (no files, or a file that cannot be read), KV cache has a name that only this process knows, and
    the log says why.

    Args:
        model: The model, or another object that lives as long and stands for it; not kept.
        find: Returns the folder of its files; may raise, where they do not stand for its weights.
        log: Has the outcome: an engine may show the lines of its own loggers only.
    """
    try:
        vouch = process_weights.vouch_later(model)
    except Exception as error:
        log.warning("nothing is vouched for: %s", error)
        return
    try:
        files = CheckpointFiles(find())
        known = files.known_fingerprint()
        if known is None:
            threading.Thread(
                target=_work_out, args=(vouch, files, log), name="wtransfer-vouch", daemon=True
            ).start()
        else:
            vouch.settle(known)
            log.info("the weights loaded from %s are known to be %s", files.folder, known)
    except Exception as error:
        _give_up(vouch, error, log)


def _work_out(vouch: Vouch, files: CheckpointFiles, log: logging.Logger) -> None:
    begun = time.monotonic()
    try:
        found = files.fingerprint()
        vouch.settle(found)
    except Exception as error:
        _give_up(vouch, error, log)
    else:
        seconds = time.monotonic() - begun
        log.info("the weights loaded from %s are %s (%.1f s)", files.folder, found, seconds)


def _give_up(vouch: Vouch, error: Exception, log: logging.Logger) -> None:
    vouch.settle(local_fingerprint())
    log.warning(
        "KV cache is not shared with other processes until the next weight update: %s", error
    )


class Known(msgspec.Struct, frozen=True):
    """The file of the cache."""

    format: Literal["wtransfer-fingerprint/1"]
    """Name and version of this format."""
    folder: str
    """Folder of the checkpoint."""
    files: list[FileState]
    """The files that were digested."""
    fingerprint: Digest
    """Identity of the weights, as a push of the checkpoint has it."""


class CheckpointFiles:
    """The files of a checkpoint as they are at this moment, and their fingerprint.

    Args:
        folder: Folder of the files.

    Raises:
        SourceError: The files cannot be looked at.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(os.path.realpath(folder))
        """Folder of the files, without links."""
        self.states = self._look()
        """Their states, by name."""

    def _look(self) -> list[FileState]:
        index = self.folder / INDEX_NAME
        return file_states([*self.folder.glob(f"*{SUFFIX}"), *([index] if index.exists() else [])])

    def known_fingerprint(self) -> str | None:
        """Return the fingerprint if it is known without reading the tensors.

        Cost: reads the headers of a sealed checkpoint; else one small file.
        """
        with contextlib.suppress(WTransferError, OSError):
            source = CheckpointSource(self.folder)
            self._check_all_read(source)
            if source.manifest is not None:
                seal = FileState.of(self.folder / MANIFEST_NAME)
                # A file that was written, or put there, after the seal may be something else; and
                # within one tick of the kernel's clock the order is unknown.
                if all(
                    each.mtime_ns <= seal.mtime_ns and each.ctime_ns < seal.ctime_ns
                    for each in self.states
                ):
                    return source.manifest.fingerprint
        with contextlib.suppress(WTransferError), self._opened_cache() as cache:
            return self._stored(cache)
        return None

    def fingerprint(self) -> str:
        """Work the fingerprint out and store it, unless another process has done so meanwhile.

        Raises:
            SourceError: The folder holds no checkpoint, cannot be read, or was changed since the
                first look.
            ManifestError: The checkpoint names something that no update can hold.

        Cost: reads every tensor once, and waits for another process of this host that does.
        """
        with contextlib.ExitStack() as stack:
            try:
                cache = stack.enter_context(self._opened_cache())
                stack.callback(FolderLock(cache, LOCK_PATIENCE_S).release)
            except WTransferError as error:
                logger.warning("no other process will know the checkpoint's digests: %s", error)
                return self._digested()
            known = self._stored(cache)
            if known is None:
                known = self._digested()
                try:
                    # Files of killed writers: under the lock there is no other writer.
                    cache.sweep(lambda name: temporary_of(name) is not None)
                    cache.replace(_NAME, msgspec.json.encode(self._entry(known)))
                except WTransferError as error:
                    logger.warning("no other process will know the checkpoint's digests: %s", error)
            return known

    def _digested(self) -> str:
        source = CheckpointSource(self.folder, sealed=False)
        self._check_all_read(source)
        found = describe(source).fingerprint
        if self._look() != self.states:
            raise SourceError(f"{str(self.folder)!r} was changed after the model was loaded")
        return found

    def _check_all_read(self, source: CheckpointSource) -> None:
        """Raise unless the files that the engine has read are known."""
        more = {self.folder / state.name for state in self.states} - source.files
        more.discard(self.folder / INDEX_NAME)
        if more:
            raise SourceError(
                f"{str(self.folder)!r} has safetensors files beside those of its checkpoint, first "
                f"{min(more).name!r}; which of them were loaded is not known"
            )

    def _stored(self, cache: Folder) -> str | None:
        # A damaged file, or no file, counts as none: it will be replaced.
        with contextlib.suppress(WTransferError, msgspec.DecodeError, UnicodeDecodeError):
            raw = cache.read(_NAME, _MAX_NBYTES)
            known = None if raw is None else msgspec.json.decode(raw, type=Known)
            if known is not None and known == self._entry(known.fingerprint):
                return known.fingerprint
        return None

    def _entry(self, fingerprint: str) -> Known:
        return Known("wtransfer-fingerprint/1", str(self.folder), self.states, fingerprint)

    @contextlib.contextmanager
    def _opened_cache(self) -> Iterator[Folder]:
        """Open this checkpoint's folder of the cache.

        Raises:
            StorageError: The folder cannot be made or opened, or other users may write to it.
        """
        given = os.environ.get(VARIABLE) or os.environ.get("XDG_CACHE_HOME")
        try:
            root = Path(given) if given else Path.home() / ".cache"
        except RuntimeError as error:
            raise StorageError(f"no place for a cache: {error}; set {VARIABLE}") from error
        if not os.environ.get(VARIABLE):
            root /= "wtransfer"
        key = xxhash.xxh3_128_hexdigest(os.fsencode(self.folder))
        with storage_errors(f"making the folder {str(root)!r}"):
            for folder in (root, root / _CHECKPOINTS):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with Folder(root) as opened, opened.folder(_CHECKPOINTS) as checkpoints:
            found = os.fstat(checkpoints.fd)
            if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
                raise StorageError(
                    f"{checkpoints.path!r} is not this user's alone "
                    f"({stat.filemode(found.st_mode)}, user {found.st_uid}): what stands there "
                    f"cannot be believed; make it so, or set {VARIABLE}"
                )
            with storage_errors(f"making {key!r}"), contextlib.suppress(FileExistsError):
                os.mkdir(key, 0o700, dir_fd=checkpoints.fd)
            with checkpoints.folder(key) as own:
                yield own
