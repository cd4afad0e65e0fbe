"""The trainer's engine, the thread it is called on, and the engine its workers are told to make."""

from __future__ import annotations

import contextvars
import functools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from wtransfer.calls import Call, forget_frames
from wtransfer.config import decode_options
from wtransfer.engines.border import EngineThread, call_engine, guarded
from wtransfer.engines.factory import WeightTransferTrainerFactory, listen
from wtransfer.errors import NotInitializedError, VersionNotKeptError
from wtransfer.registry.discovery import contract_of
from wtransfer.registry.resolve import registry
from wtransfer.weight_sync.messages import Init
from wtransfer.weight_sync.trainer.digesting import DigestingSource
from wtransfer.weight_sync.trainer.workers import send_to

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from wtransfer.checkpoint.base_checkpoint import BaseCheckpoint
    from wtransfer.engines.interface import KeptVersion
    from wtransfer.weight_sync.trainer.workers import Worker
    from wtransfer.weights import WeightSource


logger = logging.getLogger(__name__)


@dataclass
class Origin:
    """Where the trainer's engine comes from, which its workers must match."""

    engine: str
    """Name in the group ``wtransfer.engines``."""
    distribution: str | None = None
    """The engine's distribution; None for an engine registered at run time."""
    engine_version: str | None = None
    """Version of that distribution."""
    contract: str | None = None
    """Contract that the engine states; None: it states none."""
    needs_generation: bool = False
    """True if all workers must be initialised again when one joins or leaves."""
    epoch: int = 0
    """Number of initialisations so far."""

    @classmethod
    def of(cls, engine: str, trainer: type | None) -> Origin:
        """Return the origin of an engine.

        Args:
            engine: Name.
            trainer: The trainer class, where one was given; the worker class may be elsewhere.

        Raises:
            PluginError: No such engine, or the engine cannot be loaded.
        """
        engines = registry("engines")
        if trainer is not None and engine not in engines.names():
            return cls(engine, needs_generation=getattr(trainer, "needs_generation", False))
        record = engines.record(engine)
        worker_cls = engines.get(engine)
        return cls(
            engine,
            record.distribution,
            record.version,
            contract_of(worker_cls),
            needs_generation=getattr(worker_cls, "needs_generation", False),
        )

    def send_init(
        self, worker: Worker, init_info: dict[str, Any], index: int, num_instances: int
    ) -> None:
        """Ask a worker for the engine of this epoch, once."""
        if worker.epoch == self.epoch and worker.refusal is None:
            return
        worker.epoch, worker.refusal, worker.place = self.epoch, None, index
        init = Init(
            epoch=self.epoch,
            engine=self.engine,
            distribution=self.distribution,
            engine_version=self.engine_version,
            contract=self.contract,
            data_parallel_index=index,
            data_parallel_size=num_instances,
            init_info=init_info,
        )
        send_to([worker], init)


class RoundSteps(Protocol):
    """The face of a round for an engine and its calls."""

    version: str
    """Label."""

    @property
    def deadline_s(self) -> float:
        """Longest time in which nothing moves, in seconds."""

    @property
    def num_workers(self) -> int:
        """Workers that take part, without lost ones that the round goes on without."""

    def init_workers(self, init_info: dict[str, Any]) -> None:
        """Initialise the engine of every worker; returns when all are ready."""

    def check(self) -> None:
        """Raise the error that has ended the round."""

    def deliver(self, update_info: dict[str, Any]) -> None:
        """Let every worker receive; returns when all have."""

    def wake(self) -> None:
        """Let the round look again."""


# The round that a thread sends for, so that a late call of a failed round does not reach the next
# round. A thread of the engine's own has it if it runs in a copy of the sending thread's context,
# as `Announcer` sees to; a plain `threading.Thread` begins with an empty context.
_ROUND: contextvars.ContextVar[RoundSteps] = contextvars.ContextVar("wtransfer_round")


class RoundClient:
    """An engine's client: its calls become steps of the present round.

    Callable from any thread. Calls raise as soon as the round has failed, so that an engine's loop
    ends with the round.

    Args:
        address: Address that the publisher was told to listen at.
    """

    def __init__(self, address: str | None = None) -> None:
        self.address = address
        self._round: RoundSteps | None = None

    def attach(self, round_: RoundSteps) -> None:
        """Direct the calls to this round from now on."""
        self._round = round_

    @property
    def num_workers(self) -> int:
        """Workers of the round, without lost ones that the round goes on without."""
        return self._current().num_workers

    @property
    def deadline_s(self) -> float:
        """Longest time in which nothing moves in the round, in seconds."""
        return self._current().deadline_s

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Initialise the engine of every worker of the round; returns when all are ready."""
        self._current().init_workers(init_info)

    def start_weight_update(self) -> None:
        """Check that the round is on; its plan was accepted before the engine was called."""
        self._current().check()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Let every worker receive; returns when all have."""
        self._current().deliver(update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:  # noqa: ARG002
        """Check that the round is on; its label and its digests are the publisher's business."""
        self._current().check()

    def _current(self) -> RoundSteps:
        round_ = _ROUND.get(None) or self._round
        if round_ is None:
            raise NotInitializedError("not initialized: the client has no round yet")
        return round_


class EngineCall(Call):
    """One call into a trainer engine; its error is a `WTransferError`.

    Args:
        method: Name of the call, for errors.
        function: The call.
        plugin: Engine, for errors.
        on_done: Called on the engine's thread when the call has ended.
    """

    def __init__(
        self,
        method: str,
        function: Callable[[], object],
        plugin: str,
        on_done: Callable[[], None] = lambda: None,
    ) -> None:
        # In a context of its own: the next call does not see the variables that this one sets.
        def call() -> object:
            return contextvars.copy_context().run(function)

        super().__init__(lambda: call_engine(method, call, plugin))
        self._on_done = on_done

    def run(self) -> None:
        """Make the call, and notify of its end."""
        super().run()
        # Dropped, to leave no reference cycle: the notified round may keep this call.
        on_done, self._on_done = self._on_done, lambda: None
        on_done()

    def fail(self, error: BaseException) -> None:
        """Keep the error without frames."""
        forget_frames(error)
        super().fail(error)


class EngineRunner:
    """A trainer engine with the source and the client that were made for it.

    The three belong together: an engine left behind in a hanging call takes its source and client
    with it, so that no late call of the engine can reach a later round.

    Args:
        name: Engine name.
        trainer_cls: The trainer's class; None: the twin of the worker class of that name.
        options: Fields of the engine's init info.
        source: The user's source.
        screen: True to count NaN and infinity.
        base: Checkpoint of which the tensors stay that the source does not have.
        address: Address that the publisher was told to listen at.
    """

    def __init__(
        self,
        name: str,
        trainer_cls: type | None,
        options: dict[str, Any],
        source: WeightSource,
        screen: bool = False,
        *,
        base: BaseCheckpoint | None = None,
        address: str | None = None,
    ) -> None:
        self.name = name
        self.plugin = f"engines:{name}"
        self.worker_init_info: dict[str, Any] | None = None
        self.members: frozenset[object] = frozenset()
        self._client = RoundClient(address)
        cls: Any = trainer_cls
        if cls is None:
            cls = WeightTransferTrainerFactory.trainer_class(name)
        self._cls = cls
        self.source = DigestingSource(
            source, getattr(cls, "digest_algorithm", "xxh3-128"), screen=screen, base=base
        )
        name = f"Invalid options for {cls.__name__}"
        self._info = decode_options(options, cls.init_info_cls, ValueError, name)
        self._thread = EngineThread(logger)

    @property
    def abandoned(self) -> bool:
        """True if the engine was left behind in a call that hangs."""
        return self._thread.has_left

    @property
    def started(self) -> bool:
        """True if the engine exists and its workers' init info is known."""
        return self._thread.engine is not None and self.worker_init_info is not None

    @property
    def can_resend(self) -> bool:
        """True if the engine can bring one worker up to date."""
        return self.started and hasattr(self._thread.engine, "resend")

    def kept(self) -> Sequence[KeptVersion]:
        """Return the versions that the engine keeps."""
        found: Sequence[KeptVersion] = self._of_keeper("kept")()
        return found

    def kept_source(self, kept: KeptVersion) -> WeightSource:
        """Return a source of the weights of a kept version."""
        found: WeightSource = self._of_keeper("kept_source")(kept)
        return found

    def _of_keeper(self, method: str) -> Callable[..., Any]:
        found = getattr(self._cls, method, None)
        if found is None:
            raise VersionNotKeptError(
                f"engine {self.name!r} keeps no earlier versions; publish with one that does "
                "('file'), or publish the old weights again",
                plugin=self.plugin,
            )
        return functools.partial(found, self._info)

    def start(self, round_: RoundSteps) -> EngineCall:
        """Make the engine, which initialises the workers of `round_`."""
        self._client.attach(round_)

        def start() -> None:
            engine = self._cls.trainer_init(self._info, client=self._client, source=self.source)
            self._thread.seat(engine, self.name, functools.partial(listen, engine))

        return self._begin("trainer_init", start, round_.wake)

    def plan(self, round_: RoundSteps, instead: WeightSource | None) -> EngineCall:
        """Read the metadata of the source, or of `instead`; the result is the layout to plan."""
        # Here and not on the engine's thread, which may begin after a stop.
        self.source.begin(round_.version, instead)
        return self._begin("metadata", self.source.read, round_.wake)

    def send(self, round_: RoundSteps) -> EngineCall:
        """Let the engine send to every worker of `round_`."""
        self._client.attach(round_)
        engine = self._thread.engine

        def send() -> None:
            _ROUND.set(round_)
            engine.send_weights()

        return self._begin("send_weights", send, round_.wake)

    def resend(self, round_: RoundSteps) -> EngineCall:
        """Let the engine send its last committed weights to the workers of `round_` only."""
        client = RoundClient()
        client.attach(round_)
        engine = self._thread.engine
        return self._begin("resend", lambda: engine.resend(client), round_.wake)

    def finished(self, *, committed: bool) -> None:
        """Tell the engine if the weights that it sent were committed."""
        tell = getattr(self._thread.engine, "round_finished", None)
        if tell is None:
            return
        call = self._begin(
            "round_finished", lambda: guarded("round_finished", lambda: tell(committed=committed))
        )
        self._thread.leave(call.done, self.name, "the end of a round")

    def unblock(self, call: EngineCall, reason: str) -> None:
        """End a call whose round has failed; an engine that does not return is left behind."""
        self.source.stop(reason)
        self._thread.abort(call.done, self.name, "a failed round")

    def shutdown(self) -> None:
        """Shut the engine down; an engine that hangs in its shutdown is left behind."""
        self._thread.shutdown()

    def _begin(
        self,
        method: str,
        function: Callable[[], object],
        on_done: Callable[[], None] = lambda: None,
    ) -> EngineCall:
        call = EngineCall(method, function, self.plugin, on_done)
        self._thread.submit(call)
        return call
