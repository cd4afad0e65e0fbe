"""Ranks of a host as processes of their own: each takes its plans from one Unix socket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from wtransfer.errors import WTransferError
from wtransfer.testing.mini_engine.build import HostSettings  # noqa: TC001  (msgspec reads it)
from wtransfer.testing.mini_engine.line import called_back
from wtransfer.testing.mini_engine.messages import Ready, StepPlan, StepResult
from wtransfer.transport.rendezvous import host_rendezvous

if TYPE_CHECKING:
    from collections.abc import Callable

    from wtransfer.testing.mini_engine.line import Line

HOST = "127.0.0.1"
"""Where the ranks' group listens."""

_T = TypeVar("_T")


class Meeting(msgspec.Struct, frozen=True):
    """Where the ranks form their group."""

    port: int
    """At `HOST`."""
    name: str
    """Of the rendezvous."""


class Start(msgspec.Struct, frozen=True):
    """The first message to a rank."""

    rank: int
    """Which it is."""
    settings: HostSettings
    """Of the host."""
    meeting: Meeting | None
    """None: it is the only one."""


class Order(msgspec.Struct, frozen=True):
    """What a rank shall do."""

    plan: StepPlan | None = None
    """A step; None: say what was done so far."""


_READY = msgspec.msgpack.Decoder(Ready)
_RESULTS = msgspec.msgpack.Decoder(StepResult)
_NUMBERS = msgspec.msgpack.Decoder(dict[str, float])


class RemoteWorkers:
    """All ranks of a host, each in a process of its own.

    Args:
        settings: Of the host.
        spawn: Starts a process that calls `rank_process.main` with the address that it is given.
    """

    def __init__(self, settings: HostSettings, spawn: Callable[[str], object]) -> None:
        self._lines: list[Line] = []
        self._rendezvous = host_rendezvous(HOST) if settings.num_ranks > 1 else None
        meeting = (
            Meeting(self._rendezvous.port, self._rendezvous.name) if self._rendezvous else None
        )
        try:
            for rank in range(settings.num_ranks):
                line = called_back(f"rank {rank}", spawn)
                self._lines.append(line)
                line.send(Start(rank, settings, meeting))
            # Only now: they wait for each other.
            self._ready = self._hear(_READY)
        except BaseException:
            self.close()
            raise

    def handshakes(self) -> list[Any]:
        """Return what each rank's side of the connector says before the first step."""
        return [ready.handshake for ready in self._ready]

    def step(self, plan: StepPlan) -> list[StepResult]:
        """Let every rank take a step."""
        for line in self._lines:
            line.send(Order(plan))
        return self._hear(_RESULTS)

    def get_stats(self) -> list[dict[str, float]]:
        """Return the numbers of each rank's side of the connector."""
        for line in self._lines:
            line.send(Order())
        return self._hear(_NUMBERS)

    def _hear(self, decoder: msgspec.msgpack.Decoder[_T]) -> list[_T]:
        """Return what every rank says, in order of rank."""
        heard, trouble = [], None
        for line in self._lines:
            try:
                heard.append(line.receive(decoder))
            except WTransferError as error:  # noqa: PERF203  # of each its own
                # Often that another rank is gone: that one's own line says so better.
                if line.is_lost:
                    raise
                trouble = trouble or error
        if trouble is not None:
            raise trouble
        return heard

    def close(self) -> None:
        """Hang up; the ranks end by themselves."""
        for line in self._lines:
            line.close()
        if self._rendezvous is not None:
            self._rendezvous.close()
