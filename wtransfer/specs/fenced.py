"""The fence against stale KV, around any spec: no block outlives the weights that computed it.

Neither the author of a spec nor its user writes a line for it. A host makes its spec, puts the
fence around it, and drives that instead::

    spec = FencedSpec(factory.create_spec(config))
    manager, worker = spec.get_manager(), spec.get_worker(kv_caches)

    metadata.stamp = worker.stamp()            # each worker, before each step computes
    manager.weights_are([each.stamp for each in metadata])            # the scheduler, when it comes

A stamp travels with the result of its step and says what that was computed with. So it is read
before the step computes, and nothing is committed between the two.

What the worker computes with is known from `wtransfer.weights`, where every session enters its
commits.

Three things only the host can see to. A request must not build on blocks of the *model's own* cache
that were computed with other weights than it began with: the fence would keep what it computes from
them, under its name. So that cache is emptied at a change, before the next request begins, and a
step that was planned before the change is not computed after it. A block of the cache belongs to
its job until that has ended. And all ranks' results count: a job that failed on one has failed.
`wtransfer.testing.mini_engine` shows how.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wtransfer.specs.fence.manager import FencedManager
from wtransfer.specs.fence.marks import (
    BlockWitnesses,
    FencedLoadStoreSpec,
)
from wtransfer.specs.fence.worker import FencedWorker
from wtransfer.specs.interface import CanonicalKVCaches, OffloadingSpec
from wtransfer.specs.seed_adapter import adapt_spec
from wtransfer.weights import process_weights

if TYPE_CHECKING:
    from wtransfer.weights import ProcessWeights

__all__ = [
    "BlockWitnesses",
    "FencedLoadStoreSpec",
    "FencedManager",
    "FencedSpec",
    "FencedWorker",
]


class FencedSpec(OffloadingSpec):
    """A spec whose both sides are fenced.

    Args:
        spec: Any spec.
        rank: This worker's rank, of no account on the scheduler's side; None: the one that stands
            in the spec's config, or 0 if there is none.
        weights: What this process computes with.
    """

    def __init__(
        self,
        spec: OffloadingSpec,
        *,
        rank: int | None = None,
        weights: ProcessWeights = process_weights,
    ) -> None:
        self.spec = adapt_spec(spec)
        """What is fenced; a spec in the seed's style is wrapped."""
        self._rank = _rank_of(spec) if rank is None else rank
        self._weights = weights
        # The base class would answer for these itself.
        self.config = getattr(spec, "config", None)
        self.kv_cache_config = getattr(spec, "kv_cache_config", None)
        self._manager: FencedManager | None = None
        self._worker: FencedWorker | None = None

    def __getattr__(self, name: str) -> Any:
        # What a host reads of a spec (its options, tokens per block) it finds here, too.
        if name == "spec" or name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.spec, name)

    def get_manager(self) -> FencedManager:
        """Return the scheduler's side."""
        if self._manager is None:
            self._manager = FencedManager(self.spec.get_manager())
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> FencedWorker:
        """Return the side of one worker."""
        if self._worker is None:
            self._worker = FencedWorker(self.spec.get_worker(kv_caches), self._rank, self._weights)
        return self._worker


def _rank_of(spec: Any) -> int:
    """Return the rank that a spec was made for, whichever era its config is of."""
    config = getattr(spec, "config", None)
    parallel = getattr(config, "parallel", None) or getattr(config, "parallel_config", None)
    return int(getattr(parallel, "rank", 0))
