"""Source of weights that can be read once in a round, such as the export of a training framework.

A framework gathers, converts or merges its weights while they are read, often on all ranks at once
and with a state to put back at the end. So a stream that was begun has to be read to its end,
whatever becomes of the round.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from wtransfer.calls import on_callers_stream
from wtransfer.errors import RoundBusyError, SourceError, StallError
from wtransfer.weights import ParamMeta

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

logger = logging.getLogger(__name__)


class StreamSource:
    """Metadata that is announced, and a stream of the tensors that can be read once.

    ::

        source = wtransfer.StreamSource()
        publisher = wtransfer.Publisher(source, hosts=hosts)
        with source.round(metadata, framework.export()):
            publisher.publish("step-7")

    Where a framework gives the stream alone, ``source.round(None, stream)`` announces what the
    round before it yielded. The first such round copies the stream into host memory to know that.

    Args:
        deadline_s: Longest wait, at the end of a round, for a step of the stream that another
            thread has begun, in seconds.
    """

    def __init__(self, deadline_s: float = 30.0) -> None:
        self.config: Mapping[str, Any] | None = None
        """Entries of the model's ``config.json``, for the rounds to come; None: none is sent."""
        self._deadline_s = deadline_s
        self._changing = threading.Lock()
        self._pass: _Pass | None = None
        self._remembered: Sequence[ParamMeta] | None = None

    @contextlib.contextmanager
    def round(
        self, metadata: Iterable[ParamMeta] | None, stream: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[None]:
        """Have one round, which the block must end, read a stream.

        The rest of the stream is read at the end of the block, also of one that raised; errors in
        the rest are logged, and no more of it is read.

        Args:
            metadata: Every tensor of the stream, in its order. None: as the last stream had them. A
                stream with others fails its round, and the next one announces these. While none
                has been read to its end, a copy of the whole set is held in host memory.
            stream: Yields name and whole tensor. A tensor may be overwritten once the next is asked
                for, if the engine copies (shm, file, gloo).

        Raises:
            RoundBusyError: A round of this source is under way.
        """
        one_pass = _Pass(stream)
        with self._changing:
            if self._pass is not None:
                raise RoundBusyError("a round of this source is under way; leave its block first")
            self._pass = one_pass
        remembered, self._remembered = self._remembered, None
        try:
            if metadata is None:
                metadata = one_pass.collect() if remembered is None else remembered
            one_pass.metadata = tuple(metadata)
            yield
        finally:
            try:
                one_pass.drain(self._deadline_s)
                self._remembered = None if one_pass.failed else one_pass.seen
            except Exception:
                logger.exception("the rest of the weights could not be read")
            finally:
                self._pass = None

    @property
    def metadata(self) -> Sequence[ParamMeta]:
        """Every tensor of the round.

        Raises:
            SourceError: There is no round.
        """
        return self._current().metadata

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of the round.

        Raises:
            SourceError: There is no round, its block was left, or they were read before.
        """
        return self._current().read()

    iter_local = iter_full

    def _current(self) -> _Pass:
        if self._pass is None:
            raise SourceError("a StreamSource is read within `with source.round(...)` only")
        return self._pass


class _Pass:
    """One pass over one stream: by the engine's thread, and then by the one that drains it.

    Each step runs with the CUDA stream of the thread that has begun the round, and with the mode of
    gradients of the step before: a generator may have changed it for its own.
    """

    def __init__(self, stream: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.metadata: tuple[ParamMeta, ...] = ()
        self.seen: list[ParamMeta] = []
        """Tensors that the stream has yielded."""
        self.failed = False
        """True if the stream has raised: it had more to yield."""
        self._next = on_callers_stream(iter(stream).__next__)
        self._with_grad = torch.is_grad_enabled()
        self._begun = self._over = False
        # Held for one step of the stream, which only one thread can take.
        self._step = threading.Lock()

    def collect(self) -> Sequence[ParamMeta]:
        """Read the stream into host memory, to be yielded from there; return its metadata."""
        copies: deque[tuple[str, torch.Tensor]] = deque()
        try:
            while True:
                name, tensor = self._take()
                copies.append((name, tensor.detach().to("cpu", copy=True)))
        except StopIteration:
            pass
        except BaseException:
            # The error's traceback would keep them.
            copies.clear()
            raise
        found, self.seen = self.seen, []
        self._next = _popped(copies).__next__
        return found

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self._begun:
            raise SourceError(
                "the engine reads the weights a second time in a round, and they are a stream, "
                "which can be read once"
            )
        self._begun = True
        return self._steps()

    def _steps(self) -> Iterator[tuple[str, torch.Tensor]]:
        while True:
            with self._step:
                if self._over:
                    raise SourceError("the block of the round was left; the stream has ended")
                try:
                    item = self._take()
                except StopIteration:
                    return
            yield item

    def _take(self) -> tuple[str, torch.Tensor]:
        threads_own = torch.is_grad_enabled()
        torch.set_grad_enabled(self._with_grad)
        try:
            name, tensor = self._next()
            self.seen.append(ParamMeta(name, tensor.dtype, tuple(tensor.shape)))
        except BaseException as error:
            self.failed = self.failed or not isinstance(error, StopIteration)
            raise
        finally:
            self._with_grad = torch.is_grad_enabled()
            torch.set_grad_enabled(threads_own)
        return name, tensor

    def drain(self, timeout_s: float) -> None:
        """Read what is left, and let no other thread read any more.

        Raises:
            StallError: A step that another thread has begun did not end in time.
        """
        self._over = True
        if not self._step.acquire(timeout=timeout_s):
            raise StallError(
                f"the source of the weights takes more than {timeout_s:g} s for one tensor; the "
                "rest of it was not read",
                seconds=timeout_s,
            )
        try:
            with contextlib.suppress(StopIteration):
                while True:
                    self._take()
        finally:
            self._step.release()


def _popped(copies: deque[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    # Each is freed once the engine has it.
    while copies:
        yield copies.popleft()
