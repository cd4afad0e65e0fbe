"""What a rank that does not publish does when rounds, connections or itself end."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from wtransfer.engines.trainer_rank import TrainerRank
from wtransfer.engines.trainer_ranks import TrainerRanks
from wtransfer.engines.whereabouts import Whereabouts
from wtransfer.errors import ClosedError, PeerLostError, SourceError
from wtransfer.transport.rendezvous import host_rendezvous

DEADLINE_S = 10.0
QUIET_S = 0.4
PUBLISHING = 1


@pytest.fixture(scope="module", autouse=True)
def made_once_in_a_process():
    """Let libuv, under torch's store, make the pipe that it keeps for the life of the process."""
    host_rendezvous("127.0.0.1").close()


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
