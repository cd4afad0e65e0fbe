"""What the publishing rank answers to the others, whenever they come; over real connections."""

from __future__ import annotations

import queue
import threading
import time

import pytest
import torch.distributed as dist

from wtransfer.errors import PeerLostError, RoundAbortedError, SourceError, StallError
from wtransfer.transport.channel import Dialer
from wtransfer.weight_sync.messages import ErrorInfo
from wtransfer.weight_sync.trainer.rank_messages import (
    RANK_CODEC,
    Arrive,
    Begin,
    End,
    Failed,
    Packed,
)
from wtransfer.weight_sync.trainer.trainer_ranks import TrainerRanks
from wtransfer.weight_sync.trainer.whereabouts import Whereabouts

PATIENCE_S = 10.0
QUIET_S = 0.4
LAYOUT = "layout"
BROKEN = SourceError("the weights are broken")


class Other:
    """Another rank: says what it is told to, and keeps what it hears."""

    def __init__(self, note, rank):
        self.note, self.rank = note, rank
        self.heard = queue.SimpleQueue()
        self.connect()

    def connect(self):
        connections = queue.SimpleQueue()
        self._dialer = Dialer(
            RANK_CODEC,
            address=self.note.address,
            token=self.note.secret,
            on_open=connections.put,
            on_message=lambda _connection, message: self.heard.put(message),
            on_close=lambda _connection, _error: None,
            on_refused=self.heard.put,
        )
        self.connection = connections.get(timeout=PATIENCE_S)

    def come(self, call, version):
        self.connection.send(Arrive(call, self.rank, version, LAYOUT))

    def hears(self):
        return self.heard.get(timeout=PATIENCE_S)

    def hears_nothing(self):
        time.sleep(QUIET_S)
        return self.heard.empty()

    def close(self):
        self._dialer.close()


@pytest.fixture
def ranks():
    """The publishing rank's side, and rank 1 and 2."""
    place = Whereabouts("test", dist.HashStore())
    made = TrainerRanks(place, 0, listen=None, deadline_s=PATIENCE_S)
    others = [Other(place.look(), rank) for rank in (1, 2)]
    yield made, *others
    for each in (*others, made):
        each.close()


def begin(made, *others):
    """Begin the round of v1, for which other ranks come with their first call."""
    made.begin("v1")
    for other in others:
        other.come(1, "v1")
        assert other.hears() == Begin(1)


def test_a_rank_takes_part_whether_it_comes_before_or_after_the_round_begins(ranks):
    made, one, two = ranks
    one.come(1, "v1")
    assert one.hears_nothing()
    made.begin("v1")
    assert one.hears() == Begin(1)
    two.come(7, "v1")
    assert two.hears() == Begin(7)
    made.end("v1", None, fingerprint="abc")
    assert [one.hears(), two.hears()] == [End(1, None, "abc"), End(7, None, "abc")]


def test_a_rank_that_comes_for_another_version_is_sent_away(ranks):
    made, one, _ = ranks
    made.begin("v1")
    one.come(1, "v2")
    end = one.hears()
    assert end.call == 1
    assert "rank 0 publishes 'v1', rank 1 called publish('v2')" in end.error.message
    one.come(2, "v1")
    assert one.hears() == Begin(2)


def test_a_rank_that_comes_when_the_round_has_failed_is_told_once(ranks):
    made, one, two = ranks
    made.begin("v1")
    made.end("v1", BROKEN, ranks={1, 2})
    one.come(1, "v1")
    assert one.hears() == End(1, ErrorInfo.of(BROKEN))
    # It tries again.
    one.come(2, "v1")
    assert one.hears_nothing()
    made.begin("v1")
    assert one.hears() == Begin(2)
    two.come(1, "v1")
    # What it has not heard of, is over.
    assert two.hears() == Begin(1)


def test_a_round_that_did_not_begin_leaves_one_that_has_alone(ranks):
    made, one, two = ranks
    begin(made, one)
    made.refuse("v1", BROKEN, {1, 2})
    made.refuse("v2", BROKEN, {1, 2})
    assert one.hears_nothing()
    two.come(1, "v2")
    assert two.hears() == End(1, ErrorInfo.of(BROKEN))
    two.come(2, "v1")
    assert two.hears() == Begin(2)


def test_who_waits_is_told_once_of_a_round_that_did_not_begin(ranks):
    made, one, _ = ranks
    one.come(1, "v1")
    assert one.hears_nothing()
    made.refuse("v1", BROKEN, {1})
    assert one.hears() == End(1, ErrorInfo.of(BROKEN))
    one.come(2, "v1")
    assert one.hears_nothing()


def test_errors_of_before_a_success_are_behind(ranks):
    made, one, _ = ranks
    made.begin("v1")
    made.end("v1", BROKEN, ranks={1})
    made.begin("v2")
    one.come(1, "v2")
    assert one.hears() == Begin(1)
    made.end("v2", None)
    assert one.hears() == End(1, None)
    one.come(2, "v1")
    assert one.hears_nothing()


def test_who_has_done_its_part_and_comes_again_is_not_told_of_that_one(ranks):
    made, one, _ = ranks
    begin(made, one)
    made.packed()
    assert one.hears() == Packed(1)
    one.come(2, "v1")
    made.end("v1", None, fingerprint="abc")
    assert one.hears() == End(1, None, "abc")
    assert one.hears_nothing()


def test_what_was_refused_during_a_round_is_told_after_its_success(ranks):
    made, one, _ = ranks
    made.begin("v1")
    made.refuse("v2", BROKEN, {1})
    made.end("v1", None)
    one.come(1, "v2")
    assert one.hears() == End(1, ErrorInfo.of(BROKEN))


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_who_comes_when_nothing_more_is_gathered_comes_for_the_next_round(ranks, version):
    made, one, two = ranks
    begin(made, one, two)
    made.packed()
    assert [one.hears(), two.hears()] == [Packed(1), Packed(1)]
    one.come(2, version)
    assert one.hears_nothing()
    made.end("v1", BROKEN, ranks={1, 2})
    assert [one.hears(), two.hears()] == [End(1, ErrorInfo.of(BROKEN))] * 2
    assert one.hears_nothing()
    made.begin(version)
    assert one.hears() == Begin(2)
    made.end(version, None, fingerprint="abc")
    assert one.hears() == End(2, None, "abc")


def lose(made, other):
    """Break the connection of another rank, and let it dial anew once that is noticed."""
    other.close()
    end = time.monotonic() + PATIENCE_S
    while other.rank in made._waiting or (
        other.rank in made._here and made._here[other.rank].error is None
    ):
        assert time.monotonic() < end
        time.sleep(0.005)
    other.connect()


def test_a_rank_that_was_lost_and_comes_again_hides_no_loss(ranks):
    made, one, two = ranks
    begin(made, one, two)
    lose(made, one)
    one.come(2, "v1")
    assert one.hears_nothing()
    begun = time.monotonic()
    with pytest.raises(PeerLostError, match="trainer rank 1 was lost"):
        made.enter({1, 2}, 1, 0, "layers.0")
    assert time.monotonic() - begun < 1
    made.end("v1", BROKEN, ranks={1, 2})
    # It waits for the next attempt.
    assert one.hears_nothing()
    made.begin("v1")
    assert one.hears() == Begin(2)


def test_a_rank_that_was_lost_after_its_part_hears_of_the_success_when_it_asks_again(ranks):
    made, one, _ = ranks
    begin(made, one)
    made.packed()
    assert one.hears() == Packed(1)
    lose(made, one)
    one.come(2, "v1")
    assert one.hears_nothing()
    made.end("v1", None, fingerprint="abc")
    assert one.hears() == End(2, None, "abc")


def test_a_rank_that_nobody_waits_for_may_come_late(ranks):
    made, one, two = ranks
    made.begin("v1")
    made.packed()
    one.come(1, "v1")
    assert [one.hears(), one.hears()] == [Begin(1), Packed(1)]
    two.come(1, "v2")
    assert two.hears_nothing()
    made.end("v1", None, fingerprint="abc")
    assert one.hears() == End(1, None, "abc")
    made.begin("v2")
    assert two.hears() == Begin(1)


def test_a_rank_that_was_lost_while_it_waited_is_waited_for(ranks):
    made, one, _ = ranks
    one.come(1, "v1")
    assert one.hears_nothing()
    lose(made, one)
    made.begin("v1")
    assert made.lost({1}, QUIET_S) is None
    made.end("v1", BROKEN, ranks={1})
    one.come(1, "v1")
    assert one.hears() == End(1, ErrorInfo.of(BROKEN))


def test_what_is_refused_again_during_a_round_is_told_after_its_success(ranks):
    made, one, _ = ranks
    made.refuse("v2", BROKEN, {1})
    made.begin("v1")
    made.refuse("v2", BROKEN, {1})
    made.end("v1", None)
    one.come(1, "v2")
    assert one.hears() == End(1, ErrorInfo.of(BROKEN))


def test_who_came_for_a_second_attempt_is_told_that_it_is_refused(ranks):
    made, one, _ = ranks
    begin(made, one)
    made.packed()
    assert one.hears() == Packed(1)
    one.come(2, "v1")
    assert one.hears_nothing()
    made.refuse("v1", BROKEN, {1})
    assert one.hears() == End(2, ErrorInfo.of(BROKEN))
    made.end("v1", None, fingerprint="abc")
    assert one.hears() == End(1, None, "abc")


def test_a_rank_that_echoes_the_end_of_a_round_does_not_fail_the_next(ranks):
    made, one, _ = ranks
    begin(made, one)
    made.end("v1", BROKEN, ranks={1})
    one.connection.send(Failed(1, one.hears().error))
    one.come(2, "v1")
    made.begin("v1")
    assert one.hears() == Begin(2)
    assert made.lost({1}, QUIET_S) is None


def test_a_rank_that_waits_no_longer_may_come_again(ranks):
    made, one, _ = ranks
    one.come(1, "v1")
    one.connection.send(Failed(1, ErrorInfo.of(BROKEN)))
    assert one.hears_nothing()
    made.begin("v1")
    assert one.hears_nothing()
    assert made.lost({1}, QUIET_S) is None
    one.come(2, "v1")
    assert one.hears() == Begin(2)


def test_every_rank_that_is_missing_is_waited_for_and_named(ranks):
    made, one, _ = ranks
    made._deadline_s = QUIET_S
    made.begin("v1")
    one.come(1, "v1")
    with pytest.raises(StallError, match=r"the arrival of trainer ranks \[2\], which hold parts"):
        made.gather_layouts({1, 2}, lambda _rank: [])


def test_a_rank_that_has_failed_ends_every_wait_with_its_error(ranks):
    made, one, two = ranks
    begin(made, one, two)
    two.connection.send(Failed(1, ErrorInfo.of(BROKEN)))
    with pytest.raises(SourceError, match="the weights are broken"):
        made.enter({1, 2}, 1, 0, "layers.0")


def test_a_wait_for_ranks_can_be_called_off(ranks):
    made, *_ = ranks
    made.begin("v1")
    calling_off = threading.Timer(QUIET_S, made.stop_waiting)
    calling_off.start()
    begun = time.monotonic()
    with pytest.raises(RoundAbortedError):
        made.gather_layouts({1}, lambda _rank: [])
    assert time.monotonic() - begun < PATIENCE_S / 2
    calling_off.join()
