"""Statistics of connectors as vLLM's objects: in its log, and at its Prometheus endpoint.

A connector's ``get_stats`` returns plain numbers; those whose names end in ``_total`` only grow.
Their increase within an interval travels, and adds up over ranks and intervals. All other numbers
are gauges: the last one stands. Values that are no numbers are left out.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

logger = logging.getLogger(f"vllm.{__name__}")  # a child of vLLM's, so that its log has it

INTERVAL_S = 1.0
"""Interval at which a side collects its numbers, in seconds, while vLLM, which asks after every
step, computes something in each."""
TOTAL = "_total"


@dataclass
class KVStats(KVConnectorStats):
    """Numbers of one interval, by ``side_name``."""

    def reset(self) -> None:
        """Clear."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVStats:
        """Add the numbers of another rank, side or interval; return this object."""
        for name, number in other.data.items():
            before = self.data.get(name, 0) if name.endswith(TOTAL) else 0
            self.data[name] = before + number
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the numbers for the log: those that are not 0."""
        return {name: number for name, number in self.data.items() if number}

    def is_empty(self) -> bool:
        """Return whether there is nothing to show. A gauge that has become 0 counts."""
        return not self.data


class KVStatsInterval:
    """The numbers of one side since the last interval.

    Args:
        side: ``scheduler`` or ``worker``.
        get_stats: Returns the numbers.
    """

    def __init__(self, side: str, get_stats: Callable[[], Mapping[str, float]]) -> None:
        self._side = side
        self._get_stats = get_stats
        self._before: dict[str, float] = {}
        self._due = 0.0
        self._has_failed = False

    def take(self, *, at_once: bool = False) -> KVStats | None:
        """Return the numbers since the last time; None within an interval, or if none changed.

        Args:
            at_once: Whether the interval may be shorter: vLLM asks in steps alone, and what no step
                tells stays as it was while the engine is idle.
        """
        now = time.monotonic()
        if now < self._due and not at_once:
            return None
        self._due = now + INTERVAL_S
        try:
            numbers = self._get_stats()
            stats = {name: n for name, n in numbers.items() if isinstance(n, int | float)}
        except Exception:
            # A third party's numbers are not worth the engine's step.
            if not self._has_failed:
                logger.exception("the connector's statistics cannot be read")
            self._has_failed = True
            return None
        data = {}
        for name, number in stats.items():
            before = self._before.get(name, 0)
            if number != before:
                is_counter = name.endswith(TOTAL)
                data[f"{self._side}_{name}"] = max(0, number - before) if is_counter else number
        self._before |= stats
        return KVStats(data) if data else None


class KVPromMetrics(KVConnectorPromMetrics):
    """Shows numbers as ``vllm:wtransfer_kv_<side>_<name>``, each from when it is first seen."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._metrics: dict[str, Any] = {}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record the numbers of an interval."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, number in transfer_stats_data.items():
            is_counter = name.endswith(TOTAL)
            metric = self._metrics.get(name)
            if metric is None:
                metric = self._metrics[name] = (
                    self._counter_cls if is_counter else self._gauge_cls
                )(
                    name=f"vllm:wtransfer_kv_{name}",
                    documentation=f"{name.removesuffix(TOTAL).replace('_', ' ')}, of the connector",
                    labelnames=self._labelnames,
                )
            labelled = metric.labels(*labels)
            (labelled.inc if is_counter else labelled.set)(number)
