"""What a rank that does not publish does when rounds, connections or itself end."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from wtransfer.errors import ClosedError, PeerLostError, SourceError, StallError
from wtransfer.transport.rendezvous import host_rendezvous
from wtransfer.weight_sync.trainer.source import StateDictSource
from wtransfer.weight_sync.trainer.trainer_rank import TrainerRank
from wtransfer.weight_sync.trainer.trainer_ranks import TrainerRanks
from wtransfer.weight_sync.trainer.whereabouts import Whereabouts

pytestmark = pytest.mark.usefixtures("libuv")

DEADLINE_S = 10.0
QUIET_S = 0.4
PUBLISHING = 1


@pytest.fixture
def store():
    return dist.HashStore()


@pytest.fixture
def publishing(store):
    """Maker of the publishing rank's side, one after the other; they are closed at the end."""
    made = []

    def make():
        made.append(
            TrainerRanks(
                Whereabouts("default", store), PUBLISHING, listen=None, deadline_s=DEADLINE_S
            )
        )
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def rank(store):
    """A rank that holds nothing, and takes part nevertheless."""
    with TrainerRank({}, store=store, deadline_s=DEADLINE_S) as made:
        yield made


@pytest.fixture
def publish(rank):
    """Publishes in the background."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda version, **options: pool.submit(rank.publish, version, **options)
        rank.close()


def comes(ranks, within_s=DEADLINE_S):
    """Return whether the rank takes part, within a time."""
    end = time.monotonic() + within_s
    while not ranks._has_come(0) and time.monotonic() < end:
        time.sleep(0.005)
    return ranks._has_come(0)


def test_a_round_that_need_not_be_waited_for_is_over_before_the_next(publishing, publish):
    ranks = publishing()
    ranks.begin("v1")
    first = publish("v1", wait=False)
    assert comes(ranks)
    ranks.packed()
    assert first.result(DEADLINE_S) == ""
    second = publish("v1")
    time.sleep(QUIET_S)
    ranks.end("v1", None, fingerprint="of the first")
    ranks.begin("v1")
    assert comes(ranks)
    ranks.end("v1", None, fingerprint="of the second")
    assert second.result(DEADLINE_S) == "of the second"


def test_who_has_lost_the_publishing_rank_takes_part_with_the_next_one(publishing, publish):
    for end in ("lost", "left", "well"):
        ranks = publishing()
        ranks.begin(end)
        coming = publish(end, wait=end != "left")
        assert comes(ranks)
        if end == "left":
            ranks.packed()
            assert coming.result(DEADLINE_S) == ""
        if end == "well":
            ranks.end(end, None, fingerprint="abc")
            assert coming.result(DEADLINE_S) == "abc"
        ranks.close()
        if end == "lost":
            with pytest.raises(PeerLostError):
                coming.result(DEADLINE_S)


def test_who_was_told_an_error_may_try_the_same_again_at_once(publishing, publish):
    ranks = publishing()
    for _ in range(3):
        ranks.begin("v1")
        coming = publish("v1")
        assert comes(ranks)
        ranks.end("v1", SourceError("not this time"), ranks={0})
        with pytest.raises(SourceError, match="not this time"):
            coming.result(DEADLINE_S)
    ranks.begin("v1")
    coming = publish("v1")
    assert comes(ranks)
    assert ranks.lost({0}, QUIET_S) is None
    ranks.end("v1", None, fingerprint="abc")
    assert coming.result(DEADLINE_S) == "abc"


class SlowSource(StateDictSource):
    """A source whose metadata takes as long as it is told, as that of a large model does."""

    def __init__(self):
        super().__init__({})
        self.asked, self.may_go_on = threading.Event(), threading.Event()
        self.may_go_on.set()

    @property
    def metadata(self):
        self.asked.set()
        assert self.may_go_on.wait(DEADLINE_S)
        return super().metadata


def test_a_round_that_begins_just_when_its_call_is_given_up_holds_up_no_later_call(
    publishing, store
):
    ranks, source = publishing(), SlowSource()
    with (
        TrainerRank(source, store=store, deadline_s=2 * QUIET_S) as rank,
        ThreadPoolExecutor(1) as pool,
    ):
        calls = [pool.submit(rank.publish, "v1")]
        while not ranks._waiting:
            time.sleep(0.005)
        with ranks._changed:  # whatever the rank says next, is not heard yet
            with pytest.raises(StallError, match="did not call publish"):
                calls[0].result(DEADLINE_S)
            source.asked.clear()
            source.may_go_on.clear()
            calls = [pool.submit(rank.publish, "v1") for _ in range(2)]
            assert source.asked.wait(DEADLINE_S)
            ranks.begin("v1")
        time.sleep(QUIET_S)  # it hears of the round that it has given up
        source.may_go_on.set()
        ranks.end("v1", SourceError("rank 0 gave up"), ranks={0})
        for call in calls:
            with pytest.raises(StallError, match="did not call publish"):
                call.result(DEADLINE_S)


@pytest.mark.parametrize("left", [False, True])
def test_a_round_that_is_never_ended_is_given_up(publishing, store, left):
    ranks = publishing()
    with (
        TrainerRank({}, store=store, deadline_s=QUIET_S) as rank,
        ThreadPoolExecutor(1) as pool,
    ):
        ranks.begin("v1")
        coming = pool.submit(rank.publish, "v1", wait=not left)
        assert comes(ranks)
        if left:
            ranks.packed()
            assert coming.result(DEADLINE_S) == ""
            coming = pool.submit(rank.publish, "v2")
        with pytest.raises(StallError, match="ended"):
            coming.result(DEADLINE_S)
        ranks.end("v1", None, fingerprint="late")


@pytest.mark.parametrize("waits_for", ["publishing rank", "begin", "end", "end of the last"])
def test_closing_ends_a_publish_wherever_it_waits(publishing, publish, rank, waits_for):
    ranks = None if waits_for == "publishing rank" else publishing()
    if "end" in waits_for:
        ranks.begin("v1")
    coming = publish("v1", wait=waits_for != "end of the last")
    if "end" in waits_for:
        assert comes(ranks)
    if waits_for == "end of the last":
        ranks.packed()
        assert coming.result(DEADLINE_S) == ""
        coming = publish("v2")
    time.sleep(QUIET_S)
    assert not coming.done()
    begun = time.monotonic()
    rank.close()
    with pytest.raises(ClosedError):
        coming.result(DEADLINE_S)
    assert time.monotonic() - begun < 1.0


def test_a_store_that_is_gone_is_said_in_our_words():
    hosted = host_rendezvous("127.0.0.1")
    at = hosted.host, hosted.port
    store = dist.TCPStore(*at, is_master=False, wait_for_workers=False)
    hosted.close()
    del hosted
    with (
        TrainerRank({}, store=store, deadline_s=DEADLINE_S) as rank,
        pytest.raises(PeerLostError, match="the trainer's store is gone"),
    ):
        rank.publish("v1")
