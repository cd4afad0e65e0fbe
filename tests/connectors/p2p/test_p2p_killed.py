"""Either side dies or stops, at any moment: what was not loaded is a miss, and nothing is left."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

pytestmark = pytest.mark.slow  # the default tests kill prefill in test_p2p_serving

PROMPT = list(range(500, 742))
BLOCKS = 60
SIZE = {"layers": 4, "page_nbytes": 64 * 1024, "num_blocks": 128}
SHELF = {"shelf_bytes": 64 << 20}
MISS_S = 1.0


def start(cast, engine_id, **options):
    return cast.start(engine_id, options={**SHELF, **options}, **SIZE)


def leases(rank):
    return rank.ask("stats")["workers"][0]["leases"]


def lookups(rank):
    return rank.ask("stats")["workers"][0].get("lookups_total", 0)


def check(outcome):
    """Check that what is said to be loaded is what computing it gives."""
    assert outcome["matched"] == BLOCKS
    assert 0 <= outcome["loaded"] <= BLOCKS
    assert outcome["wrong"] == 0


def settle(rank, before, until):
    """Wait until a process holds no more than before."""
    until(lambda: all(now <= then for now, then in zip(rank.ask("holdings"), before, strict=True)))


def test_two_processes_hand_on_a_prompt(cast, until):
    one, other = start(cast, "p"), start(cast, "d")
    outcome = other.ask("decode", request_id="r", tokens=PROMPT, params=prefill(one))
    check(outcome)
    assert outcome["loaded"] == BLOCKS
    until(lambda: leases(one) == 0)


def prefill(one, request_id="r"):
    return one.ask("prefill", request_id=request_id, tokens=PROMPT)


def test_prefill_that_is_dead_is_a_miss_within_a_second(cast):
    one, other = start(cast, "p"), start(cast, "d")
    params = prefill(one)
    one.kill()
    outcome = other.ask("decode", request_id="r", tokens=PROMPT, params=params)
    check(outcome)
    assert outcome["loaded"] == 0
    assert outcome["seconds"] < MISS_S
    stats = other.ask("stats")
    assert stats["scheduler"]["loads_under_way"] == stats["workers"][0]["loads_under_way"] == 0
    assert stats["workers"][0]["blocks_missed_lost_total"] == BLOCKS


@pytest.mark.parametrize("known", [False, True])
def test_prefill_that_is_stopped_is_a_miss_within_its_deadline(cast, known):
    one, other = start(cast, "p", deadline_s=1.0), start(cast, "d", deadline_s=1.0)
    if known:
        other.ask("decode", request_id="q", tokens=PROMPT, params=prefill(one, "q"))
    params = prefill(one)
    one.stop()
    outcome = other.ask("decode", request_id="r", tokens=PROMPT, params=params)
    check(outcome)
    assert outcome["loaded"] == 0
    assert outcome["seconds"] < 2.0
    assert other.ask("stats")["workers"][0]["blocks_missed_stalled_total"] == BLOCKS


def test_decode_that_is_stopped_keeps_nothing_beyond_the_deadline(cast, until):
    one, other = start(cast, "p", deadline_s=1.0), start(cast, "d", deadline_s=1.0)
    answer = other.begin("decode", request_id="r", tokens=PROMPT, params=prefill(one))
    until(lambda: lookups(one))
    other.stop()
    until(lambda: one.ask("stats")["workers"][0]["clients"] == 0, within_s=3.0)
    assert leases(one) == 0
    os.kill(other.pid, signal.SIGCONT)
    check(answer.result())


@pytest.mark.parametrize("rounds", [10, pytest.param(60, marks=pytest.mark.nightly)])
@pytest.mark.timeout(600)
def test_prefill_killed_at_any_moment_leaves_no_wrong_byte(cast, until, rounds):
    dice = random.Random(rounds)
    other = start(cast, "d")
    one, usual_s = start(cast, "p"), []
    for number in range(2):  # while the two meet, and when they have
        params = prefill(one, f"w{number}")
        outcome = other.ask("decode", request_id=f"w{number}", tokens=PROMPT, params=params)
        check(outcome)
        usual_s.append(outcome["seconds"])
    one.kill()
    before, seen = other.ask("holdings"), set()
    for number in range(rounds):
        one = start(cast, "p")
        if number % 2:  # so that it is known, and the kill does not come while the two meet
            params = prefill(one, "k")
            other.ask("decode", request_id=f"k{number}", tokens=PROMPT, params=params)
        params = prefill(one)
        answer = other.begin("decode", request_id=f"r{number}", tokens=PROMPT, params=params)
        time.sleep(dice.uniform(0, 1.5) * usual_s[number % 2])
        one.kill()
        outcome = answer.result()
        check(outcome)
        assert outcome["seconds"] < MISS_S + 0.1
        seen.add(outcome["loaded"])
    stats = other.ask("stats")
    assert stats["scheduler"]["loads_under_way"] == stats["workers"][0]["loads_under_way"] == 0
    settle(other, before, until)
    if rounds == 60:  # the kills did come before, and after
        assert {0, BLOCKS} <= seen


@pytest.mark.parametrize("rounds", [10, pytest.param(60, marks=pytest.mark.nightly)])
@pytest.mark.timeout(600)
def test_decode_killed_at_any_moment_gives_its_blocks_back(cast, until, rounds):
    dice = random.Random(rounds)
    one = start(cast, "p")
    start(cast, "d").ask("decode", request_id="w", tokens=PROMPT, params=prefill(one, "w"))
    cast.ranks[-1].kill()
    until(lambda: leases(one) == 0)
    before = one.ask("holdings")
    for number in range(rounds):
        other = start(cast, "d")
        params = prefill(one, f"r{number}")
        answer = other.begin("decode", request_id="r", tokens=PROMPT, params=params)
        # At least until it has asked: for one that never comes, the lease has to run out.
        until(
            lambda number=number: (
                one.ask("stats")["workers"][0].get("lookups_total", 0) > number + 1
            )
        )
        if number % 2:
            check(answer.result())  # it has come to rest, and so has what serves it
        else:
            time.sleep(dice.uniform(0, 0.03))
        other.kill()
        until(lambda: leases(one) == 0, within_s=MISS_S)
    settle(one, before, until)
    other = start(cast, "d")
    outcome = other.ask("decode", request_id="last", tokens=PROMPT, params=prefill(one, "last"))
    check(outcome)
    assert outcome["loaded"] == BLOCKS
