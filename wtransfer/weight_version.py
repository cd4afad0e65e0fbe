"""Version of the weights that this process computes with: keeps KV cache from outliving them.

Code that changes a model enters the change here, as a part of it: a session when it commits. Code
that keeps KV cache reads the version here: the fence of specs and connectors
(`wtransfer.kv.fence`). So neither room knows the other, and no user has to tell the one of the
other.

The record is no observer. An observer may fail and be passed over; the version is read by code that
must not serve unverified KV cache, and while a model changes there is no version.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import os
import re
import secrets
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import xxhash

from wtransfer.manifest import local_fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import torch
    from torch import nn

    from wtransfer.weights import WeightSource

logger = logging.getLogger(__name__)


class WeightVersion(NamedTuple):
    """Version of the weights that a piece of KV cache was computed with."""

    fingerprint: str
    """Identity of the weights: equal everywhere, and again after a way back to them."""
    epoch: int
    """Number of changes of this process's weights. Equal versions, read at two times in one
    process, mean that nothing has changed in between, not even there and back. Above
    `COUNT_BITS` stands a number of the process."""


COUNT_BITS = 32
"""Bits of an epoch that count changes. The other bits tell processes apart: the successor of a
process that has died must not have its versions."""


WeightVersions = tuple[WeightVersion, ...]
"""Weight version of each rank of an instance, in order of rank."""


def known_versions(versions: Iterable[Sequence[str | int] | None]) -> WeightVersions | None:
    """Return the weight versions of all ranks; None if that of any rank is not known.

    Args:
        versions: One for each rank; None where a rank's weights are changing. Versions that have
            travelled between processes may be plain lists.
    """
    given = list(versions)
    known = [WeightVersion(*version) for version in given if version is not None]  # type: ignore[arg-type]
    return tuple(known) if known and len(known) == len(given) else None


def instance_fingerprint(versions: WeightVersions) -> str:
    """Return the identity of the weights that the ranks of an instance hold together.

    Beyond the first layer, the output of one rank depends on the weights of all.
    """
    names = [version.fingerprint for version in versions]
    if len(set(names)) == 1:
        return names[0]
    return "ranks:" + xxhash.xxh3_128_hexdigest("\0".join(names).encode())


_numbers = itertools.count(1)
EMPTY_LABEL = "empty"
"""Label by which a serving engine tells that its weights have no version."""
FINGERPRINT = re.compile(r"(local:)?[0-9a-f]{32}")
"""Form of a fingerprint."""


class ProcessWeights:
    """The weights of all models of one process, under one name.

    KV cache is not marked with the model that computed it. Where a process holds several models (a
    draft beside its target), a change of any of them is therefore a change of all, and unless their
    weights are equal the name is this process's own: no other could tell which model has which.
    """

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget all models; this process's KV cache has a name that no other process knows."""
        # Reentrant: the collector may find a forgotten session at any time, on the same thread.
        self._lock = threading.RLock()
        self._models: dict[HeldWeights, str | None] = {}
        self._leaving: set[HeldWeights] = set()
        self._own = local_fingerprint()
        self._unwatched: dict[int, str] = {}
        self._vouches: dict[int, Vouch] = {}
        self._ends: dict[int, _End] = {}
        self._gone: deque[_End] = deque()
        self._named: WeightVersion | None = None
        self._num_withheld = 0
        self._epoch = secrets.randbits(31) << COUNT_BITS
        self._renew_version()

    def version(self) -> WeightVersion | None:
        """Return the version of this process's weights at this moment; None while they change.

        Cost: 0.1 us; takes no lock, unless a model is gone.
        """
        if self._gone:
            with self._lock:
                self._forget_gone()
        return self._version

    @contextlib.contextmanager
    def withheld(self) -> Iterator[None]:
        """Have no version for a while, though nothing changes: work done meanwhile does not count.

        For the thread that owns the models.
        """
        with self._lock:
            self._num_withheld += 1
            self._show()
        try:
            yield
        finally:
            with self._lock:
                # The counter begins anew after a fork in between.
                self._num_withheld = max(0, self._num_withheld - 1)
                self._show()

    def hold(self, fingerprint: str, model: object = None) -> HeldWeights:
        """Enter one more model. A vouched fingerprint stays its name until the model changes.

        Args:
            fingerprint: Identity of its weights.
            model: The model itself, to recognise it after the session was closed; not kept.
        """
        held = HeldWeights(self, model)
        with self._lock:
            self._forget_gone()
            self._models[held] = fingerprint
            self._unwatched.pop(held.number, None)
            vouch = self._vouches.pop(held.number, None)
            if vouch is not None:
                # Nothing has changed yet: the fingerprint stands for the vouched weights.
                held.vouch = (fingerprint, vouch)
            self._renew_version()
        return held

    def vouch(
        self, model: nn.Module | Mapping[str, torch.Tensor] | WeightSource, *labels: object
    ) -> None:
        """Digest a model that no session watches over, and name KV cache by its fingerprint.

        For a process that loads weights once and serves them. The name is the fingerprint that a
        worker has after a `Publisher` of this model has sent them, so KV cache is shared with every
        instance that has equal weights, loaded or received. The name is right only for as long as
        the model does not change: after a change call `vouch` again, or `weights_replaced`. A
        `WorkerSession` of the model keeps the name until its first commit.

        Args:
            model: As a `Publisher` takes it; not kept: when the model is gone, so is its name.
            *labels: Refused: a label does not identify the weights.

        Raises:
            TypeError: A label was given, or the model cannot be referenced weakly (a plain dict).
            ValueError: A session watches over the model, or this process has vouched for another
                model with other weights: KV cache is not marked with its model, so two engines in
                one process would find each other's. While both models are there, KV cache of either
                is shared with no other process; the first one's name counts again when the refused
                model is gone.
            ManifestError: The model names something that no update can hold.
            SourceError: The model cannot be read.

        Cost: one pass over the weights, at the speed of the digest. A sharded model is gathered
        for it: every rank must take part. Until the call returns, there is no version.
        """
        if labels or isinstance(model, str):
            raise TypeError(
                "vouch() digests the model and takes no label: write process_weights.vouch(model); "
                "where the fingerprint of its weights is known, "
                "process_weights.vouch_by_fingerprint(fingerprint, model)"
            )
        vouch = self.vouch_later(model)
        try:
            # By name: this module lies below the engines', and is imported without torch.
            identity = importlib.import_module("wtransfer.weight_sync.identity")
            fingerprint = identity.module_fingerprint(model)
        except BaseException:
            vouch.settle(local_fingerprint())
            raise
        vouched = {each.fingerprint for each in list(self._vouches.values()) if each is not vouch}
        if vouched - {fingerprint, None}:
            vouch.settle(local_fingerprint())
            text = (
                "this process has vouched for another model, with other weights; KV cache is not "
                "marked with its model: run one engine per process. Until the model that is "
                "refused is gone, KV cache of this process, the other model's too, has a name that "
                "no other process knows: nothing is shared. For a draft model beside its target, "
                "write process_weights.vouch_by_fingerprint(fingerprint, draft)"
            )
            # Also where the caller takes the error for an answer: hits cease without a sign.
            logger.error("%s", text)
            raise ValueError(text)
        vouch.settle(fingerprint)

    def vouch_by_fingerprint(self, fingerprint: str, model: object) -> None:
        """Name KV cache by a known fingerprint of a model's weights.

        Otherwise as `vouch`.

        Args:
            fingerprint: As `wtransfer.manifest.fingerprint` makes it, of the weights that the model
                has; or of `wtransfer.manifest.local_fingerprint`: shared with no other process.
            model: The model, or another object that lives as long and stands for it; not kept.

        Raises:
            ValueError: Not a fingerprint, or a session watches over the model.
            TypeError: The model cannot be referenced weakly.
        """
        _check_fingerprint(fingerprint)
        self.vouch_later(model).settle(fingerprint)

    def vouch_later(self, model: object) -> Vouch:
        """Announce a fingerprint that is being computed; until it settles there is no version.

        Any news of the model meanwhile counts instead: a commit, `weights_replaced` or another
        vouch.

        Args:
            model: As in `vouch_by_fingerprint`.

        Raises:
            ValueError: A session watches over the model.
            TypeError: The model cannot be referenced weakly.
        """
        vouch = Vouch(self)
        with self._lock:
            if self._watching(model):
                raise ValueError(
                    f"this {type(model).__name__} is watched over by a session, which says itself "
                    "what it consists of; no other caller can vouch for it"
                )
            self._vouch_as(vouch, model)
        return vouch

    def weights_replaced(self, model: object) -> None:
        """State that a model got other weights by other means than a session's commit.

        KV cache of the model gets a new name, of this process only. Call it between two steps of
        the model. Where a session watches over the model, `WorkerSession.weights_lost` tells its
        publishers as well.

        Args:
            model: As in `vouch_by_fingerprint`; need not have been entered before.

        Raises:
            TypeError: The model cannot be referenced weakly.
        """
        vouch = Vouch(self)
        vouch.fingerprint = local_fingerprint()
        with self._lock:
            watched = self._watching(model)
            if not watched:
                self._vouch_as(vouch, model)
                return
            for held in watched:
                # None: the model changes right now, and is named by the outcome of the change.
                if (present := self._models.get(held)) is not None:
                    held.vouch = (present, vouch)
            self._renew_version()

    def _watching(self, model: object) -> list[HeldWeights]:
        # Of a list, here and below: the collector may take a forgotten session out meanwhile.
        return [held for held in list(self._models) if held.is_of(model)]

    def _vouch_as(self, vouch: Vouch, model: object) -> None:
        number = self._await_end(model)
        self._unwatched.pop(number, None)
        self._vouches[number] = vouch
        self._renew_version()

    def _settle(self, vouch: Vouch, fingerprint: str) -> None:
        with self._lock:
            if vouch.fingerprint is not None or not self._counts(vouch):
                return
            vouch.fingerprint = fingerprint
            self._renew_version()

    def _counts(self, vouch: Vouch) -> bool:
        by_sessions = [held.vouch[1] for held in list(self._models) if held.vouch is not None]
        return any(each is vouch for each in [*self._vouches.values(), *by_sessions])

    def _enter(self, held: HeldWeights, fingerprint: str | None) -> None:
        with self._lock:
            if held not in self._models:
                return  # closed, or another process's
            self._models[held] = fingerprint
            if fingerprint is not None and held in self._leaving:
                self._drop(held)
            else:
                self._renew_version()

    def _leave(self, held: HeldWeights) -> None:
        with self._lock:
            if held not in self._models:
                return
            if self._models[held] is None:
                self._leaving.add(held)  # once the model has ceased to change
            else:
                self._drop(held)

    def _drop(self, held: HeldWeights) -> None:
        model = held.model()
        # First: it may show a version, for which this model still counts.
        if model is not None:
            self._await_end(model)
        del self._models[held]
        self._leaving.discard(held)
        # No session watches over this model any more: its KV cache gets a name that no other
        # process knows.
        if model is not None or not held.is_observable:
            self._unwatched[held.number] = local_fingerprint()
        self._renew_version()

    def _await_end(self, model: object) -> int:
        """Note when a model will be gone; return its number."""
        self._forget_gone()  # its number may have been theirs
        end = _End(model, self._gone.append)
        end.number = id(model)
        self._ends[end.number] = end
        return end.number

    def _forget_gone(self) -> None:
        """Drop collected models that no session watched over: they compute nothing any more.

        Where a signal handler strikes on the way, the next call does all of it again.
        """
        ends = list(self._gone)
        if not ends:
            return
        for end in ends:
            for names in (self._ends, self._unwatched, self._vouches):
                names.pop(end.number, None)
        self._renew_version()
        for end in ends:
            with contextlib.suppress(ValueError):
                self._gone.remove(end)

    def _renew_version(self) -> None:
        self._epoch += 1
        epoch = self._epoch
        names = self._names()
        known = [each for each in names if each is not None]
        version = WeightVersion(self._joined(known), epoch) if len(known) == len(names) else None
        # Else the collector has run in between, and a newer version is already set.
        if self._epoch == epoch:
            self._named = version
            self._show()

    def _show(self) -> None:
        self._version: WeightVersion | None = None if self._num_withheld else self._named

    def _names(self) -> list[str | None]:
        """Return the name of each model; None where it changes, or is being computed."""
        watched = [held.name(self._models.get(held)) for held in list(self._models)]
        vouched = [vouch.fingerprint for vouch in list(self._vouches.values())]
        return [*watched, *self._unwatched.values(), *vouched]

    def _joined(self, names: list[str]) -> str:
        if len(set(names)) < len(("one", "another")):
            # Models of equal weights: whichever computes, it is with these.
            return names[0] if names else self._own
        # In order of entry: which model has which weights matters.
        together = "\0".join([self._own, *names])
        return "several:" + xxhash.xxh3_128_hexdigest(together.encode())


class _End(weakref.ref[object]):
    """Tells that a model is gone by a callback of C alone, as `deque.append`.

    A callback in Python is a place for signal handlers, whose exception is lost there, and with it
    what the callback was to do.
    """

    number: int
    """The model's."""


class HeldWeights:
    """The weights of one model; made by `ProcessWeights.hold`."""

    def __init__(self, process: ProcessWeights, model: object) -> None:
        self._process = process
        self._model: Callable[[], object] | None = None
        self.vouch: tuple[str, Vouch] | None = None
        """Fingerprint that the session enters, and the vouch that names the same weights."""
        self.number = -next(_numbers)
        """Tells models apart, as long as they live."""
        # The end of a plain dictionary, say, cannot be observed.
        with contextlib.suppress(TypeError):
            self._model = weakref.ref(model)
            self.number = id(model)

    def name(self, fingerprint: str | None) -> str | None:
        """Return the name of the weights that the session calls by this fingerprint."""
        if self.vouch is not None and self.vouch[0] == fingerprint:
            return self.vouch[1].fingerprint
        return fingerprint

    def is_of(self, model: object) -> bool:
        """Return whether this is the model, and can be told from others."""
        return self._model is not None and self._model() is model

    @property
    def is_observable(self) -> bool:
        """Whether anything tells the model's end."""
        return self._model is not None

    def model(self) -> object:
        """Return the model; None: it is gone, or its end cannot be observed."""
        return self._model and self._model()

    @contextlib.contextmanager
    def changing(self, outcome: Callable[[], str]) -> Iterator[None]:
        """Withhold the model's name while it changes.

        Args:
            outcome: Returns the identity of the model's weights afterwards, also after a failure.
        """
        self.change()
        try:
            yield
        finally:
            self.settle(outcome())

    def change(self) -> None:
        """Withhold the model's name until `settle`."""
        self._process._enter(self, None)  # noqa: SLF001  # the two are one thing

    def settle(self, fingerprint: str) -> None:
        """Set the model's identity from now on.

        Args:
            fingerprint: Identity of its weights.
        """
        self._process._enter(self, fingerprint)  # noqa: SLF001

    def close(self) -> None:
        """Forget the model; a second call does nothing."""
        self._process._leave(self)  # noqa: SLF001


class Vouch:
    """A fingerprint that is being computed; made by `ProcessWeights.vouch_later`."""

    def __init__(self, process: ProcessWeights) -> None:
        self._process = process
        self.fingerprint: str | None = None
        """The fingerprint; None until it is known."""

    def settle(self, fingerprint: str) -> None:
        """State the fingerprint; does nothing where the model has been given another name since.

        May be called from any thread.

        Args:
            fingerprint: As in `ProcessWeights.vouch_by_fingerprint`.

        Raises:
            ValueError: Not a fingerprint.
        """
        _check_fingerprint(fingerprint)
        self._process._settle(self, fingerprint)  # noqa: SLF001


def _check_fingerprint(fingerprint: str) -> None:
    if not isinstance(fingerprint, str) or not FINGERPRINT.fullmatch(fingerprint):
        raise ValueError(
            f"{fingerprint!r:.80} is no fingerprint: expected 32 hexadecimal digits, or 'local:' "
            "and 32 of them; process_weights.vouch(model) works one out"
        )


process_weights = ProcessWeights()
"""Weights of this process; a forked child begins anew, for its models may become others."""

os.register_at_fork(after_in_child=process_weights.begin_anew)
