"""One trainer's updates of one server: announced by TRL, read once, committed or refused whole."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import re
import secrets
import time
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from wtransfer import ParamMeta, Publisher, StreamSource
from wtransfer.errors import (
    CommitError,
    HostsError,
    NoWorkersError,
    PeerLostError,
    WTransferError,
)
from wtransfer.weight_sync.checkpoint_form import StreamForm
from wtransfer.weight_sync.http.client import HttpClient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from wtransfer.engines.interface import WeightSyncClient

logger = logging.getLogger(__name__)

DEADLINE_S = 30.0
"""The deadline of a `wtransfer.Publisher` that is given no other, in seconds."""
RETURN_S = 300.0
"""Longest wait of an update for a server that is restarted, in seconds: it loads a model."""

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


def metadata_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[ParamMeta]:
    """Return names, dtypes and shapes of tensors, none of which is kept."""
    return [ParamMeta(name, each.dtype, tuple(each.shape)) for name, each in tensors]


class PolicySync:
    """Publishes a policy to one vLLM, and tells whether that generated from it.

    Args:
        host: URL of a server, or a client of an engine.
        on_error: ``"raise"``, or ``"keep"`` to log a failed update and go on.
        held: Returns the label of the weights that vLLM holds. Default: the server is asked.
        **publisher: Arguments of `wtransfer.Publisher`.

    Raises:
        WTransferError: The server did not join.
    """

    def __init__(
        self,
        host: str | WeightSyncClient,
        *,
        on_error: OnError,
        held: Callable[[], str] | None = None,
        **publisher: Any,
    ) -> None:
        deadline_s = publisher.get("deadline_s", DEADLINE_S)
        self._called = "the server" if isinstance(host, str) else "the engine"
        token = publisher.get("host_token") or publisher.get("token")
        self._held = held or functools.partial(_label_at, str(host), token, deadline_s)
        self._on_error = on_error
        # Of no other run: the label of an equal number would be taken for this run's.
        self._run = f"trl-{secrets.token_hex(4)}-"
        self._num_updates = 0
        self._of_last = {"wtransfer/seconds": 0.0, "wtransfer/bytes": 0}
        """Numbers of the last update that succeeded."""
        self._booked: str | None = None
        """Label that generations are booked under: the last of this run that vLLM held after an
        update; None: of none yet."""
        self._since = 0.0
        """When the last generation began, in monotonic seconds."""
        self._tags: list[str] = []
        """Weights of the spans of a generation's answers; empty: of an answer without spans."""
        self._collected: list[tuple[str, torch.Tensor]] | None = None
        self._copy_error: RuntimeError | None = None
        self.form: StreamForm | None = None
        """The form in which a block's tensors are published; None: as they are."""
        self._stream = StreamSource(deadline_s)
        # The trainer has bars of its own, and the engine is there as long as the trainer is.
        defaults = {"progress": False, "return_s": RETURN_S if isinstance(host, str) else None}
        self._publisher = Publisher(self._stream, hosts=[host], **defaults | publisher)

    @contextlib.contextmanager
    def collect(self) -> Iterator[None]:
        """Publish at the end of the block what was added within it; nothing if it raises.

        Raises:
            RuntimeError: A tensor could not be copied.
            WTransferError: As `update`, or as `StreamForm.announce`.
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
        form = self.form or StreamForm(None)
        metadata = [
            (meta.name, str(meta.dtype).removeprefix("torch."), meta.shape)
            for meta in form.announce(metadata_of(collected))
        ]
        self.update(metadata, form.of(collected))

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
        label = f"{self._run}{self._num_updates}"
        stream = _Stream(tensors)
        # Read within the round, which reads the stream whatever is wrong with it.
        announced = None if metadata is None else itertools.starmap(_param_meta, metadata)
        try:
            with self._stream.round(announced, stream):
                report = self._publisher.publish(label).raise_unless_ok()
        except Exception as error:
            num_behind = self._book(self._ask())
            is_kept = self._on_error == "keep" and isinstance(error, WTransferError)
            if not is_kept or not stream.ended:
                raise
            logger.error(  # noqa: TRY400  # the error names the cause; training goes on
                "update %s failed, %s %s, %d update(s) behind: %s",
                label,
                self._called,
                _state_after(error),
                num_behind,
                error,
            )
        else:
            self._of_last = {
                "wtransfer/seconds": report.seconds["total"],
                "wtransfer/bytes": report.nbytes,
            }
            self._book(label)

    def _book(self, held: str) -> int:
        """Enter the label that vLLM holds after an update; return how many updates it is behind."""
        version = self._show(held)
        if version:
            self._booked = held
        return self._num_updates - version

    def _show(self, held: str) -> int:
        """Enter the label that vLLM holds in the numbers; return its number, 0: of another run."""
        run, _, number = held.rpartition("-")
        version = int(number) if f"{run}-" == self._run else 0
        stale = {"wtransfer/version": version, "wtransfer/stale_steps": self._num_updates - version}
        _numbers.update(self._of_last | stale)
        return version

    def _ask(self) -> str:
        """Return the label of the weights that vLLM holds; empty where it does not say."""
        try:
            return self._held()
        except Exception as error:  # an engine that has ended hides no cause of that
            logger.warning("%s does not say which policy it holds: %s", self._called, error)
            return ""

    def begin_generation(self) -> str | None:
        """Return why the server cannot generate from the last published set; None: it can."""
        self._tags.clear()
        self._since = time.monotonic()
        return self._mismatch()

    def took(self, answer: Mapping[str, Any]) -> None:
        """Note the weights that vLLM names in an answer, for each of its choices."""
        for choice in answer.get("choices", ()):
            spans = choice.get("weight_versions") or [{"version": ""}]
            self._tags += [span["version"] for span in spans]

    def end_generation(self) -> str | None:
        """Return why tokens since `begin_generation` may be of other weights; None: none are."""
        if self._booked is None:
            return None
        if self._tags and "" not in self._tags:
            of_booked = re.compile(rf"{self._booked}@[0-9a-f]+")
            others = sorted({tag for tag in self._tags if not of_booked.fullmatch(tag)})
            return f"generated by {', '.join(others)}, expected {self._booked}" if others else None
        if (mismatch := self._mismatch()) is not None:
            return mismatch
        # The label is there again where the publisher has brought back a server that was restarted,
        # or loaded its checkpoint. It knows of that since before the label was there.
        workers = self._publisher.workers()
        held_s = min((each.since_s for each in workers if each.host is not None), default=0.0)
        if held_s <= time.monotonic() - self._since:
            return f"has lost its weights while it generated, expected {self._booked}"
        return None

    def _mismatch(self) -> str | None:
        if self._booked is None:
            return None
        held = self._ask()
        self._show(held)
        if held == self._booked:
            return None
        said = f"holds {held}" if held else "does not say which weights it holds"
        return f"{said}, expected {self._booked}"

    @property
    def version(self) -> str | None:
        """Label of the set that the publisher brings to workers that are behind."""
        return self._publisher.version

    def close(self) -> None:
        """Let vLLM leave."""
        self._publisher.close()


def _label_at(url: str, token: str | None, timeout_s: float) -> str:
    return str(HttpClient(url, token, timeout_s=timeout_s).weight_info()["weight_version"])


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


def _state_after(error: Exception) -> str:
    if isinstance(error, CommitError) and not error.restored:
        # Each update is sent to every worker: the next one brings them to one policy again.
        return "may serve two policies until an update succeeds"
    if isinstance(error, (HostsError, PeerLostError, NoWorkersError)):
        return "was not reached"
    return "keeps its policy"
