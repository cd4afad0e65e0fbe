"""Reach the hosts on a publisher's list: ask them to join, to apply an update, to leave."""

from __future__ import annotations

import functools
import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from wtransfer.calls import host_error, map_concurrently, raise_failed, start_call
from wtransfer.errors import (
    AddressError,
    NotInitializedError,
    PeerLostError,
    StallError,
    WTransferError,
)
from wtransfer.transport.address import parse_address
from wtransfer.weight_sync.http.client import HttpClient
from wtransfer.weight_sync.messages import DRAINED
from wtransfer.weight_sync.trainer.fleet_state import FleetState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from wtransfer.engines.interface import WeightSyncClient
    from wtransfer.weight_sync.trainer.fleet_state import NamedHost
    from wtransfer.weight_sync.trainer.membership import Membership

logger = logging.getLogger(__name__)

LEAVE_S = 1.0
"""Longest time for hosts to leave when their publisher closes, in seconds."""
_GRACE_S = 1.0


class Endpoints:
    """Lets the workers behind hosts join one publisher, and leave it.

    A host that names its worker leads to that one. Any other host is a serving engine, with one or
    more workers that apply an update when the engine is called.

    Absent hosts are asked by one thread, which begins with the first host; each question is a call
    of its own, so that a host that does not answer holds up no other.

    Args:
        token: Token for URLs that carry none.
        timeout_s: Longest time for a host's answer, in seconds.
        membership: The joined workers, and the publisher's lock.
    """

    def __init__(self, token: str | None, timeout_s: float, membership: Membership) -> None:
        self.state = FleetState(membership.without)
        """Which hosts there are, and which of them are absent; guarded by the lock."""
        self._token = token
        self._timeout_s = timeout_s
        self._membership = membership
        self._changed = membership.changed
        self._clients: dict[str, Any] = {}
        self._publisher: dict[str, str] = {}
        self._asked: set[str] = set()
        self._stopped = False
        self._thread: threading.Thread | None = None

    def start(self, address: str, token: str) -> None:
        """Ask hosts from now on.

        Args:
            address: The publisher's.
            token: The publisher's; sent to hosts that have another.
        """
        self._publisher = {"address": address, "token": token}

    def stop(self) -> None:
        """Ask no further host; called under the lock."""
        self._stopped = True
        self._changed.notify_all()

    # -- the list

    def remove(self, host: str | WeightSyncClient) -> dict[str, Any]:
        """Take a host off the list; called under the lock. Returns what `leave` takes.

        Raises:
            AddressError: A URL cannot be read.
            LookupError: The host is not on the list.
        """
        # A client by its name as well, which is what reports and errors say.
        if isinstance(host, str) and host in self._clients:
            return self._take_off([host])
        return self._take_off([self._client(host)[0]])

    def replace(self, hosts: Iterable[str | WeightSyncClient]) -> dict[str, Any]:
        """Make the list these hosts, of which new ones are asked at once; called under the lock.

        Returns:
            Those that are not named any more, as `leave` takes them.

        Raises:
            AddressError: A URL cannot be read.
            TypeError: A host is neither a URL nor a client.
            ValueError: A host is named twice.
        """
        named = [self._client(host) for host in hosts]
        wanted = dict(named)
        gone = [name for name in self._clients if name not in wanted]
        # An operator who has drained a host has not invited it again by a function's answer.
        self._add([each for each in named if each[0] not in self._clients], by_hand=False)
        # A client may be made anew for each call, and lead to what has taken a host's place.
        self._clients |= wanted
        return self._take_off(gone)

    def _add(self, named: Iterable[tuple[str, Any]], *, by_hand: bool) -> None:
        """Add hosts, all or none, which are asked at once; called under the lock."""
        clients = list(named)
        if clients and self._thread is None:
            thread = threading.Thread(target=self._run, name="wtransfer-ask", daemon=True)
            thread.start()
            self._thread = thread
        self.state.add([name for name, _ in clients], time.monotonic(), by_hand=by_hand)
        self._clients |= clients

    def _take_off(self, names: Iterable[str]) -> dict[str, Any]:
        gone = {}
        for name in names:
            self.state.remove(name)
            gone[name] = self._clients.pop(name)
        asked = {name: client for name, client in gone.items() if name in self._asked}
        self._asked -= asked.keys()
        return asked

    def _client(self, host: Any) -> tuple[str, Any]:
        if isinstance(host, str):
            client = HttpClient(host, self._token, timeout_s=self._timeout_s)
            return client.name, client
        if not hasattr(host, "init_weight_transfer_engine"):
            raise TypeError(
                f"host {host!r:.200} is neither a URL nor a client, which has "
                "init_weight_transfer_engine; several hosts are several arguments"
            )
        known = next((name for name, client in self._clients.items() if client is host), None)
        return known or _name_of(host), host

    # -- absence

    def look(self) -> list[NamedHost]:
        """Return the hosts that are absent now; called under the lock."""
        workers = self._membership.workers()
        for worker in workers:
            worker.host = self.state.host_of(worker.hello)
        if not self.state.hosts:
            return []
        ready = [
            worker.hello
            for ranks in self._membership.instances().values()
            for worker in ranks
            if not worker.set_aside
        ]
        self.state.look([each.hello for each in workers], ready, time.monotonic())
        return self.state.absent()

    def why_absent(self, host: NamedHost) -> str:
        """Describe why a host is absent; called under the lock."""
        workers = self._membership.workers()
        late = next((w for w in workers if w.set_aside and w.host == host.name), None)
        lost = [w for w in self._membership.lost() if w.host == host.name]
        why = lost[-1].last_error if lost else None
        if late is not None:
            why = f"{late.name} has not applied the update before yet"
        return host.absence(time.monotonic(), why)

    def absent_errors(self) -> dict[str, WTransferError]:
        """Return why each absent host is absent; called under the lock."""
        return {
            host.name: host.error or PeerLostError(self.why_absent(host), worker=host.name)
            for host in self.look()
        }

    # -- questions

    def invite(self, hosts: Iterable[str | WeightSyncClient], *, may_drop: bool) -> None:
        """Ask these hosts, and all on the list, to join; returns when all have answered.

        Args:
            hosts: To be added to the list.
            may_drop: True: hosts that fail are asked again later, as long as one joins.

        Raises:
            AddressError: A URL cannot be read, or a host is on another machine, and could not dial
                the publisher.
            TypeError: A host is neither a URL nor a client.
            ValueError: A host was added before.
            HostsError: Several failed.
            WTransferError: A host cannot be reached, or refuses.
        """
        timeout_s = 2 * self._timeout_s + _GRACE_S
        with self._changed:
            self._add([self._client(host) for host in hosts], by_hand=True)
            asked = list(self.state.hosts.values())
            # A question that is under way is not the user's: its answer is the one before.
            awaited = {each: each.num_answers + 1 + each.is_asked for each in asked}
            self.state.ask(each.name for each in asked)
        self._changed.notify_all()

        def answered() -> bool:
            return self._stopped or all(
                host.num_answers >= number or self.state.hosts.get(host.name) is not host
                for host, number in awaited.items()
            )

        self._changed.wait_for(answered, timeout_s)
        with self._changed:
            failed = {
                host.name: host.error
                if host.num_answers >= awaited[host]
                else StallError(
                    f"{host.name} did not answer within {timeout_s:g} s",
                    seconds=timeout_s,
                    worker=host.name,
                )
                for host in asked
                if self.state.hosts.get(host.name) is host
                and (host.num_answers < awaited[host] or not host.has_joined)
            }
        errors = {name: error for name, error in failed.items() if error is not None}
        if not (may_drop and len(errors) < len(asked)):
            raise_failed(errors, len(asked))

    def _run(self) -> None:
        def due() -> list[NamedHost] | bool:
            if self._stopped:
                return True
            self.look()
            return self.state.due(time.monotonic())

        while not isinstance(found := self._changed.wait_for(due), bool):
            for host in found:
                with self._changed:
                    if self.state.hosts.get(host.name) is not host or self._stopped:
                        continue
                    by_hand = self.state.begin_question(host)
                    # Before any answer: a host that answers too late has joined all the same, and
                    # must leave.
                    self._asked.add(host.name)
                    client = self._clients[host.name]
                ask = functools.partial(self._ask, host, client, by_hand=by_hand)
                try:
                    start_call(ask, f"wtransfer-host {host.name}")
                except RuntimeError as error:  # no thread is left: the host is asked again
                    self._note(host, host_error(host.name, error))

    def _ask(self, host: NamedHost, client: Any, *, by_hand: bool) -> None:
        try:
            self._check_dialable(host.name, client)
            publisher: dict[str, Any] = {"address": self._publisher["address"], "host": host.name}
            if getattr(client, "token", None) != self._publisher["token"]:
                publisher["token"] = self._publisher["token"]
            if not by_hand:
                publisher["again"] = True
            answer = client.init_weight_transfer_engine({"wtransfer": publisher})
            told = answer if isinstance(answer, dict) else {}
            worker, instance = (
                each if isinstance(each := told.get(name), str) else None
                for name in ("worker", "instance")
            )
            num_ranks = None
            if worker is None and hasattr(client, "get_world_size"):
                num_ranks = client.get_world_size()
        except BaseException as error:
            self._note(host, host_error(host.name, error))
            return
        if worker is None and isinstance(client, HttpClient) and client.url.token is not None:
            logger.warning(
                "the token in the URL of %s is of no use: a serving engine does not check it, "
                "and joins with the WTRANSFER_TOKEN of its own environment",
                host.name,
            )
        with self._changed:
            self.state.said_yes(host, time.monotonic(), worker, instance, num_ranks)
            is_removed = self.state.hosts.get(host.name) is not host and not self._stopped
        self._changed.notify_all()
        if is_removed:
            self.leave({host.name: client})

    def _note(self, host: NamedHost, error: WTransferError) -> None:
        with self._changed:
            drained = DRAINED in str(error)
            # By its class: its text may say for how long, or how often.
            is_news = type(error) is not type(host.error) and not (drained and host.is_drained)
            self.state.said_no(host, error, time.monotonic(), drained=drained)
        self._changed.notify_all()
        if is_news and drained:
            logger.info("%s was drained, and counts as removed until it joins again", host.name)
        elif is_news:
            state = "absent" if host.is_absent else "there, and does not answer"
            logger.warning("%s is %s, and asked again until it joins: %s", host.name, state, error)

    def _check_dialable(self, name: str, client: Any) -> None:
        address = self._publisher["address"]
        # A path may be on a volume that the endpoint's container mounts, too; else it says so.
        if getattr(client, "is_local", True) or address.startswith("unix:/"):
            return
        if parse_address(address).is_local or address.startswith(("tcp:0.0.0.0:", "tcp:[::]:")):
            raise AddressError(
                f"{name} is on another host and cannot dial this publisher at {address!r}; listen "
                "at an address of this host that it can reach (--listen tcp:HOST:PORT, in Python "
                "listen=), with an engine that crosses hosts (--engine file)",
                worker=name,
            )

    # -- orders

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
            names: Hosts; those that name a worker are left out. A host that answered too late, and
                whose workers have joined, may be a serving engine.
            on_answer: Called with each host that has answered, be it with an error; at once for a
                host that is left out. A call that was given up has no answer.

        Returns:
            Host -> its error, where the call has failed.
        """

        def apply(host: NamedHost, client: Any) -> None:
            answered = True
            try:
                client.start_weight_update()
                client.finish_weight_update(version)
            except NotInitializedError:
                # A plain worker, whose answer came too late to say so: it commits by itself.
                if host.has_joined:
                    raise
            except StallError:
                answered = False
                raise
            finally:
                if answered:
                    on_answer(host.name)

        calls = {}
        for name in names:
            with self._changed:
                host, client = self.state.hosts.get(name), self._clients.get(name)
            if host is not None and host.worker is None:
                calls[name] = functools.partial(apply, host, client)
            else:
                on_answer(name)
        _, failed = map_concurrently(calls, 2 * self._timeout_s + _GRACE_S)
        return failed

    def deregister(self) -> None:
        """Ask the hosts to leave; the publisher ends in any case."""
        self.leave({name: self._clients[name] for name in self._asked & self._clients.keys()})
        if self._thread is not None:
            self._thread.join(LEAVE_S)

    def leave(self, clients: dict[str, Any]) -> None:
        """Ask hosts to leave, all at once, and wait for at most `LEAVE_S`.

        Args:
            clients: By host.
        """
        address = self._publisher.get("address")
        calls = {
            name: functools.partial(client.leave, address, timeout_s=LEAVE_S)
            for name, client in clients.items()
            if hasattr(client, "leave")
        }
        _, failed = map_concurrently(calls, LEAVE_S)
        for name, error in failed.items():
            logger.info("%s could not be told to leave: %s", name, error)


def _name_of(client: Any) -> str:
    """Return a client's own name, or a name that people can tell it by."""
    for attribute in ("name", "base_url", "url"):
        if isinstance(name := getattr(client, attribute, None), str):
            return name
    return f"{type(client).__name__} {id(client):#x}"
