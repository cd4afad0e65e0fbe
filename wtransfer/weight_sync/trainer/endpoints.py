"""Register a publisher with the endpoints that lead to its workers."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wtransfer.calls import map_concurrently, raise_failed
from wtransfer.errors import AddressError, HostsError, StallError, WTransferError
from wtransfer.transport.address import parse_address
from wtransfer.weight_sync.http.client import HttpClient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from wtransfer.engines.interface import WeightSyncClient
    from wtransfer.weight_sync.messages import Hello

logger = logging.getLogger(__name__)

LEAVE_S = 1.0
"""Longest time for endpoints to leave when their publisher closes, in seconds."""
_GRACE_S = 1.0


@dataclass(frozen=True)
class Incomplete:
    """An endpoint of several ranks of which not every rank has joined."""

    name: str
    """The endpoint."""
    some: bool
    """True if any rank has joined, be it of an instance that is not complete."""
    joined: int
    """Ranks of complete instances."""
    wanted: int
    """Ranks behind the endpoint."""

    def __str__(self) -> str:
        if self.wanted == 1:
            return self.name
        return f"{self.name} ({self.joined} of {self.wanted} ranks)"


class Endpoints:
    """Lets the workers behind endpoints join one publisher, and leave it.

    An endpoint that names its worker leads to that one. Any other endpoint is a serving engine,
    with one or more workers that apply an update when the engine is called.

    Args:
        token: Token for URLs that carry none.
        timeout_s: Longest time for an endpoint's answer, in seconds.
    """

    def __init__(self, token: str | None, timeout_s: float) -> None:
        self.workers: dict[str, str | None] = {}
        """Endpoint that has joined -> its worker; None for a serving engine."""
        self.missing: dict[str, WTransferError] = {}
        """Endpoint that was asked last and has not joined -> its error."""
        self._token = token
        self._timeout_s = timeout_s
        self._clients: dict[str, Any] = {}
        self._num_ranks: dict[str, int | None] = {}
        self._asked: set[str] = set()

    def add(self, hosts: Iterable[str | WeightSyncClient]) -> None:
        """Add endpoints, to be asked by `register`.

        Raises:
            AddressError: A URL cannot be read.
            ValueError: An endpoint was added before.
        """
        for host in hosts:
            client: Any = host
            if isinstance(host, str):
                client = HttpClient(host, self._token, timeout_s=self._timeout_s)
            name = str(getattr(client, "name", repr(client)))
            if name in self._clients:
                raise ValueError(f"host {name} is named twice; name each host once")
            self._clients[name] = client

    def register(self, address: str, token: str, *, may_drop: bool = False) -> None:
        """Ask all endpoints at once to join a publisher; returns when all have answered.

        Args:
            address: The publisher's.
            token: The publisher's; sent to endpoints that have another.
            may_drop: True: endpoints that fail are left out, in `missing`, as long as one joins.

        Raises:
            AddressError: An endpoint is on another host, and could not dial the address.
            HostsError: Several failed, or two name the same worker.
            WTransferError: An endpoint cannot be reached, or refuses.
        """
        calls = {}
        for name, client in self._clients.items():
            _check_dialable(address, name, client)
            publisher = {"address": address, "host": name}
            if getattr(client, "token", None) != token:
                publisher["token"] = token
            calls[name] = functools.partial(_join, client, publisher)
        # Before any answer: an endpoint that answers too late has joined all the same, and must
        # leave.
        self._asked |= set(calls)
        answers, failed = map_concurrently(calls, 2 * self._timeout_s + _GRACE_S)
        if not (may_drop and answers):
            raise_failed(failed, len(calls))
        for name, error in failed.items():
            logger.warning("%s is left out until it is invited again: %s", name, error)
        self.missing = failed
        named: dict[str, str] = {}
        for name, (worker, num_ranks) in answers.items():
            self.workers[name], self._num_ranks[name] = worker, num_ranks
            # With one name for two workers, the proof of one would count for the other.
            if worker is not None and named.setdefault(worker, name) != name:
                raise HostsError(
                    f"{named[worker]} and {name} both call their worker {worker!r}; start them "
                    "under names of their own (wtransfer worker --name), and name each host once"
                )
        for name in self.engines:
            client = self._clients[name]
            if isinstance(client, HttpClient) and client.url.token is not None:
                logger.warning(
                    "the token in the URL of %s is of no use: a serving engine does not check it, "
                    "and joins with the WTRANSFER_TOKEN of its own environment",
                    name,
                )

    @property
    def engines(self) -> set[str]:
        """Serving engines among the endpoints that have joined."""
        joined = self.workers.keys() - self.missing.keys()
        return {name for name in joined if self.workers[name] is None}

    def incomplete(self, joined: Iterable[Hello], whole: Iterable[Hello]) -> list[Incomplete]:
        """Return the endpoints of several ranks of which not every rank has joined.

        Every replica behind a URL counts: a replica left out would go on serving old weights under
        the same name.

        Args:
            joined: Every worker that has joined.
            whole: The joined workers whose instance is complete.
        """
        there: dict[str, list[Hello]] = {name: [] for name in sorted(self.engines)}
        told: dict[str, int] = {}
        some = set()
        for hello in joined:
            some.add(hello.host)
            if hello.host is not None and hello.host_ranks is not None:
                told[hello.host] = max(hello.host_ranks, told.get(hello.host, 0))
                # An endpoint that names its worker, the first of several ranks.
                there.setdefault(hello.host, [])
        for hello in whole:
            if hello.host in there:
                there[hello.host].append(hello)
        found = []
        for name, ranks in there.items():
            wanted = told.get(name) or self._num_ranks.get(name) or 1
            if len(ranks) < wanted:
                found.append(Incomplete(name, name in some, len(ranks), wanted))
        return found

    def apply(
        self,
        version: str,
        names: Iterable[str],
        on_answer: Callable[[str], None] = lambda _name: None,
    ) -> dict[str, WTransferError]:
        """Let serving engines apply the update that their workers have verified, all at once.

        Returns when all engines have. The workers report the outcome: an engine's route answers
        for all its processes together.

        Args:
            version: Label of the update.
            names: Endpoints; those that name a worker are left out. An endpoint that answered too
                late, and whose workers have joined, may be a serving engine.
            on_answer: Called with each endpoint that has answered, be it with an error; at once
                for an endpoint that is left out. A call that was given up has no answer.

        Returns:
            Endpoint -> its error, where the call has failed.
        """

        def apply(name: str) -> None:
            answered = True
            try:
                self._clients[name].start_weight_update()
                self._clients[name].finish_weight_update(version)
            except StallError:
                answered = False
                raise
            finally:
                if answered:
                    on_answer(name)

        calls = {}
        for name in names:
            if name in self._clients and self.workers.get(name) is None:
                calls[name] = functools.partial(apply, name)
            else:
                on_answer(name)
        _, failed = map_concurrently(calls, 2 * self._timeout_s + _GRACE_S)
        return failed

    def deregister(self, address: str) -> None:
        """Ask the endpoints to leave; the publisher ends in any case."""
        calls = {
            name: functools.partial(client.leave, address, timeout_s=LEAVE_S)
            for name, client in self._clients.items()
            if name in self._asked and hasattr(client, "leave")
        }
        _, failed = map_concurrently(calls, LEAVE_S)
        for name, error in failed.items():
            logger.info("%s could not be told that the publisher closes: %s", name, error)


def _join(client: Any, publisher: dict[str, str]) -> tuple[str | None, int | None]:
    """Ask an endpoint to join; return its worker, or a serving engine's ranks where it has them."""
    answer = client.init_weight_transfer_engine({"wtransfer": publisher})
    worker = answer.get("worker") if isinstance(answer, dict) else None
    if isinstance(worker, str):
        return worker, None
    return None, client.get_world_size() if hasattr(client, "get_world_size") else None


def _check_dialable(address: str, name: str, client: Any) -> None:
    if getattr(client, "is_local", True):
        return
    if parse_address(address).is_local or address.startswith(("tcp:0.0.0.0:", "tcp:[::]:")):
        raise AddressError(
            f"{name} is on another host and cannot dial this publisher at {address!r}; listen at "
            "an address of this host that it can reach (--listen tcp:HOST:PORT, in Python "
            "listen=), with an engine that crosses hosts (--engine file)",
            worker=name,
        )
