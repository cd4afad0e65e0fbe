"""The scheduler and what ranks report of a request: twice, late, in any order, with errors."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest

from wtransfer.config import KVTransferConfig, ServingConfig
from wtransfer.connectors.interface import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from wtransfer.testing.mini_engine.config import CacheShape, EngineConfig
from wtransfer.testing.mini_engine.contract import ConnectorOutput, Request, StepResult
from wtransfer.testing.mini_engine.engine import MiniEngine
from wtransfer.testing.mini_engine.scheduler import Scheduler
from wtransfer.testing.mini_engine.serialize import serialize
from wtransfer.weight_version import WeightVersion


@dataclass
class Notes(KVConnectorWorkerMetadata):
    lines: list[str] = field(default_factory=list)

    def aggregate(self, other):
        return Notes(self.lines + other.lines)


@dataclass
class Hello(KVConnectorHandshakeMetadata):
    rank: int


@dataclass
class Nothing(KVConnectorMetadata):
    pass


class Slow(KVConnectorBase_V1):
    """Loads every whole block of a prompt that it is asked about, and sends it all afterwards."""

    names_weights = True

    def __init__(self, config, role):
        super().__init__(config, role)
        self.heard, self.met, self.needed, self.stays = [], None, None, True
        self.calls, self.refuses, self.most, self.knows = [], False, 1000, True

    def on_new_request(self, request):
        if self.refuses:
            raise ValueError("these parameters are of no use")

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        if not self.knows:
            return None, False
        found = (request.num_tokens - 1) // 4 * 4 - num_computed_tokens
        return min(found, self.most), True

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self.allocated = (request.request_id, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output):
        return Nothing()

    def update_connector_output(self, connector_output):
        self.heard.append(connector_output)
        self.calls += [f"sent {each}" for each in connector_output.finished_sending or ()]

    def request_finished(self, request, block_ids):
        self.calls.append("request_finished")
        return self.stays, None

    def set_xfer_handshake_metadata(self, metadata):
        self.met = metadata

    def get_finished_count(self):
        return self.needed

    def start_load_kv(self, forward_context, **kwargs): ...

    def wait_for_layer_load(self, layer_name): ...

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): ...

    def wait_for_save(self): ...


VERSION, CHANGED = WeightVersion("A", 1), WeightVersion("B", 2)


def sent(*request_ids):
    return ConnectorOutput(finished_sending=set(request_ids))


def received(*request_ids):
    return ConnectorOutput(finished_recving=set(request_ids))


class Ranks:
    """An executor whose ranks compute nothing, and report what a test tells them to."""

    def __init__(self, connector, num_ranks):
        config = EngineConfig(cache=CacheShape(4, 16), num_ranks=num_ranks)
        self.scheduler = Scheduler(config, connector)
        self.num_ranks = num_ranks
        self.version = VERSION
        self.step()

    def step(self, *outputs):
        outputs = [each or ConnectorOutput() for each in outputs]
        outputs += [ConnectorOutput()] * (self.num_ranks - len(outputs))
        plan = self.scheduler.plan()
        tokens = {span.request_id: 7 for span in plan.spans}
        ended = self.scheduler.update(plan, [StepResult(self.version, tokens, o) for o in outputs])
        return plan, ended

    @property
    def num_unknown(self):
        return self.scheduler.counts["unknown_notices"]

    def add(self, name, length=10, count=1):
        request = Request(name, list(range(length)), count)
        self.scheduler.add(request)
        return request

    def check_no_notices_are_kept(self):
        assert self.scheduler._sent == self.scheduler._received == {}


@pytest.fixture
def connector():
    config = ServingConfig(kv_transfer_config=KVTransferConfig(kv_connector="Slow"))
    return Slow(config, KVConnectorRole.SCHEDULER)


@pytest.fixture
def ranks(connector):
    return Ranks(connector, 2)


# -- notices of several ranks


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_request_is_received_once_every_rank_has_reported_it(connector, order):
    ranks = Ranks(connector, 3)
    request = ranks.add("r")
    ranks.step()
    for count, rank in enumerate(order, 1):
        ranks.step(*[received("r") if each == rank else None for each in range(3)])
        assert request.state == ("loaded" if count == 3 else "loading")
        assert connector.heard[-1].finished_recving == ({"r"} if count == 3 else None)
        assert connector.heard[-1].finished_sending is None
    assert ranks.num_unknown == 0


def test_duplicate_notices_of_one_rank_count_once(ranks, connector):
    request = ranks.add("r")
    plan, _ = ranks.step()
    assert (plan.spans, request.state) == ([], "loading")
    assert connector.allocated == ("r", ([0, 1],), 8)
    for _ in range(3):
        ranks.step(received("r"))
        assert request.state == "loading"
    ranks.step(None, received("r"))
    assert request.state == "loaded"
    assert connector.heard[-1].failed_recving == set()
    plan, ended = ranks.step(received("r"), received("r"))
    assert [(span.start, len(span.tokens)) for span in plan.spans] == [(8, 2)]
    assert ended == [request]
    assert ranks.num_unknown == 4
    assert ranks.scheduler.counts["tokens_loaded"] == 8


def test_notices_that_are_no_longer_awaited_are_dropped(ranks):
    ranks.step(ConnectorOutput({"r"}, {"r"}))
    assert ranks.num_unknown == 2
    ranks.check_no_notices_are_kept()
    request = ranks.add("r")
    ranks.step()
    ranks.step(received("r"))
    ranks.scheduler.abort(request)
    ranks.step(None, received("r"))
    ranks.check_no_notices_are_kept()
    assert ranks.num_unknown == 2


def test_connector_may_need_notices_of_fewer_ranks(ranks, connector):
    connector.needed = 1
    request = ranks.add("r")
    ranks.step()
    ranks.step(None, received("r"))
    assert request.state == "loaded"


def test_errors_and_metadata_of_all_ranks_are_aggregated(connector):
    ranks = Ranks(connector, 3)
    ranks.step(
        ConnectorOutput(invalid_block_ids={1}, worker_metadata=serialize(Notes(["one"]))),
        ConnectorOutput(invalid_block_ids={1, 2}),
        ConnectorOutput(worker_metadata=serialize(Notes(["three"]))),
    )
    assert connector.heard[-1].invalid_block_ids == {1, 2}
    assert connector.heard[-1].kv_connector_worker_meta == Notes(["one", "three"])
    ranks.step()
    assert connector.heard[-1].kv_connector_worker_meta is None


def test_handshakes_are_passed_on_by_rank_if_there_are_any(ranks, connector):
    ranks.handshakes = lambda: [None, None]
    MiniEngine(ranks.scheduler, ranks)
    assert connector.met is None
    ranks.handshakes = lambda: [serialize(Hello(0)), None, serialize(Hello(2))]
    MiniEngine(ranks.scheduler, ranks)
    assert connector.met == {0: Hello(0), 2: Hello(2)}


def test_errors_may_come_before_the_last_rank_has_received(ranks, connector):
    request = ranks.add("r")
    ranks.step()
    ranks.step(ConnectorOutput(finished_recving={"r"}, invalid_block_ids={1}))
    assert request.state == "loading"
    assert connector.heard[-1].failed_recving == set()
    ranks.step(None, received("r"))
    assert connector.heard[-1].failed_recving == {"r"}
    assert request.num_computed_tokens == 4, "the block before it is good"
    plan, _ = ranks.step()
    assert [(span.start, len(span.tokens)) for span in plan.spans] == [(4, 6)]
    assert ranks.scheduler.counts["loads_failed"] == 1


def test_blocks_stay_until_every_rank_has_sent_them(ranks):
    ranks.add("r", length=3)
    ranks.step()
    assert ranks.scheduler.pool.num_free == 15
    for said in ((sent("r"), None), (sent("r"), None), (None, sent("else"))):
        ranks.step(*said)
        assert (ranks.scheduler.pool.num_free, ranks.scheduler.is_busy) == (15, True)
    ranks.step(None, sent("r"))
    assert (ranks.scheduler.pool.num_free, ranks.scheduler.is_busy) == (16, False)
    ranks.step(sent("r"), sent("r"))
    assert ranks.scheduler.pool.num_free == 16
    assert ranks.num_unknown == 4


@pytest.mark.parametrize("word", [sent("r"), received("r")])
@pytest.mark.parametrize("stays", [True, False])
def test_either_notice_releases_a_request_aborted_during_its_load(ranks, connector, word, stays):
    """FAULTS 26: a connector names it once, when it neither writes nor reads any more."""
    connector.stays = stays
    request = ranks.add("r")
    ranks.step()
    ranks.scheduler.abort(request)
    for each in (word, None), (word, None), (None, word):
        assert (ranks.scheduler.pool.num_free, ranks.scheduler.is_busy) == (14, True)
        ranks.step(*each)
    assert (ranks.scheduler.pool.num_free, ranks.scheduler.is_busy) == (16, False)
    assert ranks.scheduler._written == set()


def test_late_receive_notice_does_not_release_blocks_being_sent(ranks):
    """FAULTS 28: that it was received is old by then, and it is still read."""
    request = ranks.add("r")
    ranks.step()
    ranks.step(received("r"), received("r"))
    ranks.step()
    assert request.state == "finished"
    ranks.step(received("r"), received("r"))
    assert (ranks.scheduler.pool.num_free, ranks.scheduler.is_busy) == (13, True)
    ranks.step(sent("r"), sent("r"))
    assert (ranks.scheduler.pool.num_free, ranks.scheduler.is_busy) == (16, False)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("stays", [True, False])
def test_blocks_sent_early_are_released_at_the_end_of_the_request(ranks, connector, count, stays):
    """A connector that pushes reports within the step; the request ends then, or later."""
    connector.stays = stays
    ranks.add("r", length=3, count=count)
    _, ended = ranks.step(sent("r"), sent("r"))
    for _ in range(count - 1):
        assert "sent r" not in connector.calls
        _, ended = ranks.step()
    assert [each.state for each in ended] == ["finished"]
    assert connector.calls[-2:] == ["request_finished", "sent r"][: 1 + stays]
    assert (ranks.scheduler.pool.num_free, ranks.scheduler._held) == (16, {})
    assert not ranks.scheduler._sent
    assert not stays or ranks.num_unknown == 0


def test_connector_is_told_of_the_other_blocks_of_a_loaded_request(ranks, connector):
    """As vLLM does: with nothing more to load."""
    ranks.add("r")
    ranks.step()
    ranks.step(received("r"), received("r"))
    plan, _ = ranks.step()
    assert connector.allocated == ("r", plan.spans[0].block_ids, 0)
    assert len(plan.spans[0].block_ids[0]) == 3


def test_request_that_the_connector_refuses_is_not_queued(ranks, connector):
    connector.refuses = True
    with pytest.raises(ValueError, match="of no use"):
        ranks.add("r")
    assert not ranks.scheduler.is_busy
    assert ranks.step()[0].spans == []
    connector.refuses = False
    ranks.add("r")


def test_request_id_in_use_is_refused(ranks):
    first = ranks.add("r", length=3)
    with pytest.raises(ValueError, match="'r' is there already"):
        ranks.add("r")
    ranks.step()
    assert first.state == "finished"
    with pytest.raises(ValueError, match="'r' is there already"):
        ranks.add("r")
    ranks.step(sent("r"), sent("r"))
    ranks.add("r")


def test_workers_are_told_of_the_last_end(ranks, connector):
    connector.stays = False
    ranks.add("r", length=3)
    ranks.step()
    assert ranks.scheduler.is_busy
    plan, _ = ranks.step()
    assert plan.finished_req_ids == {"r"}
    assert not ranks.scheduler.is_busy


def test_late_notice_does_not_complete_the_next_load(ranks, connector):
    """FAULTS 28: a request that begins anew is loaded twice under one name."""
    request = ranks.add("r")
    ranks.step()
    ranks.version, connector.knows = CHANGED, False
    ranks.step(received("r"), received("r"))
    assert (request.state, ranks.scheduler.counts["restarts"]) == ("waiting", 1)
    # A duplicate, between the two loads.
    ranks.step(received("r"))
    connector.knows = True
    ranks.step()
    assert request.state == "loading"
    ranks.step(None, received("r"))
    assert request.state == "loading"
    ranks.step(received("r"))
    assert request.state == "loaded"


# -- weights


def test_weight_change_empties_the_prefix_cache(ranks, connector):
    connector.most, connector.stays = 0, False
    ranks.add("r")
    ranks.step()
    assert ranks.scheduler.pool._keys
    ranks.version = CHANGED
    ranks.step()
    assert not ranks.scheduler.pool._keys
    assert ranks.scheduler.counts["weight_changes"] == 1
