"""Metrics for Prometheus, read at its own intervals: weight rounds, and offloading specs.

Weight rounds, in the process of a publisher or of worker sessions::

    rounds = RoundCollector(publisher)      # or RoundCollector(session=session)
    wtransfer.hooks.register(rounds)
    prometheus_client.REGISTRY.register(rounds)

Offloading specs; every process has a collector of its own, for the sides that it has::

    collector = OffloadingCollector()
    collector.watch(manager, "manager", engine_id=config.engine_id)
    collector.watch(worker, "worker", engine_id=config.engine_id, rank="0")
    prometheus_client.REGISTRY.register(collector)

A number ``evictions_total`` of a manager becomes the counter
``wtransfer_offloading_manager_evictions_total``; names that do not end in ``_total`` are gauges.

Requires prometheus-client (``pip install "wtransfer[metrics]"``).
"""

from __future__ import annotations

import contextlib
import logging
import math
import numbers
import re
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from wtransfer.errors import PluginNotInstalledError, WTransferError
from wtransfer.registry.hooks import board, hookimpl
from wtransfer.transport.handshake import refusals

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client.core import Metric

    from wtransfer.weight_sync.messages import FleetStatus
    from wtransfer.weight_sync.report import Report, WorkerInfo
    from wtransfer.weight_sync.trainer.publisher import Publisher
    from wtransfer.weight_sync.worker.session import WorkerSession, WorkerStatus

logger = logging.getLogger(__name__)

PREFIX = "wtransfer_offloading"
"""Prefix of the names of offloading metrics."""
_TOTAL = "_total"
_BUCKETS_S = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class RoundCollector:
    """Counts weight rounds; register it with `wtransfer.hooks` and a ``CollectorRegistry``.

    The collector observes the begin and end of rounds and does nothing in between. Catch-ups of
    late workers are rounds as well. What is counted has no more series than there are outcomes and
    classes of errors; workers have a series each only where ``per_worker`` asks for it.

    =========================================  ==================================================
    metric                                     meaning
    =========================================  ==================================================
    ``wtransfer_rounds_started_total``         Rounds by ``side``, ``trainer`` or ``worker``.
    ``wtransfer_rounds_ended_total``           By ``side``, ``outcome`` and class of ``error``. Of
                                               the trainer: ``committed``, ``mixed``, ``verified``
                                               (a dry run), ``aborted``, or ``failed`` (the
                                               publisher failed after its commit was sent). Of a
                                               worker: ``committed``, ``aborted``; a commit that is
                                               rolled back is counted as both.
    ``wtransfer_catch_ups_total``              Those rounds of the trainer that were catch-ups of
                                               late workers, by ``outcome`` and ``error``.
    ``wtransfer_plans_refused_total``          Plans that a worker has refused, by class of
                                               ``error``.
    ``wtransfer_peers_refused_total``          Peers that this process has refused, or that have
                                               refused it, by class of ``error``: a wrong token is
                                               an ``AuthenticationError``; by ``door``:
                                               ``listener`` (of workers, of KV cache), ``dialer``
                                               or ``http``.
    ``wtransfer_observers_seconds_total``      Seconds for which observers were waited for, by
                                               ``hook``.
    ``wtransfer_round_seconds``                Histogram by ``stage`` of the publisher, ``total``
                                               among them; rounds that have a report.
    ``wtransfer_round_worker_seconds``         Histogram by ``stage`` of each worker, likewise.
    ``wtransfer_round_verified_bytes_total``   Bytes that workers have staged and verified.
    ``wtransfer_weights_age_seconds``          Seconds since all workers first had the last
                                               version; a catch-up does not begin it again.
    ``wtransfer_weights_info``                 1; its ``version`` and ``fingerprint``.
    ``wtransfer_workers``                      Joined workers now, by ``state``; with a publisher.
    ``wtransfer_workers_current``              Those that hold its last version; likewise.
    ``wtransfer_hosts_absent``                 Named hosts whose workers have not all joined;
                                               likewise.
    ``wtransfer_round_age_seconds``            Of the round under way, by ``phase``; likewise.
    ``wtransfer_round_idle_seconds``           Seconds since the trainer or a worker of it made
                                               progress; likewise.
    ``wtransfer_round_bytes``                  Bytes of its update, by ``phase``; likewise.
    ``wtransfer_round_staged_bytes``           Those that the slowest worker of it has staged, by
                                               ``phase``; likewise.
    ``wtransfer_joined_worker_info``           1; of each joined worker the ``worker``, the
                                               ``version`` and ``fingerprint`` of its weights, and
                                               its ``state``; with a publisher and ``per_worker``.
    ``wtransfer_joined_worker_state_seconds``  Seconds since they last changed, by ``worker``;
                                               likewise.
    ``wtransfer_joined_worker_staged_bytes``   Bytes of the round under way that it has staged, by
                                               ``worker``; likewise.
    ``wtransfer_worker_info``                  1; the ``worker``, the ``version`` and
                                               ``fingerprint`` of its weights, and its ``state``;
                                               with a session.
    ``wtransfer_worker_state_seconds``         Seconds since its weights or state last changed;
                                               likewise.
    ``wtransfer_update_bytes``                 Of the update on its way, by ``phase``; likewise.
    ``wtransfer_update_staged_bytes``          Those that are here so far; likewise.
    ``wtransfer_update_idle_seconds``          Seconds since bytes of it came, or a step of its
                                               round was done; likewise.
    =========================================  ==================================================

    Args:
        publisher: Publisher whose workers are shown.
        session: Session whose weights are shown.
        per_worker: Show each joined worker of the publisher as well. Default names of workers
            contain the process: each restart then begins new series.

    Raises:
        PluginNotInstalledError: prometheus-client is not installed.
    """

    def __init__(
        self,
        publisher: Publisher | None = None,
        session: WorkerSession | None = None,
        *,
        per_worker: bool = False,
    ) -> None:
        _families()
        import prometheus_client as client

        self._publisher = publisher
        self._session = session
        self._per_worker = per_worker
        self._committed: tuple[str, str, float] | None = None
        # In no registry: the metrics are collected through this object.
        self._started = client.Counter(
            "wtransfer_rounds_started", "Weight rounds that began", ["side"], registry=None
        )
        self._ended = client.Counter(
            "wtransfer_rounds_ended",
            "Weight rounds that ended",
            ["side", "outcome", "error"],
            registry=None,
        )
        self._catch_ups = client.Counter(
            "wtransfer_catch_ups",
            "Weight rounds that were catch-ups of late workers",
            ["outcome", "error"],
            registry=None,
        )
        self._refused = client.Counter(
            "wtransfer_plans_refused", "Plans that a worker has refused", ["error"], registry=None
        )
        if publisher is not None:
            # At 0 from the start: the rate of a series does not show its first count.
            for outcome in ("committed", "mixed", "verified", "aborted", "failed"):
                self._ended.labels(_side(None), outcome, "")
        self._seconds = client.Histogram(
            "wtransfer_round_seconds",
            "Seconds by stage of the publisher",
            ["stage"],
            registry=None,
            buckets=_BUCKETS_S,
        )
        self._worker_seconds = client.Histogram(
            "wtransfer_round_worker_seconds",
            "Seconds by stage of a worker",
            ["stage"],
            registry=None,
            buckets=_BUCKETS_S,
        )
        self._nbytes = client.Counter(
            "wtransfer_round_verified_bytes", "Bytes that workers have verified", registry=None
        )

    # -- observers

    @hookimpl
    def wtransfer_round_started(self, worker: str | None) -> None:
        """Count a round."""
        self._started.labels(_side(worker)).inc()

    @hookimpl
    def wtransfer_weights_committed(
        self, version: str, fingerprint: str, worker: str | None
    ) -> None:
        """Count the commit of a worker; note the version that all workers have."""
        if worker is None:
            # A catch-up brings weights that were committed before: they are no newer by it.
            if self._committed is None or self._committed[:2] != (version, fingerprint):
                self._committed = version, fingerprint, time.time()
        else:
            self._ended.labels(_side(worker), "committed", "").inc()

    @hookimpl
    def wtransfer_round_aborted(self, error: BaseException, worker: str | None) -> None:
        """Count a round that a worker did not commit."""
        if worker is None:
            return
        self._ended.labels(_side(worker), "aborted", type(error).__name__).inc()
        if getattr(error, "phase", None) == "plan":
            self._refused.labels(type(error).__name__).inc()

    @hookimpl
    def wtransfer_round_ended(
        self, outcome: str, report: Report | None, error: BaseException | None, is_catch_up: bool
    ) -> None:
        """Count the outcome of a round of the publisher."""
        name = "" if error is None else type(error).__name__
        self._ended.labels(_side(None), outcome, name).inc()
        if is_catch_up:
            self._catch_ups.labels(outcome, name).inc()
        if report is None:
            return
        for stage, seconds in report.seconds.items():
            self._seconds.labels(stage).observe(seconds)
        for worker in report.workers:
            self._nbytes.inc(worker.nbytes)
            for stage, seconds in worker.seconds.items():
                self._worker_seconds.labels(stage).observe(seconds)

    # -- for Prometheus

    def describe(self) -> list[Metric]:
        """Return nothing: names are unique to this collector."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        core = _families()
        for each in (
            self._started,
            self._ended,
            self._catch_ups,
            self._refused,
            self._seconds,
            self._worker_seconds,
            self._nbytes,
        ):
            yield from each.collect()
        yield from _of_the_process()
        if self._committed is not None:
            version, fingerprint, since = self._committed
            yield core.GaugeMetricFamily(
                "wtransfer_weights_age_seconds",
                "Seconds since all workers first had the last version",
                value=max(0.0, time.time() - since),
            )
            info = core.GaugeMetricFamily(
                "wtransfer_weights_info",
                "The last version that all workers had",
                labels=["version", "fingerprint"],
            )
            info.add_metric([version, fingerprint], 1)
            yield info
        # A process forked off the publisher's, or the session's, has neither.
        with contextlib.suppress(WTransferError):
            if self._publisher is not None:
                yield from self._joined(self._publisher.status())
        with contextlib.suppress(WTransferError):
            if self._session is not None:
                yield from _held(self._session.status())

    def _joined(self, fleet: FleetStatus) -> Iterator[Metric]:
        core, workers = _families(), fleet.workers
        states = dict.fromkeys(("fresh", "serving", "pending", "behind", "empty"), 0)
        joined = core.GaugeMetricFamily("wtransfer_workers", "Joined workers", labels=["state"])
        for state, number in (states | Counter(each.state for each in workers)).items():
            joined.add_metric([state], number)
        yield joined
        yield core.GaugeMetricFamily(
            "wtransfer_workers_current",
            "Joined workers that hold the last version",
            value=sum(each.fingerprint == fleet.fingerprint for each in workers),
        )
        yield core.GaugeMetricFamily(
            "wtransfer_hosts_absent",
            "Named hosts whose workers have not all joined",
            value=len(fleet.absent),
        )
        if (now := fleet.round) is not None:
            by_phase = {"phase": now.phase}
            yield _gauge("wtransfer_round_age_seconds", "Age of a round", now.age_s, by_phase)
            text = "Seconds since a round made progress"
            yield _gauge("wtransfer_round_idle_seconds", text, now.idle_s, by_phase)
            text = "Bytes of the update of a round"
            yield _gauge("wtransfer_round_bytes", text, now.nbytes, by_phase)
            staged = [each.nbytes for each in workers if each.nbytes is not None]
            text += " that its slowest worker has staged"
            yield _gauge("wtransfer_round_staged_bytes", text, min(staged, default=0), by_phase)
        if self._per_worker:
            yield from _each_of(workers)


def _of_the_process() -> Iterator[Metric]:
    core = _families()
    refused = core.CounterMetricFamily(
        "wtransfer_peers_refused",
        "Peers that were refused, or have refused this process",
        labels=["door", "error"],
    )
    for (door, error), number in refusals.counts().items():
        refused.add_metric([door, error], number)
    yield refused
    waited = core.CounterMetricFamily(
        "wtransfer_observers_seconds", "Seconds that observers were waited for", labels=["hook"]
    )
    for hook, seconds in board.seconds().items():
        waited.add_metric([hook], seconds)
    yield waited


def _each_of(workers: list[WorkerInfo]) -> Iterator[Metric]:
    core, prefix = _families(), "wtransfer_joined_worker"
    info = core.GaugeMetricFamily(
        f"{prefix}_info",
        "The joined worker and its weights",
        labels=["worker", "version", "fingerprint", "state"],
    )
    since = core.GaugeMetricFamily(
        f"{prefix}_state_seconds", "Seconds since these last changed", labels=["worker"]
    )
    staged = core.GaugeMetricFamily(
        f"{prefix}_staged_bytes", "Bytes of the round that it has staged", labels=["worker"]
    )
    # Sessions of one process have one name by default; a scrape has each series once.
    for name, each in {each.worker: each for each in workers}.items():
        info.add_metric([name, each.version or "", each.fingerprint, each.state], 1)
        since.add_metric([name], each.since_s)
        if each.nbytes is not None:
            staged.add_metric([name], each.nbytes)
    yield from (info, since, staged)


def _held(status: WorkerStatus) -> Iterator[Metric]:
    yield _gauge(
        "wtransfer_worker_info",
        "The worker and its weights",
        1,
        {
            "worker": status.worker,
            "version": status.version or "",
            "fingerprint": status.fingerprint,
            "state": status.state,
        },
    )
    text = "Seconds since the weights or the state last changed"
    yield _gauge("wtransfer_worker_state_seconds", text, status.since_s)
    if (update := status.update) is not None:
        phase = {"phase": update.phase}
        text = "Bytes of the update on its way"
        yield _gauge("wtransfer_update_bytes", text, update.nbytes, phase)
        text += " that are here so far"
        yield _gauge("wtransfer_update_staged_bytes", text, update.staged_nbytes, phase)
        text = "Seconds since the update on its way made progress"
        yield _gauge("wtransfer_update_idle_seconds", text, update.idle_s, phase)


def _gauge(name: str, text: str, value: float, labels: Mapping[str, str] | None = None) -> Metric:
    labels = labels or {}
    family: Metric = _families().GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)  # type: ignore[attr-defined]
    return family


def _side(worker: str | None) -> str:
    return "trainer" if worker is None else "worker"


class HasStats(Protocol):
    """A manager, a worker, or anything else with numbers."""

    def get_stats(self) -> Mapping[str, float]:
        """Return numbers by name."""


class _Watched(NamedTuple):
    source: HasStats
    side: str
    labels: dict[str, str]


class OffloadingCollector:
    """Reads numbers when asked for them; register it with a ``CollectorRegistry``.

    Numbers are read on the collecting thread. The built-in specs allow that; for a source that does
    not, watch an object that returns a copy made by the owner's thread.

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
            source: Object with ``get_stats``.
            side: ``manager`` or ``worker``; a part of the names.
            **labels: Labels that tell this source from others of its side: engine, rank.
        """
        with self._lock:
            self._watched.append(_Watched(source, side, labels))

    def forget(self, source: HasStats) -> None:
        """Stop showing the numbers of a source; does nothing if they are not shown."""
        with self._lock:
            self._watched = [each for each in self._watched if each.source is not source]

    def describe(self) -> list[Metric]:
        """Return nothing: the names are known only when the numbers are read."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every number of every watched side, by name."""
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
            numbers_by_name = {
                re.sub(r"[^a-zA-Z0-9_]", "_", name): float(number)
                for name, number in watched.source.get_stats().items()
                if isinstance(number, (float, numbers.Real))
            }
        except Exception:
            if id(watched.source) not in self._failed:
                self._failed.add(id(watched.source))
                logger.exception("%s cannot say its numbers", type(watched.source).__name__)
            return
        for name, number in numbers_by_name.items():
            if not math.isnan(number):
                yield f"{PREFIX}_{watched.side}_{name}", number


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
