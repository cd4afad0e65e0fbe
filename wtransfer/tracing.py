"""OpenTelemetry spans of weight rounds.

In the process of a publisher, or of worker sessions::

    wtransfer.hooks.register(RoundTracer())

Requires opentelemetry-api (``pip install "wtransfer[tracing]"``); the application sets up the
export of spans, as for all its spans.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from wtransfer.errors import PluginNotInstalledError
from wtransfer.registry.hooks import hookimpl

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.trace import Span, TracerProvider

    from wtransfer.weight_sync.report import Report


class RoundTracer:
    """Makes a span of each round; register it with `wtransfer.hooks`.

    On the trainer, ``wtransfer.round``: a child of the span in which ``publish`` was called, with a
    child for each phase: ``init``, ``plan``, ``transfer``, ``prepare``, ``commit``, ``finish``. Its
    status is an error unless the outcome is ``committed`` or ``verified``; so is that of the phase
    in which a round was aborted. On a worker, ``wtransfer.update``: from the plan's acceptance to
    the commit. Both spans have the attribute ``wtransfer.round_id``. Updates of sessions that have
    one name, as those of one process by default, are not told apart.

    Args:
        tracer_provider: Provider that makes the spans; None: the global one.

    Raises:
        PluginNotInstalledError: opentelemetry-api is not installed.
    """

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        try:
            from opentelemetry import trace
        except ImportError as error:
            raise PluginNotInstalledError(
                "tracing needs opentelemetry-api, which is not installed: "
                'pip install "wtransfer[tracing]"'
            ) from error
        self._trace = trace
        self._tracer = trace.get_tracer("wtransfer", tracer_provider=tracer_provider)
        # Several to a key: sessions of one process have one name unless each is given its own.
        self._open: dict[tuple[str, str | None], list[tuple[Span, int]]] = {}
        self._lock = threading.Lock()

    @hookimpl
    def wtransfer_round_started(self, round_id: str, version: str, worker: str | None) -> None:
        """Begin a span."""
        attributes = {"wtransfer.round_id": round_id, "wtransfer.version": version}
        if worker is not None:
            attributes["wtransfer.worker"] = worker
        begun = time.time_ns()
        span = self._tracer.start_span(
            "wtransfer.round" if worker is None else "wtransfer.update",
            attributes=attributes,
            start_time=begun,
        )
        with self._lock:
            self._open.setdefault((round_id, worker), []).append((span, begun))

    @hookimpl
    def wtransfer_weights_committed(
        self, fingerprint: str, round_id: str, worker: str | None
    ) -> None:
        """End the span of a worker."""
        if worker is not None and (found := self._take(round_id, worker)):
            found[0].set_attribute("wtransfer.fingerprint", fingerprint)
            found[0].end()

    @hookimpl
    def wtransfer_round_aborted(
        self, error: BaseException, round_id: str, worker: str | None
    ) -> None:
        """End the span of a worker with an error."""
        if worker is not None and (found := self._take(round_id, worker)):
            self._fail(found[0], error)
            found[0].end()

    @hookimpl
    def wtransfer_round_ended(  # noqa: PLR0917  # the hook's arguments
        self,
        round_id: str,
        outcome: str,
        report: Report | None,
        error: BaseException | None,
        seconds: Mapping[str, float],
        nbytes: int,
        num_workers: int,
    ) -> None:
        """End the span of a round, and add those of its phases."""
        found = self._take(round_id, None)
        if found is None:
            # Registered in the middle of a round.
            return
        span, at = found
        inside = self._trace.set_span_in_context(span)
        phases = [name for name in seconds if name != "total"]
        failed_in = phases[-1] if report is None else "commit"
        for phase in phases:
            child = self._tracer.start_span(phase, inside, start_time=at)
            at += int(seconds[phase] * 1e9)
            if error is not None and phase == failed_in:
                self._fail(child, error)
            child.end(at)
        span.set_attributes(
            {
                "wtransfer.outcome": outcome,
                "wtransfer.num_workers": num_workers,
                "wtransfer.nbytes": nbytes,
            }
        )
        if report is not None:
            span.set_attribute("wtransfer.fingerprint", report.fingerprint)
        if error is not None:
            span.record_exception(error)
            self._fail(span, error)
        elif outcome == "mixed":
            span.set_status(self._trace.StatusCode.ERROR, str(report))
        span.end(max(at, time.time_ns()))

    def _take(self, round_id: str, worker: str | None) -> tuple[Span, int] | None:
        with self._lock:
            found = self._open.pop((round_id, worker), None)
            if found is None:
                return None
            first, *others = found
            if others:
                self._open[round_id, worker] = others
            return first

    def _fail(self, span: Span, error: BaseException) -> None:
        span.set_status(self._trace.StatusCode.ERROR, f"{type(error).__name__}: {error}")
