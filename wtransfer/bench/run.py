"""One run of the bench: which rows, whether there is room for them, and their numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wtransfer.bench.lab import Lab
from wtransfer.bench.room import require_room
from wtransfer.bench.row import Failed
from wtransfer.bench.weights import measures
from wtransfer.errors import WTransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from wtransfer.bench.row import Measure, Row
    from wtransfer.bench.settings import Settings


def rows_named(names: Sequence[str], settings: Settings) -> list[Measure]:
    """Return what measures the rows of weights of these names, or all if there is no name.

    Raises:
        ValueError: There is no such row.
    """
    return chosen_of(measures(settings), names)


def chosen_of(measures: Iterable[Measure], names: Sequence[str]) -> list[Measure]:
    """Return those of these names, or all of them if there is no name.

    Raises:
        ValueError: There is no such row.
    """
    known = {each.name: each for each in measures}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"there is no row {unknown[0]!r}; there are {', '.join(known)}")
    return [each for name, each in known.items() if not names or name in names]


def measure(
    chosen: Sequence[Measure], settings: Settings, on_scene: Callable[[str], None]
) -> list[Row | Failed]:
    """Measure, row after row; one that fails does not keep the others from being measured.

    Args:
        chosen: The rows.
        settings: Their sizes.
        on_scene: Called with the name of every scene before it is played.

    Raises:
        StagingMemoryError: There is too little memory for these sizes.
    """
    require_room(settings)
    return measure_rows(chosen, settings, on_scene)


def measure_rows(
    chosen: Sequence[Measure], settings: Settings, on_scene: Callable[[str], None]
) -> list[Row | Failed]:
    """Measure as `measure` does, whether there is room or not."""
    with Lab(settings, on_scene) as lab:
        return [_row_of(each, lab) for each in chosen]


def _row_of(measured: Measure, lab: Lab) -> Row | Failed:
    try:
        return measured.run(lab)
    except WTransferError as error:
        return Failed(measured.name, measured.what, str(error))
