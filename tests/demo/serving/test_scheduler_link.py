"""What ranks say of one request, put together: twice, late, in any order, or by some of them."""

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
from wtransfer.connectors.naming import BlockNaming
from wtransfer.demo.serving.messages import Said, StepResult
from wtransfer.demo.serving.plain import to_plain
from wtransfer.demo.serving.pool import BlockPool
from wtransfer.demo.serving.request import Request
from wtransfer.demo.serving.scheduler import Scheduler
from wtransfer.demo.serving.scheduler_link import SchedulerLink
from wtransfer.weights import WeightsStamp


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

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return (request.num_tokens - 1) // 4 * 4 - num_computed_tokens, True

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self.allocated = (request.request_id, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output):
        return Nothing()

    def update_connector_output(self, connector_output):
        self.heard.append(connector_output)

    def request_finished(self, request, block_ids):
        return self.stays, None

    def set_xfer_handshake_metadata(self, metadata):
        self.met = metadata

    def get_finished_count(self):
        return self.needed

    def start_load_kv(self, forward_context, **kwargs): ...

    def wait_for_layer_load(self, layer_name): ...

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): ...

    def wait_for_save(self): ...


@pytest.fixture
def connector():
    config = ServingConfig(kv_transfer_config=KVTransferConfig(kv_connector="Slow"))
    return Slow(config, KVConnectorRole.SCHEDULER)


@pytest.fixture
def link(connector):
    return SchedulerLink(connector, 3)


def hear(link, *said, expected=("r", "s")):
    return link.hear(said, sending=expected, receiving=expected)


def test_a_request_is_received_when_every_rank_has_said_so(link):
    for order in itertools.permutations(range(3)):
        for count, rank in enumerate(order, 1):
            said = [Said(finished_recving={"r"} if each == rank else set()) for each in range(3)]
            output = hear(link, *said)
            assert output.finished_recving == ({"r"} if count == 3 else None)
            assert output.finished_sending is None
    assert link.num_unknown == 0


def test_a_rank_that_says_it_twice_counts_once(link):
    for _ in range(4):
        output = hear(link, Said({"r"}, {"s"}), Said({"r"}, {"s"}), Said())
        assert (output.finished_sending, output.finished_recving) == (None, None)
    assert link.num_unknown == 3 * 4
    output = hear(link, Said(), Said(), Said({"r"}, {"s"}))
    assert (output.finished_sending, output.finished_recving) == ({"r"}, {"s"})


def test_late_words_are_counted_and_leave_nothing(link):
    """FAULTS 28: else the next load of that request would seem to have come too early."""
    hear(link, *[Said(finished_recving={"r"})] * 3)
    for _ in range(2):
        output = hear(link, Said({"r"}, {"r"}), Said(), Said(), expected=())
        assert (output.finished_sending, output.finished_recving) == (None, None)
    assert link.num_unknown == 4
    assert hear(link, *[Said({"r"}, {"r"})] * 2, Said()).is_empty()
    assert hear(link, Said(), Said(), Said({"r"}, {"r"})).finished_recving == {"r"}


def test_who_is_no_longer_waited_for_is_forgotten(link):
    hear(link, Said({"r"}, {"r"}), Said({"r"}), Said())
    hear(link, Said(), Said(), Said(), expected=())
    assert not link._sent
    assert not link._received


def test_a_connector_may_need_fewer_ranks(link, connector):
    connector.needed = 1
    assert hear(link, Said(), Said({"r"}), Said()).finished_sending == {"r"}


def test_errors_and_notes_of_all_ranks_are_put_together(link, connector):
    said = [
        Said(invalid_block_ids={1}, metadata=to_plain(Notes(["one"]))),
        Said(invalid_block_ids={1, 2}),
        Said(metadata=to_plain(Notes(["three"]))),
    ]
    output = hear(link, *said)
    assert output.invalid_block_ids == {1, 2}
    assert output.kv_connector_worker_meta == Notes(["one", "three"])
    assert connector.heard == [output]
    assert hear(link, Said(), None, Said()).kv_connector_worker_meta is None


def test_the_ranks_say_hello_by_number_and_only_if_they_say_something(link, connector):
    link.meet([None, None, None])
    assert connector.met is None
    link.meet([to_plain(Hello(0)), None, to_plain(Hello(2))])
    assert connector.met == {0: Hello(0), 2: Hello(2)}


# -- what the scheduler makes of it

STAMP = WeightsStamp("A", 1)


class Ranks:
    """Two ranks that compute nothing, and say what they are told to."""

    def __init__(self, scheduler):
        self.scheduler = scheduler

    def step(self, one=None, other=None):
        plan = self.scheduler.plan()
        tokens = {span.request_id: 7 for span in plan.spans}
        said = (one or Said(), other or Said())
        ended = self.scheduler.update(plan, [StepResult(STAMP, True, tokens, s) for s in said])
        return plan, ended


@pytest.fixture
def ranks(connector):
    scheduler = Scheduler(BlockPool(16), BlockNaming(4, b""), link=SchedulerLink(connector, 2))
    ranks = Ranks(scheduler)
    ranks.step()
    return ranks


def add(ranks, name, length=10, count=1):
    request = Request(name, list(range(length)), count)
    ranks.scheduler.add(request)
    return request


def test_a_request_waits_for_every_rank(ranks, connector):
    request = add(ranks, "r")
    plan, _ = ranks.step()
    assert (plan.spans, request.state) == ([], "loading")
    assert connector.allocated == ("r", ([0, 1],), 8)
    ranks.step(Said(finished_recving={"r"}))
    assert request.state == "loading"
    ranks.step(Said(finished_recving={"r"}))
    assert request.state == "loading", "twice the same rank"
    ranks.step(other=Said(finished_recving={"r"}))
    assert request.state == "loaded"
    plan, ended = ranks.step(Said(finished_recving={"r"}), Said(finished_recving={"r"}))
    assert [(span.start, len(span.tokens)) for span in plan.spans] == [(8, 2)]
    assert ended == [request]
    assert ranks.scheduler.counts["unknown_notices"] == 3
    assert ranks.scheduler.counts["tokens_loaded"] == 8


def test_errors_may_come_before_the_last_rank_has_received(ranks):
    request = add(ranks, "r")
    ranks.step()
    ranks.step(Said(finished_recving={"r"}, invalid_block_ids={1}))
    assert request.state == "loading"
    ranks.step(other=Said(finished_recving={"r"}))
    assert request.num_computed_tokens == 4, "the block before it is good"
    plan, _ = ranks.step()
    assert [(span.start, len(span.tokens)) for span in plan.spans] == [(4, 6)]
    assert ranks.scheduler.counts["loads_failed"] == 1


def test_blocks_stay_until_every_rank_has_sent_them(ranks):
    add(ranks, "r", length=3)
    ranks.step()
    assert ranks.scheduler.pool.num_free == 15
    for said in ((Said({"r"}), None), (Said({"r"}), None), (None, Said({"else"}))):
        ranks.step(*said)
        assert (ranks.scheduler.pool.num_free, ranks.scheduler.is_busy) == (15, True)
    ranks.step(other=Said({"r"}))
    assert (ranks.scheduler.pool.num_free, ranks.scheduler.is_busy) == (16, False)
    ranks.step(Said({"r"}), Said({"r"}))
    assert ranks.scheduler.pool.num_free == 16
    assert ranks.scheduler.counts["unknown_notices"] == 4


@pytest.mark.parametrize("last", ["sent", "received"])
def test_blocks_that_are_both_sent_and_received_stay_for_both(ranks, last):
    request = add(ranks, "r")
    ranks.step()
    ranks.scheduler.abort(request)
    said = [Said(finished_recving={"r"}), Said({"r"})]
    for each in said if last == "sent" else reversed(said):
        assert (ranks.scheduler.pool.num_free, ranks.scheduler.is_busy) == (14, True)
        ranks.step(each, each)
    assert (ranks.scheduler.pool.num_free, ranks.scheduler.is_busy) == (16, False)


def test_a_late_word_does_not_let_the_next_load_seem_to_have_come(ranks):
    """FAULTS 28: a request that gives way is loaded twice under one name."""
    request = add(ranks, "r")
    ranks.step()
    both = Said(finished_recving={"r"}), Said(finished_recving={"r"})
    ranks.step(*both)
    ranks.scheduler._preempt(ranks.scheduler._loaded.pop())
    ranks.scheduler.pool.forget_all()
    # Once more the same, between the two loads.
    ranks.scheduler._hear([StepResult(STAMP, True, {}, each) for each in (both[0], Said())])
    ranks.step()
    assert request.state == "loading"
    ranks.step(other=both[1])
    assert request.state == "loading"
    ranks.step(both[0])
    assert request.state == "loaded"
