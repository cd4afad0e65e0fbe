"""The hosts that a publisher asks to join it."""

from __future__ import annotations

import functools
import ipaddress
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wtransfer.errors import AddressError, HostsError, WTransferError
from wtransfer.transport.address import parse_address
from wtransfer.weight_sync.http.clients import HttpClient, all_at_once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from wtransfer.engines.interface import WeightSyncClient
    from wtransfer.weight_sync.messages import Hello

logger = logging.getLogger(__name__)

LEAVE_S = 1.0
"""Longest time that hosts are given to leave when their publisher closes, in seconds."""
_GRACE_S = 1.0


@dataclass(frozen=True)
class Incomplete:
    """A serving engine of which not every rank is there."""

    name: str
    """The host."""
    some: bool
    """Whether any rank has joined, be it of an instance that is not complete."""
    joined: int
    """Ranks that are there."""
    wanted: int
    """Ranks that it has."""

    def __str__(self) -> str:
        if self.wanted == 1:
            return self.name
        return f"{self.name} ({self.joined} of {self.wanted} ranks)"


class Hosts:
    """Asks worker hosts to join one publisher, and to leave it.

    Args:
        token: Their secret, where a URL carries none.
        timeout_s: Longest time for a host's answer, in seconds.
    """

    def __init__(self, token: str | None, timeout_s: float) -> None:
        self.workers: dict[str, str | None] = {}
        """Worker by host, as each answered; None where a host does not say."""
        self._token = token
        self._timeout_s = timeout_s
        self._clients: dict[str, Any] = {}
        self._num_ranks: dict[str, int] = {}
        self._asked: set[str] = set()

    def add(self, hosts: Iterable[str | WeightSyncClient]) -> None:
        """Remember hosts.

        Raises:
            AddressError: A URL cannot be read.
            ValueError: A host is there already.
        """
        for host in hosts:
            client: Any = host
            if isinstance(host, str):
                client = HttpClient(host, self._token, timeout_s=self._timeout_s)
            name = str(getattr(client, "name", repr(client)))
            if name in self._clients:
                raise ValueError(f"host {name} is named twice; name each host once")
            self._clients[name] = client

    def invite(self, address: str, token: str) -> None:
        """Ask all hosts at once to join; returns when all have answered.

        Args:
            address: The publisher's.
            token: The publisher's; it is sent to hosts that have another.

        Raises:
            AddressError: A host is elsewhere, and could not dial the address.
            HostsError: Two of them say the same worker's name.
            WTransferError: A host cannot be reached, or refuses.
        """
        for name, client in self._clients.items():
            _check_dialable(address, name, client)
        # Before they answer: one that answers too late has joined all the same.
        self._asked |= set(self._clients)
        calls = {
            name: functools.partial(
                client.init_weight_transfer_engine, _invitation(name, client, address, token)
            )
            for name, client in self._clients.items()
        }
        answers = all_at_once(calls, self._timeout_s + _GRACE_S)
        self.workers = {name: _worker_of(answer) for name, answer in answers.items()}
        self._check_distinct()
        self._num_ranks = self._count_ranks()

    def _count_ranks(self) -> dict[str, int]:
        """Return how many ranks each serving engine says that it has; those that do not are out."""
        calls = {
            name: self._clients[name].get_world_size
            for name in self.engines
            if hasattr(self._clients[name], "get_world_size")
        }
        answers = all_at_once(calls, self._timeout_s + _GRACE_S)
        return {name: size for name, size in answers.items() if size is not None}

    def incomplete(self, joined: Iterable[Hello], whole: Iterable[Hello]) -> list[Incomplete]:
        """Return the serving engines of which not every rank is there.

        All replicas behind one URL are meant: one that was left out would go on serving old weights
        under the same name.

        Args:
            joined: Every worker that has joined.
            whole: Those among them whose instance is complete.
        """
        some = {hello.host for hello in joined}
        found = [
            Incomplete(name, some=name in some, joined=len(ranks), wanted=self._wanted(name, ranks))
            for name, ranks in self._by_engine(whole).items()
        ]
        return [each for each in found if each.joined < each.wanted]

    def _by_engine(self, hellos: Iterable[Hello]) -> dict[str, list[Hello]]:
        ranks: dict[str, list[Hello]] = {name: [] for name in sorted(self.engines)}
        for hello in hellos:
            if hello.host in ranks:
                ranks[hello.host].append(hello)
        return ranks

    def _wanted(self, name: str, ranks: list[Hello]) -> int:
        told = [hello.host_ranks for hello in ranks if hello.host_ranks is not None]
        return max(told, default=self._num_ranks.get(name, 1))

    def _check_distinct(self) -> None:
        """Refuse workers of one name: what one of them has proven would count for the other."""
        host_of: dict[str, str] = {}
        for host, worker in self.workers.items():
            if worker is not None and host_of.setdefault(worker, host) != host:
                raise HostsError(
                    f"{host_of[worker]} and {host} both call their worker {worker!r}; start them "
                    "under names of their own (wtransfer worker --name), and name each host once"
                )

    @property
    def engines(self) -> set[str]:
        """Hosts that have joined and name no worker: serving engines, which apply by request."""
        return {name for name, worker in self.workers.items() if worker is None}

    def apply(self, version: str, names: Iterable[str]) -> None:
        """Let serving engines apply what their workers were ordered to commit, all at once.

        Returns when they have. What came of it is for the workers to say: an engine's route answers
        for all its processes together.

        Args:
            version: Label of the update.
            names: Hosts; those that are no serving engines are left out.

        Raises:
            WTransferError: What one host says, or that it cannot be reached.
            HostsError: Several have failed.
        """
        calls = {
            name: functools.partial(_apply, self._clients[name], version)
            for name in self.engines.intersection(names)
        }
        all_at_once(calls, 2 * self._timeout_s + _GRACE_S)

    def _kind(self, name: str) -> dict[str, bool]:
        """Return what `HttpClient.leave` has to know, which cannot tell what it talks to."""
        by_url = isinstance(self._clients[name], HttpClient)
        return {"engine": True} if by_url and name in self.engines else {}

    def dismiss(self, address: str) -> None:
        """Ask the hosts to leave; what comes of it changes nothing for the publisher."""
        calls: dict[str, Callable[[], object]] = {
            name: functools.partial(client.leave, address, timeout_s=LEAVE_S, **self._kind(name))
            for name, client in self._clients.items()
            if name in self._asked and hasattr(client, "leave")
        }
        try:
            all_at_once(calls, LEAVE_S)
        except WTransferError as error:
            logger.info("not every host could be told that the publisher closes: %s", error)


def _invitation(name: str, client: Any, address: str, token: str) -> dict[str, Any]:
    place = {"address": address, "host": name}
    if getattr(client, "token", None) != token:
        place["token"] = token
    return {"wtransfer": place}


def _apply(client: Any, version: str) -> None:
    client.start_weight_update()
    client.finish_weight_update(version)


def _worker_of(answer: Any) -> str | None:
    worker = answer.get("worker") if isinstance(answer, dict) else None
    return worker if isinstance(worker, str) else None


def _check_dialable(address: str, name: str, client: Any) -> None:
    if getattr(client, "is_local", True):
        return
    place = parse_address(address)
    everywhere = isinstance(place.target, tuple) and ipaddress.ip_address(
        place.target[0].partition("%")[0]
    ) in map(ipaddress.ip_address, ("0.0.0.0", "::"))  # noqa: S104  # looked for, not bound
    if place.is_local or everywhere:
        raise AddressError(
            f"{name} is on another host and cannot dial this publisher at {address!r}; listen at "
            "an address of this host that it can reach (--listen tcp:HOST:PORT, in Python "
            "listen=), with an engine that crosses hosts (--engine file)",
            worker=name,
        )
