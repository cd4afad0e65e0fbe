"""A mini engine with a connector, asked as tests of connectors ask it."""

from __future__ import annotations

import dataclasses
import time

import msgspec

from wtransfer.kv.header import HEADER_NBYTES, BlockHeader, checksum
from wtransfer.specs.file import FORMAT
from wtransfer.specs.tier import rank_key
from wtransfer.testing.connector import SMALL, RecordedInstance
from wtransfer.testing.mini_engine.config import CacheShape, EngineConfig, Limits
from wtransfer.testing.mini_engine.contract import OVER, Request

BLOCK_SIZE = 4
MODEL = msgspec.structs.replace(SMALL, num_kv_heads=2)
"""A model that two ranks can share."""
PATIENCE_S = 20.0


@dataclasses.dataclass
class Served:
    """What came of a request."""

    request: Request
    matched: int
    """Blocks that the connector was asked to load."""
    loaded: int
    """Those of them that came."""
    failures: int
    """Loads of which a part did not come."""
    load_s: float
    """Seconds until the load had ended."""


class Host(RecordedInstance):
    """A mini engine that checks every output, and every key and value, with a fresh model.

    Args:
        weights: Weights of the model.
        connector: Name of the connector.
        model: Shape of the model.
        block_size: Tokens per block.
        num_blocks: Blocks of the cache.
        budget: Most tokens of a step.
        num_ranks: Ranks.
        role: ``kv_role``.
        engine_id: Name of the instance.
        **options: Options of the connector.
    """

    def __init__(
        self,
        weights,
        connector,
        *,
        model=MODEL,
        block_size=BLOCK_SIZE,
        num_blocks=64,
        budget=2048,
        num_ranks=1,
        role="kv_both",
        engine_id="host",
        **options,
    ):
        config = EngineConfig(
            model=model,
            cache=CacheShape(block_size, num_blocks),
            limits=Limits(max_num_batched_tokens=budget),
            connector=connector,
            options=options,
            num_ranks=num_ranks,
            role=role,
            engine_id=engine_id,
        )
        super().__init__(config, weights)
        # The scheduler learns the weights by a step.
        self.step()
        self._at_rest = self._puts()

    @property
    def stats(self):
        """The numbers of all sides together."""
        total = {}
        for side in self.sides:
            for name, number in side.side.get_stats().items():
                total[name] = total.get(name, 0) + number
        return total

    def _puts(self):
        return [self.stats.get(name) for name in ("buffers_free", "puts_waiting")]

    def settle(self):
        """Wait until a tier has been given all that was stored."""
        self.until(lambda: self._puts() == self._at_rest)

    def add(self, prompt, count=1, params=None, **particulars):
        """Queue a request that may have particulars, such as ``cache_salt``."""
        request = Request(f"request-{next(self._numbers)}", list(prompt), count, params)
        vars(request).update(particulars)
        self.scheduler.add(request)
        return request

    def until(self, ready):
        """Take steps until something has come about."""
        end = time.monotonic() + PATIENCE_S
        while not ready():
            assert time.monotonic() < end, "it never came about"
            self.step()

    def finish(self, request):
        """Take steps until a request has ended and the connector has no work left; check it."""
        self.until(lambda: request.state in OVER)
        self.run(PATIENCE_S)
        self.check(request)

    def serve(self, prompt, count=1, params=None, **particulars):
        """Serve a request, with nothing in the engine's own cache."""
        self.clear_cache()
        before, begun = self.counts.copy(), time.monotonic()
        request = self.add(prompt, count, params, **particulars)
        self.until(lambda: request.state not in ("waiting", "loading"))
        load_s = time.monotonic() - begun
        self.finish(request)
        counts = self.counts - before
        return Served(
            request,
            self.num_matched(request),
            counts["tokens_loaded"] // self.config.cache.block_size,
            counts["loads_failed"],
            load_s,
        )

    def num_matched(self, request):
        """Return how many blocks the connector was asked to load for a request."""
        calls = [each for each in self.scheduler_side.calls if each.args[:1] == (request,)]
        asked = [each.args[2] for each in calls if each.name == "update_state_after_alloc"]
        return max(asked, default=0) // self.config.cache.block_size

    def prefill(self, prompt):
        """Compute a prompt for another instance; return its parameters as a router passes them."""
        served = self.serve(prompt, 1, {"do_remote_decode": True})
        # Other requests' by now.
        self.clear_cache()
        return travelled(served.request)


def travelled(request):
    """Return the parameters of an ended request as a router passes them on, which is as JSON."""
    return msgspec.json.decode(msgspec.json.encode(request.kv_transfer_params))


def check_whole(path):
    """Fail if a file of the tier ``file`` is not what its name says; return how many there are."""
    found = list(path.glob(f"{FORMAT}/blocks/*"))
    for each in found:
        data = each.read_bytes()
        header = BlockHeader.unpack(data[:HEADER_NBYTES])
        assert isinstance(header, BlockHeader), each
        assert rank_key(header.key, header.rank).hex() == each.name
        assert header.checksum == checksum(data[HEADER_NBYTES:])
    return len(found)


def names_in(folder):
    """Return the names of everything in a folder, sorted."""
    return sorted(each.name for each in folder.iterdir())
