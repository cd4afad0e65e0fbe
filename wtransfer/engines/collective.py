"""Engines that broadcast on a process group, worker side: all but the group itself.

1. T (`CollectiveTrainerEngine`) hosts a rendezvous; its address is the workers' init info.
2. T and every W meet there and form a group: T is rank 0, W's rank follows from its place.
3. T announces names, dtypes and shapes once per round, and broadcasts the tensors as one stream of
   bytes in buckets, filling one while the other travels.
4. W receives each bucket where it stays, and hands out views of it.
5. A rank that is lost breaks the group for all. The control channel notices, and has every engine
   abort; the next round forms a new group, as does a change of membership.

Gloo is one of them; third parties bring others by way of a `Communicator` of five methods.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Generic, Literal, TypeVar

from wtransfer.engines.incoming import HostLanding, Incoming, receive
from wtransfer.engines.interface import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from wtransfer.engines.update_lists import check_dtypes, check_lengths, check_shapes
from wtransfer.errors import GroupError, NotInitializedError
from wtransfer.transport.communicator import OPERATION_TIMEOUT_S
from wtransfer.transport.recycling import RecycledMemory

if TYPE_CHECKING:
    from collections.abc import Callable

    from wtransfer.config import HasBackend, ParallelConfig
    from wtransfer.engines.incoming import Landing
    from wtransfer.engines.interface import LoadWeights
    from wtransfer.transport.buckets import Layout
    from wtransfer.transport.communicator import Communicator
    from wtransfer.transport.rendezvous import Rendezvous

JOIN_TIMEOUT_S = 30.0
"""Longest wait for all ranks to arrive."""
MAX_TIMEOUT_S = 1e9
"""Longest time that a peer may name, for ever as it were: clocks in nanoseconds can count it."""


@dataclass
class CollectiveInitInfo(WeightTransferInitInfo):
    """Where the ranks meet, and what they must agree on."""

    master_address: str
    """Host of the rendezvous."""
    master_port: int
    """Its port."""
    rendezvous: str
    """Name of this meeting; secret."""
    world_size: int
    """Ranks of the group, the trainer's included."""
    rank_offset: int = 1
    """Rank of the first worker."""
    packed_buffer_size_bytes: int = 16 << 20
    """Bytes of a bucket, about."""
    timeout_s: float = OPERATION_TIMEOUT_S
    """When a rank gives a bucket up by itself."""

    def __post_init__(self) -> None:
        check_counts(self, "master_port", "world_size", "rank_offset", "packed_buffer_size_bytes")
        check_timeout(self.timeout_s)


@dataclass
class CollectiveUpdateInfo(WeightTransferUpdateInfo):
    """One update: its tensors in the order of the stream. All lists have the same length."""

    names: list[str] = field(default_factory=list)
    """Names of the tensors."""
    dtype_names: list[str] = field(default_factory=list)
    """Wire dtypes."""
    shapes: list[list[int]] = field(default_factory=list)
    """Shapes."""

    def __post_init__(self) -> None:
        check_lengths(self, ("dtype_names", "shapes"))
        check_dtypes(self.dtype_names)
        check_shapes(self.names, self.shapes)

    def incoming(self, before: Incoming) -> Incoming:
        """Return what this announces: `before` itself where that is the same."""
        announced = self.names, self.dtype_names, self.shapes
        return before if before.is_of(*announced) else Incoming(*announced)


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
        self._incoming = Incoming([], [], [])

    @abstractmethod
    def form_group(self, rendezvous: Rendezvous, init_info: TInfo, rank: int) -> Communicator:
        """Join the group as one of its ranks; called once per `init_transfer_engine`.

        Args:
            rendezvous: Where the ranks meet; cancelled by an abort.
            init_info: What was agreed on.
            rank: This worker's.

        Raises:
            GroupError: It cannot be formed.
            StallError: Ranks are missing.
        """

    def landing(self, layout: Layout, note_progress: Callable[[], object]) -> Landing:
        """Return the memory that one update is received into; host memory, used again and again.

        Args:
            layout: Its stream.
            note_progress: To be called again and again while memory is taken; may raise.

        Raises:
            StagingMemoryError: There is not that much.
        """
        return HostLanding(self._memory.take(layout.nbytes, note_progress))

    def init_transfer_engine(self, init_info: TInfo) -> None:
        """Meet the other ranks and form the group.

        Raises:
            GroupError: The workers' places do not add up to the group, or a rank is taken.
            PeerLostError: The trainer's rendezvous is gone.
            StallError: Ranks are missing.
        """
        self._aborted = False
        self._leave()
        self._bucket_nbytes = init_info.packed_buffer_size_bytes
        rank = group_rank(self.parallel_config, init_info.rank_offset, init_info.world_size)
        self._meet(init_info, rank)

    def receive_weights(self, update_info: CollectiveUpdateInfo, load_weights: LoadWeights) -> None:
        """Receive the whole update, and hand out views bucket by bucket.

        Whatever ends this early has broken the group, of which nothing is kept then: the trainer
        forms a new one for the next round.
        """
        communicator = self._communicator
        if communicator is None:
            raise NotInitializedError("not initialized: call init_transfer_engine first")
        try:
            self._incoming = update_info.incoming(self._incoming)
            self._receive(self._incoming, communicator, load_weights)
        except BaseException:
            self._leave()
            raise

    def _receive(
        self, incoming: Incoming, communicator: Communicator, load_weights: LoadWeights
    ) -> None:
        layout = incoming.layout

        def note_progress() -> None:
            load_weights(())

        landing = self.landing(layout, note_progress)
        for bucket in receive(layout, landing, communicator, self._bucket_nbytes, note_progress):
            load_weights(incoming.landed(bucket, landing))

    def abort_weight_update(self) -> None:
        """Break the group, or call its forming off: whoever waits, here or there, gets an error."""
        self._call_off()
        communicator = self._communicator
        if communicator is not None:
            communicator.abort()

    def shutdown(self) -> None:
        """Leave the group, also one that is about to form; memory that a model points to stays."""
        # Also one that begins just now: no later `init_transfer_engine` resets this.
        self._is_shut_down = True
        self._call_off()
        self._leave()
        self._memory.forget()

    def _call_off(self) -> None:
        """Let a group form no further."""
        self._aborted = True
        rendezvous = self._rendezvous
        if rendezvous is not None:
            rendezvous.cancel()

    def _meet(self, init_info: TInfo, rank: int) -> None:
        from wtransfer.transport.rendezvous import Rendezvous

        where = init_info.master_address, init_info.master_port
        self._rendezvous = rendezvous = Rendezvous(*where, init_info.rendezvous)
        try:
            self._check_aborted()
            rendezvous.join()
            self._communicator = self.form_group(rendezvous, init_info, rank)
            # Who aborted just before this found neither a group nor anything to call off.
            self._check_aborted()
        except BaseException:
            self._leave()
            raise
        finally:
            self._rendezvous = None

    def _check_aborted(self) -> None:
        if self._is_shut_down:
            raise GroupError("this engine was shut down; its group was called off")
        if self._aborted:
            raise GroupError("the forming of the group was called off")

    def _leave(self) -> None:
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.close()


def check_counts(info: object, *names: str) -> None:
    """Raise unless each of these fields is a number of things, as a peer says it.

    Raises:
        ValueError: Naming the field.
    """
    for name in names:
        value = getattr(info, name)
        if type(value) is not int or value <= 0:
            raise ValueError(f"`{name}` is {value!r:.80}, expected a whole number > 0")


def check_timeout(value: object) -> None:
    """Raise unless this is a time that an operation may take, as a peer says it.

    Raises:
        ValueError: Naming the field.
    """
    # JSON has whole numbers, and Python calls its truth values such.
    if type(value) not in (int, float) or not 0 < value <= MAX_TIMEOUT_S:  # type: ignore[operator]
        raise ValueError(
            f"`timeout_s` is {value!r:.80}, expected seconds > 0, at most {MAX_TIMEOUT_S:g}"
        )


def group_rank(place: ParallelConfig, rank_offset: int, world_size: int) -> int:
    """Return a worker's rank in the group: offset + replica * ranks per replica + rank.

    Args:
        place: The worker's.
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
