"""The contract of a weight transfer engine: the classes that an author writes, and their calls.

An engine moves tensors; a session decides what is true. So an engine needs to know nothing of
digests, versions or other workers, and it cannot break them either. Two classes make an engine:

1. Worker side, `WeightTransferEngine`, named by an entry point in ``wtransfer.engines``::

       [project.entry-points."wtransfer.engines"]
       mine = "my_package.engine:MyEngine"

2. Trainer side, `TrainerWeightTransferEngine`, named by the worker class in one line::

       trainer_cls = "my_package.trainer:MyTrainerEngine"

The life of an engine, T on the trainer, W on every worker:

1. T ``trainer_init(init_info, client=..., source=...)``, once. T calls
   ``client.init_weight_transfer_engine(info)``.
2. W ``__init__(config, parallel_config)``, then ``init_transfer_engine(info)``.
3. T ``send_weights()`` in every round. T iterates ``source.iter_full()`` and calls
   ``client.update_weights(info)``, once or many times.
4. W ``receive_weights(info, load_weights)`` for each of those calls, on a thread of the session.
   W calls ``load_weights([(name, tensor), ...])`` with the tensors that have arrived.
5. Both sides ``shutdown()``.

An exception of either side ends the round with every worker on its old version.

Source: names and signatures are those of vLLM's weight transfer, both of the release in which the
worker contract first appeared and of today's trainer contract.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeVar

# Source and destination of an engine; exported here as well, where authors look.
from wtransfer.weights import LoadWeights as LoadWeights
from wtransfer.weights import ParamMeta as ParamMeta
from wtransfer.weights import TensorSpec as TensorSpec
from wtransfer.weights import WeightSource as WeightSource
from wtransfer.weights import WeightTarget as WeightTarget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Self

    from wtransfer.config import HasBackend, ParallelConfig
    from wtransfer.manifest import Algorithm, Manifest
    from wtransfer.transport.layout import Bucket, TensorLayout

# -- infos ------------------------------------------------------------------------------------


@dataclass
class WeightTransferInitInfo(ABC):  # noqa: B024  # a marker base, as in the seed
    """Input of a worker's engine before the first update. Fields must be plain data."""


@dataclass
class WeightTransferUpdateInfo(ABC):  # noqa: B024  # a marker base, as in the seed
    """Input of a worker's engine for one call of ``receive_weights``. Fields: plain data."""

    is_checkpoint_format: bool = field(default=True, kw_only=True)
    """True if tensors come under the names of the checkpoint."""


@dataclass
class TrainerInitInfo(WeightTransferInitInfo):
    """Options of the trainer side; each field can be set by name (``options={}``, ``-o k=v``)."""

    backend: ClassVar[str] = ""
    """Engine name; set by each subclass."""

    rank: int = field(default=0, kw_only=True)
    """Rank of this trainer process. Rank 0 sends; every rank iterates its source."""

    @property
    def is_sender(self) -> bool:
        """True if this rank sends."""
        return self.rank == 0


@dataclass
class WeightTransferInitRequest:
    """Request to initialise an engine, before its backend is known."""

    init_info: dict[str, Any] = field(default_factory=dict)
    """Fields of the engine's ``init_info_cls``."""


@dataclass
class WeightTransferUpdateRequest:
    """Request to receive weights, before its backend is known."""

    update_info: dict[str, Any] = field(default_factory=dict)
    """Fields of the engine's ``update_info_cls``."""


TInitInfo = TypeVar("TInitInfo", bound=WeightTransferInitInfo)
TUpdateInfo = TypeVar("TUpdateInfo", bound=WeightTransferUpdateInfo)
TTrainerInitInfo = TypeVar("TTrainerInitInfo", bound=TrainerInitInfo)

TMemory = TypeVar("TMemory")

# -- source of an engine ------------------------------------------------------------------------


class RoundSource(WeightSource, Protocol):
    """The source that the framework hands to a trainer engine; digests the tensors it yields."""

    @property
    def version(self) -> str:
        """Label of the round."""

    @property
    def manifest(self) -> Manifest:
        """The pieces of the round, in the order of `metadata`."""

    @property
    def layout(self) -> TensorLayout:
        """Names, dtypes, shapes, sizes and offsets of the round's tensors."""

    def note_progress(self) -> None:
        """Note that the engine is at work, though it reads no tensor just now.

        Engines call it every second or so of long preparations: a round in which nothing moves for
        the deadline is ended.

        Raises:
            RoundAbortedError: The round has ended; let the call end as well.
        """

    def digests(self) -> list[str]:
        """Return the digests in the manifest's order, once every tensor has been read.

        Raises:
            SourceError: There are unread tensors.
        """

    def iter_into(
        self, allocate: Callable[[ParamMeta], TMemory]
    ) -> Iterator[tuple[ParamMeta, TMemory]]:
        """Copy and digest in one pass, which is faster than one after the other.

        Args:
            allocate: Called before each tensor; returns memory for its bytes: writable, one
                dimension of bytes, of exactly the tensor's size. Memory of a device is a uint8
                tensor; it is digested there, if the engine's `digest_algorithm` can be.

        Yields:
            The metadata and the memory, after the bytes are in it.
        """

    def iter_buckets(self, nbytes: int, allocate: Callable[[Bucket], TMemory]) -> Iterator[Bucket]:
        """Copy the update bucket by bucket, digested in the same pass.

        Args:
            nbytes: Bytes of a bucket, about (see `TensorLayout.buckets`).
            allocate: Called before each bucket; returns memory for its bytes: an array or tensor of
                uint8, shape ``(bucket.nbytes,)``. Tensor `n` lies at byte
                ``layout.starts[n] - bucket.start``.

        Yields:
            The bucket, after its bytes are in that memory.
        """


# -- control ------------------------------------------------------------------------------------


class WeightSyncClient(Protocol):
    """Client of a trainer engine for its workers. Calls return when every worker is done.

    The framework's client has more attributes: ``num_workers``, number of workers reached, and
    ``address``, at which the publisher listens as its user has said it; None: nothing was said.
    """

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Initialise the engine of every worker. Plain data only."""

    def start_weight_update(self) -> None:
        """State that sending begins. May be left out."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Let every worker receive; returns when all have. Any thread may call it."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """State that all tensors were sent. May be left out."""


# -- the engine -----------------------------------------------------------------------------------


class WeightTransferEngine(ABC, Generic[TInitInfo, TUpdateInfo]):
    """Worker side of an engine.

    Methods other than `abort_weight_update` are called from one thread of the session, never
    concurrently; the model goes on serving on its own thread meanwhile.

    Args:
        config: Names the backend.
        parallel_config: This worker's place, and thereby its rank.
    """

    init_info_cls: type[TInitInfo]
    """Dataclass of the init info."""
    update_info_cls: type[TUpdateInfo]
    """Dataclass of the update info."""
    trainer_cls: ClassVar[type | str | None] = None
    """The trainer's twin: a class, or ``"package.module:Class"``."""
    tensors_valid_until: ClassVar[Literal["return", "round"]] = "return"
    """How long tensors given to ``load_weights`` keep their bytes: until it returns (the session
    copies them), or until the worker releases them (the session may keep views). The latter is when
    no tensor refers to their memory any more, and may be many rounds later: a worker serves them.
    Read from the instance, once that is initialised."""
    writes_after_return: ClassVar[bool] = True
    """True if the engine could write to tensors that stay valid for the round once ``load_weights``
    has returned: the session then digests them a second time before it votes, one more pass over
    the update. False is not inherited: a class that derives from such an engine states it again,
    having passed the kit."""
    contract_version: ClassVar[str | None] = None
    """``major.minor`` of what trainer and workers exchange: infos, and bytes on their way. Releases
    of one distribution that state the same work together; None: only equal versions do. It is
    compared as a whole: 1.0 and 1.1 are two contracts. Not inherited."""
    allocates: ClassVar[bool] = False
    """True if tensors that stay valid for the round lie in memory that the engine takes for them:
    there must then be room for the update before its plan is accepted."""
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    """Device types whose tensors the engine moves without a detour."""
    multi_host: ClassVar[bool] = False
    """True if trainer and workers may be on several hosts."""
    needs_generation: ClassVar[bool] = False
    """True if the engine's group must be built anew, by all, when a worker joins or leaves, or
    after a round has failed."""

    def __init__(self, config: HasBackend, parallel_config: ParallelConfig) -> None:
        self.config = config
        self.parallel_config = parallel_config

    def parse_init_info(self, init_dict: dict[str, Any]) -> TInitInfo:
        """Build the typed init info.

        Raises:
            ValueError: The dictionary does not fit the dataclass.
        """
        return _parse(self, "init_info", self.init_info_cls, init_dict)

    def parse_update_info(self, update_dict: dict[str, Any]) -> TUpdateInfo:
        """Build the typed update info.

        Raises:
            ValueError: The dictionary does not fit the dataclass.
        """
        return _parse(self, "update_info", self.update_info_cls, update_dict)

    @abstractmethod
    def init_transfer_engine(self, init_info: TInitInfo) -> None:
        """Connect to the trainer. Called once, and once more after a fault or a new trainer.

        May block for as long as the trainer's twin needs to do its part.
        """

    @abstractmethod
    def receive_weights(self, update_info: TUpdateInfo, load_weights: LoadWeights) -> None:
        """Receive tensors and pass them on by ``load_weights([(name, tensor), ...])``.

        Called once per ``client.update_weights`` of the trainer's twin. May block; after an
        exception it may be called again in the next round. Pass tensors on as they arrive: each
        call counts as progress, and memory stays small.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Release everything. Called once, also after a failed `init_transfer_engine`."""

    def make_room(self, nbytes: int) -> str | None:  # optional by contract  # noqa: ARG002
        """Check that an update can be staged; called before its plan is accepted.

        For engines that take memory which is not the host's: without an answer, the host must have
        room for all copied or allocated bytes.

        Args:
            nbytes: Bytes of all tensors.

        Returns:
            Text for the trainer's report; None: this engine has no say.

        Raises:
            StagingMemoryError: There is not that much.
        """
        return None

    def set_layout(self, layout: TensorLayout) -> None:  # optional by contract
        """Take the layout of the round's tensors, the same that the trainer's source has.

        Called before `start_weight_update`. With a layout an update info need not name tensors: it
        states the numbers, in the layout, of those that have arrived.
        """

    def start_weight_update(self) -> None:  # optional by contract
        """Prepare for a round; called when the worker has accepted its plan."""

    def finish_weight_update(self) -> None:  # optional by contract
        """Clean up after a round's data has arrived; called before verification."""

    def abort_weight_update(self) -> None:  # optional by contract
        """Unblock a running ``init_transfer_engine`` or ``receive_weights``.

        Called from another thread, at any time: also before either, and beside ``shutdown``.
        """


class TrainerWeightTransferEngine(ABC, Generic[TTrainerInitInfo]):
    """Trainer side of an engine.

    Args:
        init_info: Options.
        client: Client of all workers of the round.
        source: The weights. Without one, `send_weights` has nothing to send.
    """

    init_info_cls: type[TTrainerInitInfo]
    """Dataclass of the options."""
    digest_algorithm: ClassVar[Algorithm] = "xxh3-128"
    """Algorithm by which the framework digests this engine's tensors, on both sides: ``wsum64``
    where they stay on devices, since that is computed there."""

    def __init__(
        self,
        init_info: TTrainerInitInfo,
        *,
        client: WeightSyncClient,
        source: RoundSource | None = None,
    ) -> None:
        self.init_info = init_info
        self.client = client
        self.source = source

    @classmethod
    def trainer_init(
        cls,
        init_info: TTrainerInitInfo,
        *,
        client: WeightSyncClient,
        source: RoundSource | None = None,
    ) -> Self:
        """Construct the engine and initialise the workers with `worker_init_info`."""
        engine = cls(init_info, client=client, source=source)
        try:
            if init_info.is_sender:
                client.init_weight_transfer_engine(engine.worker_init_info())
        except BaseException:
            # No other code has a reference to this engine yet that could release its resources.
            engine.shutdown()
            raise
        return engine

    def worker_init_info(self) -> dict[str, Any]:
        """Return the init info of the workers: one for all, plain data, also for late joiners."""
        return {}

    @abstractmethod
    def send_weights(self) -> None:
        """Send every tensor of the source. Called on the thread that made the engine.

        Once the call has returned, the trainer may change its weights again.
        """

    def round_finished(self, *, committed: bool) -> None:  # optional by contract
        """Learn the outcome of the round of `send_weights`; called once after it.

        Args:
            committed: True if the sent data is the current version now; else it may be dropped.
        """

    def abort_weight_update(self) -> None:  # optional by contract
        """Unblock a running `send_weights`, whose round has failed. Called from another thread."""

    def shutdown(self) -> None:  # optional by contract
        """Release everything. Called once; must unblock a running `send_weights`."""


class Resends(Protocol):
    """A trainer engine that can bring a single worker up to date between rounds."""

    def resend(self, client: WeightSyncClient) -> None:
        """Send the last committed weights again, to the worker behind `client` only."""


@dataclass(frozen=True)
class KeptVersion:
    """A committed update that an engine still has."""

    version: str
    """Label."""
    fingerprint: str
    """Identity."""
    nbytes: int
    """Bytes of its tensors."""
    committed_at: float
    """Time of the commit, in seconds since the epoch."""


class KeepsVersions(Protocol):
    """A trainer engine that keeps earlier versions, so that a publisher can go back to them.

    Class methods: a publisher's first act may be to go back, before it has an engine.
    """

    @classmethod
    def kept(cls, init_info: Any) -> Sequence[KeptVersion]:
        """Return the versions that can be rolled back to, oldest first.

        A label that was used twice appears twice and means the later version.
        """

    @classmethod
    def kept_source(cls, init_info: Any, kept: KeptVersion) -> WeightSource:
        """Return a source of the weights of a kept version. Its metadata has their digests."""


_TInfo = TypeVar("_TInfo")


def _parse(
    engine: WeightTransferEngine[Any, Any], what: str, cls: type[_TInfo], values: dict[str, Any]
) -> _TInfo:
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"Invalid {what} for {type(engine).__name__}: {error}") from error
