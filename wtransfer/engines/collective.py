"""Engines that broadcast on a process group: both sides, except for the group itself.

1. T (`CollectiveTrainerEngine`) hosts a rendezvous; its address is the workers' init info.
2. T and every W (`CollectiveWeightTransferEngine`) meet there and form a group: T is rank 0, W's
   rank follows from its place.
3. T announces the update once per round and broadcasts the tensors as one stream of bytes in
   buckets, filling one while the other travels.
4. W receives each bucket where it stays, and passes views of it on.
5. A lost rank breaks the group for all. The control channel notices, and has every engine abort;
   the next round forms a new group, as does a change of membership.

Gloo is one such engine; third parties bring others by a `Communicator` of five methods.
"""

from __future__ import annotations

import collections
import itertools
import math
import threading
import weakref
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from wtransfer.calls import Announcer
from wtransfer.engines.interface import (
    RoundSource,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightSyncClient,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from wtransfer.errors import GroupError, NotInitializedError, PeerLostError, ProtocolError
from wtransfer.transport.communicator import OPERATION_TIMEOUT_S
from wtransfer.transport.layout import TensorLayout, aligned
from wtransfer.transport.memory import Segment
from wtransfer.transport.rendezvous import Rendezvous, host_rendezvous

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Self

    from wtransfer.config import HasBackend, ParallelConfig
    from wtransfer.transport.communicator import Communicator, Pending
    from wtransfer.transport.layout import Bucket
    from wtransfer.transport.tensors import ByteArray
    from wtransfer.weights import LoadWeights

JOIN_TIMEOUT_S = 30.0
"""Longest wait for all ranks to arrive."""
MAX_TIMEOUT_S = 1e9
"""Longest time that a peer may name, in seconds: clocks in nanoseconds can count it."""
NUM_AHEAD = 3
"""Parts received in advance, so that the next arrive while one is digested."""
NUM_BUCKETS = 2
"""Buckets in the trainer's memory: one is filled while the other travels."""
MAX_ABANDONED = 1
"""Broken groups that may keep the memory of an update while another group forms."""
OPERATION_DEADLINES = 2
"""Deadlines of the publisher that an operation may take: gloo carries out two at a time, so one may
wait for the bucket before its own as well."""


def parts(bucket: Bucket, nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield first and last byte, from the bucket's start, of parts of at most `nbytes`.

    A larger bucket travels in several parts, so that both sides see progress.
    """
    return itertools.pairwise([*range(0, bucket.nbytes, nbytes), bucket.nbytes])


# -- worker side -------------------------------------------------------------------------------


@dataclass
class CollectiveInitInfo(WeightTransferInitInfo):
    """Rendezvous of the ranks, and the settings that must be equal on all of them."""

    master_address: str
    """Host of the rendezvous."""
    master_port: int
    """Port of the rendezvous."""
    rendezvous: str
    """Name of this meeting; secret."""
    world_size: int
    """Ranks of the group, the trainer's included."""
    rank_offset: int = 1
    """Rank of the first worker."""
    packed_buffer_size_bytes: int = 16 << 20
    """Bytes of a bucket, about."""
    timeout_s: float = OPERATION_TIMEOUT_S
    """Time after which a rank gives a bucket up by itself, in seconds."""

    def __post_init__(self) -> None:
        check_counts(self, "master_port", "world_size", "rank_offset", "packed_buffer_size_bytes")
        check_timeout(self.timeout_s)


@dataclass
class CollectiveUpdateInfo(WeightTransferUpdateInfo):
    """One update. Tensors are named only where the worker's engine was given no layout."""

    names: list[str] = field(default_factory=list)
    """Names of the tensors, in the order of the stream."""
    dtype_names: list[str] = field(default_factory=list)
    """Wire dtypes."""
    shapes: list[list[int]] = field(default_factory=list)
    """Shapes."""

    def __post_init__(self) -> None:
        for name in ("dtype_names", "shapes"):
            found = len(getattr(self, name))
            if found != len(self.names):
                raise ValueError(f"`{name}` has {found} entries, `names` has {len(self.names)}")


class RecvBuffers(Protocol):
    """Memory for one update. Bytes are counted from the start of its layout."""

    def part(self, start: int, stop: int) -> torch.Tensor:
        """Return the memory that some bytes are received into; at most `NUM_AHEAD` + 1 at a time.

        Returns:
            uint8, shape ``(stop - start,)``, contiguous, of the communicator's kind of memory.
        """

    def received(self, start: int, stop: int) -> None:
        """Note that the bytes are in their part; called in the order of the stream."""

    def views(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor of each of a bucket's tensors, whose bytes have arrived."""


class HostRecvBuffers:
    """Host memory in which tensors stay at the place where they were received.

    Args:
        layout: The update.
        memory: uint8 array of the layout's size.
    """

    def __init__(self, layout: TensorLayout, memory: ByteArray) -> None:
        self._layout = layout
        self._memory = memory
        self._content = torch.from_numpy(memory)

    def part(self, start: int, stop: int) -> torch.Tensor:
        """Return the bytes themselves."""
        return self._content[start:stop]

    def received(self, start: int, stop: int) -> None:
        """Do nothing: the bytes are in place."""

    def views(self, bucket: Bucket) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield views that keep the whole memory alive."""
        return self._layout.views(self._memory, bucket)


TInfo = TypeVar("TInfo", bound=CollectiveInitInfo)


class CollectiveWeightTransferEngine(
    WeightTransferEngine[TInfo, CollectiveUpdateInfo], Generic[TInfo]
):
    """Receives broadcasts of rank 0.

    Args:
        config: Names the backend.
        parallel_config: This worker's place, and thereby its rank in the group.
    """

    update_info_cls = CollectiveUpdateInfo
    tensors_valid_until: ClassVar[Literal["return", "round"]] = "round"
    allocates: ClassVar[bool] = True
    multi_host: ClassVar[bool] = True
    needs_generation: ClassVar[bool] = True

    def __init__(self, config: HasBackend, parallel_config: ParallelConfig) -> None:
        super().__init__(config, parallel_config)
        self._rendezvous: Rendezvous | None = None
        self._aborted = False
        self._is_shut_down = False
        self._communicator: Communicator | None = None
        self._bucket_nbytes = 0
        self._memory = RecycledMemory()
        self._layout: TensorLayout | None = None

    @abstractmethod
    def form_group(self, rendezvous: Rendezvous, init_info: TInfo, rank: int) -> Communicator:
        """Join the group as one of its ranks; called once per `init_transfer_engine`.

        Args:
            rendezvous: Rendezvous of the ranks; cancelled by an abort.
            init_info: The trainer's settings.
            rank: Rank of this worker.

        Raises:
            GroupError: The group cannot be formed.
            StallError: Ranks are missing.
        """

    def recv_buffers(
        self, layout: TensorLayout, note_progress: Callable[[], object]
    ) -> RecvBuffers:
        """Return the memory that one update is received into; host memory, reused.

        Args:
            layout: The update.
            note_progress: To be called again and again while memory is taken; may raise.

        Raises:
            StagingMemoryError: There is not that much.
        """
        return HostRecvBuffers(layout, self._memory.take(layout.nbytes, lambda _: note_progress()))

    def init_transfer_engine(self, init_info: TInfo) -> None:
        """Meet the other ranks and form the group.

        Raises:
            GroupError: The workers' places do not add up to the group, a rank is taken, or the
                trainer's rendezvous cannot be reached.
            PeerLostError: The trainer's rendezvous is gone.
            StallError: Ranks are missing.
        """
        self._aborted = False
        self._leave()
        self._bucket_nbytes = init_info.packed_buffer_size_bytes
        rank = group_rank(self.parallel_config, init_info.rank_offset, init_info.world_size)
        where = init_info.master_address, init_info.master_port
        self._rendezvous = rendezvous = Rendezvous(*where, init_info.rendezvous)
        try:
            self._check_aborted()
            self._join(rendezvous)
            self._communicator = self.form_group(rendezvous, init_info, rank)
            # An abort just before this line found neither a group nor anything to cancel.
            self._check_aborted()
        except BaseException:
            self._leave()
            raise
        finally:
            self._rendezvous = None

    @staticmethod
    def _join(rendezvous: Rendezvous) -> None:
        try:
            rendezvous.join()
        except PeerLostError as error:
            # Reported to the round as a broken group, which waits for its cause: a trainer that
            # cannot form the group closes the rendezvous a moment before its own error is known.
            raise GroupError(error.message) from error

    def set_layout(self, layout: TensorLayout) -> None:
        """Take the layout of the round's tensors."""
        self._layout = layout

    def receive_weights(self, update_info: CollectiveUpdateInfo, load_weights: LoadWeights) -> None:
        """Receive the whole update, and pass views on bucket by bucket.

        A call that ends early has broken the group, of which nothing is kept then: the trainer
        forms a new one for the next round.
        """
        communicator = self._communicator
        if communicator is None:
            raise NotInitializedError("not initialized: call init_transfer_engine first")
        try:
            layout = self._layout_of(update_info)
            self._receive(layout, communicator, load_weights)
        except BaseException:
            self._leave()
            raise

    def _layout_of(self, update_info: CollectiveUpdateInfo) -> TensorLayout:
        layout = self._layout
        if not update_info.names:
            if layout is None:
                raise NotInitializedError("not initialized: no layout, and no tensors are named")
            return layout
        named = TensorLayout.of_columns(
            update_info.names, update_info.dtype_names, update_info.shapes
        )
        if layout is not None and named.manifest.pieces != layout.manifest.pieces:
            raise ProtocolError("the update info names other tensors than the plan of the round")
        return named

    def _receive(
        self, layout: TensorLayout, communicator: Communicator, load_weights: LoadWeights
    ) -> None:
        class Part(NamedTuple):
            start: int
            stop: int
            pending: Pending
            ends: Bucket | None

        buffers = self.recv_buffers(layout, lambda: load_weights(()))
        under_way: collections.deque[Part] = collections.deque()

        def take(limit: int) -> None:
            while len(under_way) > limit:
                part = under_way.popleft()
                part.pending.wait()
                buffers.received(part.start, part.stop)
                load_weights(() if part.ends is None else buffers.views(part.ends))

        for bucket in layout.buckets(self._bucket_nbytes):
            for start, stop in parts(bucket, self._bucket_nbytes):
                place = buffers.part(bucket.start + start, bucket.start + stop)
                pending = communicator.broadcast(place, 0)
                ends = bucket if stop == bucket.nbytes else None
                under_way.append(Part(bucket.start + start, bucket.start + stop, pending, ends))
                take(NUM_AHEAD)
            if not bucket.nbytes:
                # Empty tensors alone: nothing travels.
                load_weights(buffers.views(bucket))
        take(0)

    def abort_weight_update(self) -> None:
        """Break the group, or cancel its forming: every wait, here or there, ends with an error."""
        self._call_off()
        communicator = self._communicator
        if communicator is not None:
            communicator.abort()

    def shutdown(self) -> None:
        """Leave the group, also one that is about to form; memory that a model points to stays."""
        # Also a group that begins just now: no later `init_transfer_engine` resets the flag.
        self._is_shut_down = True
        self._call_off()
        self._memory.forget()
        self._leave()

    def _call_off(self) -> None:
        self._aborted = True
        rendezvous = self._rendezvous
        if rendezvous is not None:
            rendezvous.cancel()

    def _check_aborted(self) -> None:
        if self._is_shut_down:
            raise GroupError("this engine was shut down; its group was called off")
        if self._aborted:
            raise GroupError("the forming of the group was called off")

    def _leave(self) -> None:
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.close()


def group_rank(place: ParallelConfig, rank_offset: int, world_size: int) -> int:
    """Return a worker's rank in the group: offset + replica * ranks per replica + rank.

    Args:
        place: Place of the worker.
        rank_offset: Rank of the first worker.
        world_size: Ranks of the whole group.

    Raises:
        GroupError: The workers' number and the group's size do not agree.
    """
    per_replica = place.tensor_parallel_size * place.pipeline_parallel_size
    expected = rank_offset + place.data_parallel_size * per_replica
    if expected != world_size:
        raise GroupError(
            f"wrong world size: {place.data_parallel_size} instances of {per_replica} ranks after "
            f"{rank_offset} of the trainer make {expected}, the trainer says {world_size}; all "
            "instances must have the same number of ranks, and an option `world_size` is best left "
            "out"
        )
    return rank_offset + place.data_parallel_index * per_replica + place.rank


def check_counts(info: object, *names: str) -> None:
    """Raise unless each of these fields, which a peer may have set, is a positive whole number.

    Raises:
        ValueError: Naming the field.
    """
    for name in names:
        value = getattr(info, name)
        if type(value) is not int or value <= 0:
            raise ValueError(f"`{name}` is {value!r:.80}, expected a whole number > 0")


def check_timeout(value: object) -> None:
    """Raise unless the value is a time that an operation may take; a peer may have set it.

    Raises:
        ValueError: Naming the field.
    """
    # JSON has whole numbers, and bool is an int to isinstance.
    if type(value) not in (int, float) or not 0 < value <= MAX_TIMEOUT_S:  # type: ignore[operator]
        raise ValueError(
            f"`timeout_s` is {value!r:.80}, expected seconds > 0, at most {MAX_TIMEOUT_S:g}"
        )


# -- trainer side ------------------------------------------------------------------------------


@dataclass
class CollectiveTrainerInitInfo(TrainerInitInfo):
    """Options of the engine."""

    host: str = "127.0.0.1"
    """Address of this machine at which workers reach it."""
    port: int = 0
    """Port of the rendezvous; 0: a free one."""
    world_size: int | None = None
    """Ranks of the group, this one included; None: as many as workers take part, now and later."""
    packed_buffer_size_bytes: int = 16 << 20
    """Bytes of a bucket, about; two are kept, as large as the largest tensor at least."""
    timeout_s: float | None = None
    """Time after which a rank gives a bucket up by itself, and releases the memory of a broken
    update, in seconds; None: twice the publisher's deadline."""

    def __post_init__(self) -> None:
        self.port = _whole("port", self.port, 0)
        self.packed_buffer_size_bytes = _whole(
            "packed_buffer_size_bytes", self.packed_buffer_size_bytes, 1
        )
        if self.timeout_s is not None:
            self.timeout_s = _seconds("timeout_s", self.timeout_s)
        if self.world_size is not None:
            self.world_size = _whole("world_size", self.world_size, 2)


def _whole(name: str, value: object, least: int) -> int:
    try:
        number = int(str(value))
    except ValueError:
        number = least - 1
    if number < least:
        raise ValueError(f"{name} is {value!r}, expected a whole number >= {least}")
    return number


def _seconds(name: str, value: object) -> float:
    try:
        number = float(str(value))
    except ValueError:
        number = math.nan
    if not 0 < number <= MAX_TIMEOUT_S:
        raise ValueError(
            f"{name} is {value!r:.80}, expected seconds > 0, at most {MAX_TIMEOUT_S:g}"
        )
    return number


TOptions = TypeVar("TOptions", bound=CollectiveTrainerInitInfo)


class CollectiveTrainerEngine(TrainerWeightTransferEngine[TOptions], Generic[TOptions]):
    """Broadcasts as rank 0.

    Args:
        init_info: Options.
        client: Client of all workers.
        source: The weights.
    """

    num_buckets: int = NUM_BUCKETS
    """Buckets in memory."""

    def __init__(
        self, init_info: TOptions, *, client: WeightSyncClient, source: RoundSource | None = None
    ) -> None:
        super().__init__(init_info, client=client, source=source)
        num_workers = getattr(client, "num_workers", None)
        if init_info.world_size is None and num_workers is None:
            raise ValueError(
                f"{type(client).__name__} does not say how many workers it reaches; give "
                "world_size, their number and one"
            )
        self._world_size = init_info.world_size or 1 + int(num_workers or 0)
        deadline_s = getattr(client, "deadline_s", OPERATION_TIMEOUT_S / OPERATION_DEADLINES)
        self.operation_timeout_s = init_info.timeout_s or min(
            MAX_TIMEOUT_S, OPERATION_DEADLINES * deadline_s
        )
        self._rendezvous = host_rendezvous(init_info.host, init_info.port)
        self._communicator: Communicator | None = None
        self._memory: torch.Tensor | None = None

    @abstractmethod
    def form_group(self, rendezvous: Rendezvous, world_size: int) -> Communicator:
        """Join the group as rank 0; called once, while the workers are asked to join.

        Args:
            rendezvous: Rendezvous of the ranks; cancelled if a worker cannot come.
            world_size: Ranks of the group, this one included.

        Raises:
            GroupError: The group cannot be formed.
            StallError: Ranks are missing.
        """

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return memory for all buckets, uint8 of shape ``(nbytes,)``, that the group sends from.

        Raises:
            StagingMemoryError: There is not that much.
        """
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    @classmethod
    def trainer_init(
        cls, init_info: TOptions, *, client: WeightSyncClient, source: RoundSource | None = None
    ) -> Self:
        """Open the rendezvous, and form the group together with the workers."""
        engine = cls(init_info, client=client, source=source)
        try:
            engine._meet_workers()
        except BaseException:
            engine.shutdown()
            raise
        return engine

    def worker_init_info(self) -> dict[str, Any]:
        """Return the address of the rendezvous, and the group's settings."""
        return {
            "master_address": self._rendezvous.host,
            "master_port": self._rendezvous.port,
            "rendezvous": self._rendezvous.name,
            "world_size": self._world_size,
            "packed_buffer_size_bytes": self.init_info.packed_buffer_size_bytes,
            "timeout_s": self.operation_timeout_s,
        }

    def send_weights(self) -> None:
        """Announce the update, and broadcast it while the workers receive."""
        source, communicator = self.source, self._communicator
        if source is None or communicator is None:
            raise NotInitializedError("not initialized: no source, or no group to send it to")
        with Announcer(self.client.update_weights) as announcer:
            announcer.announce({})
            try:
                self._broadcast(source, communicator)
            except GroupError:
                # The control channel knows which worker was lost or failed: that is the cause.
                announcer.wait()
                raise

    def abort_weight_update(self) -> None:
        """Break the group: a running `send_weights` ends, and so do the workers' waits."""
        self._rendezvous.cancel()
        communicator = self._communicator
        if communicator is not None:
            communicator.abort()

    def shutdown(self) -> None:
        """Leave the group, close the rendezvous, and release the buckets."""
        self._rendezvous.close()
        self._memory = None
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.close()

    def _broadcast(self, source: RoundSource, communicator: Communicator) -> None:
        nbytes = self.init_info.packed_buffer_size_bytes
        buckets = list(source.layout.buckets(nbytes))
        room = aligned(max((bucket.nbytes for bucket in buckets), default=0))
        memory = self._memory
        if memory is None or memory.numel() < room * self.num_buckets:
            self._memory = None
            memory = self._memory = self.allocate(room * self.num_buckets)
        places = [memory[n * room : (n + 1) * room] for n in range(self.num_buckets)]
        under_way: list[list[Pending]] = [[] for _ in places]
        turn = itertools.count()

        def await_sent(pending: list[Pending]) -> None:
            for each in pending:
                each.wait()
                source.note_progress()
            pending.clear()

        def place_of(bucket: Bucket) -> Any:
            number = next(turn) % self.num_buckets
            await_sent(under_way[number])
            content = places[number][: bucket.nbytes]
            return content.numpy() if content.is_cpu else content

        for number, bucket in enumerate(source.iter_buckets(nbytes, place_of)):
            content = places[number % self.num_buckets]
            under_way[number % self.num_buckets] = [
                communicator.broadcast(content[start:stop], communicator.rank)
                for start, stop in parts(bucket, nbytes)
            ]
        # The oldest first: buckets leave in that order.
        for n in range(self.num_buckets):
            await_sent(under_way[(len(buckets) + n) % self.num_buckets])

    def _meet_workers(self) -> None:
        """Form the group while the workers are asked to: all ranks have to come together."""
        failed: list[BaseException] = []

        def ask() -> None:
            try:
                self.client.init_weight_transfer_engine(self.worker_init_info())
            except BaseException as error:
                failed.append(error)
                self._rendezvous.cancel()

        asking = threading.Thread(target=ask, name="wtransfer-init", daemon=True)
        asking.start()
        try:
            self._communicator = self.form_group(self._rendezvous, self._world_size)
        except GroupError:
            # Cancelled because a worker refused, or is lost: that is the cause.
            if failed:
                raise failed[0] from None
            raise
        asking.join()
        if failed:
            raise failed[0]


class RecycledMemory:
    """Hands out memory, and takes it back when all arrays and tensors made from it are gone.

    Fresh pages cost ten times a copy. A worker that adopts updates needs two pieces in turn: the
    one that its model consists of, and the one that the next update is received into.

    Used by one thread; any thread may release the memory.
    """

    def __init__(self) -> None:
        self._pieces: list[tuple[Segment, weakref.ref[ByteArray]]] = []

    def take(self, nbytes: int, on_step: Callable[[int], object] | None = None) -> ByteArray:
        """Return memory that is not in use, shape ``(nbytes,)``, with arbitrary content.

        Args:
            nbytes: Size.
            on_step: Called again and again with the number of fresh bytes taken; may raise.

        Raises:
            StagingMemoryError: There is not that much.
        """
        segment = self._reclaim(nbytes) or Segment(nbytes, on_step)
        # Tensors and slices keep this object alive, no matter how they were made from it.
        lent: ByteArray = np.frombuffer(segment.buffer.data, np.uint8, nbytes)
        self._pieces.append((segment, weakref.ref(lent)))
        return lent

    def forget(self) -> None:
        """Keep no memory for later; memory in use stays until its last user is gone."""
        for segment, _ in self._pieces:
            segment.close()
        self._pieces.clear()

    def _reclaim(self, nbytes: int) -> Segment | None:
        """Return a free piece that is large enough; release the other free ones."""
        pieces, self._pieces = self._pieces, []
        found = None
        for segment, lent in pieces:
            if lent() is not None:
                self._pieces.append((segment, lent))
            elif found is None and segment.nbytes >= nbytes:
                found = segment
            else:
                segment.close()
        return found
