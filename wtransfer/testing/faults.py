"""Fault injection: make an engine fail at a chosen tensor on a chosen worker.

Tests the reaction of a publisher and its workers when your engine, or a built-in one, misbehaves::

    faults = Faults()
    WeightTransferEngineFactory.register_engine("shaky", faults.wrap("shm"))
    faults.arm(Fault("flip", tensor=3, worker=1))
    with pytest.raises(DigestMismatchError):
        publisher.publish("v2")
    assert faults.fired

In a fleet of several processes each process wraps and arms for itself.
"""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from wtransfer.engines.factory import WeightTransferTrainerFactory
from wtransfer.registry.resolve import registry
from wtransfer.transport.tensors import plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from wtransfer.config import HasBackend, ParallelConfig
    from wtransfer.engines.interface import RoundSource
    from wtransfer.transport.layout import Bucket
    from wtransfer.weights import LoadWeights, ParamMeta

    Pair = tuple[str, torch.Tensor]

Spoil = Literal["drop", "flip", "swap", "cast", "truncate", "duplicate", "twice"]
"""Damage to a tensor: left out; one bit flipped; exchanged with the next one; another dtype; its
last element left out; delivered under the next one's name as well; delivered again."""
Break = Literal["raise", "memory-error", "torch-memory", "enomem", "exit", "hang"]
"""Failure of an engine: raise `RuntimeError`, `MemoryError`, torch's error for exhausted memory,
`OSError` with ENOMEM, `SystemExit`; or hang until `Faults.disarm`."""
SPOILS: tuple[Spoil, ...] = ("drop", "flip", "swap", "cast", "truncate", "duplicate", "twice")
"""Every `Spoil`."""
BREAKS: tuple[Break, ...] = ("raise", "memory-error", "torch-memory", "enomem", "exit", "hang")
"""Every `Break`."""


@dataclass(frozen=True)
class Fault:
    """One fault, which fires once."""

    action: Spoil | Break
    """The damage or failure."""
    tensor: int = 0
    """Index of the tensor at which to fire, from 0 in the order in which the engine moves them."""
    worker: int | None = None
    """``data_parallel_index`` of the worker; None: the first worker that reaches the tensor."""
    side: Literal["worker", "trainer"] = "worker"
    """Side on which the engine breaks. Tensors can be spoiled on workers only."""
    bit: int = 0
    """Index of the bit to flip, from the least significant one of the first byte."""

    def __post_init__(self) -> None:
        if self.side == "trainer" and self.action in SPOILS:
            raise ValueError(f"{self.action!r} fires on workers only; expected one of {BREAKS}")


class Faults:
    """Armed faults, and those that have fired; for any number of engines and threads."""

    def __init__(self) -> None:
        self.fired: list[Fault] = []
        """Faults that have fired, in order: evidence that a test has injected anything."""
        self._armed: list[Fault] = []
        self._lock = threading.Lock()
        self._released = threading.Event()

    def wrap(self, engine: str | type, trainer: type | None = None) -> type:
        """Return a worker engine class, with its trainer's twin, in which armed faults fire.

        Args:
            engine: Name or worker class of an engine.
            trainer: Its trainer class, where the worker class does not name it.
        """
        worker_cls = registry("engines").get(engine) if isinstance(engine, str) else engine
        trainer_cls = trainer or _trainer_of(engine)
        shared: dict[str, Any] = {"_faults": self}
        twin = type(f"Faulty{trainer_cls.__name__}", (_FaultyTrainer, trainer_cls), shared)
        shared["trainer_cls"] = twin
        return type(f"Faulty{worker_cls.__name__}", (_FaultyWorker, worker_cls), shared)

    def arm(self, *faults: Fault) -> None:
        """Let each fault fire once, as soon as an engine gets to its tensor."""
        with self._lock:
            self._armed.extend(faults)
            self._released.clear()

    def disarm(self) -> None:
        """Forget armed and fired faults, and release engines that hang."""
        with self._lock:
            self._armed.clear()
            self.fired.clear()
            self._released.set()

    def due(self, side: str, worker: int | None, tensor: int) -> Fault | None:
        """Return the fault that fires here, once; called by the engines of `wrap`."""
        with self._lock:
            for fault in self._armed:
                here = fault.side == side and fault.tensor == tensor
                if here and fault.worker in (None, worker):
                    self._armed.remove(fault)
                    self.fired.append(fault)
                    return fault
        return None

    def break_down(self, fault: Fault) -> None:
        """Raise the error of a `Break`, or hang until `disarm`."""
        if fault.action == "hang":
            self._released.wait()
        error = _ERRORS[fault.action]()
        raise error


_ERRORS: dict[str, Callable[[], BaseException]] = {
    "raise": lambda: RuntimeError("injected: the engine gives up"),
    "memory-error": lambda: MemoryError("injected"),
    "torch-memory": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory (injected)"
    ),
    "enomem": lambda: OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    "exit": lambda: SystemExit("injected: the engine ends the process"),
    "hang": lambda: RuntimeError("injected: the engine hung"),
}


def _trainer_of(engine: str | type) -> type:
    if isinstance(engine, str):
        return WeightTransferTrainerFactory.trainer_class(engine)
    twin = getattr(engine, "trainer_cls", None)
    if not isinstance(twin, type):
        raise TypeError(f"{engine.__name__} names no trainer class; pass trainer=")
    return twin


class _FaultyWorker:
    """Base of a worker engine's subclass, before the engine in the MRO."""

    _faults: ClassVar[Faults]

    def __init__(self, config: HasBackend, parallel_config: ParallelConfig) -> None:
        self._place = parallel_config.data_parallel_index
        self._stream = _Stream(self._faults, self._place)
        engine: Any = super()
        engine.__init__(config, parallel_config)

    def start_weight_update(self) -> None:
        self._stream = _Stream(self._faults, self._place)
        start = getattr(super(), "start_weight_update", None)
        if start is not None:
            start()

    def receive_weights(self, update_info: Any, load_weights: LoadWeights) -> None:
        engine: Any = super()
        stream = self._stream
        engine.receive_weights(update_info, lambda pairs: load_weights(stream.spoil(pairs)))


class _Stream:
    """The tensors of one round on one worker."""

    def __init__(self, faults: Faults, worker: int) -> None:
        self._faults = faults
        self._worker = worker
        self._num_seen = 0
        self._held: tuple[Fault, str, torch.Tensor] | None = None

    def spoil(self, pairs: Iterable[Pair]) -> Iterator[Pair]:
        for name, tensor in pairs:
            fault = self._faults.due("worker", self._worker, self._num_seen)
            self._num_seen += 1
            if self._held is not None:
                yield from self._with_held(name, tensor)
            elif fault is None:
                yield name, tensor
            elif fault.action in ("swap", "duplicate"):
                # The partner may come in a later call, when the engine has reused this memory.
                self._held = fault, name, tensor.clone()
            elif fault.action in _SPOILED:
                yield from _SPOILED[fault.action](name, tensor, fault)
            else:
                self._faults.break_down(fault)

    def _with_held(self, name: str, tensor: torch.Tensor) -> Iterator[Pair]:
        assert self._held is not None
        (fault, held_name, held), self._held = self._held, None
        yield held_name, tensor.clone() if fault.action == "swap" else held
        yield name, held


def _flipped(tensor: torch.Tensor, bit: int) -> torch.Tensor:
    flipped = plain(tensor).clone()
    flat = flipped.view(-1).view(torch.uint8)
    flat[bit // 8] ^= 1 << bit % 8
    return flipped


def _cast(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float64 if tensor.dtype != torch.float64 else torch.float32)


_SPOILED: dict[str, Callable[[str, torch.Tensor, Fault], Sequence[Pair]]] = {
    "drop": lambda _name, _tensor, _fault: [],
    "flip": lambda name, tensor, fault: [(name, _flipped(tensor, fault.bit))],
    "cast": lambda name, tensor, _fault: [(name, _cast(tensor))],
    "truncate": lambda name, tensor, _fault: [(name, tensor.flatten()[:-1])],
    "twice": lambda name, tensor, _fault: [(name, tensor), (name, tensor)],
}


class _FaultyTrainer:
    """Base of a trainer engine's subclass, before the engine in the MRO."""

    _faults: ClassVar[Faults]

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: RoundSource | None = None) -> Any:
        engine: Any = super()
        shaky = None if source is None else _FaultySource(source, cls._faults)
        return engine.trainer_init(init_info, client=client, source=shaky)


class _FaultySource:
    """A round's source in which faults fire."""

    def __init__(self, source: RoundSource, faults: Faults) -> None:
        self._source = source
        self._faults = faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def iter_full(self) -> Iterator[Pair]:
        for number, pair in enumerate(self._source.iter_full()):
            self._check(number)
            yield pair

    def iter_local(self) -> Iterator[Pair]:
        return self.iter_full()

    def iter_into(
        self, allocate: Callable[[ParamMeta], memoryview]
    ) -> Iterator[tuple[ParamMeta, memoryview]]:
        for number, pair in enumerate(self._source.iter_into(allocate)):
            self._check(number)
            yield pair

    def iter_buckets(self, nbytes: int, allocate: Callable[[Bucket], Any]) -> Iterator[Bucket]:
        for bucket in self._source.iter_buckets(nbytes, allocate):
            for number in range(bucket.first, bucket.last):
                self._check(number)
            yield bucket

    def _check(self, number: int) -> None:
        fault = self._faults.due("trainer", None, number)
        if fault is not None:
            self._faults.break_down(fault)
