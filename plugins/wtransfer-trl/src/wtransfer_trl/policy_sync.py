"""One trainer's updates of one server: announced by TRL, read once, committed or refused whole."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from wtransfer import ParamMeta, Publisher, StreamSource
from wtransfer.errors import (
    CommitError,
    NoWorkersError,
    PeerLostError,
    StallError,
    WTransferError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from wtransfer.engines.interface import WeightSyncClient

logger = logging.getLogger(__name__)

LABEL = "trl-"
RETRY_S = 0.5
DEADLINE_S = 30.0
"""The deadline of a `wtransfer.Publisher` that is given no other, in seconds."""

Announced = tuple[str, str, "Sequence[int]"]
"""Name, dtype as vLLM spells it, and shape."""

OnError = Literal["raise", "keep"]

_numbers: dict[str, float] = {}


def check_on_error(value: str) -> None:
    """Check an ``on_error`` argument.

    Raises:
        ValueError: `value` is neither.
    """
    if value not in get_args(OnError):
        raise ValueError(f"on_error is {value!r}, expected 'raise' or 'keep'")


def last_numbers() -> dict[str, float]:
    """Return the numbers of this process's updates, by the names that they have in a log."""
    return dict(_numbers)


class PolicySync:
    """Publishes a policy to one vLLM.

    Args:
        host: URL of a server, or a client of an engine.
        on_error: ``"raise"``, or ``"keep"`` to log a failed update and go on.
        held: Returns the label of the weights that vLLM holds; None: those of the last update that
            succeeded.
        return_s: Longest wait for a server that does not answer, in seconds.
        **publisher: Arguments of `wtransfer.Publisher`.

    Raises:
        WTransferError: The server did not join.
    """

    def __init__(
        self,
        host: str | WeightSyncClient,
        *,
        on_error: OnError,
        return_s: float,
        held: Callable[[], str] | None = None,
        **publisher: Any,
    ) -> None:
        self._called = "the server" if isinstance(host, str) else "the engine"
        self._on_error = on_error
        self._return_s = return_s
        self._held = held
        self._num_updates = 0
        self._of_last = {"wtransfer/version": 0, "wtransfer/seconds": 0.0, "wtransfer/bytes": 0}
        """Numbers of the last update that succeeded."""
        self._collected: list[tuple[str, torch.Tensor]] | None = None
        self._copy_error: RuntimeError | None = None
        self._stream = StreamSource(publisher.get("deadline_s", DEADLINE_S))
        # No progress by default: the trainer has bars of its own.
        publisher = {"progress": False, **publisher}
        self._publisher = Publisher(self._stream, hosts=[host], **publisher)

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Publish at the end of the block what was added within it; nothing if it raises.

        Raises:
            RuntimeError: A tensor could not be copied.
            WTransferError: As `update`.
        """
        if self._collected is not None:
            raise RuntimeError("a weight update is under way; leave its block first")
        collected: list[tuple[str, torch.Tensor]] = []
        self._collected = collected
        try:
            yield
        finally:
            self._collected = None
            error, self._copy_error = self._copy_error, None
        if error is not None:
            raise error
        metadata = [
            (name, str(tensor.dtype).removeprefix("torch."), tensor.shape)
            for name, tensor in collected
        ]
        self.update(metadata, collected)

    def add(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> bool:
        """Keep copies for the block's update; False outside of a block."""
        if self._collected is None:
            return False
        for name, tensor in tensors:
            if self._copy_error is not None:
                continue
            try:
                # The trainer unmerges adapters and frees gathered tensors within the block.
                self._collected.append((name, tensor.detach().clone()))
            # Out of memory, of a GPU mostly. Raised at the end of the block: the trainer, which has
            # no `finally`, would leave its adapters merged.
            except RuntimeError as error:
                self._copy_error = error
                self._collected.clear()
        return True

    def update(
        self, metadata: Iterable[Announced] | None, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        """Publish one whole set; the stream is read to its end in any case.

        Args:
            metadata: Every tensor of the stream. None: as `wtransfer.StreamSource.round`.
            tensors: The stream.

        Raises:
            WTransferError: The update failed; with ``on_error="keep"`` it is logged, unless the
                stream could not be read to its end: the trainer may have its adapters merged then.
        """
        self._num_updates += 1
        stream = _Stream(tensors)
        # Read within the round, which reads the stream whatever is wrong with it.
        announced = None if metadata is None else itertools.starmap(_param_meta, metadata)
        try:
            with self._stream.round(announced, stream):
                self._invite()
                report = self._publisher.publish(f"{LABEL}{self._num_updates}").raise_unless_ok()
        except WTransferError as error:
            if self._on_error == "raise" or not stream.ended:
                raise
            logger.error(  # noqa: TRY400  # the error names the cause; training goes on
                "update trl-%d failed, %s %s, %d update(s) behind: %s",
                self._num_updates,
                self._called,
                _state_after(error),
                self._num_updates - self._version(),
                error,
            )
        else:
            self._of_last = {
                "wtransfer/version": self._num_updates,
                "wtransfer/seconds": report.seconds["total"],
                "wtransfer/bytes": report.nbytes,
            }
        finally:
            version = self._version()
            _numbers.update(
                self._of_last
                | {
                    "wtransfer/version": version,
                    "wtransfer/stale_steps": self._num_updates - version,
                }
            )

    def _version(self) -> int:
        """Return the number of the update that vLLM holds; 0: of none."""
        if self._held is None:
            return int(self._of_last["wtransfer/version"])
        try:
            number = self._held().removeprefix(LABEL)
        except Exception as error:  # an engine that has ended hides no cause of that
            logger.warning("vLLM does not say which policy it holds: %s", error)
            return int(self._of_last["wtransfer/version"])
        return int(number) if number.isdecimal() else 0

    @property
    def version(self) -> str | None:
        """Label of the set that the publisher brings to workers that are behind."""
        return self._publisher.version

    def close(self) -> None:
        """Let vLLM leave."""
        self._publisher.close()

    def _invite(self) -> None:
        """Invite the server, which is idempotent: restarted, it has forgotten its publisher."""
        end = time.monotonic() + self._return_s
        while True:
            try:
                self._publisher.invite()
            except (PeerLostError, NoWorkersError, StallError):
                if time.monotonic() > end:
                    raise
                time.sleep(RETRY_S)
            else:
                return


class _Stream:
    """A stream that knows whether it was read to its end.

    Args:
        tensors: The stream.
    """

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._tensors = tensors
        self.ended = False

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._tensors
        self.ended = True


def _param_meta(name: str, dtype: str, shape: Sequence[int]) -> ParamMeta:
    return ParamMeta(name, getattr(torch, dtype), tuple(shape))


def _state_after(error: WTransferError) -> str:
    if isinstance(error, CommitError) and not error.restored:
        # Each update is sent to every worker: the next one brings them to one policy again.
        return "may serve two policies until an update succeeds"
    if isinstance(error, (PeerLostError, NoWorkersError)):
        return "was not reached"
    return "keeps its policy"
