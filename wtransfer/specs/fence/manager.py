"""The scheduler's side of the fence: a request asks only for blocks of the weights it began with.

Four rules, each of which may err by a miss and by nothing else:

1. A request notes at its start what every rank computes with. Its keys contain that, for ever.
2. Once anything else is known of any rank, the request is *out*: it finds nothing and leaves
   nothing, under no name. It stays out if the old weights come back, as what it has computed
   meanwhile has no name.
3. While a rank's weights are changing, or are not known, nobody is in.
4. The scheduler may learn of a change late. Jobs therefore carry the note's stamps, and workers,
   which hold the weights, refuse those of other ones (`wtransfer.specs.fence.worker`).
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from wtransfer.blocks import host_key
from wtransfer.errors import BlockNotKeptError
from wtransfer.specs.fence.events import FenceEvents
from wtransfer.specs.fence.marks import (
    BlockWitnesses,
    FencedLoadStoreSpec,
    FenceNote,
)
from wtransfer.specs.fence.spoiled import SpoiledBlocks
from wtransfer.specs.interface import (
    LoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from wtransfer.weights import instance_fingerprint, known_stamps

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from wtransfer.blocks import OffloadKey
    from wtransfer.weights import Stamps, WeightsStamp

logger = logging.getLogger(__name__)


class FencedManager(OffloadingManager):
    """A manager that keeps blocks of different weights apart; the host calls it like any other.

    The host adds one call, `weights_are`, and hands on to workers what `prepare_load` and
    `prepare_store` return. It may add another, `load_failed`. The fenced manager hears of nothing
    but other keys.

    Should the fence itself fail, it shuts: nothing is found or stored any more, which is said once
    in the log. An error of the fenced manager is that manager's, and passes.

    Cost:
        About a microsecond per block, beside what the fenced manager takes.

    Args:
        manager: Of any spec.
    """

    def __init__(self, manager: OffloadingManager) -> None:
        self._inner = manager
        self._stamps: Stamps | None = None
        # Of the last known stamps: kept while weights are changing, as they may not have after all.
        self._fingerprint = ""
        self._events = FenceEvents()
        self._spoiled = SpoiledBlocks()
        self._failure: Exception | None = None
        self._counts = Counter(
            fence_changes_total=0,
            fence_misses_total=0,
            fence_stores_refused_total=0,
            fence_blocks_spoiled_total=0,
        )

    # -- what the fence adds

    def weights_are(self, stamps: Sequence[WeightsStamp | None]) -> None:
        """State what the ranks compute with. Call it as soon and as often as that is heard.

        Args:
            stamps: One for each rank, in order; None for one whose weights are changing.
        """
        try:
            self._learn(known_stamps(stamps))
        except Exception as error:
            self._shut(error)

    def is_open(self) -> bool:
        """Whether a request that begins now can find and leave blocks."""
        return self._failure is None and self._stamps is not None

    def is_out(self, req_context: ReqContext) -> bool:
        """Whether a request has outlived the weights it began with, or began with unknown ones."""
        return self._note(req_context) is None

    def load_failed(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """State that blocks could not be loaded, after `complete_load`.

        They are not asked for again, and can be stored again. A host that does not say so computes
        them each time. Blocks of a request that is out are as good as they were: so call
        `weights_are` first, if both are told at once.

        Args:
            keys: Of the job that failed.
            req_context: The request.
        """
        try:
            note = self._note(req_context)
            if note is not None:
                witnesses = req_context.get_state(BlockWitnesses)
                spoiled = note.spoil(keys, witnesses, self._spoiled)
                self._counts["fence_blocks_spoiled_total"] += len(spoiled)
                if spoiled:
                    # Before: what was stored until now must be announced to be taken back.
                    self._events.put(self._inner.take_events())
                    self._events.retire(spoiled)
        except Exception as error:
            self._shut(error)

    def _learn(self, stamps: Stamps | None) -> None:
        if stamps == self._stamps:
            return
        self._stamps = stamps
        if stamps is None:
            return
        last, self._fingerprint = self._fingerprint, instance_fingerprint(stamps)
        if last not in ("", self._fingerprint):
            self._change()

    def _change(self) -> None:
        self._counts["fence_changes_total"] += 1
        # Before: what was stored until now must be announced to be taken back.
        self._events.put(self._inner.take_events())
        self._events.change()
        # It decides only what gives way first; a manager of the older shape may not know it.
        changed = getattr(self._inner, "weights_changed", None)
        if changed is not None:
            try:
                changed()
            except Exception:
                logger.exception("%s.weights_changed failed", type(self._inner).__name__)

    def _shut(self, error: Exception) -> None:
        if self._failure is None:
            logger.error(
                "the fence around %s failed and stays shut: no KV block is loaded or stored from "
                "now on",
                type(self._inner).__name__,
                exc_info=error,
            )
        self._failure = error

    def _note(self, ctx: ReqContext) -> FenceNote | None:
        """Return what a request began with; None if it is out."""
        note = ctx.get_state(FenceNote)
        if note is None or note.stamps is None or self._failure is not None:
            return None
        # The very same object: stamps that have been others meanwhile make another one.
        return note if note.stamps is self._stamps else None

    def _key(self, key: bytes, ctx: ReqContext) -> OffloadKey | None:
        """Return the key that the fenced manager knows, or None; this is on every look-up's way."""
        try:
            note = self._note(ctx)
            if note is None:
                return None
            return note.fence(key, ctx.get_state(BlockWitnesses), self._spoiled)
        except Exception as error:
            self._shut(error)
            return None

    def _keys(self, keys: Collection[bytes], ctx: ReqContext) -> list[OffloadKey] | None:
        """Return the keys that the fenced manager knows; None if it may not have all of them."""
        fenced = [self._key(key, ctx) for key in keys]
        if None in fenced or self._note(ctx) is None:
            return None
        return [key for key in fenced if key is not None]

    def _prepared(self, keys: Collection[bytes], ctx: ReqContext) -> list[OffloadKey]:
        """Return the fenced keys of blocks that were prepared, whatever has changed since."""
        note = ctx.get_state(FenceNote)
        fenced = [note.fenced(key) for key in keys] if note else []
        return [key for key in fenced if key is not None]

    def _mark(self, inner: LoadStoreSpec, ctx: ReqContext) -> FencedLoadStoreSpec:
        note = ctx.get_state(FenceNote)
        assert note is not None
        assert note.stamps is not None, "without stamps there are no keys"
        return FencedLoadStoreSpec(note.stamps, inner)

    # -- the contract

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Note what the ranks compute with now; a request that is known already keeps its note."""
        if req_context.get_state(FenceNote) is None:
            req_context.set_state(FenceNote(self._stamps, self._fingerprint))
        return self._inner.on_new_request(req_context)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Say what is known of a block of the request's weights; a miss if the request is out."""
        fenced = self._key(key, req_context)
        if fenced is None:
            self._counts["fence_misses_total"] += 1
            return LookupResult.MISS
        return self._inner.lookup(fenced, req_context)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Pin blocks, and mark the job with the weights that it is for."""
        fenced = self._keys(keys, req_context)
        if fenced is None:
            raise BlockNotKeptError(
                f"request {req_context.req_id!r} did not begin with the present weights: nothing "
                "can be loaded for it"
            )
        return self._mark(self._inner.prepare_load(fenced, req_context), req_context)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Pass on, unless the request is out."""
        fenced = self._keys(keys, req_context)
        if fenced:
            self._inner.touch(fenced, req_context)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Unpin what was prepared, also if the weights have changed since."""
        self._inner.complete_load(self._prepared(keys, req_context), req_context)

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Make room, and mark the job with the weights that it is for; None if it is out.

        Of the evicted keys only those are returned that are surely of this request's weights: the
        host's key of another one may stand for a block that is kept, or is being stored just now.
        """
        fenced = self._keys(keys, req_context)
        if fenced is None:
            self._counts["fence_stores_refused_total"] += 1
            return None
        output = self._inner.prepare_store(fenced, req_context)
        if output is None:
            return None
        return replace(
            output,
            keys_to_store=[host_key(key) for key in output.keys_to_store],
            store_spec=self._mark(output.store_spec, req_context),
            evicted_keys=self._own(output.evicted_keys, req_context),
        )

    def _own(self, fenced: Iterable[OffloadKey], ctx: ReqContext) -> list[OffloadKey]:
        """Return the host's keys of those that this request would ask for by them."""
        named = ((host_key(key), key) for key in fenced)
        return [key for key, kept_under in named if self._key(key, ctx) == kept_under]

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """Complete what was prepared; blocks of old weights are kept, but never announced."""
        fenced = self._prepared(keys, req_context)
        self._inner.complete_store(fenced, req_context, success)
        note = req_context.get_state(FenceNote)
        if note is not None and self._is_of_present_weights(note):
            self._events.renew(fenced)
        else:
            self._events.put(self._inner.take_events(), late=fenced)

    def _is_of_present_weights(self, note: FenceNote) -> bool:
        return note.stamps is not None and note.fingerprint == self._fingerprint

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Pass on."""
        self._inner.on_request_finished(req_context)

    def weights_changed(self) -> None:
        """Pass on."""
        self._inner.weights_changed()

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return events with the host's keys, of blocks of the present weights only."""
        self._events.put(self._inner.take_events())
        return self._events.take()

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Pass on."""
        self._inner.on_schedule_end(context)

    def has_pending_work(self) -> bool:
        """Pass on."""
        return self._inner.has_pending_work()

    def reset_cache(self) -> None:
        """Pass on."""
        self._inner.reset_cache()

    def get_stats(self) -> Mapping[str, float]:
        """Return the manager's numbers, and those of the fence."""
        fence = {"fence_open": float(self.is_open()), **self._counts}
        return {**self._inner.get_stats(), **fence}

    def shutdown(self) -> None:
        """Pass on."""
        self._inner.shutdown()
