"""Engines that broadcast on a process group, trainer side: all but the group itself."""

from __future__ import annotations

import math
import threading
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from wtransfer.engines.collective import MAX_TIMEOUT_S
from wtransfer.engines.interface import (
    ParamMeta,
    RoundSource,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightSyncClient,
)
from wtransfer.engines.outgoing import Outgoing, Stream
from wtransfer.errors import GroupError, NotInitializedError
from wtransfer.transport.communicator import OPERATION_TIMEOUT_S
from wtransfer.transport.rendezvous import Rendezvous, host_rendezvous
from wtransfer.transport.tensors import dtype_name
from wtransfer.weight_sync.trainer.announcing import Announcer
from wtransfer.weight_sync.trainer.digesting import same_metadata
from wtransfer.weight_sync.worker.hosted import forget_frames

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Self

    from wtransfer.transport.communicator import Communicator
    from wtransfer.transport.tensors import ByteArray


@dataclass
class CollectiveTrainerInitInfo(TrainerInitInfo):
    """Options of the engine."""

    host: str = "127.0.0.1"
    """Address of this machine at which workers reach it."""
    port: int = 0
    """Port of the rendezvous; 0: one that is free."""
    world_size: int | None = None
    """Ranks of the group, this one included; None: as many as workers take part, now and later."""
    packed_buffer_size_bytes: int = 16 << 20
    """Bytes of a bucket, about; two are kept, as large as the largest tensor at least."""
    timeout_s: float = OPERATION_TIMEOUT_S
    """When a rank gives a bucket up by itself, if no control channel does: longer than the source
    may take for one."""

    def __post_init__(self) -> None:
        # The CLI hands over strings.
        self.port = _whole("port", self.port, 0)
        self.packed_buffer_size_bytes = _whole(
            "packed_buffer_size_bytes", self.packed_buffer_size_bytes, 1
        )
        self.timeout_s = _seconds("timeout_s", self.timeout_s)
        if self.world_size is not None:
            self.world_size = _whole("world_size", self.world_size, 2)


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
        self._stream: Stream | None = None
        self._announced: tuple[Sequence[ParamMeta], dict[str, Any]] = (), _update_info(())

    @abstractmethod
    def form_group(self, rendezvous: Rendezvous, world_size: int) -> Communicator:
        """Join the group as rank 0; called once, while the workers are asked to join.

        Args:
            rendezvous: Where the ranks meet; cancelled if a worker cannot come.
            world_size: Ranks of the group, this one included.

        Raises:
            GroupError: It cannot be formed.
            StallError: Ranks are missing.
        """

    def outgoing(self, source: RoundSource, communicator: Communicator) -> Outgoing:
        """Return the places for the tensors of one round; host memory, used again and again."""
        made = Outgoing(
            source.metadata,
            communicator,
            self.init_info.packed_buffer_size_bytes,
            self._memory,
            source.note_progress,
            stream=self._stream,
        )
        self._memory, self._stream = made.memory, made.stream
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
            "timeout_s": self.init_info.timeout_s,
        }

    def send_weights(self) -> None:
        """Announce the update, and broadcast it while the workers receive."""
        source, communicator = self.source, self._communicator
        if source is None or communicator is None:
            raise NotInitializedError("not initialized: no source, or no group to send it to")
        # While it reads memory that was sized for this round, nobody else may use it.
        with Announcer(self.client.update_weights) as announcer:
            announcer.announce(self._announcement(source.metadata))
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
            for _ in source.copy_into(outgoing):
                pass
            outgoing.finish()
        except GroupError as error:
            forget_frames(error)
            return error
        finally:
            outgoing.forget()
        return None

    def _announcement(self, metadata: Sequence[ParamMeta]) -> dict[str, Any]:
        if not same_metadata(metadata, self._announced[0]):
            self._announced = tuple(metadata), _update_info(metadata)
        return self._announced[1]

    def _meet_workers(self) -> None:
        asking = Asking(
            lambda: self.client.init_weight_transfer_engine(self.worker_init_info()),
            on_error=self._rendezvous.cancel,
        )
        try:
            self._communicator = self.form_group(self._rendezvous, self._world_size)
        except GroupError:
            # Called off because a worker refused, or is lost: that is the cause.
            asking.check()
            raise
        asking.wait()


class Asking:
    """Asks the workers to join, on a thread of its own: all ranks have to come at the same time.

    Args:
        ask: Returns when every worker is ready, and raises when the round has failed.
        on_error: Called when it has raised, after that can be seen by `check`.
    """

    def __init__(self, ask: Callable[[], object], on_error: Callable[[], object]) -> None:
        self._ask = ask
        self._on_error = on_error
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="wtransfer-init", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what it has failed with, if it has."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Wait until every worker is ready; raise what it has failed with."""
        self._thread.join()
        self.check()

    def _run(self) -> None:
        try:
            self._ask()
        except BaseException as error:
            self._error = error
            self._on_error()


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
