"""An update fits a target, or every name that does not is listed."""

from __future__ import annotations

import pytest
import torch

from wtransfer.errors import ManifestError, SchemaError
from wtransfer.manifest import Manifest, Piece
from wtransfer.weight_sync.worker.schema import check_fit
from wtransfer.weights import TensorSpec

SCHEMA = {
    "embed": TensorSpec(torch.bfloat16, (4, 2), aliases=("head",)),
    "norm": TensorSpec(torch.float32, (8,)),
    "step": TensorSpec(torch.int64, ()),
}
FITTING = (
    Piece("embed", "bfloat16", (4, 2)),
    Piece("norm", "float32", (8,)),
    Piece("step", "int64", ()),
)


def with_piece(name, *change):
    return Manifest(tuple(Piece(name, *change) if p.name == name else p for p in FITTING))


# FAULTS 1
@pytest.mark.parametrize(
    ("piece", "line"),
    [
        (("norm", "float64", (8,)), "norm: wanted float32 [8], got float64 [8]"),
        (("norm", "float32", (2, 4)), "norm: wanted float32 [8], got float32 [2, 4]"),
        (("norm", "float32", (8, 1)), "norm: wanted float32 [8], got float32 [8, 1]"),
        (("norm", "int32", (8,)), "norm: wanted float32 [8], got int32 [8]"),
        (("embed", "bfloat16", (2, 4)), "embed: wanted bfloat16 [4, 2], got bfloat16 [2, 4]"),
        (("step", "int64", (1,)), "step: wanted int64 [], got int64 [1]"),
    ],
)
def test_another_dtype_or_shape_is_named_with_both(piece, line):
    with pytest.raises(SchemaError) as caught:
        check_fit(with_piece(*piece), SCHEMA, cast=False)
    assert caught.value.mismatches == [line]
    assert caught.value.piece == piece[0]
    assert line in str(caught.value)


# FAULTS 1
def test_of_many_mismatches_the_first_twenty_are_listed_and_all_are_counted():
    schema = {f"w{i}": TensorSpec(torch.float32, (1,)) for i in range(50)}
    pieces = tuple(Piece(name, "float32", (2,)) for name in schema)
    with pytest.raises(SchemaError, match="in 50 of its names") as caught:
        check_fit(Manifest(pieces), schema, cast=False)
    assert len(caught.value.mismatches) == 20
    assert "... and 30 more" in str(caught.value)


def test_names_that_do_not_meet_are_shown_side_by_side_with_what_would_map_them():
    pieces = tuple(Piece(f"experts.{n}", "float32", (1,)) for n in range(5))
    with pytest.raises(SchemaError) as caught:
        check_fit(Manifest(pieces), SCHEMA, cast=False)
    assert str(caught.value).endswith(
        "\nthe update has 'experts.0', 'experts.1', 'experts.2' and 2 more; the target wants "
        "'embed', 'norm', 'step': the publisher can map its names and tensors to those of the "
        "target, Publisher(form=...); a source or a stream has to yield those"
    )


def test_only_what_a_cast_would_mend_is_said_to_be_mended_by_one():
    def refusal(*piece, cast=False):
        with pytest.raises(SchemaError) as caught:
            check_fit(with_piece(*piece), SCHEMA, cast=cast, cast_hint="say please")
        return str(caught.value)

    assert "convert floating dtypes: say please" in refusal("embed", "float32", (4, 2))
    assert "say please" not in refusal("embed", "float32", (2, 4))
    assert "say please" not in refusal("step", "int32", ())
    assert "say please" not in refusal("step", "int32", (), cast=True)


@pytest.mark.parametrize("piece", [("embed", "int16", (4, 2)), ("step", "int32", ())])
def test_a_cast_never_crosses_between_floats_and_integers(piece):
    with pytest.raises(SchemaError, match=piece[0]):
        check_fit(with_piece(*piece), SCHEMA, cast=True)


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no such dtype")
def test_numbers_that_share_a_byte_are_cast_neither_way():
    packed = SCHEMA | {"norm": TensorSpec(torch.float4_e2m1fn_x2, (8,))}
    check_fit(with_piece("norm", "float4_e2m1fn_x2", (8,)), packed, cast=False)
    for piece, schema in (
        (("embed", "float4_e2m1fn_x2", (4, 2)), SCHEMA),
        (("norm", "float32", (8,)), packed),
    ):
        with pytest.raises(SchemaError, match=piece[0]) as caught:
            check_fit(with_piece(*piece), schema, cast=True)
        assert "can be told to convert" not in str(caught.value)


# FAULTS 45
@pytest.mark.parametrize("names", [("embed",), ("head",), ("embed", "head")])
def test_tied_weights_are_covered_by_any_of_their_names(names):
    pieces = tuple(Piece(name, "bfloat16", (4, 2)) for name in names)
    check_fit(Manifest((*FITTING[1:], *pieces)), SCHEMA, cast=False)


@pytest.mark.parametrize(
    "manifest",
    [
        Manifest(FITTING, coverage="slice"),
        Manifest(FITTING, coverage="patch", base="0" * 32),
        Manifest((Piece("norm", "float32", (8,), "0:4"), *FITTING)),
    ],
)
def test_parts_of_weights_are_not_taken_yet(manifest):
    with pytest.raises(ManifestError, match="only"):
        check_fit(manifest, SCHEMA, cast=False)
