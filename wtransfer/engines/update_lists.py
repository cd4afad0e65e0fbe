"""Update infos that consist of lists, one entry per tensor in each."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from wtransfer.errors import ManifestError
from wtransfer.manifest import DTYPES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def check_lengths(info: object, fields: Iterable[str]) -> None:
    """Raise unless the lists have as many entries as `names`.

    Args:
        info: An update info with the field `names`.
        fields: Its lists.

    Raises:
        ValueError: The first list that is odd is named.
    """
    wanted = len(info.names)  # type: ignore[attr-defined]  # by contract
    for field in fields:
        found = len(getattr(info, field))
        if found != wanted:
            raise ValueError(f"`{field}` has {found} entries, `names` has {wanted}")


def check_dtypes(dtype_names: Iterable[str]) -> None:
    """Raise unless every name is one of the table's.

    Raises:
        ManifestError: One is not; nothing of a peer's is looked up in torch.
    """
    unknown = set(dtype_names) - DTYPES.keys()
    if unknown:
        raise ManifestError(f"{unknown.pop()!r:.80} is no wire dtype")


def check_shapes(names: Iterable[str], shapes: Sequence[Iterable[int]]) -> None:
    """Raise unless every shape consists of whole numbers of at least 0.

    Raises:
        ManifestError: The first one that does not is named.
        TypeError: One is no list at all.
    """
    # By loops in C: there may be thousands, of which none is wrong.
    sizes = list(itertools.chain.from_iterable(shapes))
    if set(map(type, sizes)) <= {int} and min(sizes, default=0) >= 0:
        return
    for name, shape in zip(names, shapes, strict=True):
        if any(type(size) is not int or size < 0 for size in shape):
            raise ManifestError(f"{name!r:.80} has the shape {shape!r:.80}")
