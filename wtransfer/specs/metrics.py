"""Numbers of offloading specs for Prometheus, which reads them when it likes.

Every process has a collector of its own, for the sides that it has::

    collector = OffloadingCollector()
    collector.watch(manager, "manager", engine_id=config.engine_id)
    collector.watch(worker, "worker", engine_id=config.engine_id, rank="0")
    prometheus_client.REGISTRY.register(collector)

A number ``evictions_total`` of a manager becomes the counter
``wtransfer_offloading_manager_evictions_total``; names that do not end in ``_total`` are gauges. It
needs prometheus-client (``pip install "wtransfer[metrics]"``).
"""

from __future__ import annotations

import logging
import math
import re
import threading
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from wtransfer.errors import PluginNotInstalledError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client.core import Metric

logger = logging.getLogger(__name__)

PREFIX = "wtransfer_offloading"
"""What every name begins with."""
_TOTAL = "_total"


class HasStats(Protocol):
    """A manager, a worker, or anything else with numbers."""

    def get_stats(self) -> Mapping[str, float]:
        """Return numbers by name."""


class _Watched(NamedTuple):
    source: HasStats
    side: str
    labels: dict[str, str]


class OffloadingCollector:
    """Reads numbers when it is asked for them; register it with a ``CollectorRegistry``.

    Numbers are read on the thread of whoever asks. Those of the built-in specs may be; where others
    may not, watch an object that returns a copy which the owner's thread has made.

    Raises:
        PluginNotInstalledError: prometheus-client is not installed.
    """

    def __init__(self) -> None:
        _families()
        self._lock = threading.Lock()
        self._watched: list[_Watched] = []
        self._failed: set[int] = set()

    def watch(self, source: HasStats, side: str, **labels: str) -> None:
        """Show the numbers of a manager or a worker from now on.

        Args:
            source: Has ``get_stats``.
            side: ``manager`` or ``worker``; a part of the names.
            **labels: What tells this one from others of its side: engine, rank.
        """
        with self._lock:
            self._watched.append(_Watched(source, side, labels))

    def forget(self, source: HasStats) -> None:
        """Show its numbers no more; nothing happens if they are not shown."""
        with self._lock:
            self._watched = [each for each in self._watched if each.source is not source]

    def describe(self) -> list[Metric]:
        """Return nothing: which names there are is known when they are read."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every number of every side that is watched, by name."""
        with self._lock:
            watched = list(self._watched)
        label_names = sorted({name for each in watched for name in each.labels})
        families: dict[str, Metric] = {}
        for each in watched:
            values = [each.labels.get(name, "") for name in label_names]
            for name, number in self._numbers(each):
                if name not in families:
                    families[name] = _family(name, label_names)
                families[name].add_metric(values, number)  # type: ignore[attr-defined]
        yield from families.values()

    def _numbers(self, watched: _Watched) -> Iterator[tuple[str, float]]:
        """Yield full names and numbers; one source that fails does not take the others with it."""
        try:
            stats = dict(watched.source.get_stats())
        except Exception:
            if id(watched.source) not in self._failed:
                self._failed.add(id(watched.source))
                logger.exception("%s cannot say its numbers", type(watched.source).__name__)
            return
        for name, number in stats.items():
            if isinstance(number, (int, float)) and not math.isnan(number):
                plain = re.sub(r"[^a-zA-Z0-9_]", "_", name)
                yield f"{PREFIX}_{watched.side}_{plain}", float(number)


def _family(name: str, label_names: list[str]) -> Metric:
    families = _families()
    text = name.removeprefix(f"{PREFIX}_").removesuffix(_TOTAL).replace("_", " ")
    text = f"{text}, as get_stats says it".capitalize()
    if name.endswith(_TOTAL):
        family: Metric = families.CounterMetricFamily(name, text, labels=label_names)
    else:
        family = families.GaugeMetricFamily(name, text, labels=label_names)
    return family


def _families() -> Any:
    try:
        from prometheus_client import core
    except ImportError as error:
        raise PluginNotInstalledError(
            "metrics need prometheus-client, which is not installed: "
            'pip install "wtransfer[metrics]"'
        ) from error
    return core
