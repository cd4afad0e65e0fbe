"""Tier ``mooncake``: blocks in the memory of the hosts of a Mooncake store.

The store's client is native code. The client ends the process when called before ``setup`` or after
``close``, so `MooncakeTier` lets no call through then. Its calls release the interpreter's lock,
and end by themselves: after about 5 seconds where the master's port is closed, after 30 where a
process is stopped; ``close`` takes a minute then.
"""

from __future__ import annotations

import atexit
import contextlib
import socket
import threading
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
import numpy as np
from wtransfer import Tier
from wtransfer.errors import ClosedError, WTransferError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

CONNECT_S = 5.0
"""Longest wait for the first connection to the master, in seconds."""

_PREFIX = "wtransfer-"
_NOT_FOUND = -704
_NO_SPACE = -200
# Absent, larger than the buffer, not written to its end, or gone since the look-up.
_MISSES = frozenset({_NOT_FOUND, -600, -703, -712})
_MEANINGS = {
    -1: "internal error",
    -101: "no host gives memory",
    _NO_SPACE: "no space: the memory that hosts give is full, or none gives any",
    -600: "invalid parameters",
    -601: "the object is another client's",
    -703: "not written to its end",
    -707: "the lease ended before the transfer",
    -708: "the object is being copied",
    -800: "the transfer failed: the host that has the memory is gone or does not answer",
    -900: "the master cannot be reached",
    -901: "the master does not answer",
}


class MooncakeError(WTransferError, OSError):
    """The Mooncake store failed; `code` is the number that it returned."""

    code: int | None = None
    """The store's number."""


class MooncakeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options in ``kv_connector_extra_config``."""

    master: Annotated[str, msgspec.Meta(pattern=r"^[^\s:]+:[0-9]{1,5}$")]
    """Address of ``mooncake_master``: ``HOST:PORT``."""
    segment_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)] = 1 << 30
    """Memory that each worker gives to the store, in steps of 16 MiB; 0: none."""
    local_hostname: Annotated[str, msgspec.Meta(pattern=r"^[^\s:]*$")] = ""
    """Address at which other hosts reach this one; empty: the one from which it reaches the
    master."""
    protocol: Literal["tcp", "rdma"] = "tcp"
    """Transport of blocks."""
    rdma_devices: str = ""
    """Names of devices for ``rdma``, separated by commas."""


class MooncakeTier(Tier):
    """Keeps blocks in a Mooncake store.

    An object gives memory to the store from its first `register_memory` or `put` on. So objects of
    workers give some; a scheduler's object, which only looks up, gives none. After a False of `get`
    or `get_many` the contents of `into` are undefined.

    Args:
        options: The options.

    Raises:
        MooncakeError: The store cannot be loaded, or its master not be reached.
    """

    example_options: ClassVar[Mapping[str, Any]] = {"master": "10.0.0.1:50051"}
    options_cls = MooncakeOptions

    @staticmethod
    def available() -> None:
        """Raise unless the client can be loaded here, for ``wtransfer plugins show``.

        Raises:
            MooncakeError: A library is missing.
        """
        _store_cls()

    def __init__(self, options: MooncakeOptions) -> None:
        self._options = options
        self._changed = threading.Condition()
        self._num_running = 0
        self._is_closed = False
        self._mount_lock = threading.Lock()
        self._has_mounted = False
        self._registered: int | None = None
        self._counts: Counter[str] = Counter()
        self._store = _connected(self._options)
        # A thread that returns from the client while the interpreter ends would abort it.
        atexit.register(self.close)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Ask the master for each key."""
        with self._call():
            found = self._store.batch_is_exist([_name(key) for key in keys]) if keys else []
        self._check("looking up", [code for code in found if code < 0])
        return [code == 1 for code in found]

    def put(self, key: bytes, data: memoryview) -> None:
        """Write one block, in place of its key's former value."""
        self.put_many([(key, data)])

    def put_many(self, items: Sequence[tuple[bytes, memoryview]]) -> None:
        """Write blocks.

        Raises:
            MooncakeError: A block could not be written. Where memory is full, the master evicts
                the blocks unread for longest, a little later.
        """
        self._mount()
        with self._call():
            codes = self._store.batch_upsert_from(*_places(items))
        self._counts["blocks_without_space_total"] += codes.count(_NO_SPACE)
        self._check("writing", [code for code in codes if code != 0])

    def get(self, key: bytes, into: memoryview) -> bool:
        """Read one block."""
        return self.get_many([(key, into)])[0]

    def get_many(self, items: Sequence[tuple[bytes, memoryview]]) -> list[bool]:
        """Read blocks."""
        with self._call():
            codes = self._store.batch_get_into(*_places(items))
        self._check("reading", [code for code in codes if code < 0 and code not in _MISSES])
        return [code == into.nbytes for code, (_, into) in zip(codes, items, strict=True)]

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove keys, also those that were just read and have a lease."""
        with self._call():
            codes = self._store.batch_remove([_name(key) for key in keys], True)
        self._check("removing", [code for code in codes if code not in (0, _NOT_FOUND)])

    def register_memory(self, memory: memoryview) -> None:
        """Register memory, and give some to the store."""
        self._mount()
        address = _address(memory)
        with self._call():
            code = self._store.register_buffer(address, memory.nbytes)
            self._check(f"registering {memory.nbytes:,} bytes", [code] if code else [])
            self._registered = address

    def get_stats(self) -> Mapping[str, float]:
        """Return how many blocks found no space."""
        return dict(self._counts)

    def close(self) -> None:
        """Take back memory, and with it the blocks in it; wait for calls that run.

        A second call does nothing.
        """
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.wait_for(lambda: self._num_running == 0)
        if self._registered is not None:
            self._store.unregister_buffer(self._registered)
        self._store.close()
        atexit.unregister(self.close)

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        """Keep the client open for a call."""
        with self._changed:
            if self._is_closed:
                raise ClosedError("this Mooncake tier was closed")
            self._num_running += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_running -= 1
                self._changed.notify_all()

    def _mount(self) -> None:
        """Give memory to the store, once."""
        with self._mount_lock, self._call():
            nbytes = self._options.segment_bytes
            if self._has_mounted or not nbytes:
                return
            done = self._store.allocate_and_mount_segment(nbytes, self._options.protocol)
            codes = [done["ret"]] if done["ret"] else []
            self._check(f"giving segment_bytes={nbytes:,} to the store", codes)
            self._has_mounted = True

    def _check(self, what: str, codes: Sequence[int]) -> None:
        """Raise for the first of these codes."""
        for code in codes:
            raise _error(f"{what} failed at the Mooncake master {self._options.master}", code)


def _store_cls() -> Any:
    """Return the class of the client, whose libraries may be missing."""
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise MooncakeError(
            f"the Mooncake store cannot be loaded: {error}; install "
            "mooncake-transfer-engine-non-cuda (or another build of it) and, on Debian, "
            "libibverbs1, libnl-3-200 and libnl-route-3-200"
        ) from error
    return MooncakeDistributedStore


def _connected(options: MooncakeOptions) -> Any:
    """Return a client that is set up."""
    store_cls = _store_cls()
    host, _, port = options.master.partition(":")
    try:
        # The client itself would try for longer, and reports no cause.
        with socket.create_connection((host, int(port)), CONNECT_S) as connection:
            own_host, own_port = connection.getsockname()[:2]
    except (OSError, OverflowError) as error:
        raise MooncakeError(
            f"no Mooncake master at {options.master}: {error}; start mooncake_master, or correct "
            "the option `master`"
        ) from error
    store = store_cls()
    # The port only makes the name unique. Without one, the client tries twenty in turn.
    settings = {
        "local_hostname": f"{options.local_hostname or own_host}:{own_port}",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_addr": options.master,
        "protocol": options.protocol,
        "rdma_devices": options.rdma_devices,
        "global_segment_size": "0",
        # Every call here copies from and to the caller's memory.
        "local_buffer_size": "0",
    }
    if code := store.setup(settings):
        # The number is the same for all reasons.
        raise MooncakeError(
            f"the Mooncake client could not be set up ({code}): {options.master} does not answer as"
            " a Mooncake master does, or one of the options local_hostname, protocol and "
            "rdma_devices cannot be used; the client's own log is on stderr",
            code=code,
        )
    return store


def _error(what: str, code: int) -> MooncakeError:
    meaning = _MEANINGS.get(code, "see ErrorCode in Mooncake's types.h")
    return MooncakeError(f"{what}: {meaning} ({code})", code=code)


def _places(items: Sequence[tuple[bytes, memoryview]]) -> tuple[list[str], list[int], list[int]]:
    """Return names, addresses and lengths."""
    names = [_name(key) for key, _ in items]
    return names, [_address(data) for _, data in items], [data.nbytes for _, data in items]


def _name(key: bytes) -> str:
    return _PREFIX + key.hex()


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)
