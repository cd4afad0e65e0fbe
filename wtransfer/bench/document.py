"""A run as plain data, for ``--json``. Keys and names of rows are stable."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from wtransfer.bench.row import Failed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wtransfer.bench.connectors import ConnectorSettings
    from wtransfer.bench.machine import Machine
    from wtransfer.bench.offload import OffloadSettings
    from wtransfer.bench.row import Row
    from wtransfer.bench.settings import Settings


def document(
    found: Sequence[Row | Failed],
    settings: Settings | OffloadSettings | ConnectorSettings,
    machine: Machine,
) -> dict[str, Any]:
    """Return everything that a run found."""
    return {
        "machine": asdict(machine),
        "settings": asdict(settings),
        "rows": {each.name: _row(each) for each in found},
    }


def _row(row: Row | Failed) -> dict[str, Any]:
    if isinstance(row, Failed):
        return {"what": row.what, "error": row.error}
    return {
        "what": row.what,
        "unit": row.unit,
        **row.spread._asdict(),
        "goal": None if row.goal is None else row.goal._asdict(),
        "limit": row.limit,
        "reached": row.reached,
        "beside": row.beside,
        "stages": row.stages,
        "note": row.note,
        "error": None,
    }
