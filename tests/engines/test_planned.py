"""What the plan has said is not said again: data names a row of pieces instead of its columns."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wtransfer.errors import ProtocolError
from wtransfer.manifest import Manifest, Piece, fingerprint
from wtransfer.weight_sync.planned import Planned

PIECES = (
    Piece("a", "float32", (4,)),
    Piece("b", "bfloat16", (2, 2)),
    Piece("scalar", "int64", ()),
    Piece("empty", "float32", (0, 3)),
)
MANIFEST = Manifest(PIECES)
COLUMNS = Planned(MANIFEST).columns


def info(first=0, stop=4, **instead):
    own = PIECES[first:stop]
    columns = {
        "names": [piece.name for piece in own],
        "dtype_names": [piece.dtype for piece in own],
        "shapes": [list(piece.shape) for piece in own],
    }
    return {**columns, "segment": 3, "offsets": [0] * len(own), **instead}


@given(st.data())
def test_columns_that_the_plan_has_are_taken_out_and_come_back(data):
    first = data.draw(st.integers(0, 3))
    stop = data.draw(st.integers(first + 1, 4))
    given_info = info(first, stop)
    before = copy.deepcopy(given_info)
    left, pieces = COLUMNS.taken_out(given_info)
    assert given_info == before
    assert pieces == (first, stop)
    assert left == {"segment": 3, "offsets": given_info["offsets"]}
    assert COLUMNS.put_back(left, pieces) == given_info


@pytest.mark.parametrize(
    "odd",
    [
        {},
        {"names": []},
        {"names": None},
        {"names": "a"},
        {"names": {"a": 1}},
        {"names": {"b", "a"}},
        {"names": 3},
        {"names": True},
        {"names": [1, 2]},
        {"names": [["a"]]},
        {"names": ["a", "b", "scalar", "other"]},
        {"names": ["b", "a", "scalar", "empty"]},
        {"names": ["a", "b", "scalar", "empty", "more"]},
        {"dtype_names": ["float32"] * 4},
        {"dtype_names": ["float32"]},
        {"shapes": [[4], [2, 2], [], [0]]},
        {"shapes": [4, [2, 2], [], [0, 3]]},
        {"shapes": None},
    ],
)
def test_any_other_info_travels_as_it_is(odd):
    given_info = info(**odd) if odd else {}
    assert COLUMNS.taken_out(given_info) == (given_info, None)


def test_an_info_that_lacks_a_column_travels_as_it_is():
    given_info = info()
    del given_info["shapes"]
    assert COLUMNS.taken_out(given_info) == (given_info, None)


@pytest.mark.parametrize("pieces", [(0, 5), (-1, 2), (2, 2), (3, 1), (4, 5), (0, 2**62)])
def test_pieces_that_there_are_not_are_refused(pieces):
    with pytest.raises(ProtocolError, match="the plan has 4"):
        COLUMNS.put_back({}, pieces)


def test_an_info_may_not_say_what_the_plan_says():
    with pytest.raises(ProtocolError, match=r"\['names'\] of its own"):
        COLUMNS.put_back({"names": ["z"]}, (0, 1))


def test_who_changes_what_was_put_back_changes_no_later_one():
    first = COLUMNS.put_back({}, (0, 2))
    first["names"].clear()
    first["shapes"][0].append(9)
    first["shapes"].append([1])
    assert COLUMNS.put_back({}, (0, 2)) == {
        key: value for key, value in info(0, 2).items() if key not in ("segment", "offsets")
    }


def test_what_follows_from_a_manifest_is_what_it_says_itself():
    planned = Planned(MANIFEST)
    digests = [f"{number:032x}" for number in range(4)]
    assert planned.identity == MANIFEST.identity()
    assert planned.fingerprint(digests) == fingerprint(MANIFEST, digests)
    assert planned.outline.nbytes == MANIFEST.nbytes
