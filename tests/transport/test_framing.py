"""Frames: every byte of a peer is checked before it is believed."""

from __future__ import annotations

import pickle
import struct
import tracemalloc

import msgspec
import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from wtransfer.errors import (
    ChecksumError,
    LimitError,
    PeerError,
    ProtocolError,
    TruncatedError,
)
from wtransfer.transport.framing import (
    HEADER_NBYTES,
    MAGIC,
    MIB,
    Codec,
    FrameReader,
    MessageType,
    pack_frame,
)


class Plan(msgspec.Struct):
    names: list[str] = []
    label: str = ""

    def num_entries(self):
        return len(self.names)


class Seal(msgspec.Struct):
    digest: bytes
    round: int = 0


class Loose(msgspec.Struct):
    info: dict[str, object]


CODEC = Codec(
    [
        MessageType(1, Plan, max_nbytes=4 * MIB, max_entries=1000),
        MessageType(2, Seal),
        MessageType(3, Loose),
    ]
)
SMALL = Plan(["a", "b"], "step-7")


def read(data, codec=CODEC):
    return list(FrameReader(codec, "worker 3").feed(data))


def header(code, entries, nbytes):
    """A header with a right check that announces what its body does not hold."""
    empty = pack_frame(code, entries, b"")
    announced = struct.pack(">4sHIQ", MAGIC, code, entries, nbytes)
    check = struct.pack(">I", xxhash.xxh3_64_intdigest(announced) & 0xFFFFFFFF)
    return announced + check + empty[-8:]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 40), max_size=60))
def test_messages_come_out_however_the_bytes_are_cut(cuts):
    sent = [SMALL, Seal(b"\0\xff" * 25, 7), Plan(), Loose({"a": [1, None, {"b": 2.5}]}), SMALL]
    data = b"".join(map(CODEC.encode, sent))
    reader, got, start = FrameReader(CODEC), [], 0
    for length in [*cuts, len(data)]:
        got += reader.feed(data[start : start + length])
        start += length
    reader.finish()
    assert sent == got


@settings(deadline=None, max_examples=200)
@given(st.binary(min_size=1, max_size=200), st.booleans())
def test_arbitrary_bytes_raise_peer_errors_only(data, with_magic):
    def read_to_the_end():
        reader = FrameReader(CODEC)
        assert list(reader.feed(MAGIC + data if with_magic else data)) == []
        reader.finish()

    # At once, or at the end: never in silence.
    with pytest.raises(PeerError):
        read_to_the_end()


values = st.text(max_size=3) | st.integers(-(2**63), 2**64 - 1) | st.binary(max_size=4) | st.none()
fields = st.sampled_from(["names", "label", "digest", "round", "info", "other"])
some_bodies = st.dictionaries(fields, values | st.lists(values, max_size=3), max_size=3).map(
    msgspec.msgpack.encode
)


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(CODEC.types), st.integers(0, 3), st.binary(max_size=100) | some_bodies)
@example(CODEC.types[0], 2, msgspec.msgpack.encode(SMALL))
@example(CODEC.types[0], 1, msgspec.msgpack.encode(SMALL))
@example(CODEC.types[1], 0, b"\x81\xa6digest\xc4\x00")
@example(CODEC.types[1], 0, b"\x81\xa6digest\xc4\x00\x00")
def test_arbitrary_bodies_raise_peer_errors_only(row, entries, body):
    try:
        message = msgspec.msgpack.decode(body, type=row.cls)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        message = None
    frame = pack_frame(row.code, entries, body)
    if message is not None and entries == len(getattr(message, "names", ())):
        assert read(frame) == [message]
    else:
        with pytest.raises(PeerError):
            read(frame)


def test_every_truncated_prefix_is_reported():
    frame = CODEC.encode(SMALL)
    for length in range(1, len(frame)):
        reader = FrameReader(CODEC, "worker 3")
        assert list(reader.feed(frame[:length])) == []
        with pytest.raises(TruncatedError, match=f"worker 3 ended in .* {length} of "):
            reader.finish()


def test_every_flipped_bit_is_reported():
    frame = CODEC.encode(SMALL)
    for bit in range(len(frame) * 8):
        flipped = bytearray(frame)
        flipped[bit // 8] ^= 1 << bit % 8
        expected = ProtocolError if bit // 8 < len(MAGIC) else ChecksumError
        with pytest.raises(expected, match="worker 3"):
            read(bytes(flipped))


@pytest.mark.parametrize(
    ("code", "entries", "nbytes", "match"),
    [
        (1, 0, 1 << 63, "Plan of 9223372036854775808 bytes; at most 4194304"),
        (1, 0, 4 * MIB + 1, "Plan of 4194305 bytes"),
        (1, 1_000_000, 100, "Plan with 1000000 entries; at most 1000"),
        (1, 1001, 100, "Plan with 1001 entries"),
        (2, 1, 100, "Seal with 1 entries; at most 0"),
        (2, 0, MIB + 1, "Seal of 1048577 bytes; at most 1048576"),
    ],
)
def test_too_much_is_refused_from_the_header_alone(code, entries, nbytes, match):
    tracemalloc.start()
    with pytest.raises(LimitError, match=match):
        read(header(code, entries, nbytes))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * MIB


def test_an_announced_length_reserves_nothing():
    reader = FrameReader(CODEC)
    tracemalloc.start()
    assert list(reader.feed(header(1, 0, 4 * MIB))) == []
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 * 1024


@pytest.mark.parametrize(
    "body",
    [
        b"\x81\xa5names\xdd\xff\xff\xff\xff",
        b"\x81\xa4info\x81\xa1x\xdd\x7f\xff\xff\xff",
        b"\x81\xa4info\x81\xa1x\xdf\x7f\xff\xff\xff",
        b"\x81\xa4info\x81\xa1x" + b"\x91" * 100_000,
        b"\x81\xa4info\x81\xa1x\xc6\x7f\xff\xff\xff",
    ],
    ids=["list", "nested list", "nested map", "depth", "bytes"],
)
def test_a_body_that_announces_too_much_inside_reserves_nothing(body):
    code = 1 if b"names" in body else 3
    tracemalloc.start()
    with pytest.raises(ProtocolError, match=r"worker 3 sent a .* that is not valid"):
        read(pack_frame(code, 0, body))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * MIB


def test_announced_entries_must_be_the_real_ones():
    body = msgspec.msgpack.encode(SMALL)
    with pytest.raises(ProtocolError, match="announced a Plan with 1 entries and sent 2"):
        read(pack_frame(1, 1, body))


@pytest.mark.parametrize(
    ("code", "body"),
    [
        (1, msgspec.msgpack.encode({"names": "not a list"})),
        (1, msgspec.msgpack.encode({"names": [1]})),
        (2, msgspec.msgpack.encode({"digest": b"", "round": True})),
        (2, msgspec.msgpack.encode({"digest": b"", "round": "1"})),
        (2, msgspec.msgpack.encode({})),
        (2, msgspec.msgpack.encode({"digest": b""}) + b"\0"),
        (2, b""),
        (1, b"\x81\xa5label\xa2\xff\xfe"),
    ],
)
def test_bodies_are_typed_strictly(code, body):
    with pytest.raises(ProtocolError, match="not valid"):
        read(pack_frame(code, 0, body))


def test_unknown_codes_name_what_is_expected():
    with pytest.raises(ProtocolError, match=r"code 9, .*expected one of Plan, Seal, Loose"):
        read(pack_frame(9, 0, b""))


@pytest.mark.parametrize("data", [b"G", b"GET / HTTP/1.1\r\n", b"\0", pickle.dumps(print)])
def test_other_protocols_are_seen_at_the_first_byte(data):
    with pytest.raises(ProtocolError, match="does not speak this protocol"):
        read(data)


def test_messages_before_a_bad_frame_are_kept():
    feed = FrameReader(CODEC).feed(CODEC.encode(SMALL) + b"junk")
    assert next(feed) == SMALL
    with pytest.raises(ProtocolError):
        next(feed)


def test_a_new_codec_governs_the_next_frame():
    reader = FrameReader(Codec([MessageType(2, Seal)]))
    feed = reader.feed(CODEC.encode(Seal(b"")) + CODEC.encode(SMALL))
    assert Seal(b"") == next(feed)
    reader.codec = CODEC
    assert next(feed) == SMALL


@pytest.mark.parametrize(
    "message", [Plan(["x"] * 1001), Plan([], "x" * (4 * MIB)), Seal(b"x" * MIB)]
)
def test_message_beyond_the_announced_limits_is_not_encoded(message):
    with pytest.raises(LimitError, match="this process announced"):
        CODEC.encode(message)


def test_messages_outside_the_table_are_not_sent():
    with pytest.raises(ProtocolError, match="Seal cannot be sent here; the table holds Plan"):
        Codec([MessageType(1, Plan)]).encode(Seal(b""))


@pytest.mark.parametrize(
    "rows",
    [
        [MessageType(1, Plan), MessageType(1, Seal)],
        [MessageType(1, Plan), MessageType(2, Plan)],
        [MessageType(1 << 16, Plan)],
    ],
)
def test_tables_are_unambiguous(rows):
    with pytest.raises(ProtocolError, match="message table"):
        Codec(rows)


def test_header_size_is_as_documented():
    assert 30 == HEADER_NBYTES == len(pack_frame(1, 0, b""))
