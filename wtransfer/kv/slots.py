"""Slots that hold blocks: the interface that the copier needs, and headers of many at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import xxhash

from wtransfer.kv.header import CHECKSUM_NBYTES, HEADER_NBYTES, BlockHeader, check_key_nbytes
from wtransfer.kv.keys import FENCE_NBYTES, MAX_KEY_NBYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from wtransfer.kv.header import Mismatch

    Numbers = npt.NDArray[np.int64]
    """Numbers of blocks, slots or places in a slot."""
    Headers = npt.NDArray[np.uint8]
    """Shape ``(n, HEADER_NBYTES)``."""


class Look(NamedTuple):
    """The state of slots at one moment."""

    headers: Headers
    """Copies of their headers."""
    openings: Numbers
    """Numbers that differ whenever a slot was opened for writing in between."""


class Slots(Protocol):
    """Memory in slots, each with a header.

    A header is written last and cleared first, so a slot with a header holds a whole block.
    """

    slots: npt.NDArray[np.uint8]
    """Payloads, shape ``(num_slots, nbytes)``; slots may have gaps between them."""

    def look(self, slots: Numbers) -> Look:
        """Return the present state of slots."""

    def quarantine(self, slot: int, seen: Headers) -> None:
        """Clear the header of a damaged block, unless it is another one by now.

        Args:
            slot: Slot of the block.
            seen: Header that the block was judged by, shape ``(HEADER_NBYTES,)``.
        """


# -- headers

_KEY_NBYTES = FENCE_NBYTES + MAX_KEY_NBYTES
_FIELDS = np.dtype(
    {
        "names": ["key_nbytes", "nbytes", "key"],
        "formats": ["<u4", "<u8", f"V{_KEY_NBYTES}"],
        "offsets": [8, 12, 52],
        "itemsize": HEADER_NBYTES,
    }
)
_CHECKSUM = slice(36, 36 + CHECKSUM_NBYTES)
_SELF_NBYTES = 8


class HeaderForm:
    """Headers of many blocks at once; the bytes are those of `wtransfer.kv.header.BlockHeader`.

    A header costs three microseconds when it is packed alone, as long as a block of 32 KiB takes to
    copy. Here each field is filled in for all headers of a job.

    Args:
        geometry: `BlockGeometry.digest`.
        rank: Rank that this part of the blocks belongs to.
    """

    def __init__(self, geometry: bytes, rank: int) -> None:
        self.geometry = geometry
        """Digest of the geometry."""
        self.rank = rank
        """Rank that the headers state."""
        blank = BlockHeader(b"", geometry, 0, bytes(CHECKSUM_NBYTES), rank).pack()
        self._blank = np.frombuffer(blank, np.uint8).copy()
        self._blank[-_SELF_NBYTES:] = 0

    def pack(
        self, keys: Sequence[bytes], nbytes: npt.ArrayLike, checksums: Sequence[bytes]
    ) -> Headers:
        """Return headers.

        Args:
            keys: Fenced keys.
            nbytes: Payload bytes of each block.
            checksums: Checksums of the payloads.

        Raises:
            ValueError: A key is too long.

        Cost: about 0.6 us each.
        """
        packed = self.expect(keys, nbytes)
        joined = np.frombuffer(b"".join(checksums), np.uint8)
        packed[:, _CHECKSUM] = joined.reshape(-1, CHECKSUM_NBYTES)
        packed[:, -_SELF_NBYTES:] = _own_checksums(packed)
        return packed

    def expect(self, keys: Sequence[bytes], nbytes: npt.ArrayLike) -> Headers:
        """Return headers without checksums, to compare others with by `differ`."""
        check_key_nbytes(max(map(len, keys), default=0))
        headers = np.tile(self._blank, (len(keys), 1))
        fields = headers.view(_FIELDS)
        fields["nbytes"][:, 0] = nbytes
        fields["key_nbytes"][:, 0] = list(map(len, keys))
        padded = b"".join(key.ljust(_KEY_NBYTES, b"\0") for key in keys)
        fields["key"][:, 0] = np.frombuffer(padded, f"V{_KEY_NBYTES}")
        return headers

    def mismatch(self, found: Headers, key: bytes, nbytes: int) -> Mismatch | None:
        """Return why a header is not the one of a block, as `BlockHeader` sees it."""
        header = BlockHeader.unpack(found.tobytes())
        if not isinstance(header, BlockHeader):
            return header
        return header.mismatch(key, self.geometry, nbytes, self.rank)


def differ(found: Headers, expected: Headers) -> npt.NDArray[np.intp]:
    """Return the indices of headers that are damaged or unexpected, payload checksums aside."""
    same = found == expected
    same[:, _CHECKSUM] = True
    same[:, -_SELF_NBYTES:] = found[:, -_SELF_NBYTES:] == _own_checksums(found)
    return np.flatnonzero(~same.all(axis=1))


def payload_nbytes(found: Headers) -> npt.NDArray[np.int64]:
    """Return the payload bytes that headers state."""
    stated: npt.NDArray[np.int64] = found.view(_FIELDS)["nbytes"][:, 0].astype(np.int64)
    return stated


def checksums(found: Headers) -> list[bytes]:
    """Return the payload checksums that headers state."""
    return [each.tobytes() for each in found[:, _CHECKSUM]]


def _own_checksums(headers: Headers) -> Headers:
    """Return the checksums of the headers themselves, shape ``(n, 8)``."""
    whole = memoryview(headers.tobytes())
    size = HEADER_NBYTES - _SELF_NBYTES
    digest = xxhash.xxh3_64_digest
    own = b"".join(digest(whole[at : at + size]) for at in range(0, len(whole), HEADER_NBYTES))
    return np.frombuffer(own, np.uint8).reshape(-1, _SELF_NBYTES)
