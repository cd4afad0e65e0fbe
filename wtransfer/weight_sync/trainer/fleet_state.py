"""The hosts that a publisher updates: a state machine without sockets, threads or clocks.

A host that was named counts in every round: a supervisor may have restarted it on its old weights.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from wtransfer.errors import WTransferError
    from wtransfer.weight_sync.messages import Hello

FIRST_PAUSE_S = 0.25
"""Seconds between the loss of a host and the first question; doubled by each answer of no."""
LONGEST_PAUSE_S = 5.0
"""Longest time between two questions to an absent host, in seconds."""
DROP_PATIENCE_S = 1.0
"""Seconds that a round which may drop hosts waits for a host that the last round had."""


@dataclass(eq=False)
class NamedHost:
    """A host of the list: its last answer, and the state of its workers."""

    name: str
    """As the user wrote it."""
    worker: str | None = None
    """Worker that it named when it joined; None: a serving engine, or it has not joined."""
    instance: str | None = None
    """Instance of that worker."""
    num_ranks: int | None = None
    """Ranks behind it, where it has told them."""
    seen_ranks: int = 0
    """Most ranks that were there at once: it may lead to several engines, and not tell so."""
    has_joined: bool = False
    """True if it answered yes to the last question since a worker of it was missed."""
    error: WTransferError | None = None
    """Why it answered no to the last question; None: it answered yes, or has not answered."""
    is_drained: bool = False
    """True if its operator told it to leave: it counts as removed until it joins again."""
    absent_since: float | None = None
    """When its workers were found missing; None while all are there."""
    was_absent: bool = False
    """True if it was missing when the last round began."""
    joined_ranks: int = 0
    """Ranks that are there, of complete instances."""
    wanted_ranks: int = 1
    """Ranks that must be there."""
    is_asked: bool = False
    """True while a question to it is under way."""
    by_hand: bool = False
    """True if the next question is the user's, which a drained host answers with yes."""
    ask_at: float = 0.0
    """When the next question is due, if it is to be asked."""
    pause_s: float = FIRST_PAUSE_S
    """Seconds from the next answer of no to the question after it."""
    num_answers: int = 0
    """Answers so far."""

    @property
    def is_absent(self) -> bool:
        """True if rounds must wait for it, or leave it out by name."""
        return self.absent_since is not None and not self.is_drained

    @property
    def is_to_be_asked(self) -> bool:
        """True if it is asked again, and again: its workers are missing, or its yes is.

        A yes that came too late would have said what is behind it.
        """
        return self.absent_since is not None or not self.has_joined

    @property
    def ranks(self) -> str:
        """Ranks that are there, where they are several, as they follow a name."""
        several = f" ({self.joined_ranks} of {self.wanted_ranks} ranks)"
        return several if self.wanted_ranks > 1 else ""

    def absence(self, now: float, lost: str | None = None) -> str:
        """Describe why it is absent.

        Args:
            now: The present moment.
            lost: How its worker was lost, if it has had one.
        """
        if self.error is not None:
            why = str(self.error)
        elif lost is not None:
            why = lost
        elif self.has_joined:
            why = "it was asked to join, and its workers have not come"
        else:
            why = "it was asked to join, and has not answered yet"
        since_s = now - (self.absent_since or now)
        return f"{self.name} is absent for {since_s:.1f} s{self.ranks}: {why}"


class FleetState:
    """Which hosts there are, which of them are absent, and when each is asked again.

    ================  =================================  ==========================================
    event             host that is there                 host that is absent
    ================  =================================  ==========================================
    add               refused                            refused
    ask (by hand)     asked at once                      asked at once, or after the answer that is
                                                         under way
    worker lost       absent; asked after a pause        --
    worker joined     --                                 there, if no rank is missing
    answer yes        noted                              asked after the longest pause; drained no
                                                         more
    answer no         what has joined stays; asked       asked after a pause, doubled each time
                      after a pause, doubled each time
    answer "drained"  as no                              counts as removed, and is asked on
    round begins      --                                 asked at once
    remove            gone; what joins by its            gone
                      invitation takes no part
    ================  =================================  ==========================================

    One question per host is under way at a time. Whether a host is there is told by its workers'
    connections alone: an answer is a promise.

    A serving engine's client that does not tell how many ranks it leads to is there while as many
    are as were there at once, until it has answered yes twice to fewer.

    Not thread-safe: the callers hold the publisher's lock.

    Args:
        removed: Takes the names of removed hosts.
    """

    def __init__(self, removed: set[str]) -> None:
        self.hosts: dict[str, NamedHost] = {}
        """Host by name, in the user's order."""
        self._removed = removed
        self._by_instance: dict[str | None, str] = {}
        """Host by the instance that it named when it joined."""

    # -- the list

    def add(self, names: Iterable[str], now: float, *, by_hand: bool = True) -> None:
        """Add hosts, which are absent until their workers have joined, and to be asked at once.

        Args:
            names: All are added, or none.
            now: The present moment.
            by_hand: True if it is the user who names them now.

        Raises:
            ValueError: A host is on the list, or named twice.
        """
        added: dict[str, NamedHost] = {}
        for name in names:
            if name in self.hosts or name in added:
                raise ValueError(f"host {name} is named twice; name each host once")
            added[name] = NamedHost(name, absent_since=now, ask_at=now, by_hand=by_hand)
        self._removed.difference_update(added)
        self.hosts |= added

    def remove(self, name: str) -> None:
        """Take a host off the list.

        Raises:
            LookupError: It is not on the list.
        """
        if name not in self.hosts:
            there = ", ".join(self.hosts) or "none"
            raise LookupError(f"host {name} is not on the list; the list has {there}")
        del self.hosts[name]
        self._removed.add(name)
        self._learn_instances()

    # -- questions and answers

    def ask(self, names: Iterable[str]) -> None:
        """Let these hosts be asked at once, by the user; drained ones are on the list again."""
        for name in names:
            self.hosts[name].by_hand, self.hosts[name].is_drained = True, False

    def hurry(self, now: float) -> None:
        """Let absent hosts be asked at once: a round waits for them."""
        for host in self.hosts.values():
            host.ask_at = min(host.ask_at, now)

    def due(self, now: float) -> list[NamedHost]:
        """Return the hosts to be asked now."""
        return [
            host
            for host in self.hosts.values()
            if not host.is_asked and (host.by_hand or (host.is_to_be_asked and now >= host.ask_at))
        ]

    def begin_question(self, host: NamedHost) -> bool:
        """Note that a host is being asked; return True if the user asks."""
        host.is_asked = True
        by_hand, host.by_hand = host.by_hand, False
        return by_hand

    def said_yes(
        self,
        host: NamedHost,
        now: float,
        worker: str | None = None,
        instance: str | None = None,
        num_ranks: int | None = None,
    ) -> None:
        """Note that a host has joined; its workers are on their way."""
        host.worker, host.instance, host.num_ranks = worker, instance, num_ranks
        if host.has_joined:
            # Twice: no other worker is on its way, and a rank was seen beside its successor.
            host.seen_ranks = host.joined_ranks
        self._learn_instances()
        host.has_joined, host.error, host.is_drained = True, None, False
        self._answered(host, now + LONGEST_PAUSE_S)

    def said_no(self, host: NamedHost, error: WTransferError, now: float, *, drained: bool) -> None:
        """Note that a host refuses, or was not reached."""
        host.has_joined, host.error = False, error
        host.is_drained = host.is_drained or drained
        self._answered(host, now + host.pause_s)
        host.pause_s = min(2 * host.pause_s, LONGEST_PAUSE_S)

    def _learn_instances(self) -> None:
        named = [host for host in self.hosts.values() if host.instance is not None]
        # The first of two names of one server counts, and the other one stays absent.
        self._by_instance = {host.instance: host.name for host in reversed(named)}

    def _answered(self, host: NamedHost, ask_at: float) -> None:
        host.is_asked = False
        host.num_answers += 1
        host.ask_at = ask_at

    # -- workers

    def host_of(self, hello: Hello) -> str | None:
        """Return the host that a worker is behind; None: it has joined by itself.

        A worker that joined by itself, and that a host named when it was asked, is behind that
        host. One that a publisher at this address before has invited is not, unless its host is on
        this list as well.
        """
        if hello.host is None:
            return self._by_instance.get(hello.instance)
        return hello.host if hello.host in self.hosts or hello.host in self._removed else None

    def look(self, joined: Iterable[Hello], whole: Iterable[Hello], now: float) -> None:
        """Find out which hosts are absent.

        Every replica behind a URL counts: a replica left out would go on serving old weights under
        the same name.

        Args:
            joined: Every worker that has joined.
            whole: The joined workers whose instance is complete, and up to take part in a round.
            now: The present moment.
        """
        told: dict[str, int] = {}
        for hello in joined:
            if hello.host is not None and hello.host_ranks is not None:
                told[hello.host] = max(hello.host_ranks, told.get(hello.host, 0))
        found = Counter(map(self.host_of, whole))
        for host in self.hosts.values():
            before, host.joined_ranks = host.joined_ranks, found[host.name]
            host.seen_ranks = max(host.seen_ranks, host.joined_ranks)
            seen = host.seen_ranks if host.worker is None else 0
            host.wanted_ranks = told.get(host.name) or host.num_ranks or seen or 1
            if host.joined_ranks >= host.wanted_ranks:
                host.absent_since, host.is_drained = None, False
            elif host.absent_since is None:
                host.absent_since, host.pause_s = now, FIRST_PAUSE_S
                host.ask_at = now + host.pause_s
                # Else it would be said of a worker that is gone; and so it is with a yes.
                host.error = None
                host.has_joined = host.has_joined and host.joined_ranks >= before

    # -- rounds

    def absent(self) -> list[NamedHost]:
        """Return the hosts that were missing at the last look."""
        return [host for host in self.hosts.values() if host.is_absent]

    def longest_wait_s(self, deadline_s: float, return_s: float | None, *, may_drop: bool) -> float:
        """Return how long a round waits for the hosts that are absent, in seconds.

        Args:
            deadline_s: The publisher's deadline.
            return_s: Its user's choice, if there is one.
            may_drop: True if the round may begin without absent hosts.
        """
        if not may_drop:
            return deadline_s if return_s is None else return_s
        # A host that stays away costs one round a wait, and no later one.
        is_new = any(not host.was_absent for host in self.absent())
        return (DROP_PATIENCE_S if return_s is None else return_s) if is_new else 0.0

    def begin_round(self) -> None:
        """Note which hosts a round begins without."""
        for host in self.hosts.values():
            host.was_absent = host.is_absent
