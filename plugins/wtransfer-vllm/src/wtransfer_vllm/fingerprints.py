"""The fingerprint of a checkpoint on disk: read from its seal, or worked out once on a host.

What was worked out is kept in a folder of this user (``WTRANSFER_CACHE``, else
``$XDG_CACHE_HOME/wtransfer``, else ``~/.cache/wtransfer``), and believed for as long as the files
are the same.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import xxhash
from wtransfer.checkpoint.safetensors import INDEX_NAME, SUFFIX
from wtransfer.checkpoint.source import MANIFEST_NAME, CheckpointSource, Digest, describe
from wtransfer.errors import SourceError, StorageError, WTransferError
from wtransfer.transport.files import Folder, FolderLock, storage_errors, temporary_of

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(f"vllm.{__name__}")  # a child of vLLM's, so that its log has it

VARIABLE = "WTRANSFER_CACHE"
"""Environment variable: the cache folder."""
LOCK_PATIENCE_S = 600.0
"""Longest wait for another process that reads the same checkpoint, in seconds."""
_CHECKPOINTS = "checkpoints"
_NAME = "fingerprint.json"
_MAX_NBYTES = 16 << 20


class FileState(msgspec.Struct, frozen=True, array_like=True):
    """What tells a file from the one that it was."""

    name: str
    size: int
    mtime_ns: int
    ctime_ns: int
    """Changes also where a copy brings an older time of change with it."""
    inode: int


class Known(msgspec.Struct, frozen=True):
    """The file of the cache."""

    format: Literal["wtransfer-fingerprint/1"]
    """Says what this is, and how to read it."""
    folder: str
    """The checkpoint's."""
    files: list[FileState]
    """Of what the fingerprint was worked out."""
    fingerprint: Digest
    """Identity of the weights, as a push of the checkpoint has it."""


class CheckpointFiles:
    """The files of a checkpoint as they are at this moment.

    Args:
        folder: Where they are.

    Raises:
        SourceError: They cannot be looked at.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(os.path.realpath(folder))
        """Where they are, without links."""
        self.states = self._look()
        """What they are like, by name."""

    def _look(self) -> list[FileState]:
        index = self.folder / INDEX_NAME
        files = [*self.folder.glob(f"*{SUFFIX}"), *([index] if index.exists() else [])]
        try:
            return [_state_of(file) for file in sorted(files)]
        except OSError as error:
            raise SourceError(
                f"cannot look at the files of {str(self.folder)!r}: {error}"
            ) from error

    def known_fingerprint(self) -> str | None:
        """Return the fingerprint if it is known without reading the tensors.

        Cost: reads the headers of a sealed checkpoint; else one small file.
        """
        sealed = self._sealed_fingerprint()
        if sealed is not None:
            return sealed
        with contextlib.suppress(WTransferError), self._opened_cache() as cache:
            return self._stored(cache)
        return None

    def fingerprint(self) -> str:
        """Work the fingerprint out and store it, unless another process has done so meanwhile.

        Raises:
            SourceError: This is no checkpoint, cannot be read, or was changed since the first look.
            ManifestError: It names something that no update can hold.

        Cost: reads everything once, and waits for another process of this host that does.
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
                self._store(cache, known)
            return known

    def _sealed_fingerprint(self) -> str | None:
        with contextlib.suppress(WTransferError, OSError):
            source = CheckpointSource(self.folder)
            self._check_all_read(source)
            if source.manifest is None:
                return None
            seal = _state_of(self.folder / MANIFEST_NAME)
            # What was written, or put there, after the seal may be something else; and within one
            # tick of the kernel's clock nothing tells what came first.
            if all(
                each.mtime_ns <= seal.mtime_ns and each.ctime_ns < seal.ctime_ns
                for each in self.states
            ):
                return source.manifest.fingerprint
        return None

    def _digested(self) -> str:
        source = CheckpointSource(self.folder, sealed=False)
        self._check_all_read(source)
        found = describe(source).fingerprint
        if self._look() != self.states:
            raise SourceError(f"{str(self.folder)!r} was changed after the model was loaded")
        return found

    def _check_all_read(self, source: CheckpointSource) -> None:
        """Raise unless it is known which files vLLM has read."""
        more = {self.folder / state.name for state in self.states} - source.files
        more.discard(self.folder / INDEX_NAME)
        if more:
            raise SourceError(
                f"{str(self.folder)!r} has safetensors files beside those of its checkpoint, first "
                f"{min(more).name!r}; which of them vLLM has read is not known"
            )

    @contextlib.contextmanager
    def _opened_cache(self) -> Iterator[Folder]:
        """Open this checkpoint's folder of the cache.

        Raises:
            StorageError: It cannot be made or opened, or others than this user may write to it.
        """
        root = _cache_root()
        key = xxhash.xxh3_128_hexdigest(os.fsencode(self.folder))
        with storage_errors(f"making the folder {str(root)!r}"):
            for folder in (root, root / _CHECKPOINTS):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with Folder(root) as opened, opened.folder(_CHECKPOINTS) as checkpoints:
            _check_owner_only(checkpoints)
            with storage_errors(f"making {key!r}"), contextlib.suppress(FileExistsError):
                os.mkdir(key, 0o700, dir_fd=checkpoints.fd)
            with checkpoints.folder(key) as own:
                yield own

    def _stored(self, cache: Folder) -> str | None:
        # A file that is damaged, or no file, is as none: it will be replaced.
        with contextlib.suppress(WTransferError, msgspec.DecodeError, UnicodeDecodeError):
            raw = cache.read(_NAME, _MAX_NBYTES)
            known = None if raw is None else msgspec.json.decode(raw, type=Known)
            if known is not None and known == self._entry(known.fingerprint):
                return known.fingerprint
        return None

    def _store(self, cache: Folder, fingerprint: str) -> None:
        try:
            # Of writers that were killed; there is none now but this one.
            cache.sweep(lambda name: temporary_of(name) is not None)
            cache.replace(_NAME, msgspec.json.encode(self._entry(fingerprint)))
        except WTransferError as error:
            logger.warning("no other process will know the checkpoint's digests: %s", error)

    def _entry(self, fingerprint: str) -> Known:
        return Known("wtransfer-fingerprint/1", str(self.folder), self.states, fingerprint)


def _state_of(file: Path) -> FileState:
    found = file.stat()
    return FileState(file.name, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


def _cache_root() -> Path:
    """Return the cache folder.

    Raises:
        StorageError: The environment does not say where it is.
    """
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given)
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise StorageError(f"no place for a cache: {error}; set {VARIABLE}") from error
    return Path(home) / "wtransfer"


def _check_owner_only(folder: Folder) -> None:
    found = os.fstat(folder.fd)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise StorageError(
            f"{folder.path!r} is not this user's alone ({stat.filemode(found.st_mode)}, user "
            f"{found.st_uid}): what stands there cannot be believed; make it so, or set {VARIABLE}"
        )
