"""Turn messages into frames and bytes back into messages, without trusting the bytes.

A frame is a header of 30 bytes and a msgpack body. The header states type, entries and length, and
carries a check of its own, so that a peer that announces too much is refused before a byte of the
body is read, and a flipped bit in the length is not mistaken for a long wait:

    ======  ====  =======================================================
    offset  size  field (big-endian)
    ======  ====  =======================================================
    0       4     magic
    4       2     message code
    6       4     number of entries (``num_entries()`` of the message)
    10      8     length of the body in bytes
    18      4     low half of xxh3-64 over bytes 0 to 18
    22      8     xxh3-64 over bytes 0 to 22 and the body
    ======  ====  =======================================================

Pure bytes: no sockets, no threads.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import xxhash

from wtransfer.errors import ChecksumError, LimitError, ProtocolError, TruncatedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MIB = 1 << 20
MAGIC = b"\xf7WT1"

_ANNOUNCED = struct.Struct(">4sHIQ")
_HEAD_CHECK = struct.Struct(">I")
_FRAME_CHECK = struct.Struct(">Q")
_CHECKED_NBYTES = _ANNOUNCED.size + _HEAD_CHECK.size
HEADER_NBYTES = _CHECKED_NBYTES + _FRAME_CHECK.size


@dataclass(frozen=True)
class MessageType:
    """One row of a message table: meaning and limits of a code."""

    code: int
    """Number on the wire, 0 to 65535; those from 0xFF00 belong to the channel itself."""
    cls: type[msgspec.Struct]
    """Struct with typed fields, decoded strictly; may define ``num_entries() -> int``."""
    max_nbytes: int = MIB
    """Longest body in bytes, sent or received."""
    max_entries: int = 0
    """Most entries, sent or received; 0 for a message without ``num_entries()``."""

    @property
    def name(self) -> str:
        """Name as it stands in errors."""
        return self.cls.__name__


def pack_frame(code: int, entries: int, body: bytes) -> bytes:
    """Put a header with both checks in front of a msgpack body."""
    announced = _ANNOUNCED.pack(MAGIC, code, entries, len(body))
    head = announced + _head_check(announced)
    return b"".join((head, _frame_check(head, body), body))


def _head_check(announced: bytes) -> bytes:
    return _HEAD_CHECK.pack(xxhash.xxh3_64_intdigest(announced) & 0xFFFFFFFF)


def _frame_check(head: bytes | memoryview, body: bytes | memoryview) -> bytes:
    state = xxhash.xxh3_64(head)
    state.update(body)
    return _FRAME_CHECK.pack(state.intdigest())


def _num_entries(message: msgspec.Struct) -> int:
    count = getattr(type(message), "num_entries", None)
    return 0 if count is None else int(count(message))


class Codec:
    """The table of messages that one side of a channel understands.

    Args:
        types: Rows; codes and classes are unique.

    Raises:
        ProtocolError: Two rows share a code or a class, or a code is no u16.
    """

    def __init__(self, types: Iterable[MessageType]) -> None:
        self.types = tuple(types)
        self._by_code = {row.code: row for row in self.types}
        self._by_cls = {row.cls: row for row in self.types}
        if len(self._by_code) != len(self.types) or len(self._by_cls) != len(self.types):
            raise ProtocolError("a message table names a code or a class twice")
        if any(not 0 <= code <= 0xFFFF for code in self._by_code):  # noqa: PLR2004 (u16)
            raise ProtocolError("a message table holds a code outside 0 to 65535")
        self._encoder = msgspec.msgpack.Encoder()
        self._decoders = {row.code: msgspec.msgpack.Decoder(row.cls) for row in self.types}

    def encode(self, message: msgspec.Struct) -> bytes:
        """Return the frame of a message; it may be sent to any number of peers.

        Raises:
            LimitError: The message exceeds its type's limits; no peer would take it.
            ProtocolError: The message's class is not in the table.
        """
        row = self._by_cls.get(type(message))
        if row is None:
            raise ProtocolError(
                f"{type(message).__name__} cannot be sent here; the table holds {self._names()}"
            )
        entries = _num_entries(message)
        body = self._encoder.encode(message)
        _check_limits(row, entries, len(body), "this process")
        return pack_frame(row.code, entries, body)

    def announced(self, head: bytes, peer: str) -> tuple[MessageType, int, int]:
        """Check a header.

        Args:
            head: `HEADER_NBYTES` bytes.
            peer: Sender, as named in errors.

        Returns:
            Type, number of entries and length of the body.

        Raises:
            ChecksumError: Bits of the header were flipped on the way.
            ProtocolError: The code is not in the table.
            LimitError: More than the type allows.
        """
        announced = head[: _ANNOUNCED.size]
        if _head_check(announced) != head[_ANNOUNCED.size : _CHECKED_NBYTES]:
            raise ChecksumError(f"{peer} sent a frame header with flipped bits")
        _, code, entries, nbytes = _ANNOUNCED.unpack(announced)
        row = self._by_code.get(code)
        if row is None:
            raise ProtocolError(
                f"{peer} sent message code {code}, which is not expected here; "
                f"expected one of {self._names()}"
            )
        _check_limits(row, entries, nbytes, peer)
        return row, entries, nbytes

    def decode(
        self, row: MessageType, entries: int, frame: memoryview, peer: str
    ) -> msgspec.Struct:
        """Decode a complete frame whose header was checked.

        Raises:
            ChecksumError: Bits were flipped on the way.
            ProtocolError: The body does not fit the type, or the announced number of entries.
        """
        body = frame[HEADER_NBYTES:]
        if _frame_check(frame[:_CHECKED_NBYTES], body) != frame[_CHECKED_NBYTES:HEADER_NBYTES]:
            raise ChecksumError(f"{peer} sent a {row.name} with flipped bits")
        try:
            message: msgspec.Struct = self._decoders[row.code].decode(body)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise ProtocolError(f"{peer} sent a {row.name} that is not valid: {error}") from error
        if (real := _num_entries(message)) != entries:
            raise ProtocolError(
                f"{peer} announced a {row.name} with {entries} entries and sent {real}"
            )
        return message

    def _names(self) -> str:
        return ", ".join(row.name for row in self.types)


def _check_limits(row: MessageType, entries: int, nbytes: int, peer: str) -> None:
    if nbytes > row.max_nbytes:
        raise LimitError(
            f"{peer} announced a {row.name} of {nbytes} bytes; at most {row.max_nbytes} are allowed"
        )
    if entries > row.max_entries:
        raise LimitError(
            f"{peer} announced a {row.name} with {entries} entries; "
            f"at most {row.max_entries} are allowed"
        )


class FrameReader:
    """Collect a peer's bytes and yield its messages.

    Memory grows with the bytes that arrive, never with the announced length. After an error the
    reader is of no further use: the position of the next frame is unknown.

    Args:
        codec: Table of the messages that are allowed now; may be replaced between two messages.
        peer: Sender, as named in errors.
    """

    def __init__(self, codec: Codec, peer: str = "the peer") -> None:
        self.codec = codec
        self.peer = peer
        self._buffer = bytearray()
        self._announced: tuple[MessageType, int, int] | None = None

    def feed(self, data: bytes | memoryview) -> Iterator[msgspec.Struct]:
        """Take bytes, cut anywhere, and yield every message that they complete.

        The codec is looked up anew for each frame, so that a handler that changes it governs the
        frames behind its own, also those of the same `data`.

        Raises:
            ProtocolError: Bad magic, a code that is not in the table, or a body that does not fit.
            ChecksumError: Bits were flipped on the way.
            LimitError: The header announces more than the type allows.
        """
        self._buffer += data
        start = 0
        try:
            while True:
                if self._announced is None:
                    head = bytes(self._buffer[start : start + HEADER_NBYTES])
                    # Wrong from its first bytes on: do not wait for a header that will not come.
                    if head[: len(MAGIC)] != MAGIC[: len(head)]:
                        raise ProtocolError(
                            f"{self.peer} does not speak this protocol: a frame starts with "
                            f"{MAGIC.hex()}, got {head[: len(MAGIC)].hex()}"
                        )
                    if len(head) < HEADER_NBYTES:
                        return
                    self._announced = self.codec.announced(head, self.peer)
                row, entries, nbytes = self._announced
                end = start + HEADER_NBYTES + nbytes
                if len(self._buffer) < end:
                    return
                message = self.codec.decode(
                    row, entries, memoryview(self._buffer)[start:end], self.peer
                )
                self._announced = None
                start = end
                yield message
        finally:
            # A new buffer, not a shortened one: a message may hold a view of the old one.
            self._buffer = self._buffer[start:] if start else self._buffer

    def finish(self) -> None:
        """State that no further byte will come.

        Raises:
            TruncatedError: The bytes ended in the middle of a frame.
        """
        if not self._buffer:
            return
        if self._announced is None:
            what, nbytes = "frame's header", HEADER_NBYTES
        else:
            what, nbytes = self._announced[0].name, HEADER_NBYTES + self._announced[2]
        raise TruncatedError(
            f"{self.peer} ended in a {what}, {len(self._buffer)} of {nbytes} bytes"
        )
