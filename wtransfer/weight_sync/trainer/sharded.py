"""A source whose tensors are spread over the ranks of a trainer, made whole one at a time."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

from wtransfer.calls import SerialThread, on_callers_stream
from wtransfer.errors import EngineError, SourceError, WTransferError
from wtransfer.weight_sync.trainer.shards import (
    gathered,
    is_sharded,
    iter_shards,
    layout_between,
    ranks_of,
)
from wtransfer.weight_sync.trainer.source import as_source
from wtransfer.weight_sync.trainer.trainer_ranks import TrainerRanks
from wtransfer.weight_sync.trainer.whereabouts import Whereabouts, own_rank

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch
    from torch import nn

    from wtransfer.engines.interface import ParamMeta, WeightSource

logger = logging.getLogger(__name__)

DEADLINE_S = 30.0
"""The deadline where no publisher has said another, in seconds."""
OWN_SHARE = 0.9
"""Part of the deadline after which a wait for ranks ends: the round's own watch, which ends it
at the whole, could only say that the engine hangs."""
CAUSE_GRACE_S = 1.0
"""Time in which the loss of a rank must show that has broken a collective."""


class ShardedSource:
    """Gathers what the ranks of a trainer hold, for the one that publishes.

    `Publisher` makes one of whatever it is given; make it yourself for another `listen` or `name`.
    What is not sharded passes through as it is. DTensors (FSDP2, tensor parallelism) are gathered
    over their own mesh, one at a time, while every other rank of the mesh is in
    `TrainerRank.publish`. A source of one's own says by `mesh` and `placements` of its `ParamMeta`
    how tensors lie, and yields this rank's parts from `iter_local`.

    Args:
        model_or_source: A torch module, a mapping of names to tensors, or a `WeightSource`.
        name: Tells several publishers of one trainer apart; as in `TrainerRank`.
        listen: Address for the other ranks. Default: an abstract Unix socket, which only this user
            on this host can reach; ``tcp:host:port`` for trainers of several hosts.
        store: A torch store that all ranks share. Default: the one of torch's default group.
        deadline_s: Longest wait for the other ranks and for a collective, in seconds. Default: the
            publisher's.
    """

    def __init__(
        self,
        model_or_source: nn.Module | Mapping[str, torch.Tensor] | WeightSource,
        *,
        name: str = "default",
        listen: str | None = None,
        store: Any = None,
        deadline_s: float | None = None,
    ) -> None:
        self._source = as_source(model_or_source)
        self._whereabouts = Whereabouts(name, store)
        self._listen = listen
        self.deadline_s = DEADLINE_S if deadline_s is None else deadline_s
        """Longest wait for the other ranks and for a collective, in seconds."""
        self._has_own_deadline = deadline_s is not None
        self._ranks: TrainerRanks | None = None
        self._making_ranks = threading.Lock()
        self._stopped = False
        self._thread = SerialThread("wtransfer-gather")
        self._version: str | None = None
        self._agreed = False
        self._metadata: Sequence[ParamMeta] | None = None

    def take_deadline(self, deadline_s: float) -> None:
        """Take the publisher's deadline, in seconds, unless this source has one of its own."""
        if not self._has_own_deadline:
            self.deadline_s = deadline_s

    @property
    def metadata(self) -> Sequence[ParamMeta]:
        """What the source has; this moves no data and asks nobody."""
        # Kept for the pass that follows: reading it costs something per tensor.
        self._metadata = self._source.metadata
        return self._metadata

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what this rank holds."""
        return self._source.iter_local()

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole tensors.

        Raises:
            SourceError: The ranks do not agree, or this one contradicts its metadata.
            StallError: A rank does not take part in time.
            PeerLostError: A rank is gone.
        """
        metadata, self._metadata = self._metadata or self._source.metadata, None
        others = self._others(metadata)
        if any(meta.placements for meta in metadata):
            return self._iter_gathered(metadata, others)
        # Itself, not its pairs: it may show that all of its tensors are there.
        return self._source.iter_full()

    def _iter_gathered(
        self, metadata: Sequence[ParamMeta], others: frozenset[int]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        ranks = self._begin_pass(metadata, others) if others else None
        number = 0 if ranks is None else ranks.begin_pass(others)
        for index, meta, shard in iter_shards(self._source, metadata):
            if not is_sharded(meta):
                yield meta.name, shard
                continue
            if ranks is not None:
                ranks.enter(others, number, index, meta.name)
            yield meta.name, self._gather(meta, shard, ranks, others)

    # -- for the publisher

    def begin(self, version: str) -> None:
        """State that a round has begun: the other ranks may come for it."""
        self._version, self._agreed, self._metadata = version, False, None
        self._stopped = False
        if self._ranks is not None:
            self._ranks.begin(version)

    def stop_waiting(self) -> None:
        """Let a running pass end that waits for other ranks: its round has failed."""
        # Also if it is only about to wait: see `_ranks_now`.
        self._stopped = True
        if self._ranks is not None:
            self._ranks.stop_waiting()

    def packed(self) -> None:
        """State that the weights may be changed again."""
        if self._ranks is not None:
            self._ranks.packed()

    def end(self, error: BaseException | None, fingerprint: str = "") -> None:
        """State that the round is over, and tell the other ranks."""
        version, self._version = self._version, None
        if version is None:
            return
        found = self._to_tell() if error is not None else (self._ranks, frozenset())
        if found[0] is not None:
            found[0].end(version, error, ranks=found[1], fingerprint=fingerprint)

    def refuse(self, version: str, error: BaseException) -> None:
        """State that a round did not begin, and tell the other ranks."""
        ranks, others = self._to_tell()
        if ranks is not None:
            ranks.refuse(version, error, others)

    def close(self) -> None:
        """Let go of the other ranks."""
        if self._ranks is not None:
            self._ranks.close()
        self._thread.stop()

    def _to_tell(self) -> tuple[TrainerRanks | None, frozenset[int]]:
        try:
            others = self._others(self._source.metadata)
            return (self._ranks_now() if others else self._ranks), others
        except Exception as error:
            # The round has an error of its own, and this is not it.
            logger.info("the other ranks cannot be told: %s", error)
            return self._ranks, frozenset()

    def _others(self, metadata: Sequence[ParamMeta]) -> frozenset[int]:
        """Return the other ranks whose part is needed."""
        spread = [meta for meta in metadata if meta.owners or meta.placements]
        found = frozenset(rank for meta in spread for rank in ranks_of(meta))
        own = own_rank()
        strange = [meta.name for meta in spread if is_sharded(meta) and own not in ranks_of(meta)]
        if strange:
            raise SourceError(
                f"rank {own} publishes, but is not in the mesh of {len(strange)} tensors, first "
                f"{strange[0]!r}; publish from a rank that takes part in gathering all of them",
                piece=strange[0],
            )
        return found - {own}

    def _ranks_now(self) -> TrainerRanks:
        # A pass of a round and whoever ends that round may come at the same time.
        with self._making_ranks:
            if self._ranks is None:
                self._ranks = TrainerRanks(
                    self._whereabouts,
                    own_rank(),
                    listen=self._listen,
                    deadline_s=self.deadline_s * OWN_SHARE,
                )
                if self._version is not None:
                    self._ranks.begin(self._version)
                if self._stopped:
                    self._ranks.stop_waiting()
            return self._ranks

    def _begin_pass(self, metadata: Sequence[ParamMeta], others: frozenset[int]) -> TrainerRanks:
        ranks = self._ranks_now()
        if not self._agreed:
            own = own_rank()
            ranks.gather_layouts(others, lambda rank: layout_between(metadata, own, rank))
            self._agreed = True
        return ranks

    def _gather(
        self,
        meta: ParamMeta,
        shard: torch.Tensor,
        ranks: TrainerRanks | None,
        others: frozenset[int],
    ) -> torch.Tensor:
        what = f"gathering {meta.name!r}"
        try:
            call = on_callers_stream(lambda: gathered(meta, shard))
            return self._thread.call(call, what, self.deadline_s * OWN_SHARE)
        except WTransferError:
            raise
        except Exception as error:
            lost = ranks.lost(others, CAUSE_GRACE_S) if ranks is not None else None
            if lost is not None:
                raise lost from error
            raise EngineError(
                f"{what} failed on {type(error).__name__}: {error}", piece=meta.name
            ) from error
