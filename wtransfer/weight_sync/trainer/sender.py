"""The trainer's engine and the thread it sends on, supervised by the round."""

from __future__ import annotations

import functools
import logging
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from wtransfer.calls import forget_frames, start_call
from wtransfer.engines.factory import WeightTransferTrainerFactory, listen
from wtransfer.errors import NotInitializedError, VersionNotKeptError, WTransferError
from wtransfer.weight_sync.trainer.digesting import DigestingSource
from wtransfer.weight_sync.worker.engine_runner import UNBLOCK_GRACE_S, engine_error, guarded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from wtransfer.engines.interface import KeptVersion, WeightSource
    from wtransfer.weight_sync.trainer.round import Round

logger = logging.getLogger(__name__)


# The round that a thread sends for, so that a call which is late, as its round has failed, does not
# reach the next one. A thread of the engine's own has it if it runs in a copy of the context of the
# one that sends, as `Announcer` sees to; a plain `threading.Thread` begins with an empty one.
_ROUND: ContextVar[Round] = ContextVar("wtransfer_round")


class RoundClient:
    """What an engine gets as its client: its calls become steps of the present round.

    Any thread may call it. Calls raise as soon as the round has failed, so that an engine's loop
    ends with the round.
    """

    def __init__(self) -> None:
        self._round: Round | None = None

    def attach(self, round_: Round) -> None:
        """Direct the calls to this round from now on."""
        self._round = round_

    @property
    def num_workers(self) -> int:
        """Workers of the round."""
        return len(self._current().members)

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

    def _current(self) -> Round:
        round_ = _ROUND.get(None) or self._round
        if round_ is None:
            raise NotInitializedError("not initialized: the client has no round yet")
        return round_


class Running:
    """One call into a trainer engine, on a thread of its own.

    Args:
        method: Name of the call, for errors and the thread.
        function: The call.
        plugin: Engine, for errors.
        on_done: Called on that thread when the call has ended.
    """

    def __init__(
        self, method: str, function: Callable[[], object], plugin: str, on_done: Callable[[], None]
    ) -> None:
        self.done = False
        self.error: WTransferError | None = None
        self.result: Any = None

        def run() -> None:
            try:
                self.result = function()
            except WTransferError as error:
                error.add_facts(plugin=plugin)
                self.error = error
            except BaseException as error:
                self.error = engine_error(method, error, plugin)
                self.error.__cause__ = error
            forget_frames(self.error)
            self.done = True
            on_done()

        self._call = start_call(run, f"wtransfer-{method}")

    def join(self, timeout_s: float) -> bool:
        """Wait for the call to end; return whether it has."""
        return self._call.done.wait(timeout_s)


class Sender:
    """A trainer engine with the source and the client that were made for it.

    The three belong together: when an engine has to be left behind in a hanging call, all of them
    are, so that nothing it does later can reach a later round.

    Args:
        name: Engine name.
        trainer_cls: The trainer's class; None: the twin of the worker class of that name.
        options: Fields of the engine's init info.
        source: The user's source.
        screen: Whether to count NaN and infinity.
    """

    def __init__(
        self,
        name: str,
        trainer_cls: type | None,
        options: dict[str, Any],
        source: WeightSource,
        screen: bool = False,
    ) -> None:
        self.name = name
        self.plugin = f"engines:{name}"
        self.worker_init_info: dict[str, Any] | None = None
        self.members: frozenset[object] = frozenset()
        self.abandoned = False
        self._client = RoundClient()
        self._cls: Any = trainer_cls or WeightTransferTrainerFactory.trainer_class(name)
        algorithm: Any = getattr(self._cls, "digest_algorithm", "xxh3-128")
        self.source = DigestingSource(source, algorithm, screen=screen)
        self._info = _init_info(self._cls, options)
        self._engine: Any = None

    @property
    def started(self) -> bool:
        """Whether the engine exists and its workers' init info is known."""
        return self._engine is not None and self.worker_init_info is not None

    @property
    def can_resend(self) -> bool:
        """Whether the engine can bring one worker up to date."""
        return self.started and hasattr(self._engine, "resend")

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

    def start(self, round_: Round) -> Running:
        """Make the engine, which initialises the workers of `round_`."""
        self._client.attach(round_)
        return self._running("trainer_init", self._start, round_)

    def plan(self, round_: Round, instead: WeightSource | None) -> Running:
        """Read what the source has, or `instead` has; the result is what is planned."""
        # Here and not on the other thread: that may begin after a stop.
        self.source.begin(round_.version, instead)
        return self._running("metadata", self.source.read, round_)

    def send(self, round_: Round) -> Running:
        """Let the engine send to every worker of `round_`."""
        self._client.attach(round_)
        engine = self._engine

        def send() -> None:
            _ROUND.set(round_)
            engine.send_weights()

        return self._running("send_weights", send, round_)

    def resend(self, round_: Round) -> Running:
        """Let the engine send its last committed weights to the workers of `round_` only."""
        client = RoundClient()
        client.attach(round_)
        return self._running("resend", lambda: self._engine.resend(client), round_)

    def finished(self, *, committed: bool) -> None:
        """Tell the engine what became of what it sent."""
        tell = getattr(self._engine, "round_finished", None)
        if tell is None:
            return
        try:
            running = Running(
                "round_finished",
                lambda: guarded("round_finished", lambda: tell(committed=committed)),
                self.plugin,
                _nothing,
            )
        except BaseException:
            # An engine that has not heard what is committed must not serve joiners.
            self._leave_behind("round_finished")
            raise
        if not running.join(UNBLOCK_GRACE_S):
            self._leave_behind("round_finished")

    def unblock(self, running: Running, reason: str) -> None:
        """End a call whose round has failed; an engine that does not return is left behind."""
        self.source.stop(reason)
        if not running.done:
            guarded("abort_weight_update", getattr(self._engine, "abort_weight_update", None))
        if not running.join(UNBLOCK_GRACE_S):
            self._leave_behind("a failed round")

    def _leave_behind(self, where: str) -> None:
        logger.warning("engine %s does not return from %s; rebuilding it", self.name, where)
        self.abandoned = True
        self.shutdown()

    def shutdown(self) -> None:
        """Shut the engine down; one that hangs even there is left behind."""
        engine, self._engine = self._engine, None
        call = getattr(engine, "shutdown", None)
        if call is not None:
            Running("shutdown", lambda: guarded("shutdown", call), self.plugin, _nothing).join(
                UNBLOCK_GRACE_S
            )

    def _start(self) -> None:
        engine = self._cls.trainer_init(self._info, client=self._client, source=self.source)
        listen(engine)
        self._engine = engine

    def _running(self, method: str, call: Callable[[], object], round_: Round) -> Running:
        return Running(method, call, self.plugin, round_.wake)


def _nothing() -> None:
    """Wake nobody."""


def _init_info(trainer_cls: Any, options: dict[str, Any]) -> Any:
    info_cls = trainer_cls.init_info_cls
    try:
        return info_cls(**options)
    except (TypeError, ValueError) as error:
        fields = ", ".join(getattr(info_cls, "__dataclass_fields__", {})) or "none"
        raise ValueError(
            f"Invalid options for {trainer_cls.__name__}: {error}; it has the fields: {fields}"
        ) from error
