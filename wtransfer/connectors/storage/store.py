"""The shared folder, and what is in it.

Everything is in one folder of its own, which belongs to this user alone::

    <shared_storage_path>/wtransfer-kv-1/
        blocks-<hash>/<name>.<rank>     blocks of one model, layout and set of weights
        incoming/                       files that are being written
        aside/                          what was found damaged, the last few
        removed-<random>/               on its way out

No name in it is anything that a user or a peer chose: they are hashes in hexadecimal.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import threading
import time

import xxhash

from wtransfer.connectors.storage.incoming import Incoming
from wtransfer.errors import StorageError, WTransferError
from wtransfer.transport.files import Folder, storage_errors

FORMAT = "wtransfer-kv-1"
"""Name of the folder within the shared one; another format of files gets another name."""
INCOMING = "incoming"
"""Files that are being written."""
ASIDE = "aside"
"""What was found damaged."""
SHELF = "blocks-"
"""What a shelf's name begins with."""
REMOVED = "removed-"
"""What the name of a shelf that is being removed begins with."""

MAX_ASIDE = 16
"""Damaged files that are kept, for whoever wants to know how they came about."""
_PRIVATE = 0o077


def shelf_name(root: bytes, fingerprint: str, layout: bytes = b"") -> str:
    """Return the name of the folder for the blocks of one model and one set of weights.

    Args:
        root: What keys and values depend on besides tokens and weights.
        fingerprint: The weights.
        layout: How blocks are laid out on all ranks. Those who lay them out in other ways do not
            meet: neither would find anything of use, and each would replace what the other has.
    """
    parts = (fingerprint.encode(), layout, root)
    text = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return SHELF + xxhash.xxh3_128_hexdigest(text)


def file_name(name: bytes, rank: int) -> str:
    """Return the name of the file of a rank's part of a block."""
    return f"{name.hex()}.{rank}"


class Store:
    """The folder, open. Leftovers of writers that have died are swept.

    Args:
        path: The shared folder; made where there is none.

    Raises:
        StorageError: It cannot be made or read, or others may write there.
    """

    def __init__(self, path: str) -> None:
        with contextlib.ExitStack() as on_error:
            with storage_errors(f"making the folder {path!r}"):
                os.makedirs(path, exist_ok=True)  # noqa: PTH103  # as all else here, by os
            self._shared = on_error.enter_context(Folder(path))
            self._base = on_error.enter_context(_private(self._shared, FORMAT))
            incoming = on_error.enter_context(_private(self._base, INCOMING))
            self._aside = on_error.enter_context(_private(self._base, ASIDE))
            on_error.pop_all()
        self._incoming = Incoming(incoming)
        self.sweep()

    @property
    def path(self) -> str:
        """Where everything is."""
        return self._base.path

    @property
    def incoming(self) -> Incoming:
        """Where files are written before they have their name."""
        return self._incoming

    def close(self) -> None:
        """Close it; a second call does nothing."""
        for folder in (self._aside, self._incoming, self._base, self._shared):
            folder.close()

    # -- shelves

    def shelf(self, name: str) -> Folder | None:
        """Open a shelf for reading; None if there is none.

        It is opened each time anew: another process may have removed it, and made another one.

        Raises:
            StorageError: Something else has its name, or the disk fails.
        """
        try:
            return self._base.folder(name)
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise

    def make_shelf(self, name: str) -> Folder:
        """Open a shelf for writing; whatever else has its name is set aside.

        Raises:
            StorageError: The disk fails.
        """
        try:
            return _private(self._base, name)
        except StorageError:
            if self._is_folder(name) or not self.set_aside(self._base, name):
                raise
        return _private(self._base, name)

    def shelves(self) -> list[str]:
        """Return the names of all shelves.

        Raises:
            StorageError: The disk fails.
        """
        return [name for name in self._base.names() if name.startswith(SHELF)]

    def drop_if_empty(self, name: str) -> None:
        """Remove a shelf on which nothing is."""
        with contextlib.suppress(OSError):
            os.rmdir(name, dir_fd=self._base.fd)

    def remove_shelf(self, name: str) -> None:
        """Have all blocks of a shelf forgotten at once; their files go in the background.

        Raises:
            StorageError: The disk fails.
        """
        gone = REMOVED + secrets.token_hex(8)
        with storage_errors(f"removing {name!r}"):
            try:
                os.rename(name, gone, src_dir_fd=self._base.fd, dst_dir_fd=self._base.fd)
            except FileNotFoundError:
                return
        # With a descriptor of its own, as this store may be closed before it is done. If the
        # process ends before, the next one sweeps.
        base = self._shared.folder(FORMAT)
        threading.Thread(
            target=_sweep_removed, args=(base,), name="wtransfer-kv-removal", daemon=True
        ).start()

    def _is_folder(self, name: str) -> bool:
        try:
            mode = os.stat(name, dir_fd=self._base.fd, follow_symlinks=False).st_mode
        except OSError:
            return False
        return stat.S_ISDIR(mode)

    # -- what is not as it should be

    def set_aside(self, folder: Folder, name: str) -> bool:
        """Move something out of the way, whatever it is; it is never opened again.

        Returns:
            Whether that could be done.
        """
        kept = f"{time.time_ns():020d}.{name}"
        with contextlib.suppress(OSError, WTransferError):
            os.rename(name, kept, src_dir_fd=folder.fd, dst_dir_fd=self._aside.fd)
            # Names begin with the time, so that the oldest come first.
            for each in self._aside.names()[:-MAX_ASIDE]:
                self._aside.remove(each)
            return True
        return False

    def sweep(self) -> None:
        """Remove what writers that have died have left, and shelves that are to go."""
        with contextlib.suppress(WTransferError, OSError):
            self._base.sweep(_is_removed)
        self._incoming.sweep()


def _is_removed(name: str) -> bool:
    return name.startswith(REMOVED)


def _sweep_removed(base: Folder) -> None:
    with base, contextlib.suppress(WTransferError):
        base.sweep(_is_removed)


def _private(parent: Folder, name: str) -> Folder:
    """Open a folder that only this user may write to; make it where there is none.

    Raises:
        StorageError: It is somebody else's, or others may write there, or it is no folder.
    """
    with storage_errors(f"making '{parent.path}/{name}'"):
        try:
            os.mkdir(name, 0o700, dir_fd=parent.fd)
        except OSError as error:
            # Where nothing can be made, it may be there all the same.
            if error.errno not in (errno.EEXIST, errno.EROFS):
                raise
    folder = parent.folder(name)
    try:
        with storage_errors(f"looking at {folder.path!r}"):
            found = os.fstat(folder.fd)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & _PRIVATE:
            raise StorageError(
                f"{folder.path!r} is not this user's alone (owner {found.st_uid}, "
                f"{stat.filemode(found.st_mode)}); KV cache holds what users wrote: remove it, or "
                "take another shared_storage_path"
            )
    except BaseException:
        folder.close()
        raise
    return folder
