"""Where the ranks of a group find each other: a store that one of them hosts.

The host binds the listening socket itself, and hands it to the store: so it listens at the one
address that it was told, and the kernel picks the port. Nobody races for a free one.

The store is torch's. It has no authentication: keys stand under a random name that only ranks are
told, so a stranger who can reach the port can neither find nor guess them, but could fill its
memory. Let it listen on loopback or on a network of your own.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import os
import secrets
import select
import socket
import threading
from typing import TYPE_CHECKING, Any

import torch.distributed

from wtransfer.deadline import Deadline
from wtransfer.errors import AddressError, GroupError, PeerLostError
from wtransfer.transport.address import ListeningSocket, tcp_text
from wtransfer.transport.connections import hang_up

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from wtransfer.transport.connections import Endpoint

dist: Any = torch.distributed  # whose stores torch does not declare

POLL_S = 0.005
"""Time between two looks at who has arrived."""
CONNECT_TIMEOUT_S = 20.0
"""Longest wait for the host."""
REACHED_S = 3.0
"""How long the store's client may try at first: it goes on trying for that long where the host has
ended meanwhile. But it also asks for the name of every address it connects to, which takes five
seconds where an answer is lost; then it may try for as long as the host is there."""
LEAST_S = 0.1
"""Left to the store's client, however long it took to reach its host."""
DIAL_MS = 20
"""Milliseconds between two looks at a host that has yet to answer."""
GRACE_S = 0.5
"""How much later than at its deadline a meeting ends whose host does not answer."""
AGAIN_S = 0.1
"""Time between two looks for connections to end."""


class Rendezvous:
    """One meeting of all ranks, for one group.

    Made by `host_rendezvous` on one rank and by `join_rendezvous` on the others.

    Args:
        host: Host of the store.
        port: Its port.
        name: Under which the keys of this meeting stand.
        store: The store; None: `join` is to be called.
    """

    def __init__(self, host: str, port: int, name: str, store: Any = None) -> None:
        self.host = host
        self.port = port
        self.name = name
        self._store: Any = None if store is None else dist.PrefixStore(name, store)
        self._closed = False
        self._cancelled = threading.Event()
        self._guard: _Guard | None = None

    @property
    def store(self) -> Any:
        """The keys of this meeting.

        Raises:
            GroupError: The meeting is over, or was not joined yet.
        """
        store = self._store
        if store is None:
            self.check()
            raise GroupError("this rendezvous was not joined yet")
        return store

    def join(self, timeout_s: float | None = None) -> None:
        """Connect to the store.

        Args:
            timeout_s: Longest wait for the host, in seconds; None: `CONNECT_TIMEOUT_S`.

        Raises:
            GroupError: The meeting was called off, or its host answered too late.
            PeerLostError: Nobody listens there, or who does is stopped.
        """
        deadline = Deadline(CONNECT_TIMEOUT_S if timeout_s is None else timeout_s)
        # Again only if the first time was too short: see `REACHED_S`.
        for limit_s in (REACHED_S, deadline.seconds):
            self.host = _reached(self.host, self.port, deadline, self.check)
            try:
                self._store = self._connected(limit_s, deadline)
            except RuntimeError as error:
                if limit_s >= deadline.seconds or deadline.expired:
                    where = tcp_text((self.host, self.port))
                    raise PeerLostError(f"no rendezvous at {where}: {error}") from error
            else:
                return

    def meet(self, rank: int, size: int, card: str, timeout_s: float) -> list[str]:
        """Leave a card and wait until every rank has left one.

        Args:
            rank: This rank.
            size: How many are expected.
            card: What the others should know.
            timeout_s: Longest wait, in seconds.

        Returns:
            Every rank's card.

        Raises:
            GroupError: The rank is taken, or the meeting was cancelled.
            PeerLostError: The host is gone.
            StallError: Ranks are missing; the error names them.
        """
        deadline = Deadline(timeout_s)
        try:
            with self.waiting(timeout_s + GRACE_S):
                return self._meet(rank, size, card, deadline)
        except dist.DistError as error:
            where = tcp_text((self.host, self.port))
            deadline.check(f"the rendezvous at {where}: its host does not answer")
            raise PeerLostError(f"the rendezvous at {where} is gone: {error}") from error

    @contextlib.contextmanager
    def waiting(self, limit_s: float, others: Collection[Endpoint] = ()) -> Iterator[None]:
        """Bound what waits for the host without a bound of its own, such as a group that forms.

        The connections to it end after a time, and when the meeting is called off. One thing waits
        at a time.

        Args:
            limit_s: The time, in seconds.
            others: Who else is waited for.

        Raises:
            GroupError: The meeting was called off, whatever error that has led to, or the time was
                over just when the wait was.
        """
        guard = self._guard = _Guard({(self.host, self.port), *others}, limit_s)
        try:
            guard.start()
            self.check()
            yield
        except Exception:
            self.check()
            raise
        finally:
            guard.dismiss()
            self._guard = None
        if guard.has_acted:
            self.check()
            raise GroupError(f"the host of this rendezvous took longer than {limit_s:g} s")

    def cancel(self) -> None:
        """Let whoever waits here raise, now or later; any thread may call it."""
        self._cancelled.set()
        guard = self._guard
        if guard is not None:
            guard.act()

    def close(self) -> None:
        """Cancel, and let go of the store; on its host it ends with the last group that uses it."""
        self._closed = True
        self.cancel()
        self._store = None

    def check(self) -> None:
        """Raise if the meeting was called off.

        Raises:
            GroupError: It was.
        """
        if self._cancelled.is_set():
            raise GroupError(f"this rendezvous was {'closed' if self._closed else 'called off'}")

    def _connected(self, limit_s: float, deadline: Deadline) -> Any:
        left_s = max(deadline.remaining(), LEAST_S)
        with self.waiting(left_s):
            store = dist.TCPStore(
                self.host,
                self.port,
                is_master=False,
                wait_for_workers=False,
                timeout=dt.timedelta(seconds=min(limit_s, left_s)),
            )
            store.set_timeout(dt.timedelta(seconds=deadline.seconds))
            return dist.PrefixStore(self.name, store)

    def _meet(self, rank: int, size: int, card: str, deadline: Deadline) -> list[str]:
        entry = f"{secrets.token_hex(4)} {card}"
        held = self.store.compare_set(f"rank{rank}", "", entry).decode()
        if held != entry:
            raise GroupError(
                f"rank {rank} of {size} is taken; two workers were given one place (instance and "
                "rank)"
            )
        keys = [f"rank{each}" for each in range(size)]
        while not self.store.check(keys):
            self._cancelled.wait(POLL_S)
            self.check()
            if deadline.expired:
                missing = [each for each in range(size) if not self.store.check([keys[each]])]
                deadline.check(f"the arrival of ranks {missing} of {size}")
        return [self.store.get(key).decode().partition(" ")[2] for key in keys]


def host_rendezvous(host: str, port: int = 0) -> Rendezvous:
    """Open a store at one address.

    Args:
        host: Address of this machine that all ranks can reach.
        port: 0: the kernel picks one.

    Raises:
        AddressInUseError: Somebody listens at that port.
        AddressError: The address is not this machine's.
    """
    if host in ("0.0.0.0", "::", ""):  # noqa: S104  (refused, not bound)
        raise AddressError(
            f"{host!r} is no address that ranks could dial; name the one at which workers reach "
            "this machine"
        )
    listener = ListeningSocket(tcp_text((host, port)), allow_remote=True)
    bound_host, bound_port = listener.socket.getsockname()[:2]
    store = dist.TCPStore(
        bound_host,
        bound_port,
        is_master=True,
        wait_for_workers=False,
        timeout=dt.timedelta(seconds=CONNECT_TIMEOUT_S),
        master_listen_fd=listener.socket.detach(),
    )
    return Rendezvous(bound_host, bound_port, f"wtransfer/{secrets.token_hex(16)}", store)


def join_rendezvous(host: str, port: int, name: str, timeout_s: float | None = None) -> Rendezvous:
    """Connect to a store; as `Rendezvous.join`.

    Args:
        host: Its host.
        port: Its port.
        name: Of the meeting.
        timeout_s: Longest wait for the host, in seconds; None: `CONNECT_TIMEOUT_S`.
    """
    rendezvous = Rendezvous(host, port, name)
    rendezvous.join(timeout_s)
    return rendezvous


def own_address(host: str, port: int) -> str:
    """Return the address of this machine from which a host is reached."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError as error:
            raise PeerLostError(f"no way to {host!r}: {error}") from error
        return str(probe.getsockname()[0])


class _Guard:
    """Ends the connections to a store, and to others, after a time or when it is told to.

    A store's client waits for an answer without bound: its time-out is for connecting only. A host
    that is stopped, or cut off, would hold it for ever. And where a connection ends it makes
    another, for as long as that time-out lasts: so they are ended again and again.

    Args:
        endpoints: Of the connections.
        limit_s: The time, in seconds.
    """

    def __init__(self, endpoints: Collection[Endpoint], limit_s: float) -> None:
        self.has_acted = False
        """Whether any connection may have ended."""
        self._endpoints = endpoints
        self._limit_s = limit_s
        self._due = threading.Event()
        self._dismissed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="wtransfer-guard", daemon=True)

    def start(self) -> None:
        """Begin to wait for either."""
        self._thread.start()

    def act(self) -> None:
        """End the connections from now on."""
        self._due.set()

    def dismiss(self) -> None:
        """Let nothing more be ended, nor be ending, when this returns."""
        self._dismissed.set()
        self._due.set()
        # An interrupt may have come before it was there: then it ends by itself, if it ever is.
        with contextlib.suppress(RuntimeError):
            self._thread.join()

    def _run(self) -> None:
        self._due.wait(self._limit_s)
        while not self._dismissed.is_set():
            self.has_acted = True
            # Where no descriptor is left to look with, there may be one the next time.
            with contextlib.suppress(OSError):
                hang_up(self._endpoints)
            self._dismissed.wait(AGAIN_S)


def _reached(host: str, port: int, deadline: Deadline, check: Callable[[], object]) -> str:
    """Return the host as a number, once somebody there has answered.

    Raises at once where nobody listens; the store's own client would try for its time-out. Only
    the look-up of a name has the system's bound.

    Args:
        host: Number or name.
        port: Its port.
        deadline: Divided among the addresses that a name has.
        check: Called again and again; may raise.
    """
    error: OSError = OSError("the name has no address")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as unknown:
        found, error = [], unknown
    for number, (family, kind, protocol, _, address) in enumerate(found):
        limit = Deadline(deadline.remaining() / (len(found) - number))
        try:
            with socket.socket(family, kind, protocol) as probe:
                _dial(probe, address, limit, check)
                return str(probe.getpeername()[0])
        except GroupError:
            # The meeting's end, which is a connection's error as well, and no address's.
            raise
        except OSError as failed:
            error = failed
    raise PeerLostError(
        f"no rendezvous at {tcp_text((host, port))}: {error}; the trainer has to listen where "
        "this host can dial it (option host=)"
    ) from error


def _dial(probe: socket.socket, address: Any, limit: Deadline, check: Callable[[], object]) -> None:
    probe.setblocking(False)
    code = probe.connect_ex(address)
    if code == errno.EINPROGRESS:
        answer = select.poll()
        answer.register(probe, select.POLLOUT)
        while not answer.poll(DIAL_MS):
            check()
            if limit.expired:
                raise TimeoutError(f"no answer within {limit.seconds:.1f} s")
        code = probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))
