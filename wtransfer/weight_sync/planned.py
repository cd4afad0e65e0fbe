"""What follows from the manifest of an update: worked out once, for round after round."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from wtransfer.engines.outline import Outline
from wtransfer.errors import ProtocolError
from wtransfer.manifest import Identities

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wtransfer.manifest import Manifest


class Planned:
    """An update that is planned.

    Args:
        manifest: Its pieces; valid.

    Raises:
        ManifestError: This torch lacks one of the dtypes.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        """Its pieces."""
        self.identity = manifest.identity()
        """By which both sides see that they mean the same pieces."""
        self.outline = Outline.of_manifest(manifest)
        """Its pieces, column by column."""
        self._identities = Identities(manifest)

    def fingerprint(self, digests: Sequence[str]) -> str:
        """Return the identity of the update if its pieces have these digests, in plan order."""
        return self._identities.fingerprint(digests)

    @cached_property
    def columns(self) -> Columns:
        """Its pieces as update infos name them."""
        return Columns(self.manifest, self.outline)


class Columns:
    """The columns that update infos have by habit: names, dtypes and shapes of a row of pieces.

    Both sides have had them with the plan. So of thousands of small tensors it is enough to say
    from which piece to which, and engines need not know that this was all that travelled.

    Args:
        manifest: The pieces.
        outline: The same.
    """

    def __init__(self, manifest: Manifest, outline: Outline) -> None:
        self._outline = outline
        self._dtype_names = [piece.dtype for piece in manifest.pieces]

    def taken_out(self, info: dict[str, Any]) -> tuple[dict[str, Any], tuple[int, int] | None]:
        """Return an update info without what the plan says, and the pieces that it was about.

        Args:
            info: Not changed.

        Returns:
            The info itself and None where it has other columns, or other pieces.
        """
        names = info.get("names")
        # An engine's own data: under these names there may be anything.
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            return info, None
        first = self._outline.numbers.get(names[0])
        if first is None:
            return info, None
        pieces = first, first + len(names)
        said = self._of(pieces, self._shapes)
        if any(info.get(column) != of_plan for column, of_plan in said.items()):
            return info, None
        return {key: value for key, value in info.items() if key not in said}, pieces

    def put_back(self, info: dict[str, Any], pieces: tuple[int, int]) -> dict[str, Any]:
        """Return the update info that `taken_out` was given; both arguments are a peer's.

        Raises:
            ProtocolError: There are no such pieces, or the info has columns of its own.
        """
        first, stop = pieces
        number = len(self._outline)
        if not 0 <= first < stop <= number:
            raise ProtocolError(f"data is about pieces {first} to {stop}, the plan has {number}")
        # Lists of their own, as out of a message: whoever gets them may change them.
        said = self._of(pieces, self._outline.shapes)
        said["shapes"] = list(map(list, said["shapes"]))
        twice = said.keys() & info.keys()
        if twice:
            raise ProtocolError(f"data has {sorted(twice)} of its own, and names pieces as well")
        return {**info, **said}

    @cached_property
    def _shapes(self) -> list[list[int]]:
        return list(map(list, self._outline.shapes))

    def _of(self, pieces: tuple[int, int], shapes: list[Any]) -> dict[str, list[Any]]:
        own = slice(*pieces)
        return {
            "names": self._outline.names[own],
            "dtype_names": self._dtype_names[own],
            "shapes": shapes[own],
        }
