"""Orders of the first rank to all ranks; they travel among the requests that SGLang broadcasts.

So every rank meets an order between the same two steps, at the same place among the requests.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Order:
    """An act of every rank of the instance, before it goes on with the requests."""

    number: int
    """Counts orders from 1: one that arrives a second time is dropped."""


@dataclass(frozen=True)
class Join(Order):
    """Join a publisher that the first rank has joined."""

    address: str
    """Address of the publisher."""
    token: str | None = field(default=None, repr=False)
    """The publisher's secret; None: the environment has it."""
    host: str | None = None
    """The publisher's name of this server."""


@dataclass(frozen=True)
class Leave(Order):
    """Leave a publisher."""

    address: str
    """Address of the publisher."""


@dataclass(frozen=True)
class Commit(Order):
    """Apply the update that every rank has verified."""


@dataclass(frozen=True)
class Name(Order):
    """Name KV cache that is computed from now on by a fingerprint that has become known."""

    fingerprint: str
    """Identity of the weights that serve."""


class OrderBook:
    """Orders that the first rank has given and that have not come back to it from the broadcast.

    SGLang may skip a broadcast, so an order goes along with every one until it has come back.
    Given by the threads of the server, sent and taken off by the scheduler's.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, Order] = {}
        self._num_given = 0
        self._last_seen = 0

    def give(self, make: type[Order], *args: object) -> None:
        """Add an order."""
        with self._lock:
            self._num_given += 1
            self._waiting[self._num_given] = make(self._num_given, *args)

    def has(self, kind: type[Order]) -> bool:
        """Return whether an order of this kind is on its way."""
        return any(isinstance(order, kind) for order in self.waiting())

    def waiting(self) -> list[Order]:
        """Return the orders to send along, oldest first."""
        with self._lock:
            return list(self._waiting.values())

    def take(self, order: Order) -> bool:
        """Note that an order has arrived at this rank; return whether it is to be carried out."""
        with self._lock:
            self._waiting.pop(order.number, None)
        if order.number <= self._last_seen:
            return False
        self._last_seen = order.number
        return True
