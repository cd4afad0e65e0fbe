"""Engines that broadcast on a process group, trainer side: all but the group itself."""

from __future__ import annotations

import threading
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from wtransfer.engines.announcing import Announcer
from wtransfer.engines.collective import JOIN_TIMEOUT_S
from wtransfer.engines.hosted import forget_frames
from wtransfer.engines.interface import (
    ParamMeta,
    RoundSource,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightSyncClient,
)
from wtransfer.engines.outgoing import Outgoing
from wtransfer.errors import GroupError, NotInitializedError
from wtransfer.transport.rendezvous import Rendezvous, host_rendezvous
from wtransfer.transport.tensors import dtype_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

    from wtransfer.transport.communicator import Communicator
    from wtransfer.transport.tensors import ByteArray

FORM_GRACE_S = 1.0
"""Seconds that forming a group gets to end after it was called off."""


@dataclass
class CollectiveTrainerInitInfo(TrainerInitInfo):
    """Options of the engine."""

    host: str = "127.0.0.1"
    """Address of this machine at which workers reach it."""
    port: int = 0
    """Port of the rendezvous; 0: one that is free."""
    world_size: int | None = None
    """Ranks of the group, this one included; None: as many as workers take part."""
    packed_buffer_size_bytes: int = 16 << 20
    """Bytes of a bucket, about; two are kept, as large as the largest tensor at least."""

    def __post_init__(self) -> None:
        # The CLI hands over strings.
        self.port = int(self.port)
        self.packed_buffer_size_bytes = int(self.packed_buffer_size_bytes)
        if self.world_size is not None:
            self.world_size = int(self.world_size)
        if self.packed_buffer_size_bytes <= 0:
            raise ValueError(
                f"packed_buffer_size_bytes is {self.packed_buffer_size_bytes}, expected > 0"
            )


TInfo = TypeVar("TInfo", bound=CollectiveTrainerInitInfo)


class CollectiveTrainerEngine(TrainerWeightTransferEngine[TInfo], Generic[TInfo]):
    """Broadcasts as rank 0.

    Args:
        init_info: Options.
        client: Reaches all workers.
        source: The weights.
    """

    def __init__(
        self, init_info: TInfo, *, client: WeightSyncClient, source: RoundSource | None = None
    ) -> None:
        super().__init__(init_info, client=client, source=source)
        self._world_size = _world_size(init_info, client)
        self._rendezvous = host_rendezvous(init_info.host, init_info.port)
        self._communicator: Communicator | None = None
        self._memory: ByteArray | None = None

    @abstractmethod
    def form_group(self, rendezvous: Rendezvous, world_size: int) -> Communicator:
        """Join the group as rank 0; called once, beside the workers, on a thread of its own."""

    def outgoing(self, source: RoundSource, communicator: Communicator) -> Outgoing:
        """Return the places for the tensors of one round; host memory, used again and again."""
        made = Outgoing(
            source.metadata,
            communicator,
            self.init_info.packed_buffer_size_bytes,
            self._memory,
            source.note_progress,
        )
        self._memory = made.memory
        return made

    @classmethod
    def trainer_init(
        cls, init_info: TInfo, *, client: WeightSyncClient, source: RoundSource | None = None
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
        """Return where the ranks meet."""
        return {
            "master_address": self._rendezvous.host,
            "master_port": self._rendezvous.port,
            "rendezvous": self._rendezvous.name,
            "world_size": self._world_size,
            "packed_buffer_size_bytes": self.init_info.packed_buffer_size_bytes,
        }

    def send_weights(self) -> None:
        """Announce the update, and broadcast it while the workers receive."""
        source, communicator = self.source, self._communicator
        if source is None or communicator is None:
            raise NotInitializedError("not initialized: no source, or no group to send it to")
        # While it reads memory that was sized for this round, nobody else may use it.
        with Announcer(self.client.update_weights) as announcer:
            announcer.announce(_update_info(source.metadata))
            broken = self._broadcast(source, communicator)
            if broken is not None:
                # Whoever is lost, or failed, is known to the control channel: that is the cause.
                announcer.wait()
                raise broken

    def abort_weight_update(self) -> None:
        """Break the group: a running `send_weights` ends, and so does what workers wait for."""
        self._rendezvous.cancel()
        communicator = self._communicator
        if communicator is not None:
            communicator.abort()

    def shutdown(self) -> None:
        """Leave the group, and close the rendezvous."""
        self._rendezvous.close()
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.close()

    def _broadcast(self, source: RoundSource, communicator: Communicator) -> GroupError | None:
        """Broadcast everything; return what broke the group, if it did.

        Returned, not raised: the cause, which is raised for it, outlives the round, and with its
        context would keep this call's frames. These hold the group, and that its rendezvous' port.
        """
        outgoing = self.outgoing(source, communicator)
        try:
            for _ in source.iter_into(outgoing):
                pass
            outgoing.finish()
        except GroupError as error:
            forget_frames(error)
            return error
        finally:
            outgoing.forget()
        return None

    def _meet_workers(self) -> None:
        forming = Forming(lambda: self.form_group(self._rendezvous, self._world_size))
        try:
            self.client.init_weight_transfer_engine(self.worker_init_info())
        except BaseException:
            self._rendezvous.cancel()
            forming.give_up()
            raise
        self._communicator = forming.result()


class Forming:
    """Forming a group on a thread of its own: it takes all ranks at the same time.

    Args:
        form: Returns the communicator.
    """

    def __init__(self, form: Any) -> None:
        self._form = form
        self._formed: Communicator | None = None
        self._error: BaseException | None = None
        self._given_up = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="wtransfer-group", daemon=True)
        self._thread.start()

    def result(self) -> Communicator:
        """Wait for the group.

        Raises:
            GroupError: It cannot be formed; or whatever `form` has raised.
        """
        self._thread.join(2 * JOIN_TIMEOUT_S)
        if self._error is not None:
            raise self._error
        if self._formed is None:
            self.give_up()
            raise GroupError("the group was not formed, though every worker is in it")
        return self._formed

    def give_up(self) -> None:
        """Close the group, now or when it comes about."""
        with self._lock:
            self._given_up = True
            formed = self._formed
        if formed is not None:
            formed.close()
        self._thread.join(FORM_GRACE_S)

    def _run(self) -> None:
        try:
            formed = self._form()
        except BaseException as error:
            self._error = error
            return
        with self._lock:
            self._formed = formed
            given_up = self._given_up
        if given_up:
            formed.close()


def _world_size(init_info: CollectiveTrainerInitInfo, client: WeightSyncClient) -> int:
    if init_info.world_size is not None:
        return init_info.world_size
    num_workers = getattr(client, "num_workers", None)
    if num_workers is None:
        raise ValueError(
            f"{type(client).__name__} does not say how many workers it reaches; give world_size, "
            "their number and one"
        )
    return 1 + int(num_workers)


def _update_info(metadata: Sequence[ParamMeta]) -> dict[str, Any]:
    return {
        "names": [meta.name for meta in metadata],
        "dtype_names": [dtype_name(meta.dtype) for meta in metadata],
        "shapes": [list(meta.shape) for meta in metadata],
    }
