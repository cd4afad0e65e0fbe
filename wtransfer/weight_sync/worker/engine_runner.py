"""Run the engine of one publisher: made on request, guarded, rebuilt after a hang."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, TypeVar

from wtransfer.calls import Call, Flag, start_call
from wtransfer.config import ParallelConfig, WeightTransferConfig
from wtransfer.engines.border import EngineThread, call_engine, engine_error, guarded
from wtransfer.engines.factory import WeightTransferEngineFactory
from wtransfer.errors import (
    NotInitializedError,
    PluginBlockedError,
    PluginError,
    UnknownBackendError,
)
from wtransfer.registry.resolve import registry

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from wtransfer.weight_sync.messages import Init
    from wtransfer.weights import LoadWeights

logger = logging.getLogger(__name__)

T = TypeVar("T")


class EngineRunner:
    """Calls an engine, on a thread of its own that can be given up.

    Everything but `submit`, `abort`, `leave_group` and `shutdown` runs on that thread.

    Args:
        rank: Rank within the serving instance.
        num_ranks: Ranks of the instance.
        allowed: Engine names that a peer may ask for; None: every engine found here.
        reader: A stateless engine, used in place of those that are asked for.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        allowed: Collection[str] | None,
        reader: Any = None,
    ) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._allowed = allowed
        self._reader = reader
        self._init: Init | None = None
        self._thread = EngineThread(logger, reader)

    # -- from any thread

    def submit(self, task: Callable[[], None]) -> Flag:
        """Run `task` on the engine's thread; the event is set when it has run."""
        return self._thread.submit(Call(lambda: guarded("a step of a round", task))).done

    def abort_in_background(self, running: Flag) -> None:
        """Run `abort` on a thread of its own: it may take a while."""
        if running.is_set():
            return
        try:
            start_call(lambda: self.abort(running), "wtransfer-abort")
        except RuntimeError as error:
            # An ending process gets no more threads; its close must go on without this one.
            logger.warning("engine %s is not aborted: %s", self.name, error)

    def abort(self, running: Flag) -> None:
        """Unblock the engine; if it does not return in time, leave its thread behind.

        Args:
            running: Set when the task that must end has ended.
        """
        self._thread.abort(running, self.name, "an abort")

    def leave_group(self, making: Flag) -> None:
        """Drop an engine whose group has lost a rank, or its round; the next init makes another.

        Args:
            making: Set when the engine has been made; a group that is still forming is aborted.
        """
        if getattr(self._thread.engine, "needs_generation", False):
            self.abort_in_background(making)
        self.submit(self._end_group)

    def shutdown(self) -> None:
        """Shut the engine down and end its thread; a hanging one is left behind."""
        self._thread.shutdown()

    @property
    def name(self) -> str | None:
        """Engine name, once one was asked for."""
        return getattr(self._reader, "name", None) if self._init is None else self._init.engine

    # -- on the engine's thread

    def make(self, init: Init) -> None:
        """Make and initialise the engine that a publisher asks for.

        Raises:
            WTransferError: The engine cannot be found, is not allowed, or failed to initialise.
        """
        self._thread.own()
        self._thread.drop()
        self._init = None
        self._check_allowed(init)
        engine = self._create(init)

        def note() -> None:
            self._init = init

        self._thread.seat(engine, init.engine, note)
        info = self._parse("parse_init_info", init.init_info)
        self._call("init_transfer_engine", lambda: engine.init_transfer_engine(info))

    def ensure(self) -> None:
        """Make the engine again if it was left behind.

        Raises:
            NotInitializedError: No publisher has asked for one yet.
            RoundAbortedError: The caller's thread was left behind.
        """
        if self._thread.own() is None and self._init is not None:
            self.make(self._init)
        if self._thread.own() is None:
            raise NotInitializedError("not initialized: the worker has no weight transfer engine")

    @property
    def copies(self) -> bool:
        """True if tensors must be copied before ``load_weights`` returns."""
        return getattr(self._thread.own(), "tensors_valid_until", "return") != "round"

    @property
    def may_rewrite(self) -> bool:
        """True if views of the engine's memory are kept, to which it could write until the vote.

        False for an engine class that declares ``writes_after_return = False`` itself; its
        subclasses may write again.
        """
        return not self.copies and vars(type(self._thread.own())).get("writes_after_return", True)

    @property
    def allocates(self) -> bool:
        """True if the engine takes memory of its own for the tensors that it delivers."""
        return bool(getattr(self._thread.own(), "allocates", False))

    def make_room(self, nbytes: int) -> str | None:
        """Let the engine check that it can stage an update; None: the engine does not decide."""
        call = getattr(self._thread.own(), "make_room", None)
        return None if call is None else self._call("make_room", lambda: call(nbytes))

    def receive(self, update_info: dict[str, Any], load_weights: LoadWeights) -> None:
        """Let the engine receive once."""
        engine = self._thread.own()
        info = self._parse("parse_update_info", update_info)
        self._call("receive_weights", lambda: engine.receive_weights(info, load_weights))

    def optional(self, method: str, *args: object) -> None:
        """Call a method that an engine may leave out."""
        call = getattr(self._thread.own(), method, None)
        if call is not None:
            self._call(method, lambda: call(*args))

    def _create(self, init: Init) -> Any:
        plugin = f"engines:{init.engine}"
        try:
            record = registry("engines").record(init.engine)
            record.check_origin(
                init.distribution,
                init.engine_version,
                init.contract,
                "on the trainer",
                lambda: registry("engines").get(init.engine),
            )
            return WeightTransferEngineFactory.create_engine(
                WeightTransferConfig(init.engine), self._parallel_config(init)
            )
        except PluginError as error:
            error.add_facts(plugin=plugin)
            raise _with_origin(error, init) from error
        except BaseException as error:
            raise engine_error("__init__", error, plugin) from error

    def _parse(self, method: str, values: dict[str, Any]) -> Any:
        parse = getattr(self._thread.own(), method, None)
        return values if parse is None else self._call(method, lambda: parse(values))

    def _call(self, method: str, call: Callable[[], T]) -> T:
        return call_engine(method, call, f"engines:{self.name}")

    def _end_group(self) -> None:
        if getattr(self._thread.own(), "needs_generation", False):
            self._thread.drop()
            self._init = None

    def _parallel_config(self, init: Init) -> ParallelConfig:
        return ParallelConfig(
            rank=self._rank,
            world_size=self._num_ranks,
            tensor_parallel_size=self._num_ranks,
            data_parallel_size=init.data_parallel_size,
            data_parallel_rank=init.data_parallel_index,
            data_parallel_index=init.data_parallel_index,
        )

    def _check_allowed(self, init: Init) -> None:
        if self._allowed is not None and init.engine not in self._allowed:
            raise PluginBlockedError(
                f"the trainer asks for engine {init.engine!r}; this worker allows only "
                f"{', '.join(map(repr, sorted(self._allowed)))} (WorkerSession engines=)",
                kind="engines",
                name=init.engine,
            )


def _with_origin(error: PluginError, init: Init) -> PluginError:
    if init.distribution is None or init.distribution in error.message:
        return error
    origin = f"{init.distribution} {init.engine_version}"
    if isinstance(error, UnknownBackendError) and init.distribution.endswith(".py"):
        origin += "; give this worker the same file, by --plugin or WTRANSFER_PLUGIN_FILES"
    told = type(error)(f"{error.message} (the trainer has it from {origin})")
    told.add_facts(**{k: v for k, v in vars(error).items() if k != "message"})
    return told
