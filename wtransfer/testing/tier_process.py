"""A tier in a process of its own, called by the kit of tiers; and the calls that the kit makes."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import inspect
import mmap
import resource
import sys
import time
import traceback
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from wtransfer.deadline import Deadline
from wtransfer.errors import StallError, WTransferError
from wtransfer.registry.resolve import registry
from wtransfer.specs.tier import open_tier
from wtransfer.testing.mini_engine.channel import (
    END_S,
    open_channel,
    start_process,
    wait_for_end,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType

    from wtransfer.specs.interface import Tier
    from wtransfer.testing.zygote import Child

PROCESS_MAIN = f"{__name__}:run_tier"
"""Function that the process calls."""
NUM_ROUNDS = 4
"""Values that `TierProcess.put_until_killed` puts under each key, over and over."""


def value_of(seed: int, nbytes: int) -> bytes:
    """Return random bytes, the same for the same seed."""
    return np.random.default_rng(seed).bytes(nbytes)


class TierUser:
    """Calls a tier with views of memory, as the offloading spec over tiers does.

    Args:
        tier: The tier.
    """

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        """The tier."""
        self.is_closed = False
        """True once `close` was called."""

    def put(self, key: bytes, value: bytes) -> None:
        """Put a value from memory that is not used again."""
        self.tier.put(key, np.array(memoryview(value)).data)

    def get(self, key: bytes, nbytes: int) -> bytes | None:
        """Return the value of a key; None if `get` has found none of this length."""
        memory = np.zeros(nbytes, np.uint8)
        found = self.tier.get(key, memory.data)
        if not isinstance(found, bool):
            raise TypeError(f"get() returned {found!r}, not True or False")
        return memory.tobytes() if found else None

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return the answers of `contains`."""
        found = self.tier.contains(keys)
        if not isinstance(found, list) or not all(isinstance(each, bool) for each in found):
            raise TypeError(f"contains() returned {found!r}, not a list of True and False")
        return found

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove keys."""
        self.tier.remove(keys)

    def tried(self, name: str, *args: Any) -> tuple[bool, Any]:
        """Make a call; return True and what it has returned, or False and the error's text."""
        try:
            return True, getattr(self, name)(*args)
        except Exception as error:
            return False, f"{type(error).__name__}: {error}"

    def close(self) -> None:
        """Close the tier."""
        self.is_closed = True
        self.tier.close()


# -- the kit's side


class TierPlace(msgspec.Struct, frozen=True):
    """Place at which another process finds the class of a tier."""

    name: str
    """Its registered name; empty: it has none."""
    module: str = ""
    qualname: str = ""
    file: str = ""
    """The module's file, for modules that cannot be imported by name."""

    @classmethod
    def of(cls, tier_cls: type) -> TierPlace:
        """Return the place of a class without a name."""
        return cls("", tier_cls.__module__, tier_cls.__qualname__, inspect.getfile(tier_cls))

    def load(self) -> type[Tier]:
        """Return the class."""
        if self.name:
            return registry("specs").get(self.name)
        found: type[Tier] = attrgetter(self.qualname)(self._import())
        return found

    def _import(self) -> ModuleType:
        try:
            return importlib.import_module(self.module)
        except ModuleNotFoundError:
            # A test module, which pytest has imported by its path.
            spec = importlib.util.spec_from_file_location(self.module, self.file)
            if spec is None or spec.loader is None:
                raise
            sys.modules[self.module] = module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module


class TierProcess:
    """Starts a process with a tier, and has it make the calls of a `TierUser`.

    Args:
        place: Where the process finds the class.
        options: The tier's options.
        spawn: Starts a process that calls a function, ``module:function``, with an address.
        deadline_s: Bound on every answer, in seconds.

    Raises:
        WTransferError: The tier cannot be opened there; the text has the cause.
    """

    def __init__(
        self,
        place: TierPlace,
        options: dict[str, Any],
        spawn: Callable[[str, str], Child],
        deadline_s: float,
    ) -> None:
        self._deadline_s = deadline_s
        self._processes: list[Child] = []

        def start(address: str) -> Child:
            self._processes.append(spawn(PROCESS_MAIN, address))
            return self._processes[0]

        self._channel = start_process("a process with the tier", start)
        try:
            self._channel.send(_Open(place, options))
            self._answer("the constructor")
        except BaseException:
            self.close()
            raise

    def __getattr__(self, name: str) -> Any:
        return partial(self._call, name)

    def kill(self) -> None:
        """Send SIGKILL, and wait for the end."""
        self._processes[0].kill()
        self._processes[0].wait(END_S)

    def close(self) -> None:
        """End the process. The tier is closed, unless it was killed."""
        self._channel.close()
        wait_for_end(self._processes[0], Deadline(END_S))

    def _call(self, name: str, *args: Any) -> Any:
        self._channel.send(_Call(name, args))
        return self._answer(f"{name}()")

    def _answer(self, what: str) -> Any:
        if not self._channel.poll(self._deadline_s):
            raise StallError(
                f"{what} of the tier has not returned in another process",
                seconds=self._deadline_s,
            )
        return self._channel.receive(_ANY)


# -- the process's side


class _Open(msgspec.Struct, frozen=True):
    place: TierPlace
    options: dict[str, Any]


class _Call(msgspec.Struct, frozen=True):
    name: str
    args: tuple[Any, ...]


_ANY: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder()
_OPEN = msgspec.msgpack.Decoder(_Open)
_CALLS = msgspec.msgpack.Decoder(_Call)


def run_tier(address: str) -> None:
    """Make calls until the kit closes the channel.

    Args:
        address: Address of the kit's socket.
    """
    with open_channel(address, "the kit") as channel:
        opened = channel.receive(_OPEN)
        user = TierUser(open_tier(opened.place.load(), opened.options))
        try:
            channel.wait_forever()
            channel.send(True)
            while True:
                call = channel.receive(_CALLS)
                with _named(call.name):
                    if call.name == "put_until_killed":
                        _put_until_killed(user, call.args, channel.send)
                    made: Any = _OF_THE_PROCESS.get(call.name) or getattr(user, call.name)
                    answer = made(*call.args)
                channel.send(answer)
        finally:
            user.close()


@contextlib.contextmanager
def _named(call: str) -> Iterator[None]:
    """Let an error that leaves a call say where it comes from: its traceback stays here."""
    try:
        yield
    except Exception as error:
        *_, frame = traceback.extract_tb(error.__traceback__)
        at = f"{Path(frame.filename).name}:{frame.lineno}"
        said = f"in another process {call}() raised {type(error).__name__}: {error} (at {at})"
        raise WTransferError(said) from error


def _put_until_killed(
    user: TierUser, args: tuple[list[bytes], int, str], notify: Callable[[float], None]
) -> None:
    """Put one value after the other under each key.

    Args:
        user: The tier.
        args: The keys; bytes of each value; and a file whose first byte is 1 while a put is under
            way, also after the kill.
        notify: Called once each key has a value, with the duration of a put, in seconds.
    """
    keys, nbytes, noted = args
    values = [value_of(number, nbytes) for number in range(NUM_ROUNDS)]
    began = time.monotonic()
    for key in keys:
        user.put(key, values[0])
    duration = (time.monotonic() - began) / len(keys)
    with Path(noted).open("r+b") as file, mmap.mmap(file.fileno(), 1) as note:
        notify(duration)
        while True:
            for value in values:
                for key in keys:
                    note[0] = 1
                    user.put(key, value)
                    note[0] = 0


def _bound_files(most: int | None) -> None:
    """Let every write behind this many bytes of a file fail, as on a full disk; None: none."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    soft = hard if most is None else most
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class _CapHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _CapData(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


def _drop_override() -> None:
    """Let modes of files hold for this process, also where its user is root."""
    with contextlib.suppress(OSError, AttributeError):
        libc, header, data = ctypes.CDLL(None), _CapHeader(0x20080522, 0), (_CapData * 2)()
        libc.capget(ctypes.byref(header), data)
        # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH.
        data[0].effective &= ~0b110
        libc.capset(ctypes.byref(header), data)


_OF_THE_PROCESS = {"bound_files": _bound_files, "drop_override": _drop_override}
