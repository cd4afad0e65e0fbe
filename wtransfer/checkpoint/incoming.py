"""A version while it is being written."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from wtransfer.checkpoint.manifest_file import MANIFEST_NAME
from wtransfer.checkpoint.shards import INDEX_NAME, index_of
from wtransfer.transport.files import storage_errors, write_at

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from wtransfer.checkpoint.manifest_file import ManifestFile
    from wtransfer.checkpoint.shards import Shard
    from wtransfer.transport.files import Folder


class Incoming:
    """Writes tensors to where they belong, from any number of buffers, in any order.

    By system calls, not through a mapping: on a full disk a mapping ends the process.

    Args:
        name: Name of the folder.
        folder: The folder, empty; it is closed by `close`.
        shards: What goes where.
    """

    def __init__(self, name: str, folder: Folder, shards: list[Shard]) -> None:
        self.name = name
        """Name of the folder."""
        self._folder = folder
        self._shards = shards
        self._shard_of = {each: shard for shard in shards for each in shard.offsets}
        self._fds: dict[str, int] = {}

    def file_of(self, tensor: str) -> str:
        """Return the file that a tensor belongs to."""
        return self._shard_of[tensor].name

    def offset_of(self, tensor: str) -> int:
        """Return a tensor's first byte in its file."""
        return self._shard_of[tensor].offsets[tensor]

    def write(self, tensors: Iterable[tuple[str, memoryview]]) -> None:
        """Write tensors of one file.

        Raises:
            StorageError: No room, a failing disk; what was written so far stays.
        """
        rows = sorted((self.offset_of(name), name, data) for name, data in tensors)
        for offset, run in _runs(rows):
            shard = self._shard_of[rows[0][1]]
            with storage_errors(f"writing {self._shown(shard)}"):
                write_at(self._fd(shard), run, offset)

    def sync(self, file: str) -> None:
        """Bring a file's bytes to where workers on other hosts find them."""
        with storage_errors(f"writing {self._folder.path}/{file}"):
            os.fdatasync(self._fds[file])

    def complete(self, manifest: ManifestFile) -> None:
        """Write what belongs beside the tensors, and bring everything to the disk."""
        for shard in self._shards:
            # Also of a file to which nothing was written: it has no tensors, or empty ones.
            with storage_errors(f"writing {self._shown(shard)}"):
                os.fsync(self._fd(shard))
        if len(self._shards) > 1:
            self._folder.replace(INDEX_NAME, index_of(self._shards, manifest.manifest.nbytes))
        self._folder.replace(MANIFEST_NAME, manifest.encode())

    def close(self) -> None:
        """Close the files and the folder."""
        while self._fds:
            # The error of a last write may show here; the data was synced, or is not wanted.
            with contextlib.suppress(OSError):
                os.close(self._fds.popitem()[1])
        self._folder.close()

    def _fd(self, shard: Shard) -> int:
        fd = self._fds.get(shard.name)
        if fd is None:
            fd = self._fds[shard.name] = self._folder.create_file(shard.name)
            write_at(fd, [memoryview(shard.header)], 0)
        return fd

    def _shown(self, shard: Shard) -> str:
        return f"{self._folder.path}/{shard.name}"


def _runs(rows: list[tuple[int, str, memoryview]]) -> Iterator[tuple[int, list[memoryview]]]:
    """Join what follows upon each other in the file: thousands of tensors then take one call."""
    begin, end, run = 0, -1, list[memoryview]()
    for offset, _, data in rows:
        if run and offset != end:
            yield begin, run
            run = []
        if not run:
            begin = offset
        run.append(data)
        end = offset + data.nbytes
    if run:
        yield begin, run
