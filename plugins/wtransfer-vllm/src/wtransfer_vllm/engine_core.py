"""Watch vLLM's engine core: its caches and its label follow the weights that the workers hold.

The engine core is the process that schedules. While a call to its workers runs it schedules
nothing, so work done right after a commit is done before any further step. The engine core is also
the only place where an update may be refused aloud: an exception in one of several workers would
leave the others' answers in the executor's queues, to be taken for those of the next call.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import socket
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from wtransfer.weight_sync.messages import DRAINED
from wtransfer.weight_version import EMPTY_LABEL

from wtransfer_vllm.adapters import Adapters
from wtransfer_vllm.block_hashes import BlockHashes, names_blocks
from wtransfer_vllm.caches import forget_kv, tell_connector
from wtransfer_vllm.in_flight import TAG, is_mixed, keeps_in_flight
from wtransfer_vllm.messages import KEY, Outcome, is_foreign, member_of, read_invitation
from wtransfer_vllm.names import has_our_connector, is_ours
from wtransfer_vllm.places import check_places
from wtransfer_vllm.spans import tag_of, tag_of_batch
from wtransfer_vllm.trust import token_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from wtransfer_vllm.messages import Invitation

logger = logging.getLogger(f"vllm.{__name__}")  # a child of vLLM's, so that its log has it

INIT = "init_weight_transfer_engine"
START = "start_weight_update"
DRAFT = "start_draft_weight_update"
UPDATE = "update_weights"
FINISH = "finish_weight_update"
SHUTDOWN = "shutdown_weight_transfer_engine"
REPLACING = frozenset({"reload_weights", "reset_weights"})
"""Workers' methods that put other weights into the model, beside every weight backend."""
WRITING = REPLACING | {START, DRAFT, UPDATE, FINISH}
"""Workers' methods within which another weight backend writes into the model."""
ON_EMPTY_VARIABLE = "WTRANSFER_VLLM_ON_EMPTY"
"""Environment variable of vLLM's processes: treatment of an engine whose model belongs to no
version after a failed commit. ``serve``, the default: its label is ``empty``. ``end``: it ends."""
ADAPTERS = ("add_lora", "remove_lora")
"""Methods of the engine core, and of workers, that change the adapters that workers hold."""
LED = ("add_request", *ADAPTERS, "sleep", "wake_up", "set_weight_version", TAG)
"""The engine core's methods that concern the weights, or begin to use them, beside its calls to the
workers; all on its own thread."""


def watch(engine_core: type[Any], commits_in: str = FINISH) -> None:
    """Stand between an engine core and its workers; idempotent.

    Args:
        engine_core: vLLM's ``EngineCore``.
        commits_in: The workers' method in which a commit happens: `FINISH`, in the seed era
            `UPDATE`.
    """
    if hasattr(engine_core.collective_rpc, "wtransfer_call"):
        return
    call_workers = engine_core.collective_rpc

    def watch_of(core: Any) -> Watch | None:
        found: Watch | None = vars(core).get("_wtransfer_watch")
        if found is None and concerns(core):
            found = Watch(core, functools.partial(call_workers, core), commits_in)
            core._wtransfer_watch = found  # noqa: SLF001  # the mark
        if found is not None:
            found.name_blocks()
        return found

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

    def lead(name: str, method: Callable[..., Any]) -> None:
        """Lead a method through the `Watch` method of its name."""

        @functools.wraps(method)
        def led(self: Any, *args: Any, **kwargs: Any) -> Any:
            if (watching := watch_of(self)) is None:
                return method(self, *args, **kwargs)
            return getattr(watching, name)(functools.partial(method, self), *args, **kwargs)

        setattr(engine_core, name, led)

    collective_rpc.wtransfer_call = call_workers  # type: ignore[attr-defined]  # the mark
    engine_core.collective_rpc = collective_rpc
    for name in LED:
        if hasattr(engine_core, name):
            lead(name, getattr(engine_core, name))


def _ends_when_empty() -> bool:
    choice = os.environ.get(ON_EMPTY_VARIABLE) or "serve"
    if choice not in ("serve", "end"):
        raise ValueError(f"{ON_EMPTY_VARIABLE} is {choice!r}, expected 'serve' or 'end'")
    return choice == "end"


def concerns(core: Any) -> bool:
    """Return whether the weight engine or KV connector of a core, or of its client, is ours."""
    return _has_our_engine(core) or has_our_connector(core)


def _has_our_engine(core: Any) -> bool:
    config = getattr(core.vllm_config, "weight_transfer_config", None)
    return config is not None and is_ours("engines", config.backend)


# -- called in each worker, by the engine core


def outcome_of(worker: Any) -> dict[str, Any]:
    """Return the outcome of the last call, and whether a verified update waits for a commit."""
    member = member_of(worker)
    if member is None:
        outcome = Outcome(error="this worker has no engine of wtransfer")
        return asdict(outcome) | {"pending": False}
    return asdict(member.outcome) | {"pending": member.pending}


def replaced_weights(worker: Any, why: str) -> None:
    """Record that the model does not consist of the last commit any more."""
    # With torch and readers of checkpoints: not where vLLM's processes register their plug-ins.
    from wtransfer_vllm.vouching import weights_were_replaced

    weights_were_replaced(worker, why)


def commit_pending(worker: Any) -> None:
    """Commit an update that was ordered while the weights had no memory."""
    member = member_of(worker)
    if member is not None:
        member.commit()


def reset_adapters(worker: Any) -> None:
    """Reset the LoRA state, as vLLM's own finish does: adapters are loaded again when asked for."""
    reset = getattr(worker.model_runner, "reset_lora_state", None)  # not in every release
    if reset is not None:
        reset()


def prove_reload(worker: Any) -> None:
    """Find out whether vLLM's reload can be trusted, while the weights that it serves are known."""
    member = member_of(worker)
    if member is not None:
        member.prove_reload()


class Watch:
    """Stands between one engine core and its workers.

    Args:
        core: The engine core.
        call: Calls a method in every worker, unwatched.
        commits_in: The workers' method in which a commit happens.
    """

    def __init__(self, core: Any, call: Callable[..., Any], commits_in: str) -> None:
        self._core = core
        self._call = call
        self._commits_in = commits_in
        # In the seed era the model can only be reached while vLLM itself reloads it.
        self._commits_anytime = commits_in == FINISH
        self._has_our_engine = _has_our_engine(core)
        self._is_drained = False
        """True from the route by which an operator ends transfers until an invitation by hand."""
        self._started = False
        self._carried_out = False
        """True if the start under way found an order of its update, and has committed it."""
        self._falling_asleep = False
        self._held: str | None = None
        self._fingerprint: str | None = None
        """Identity of the weights of `_held`."""
        self._in_flight: deque[str] = deque()
        """Tags of batches that are not processed, in order: of those that were in flight at a
        commit, and of all that are scheduled once requests have kept their KV."""
        self._tags_batches = False
        self._keeps_in_flight = False
        """True if requests that run at a commit keep their KV; decided at the last invitation, for
        nothing after a commit may raise before the caches have forgotten."""
        self._has_looked_for_tiers = False
        self._block_hashes: BlockHashes | None = None
        """None unless the configuration has lower tiers of vLLM's own."""
        self._adapters: Adapters | None = None
        """None unless the configuration has LoRA adapters."""
        # As it was at the start: a client of vLLM's other routes can have a worker change it.
        self._environ = dict(os.environ)
        self._instance = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"

    def name_blocks(self) -> None:
        """Name adapters, and the blocks of vLLM's own lower tiers; idempotent.

        To be called before the first request is scheduled. vLLM may load its plug-ins while it
        makes the engine core, so not where that ends.
        """
        if self._has_looked_for_tiers or getattr(self._core, "scheduler", None) is None:
            return
        self._has_looked_for_tiers = True
        if getattr(self._core.vllm_config, "lora_config", None) is not None:
            self._adapters = Adapters(self._core, lambda: self._asleep)
        if self._has_our_engine and names_blocks(self._core.vllm_config):
            try:
                self._block_hashes = BlockHashes(self._core, self._call)
            except (AttributeError, ImportError) as error:
                logger.warning("no update is taken, as lower tiers cannot be named: %s", error)

    def pass_on(
        self,
        method: Any,
        timeout: float | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
    ) -> Any:
        """Call the workers, with the checks before and the follow-up after.

        Raises:
            ValueError: The call is not one of wtransfer's; no worker was called.
            AuthenticationError: It invites the workers, and its publisher is not to be trusted.
            RuntimeError: The call comes at a wrong time, the model's memory is not there, or
                nothing was committed.
        """
        if method in ADAPTERS:

            def call(*args: Any, **kwargs: Any) -> Any:
                return self._call(method, timeout, args, kwargs)

            return getattr(self, method)(call, *args, **(kwargs or {}))
        if not self._has_our_engine:
            return self._pass_on_foreign(method, timeout, args, kwargs)
        if method == INIT:
            init_info: Any = args[0] if args else (kwargs or {}).get("init_info")
            invitation = read_invitation(init_info)
            token = None if invitation.leave else token_for(invitation, self._environ)
            self._check_drained(invitation)
            # What is not known or cannot be done is refused before it is needed.
            check_places(self._core.vllm_config)
            _ends_when_empty()
            keeps = keeps_in_flight(self._core)
            if self._block_hashes is None and names_blocks(self._core.vllm_config):
                raise ValueError("start it without secondary_tiers: this vLLM cannot name blocks")
            may_commit = self._commits_anytime and not self._asleep
            told = {"instance": self._instance, "token": token, "may_commit": may_commit}
            args, kwargs = (), {"init_info": {**init_info, KEY: {**init_info[KEY], **told}}}
            self._keeps_in_flight = keeps
        elif method == UPDATE and is_foreign(*args, **(kwargs or {})):
            raise ValueError(
                "update_weights brings weights of another trainer: this backend takes rounds of "
                "wtransfer.Publisher, whose tensors do not come this way. Nothing was changed; end "
                "the update with finish_weight_update"
            )
        self._check_time(method)
        if method in REPLACING:
            self._prove_reload()
            # Before the call: where it fails half way, the weights are gone all the same.
            self._lose_weights(f"{method} was called")
        # vLLM calls its workers before there is a scheduler.
        num_running = len(getattr(getattr(self._core, "scheduler", None), "running", ()))
        begun = time.perf_counter()
        result = self._call(method, timeout, args, kwargs)
        if self._block_hashes is not None:
            # A session may give the weights another name than they had before the session; and an
            # extension of the worker may have changed them.
            self._block_hashes.renew()
        if method in (START, FINISH):
            self._started = method == START
        self._is_drained = self._is_drained or method == SHUTDOWN
        if method == INIT and has_our_connector(self._core):
            # A session may give the weights another name than they had before the session.
            tell_connector(self._core)
        if method in (INIT, self._commits_in):
            error = self._settle(carried_out=method == FINISH and self._carried_out)
            self._carried_out = False
            if error is not None:
                what = "the worker cannot join" if method == INIT else "nothing was committed"
                raise RuntimeError(f"{what}: {error}")
        if method == self._commits_in and num_running:
            self._log_pause(begun, num_running)
        return result

    def _pass_on_foreign(self, method: Any, *arguments: Any) -> Any:
        """Call the workers where a connector is wtransfer's and the weight engine is another one.

        KV gets a name that only this process knows before anything is written, and another one when
        the call is done: KV computed in between is of no set of weights.
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

    def _check_drained(self, invitation: Invitation) -> None:
        """Raise if a publisher asks by itself, and an operator has told this engine to leave."""
        if invitation.again and self._is_drained:
            raise RuntimeError(f"this engine {DRAINED}")
        self._is_drained = self._is_drained and invitation.leave

    def _check_time(self, method: Any) -> None:
        """Raise here, once, the errors that otherwise every worker would raise."""
        if method == DRAFT:
            raise RuntimeError("wtransfer does not update draft models")
        commits = method in (START, self._commits_in) or (method == SHUTDOWN and self._started)
        if commits and self._asleep:
            raise RuntimeError(
                "vLLM is asleep and the weights have no memory; wake it first "
                '(wake_up(tags=["weights"])), then commit'
            )
        if method in (START, SHUTDOWN) and self._started:
            # The trainer that began the update before is gone, or it would have ended it.
            # An update that its workers were ordered to commit, be it by the next trainer, is
            # committed.
            self._started = False
            self._call(FINISH)
            self._carried_out = self._settle() is None and method == START
        if method == FINISH and not self._started:
            raise RuntimeError(f"{FINISH} without {START} before it")

    def _settle(self, *, carried_out: bool = False) -> str | None:
        """Act on the workers' outcomes of the last call; return the first error.

        Where the order was carried out before, a worker with nothing left to do made no outcome.
        """
        outcomes = self._call(outcome_of)
        if any(outcome["touched"] for outcome in outcomes):
            self._forget_kv(keep_running=self._keeps_in_flight)
            if getattr(self._core.vllm_config, "lora_config", None) is not None:
                # vLLM does so in its finish alone; a commit may come in a wake-up or an invitation.
                self._call(reset_adapters)
            held = {(outcome["version"], outcome["fingerprint"]) for outcome in outcomes}
            is_empty = any(outcome["state"] == "empty" for outcome in outcomes)
            self._label(*((EMPTY_LABEL, None) if is_empty or len(held) > 1 else held.pop()))
            if self._keeps_in_flight:
                self._tag_batches()
            if is_empty and _ends_when_empty():
                self._end()
        failed = [each for each in outcomes if each["touched"] or not carried_out]
        return next((outcome["error"] for outcome in failed if outcome["error"]), None)

    def _end(self) -> None:
        """End the engine once the call under way is answered.

        Requests fail, and vLLM's front end says that it is not healthy.
        """
        text = f"the weights belong to no version, and {ON_EMPTY_VARIABLE} is 'end': vLLM ends"
        logger.critical(text)

        def step() -> Any:
            raise RuntimeError(text)

        self._core.step_fn = step
        queue = getattr(self._core, "input_queue", None)
        if queue is not None:
            from vllm.v1.engine import EngineCoreRequestType

            # As an executor that has failed; else an idle engine would end at its next request.
            queue.put_nowait((EngineCoreRequestType.EXECUTOR_FAILED, b""))

    def _forget_kv(self, *, keep_running: bool = False) -> None:
        forget_kv(self._core, keep_running=keep_running, block_hashes=self._block_hashes)

    def _lose_weights(self, why: str) -> None:
        """Record everywhere that the model has no version any more."""
        self._call(replaced_weights, None, (why,))
        self._forget_kv()
        if self._has_our_engine:
            self._label(EMPTY_LABEL, None)

    def _prove_reload(self) -> None:
        if self._has_our_engine and self._commits_anytime and not self._asleep:
            self._call(prove_reload)

    def _label(self, label: str | None, fingerprint: str | None) -> None:
        if label is not None and hasattr(self._core, TAG):
            self._tag_in_flight()
            self._fingerprint = fingerprint
        self._held = label or self._held
        if label is not None and hasattr(self._core, "set_weight_version"):
            self._core.set_weight_version(label)

    def _tag_in_flight(self) -> None:
        # The workers take calls in order: each batch that is in the queue was computed before the
        # weights changed. Those of an earlier commit have their tags.
        num_batches = len(self._core.batch_queue or ())
        self._in_flight.extend([self._tag] * (num_batches - len(self._in_flight)))
        # vLLM's fault tolerance drops all that is in the queue.
        while len(self._in_flight) > num_batches:
            self._in_flight.popleft()

    def _tag_batches(self) -> None:
        """Tag each batch as it is scheduled, from here on; idempotent.

        By the time that its tokens are processed a request may have ended, or have been preempted
        and be computed anew: which of them rest on older KV is known when they are scheduled.
        """
        if self._tags_batches:
            return
        self._tags_batches = True
        scheduler = self._core.scheduler
        schedule = scheduler.schedule

        def schedule_tagged(*args: Any, **kwargs: Any) -> Any:
            self._tag_in_flight()
            batch = schedule(*args, **kwargs)
            requests = scheduler.requests
            mixed = [each for each in batch.num_scheduled_tokens if is_mixed(requests[each])]
            self._in_flight.append(tag_of_batch(self._tag, mixed))
            return batch

        scheduler.schedule = schedule_tagged

    @property
    def _tag(self) -> str:
        return tag_of(self._core.get_weight_version(), self._fingerprint)

    def _log_pause(self, begun: float, num_running: int) -> None:
        """Log how long a commit has kept requests from their next token, when that is there.

        Most of the pause is vLLM's: the reload of the model, and the prefill of all tokens of the
        running requests, unless they keep their KV.
        """
        core, reloaded = self._core, time.perf_counter()
        keeps = self._keeps_in_flight
        step = getattr(core, "step_fn", None)
        if step is None or hasattr(step, "wtransfer_pause"):
            return

        def step_after_commit() -> Any:
            outputs = step()
            if outputs[0]:
                core.step_fn = step
                logger.info(
                    "the commit kept %d running requests from their next token for %.3f s: %.3f s "
                    "to reload the model, %.3f s for the next step%s",
                    num_running,
                    time.perf_counter() - begun,
                    reloaded - begun,
                    time.perf_counter() - reloaded,
                    "" if keeps else ", which computes their KV cache anew",
                )
            return outputs

        step_after_commit.wtransfer_pause = True  # type: ignore[attr-defined]  # the mark
        core.step_fn = step_after_commit

    # -- the engine core's own methods, led through those of their names

    def add_request(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the result of `call`: blocks are named before."""
        if self._adapters is not None:
            self._adapters.admit(args[0] if args else kwargs["request"])
        return call(*args, **kwargs)

    def add_lora(self, call: Callable[..., Any], lora_request: Any) -> Any:
        """Return the result of `call`: what it loads is named before."""
        if self._adapters is None:
            return call(lora_request)
        return self._adapters.load(call, lora_request)

    def remove_lora(self, call: Callable[..., Any], lora_id: int) -> Any:
        """Return the result of `call`: what it removes is forgotten before."""
        if self._adapters is not None:
            self._adapters.forget(lora_id)
        return call(lora_id)

    def set_weight_version(self, call: Callable[..., Any], weight_version: str) -> Any:
        """Name the weights by the version that the ranks hold; before a commit, as the caller does.

        vLLM's front end names the weights after every finish, by the label that its caller passed.
        """
        if self._held is None or weight_version == self._held:
            return call(weight_version)
        logger.warning("the weights stay %r and are not named %r", self._held, weight_version)
        return call(self._held)

    def _attach_weight_version(self, call: Callable[..., Any], outputs: dict[int, Any]) -> None:
        """Tag the outputs of a batch with the weights that computed it.

        vLLM's own tag is the label of the moment at which they are processed, and has no
        fingerprint.
        """
        call(outputs)
        tag = self._in_flight.popleft() if self._in_flight else self._tag
        for each in outputs.values():
            each.weight_version = tag

    def sleep(self, call: Callable[..., Any], level: int = 1, *args: Any, **kwargs: Any) -> Any:
        """Record first that the weights go, if they do; return the result of `call`.

        The result may be a future: vLLM waits for running requests. Nothing is committed from here
        on, for it would go with the rest.
        """
        if level <= 1:
            return call(level, *args, **kwargs)
        self._prove_reload()
        self._lose_weights("asleep at level 2")
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
        # From here on the executor's tags tell, also where falling asleep has failed.
        self._falling_asleep = False

    @property
    def _asleep(self) -> bool:
        return self._falling_asleep or "weights" in getattr(
            self._core.model_executor, "sleeping_tags", ()
        )

    def wake_up(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the result of `call`, and commit an update that was ordered in sleep.

        No step comes in between: this is still the same call of the engine core.
        """
        was_asleep = self._asleep
        fully = call(*args, **kwargs)
        if not was_asleep or self._asleep or not (self._has_our_engine and self._commits_anytime):
            return fully
        outcomes = self._call(outcome_of)
        if any(outcome["pending"] for outcome in outcomes):
            self._call(commit_pending)
            error = self._settle()
            if error is not None:
                logger.error("an update that waited for this was not committed: %s", error)
        elif any(outcome["state"] == "empty" for outcome in outcomes):
            # Once more: publishers may have tried in vain while there was no memory.
            self._lose_weights("awake without weights")
        return fully
