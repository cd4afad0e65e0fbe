"""State of files on disk, by which a change of their contents is seen without reading them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from wtransfer.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from typing_extensions import Self


class FileState(msgspec.Struct, frozen=True, array_like=True):
    """State of a file, which differs once another file or other bytes are in its place."""

    name: str
    """Name within its folder."""
    size: int
    """Bytes."""
    mtime_ns: int
    """Time of the last change of the bytes."""
    ctime_ns: int
    """Changes also where a copy brings an older time of change with it."""
    inode: int
    """Number of the file."""

    @classmethod
    def of(cls, file: Path) -> Self:
        """Return the state of a file.

        Raises:
            OSError: The file cannot be looked at.
        """
        found = file.stat()
        return cls(file.name, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


def file_states(files: Iterable[Path]) -> list[FileState]:
    """Return the state of every file, by name.

    Raises:
        SourceError: A file cannot be looked at.
    """
    try:
        return [FileState.of(file) for file in sorted(files)]
    except OSError as error:
        raise SourceError(f"cannot look at a file of the checkpoint: {error}") from error
