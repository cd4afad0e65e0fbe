"""vLLM's engine core, watched: it forgets stale KV, and tells the truth about labels.

The engine core is the process that schedules. While a call to its workers runs it schedules
nothing, so what is done right after a commit is done before any further step. It is also the only
place where an update may be refused aloud: an exception in one of several workers would leave the
others' answers lying, to be taken for those of the next call.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import socket
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from wtransfer_vllm.caches import forget_kv, has_our_connector, tell_connector
from wtransfer_vllm.invitation import addressed, is_foreign, read_invitation
from wtransfer_vllm.names import is_ours
from wtransfer_vllm.outcome import commit_left, has_left, outcome_of, replaced_weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from wtransfer_vllm.generation import Generation

logger = logging.getLogger(f"vllm.{__name__}")  # a child of vLLM's, so that its log has it

EMPTY_LABEL = "empty"
"""What ``weight_info`` shows while the model consists of nothing that could be named."""
INIT = "init_weight_transfer_engine"
START = "start_weight_update"
DRAFT = "start_draft_weight_update"
UPDATE = "update_weights"
FINISH = "finish_weight_update"
SHUTDOWN = "shutdown_weight_transfer_engine"
REPLACING = frozenset({"reload_weights", "reset_weights"})
"""Workers' methods that put other weights into the model behind our back."""
WRITING = REPLACING | {START, DRAFT, UPDATE, FINISH}
"""Workers' methods within which another weight backend writes into the model."""
LED = ("sleep", "wake_up", "set_weight_version")
"""The engine core's methods that concern the weights, beside its calls to the workers."""


def watch(engine_core: type[Any], generation: Generation) -> None:
    """Stand between an engine core and its workers; a second call does nothing.

    Args:
        engine_core: vLLM's ``EngineCore``.
        generation: Its weight transfer's.
    """
    if hasattr(engine_core.collective_rpc, "wtransfer_call"):
        return
    call_workers = engine_core.collective_rpc

    def watch_of(core: Any) -> Watch | None:
        if not _is_watched(core):
            return None
        return Watch.of(core, functools.partial(call_workers, core), generation)

    @functools.wraps(call_workers)
    def collective_rpc(
        self: Any,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if (watching := watch_of(self)) is None:
            return call_workers(self, method, timeout, args, kwargs)
        return watching.pass_on(method, timeout, args, kwargs)

    collective_rpc.wtransfer_call = call_workers  # type: ignore[attr-defined]  # the mark
    engine_core.collective_rpc = collective_rpc
    for name in LED:
        _lead(engine_core, name, watch_of)


def _lead(engine_core: type[Any], name: str, watch_of: Callable[[Any], Watch | None]) -> None:
    """Lead a method through the `Watch` method of its name, where the engine core has it."""
    method = getattr(engine_core, name, None)
    if method is None:
        return

    @functools.wraps(method)
    def led(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = functools.partial(method, self)
        watching = watch_of(self)
        if watching is None:
            return call(*args, **kwargs)
        return getattr(watching, name)(call, *args, **kwargs)

    setattr(engine_core, name, led)


def _is_watched(core: Any) -> bool:
    return _has_our_engine(core) or has_our_connector(core)


def _has_our_engine(core: Any) -> bool:
    config = getattr(core.vllm_config, "weight_transfer_config", None)
    return config is not None and is_ours("engines", config.backend)


class Watch:
    """What one engine core's calls to its workers are led through.

    Args:
        core: The engine core.
        call: Calls a method in every worker, unwatched.
        generation: Names the method in which a commit happens.
    """

    def __init__(self, core: Any, call: Callable[..., Any], generation: Generation) -> None:
        self._core = core
        self._call = call
        self._commits_in = generation.commits_in
        # In the seed era the model can only be reached while vLLM itself reloads it.
        self._commits_anytime = generation.commits_in == FINISH
        self._has_our_engine = _has_our_engine(core)
        self._started = False
        self._falling_asleep = False
        self._held: str | None = None
        self._instance = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"

    @classmethod
    def of(cls, core: Any, call: Callable[..., Any], generation: Generation) -> Watch:
        """Return an engine core's own, made at the first call."""
        watch: Watch | None = vars(core).get("_wtransfer_watch")
        if watch is None:
            watch = core._wtransfer_watch = cls(core, call, generation)  # noqa: SLF001  # our mark
        return watch

    def pass_on(
        self,
        method: Any,
        timeout: float | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
    ) -> Any:
        """Call the workers, and do before and after what belongs to it.

        Raises:
            ValueError: What was to be passed on is nothing of ours; no worker was called.
            RuntimeError: It is not its time, the model's memory is not there, or a commit did not
                come about.
        """
        if not self._has_our_engine:
            return self._pass_on_foreign(method, timeout, args, kwargs)
        if method == INIT:
            args, kwargs = (), {"init_info": self._addressed(args, kwargs or {})}
        elif method == UPDATE:
            _refuse_foreign(*args, **(kwargs or {}))
        self._check_time(method)
        if method in REPLACING:
            # Before: where it fails half way, the weights are gone all the same.
            self.lose_weights(f"{method} was called")
        begun, num_running = time.perf_counter(), self._num_running()
        result = self._call(method, timeout, args, kwargs)
        self._note(method)
        if method == self._commits_in and num_running:
            self._log_pause(begun, num_running)
        return result

    def _num_running(self) -> int:
        # vLLM calls its workers before there is a scheduler.
        return len(getattr(getattr(self._core, "scheduler", None), "running", ()))

    def _log_pause(self, begun: float, num_running: int) -> None:
        """Log how long a commit has kept requests from their next token, when that is there.

        Most of it is vLLM's: the reload of the model, and the prefill of all tokens of the requests
        that run, whose KV cache was of the old weights.
        """
        core, reloaded = self._core, time.perf_counter()
        step = getattr(core, "step_fn", None)
        if step is None or hasattr(step, "wtransfer_pause"):
            return

        def step_after_commit() -> Any:
            outputs = step()
            if outputs[0]:
                core.step_fn = step
                logger.info(
                    "the commit kept %d running requests from their next token for %.3f s: %.3f s "
                    "to reload the model, %.3f s to compute their KV cache anew",
                    num_running,
                    time.perf_counter() - begun,
                    reloaded - begun,
                    time.perf_counter() - reloaded,
                )
            return outputs

        step_after_commit.wtransfer_pause = True  # type: ignore[attr-defined]  # the mark
        core.step_fn = step_after_commit

    def _pass_on_foreign(self, method: Any, *arguments: Any) -> Any:
        """Call the workers where a connector is ours and the weight engine is another one, or none.

        KV gets a name that only this process knows before anything is written, and another one when
        that is done: what was computed in between is of no set of weights.
        """
        if method not in WRITING:
            return self._call(method, *arguments)
        why = f"{method} of another weight backend"
        self._call(replaced_weights, None, (why,))
        tell_connector(self._core)
        try:
            return self._call(method, *arguments)
        finally:
            if method == self._commits_in or method in REPLACING:
                self._call(replaced_weights, None, (why,))
                forget_kv(self._core)

    def _check_time(self, method: Any) -> None:
        """Raise here, once, what otherwise every worker would raise."""
        if method == DRAFT:
            raise RuntimeError("wtransfer does not update draft models")
        if method in (START, self._commits_in) or (method == SHUTDOWN and self._started):
            self._check_awake()
        if method in (START, SHUTDOWN) and self._started:
            # Whoever began the update before is gone, or it would have ended it.
            self._started = False
            self._call(FINISH)
            self._settle()
        if method == FINISH and not self._started:
            raise RuntimeError(f"{FINISH} without {START} before it")

    def _note(self, method: Any) -> None:
        if method in (START, FINISH):
            self._started = method == START
        if method == INIT and has_our_connector(self._core):
            # A session may give the weights another name than they had before it was there.
            tell_connector(self._core)
        if method in (INIT, self._commits_in):
            error = self._settle()
            if error is not None:
                what = "the worker cannot join" if method == INIT else "nothing was committed"
                raise RuntimeError(f"{what}: {error}")

    def set_weight_version(self, call: Callable[..., Any], weight_version: str) -> Any:
        """Name the weights by what the ranks hold, whatever a caller says; as he says before that.

        vLLM's front end names the weights after every finish, by what its caller has passed.
        """
        if self._held is None or weight_version == self._held:
            return call(weight_version)
        logger.warning("the weights stay %r and are not named %r", self._held, weight_version)
        return call(self._held)

    def sleep(self, call: Callable[..., Any], level: int = 1, *args: Any, **kwargs: Any) -> Any:
        """Say first that the weights go, if they do; return what `call` returns.

        That may be a promise: running requests are waited for. Nothing is committed from here on,
        for it would go with the rest.
        """
        if level <= 1:
            return call(level, *args, **kwargs)
        self.lose_weights("asleep at level 2")
        self._falling_asleep = True
        try:
            promise = call(level, *args, **kwargs)
        except BaseException:
            self._falling_asleep = False
            raise
        if isinstance(promise, Future):
            promise.add_done_callback(lambda _: self._fell_asleep())
        else:
            self._fell_asleep()
        return promise

    def _fell_asleep(self) -> None:
        # From here on the executor's tags say it; where it failed, they say that.
        self._falling_asleep = False

    def wake_up(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what `call` returns, and commit what was ordered while there was no memory.

        No step comes in between: this is still the same call of the engine core.
        """
        was_asleep = self._asleep
        fully = call(*args, **kwargs)
        may_commit = self._has_our_engine and self._commits_anytime
        if was_asleep and not self._asleep and may_commit:
            self._commit_left()
        return fully

    def _commit_left(self) -> None:
        if any(self._call(has_left)):
            self._call(commit_left)
            error = self._settle()
            if error is not None:
                logger.error("an update that waited for this was not committed: %s", error)
        elif any(outcome["state"] == "empty" for outcome in self._call(outcome_of)):
            # Said again: publishers may have tried in vain while there was no memory.
            self.lose_weights("awake without weights")

    def lose_weights(self, why: str) -> None:
        """Enter everywhere that the model has no version any more."""
        self._call(replaced_weights, None, (why,))
        forget_kv(self._core)
        if self._has_our_engine:
            self._label(EMPTY_LABEL)

    def _addressed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        init_info = args[0] if args else kwargs.get("init_info")
        read_invitation(init_info)
        assert isinstance(init_info, dict)
        may_commit = self._commits_anytime and not self._asleep
        return addressed(init_info, self._instance, may_commit=may_commit)

    @property
    def _asleep(self) -> bool:
        return self._falling_asleep or "weights" in getattr(
            self._core.model_executor, "sleeping_tags", ()
        )

    def _check_awake(self) -> None:
        if self._asleep:
            raise RuntimeError(
                "vLLM is asleep and the weights have no memory; wake it first "
                '(wake_up(tags=["weights"])), then commit'
            )

    def _settle(self) -> str | None:
        """Act on what the workers did in the call before; return what went wrong."""
        outcomes = self._call(outcome_of)
        if any(outcome["touched"] for outcome in outcomes):
            forget_kv(self._core)
            self._label(_common_label(outcomes))
        return next((outcome["error"] for outcome in outcomes if outcome["error"]), None)

    def _label(self, label: str | None) -> None:
        self._held = label or self._held
        if label is not None and hasattr(self._core, "set_weight_version"):
            self._core.set_weight_version(label)


def _common_label(outcomes: list[dict[str, Any]]) -> str | None:
    """Return what all ranks hold; None where that has no label."""
    if any(outcome["state"] == "empty" for outcome in outcomes):
        return EMPTY_LABEL
    labels = {outcome["version"] for outcome in outcomes}
    return labels.pop() if len(labels) == 1 else EMPTY_LABEL


def _refuse_foreign(update_info: Any = None) -> None:
    if is_foreign(update_info):
        raise ValueError(
            "update_weights brings weights of another trainer: this backend takes rounds of "
            "wtransfer.Publisher, whose tensors do not come this way. Nothing was changed; end the "
            "update with finish_weight_update"
        )
