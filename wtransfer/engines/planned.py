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
        self._columns: dict[str, list[Any]] = {
            "names": outline.names,
            "dtype_names": [piece.dtype for piece in manifest.pieces],
            # Lists, as they would come out of a message.
            "shapes": list(map(list, outline.shapes)),
        }
        self._numbers = outline.numbers

    def taken_out(self, info: dict[str, Any]) -> tuple[dict[str, Any], tuple[int, int] | None]:
        """Return an update info without what the plan says, and the pieces that it was about.

        Args:
            info: Not changed.

        Returns:
            The info itself and None where it has other columns, or other pieces.
        """
        names = info.get("names")
        first = self._numbers.get(names[0]) if names and isinstance(names[0], str) else None
        if not isinstance(names, list) or first is None:
            return info, None
        pieces = first, first + len(names)
        said = self._of(pieces)
        if any(info.get(column) != of_plan for column, of_plan in said.items()):
            return info, None
        return {key: value for key, value in info.items() if key not in said}, pieces

    def put_back(self, info: dict[str, Any], pieces: tuple[int, int]) -> dict[str, Any]:
        """Return the update info that `taken_out` was given; both arguments are a peer's.

        Raises:
            ProtocolError: There are no such pieces, or the info has columns of its own.
        """
        first, stop = pieces
        number = len(self._numbers)
        if not 0 <= first < stop <= number:
            raise ProtocolError(f"data is about pieces {first} to {stop}, the plan has {number}")
        said = self._of(pieces)
        twice = said.keys() & info.keys()
        if twice:
            raise ProtocolError(f"data has {sorted(twice)} of its own, and names pieces as well")
        return {**info, **said}

    def _of(self, pieces: tuple[int, int]) -> dict[str, list[Any]]:
        return {name: column[slice(*pieces)] for name, column in self._columns.items()}
