"""What an update may consist of, judged before a byte is allocated."""

from __future__ import annotations

import tracemalloc

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from wtransfer.errors import LimitError, ManifestError, ProtocolError
from wtransfer.manifest import (
    DTYPES,
    MAX_CONFIG_LENGTH,
    MAX_PIECES,
    Identities,
    KeptPiece,
    Manifest,
    Piece,
    fingerprint,
    local_fingerprint,
)
from wtransfer.transport.framing import FrameReader, pack_frame
from wtransfer.weight_sync.messages import CODEC, Plan

PIECES = (
    Piece("embed", "bfloat16", (4, 2)),
    Piece("norm", "float32", (2,)),
    Piece("step", "int64", ()),
)
DIGESTS = [f"{i:032x}" for i in range(3)]

names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)
pieces = st.builds(
    Piece,
    names.filter(lambda name: len(name.encode()) <= 512),
    st.sampled_from(list(DTYPES)),
    st.lists(st.integers(0, 2**12), max_size=4).map(tuple),
)
rows = st.lists(
    st.tuples(pieces, st.text("0123456789abcdef", min_size=32, max_size=32)),
    unique_by=lambda row: row[0].name,
    max_size=8,
)


def test_a_manifest_knows_its_bytes():
    assert Manifest(PIECES).nbytes == 4 * 2 * 2 + 2 * 4 + 8


def test_the_dtype_table_is_closed_and_true():
    torch = pytest.importorskip("torch")
    known = {name: getattr(torch, name).itemsize for name in DTYPES if hasattr(torch, name)}
    assert known == {name: size for name, size in DTYPES.items() if name in known}


# FAULTS 2
def test_a_name_that_comes_twice_is_refused():
    with pytest.raises(
        ManifestError, match="1 names appear more than once, first 'norm'"
    ) as caught:
        Manifest((*PIECES, Piece("norm", "int8", ()))).check()
    assert caught.value.piece == "norm"


# FAULTS 3
@pytest.mark.parametrize("dtype", ["load", "__class__", "Tensor", "", "FLOAT32", "x" * 2**20])
def test_a_dtype_that_is_not_in_the_table_is_refused(dtype):
    with pytest.raises(ManifestError, match="not one of bool, uint8") as caught:
        Piece("w", dtype, (1,)).check()
    assert len(str(caught.value)) < 1000
    assert caught.value.piece == "w"


# FAULTS 4
@pytest.mark.parametrize("size", [-1, -(2**63), True, False, 1.0, 2.5, "3", None])
def test_a_dimension_that_is_no_natural_number_is_refused(size):
    with pytest.raises(ManifestError, match="expected an integer >= 0"):
        Piece("w", "int8", (2, size)).check()


# FAULTS 4
@pytest.mark.parametrize(
    "shape", [(2**63,), (2**62, 2), (2**32, 2**32), (2**64 - 1,), (0, 2**63), (2**40, 0, 2**40)]
)
def test_dimensions_that_nothing_could_have_are_refused(shape):
    with pytest.raises(ManifestError, match="larger than 2\\^63 bytes"):
        Piece("w", "int8", shape).check()


# FAULTS 4
def test_the_whole_is_bounded_as_well():
    half = 2**62
    with pytest.raises(ManifestError, match="the update is larger"):
        Manifest((Piece("a", "int8", (half,)), Piece("b", "int8", (half,)))).check()


@pytest.mark.parametrize("name", ["", "a\0b", "n" * 513, "é" * 257, "\ud800", 7])
def test_invalid_piece_name_is_refused(name):
    with pytest.raises(ManifestError, match="piece name"):
        Piece(name, "int8", ()).check()


def test_more_dimensions_than_allowed_are_refused():
    Piece("w", "int8", (1,) * 16).check()
    with pytest.raises(ManifestError, match="17 dimensions, at most 16"):
        Piece("w", "int8", (1,) * 17).check()


# FAULTS 7
def test_more_pieces_than_allowed_are_refused():
    with pytest.raises(ManifestError, match="262145 pieces, at most 262144"):
        Manifest((PIECES[0],) * (MAX_PIECES + 1)).check()


@given(rows)
def test_valid_plan_travels_unchanged(rows):
    plan = Plan("round", "v1", Manifest(tuple(piece for piece, _ in rows)))
    plan.manifest.check()
    (arrived,) = FrameReader(CODEC).feed(CODEC.encode(plan))
    assert arrived == plan


# FAULTS 3 and 4: whatever a peer sends is a plan that can be judged, or a protocol error.
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
        lambda inner: st.lists(inner, max_size=4),
        max_leaves=12,
    )
)
def test_no_plan_of_a_peer_does_harm(pieces):
    body = msgspec.msgpack.encode({"round_id": "r", "version": "v", "manifest": {"pieces": pieces}})
    entries = len(pieces) if isinstance(pieces, list) else 0
    try:
        (plan,) = FrameReader(CODEC).feed(pack_frame(20, entries, body))
        plan.manifest.check()
    except (ProtocolError, ManifestError):
        return
    assert all(piece.dtype in DTYPES and piece.nbytes >= 0 for piece in plan.manifest.pieces)


# FAULTS 7: the frame is honest, the msgpack inside it announces 2^31 entries.
@pytest.mark.parametrize("scheme", ["x" * 129, 8, None])
def test_a_scheme_that_is_no_short_text_is_refused(scheme):
    Manifest(PIECES, scheme="x" * 128).check()
    with pytest.raises(ManifestError, match="is no text of at most 128 characters"):
        Manifest(PIECES, scheme=scheme).check()


def test_scheme_is_part_of_the_identity_and_not_of_the_fingerprint():
    plain, named = Manifest(PIECES), Manifest(PIECES, scheme="fp8:block128x128")
    assert plain.identity() != named.identity()
    assert fingerprint(plain, DIGESTS) == fingerprint(named, DIGESTS)


@pytest.mark.parametrize("config", ["x" * (MAX_CONFIG_LENGTH + 1), {"a": 1}, None])
def test_a_configuration_that_is_no_text_of_its_size_is_refused(config):
    Manifest(PIECES, config="x" * MAX_CONFIG_LENGTH).check()
    with pytest.raises(ManifestError, match="is no text of at most 1,048,576 characters"):
        Manifest(PIECES, config=config).check()
    frame = pack_frame(20, 1, msgspec.msgpack.encode(Plan("r", "v", Manifest((), config=config))))
    with pytest.raises(ProtocolError, match="Plan that is not valid"):
        list(FrameReader(CODEC).feed(frame))


def test_configuration_is_part_of_the_identity_and_not_of_the_fingerprint():
    plain, named = Manifest(PIECES), Manifest(PIECES, config='{"rope_theta":1.0}')
    assert plain.identity() != named.identity()
    assert fingerprint(plain, DIGESTS) == fingerprint(named, DIGESTS)


def test_a_plan_that_announces_billions_of_pieces_costs_nothing():
    honest = msgspec.msgpack.encode({"round_id": "r", "version": "v", "manifest": {"pieces": []}})
    body = honest[:-1] + b"\xdd\x7f\xff\xff\xff"
    tracemalloc.start()
    with pytest.raises(ProtocolError, match="Plan that is not valid"):
        list(FrameReader(CODEC).feed(pack_frame(20, 1, body)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * 2**20


# FAULTS 7
@pytest.mark.parametrize(
    ("entries", "expected"), [(MAX_PIECES + 1, LimitError), (2, ProtocolError)]
)
def test_a_plan_whose_header_lies_about_its_pieces_is_refused(entries, expected):
    body = msgspec.msgpack.encode(Plan("r", "v", Manifest(PIECES)))
    with pytest.raises(expected):
        list(FrameReader(CODEC).feed(pack_frame(20, entries, body)))


# -- kept pieces


def as_kept(piece, digest):
    return KeptPiece(piece, digest)


@given(rows=rows, data=st.data())
def test_what_is_kept_changes_no_fingerprint_and_travels_unchanged(rows, data):
    kept = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    sent = [row for row, stays in zip(rows, kept, strict=True) if not stays]
    parts = Manifest(
        tuple(piece for piece, _ in sent),
        kept=tuple(as_kept(*row) for row, stays in zip(rows, kept, strict=True) if stays),
    )
    parts.check()
    whole = fingerprint(Manifest(tuple(piece for piece, _ in rows)), [each for _, each in rows])
    assert fingerprint(parts, [each for _, each in sent]) == whole
    assert parts.nbytes == sum(piece.nbytes for piece, _ in sent)
    plan = Plan("round", "v1", parts)
    assert list(FrameReader(CODEC).feed(CODEC.encode(plan))) == [plan]


def test_another_kept_digest_is_another_manifest_and_another_set():
    one, other = (Manifest(PIECES[:2], kept=(as_kept(PIECES[2], d),)) for d in DIGESTS[:2])
    assert one.identity() != other.identity()
    assert fingerprint(one, DIGESTS[:2]) != fingerprint(other, DIGESTS[:2])


def test_a_digest_for_a_kept_piece_is_none_of_those_that_are_given():
    with pytest.raises(ValueError, match="3 digests for 2 pieces"):
        fingerprint(Manifest(PIECES[:2], kept=(as_kept(PIECES[2], DIGESTS[2]),)), DIGESTS)


@pytest.mark.parametrize("digest", ["", "0" * 31, "0" * 33, "G" * 32, "A" * 32, "é" * 32, None])
def test_a_kept_piece_without_a_digest_is_refused(digest):
    with pytest.raises(ManifestError, match="expected 32 hexadecimal digits") as caught:
        Manifest((), kept=(as_kept(PIECES[0], digest),)).check()
    assert caught.value.piece == "embed"


@pytest.mark.parametrize(
    ("manifest", "text"),
    [
        (Manifest(PIECES, kept=(as_kept(PIECES[1], "0" * 32),)), "more than once, first 'norm'"),
        (Manifest((), kept=(as_kept(Piece("a", "load", (1,)), "0" * 32),)), "not one of bool"),
        (Manifest((), kept=(as_kept(Piece("a", "int8", (-1,)), "0" * 32),)), "integer >= 0"),
        (
            Manifest(
                (Piece("a", "int8", (2**62,)),),
                kept=(as_kept(Piece("b", "int8", (2**62 + 1,)), "0" * 32),),
            ),
            "larger than 2",
        ),
        (
            Manifest((PIECES[0],) * MAX_PIECES, kept=(as_kept(PIECES[1], "0" * 32),)),
            f"{MAX_PIECES + 1} pieces",
        ),
    ],
    ids=["name-of-a-sent-one", "dtype", "dimension", "size-in-all", "number-in-all"],
)
def test_limits_hold_for_sent_and_kept_pieces_together(manifest, text):
    with pytest.raises(ManifestError, match=text):
        manifest.check()


@given(
    st.recursive(
        st.none() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary(),
        lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=12,
    )
)
def test_no_kept_piece_of_a_peer_does_harm(kept):
    manifest = {"pieces": [], "kept": kept}
    body = msgspec.msgpack.encode({"round_id": "r", "version": "v", "manifest": manifest})
    entries = len(kept) if isinstance(kept, list) else 0
    try:
        (plan,) = FrameReader(CODEC).feed(pack_frame(20, entries, body))
        plan.manifest.check()
    except (ProtocolError, ManifestError):
        return
    assert all(len(piece.digest) == 32 for piece in plan.manifest.kept)


def test_a_plan_whose_header_hides_its_kept_pieces_is_refused():
    kept = tuple(as_kept(piece, "0" * 32) for piece in PIECES)
    body = msgspec.msgpack.encode(Plan("r", "v", Manifest((), kept=kept)))
    with pytest.raises(ProtocolError):
        list(FrameReader(CODEC).feed(pack_frame(20, 0, body)))


def test_kept_pieces_beyond_the_limit_are_refused_by_the_decoder():
    kept = (as_kept(Piece("a", "bool", ()), "0" * 32),) * (MAX_PIECES + 1)
    with pytest.raises(msgspec.ValidationError, match="length <= 262144"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(Manifest((), kept=kept)), type=Manifest)


# -- fingerprints


def test_the_fingerprint_of_known_weights_is_known():
    """It is an interface: other programs, other releases and files on disk hold it."""
    assert fingerprint(Manifest(PIECES), DIGESTS) == "9d7d77b126d15a22ca76da3778275ce2"
    assert fingerprint(Manifest(()), []) == "cbb76c849994a65adf14ae94fb470279"


def test_algorithm_and_base_are_part_of_the_identity():
    prints = {
        fingerprint(Manifest(PIECES, algorithm=algorithm, coverage=coverage, base=base), DIGESTS)
        for algorithm in ("xxh3-128", "wsum64")
        for coverage, base in (("full", None), ("patch", "a" * 32), ("patch", "b" * 32))
    }
    assert len(prints) == 6


def test_digests_must_be_as_many_as_pieces():
    with pytest.raises(ValueError, match="2 digests for 3 pieces"):
        fingerprint(Manifest(PIECES), DIGESTS[:2])


@pytest.mark.parametrize("odd", ["", "0" * 31, "0" * 33, "\u00e9" * 32, "%" * 3])
def test_malformed_digest_is_refused_in_a_fingerprint(odd):
    with pytest.raises(ValueError, match="a digest has 32 hexadecimal digits"):
        fingerprint(Manifest(PIECES), [*DIGESTS[:2], odd])


def test_names_may_hold_whatever_formats_are_made_of():
    pieces = tuple(
        Piece(name, "int8", (1,)) for name in ("100%s", "%", "%%(a)s", "\u00e9\U0001f600")
    )
    digests = [f"{number:032x}" for number in range(len(pieces))]
    listed = [[*msgspec.structs.astuple(p), d] for p, d in zip(pieces, digests, strict=True)]
    canonical = msgspec.msgpack.encode(["xxh3-128", *sorted(listed)])
    assert fingerprint(Manifest(pieces), digests) == xxhash.xxh3_128_hexdigest(canonical)


@given(rows=rows, coverage=st.sampled_from(["full", "patch"]))
def test_all_fingerprints_of_the_same_pieces_are_of_the_canonical_list(rows, coverage):
    pieces = tuple(piece for piece, _ in rows)
    manifest = Manifest(pieces, coverage=coverage, base="b" * 32)
    identities = Identities(manifest)
    for salt in (0, 1):
        digests = [f"{int(digest, 16) ^ salt:032x}" for _, digest in rows]
        listed = [[*msgspec.structs.astuple(p), d] for p, d in zip(pieces, digests, strict=True)]
        canonical = ["xxh3-128", *sorted(listed, key=lambda row: row[0])]
        if coverage == "patch":
            canonical.insert(0, "b" * 32)
        hashed = xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(canonical))
        assert identities.fingerprint(digests) == hashed


def test_a_local_fingerprint_is_never_the_same():
    assert len({local_fingerprint() for _ in range(100)}) == 100
    assert local_fingerprint().startswith("local:")


# FAULTS 2
def test_dimensions_beyond_the_limit_are_refused_before_they_cost_memory():
    piece = Piece("a", "float32", (1,) * 2**20)
    body = msgspec.msgpack.encode(Plan("r", "v", Manifest((piece,))))
    frame = pack_frame(20, 1, body)
    reader = FrameReader(CODEC)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError, match="Expected `array` of length <= 16"):
            list(reader.feed(frame))
        assert tracemalloc.get_traced_memory()[1] < 4 * len(frame)
    finally:
        tracemalloc.stop()


# FAULTS 2
def test_pieces_beyond_the_limit_are_refused_by_the_decoder():
    body = msgspec.msgpack.encode(Manifest((Piece("a", "bool", ()),) * (MAX_PIECES + 1)))
    with pytest.raises(msgspec.ValidationError, match="length <= 262144"):
        msgspec.msgpack.decode(body, type=Manifest)
