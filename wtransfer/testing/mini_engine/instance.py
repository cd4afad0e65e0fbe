"""A serving instance in a process of its own: the handle of its user, and the process itself."""

from __future__ import annotations

import contextlib
import itertools
import time
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import torch

from wtransfer.deadline import Deadline
from wtransfer.errors import PeerError, PeerLostError, StallError, WTransferError
from wtransfer.testing.mini_engine.channel import (
    END_S,
    PATIENCE_S,
    open_channel,
    start_process,
    wait_for_end,
)
from wtransfer.testing.mini_engine.config import EngineConfig
from wtransfer.testing.mini_engine.contract import OVER
from wtransfer.testing.mini_engine.engine import (
    RANK_MAIN,
    LocalExecutor,
    ProcessExecutor,
    make_engine,
)
from wtransfer.testing.mini_engine.worker import make_worker

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator

    from typing_extensions import Self

    from wtransfer.testing.mini_engine.channel import Channel
    from wtransfer.testing.mini_engine.contract import Request
    from wtransfer.testing.mini_engine.engine import Executor, MiniEngine
    from wtransfer.testing.zygote import Child

INSTANCE_MAIN = f"{__name__}:run_instance"
"""Function that the process of an instance calls."""
MODULES = (__name__,)
"""Modules that a zygote of instances and ranks preloads."""
_IDLE_S = 0.05  # between steps without requests: weights are committed, connectors have work

# -- messages to the instance; its configuration is the first


class _Submit(msgspec.Struct, frozen=True, tag=True):
    """Serve a request; an `Answer` follows."""

    number: int
    prompt: list[int]
    max_new_tokens: int
    kv_transfer_params: dict[str, Any] | None
    sent_at: float
    """`time.monotonic` of the submission; processes of one machine share this clock."""


class _Abort(msgspec.Struct, frozen=True, tag=True):
    """End a request early; no `Answer` follows."""

    number: int


class _ForgetCache(msgspec.Struct, frozen=True, tag=True):
    """Empty the prefix cache."""


_Command: TypeAlias = _Submit | _Abort | _ForgetCache

# -- messages from the instance


class _SpawnRank(msgspec.Struct, frozen=True, tag=True):
    """Start the process of a rank with this address."""

    address: str


class _Ready(msgspec.Struct, frozen=True, tag=True):
    """The instance accepts requests."""


class Answer(msgspec.Struct, frozen=True, tag=True):
    """Result of a request."""

    number: int
    state: str
    """``finished`` or ``failed``; ``refused`` if it was never served."""
    tokens: list[int] = []
    """The generated tokens."""
    kv_transfer_params: dict[str, Any] | None = None
    """The connector's parameters for the instance that goes on with the request."""
    counts: dict[str, int] = {}
    """Scheduler counts while it was served; those of this request only if it was alone."""
    total_s: float = 0.0
    """Seconds from the submission to the end."""
    first_token_s: float | None = None
    """Seconds from the submission to the end of the step that generated the first token."""
    load_s: float | None = None
    """Seconds in which it waited for loads beside other requests' steps; None: it did not."""
    error: str | None = None
    """Cause of the failure or refusal."""


_Reply: TypeAlias = _SpawnRank | _Ready | Answer

_CONFIGS = msgspec.msgpack.Decoder(EngineConfig)
_COMMANDS: msgspec.msgpack.Decoder[_Command] = msgspec.msgpack.Decoder(_Command)
_REPLIES: msgspec.msgpack.Decoder[_Reply] = msgspec.msgpack.Decoder(_Reply)


# -- the user's side


class Instance:
    """Starts an instance, and sends it requests. For one thread.

    Once the instance is lost it stays lost: every method that needs it raises.

    Args:
        config: Configuration of the engine; `engine_id` is the instance's name, also in errors.
        spawn: Starts a process that calls a function, ``module:function``, with an address.

    Raises:
        PeerLostError: The process ended while it started.
        StallError: The process did not start in time.
        WTransferError: The configuration is not valid.
    """

    def __init__(self, config: EngineConfig, spawn: Callable[[str, str], Child]) -> None:
        self.name = config.engine_id
        self.config = config
        self.processes: list[Child] = []
        """The instance's process, then those of its ranks if there are several."""
        self._spawn_process = spawn
        self._numbers = itertools.count()
        self._is_ready = False
        self._lost: WTransferError | None = None
        self._closing = contextlib.ExitStack()
        try:
            self._channel = start_process(
                self.name, lambda address: self._spawn(INSTANCE_MAIN, address)
            )
            self._closing.callback(self._channel.close)
            self._channel.send(config)
            deadline = Deadline(2 * PATIENCE_S)  # contains the instance's own wait for its ranks
            while not isinstance(self._receive(deadline, f"the start of {self.name}"), _Ready):
                pass
            self._is_ready = True
        except BaseException:
            self.close()
            raise

    def ask(
        self,
        prompt: list[int],
        max_new_tokens: int,
        kv_transfer_params: dict[str, Any] | None = None,
        deadline_s: float = 60.0,
    ) -> Answer:
        """Send a request and wait for its answer; a request whose answer is late is aborted.

        Args:
            prompt: Tokens.
            max_new_tokens: Number of tokens to generate.
            kv_transfer_params: Parameters for the connector.
            deadline_s: Longest wait.

        Raises:
            ValueError: The arguments are not tokens and numbers, or the instance refused the
                request: its prompt is empty, too long, or has unknown tokens.
            PeerLostError: The instance is lost.
            StallError: The answer did not come in time.
        """
        number, deadline = next(self._numbers), Deadline(deadline_s)
        request = _Submit(number, prompt, max_new_tokens, kv_transfer_params, time.monotonic())
        try:
            # A message that the instance cannot decode would end it.
            msgspec.convert(msgspec.to_builtins(request), _Submit)
        except (msgspec.ValidationError, TypeError) as error:
            raise ValueError(f"that is no request: {error}") from error
        self._send(request)
        try:
            answer = self._receive(deadline, f"request {number} of {self.name}")
            while not isinstance(answer, Answer) or answer.number != number:
                # Otherwise the answer is of a request that ended before its abort.
                answer = self._receive(deadline, f"request {number} of {self.name}")
        except StallError:
            with contextlib.suppress(PeerError, StallError):
                self._send(_Abort(number))
            raise
        if answer.state == "refused":
            raise ValueError(f"{self.name} refuses request {number}: {answer.error}")
        return answer

    def forget_cache(self) -> None:
        """Empty the prefix cache, as if other requests had needed the blocks.

        Raises:
            PeerLostError: The instance is lost.
        """
        self._send(_ForgetCache())

    def kill(self) -> None:
        """Send SIGKILL to the instance's process, and wait for its end; its ranks notice it."""
        for process in self.processes[:1]:
            process.kill()
            process.wait(END_S)

    def close(self) -> list[int]:
        """Close the channel, and wait for the end of all processes; idempotent.

        Returns:
            Return codes of the processes; negative: killed by this signal.
        """
        self._closing.close()
        self._lost = self._lost or PeerLostError(f"{self.name} was closed", worker=self.name)
        deadline = Deadline(END_S)
        processes, self.processes = self.processes, []
        return [wait_for_end(process, deadline) for process in processes]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _spawn(self, target: str, address: str) -> Child:
        process = self._spawn_process(target, address)
        self.processes.append(process)
        return process

    def _send(self, command: _Command) -> None:
        self._check_alive()
        with self._recording_loss():
            self._channel.send(command)

    def _receive(self, deadline: Deadline, what: str) -> _Reply:
        """Return one reply; start the rank that the instance asks for."""
        self._check_alive()
        while not self._channel.poll(deadline.remaining()):
            deadline.check(what, worker=self.name)
        with self._recording_loss():
            reply = self._channel.receive(_REPLIES)
        if isinstance(reply, _SpawnRank):
            self._spawn(RANK_MAIN, reply.address)
        return reply

    @contextlib.contextmanager
    def _recording_loss(self) -> Iterator[None]:
        """Record an error of the channel, with the instance's name."""
        try:
            yield
        except WTransferError as error:
            has_sent_error = not (self._channel.is_lost or isinstance(error, StallError))
            if has_sent_error and self._is_ready:
                self._lost = PeerLostError(f"{self.name} has ended: {error}", worker=self.name)
                raise self._lost from error
            error.add_facts(worker=self.name)
            self._lost = error
            raise

    def _check_alive(self) -> None:
        if self._lost is not None:
            raise type(self._lost)(self._lost.message, worker=self.name) from self._lost


# -- the instance's side


def run_instance(address: str) -> None:
    """Serve requests until the user closes the channel.

    Args:
        address: Address of the user's socket.
    """
    torch.set_num_threads(1)
    with open_channel(address, "the user") as channel:
        config = channel.receive(_CONFIGS)
        executor: Executor
        if config.num_ranks > 1:
            executor = ProcessExecutor(config, lambda address: channel.send(_SpawnRank(address)))
        else:
            executor = LocalExecutor(make_worker(config, owns_process=True))
        with make_engine(config, executor) as engine:
            channel.wait_forever()
            channel.send(_Ready())
            service = _Service(config.model.vocabulary, channel, engine)
            while True:
                service.step()


class _Service:
    """Processes commands between the steps of an engine."""

    def __init__(self, vocabulary: int, channel: Channel, engine: MiniEngine) -> None:
        self._vocabulary = vocabulary
        self._channel = channel
        self._engine = engine
        self._active: dict[int, _Active] = {}

    def step(self) -> None:
        """Process all commands, take a step, and answer the requests that have ended.

        Raises:
            PeerLostError: The user has closed the channel, or a rank is gone.
        """
        wait_s = 0.0 if self._engine.scheduler.is_busy else _IDLE_S
        while self._channel.poll(wait_s):
            wait_s = 0.0
            self._process(self._channel.receive(_COMMANDS))
        began = time.monotonic()
        self._engine.step()
        ended = time.monotonic()
        for active in self._active.values():
            active.update_times(began, ended)
        self._send_answers()

    def _process(self, command: _Command) -> None:
        scheduler = self._engine.scheduler
        match command:
            case _Submit():
                self._submit(command)
            case _Abort():
                active = self._active.pop(command.number, None)
                if active is not None:
                    scheduler.abort(active.request)
            case _ForgetCache():
                scheduler.pool.reset()

    def _submit(self, command: _Submit) -> None:
        try:
            for place, token in enumerate(command.prompt):
                if not 0 <= token < self._vocabulary:
                    raise ValueError(
                        f"token {place} of the prompt is {token}; the model knows 0 to "
                        f"{self._vocabulary - 1}"
                    )
            request = self._engine.submit(
                command.prompt, command.max_new_tokens, command.kv_transfer_params
            )
        except ValueError as error:
            self._channel.send(Answer(command.number, "refused", error=str(error)))
        else:
            self._active[command.number] = _Active(command, request, self._engine.scheduler.counts)

    def _send_answers(self) -> None:
        for number, active in list(self._active.items()):
            if active.request.state in OVER:
                del self._active[number]
                self._channel.send(active.answer(self._engine.scheduler.counts))


class _Active:
    """A request that has not ended, with its times.

    Args:
        command: The user's command.
        request: The request.
        counts: Scheduler counts when it was submitted.
    """

    def __init__(self, command: _Submit, request: Request, counts: Counter[str]) -> None:
        self.request = request
        self._command = command
        self._counts_before = counts.copy()
        self._first_token_s: float | None = None
        self._loading_since: float | None = None
        self._load_s: float | None = None

    def update_times(self, began: float, ended: float) -> None:
        """Update the times after a step that took from `began` to `ended`."""
        state, since = self.request.state, self._loading_since
        if self._first_token_s is None and self.request.output:
            self._first_token_s = ended - self._command.sent_at
        if since is None and state in ("loading", "loaded"):
            since = self._loading_since = began
        if since is not None and self._load_s is None and state != "loading":
            self._load_s = ended - since

    def answer(self, counts: Counter[str]) -> Answer:
        """Return the request's answer."""
        return Answer(
            self._command.number,
            self.request.state,
            self.request.output,
            self.request.kv_transfer_params,
            {name: counts[name] - self._counts_before[name] for name in counts},
            time.monotonic() - self._command.sent_at,
            self._first_token_s,
            self._load_s,
            self.request.error,
        )
