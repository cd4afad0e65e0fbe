"""A host with some connectors, and those that hand requests over to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from matrix_stacks import P2P_KINDS
from matrix_watch import Watch

from wtransfer.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from matrix_stacks import Stack

    from wtransfer.testing.mini_engine.contract import Request, StepPlan
    from wtransfer.testing.mini_engine.engine import MiniEngine
    from wtransfer.testing.mini_engine.model import LocalWeights

# What each kind calls the blocks, or the bytes, that it has put into the cache.
_NUMBERS = {"loaded_bytes_total", "blocks_loaded_total", "blocks_loaded"}


@dataclass
class Found:
    """What came of some requests."""

    requests: list[Request]
    """They themselves."""
    counts: dict[str, int]
    """Of the host, since they came."""
    loaded: list[int]
    """Tokens that each connector has loaded for them."""
    plans: list[StepPlan]
    """The steps that it took."""
    cut: Request | None = None
    """One whose weights have changed in its midst."""

    def pieces(self) -> list[int]:
        """Return in how many steps each prompt was computed."""
        spans = [span for plan in self.plans for span in plan.spans]
        return [
            sum(
                span.request_id == each.request_id and span.start < each.num_prompt_tokens
                for span in spans
            )
            for each in self.requests
        ]


class Service:
    """A host, and for each P2P connector of its stack one from which requests come.

    Args:
        kit: What the tests of the mini engine share.
        stack: The connectors.
        make: Makes a host; takes the P2P connector by which it hands requests over, or None.
        weights: Weights of all hosts.
    """

    def __init__(
        self,
        kit: Any,
        stack: Stack,
        make: Callable[[int | None], MiniEngine],
        weights: LocalWeights,
    ) -> None:
        self.kit = kit
        self.stack = stack
        self.weights = weights
        self.may_lose = False
        """Whether blocks that were there may be gone when they are to be loaded."""
        self.host = make(None)
        """The one that is asked."""
        self._make = make
        self._prefills: dict[int, MiniEngine] = {}

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.host.scheduler._block_size

    def prefill(self, number: int) -> MiniEngine:
        """Return the host that hands requests over by one of the P2P connectors."""
        if number not in self._prefills:
            self._prefills[number] = self._make(number)
        return self._prefills[number]

    # -- what there is to be loaded

    def hold_at(self, number: int, texts: list[list[int]], new_tokens: int) -> Found:
        """Have prompts computed so that only one of the connectors has them."""
        if self.stack.kinds[number] in P2P_KINDS:
            return self.hand_over(number, texts, new_tokens)
        found = self.ask(texts, new_tokens)
        for other in self.stack.tiers:
            if other == number:
                continue
            if self.stack.kinds[other] == "tier":
                assert self.child(other).reset_cache() is True
            # A tier that instances share is not reset by one of them.
            for block in self.host.folder.glob(f"{other}/*/blocks/*"):
                block.unlink()
        self.host.scheduler.pool.reset()
        return found

    def hold_at_all(self, texts: list[list[int]], new_tokens: int) -> Found:
        """Have prompts computed so that all of the connectors have them, as far as that can be.

        A request comes from one host: with two P2P connectors it is the first one's.
        """
        found = None
        if self.stack.tiers:
            found = self.ask(texts, new_tokens)
            self.host.scheduler.pool.reset()
        if self.stack.p2p_numbers:
            return self.hand_over(self.stack.p2p_numbers[0], texts, new_tokens)
        assert found is not None
        return found

    def hold_for(self, loader: int, texts: list[list[int]], new_tokens: int) -> Found:
        """Have prompts computed so that one of `Stack.loaders` is the one that loads them."""
        is_last = loader == len(self.stack.kinds) - 1
        return (
            self.hold_at(loader, texts, new_tokens)
            if is_last
            else self.hold_at_all(texts, new_tokens)
        )

    def hand_over(self, number: int, texts: list[list[int]], new_tokens: int) -> Found:
        """Have another host compute prompts, which then hands them over."""
        told = [{"do_remote_decode": True}] * len(texts)
        found = self._serve(self.prefill(number), texts, new_tokens, told)
        assert all(each.kv_transfer_params for each in found.requests)
        return found

    # -- the host

    def ask(
        self,
        texts: list[list[int]],
        new_tokens: int,
        held: Found | None = None,
        change: tuple[int, list[int]] | None = None,
    ) -> Found:
        """Ask the host.

        Args:
            texts: Prompts.
            new_tokens: How many are generated.
            held: What `hold_at` returned: where prompts with these beginnings are.
            change: Seed of the weights that come while prompts are being loaded, and another
                prompt, which has some of its tokens by then.
        """
        told = [each.kv_transfer_params for each in held.requests] if held else [None] * len(texts)
        return self._serve(self.host, texts, new_tokens, told, change)

    @property
    def folder(self) -> Path:
        """Where the host keeps files."""
        return self.host.folder

    @property
    def hosts(self) -> list[MiniEngine]:
        """All that there are."""
        return [self.host, *self._prefills.values()]

    def forget(self) -> None:
        """Leave nothing in the host's own cache, not even the bytes."""
        self.host.scheduler.pool.reset()
        for layer in self.host.executor.worker.cache.layers:
            layer.fill_(7.0)

    def restart(self) -> None:
        """End all hosts, and begin anew with their names and folders."""
        for each in self.hosts:
            each.close()
        self.host, self._prefills = self._make(None), {}

    def wait_for_releases(self) -> None:
        """Wait until the senders know that nobody wants what they have handed over."""
        for sender in self._prefills.values():
            deadline = Deadline(self.kit.PATIENCE_S)
            while sender.executor.worker.connector.get_stats()["leases"]:
                sender.step()
                deadline.check("releases")
            sender.step()

    def num_evicted(self) -> float:
        """Return how many blocks gave way to others."""
        sides = [(each.scheduler.connector, each.executor.worker.connector) for each in self.hosts]
        told = [side.get_stats() for pair in sides for side in pair]
        return sum(each[name] for each in told for name in each if "evict" in name)

    def _serve(
        self,
        host: MiniEngine,
        texts: list[list[int]],
        new_tokens: int,
        told: Iterable[dict[str, Any] | None],
        change: tuple[int, list[int]] | None = None,
    ) -> Found:
        before, loaded = host.scheduler.counts.copy(), self._loaded(host)
        cut, refused = None, set()
        with Watch(host, new_tokens) as watch:
            requests = [
                watch.add(host.submit(text, new_tokens, params))
                for text, params in zip(texts, told, strict=True)
            ]
            if change is not None:
                cut, refused = self._change(requests, *change)
            host.run()
        assert refused <= watch.bad_blocks, "they were loaded under other weights"
        now = self._loaded(host)
        by = [each - other for each, other in zip(now, loaded, strict=True)]
        found = Found(requests, dict(host.scheduler.counts - before), by, watch.plans, cut)
        self._check(host, found, new_tokens)
        for request in requests:
            watch.check(request, self.weights.seed)
        return found

    def _change(
        self, requests: list[Request], seed: int, text: list[int]
    ) -> tuple[Request, set[int]]:
        """Change the weights while requests of the host are being loaded.

        Returns:
            A request that is in the midst of its tokens, and the blocks that were being loaded.
        """
        connector = self.host.executor.worker.connector
        # However fast they are: no load is found to have ended before the weights change.
        connector.get_finished = lambda _: (None, None)
        self._step_until(self.host, lambda: all(each.state != "waiting" for each in requests))
        assert {each.state for each in requests} == {"loading"}
        # What a P2P connector keeps is another host's.
        keeper, told = self.host, None
        if self.stack.p2p_numbers:
            keeper, told = self.prefill(self.stack.p2p_numbers[0]), {"do_remote_decode": True}
        cut = keeper.submit(text, self.kit.NEW_TOKENS, told)
        self._step_until(keeper, lambda: cut.began)
        del connector.get_finished
        loading = {
            block
            for each in requests
            for block in each.block_ids[: each.num_external_tokens // self.block_size]
        }
        self.weights.change(seed)
        keeper.run()
        assert not cut.kv_transfer_params
        return cut, loading

    def _step_until(self, host: MiniEngine, ready: Callable[[], bool]) -> None:
        deadline = Deadline(self.kit.PATIENCE_S)
        while not ready():
            host.step()
            deadline.check("requests")

    def _check(self, host: MiniEngine, found: Found, new_tokens: int) -> None:
        """Check what holds for every request: these are the tokens, and nothing failed."""
        texts = [each.prompt_token_ids for each in found.requests]
        expected = self.kit.references(texts, self.weights.seed, new_tokens)
        assert expected == [each.output for each in found.requests]
        counts = host.scheduler.counts
        assert counts["unknown_notices"] == 0
        assert self.may_lose or not counts["loads_failed"]
        # What was loaded and refused, or before a block that was lost, counts as bytes.
        is_all_used = found.cut is None and not counts["loads_failed"]
        assert not is_all_used or found.counts.get("tokens_loaded", 0) == sum(found.loaded)
        assert host.scheduler.pool.num_free == host.scheduler.pool.num_blocks
        self.kit.check_pool(host.scheduler.pool)

    # -- its connectors

    def child(self, number: int) -> Any:
        """Return the scheduler's side of one of the host's connectors."""
        connector = self.host.scheduler.connector
        return connector.side.sub_connectors[number] if len(self.stack.kinds) > 1 else connector

    def _loaded(self, host: MiniEngine) -> list[int]:
        """Return how many tokens each connector of a host has loaded."""
        sides = host.scheduler.connector, host.executor.worker.connector
        told = [side.get_stats() for side in sides]
        places = range(len(self.stack.kinds))
        return [sum(self._tokens(numbers, place) for numbers in told) for place in places]

    def _tokens(self, told: dict[str, float], place: int) -> int:
        prefix, block_nbytes = self.stack.prefix(place), self.kit.nbytes_per_block(self.block_size)
        tokens = 0
        for name, number in told.items():
            what = next((each for each in _NUMBERS if name.endswith(each)), None)
            if what is not None and name.startswith(prefix):
                blocks = number / block_nbytes if "bytes" in what else number
                assert blocks == int(blocks)
                tokens += int(blocks) * self.block_size
        return tokens
