"""A serving instance in a process of its own, as its user has it."""

from __future__ import annotations

import contextlib
import itertools
import time
from typing import TYPE_CHECKING, Any

import msgspec

from wtransfer.deadline import Deadline
from wtransfer.errors import PeerLostError, StallError, WTransferError
from wtransfer.testing.mini_engine.instance_messages import (
    REPLIES,
    Abort,
    Answer,
    AskNumbers,
    Begin,
    ForgetCache,
    Numbers,
    Refusal,
    Serving,
    SpawnRank,
    Submit,
)
from wtransfer.testing.mini_engine.line import PATIENCE_S, called_back
from wtransfer.testing.mini_engine.process import END_S, INSTANCE, RANK, ended

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Self

    from wtransfer.testing.mini_engine.build import HostSettings
    from wtransfer.testing.mini_engine.instance_messages import Order
    from wtransfer.testing.mini_engine.process import Process


class Instance:
    """Starts an instance, and hands it requests. For one thread.

    Once it is lost, it stays lost: every method that needs it says so.

    Args:
        settings: Of the host; `engine_id` is its name, also in errors.
        spawn: Starts a process that calls a function, ``module:function``, with an address.
        ranks_apart: Whether ranks are processes of their own also where there is only one.

    Raises:
        PeerLostError: It has ended while it started.
        StallError: It did not start in time.
        WTransferError: It could not be made of these settings.
    """

    def __init__(
        self,
        settings: HostSettings,
        spawn: Callable[[str, str], Process],
        *,
        ranks_apart: bool = False,
    ) -> None:
        self.name = settings.engine_id
        """Identity."""
        self.settings = settings
        """Of the host."""
        self.processes: list[Process] = []
        """Its process, then those of its ranks, if they have any."""
        self._spawn_process = spawn
        self._numbers = itertools.count()
        self._open: set[int] = set()
        self._abandoned: set[int] = set()
        self._answers: dict[int, Answer | Refusal] = {}
        self._said: list[Numbers] = []
        self._is_serving = False
        self._lost: WTransferError | None = None
        self._hanging_up = contextlib.ExitStack()
        try:
            self._line = called_back(self.name, lambda address: self._spawn(INSTANCE, address))
            self._hanging_up.callback(self._line.close)
            self._line.send(Begin(settings, ranks_apart))
            deadline = Deadline(2 * PATIENCE_S)  # its own for ranks is in it
            while not self._is_serving:
                self._hear(deadline, f"the start of {self.name}")
        except BaseException:
            self.close()
            raise

    # -- requests

    def submit(
        self,
        prompt: list[int],
        max_new_tokens: int,
        kv_transfer_params: dict[str, Any] | None = None,
    ) -> int:
        """Hand over a request, and do not wait for it.

        Args:
            prompt: Its tokens.
            max_new_tokens: How many are generated.
            kv_transfer_params: What the connector is told of it.

        Returns:
            Its number, for `collect` and `abort`.

        Raises:
            ValueError: These are no tokens.
            PeerLostError: The instance is lost.
        """
        now = time.monotonic()
        # What has come meanwhile is read first, so that the two never wait for each other.
        while self._lost is None and self._line.has_news(0.0):
            self._hear(Deadline(PATIENCE_S), f"what {self.name} says")
        number = next(self._numbers)
        self._send(_checked(Submit(number, prompt, max_new_tokens, kv_transfer_params, now)))
        self._open.add(number)
        return number

    def collect(self, number: int, deadline_s: float = 60.0) -> Answer:
        """Wait for what came of a request; each can be collected once.

        Args:
            number: What `submit` returned.
            deadline_s: Longest wait.

        Raises:
            ValueError: It was refused: the prompt is empty or too long, or is none. Or there is no
                such request.
            PeerLostError: The instance is lost.
            StallError: It was not answered in time; it is still served.
        """
        deadline = Deadline(deadline_s)
        while number in self._open:
            self._hear(deadline, f"request {number} of {self.name}")
        answer = self._answers.pop(number, None)
        if answer is None:
            raise ValueError(f"{self.name} has no request {number} to collect")
        if isinstance(answer, Refusal):
            raise ValueError(  # noqa: TRY004  # it is the prompt that is wrong
                f"{self.name} refuses request {number}: {answer.reason}"
            )
        return answer

    def ask(
        self,
        prompt: list[int],
        max_new_tokens: int,
        kv_transfer_params: dict[str, Any] | None = None,
        deadline_s: float = 60.0,
    ) -> Answer:
        """Hand over a request, and wait for what comes of it: `submit` and `collect`."""
        return self.collect(self.submit(prompt, max_new_tokens, kv_transfer_params), deadline_s)

    def abort(self, number: int) -> None:
        """End a request before its time; it is collected as any other.

        Raises:
            PeerLostError: The instance is lost.
        """
        self._send(Abort(number))

    def abandon(self, number: int) -> None:
        """End a request that nobody will collect: its answer is dropped.

        Raises:
            PeerLostError: The instance is lost.
        """
        self._answers.pop(number, None)
        if number in self._open:
            self._open.discard(number)
            self._abandoned.add(number)
            self._send(Abort(number))

    # -- the instance

    def forget_cache(self) -> None:
        """Let it forget what its cache contains, as if other requests had needed the blocks.

        Raises:
            PeerLostError: The instance is lost.
        """
        self._send(ForgetCache())

    def stats(self, deadline_s: float = 60.0) -> Numbers:
        """Return what it has done so far.

        Raises:
            PeerLostError: The instance is lost.
            StallError: It does not answer.
        """
        self._said.clear()
        self._send(AskNumbers())
        deadline = Deadline(deadline_s)
        while not self._said:
            self._hear(deadline, f"the numbers of {self.name}")
        return self._said.pop()

    def kill(self) -> None:
        """End its process with SIGKILL, and return when it is gone. Its ranks end by themselves."""
        for process in self.processes[:1]:
            process.kill()
            process.wait(END_S)

    def close(self) -> list[int]:
        """Hang up, and see all processes off; a second call does nothing.

        Returns:
            How each has ended; negative: by this signal.
        """
        self._hanging_up.close()
        self._lost = self._lost or PeerLostError(f"{self.name} was closed", worker=self.name)
        deadline = Deadline(END_S)
        processes, self.processes = self.processes, []
        return [ended(process, deadline) for process in processes]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- the line

    def _spawn(self, target: str, address: str) -> Process:
        process = self._spawn_process(target, address)
        self.processes.append(process)
        return process

    def _send(self, order: Order) -> None:
        self._check()
        with self._noticing():
            self._line.send(order)

    def _hear(self, deadline: Deadline, what: str) -> None:
        """Take one message."""
        self._check()
        while not self._line.has_news(deadline.remaining()):
            deadline.check(what, worker=self.name)
        with self._noticing():
            reply = self._line.receive(REPLIES)
        match reply:
            case SpawnRank():
                self._spawn(RANK, reply.address)
            case Serving():
                self._is_serving = True
            case Answer() | Refusal():
                if reply.number in self._abandoned:
                    self._abandoned.discard(reply.number)
                else:
                    self._open.discard(reply.number)
                    self._answers[reply.number] = reply
            case Numbers():
                self._said.append(reply)

    @contextlib.contextmanager
    def _noticing(self) -> Iterator[None]:
        """Take note of what the line fails with, and name the instance."""
        try:
            yield
        except WTransferError as error:
            told = not (self._line.is_lost or isinstance(error, StallError))
            if told and self._is_serving:
                self._lost = PeerLostError(f"{self.name} has ended: {error}", worker=self.name)
                raise self._lost from error
            error.add_facts(worker=self.name)
            self._lost = error
            raise

    def _check(self) -> None:
        if self._lost is not None:
            raise type(self._lost)(self._lost.message, worker=self.name) from self._lost


def _checked(order: Submit) -> Submit:
    """Return an order that the instance can read; one that it cannot would end it.

    Raises:
        ValueError: It is none.
    """
    try:
        return msgspec.convert(msgspec.to_builtins(order), Submit)
    except (msgspec.ValidationError, TypeError) as error:
        raise ValueError(f"that is no request: {error}") from error
