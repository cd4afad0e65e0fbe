"""What a session has to say arrives, whatever stands in it."""

from __future__ import annotations

import os

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wtransfer.errors import EngineError, LimitError, ProtocolError, SchemaError
from wtransfer.manifest import MAX_PIECES
from wtransfer.transport.framing import FrameReader, pack_frame
from wtransfer.weight_sync.messages import (
    CODEC,
    MAX_TEXT_NBYTES,
    Abort,
    Compare,
    ErrorInfo,
    Fault,
    Rollback,
    clipped,
)

UNDECODABLE = os.fsdecode(b"/tmp/\xff")
LONG = "x" * 2_000_000


def arrived(message):
    (got,) = FrameReader(CODEC).feed(CODEC.encode(message))
    return got


@given(st.text(st.characters(exclude_categories=[])))
def test_every_text_can_be_sent_and_ordinary_ones_stay_as_they_are(text):
    sent = clipped(text)
    assert sent.encode("utf-8", "strict").decode() == sent
    if not any("\ud800" <= letter <= "\udfff" for letter in text):
        assert sent == text


@pytest.mark.parametrize("letter", ["x", "\u20ac", "\U0001f600", "\udcff"])
def test_a_long_text_is_cut_between_two_letters(letter):
    sent = clipped(letter * MAX_TEXT_NBYTES)
    if letter == "x":
        assert sent == letter * MAX_TEXT_NBYTES
        sent = clipped(letter * (MAX_TEXT_NBYTES + 1))
    assert MAX_TEXT_NBYTES - 16 < len(sent.encode()) <= MAX_TEXT_NBYTES
    assert sent.endswith("... (cut)")


@pytest.mark.parametrize("text", [UNDECODABLE, LONG], ids=["undecodable", "long"])
@pytest.mark.parametrize("cls", [Abort, Rollback])
def test_a_reason_is_always_heard(cls, text):
    assert arrived(cls("r0", text)) == cls("r0", clipped(text))


@pytest.mark.parametrize("text", [UNDECODABLE, LONG], ids=["undecodable", "long"])
def test_an_error_is_always_heard(text):
    error = RuntimeError(text)
    got = arrived(Fault("r0", ErrorInfo.of(error))).error.rebuild()
    assert type(got) is EngineError
    assert got.message == clipped(f"RuntimeError: {text}")


def test_facts_are_always_heard():
    error = SchemaError(
        "does not fit", piece=UNDECODABLE, mismatches=[LONG, *["m"] * 10**6], version=LONG
    )
    error.count = 2**70
    got = arrived(Fault("r0", ErrorInfo.of(error))).error.rebuild()
    assert (got.piece, got.version) == (clipped(UNDECODABLE), clipped(LONG))
    assert got.mismatches[:2] == [clipped(LONG), "m"]
    assert len(got.mismatches) < 10**6


def test_lines_that_are_no_text_are_heard_as_text():
    error = SchemaError("does not fit", mismatches=[("w", 1), UNDECODABLE])
    got = arrived(Fault("r0", ErrorInfo.of(error))).error.rebuild()
    assert got.mismatches == ["('w', 1)", clipped(UNDECODABLE)]


# FAULTS 2
def test_more_digests_than_pieces_may_be_are_refused_while_they_are_counted():
    message = Compare("r", ["" for _ in range(MAX_PIECES + 1)])
    with pytest.raises(LimitError):
        CODEC.encode(message)
    # A liar announces one entry, and stays below the limit of bytes.
    body = msgspec.msgpack.encode(message)
    with pytest.raises(ProtocolError, match="Expected `array` of length <= 262144"):
        list(FrameReader(CODEC).feed(pack_frame(35, 1, body)))
