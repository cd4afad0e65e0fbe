"""Rendezvous of the ranks of a group: a store that one of them hosts.

The host binds the listening socket itself, and hands it to the store: so the store listens at the
one address that the host was given, and the kernel picks the port, without a race for a free one.

The store is torch's and has no authentication: keys stand under a random name that only ranks are
told, so a stranger who can reach the port can neither find nor guess them, but could fill its
memory. Let it listen on loopback or on a network of your own.

The store's client waits for an answer without a bound: its time-out is for connecting only. So
every call to the store runs on a thread that is left behind when the time is over or the rendezvous
is cancelled. The thread ends with its connection: when the store's host goes on, ends, or is given
up by TCP. A host that ends just as torch dials it is dialed until the time-out, or a little longer.
"""

from __future__ import annotations

import datetime as dt
import secrets
import socket
import threading
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed

from wtransfer.calls import forget_frames, start_call
from wtransfer.deadline import Deadline
from wtransfer.errors import AddressError, GroupError, PeerLostError
from wtransfer.transport.address import ListeningSocket, tcp_text

if TYPE_CHECKING:
    from collections.abc import Callable

dist: Any = torch.distributed  # whose stores torch does not declare

T = TypeVar("T")

POLL_S = 0.005
"""Time between two polls, for arrived ranks and for a cancellation, in seconds."""
CONNECT_TIMEOUT_S = 20.0
"""Longest wait for the host."""
GRACE_S = 0.5
"""Time past its deadline at which a wait for a host that does not answer ends, in seconds."""


class Rendezvous:
    """One meeting of all ranks, for one group.

    Made by `host_rendezvous`, or `bind_rendezvous`, on one rank and by `join_rendezvous` on the
    others.

    Args:
        host: Host of the store.
        port: Port of the store.
        name: Prefix of the keys of this meeting.
        listener: Socket for `serve` to listen at; None: another process has the store.
    """

    def __init__(
        self, host: str, port: int, name: str, listener: ListeningSocket | None = None
    ) -> None:
        self.host = host
        self.port = port
        self.name = name
        self._listener = listener
        # The hosted store, kept until `close`.
        self._server: Any = None
        self._store: Any = None
        self._closed = False
        self._cancelled = threading.Event()

    @property
    def store(self) -> Any:
        """This rank's connection to the keys of this meeting.

        Raises:
            GroupError: The meeting is over, or was not joined yet.
        """
        store = self._store
        if store is None:
            self.check()
            raise GroupError("this rendezvous was not joined yet")
        return store

    def serve(self, timeout_s: float | None = None) -> None:
        """Open the store, and connect to it; on the host, once.

        Torch asks the system's resolver here, now and then: that takes seconds where no resolver
        answers, so a thread on which others wait makes this call on another one.

        Args:
            timeout_s: Longest wait, in seconds; None: `CONNECT_TIMEOUT_S`.

        Raises:
            GroupError: The rendezvous was cancelled.
            StallError: Torch has not made the store in time.
            PeerLostError: The store does not answer.
        """
        limit_s = CONNECT_TIMEOUT_S if timeout_s is None else timeout_s
        deadline = Deadline(limit_s)
        where = tcp_text((self.host, self.port))

        def open_store() -> Any:
            assert self._listener is not None
            # The store's from here on. Either this line or `close` takes the descriptor.
            fd = self._listener.socket.detach()
            if fd < 0:
                raise GroupError(f"the rendezvous at {where} was closed before it was opened")
            return dist.TCPStore(
                self.host,
                self.port,
                is_master=True,
                wait_for_workers=False,
                timeout=dt.timedelta(seconds=CONNECT_TIMEOUT_S),
                master_listen_fd=fd,
            )

        what = f"opening the rendezvous at {where}: torch asks the resolver of this host"
        self._server = self.call(open_store, what, limit_s)
        # As on every other rank: a group keeps its connection and may end late, but not the port.
        self.join(deadline.remaining())

    def join(self, timeout_s: float | None = None) -> None:
        """Connect to the store.

        Args:
            timeout_s: Longest wait for the host, in seconds; None: `CONNECT_TIMEOUT_S`.

        Raises:
            GroupError: The rendezvous was cancelled.
            PeerLostError: The host does not listen there, or does not answer.
        """
        limit_s = CONNECT_TIMEOUT_S if timeout_s is None else timeout_s
        where = tcp_text((self.host, self.port))

        def connect() -> tuple[str, Any]:
            # The store's own client goes on dialing until its time-out where nothing listens.
            with socket.create_connection((self.host, self.port), limit_s) as probe:
                host = str(probe.getpeername()[0])
            # A host that calls its ranks off ends as well, and nothing ends a dial of torch's.
            self.check()
            store = dist.TCPStore(
                host,
                self.port,
                is_master=False,
                wait_for_workers=False,
                timeout=dt.timedelta(seconds=limit_s),
            )
            return host, dist.PrefixStore(self.name, store)

        try:
            self.host, self._store = self.call(connect, f"the rendezvous at {where}", limit_s)
        except GroupError:
            # Also a ConnectionError; the cause is the cancelled rendezvous, not the address.
            raise
        except (OSError, dist.DistError) as error:
            raise PeerLostError(
                f"no rendezvous at {where}: {error}; the trainer has to listen where this host can "
                "dial it (option host=)"
            ) from error

    def meet(self, rank: int, size: int, timeout_s: float) -> None:
        """Wait until every rank has arrived.

        Args:
            rank: This rank.
            size: Number of expected ranks.
            timeout_s: Longest wait, in seconds.

        Raises:
            GroupError: The rank is taken, or the rendezvous was cancelled.
            PeerLostError: The host is gone.
            StallError: Ranks are missing; the error names them.
        """
        deadline = Deadline(timeout_s)
        where = tcp_text((self.host, self.port))
        try:
            self.call(
                lambda: self._meet(rank, size, deadline),
                f"the rendezvous at {where}: its host does not answer",
                timeout_s + GRACE_S,
            )
        except dist.DistError as error:
            raise PeerLostError(f"the rendezvous at {where} is gone: {error}") from error

    def call(self, function: Callable[[], T], what: str, timeout_s: float) -> T:
        """Make a call that may ask the store, on a thread that can be left; return its result.

        Args:
            function: The call. Its result is dropped if it comes too late.
            what: Description of the call, for the error.
            timeout_s: Longest wait, in seconds.

        Raises:
            GroupError: The rendezvous was cancelled.
            StallError: The call has not returned in time.
        """

        def run() -> T:
            try:
                return function()
            except BaseException as error:
                # The error's frames refer to sockets, which would live as long as the error.
                forget_frames(error)
                raise

        self.check()
        deadline = Deadline(timeout_s)
        call = start_call(run, "wtransfer-rendezvous")
        try:
            while not call.done.wait(POLL_S):
                self.check()
                deadline.check(what)
            # Also just before the end: a group that was made for a cancelled rendezvous is dropped.
            self.check()
        except BaseException:
            # Else a result that comes later would live as long as the error.
            del call
            raise
        if call.error is not None:
            raise call.error
        result: T = call.result
        return result

    def cancel(self) -> None:
        """Let every wait here raise, now or later; any thread may call it."""
        self._cancelled.set()

    def close(self) -> None:
        """Cancel, and release the store; on its host the port is free afterwards."""
        self._closed = True
        self.cancel()
        self._store = self._server = None
        if self._listener is not None:
            self._listener.socket.close()

    def check(self) -> None:
        """Raise if the rendezvous was cancelled.

        Raises:
            GroupError: The rendezvous was cancelled.
        """
        if self._cancelled.is_set():
            raise GroupError(f"this rendezvous was {'closed' if self._closed else 'called off'}")

    def _meet(self, rank: int, size: int, deadline: Deadline) -> None:
        store, mine = self.store, secrets.token_hex(4)
        if store.compare_set(f"rank{rank}", "", mine).decode() != mine:
            raise GroupError(
                f"rank {rank} of {size} is taken; two workers were given one place (instance and "
                "rank)"
            )
        keys = [f"rank{each}" for each in range(size)]
        while not store.check(keys):
            self._cancelled.wait(POLL_S)
            self.check()
            if deadline.expired:
                missing = [each for each in range(size) if not store.check([keys[each]])]
                deadline.check(f"the arrival of ranks {missing} of {size}")


def host_rendezvous(host: str, port: int = 0, timeout_s: float | None = None) -> Rendezvous:
    """Open a store at one address, and connect to it as every other rank does.

    Args:
        host: Address of this machine that all ranks can reach.
        port: 0: the kernel picks one.
        timeout_s: As for `Rendezvous.serve`.

    Raises:
        AddressInUseError: The port is taken.
        AddressError: The address is not this machine's.
        StallError: Torch has not made the store in time.
    """
    rendezvous = bind_rendezvous(host, port)
    try:
        rendezvous.serve(timeout_s)
    except BaseException:
        rendezvous.close()
        raise
    return rendezvous


def bind_rendezvous(host: str, port: int = 0) -> Rendezvous:
    """Bind the address of a rendezvous; nothing answers there before `Rendezvous.serve`.

    Args:
        host: Address of this machine that all ranks can reach.
        port: 0: the kernel picks one.

    Raises:
        AddressInUseError: The port is taken.
        AddressError: The address is not this machine's.
    """
    if host in ("0.0.0.0", "::", ""):  # noqa: S104  (refused, not bound)
        raise AddressError(
            f"{host!r} is no address that ranks could dial; name the one at which workers reach "
            "this machine"
        )
    listener = ListeningSocket(tcp_text((host, port)), allow_remote=True)
    bound_host, bound_port = listener.socket.getsockname()[:2]
    name = f"wtransfer/{secrets.token_hex(16)}"
    return Rendezvous(bound_host, bound_port, name, listener)


def join_rendezvous(host: str, port: int, name: str, timeout_s: float | None = None) -> Rendezvous:
    """Connect to a store; as `Rendezvous.join`.

    Args:
        host: Host of the store.
        port: Port of the store.
        name: Name of the meeting.
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
