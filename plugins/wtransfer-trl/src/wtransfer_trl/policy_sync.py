"""One trainer's updates of one server: announced by TRL, read once, committed or refused whole."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from wtransfer import ParamMeta, Publisher, StreamSource
from wtransfer.errors import CommitError, NoWorkersError, PeerLostError, WTransferError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

logger = logging.getLogger(__name__)

RETRY_S = 0.5
DEADLINE_S = 30.0
"""The deadline of a `wtransfer.Publisher` that is given no other, in seconds."""

Announced = tuple[str, str, "Sequence[int]"]
"""Name, dtype as vLLM spells it, and shape."""

OnError = Literal["raise", "keep"]

_numbers: dict[str, float] = {}


def check_on_error(value: str) -> None:
    """Refuse what is no `OnError`.

    Raises:
        ValueError: `value` is neither.
    """
    if value not in get_args(OnError):
        raise ValueError(f"on_error is {value!r}, expected 'raise' or 'keep'")


def last_numbers() -> dict[str, float]:
    """Return the numbers of this process's updates, by the names that they have in a log."""
    return dict(_numbers)


class PolicySync:
    """Publishes a policy to one server.

    Args:
        url: The server's.
        on_error: ``"raise"``, or ``"keep"`` to log a failed update and go on.
        return_s: Longest wait for a server that does not answer, in seconds.
        **publisher: Arguments of `wtransfer.Publisher`.

    Raises:
        WTransferError: The server did not join.
    """

    def __init__(self, url: str, *, on_error: OnError, return_s: float, **publisher: Any) -> None:
        self._on_error = on_error
        self._return_s = return_s
        self._num_updates = self._num_failed = 0
        self._collected: list[tuple[str, torch.Tensor]] | None = None
        self._stream = StreamSource(publisher.get("deadline_s", DEADLINE_S))
        # No progress by default: the trainer has bars of its own.
        publisher = {"progress": False, **publisher}
        self._publisher = Publisher(self._stream, hosts=[url], **publisher)
        _numbers.clear()

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Publish at the end of the block what was added within it; nothing if it raises."""
        if self._collected is not None:
            raise RuntimeError("a weight update is under way; leave its block first")
        collected: list[tuple[str, torch.Tensor]] = []
        self._collected = collected
        try:
            yield
        finally:
            self._collected = None
        metadata = [
            (name, str(tensor.dtype).removeprefix("torch."), tensor.shape)
            for name, tensor in collected
        ]
        self.update(metadata, collected)

    def add(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> bool:
        """Keep copies for the block's update; False outside of a block."""
        if self._collected is None:
            return False
        # Copies: the trainer unmerges adapters and frees gathered tensors within the block.
        self._collected.extend((name, tensor.detach().clone()) for name, tensor in tensors)
        return True

    def update(
        self, metadata: Iterable[Announced] | None, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        """Publish one whole set; the stream is read to its end in any case.

        Args:
            metadata: Every tensor of the stream. None: as `wtransfer.StreamSource.round`.
            tensors: The stream.

        Raises:
            WTransferError: The update failed; with ``on_error="keep"`` it is logged.
        """
        self._num_updates += 1
        announced = None
        if metadata is not None:
            announced = [
                ParamMeta(name, getattr(torch, dtype), tuple(shape))
                for name, dtype, shape in metadata
            ]
        try:
            with self._stream.round(announced, tensors):
                self._invite()
                report = self._publisher.publish(f"trl-{self._num_updates}").raise_unless_ok()
        except WTransferError as error:
            self._num_failed += 1
            _numbers["wtransfer/stale_steps"] = self._num_failed
            if self._on_error == "raise":
                raise
            # Each update is sent to every worker: the next one brings those to one policy again
            # that a commit has left on two.
            is_mixed = isinstance(error, CommitError) and not error.restored
            logger.error(  # noqa: TRY400  # its sentence says it; training goes on
                "update trl-%d failed, the server %s, %d step(s) old: %s",
                self._num_updates,
                "may serve two policies until an update succeeds"
                if is_mixed
                else "keeps its policy",
                self._num_failed,
                error,
            )
        else:
            self._num_failed = 0
            _numbers.update(
                {
                    "wtransfer/version": self._num_updates,
                    "wtransfer/seconds": report.seconds["total"],
                    "wtransfer/bytes": report.nbytes,
                    "wtransfer/stale_steps": 0,
                }
            )

    def close(self) -> None:
        """Let the server leave."""
        self._publisher.close()

    def _invite(self) -> None:
        """Invite the server, which is idempotent: restarted, it has forgotten its publisher."""
        end = time.monotonic() + self._return_s
        while True:
            try:
                self._publisher.invite()
            except (PeerLostError, NoWorkersError):
                if time.monotonic() > end:
                    raise
                time.sleep(RETRY_S)
            else:
                return
