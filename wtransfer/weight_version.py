"""Which weights this process computes with: what keeps KV cache from outliving them.

Whoever changes a model enters it here, as a part of the change: a session when it commits. Whoever
keeps KV cache reads it here: the fence of specs and connectors (`wtransfer.kv.fence`). So neither
room knows the other, and no user has to tell the one of the other.

It is no observer. An observer may fail and be passed over; this is read by those who must not serve
what they are not sure of, and while a model changes it says that nothing is sure.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import logging
import os
import re
import secrets
import threading
import weakref
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
    """What a piece of KV cache was computed with."""

    fingerprint: str
    """Identity of the weights: equal everywhere, and again after a way back to them."""
    epoch: int
    """How often this process's weights have changed. Equal versions, read at two times in one
    process, mean that nothing has changed in between, not even there and back. Above
    `COUNT_BITS` stands a number of the process."""


COUNT_BITS = 32
"""Bits of an epoch that count. The others tell processes apart: one that takes the place of a
process that has died must not have its versions."""


WeightVersions = tuple[WeightVersion, ...]
"""What each rank of an instance computes with, in order of rank."""


def known_versions(versions: Iterable[Sequence[str | int] | None]) -> WeightVersions | None:
    """Return what all ranks compute with; None if that is not known of every one of them.

    Args:
        versions: One for each rank; None where a rank's weights are changing. As they travel
            between processes they may have become plain lists.
    """
    given = list(versions)
    known = [WeightVersion(*version) for version in given if version is not None]  # type: ignore[arg-type]
    return tuple(known) if known and len(known) == len(given) else None


def instance_fingerprint(versions: WeightVersions) -> str:
    """Return the identity of the weights that the ranks of an instance hold together.

    Beyond the first layer, what one rank computes depends on the weights of all.
    """
    names = [version.fingerprint for version in versions]
    if len(set(names)) == 1:
        return names[0]
    return "ranks:" + xxhash.xxh3_128_hexdigest("\0".join(names).encode())


_numbers = itertools.count(1)
_FINGERPRINT = re.compile(r"(local:)?[0-9a-f]{32}")


class ProcessWeights:
    """The weights of all models of one process, under one name.

    KV cache is not marked with the model that computed it. Where a process holds several models (a
    draft beside its target), a change of any of them is therefore a change of all, and the name is
    this process's own: no other could tell which model has which weights.
    """

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Know of no model; what this process computes has a name that nobody knows."""
        # Taken again by its own thread: the collector may find a forgotten session at any time.
        self._lock = threading.RLock()
        self._models: dict[HeldWeights, str | None] = {}
        self._leaving: set[HeldWeights] = set()
        self._own = local_fingerprint()
        self._unwatched: dict[int, str] = {}
        self._vouches: dict[int, Vouch] = {}
        self._named: WeightVersion | None = None
        self._num_withheld = 0
        self._epoch = secrets.randbits(31) << COUNT_BITS
        self._renew_version()

    def version(self) -> WeightVersion | None:
        """Return what this process computes with at this moment; None while that changes.

        Cost: 0.1 us; takes no lock.
        """
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
                # A fork in between has begun anew.
                self._num_withheld = max(0, self._num_withheld - 1)
                self._show()

    def hold(self, fingerprint: str, model: object = None) -> HeldWeights:
        """Enter one more model. What it was vouched for stays its name until it changes.

        Args:
            fingerprint: Identity of its weights.
            model: The model itself, to know it again after it was left alone. It is not kept.
        """
        held = HeldWeights(self, model)
        with self._lock:
            self._models[held] = fingerprint
            self._unwatched.pop(held.number, None)
            vouch = self._vouches.pop(held.number, None)
            if vouch is not None:
                # Nothing has changed yet: the fingerprint stands for what was vouched for.
                held.vouch = (fingerprint, vouch)
            self._renew_version()
        return held

    def vouch(
        self, model: nn.Module | Mapping[str, torch.Tensor] | WeightSource, *labels: object
    ) -> None:
        """Digest a model that no session watches over, and name KV cache by what it consists of.

        For a process that loads weights once and serves them. The name is the fingerprint that a
        worker has after a `Publisher` of this model has sent them, so KV cache is shared with every
        instance that has equal weights, loaded or received. This is right only for as long as the
        model does not change: after a change call `vouch` again, or `weights_replaced`. A
        `WorkerSession` of the model keeps the name until its first commit.

        Args:
            model: As a `Publisher` takes it. It is not kept; when it is gone, so is its name.
            *labels: Refused: a label does not say what the weights are.

        Raises:
            TypeError: A label was given, or the model cannot be referenced weakly (a plain dict).
            ValueError: A session watches over the model, or this process has vouched for another
                model with other weights: KV cache is not marked with its model, so two engines in
                one process would find each other's. While both models are there, KV cache of either
                is shared with no other process; the first one's name counts again when the refused
                model is gone.
            ManifestError: The model names something that no update can hold.
            SourceError: It cannot be read.

        Cost: one pass over the weights, at the speed of the digest. A sharded model is gathered
        for it, which every rank must take part in. Until it returns, there is no version.
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
        """Name KV cache by the fingerprint of a model's weights, where the caller knows it.

        Otherwise as `vouch`.

        Args:
            fingerprint: As `wtransfer.manifest.fingerprint` makes it, of the weights that the model
                has; or of `wtransfer.manifest.local_fingerprint`: shared with no other process.
            model: The model, or another object that lives as long and stands for it. It is not
                kept.

        Raises:
            ValueError: That is no fingerprint, or a session watches over the model.
            TypeError: The model cannot be referenced weakly.
        """
        _check_fingerprint(fingerprint)
        self.vouch_later(model).settle(fingerprint)

    def vouch_later(self, model: object) -> Vouch:
        """Announce a fingerprint that is being worked out; until then there is no version.

        Whatever the process learns of the model meanwhile counts: a commit, `weights_replaced` or
        another vouch.

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
                    "what it consists of; nobody else can vouch for it"
                )
            self._vouch_as(vouch, model)
        return vouch

    def weights_replaced(self, model: object) -> None:
        """State that a model got other weights by other means than a session's commit.

        What it computes gets a new name, of this process only. Call it between two steps of the
        model. Where a session watches over it, `WorkerSession.weights_lost` tells its publishers
        as well.

        Args:
            model: As in `vouch_by_fingerprint`, whether or not anything was said of it before.

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
                # None: it changes right now, and is named by what comes of that.
                if (present := self._models.get(held)) is not None:
                    held.vouch = (present, vouch)
            self._renew_version()

    def _watching(self, model: object) -> list[HeldWeights]:
        # Of a list, here and below: the collector may take a forgotten session out meanwhile.
        return [held for held in list(self._models) if held.is_of(model)]

    def _vouch_as(self, vouch: Vouch, model: object) -> None:
        number = id(model)
        # Not at the end of the process: nobody asks then.
        weakref.finalize(model, self._forget, number).atexit = False
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
                self._leaving.add(held)  # once it has ceased to change
            else:
                self._drop(held)

    def _drop(self, held: HeldWeights) -> None:
        del self._models[held]
        self._leaving.discard(held)
        # Nobody watches over this model any more: what it computes has a name that nobody knows.
        if held.when_gone(functools.partial(self._forget, held.number)):
            self._unwatched[held.number] = local_fingerprint()
        self._renew_version()

    def _forget(self, number: int) -> None:
        """Hear that a model which nobody watched over is gone: it computes nothing any more."""
        with self._lock:
            unwatched = self._unwatched.pop(number, None)
            vouch = self._vouches.pop(number, None)
            if unwatched is not None or vouch is not None:
                self._renew_version()

    def _renew_version(self) -> None:
        self._epoch += 1
        epoch = self._epoch
        names = self._names()
        known = [each for each in names if each is not None]
        version = WeightVersion(self._joined(known), epoch) if len(known) == len(names) else None
        # Else the collector has come in between, and what it has found is the news.
        if self._epoch == epoch:
            self._named = version
            self._show()

    def _show(self) -> None:
        self._version: WeightVersion | None = None if self._num_withheld else self._named

    def _names(self) -> list[str | None]:
        """Return the name of each model; None where it changes, or is being worked out."""
        watched = [held.name(self._models.get(held)) for held in list(self._models)]
        vouched = [vouch.fingerprint for vouch in list(self._vouches.values())]
        return [*watched, *self._unwatched.values(), *vouched]

    def _joined(self, names: list[str]) -> str:
        if len(names) < len(("one", "another")):
            return names[0] if names else self._own
        # In the order in which they came: which model has which weights matters.
        together = "\0".join([self._own, *names])
        return "several:" + xxhash.xxh3_128_hexdigest(together.encode())


class HeldWeights:
    """The weights of one model; made by `ProcessWeights.hold`."""

    def __init__(self, process: ProcessWeights, model: object) -> None:
        self._process = process
        self._model: Callable[[], object] | None = None
        self.vouch: tuple[str, Vouch] | None = None
        """A fingerprint that the session enters, and what names the weights that it stands for."""
        self.number = -next(_numbers)
        """Tells models apart, as long as they live."""
        # Of a plain dictionary, say, nobody can tell whether it is gone.
        with contextlib.suppress(TypeError):
            self._model = weakref.ref(model)
            self.number = id(model)

    def name(self, fingerprint: str | None) -> str | None:
        """Return what names the weights that the session calls by this fingerprint."""
        if self.vouch is not None and self.vouch[0] == fingerprint:
            return self.vouch[1].fingerprint
        return fingerprint

    def is_of(self, model: object) -> bool:
        """Return whether this is the model, and can be told from others."""
        return self._model is not None and self._model() is model

    def when_gone(self, call: Callable[[], object]) -> bool:
        """Have something called when the model is gone; return whether it is there now."""
        if self._model is None:
            return True
        model = self._model()
        if model is not None:
            # Not at the end of the process: nobody asks then.
            weakref.finalize(model, call).atexit = False
        return model is not None

    @contextlib.contextmanager
    def changing(self, outcome: Callable[[], str]) -> Iterator[None]:
        """Hold the model to have no name while it changes.

        Args:
            outcome: Returns the identity of what it consists of afterwards, however that went.
        """
        self.change()
        try:
            yield
        finally:
            self.settle(outcome())

    def change(self) -> None:
        """Hold the model to have no name until `settle`."""
        self._process._enter(self, None)  # noqa: SLF001  # the two are one thing

    def settle(self, fingerprint: str) -> None:
        """State what the model consists of from now on.

        Args:
            fingerprint: Identity of its weights.
        """
        self._process._enter(self, fingerprint)  # noqa: SLF001

    def close(self) -> None:
        """Forget the model; a second call does nothing."""
        self._process._leave(self)  # noqa: SLF001


class Vouch:
    """A fingerprint that is being worked out; made by `ProcessWeights.vouch_later`."""

    def __init__(self, process: ProcessWeights) -> None:
        self._process = process
        self.fingerprint: str | None = None
        """None until it is known."""

    def settle(self, fingerprint: str) -> None:
        """State the fingerprint; does nothing where the model has been given another name since.

        May be called from any thread.

        Args:
            fingerprint: As in `ProcessWeights.vouch_by_fingerprint`.

        Raises:
            ValueError: That is no fingerprint.
        """
        _check_fingerprint(fingerprint)
        self._process._settle(self, fingerprint)  # noqa: SLF001


def _check_fingerprint(fingerprint: str) -> None:
    if not isinstance(fingerprint, str) or not _FINGERPRINT.fullmatch(fingerprint):
        raise ValueError(
            f"{fingerprint!r:.80} is no fingerprint: expected 32 hexadecimal digits, or 'local:' "
            "and 32 of them; process_weights.vouch(model) works one out"
        )


process_weights = ProcessWeights()
"""Those of this process; a forked child begins anew, for its models may become others."""

os.register_at_fork(after_in_child=process_weights.begin_anew)
