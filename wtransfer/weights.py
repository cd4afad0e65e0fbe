"""Which weights this process computes with: what keeps KV cache from outliving them.

Whoever changes a model enters it here, as a part of the change: a session when it commits. Whoever
keeps KV cache reads it here: the fence of the offloading specs and of the connectors. So neither
room knows the other, and no user has to tell the one of the other.

It is no observer. An observer may fail and be passed over; this is read by those who must not serve
what they are not sure of, and while a model changes it says that nothing is sure.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from wtransfer.manifest import local_fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class WeightsStamp(NamedTuple):
    """What a piece of KV cache was computed with."""

    fingerprint: str
    """Identity of the weights: equal everywhere, and again after a way back to them."""
    epoch: int
    """How often this process's weights have changed. Equal stamps, read at two times in one
    process, mean that nothing has changed in between, not even there and back."""


class ProcessWeights:
    """The weights of all models of one process, under one name.

    KV cache is not marked with the model that computed it. Where a process holds several models (a
    draft beside its target), a change of any of them is therefore a change of all.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._models: dict[HeldWeights, str | None] = {}
        self._own = local_fingerprint()
        self._epoch = 0
        self._stamp: WeightsStamp | None = WeightsStamp(self._own, 0)

    def stamp(self) -> WeightsStamp | None:
        """Return what this process computes with at this moment; None while that changes.

        Cost: 0.1 us; takes no lock.
        """
        return self._stamp

    def hold(self, fingerprint: str) -> HeldWeights:
        """Enter one more model.

        Args:
            fingerprint: Identity of its weights.
        """
        held = HeldWeights(self)
        self._enter(held, fingerprint)
        return held

    def _enter(self, held: HeldWeights, fingerprint: str | None) -> None:
        with self._lock:
            self._models[held] = fingerprint
            self._restamp()

    def _leave(self, held: HeldWeights) -> None:
        with self._lock:
            if self._models.pop(held, None) is not None:
                # Nobody watches over this model any more: what it computes has a new name.
                self._own = local_fingerprint()
                self._restamp()

    def _restamp(self) -> None:
        self._epoch += 1
        names = list(self._models.values())
        if None in names:
            self._stamp = None
        else:
            self._stamp = WeightsStamp(self._joined([each for each in names if each]), self._epoch)

    def _joined(self, names: list[str]) -> str:
        if len(names) == 1:
            return names[0]
        if not names:
            return self._own
        return "several:" + xxhash.xxh3_128_hexdigest("\0".join(sorted(names)).encode())


class HeldWeights:
    """The weights of one model; made by `ProcessWeights.hold`."""

    def __init__(self, process: ProcessWeights) -> None:
        self._process = process

    @contextlib.contextmanager
    def changing(self, outcome: Callable[[], str]) -> Iterator[None]:
        """Hold the model to have no name while it changes.

        Args:
            outcome: Returns the identity of what it consists of afterwards, however that went.
        """
        self._process._enter(self, None)  # noqa: SLF001  # the two are one thing
        try:
            yield
        finally:
            self.settle(outcome())

    def settle(self, fingerprint: str) -> None:
        """State what the model consists of from now on.

        Args:
            fingerprint: Identity of its weights.
        """
        self._process._enter(self, fingerprint)  # noqa: SLF001

    def close(self) -> None:
        """Forget the model; a second call does nothing."""
        self._process._leave(self)  # noqa: SLF001


process_weights = ProcessWeights()
"""Those of this process."""
