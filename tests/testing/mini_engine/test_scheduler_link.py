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
from wtransfer.testing.mini_engine.messages import Said, StepResult
from wtransfer.testing.mini_engine.plain import to_plain
from wtransfer.testing.mini_engine.pool import BlockPool
from wtransfer.testing.mini_engine.request import Request
from wtransfer.testing.mini_engine.scheduler import Scheduler
from wtransfer.testing.mini_engine.scheduler_link import SchedulerLink
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
        self.calls, self.refuses, self.most = [], False, 1000

    def on_new_request(self, request):
        if self.refuses:
            raise ValueError("these parameters are of no use")

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
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


@pytest.fixture
def connector():
    config = ServingConfig(kv_transfer_config=KVTransferConfig(kv_connector="Slow"))
    return Slow(config, KVConnectorRole.SCHEDULER)


@pytest.fixture
def link(connector):
    return SchedulerLink(connector, 3)


def hear(link, *said, expected=("r", "s")):
    return link.hear(said, held=expected, loading=expected)


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
    assert connector.heard[-1].failed_recving == set()
    plan, ended = ranks.step(Said(finished_recving={"r"}), Said(finished_recving={"r"}))
    assert [(span.start, len(span.tokens)) for span in plan.spans] == [(8, 2)]
    assert ended == [request]
    assert ranks.scheduler.counts["unknown_notices"] == 3
    assert ranks.scheduler.counts["tokens_loaded"] == 8


def test_errors_may_come_before_the_last_rank_has_received(ranks, connector):
    request = add(ranks, "r")
    ranks.step()
    ranks.step(Said(finished_recving={"r"}, invalid_block_ids={1}))
    assert request.state == "loading"
    assert connector.heard[-1].failed_recving == set()
    ranks.step(other=Said(finished_recving={"r"}))
    assert connector.heard[-1].failed_recving == {"r"}
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


@pytest.mark.parametrize("word", [Said({"r"}), Said(finished_recving={"r"})])
def test_a_request_that_ends_while_it_is_loaded_is_done_with_by_either_word(ranks, word):
    """A connector names it once, when it neither writes nor reads any more."""
    request = add(ranks, "r")
    ranks.step()
    ranks.scheduler.abort(request)
    for each in (word, None), (word, None), (None, word):
        assert (ranks.scheduler.pool.num_free, ranks.scheduler.is_busy) == (14, True)
        ranks.step(*each)
    assert (ranks.scheduler.pool.num_free, ranks.scheduler.is_busy) == (16, False)
    assert ranks.scheduler._written == set()


def test_a_request_that_is_only_sent_is_not_let_go_of_by_a_late_word(ranks):
    """FAULTS 28: that it was received is old by then, and it is still read."""
    request = add(ranks, "r")
    ranks.step()
    received = Said(finished_recving={"r"})
    ranks.step(received, received)
    ranks.step()
    assert request.state == "finished"
    ranks.step(received, received)
    assert (ranks.scheduler.pool.num_free, ranks.scheduler.is_busy) == (13, True)
    ranks.step(Said({"r"}), Said({"r"}))
    assert (ranks.scheduler.pool.num_free, ranks.scheduler.is_busy) == (16, False)


def test_blocks_that_were_sent_within_the_last_step_are_let_go_of_after_it(ranks, connector):
    """A connector that pushes says so in the step itself; the request ends only thereafter."""
    add(ranks, "r", length=3)
    _, (request,) = ranks.step(Said({"r"}), Said({"r"}))
    assert request.state == "finished"
    assert connector.calls[-2:] == ["request_finished", "sent r"]
    assert (ranks.scheduler.pool.num_free, ranks.scheduler._held) == (16, {})
    assert ranks.scheduler.counts["unknown_notices"] == 0


def test_blocks_that_were_sent_before_the_request_ended_are_let_go_of_at_its_end(ranks, connector):
    add(ranks, "r", length=3, count=3)
    ranks.step(Said({"r"}), Said({"r"}))
    ranks.step()
    assert "sent r" not in connector.calls
    _, (request,) = ranks.step()
    assert request.state == "finished"
    assert connector.calls[-2:] == ["request_finished", "sent r"]
    assert (ranks.scheduler.pool.num_free, ranks.scheduler._held) == (16, {})
    assert not ranks.scheduler.link._sent


def test_what_was_said_early_of_a_request_that_does_not_stay_is_forgotten(ranks, connector):
    connector.stays = False
    add(ranks, "r", length=3, count=2)
    ranks.step(Said({"r"}), Said({"r"}))
    ranks.step()
    ranks.step()
    assert not ranks.scheduler.link._sent
    assert ranks.scheduler.pool.num_free == 16


def test_a_load_begins_with_no_rank_having_answered(link, connector):
    """What was said of an earlier load of the same request is of no account."""
    request = Request("r", list(range(10)), 1)
    hear(link, Said(finished_recving={"r"}), Said(finished_recving={"r"}), Said())
    link.allocated(request, 8)
    output = hear(link, Said(), Said(), Said(finished_recving={"r"}))
    assert output.finished_recving is None
    link.allocated(request, 0)
    said = Said(finished_recving={"r"})
    assert hear(link, said, said, Said()).finished_recving == {"r"}


def test_a_request_that_was_loaded_has_its_other_blocks_told(ranks, connector):
    """As vLLM does: with nothing more to load."""
    add(ranks, "r")
    ranks.step()
    ranks.step(Said(finished_recving={"r"}), Said(finished_recving={"r"}))
    plan, _ = ranks.step()
    assert connector.allocated == ("r", (plan.spans[0].block_ids,), 0)
    assert len(plan.spans[0].block_ids) == 3


def test_a_request_that_the_connector_refuses_is_not_there(ranks, connector):
    connector.refuses = True
    with pytest.raises(ValueError, match="of no use"):
        add(ranks, "r")
    assert not ranks.scheduler.is_busy
    assert ranks.step()[0].spans == []
    connector.refuses = False
    add(ranks, "r")


def test_a_request_whose_name_is_in_use_is_refused(ranks):
    first = add(ranks, "r", length=3)
    with pytest.raises(ValueError, match="'r' is there already"):
        add(ranks, "r")
    ranks.step()
    assert first.state == "finished"
    with pytest.raises(ValueError, match="'r' is there already"):
        add(ranks, "r")
    ranks.step(Said({"r"}), Said({"r"}))
    add(ranks, "r")


def test_the_workers_hear_of_the_last_end(ranks, connector):
    connector.stays = False
    add(ranks, "r", length=3)
    ranks.step()
    assert ranks.scheduler.is_busy
    plan, _ = ranks.step()
    assert plan.finished_req_ids == {"r"}
    assert not ranks.scheduler.is_busy


# -- errors that come late


@pytest.fixture
def two(ranks, connector):
    """Two requests with the same beginning, the second in the blocks of the first."""
    connector.stays = False
    one = add(ranks, "r", length=12, count=9)
    ranks.step()
    received = Said(finished_recving={"r"})
    ranks.step(received, received)
    ranks.step()
    assert one.num_computed_tokens == 12
    other = add(ranks, "s", length=13, count=9)
    connector.most = 0
    ranks.step()
    assert other.block_ids[:3] == one.block_ids[:3]
    return one, other


def test_an_error_of_blocks_that_were_taken_for_good_is_not_passed_over(ranks, two):
    one, other = two
    before = len(one.output), len(other.output)
    ranks.step(Said(invalid_block_ids={one.block_ids[1]}))
    assert (one.num_computed_tokens, other.num_computed_tokens) == (4, 4)
    assert (len(one.output), len(other.output)) == before, "what that step made of them is wrong"
    assert not ranks.scheduler.pool.knows_any(range(16))
    plan, _ = ranks.step()
    assert [span.start for span in plan.spans] == [4, 4]
    assert (ranks.scheduler.counts["late_errors"], ranks.scheduler.counts["loads_failed"]) == (1, 2)


def test_an_error_of_blocks_that_nobody_has_any_more_lets_their_names_go(ranks, two):
    one, _ = two
    block = one.block_ids[1]
    for each in two:
        ranks.scheduler.abort(each)
    assert ranks.scheduler.pool.knows_any({block})
    ranks.step(other=Said(invalid_block_ids={block}))
    assert not ranks.scheduler.pool.knows_any({block})
    ranks.step(other=Said(invalid_block_ids={block}))
    assert ranks.scheduler.counts["late_errors"] == 1


def test_under_the_other_policy_a_late_error_ends_those_that_build_on_it(ranks, two):
    one, other = two
    ranks.scheduler._fails = True
    _, ended = ranks.step(Said(invalid_block_ids={one.block_ids[0]}))
    assert ended == [one, other]
    assert {one.state, other.state} == {"failed"}
    assert ranks.scheduler.pool.num_free == 16


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
