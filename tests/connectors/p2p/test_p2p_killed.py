"""Either side dies or stops, at any moment: what was not loaded is a miss, and nothing is left.

A host compares all that it serves with a fresh model, so an answer is right, or an error.
"""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

pytestmark = pytest.mark.slow  # by default the kit kills prefill

PROMPT = [n % 251 for n in range(642)]
BLOCKS = 40
MISS_S = 10.0  # a load that only the deadline ends takes 30 s


def stats(rank):
    return rank.ask("stats")


def prefill(one):
    return one.ask("prefill", prompt=PROMPT)


def decode(other, params):
    return other.begin("decode", prompt=PROMPT, params=params)


def check(outcome, *loaded):
    """Check that everything was asked for, and how much of it came."""
    assert outcome["matched"] == BLOCKS
    assert not loaded or outcome["loaded"] in loaded


def settle(rank, before, until):
    """Wait until a process holds no more than before."""
    until(lambda: all(now <= then for now, then in zip(rank.ask("holdings"), before, strict=True)))


def test_prefill_that_is_dead_is_a_miss_soon(cast):
    one, other = cast.start("p"), cast.start("d")
    params = prefill(one)
    one.kill()
    outcome = decode(other, params).result()
    check(outcome, 0)
    assert outcome["load_s"] < MISS_S
    assert stats(other)["loads_under_way"] == 0
    assert stats(other)["blocks_missed_lost_total"] == BLOCKS


@pytest.mark.parametrize("known", [False, True])
def test_prefill_that_is_stopped_is_a_miss_within_its_deadline(cast, known):
    one, other = cast.start("p", deadline_s=1.0), cast.start("d", deadline_s=1.0)
    if known:
        check(decode(other, prefill(one)).result(), BLOCKS)
    params = prefill(one)
    one.stop()
    outcome = decode(other, params).result()
    check(outcome, 0)
    assert outcome["load_s"] < MISS_S
    assert stats(other)["blocks_missed_stalled_total"] == BLOCKS


def test_decode_that_is_stopped_keeps_nothing_beyond_the_deadline(cast, until):
    one, other = cast.start("p", deadline_s=1.0), cast.start("d", deadline_s=1.0)
    answer = decode(other, prefill(one))
    until(lambda: stats(one).get("lookups_total"))
    other.stop()
    until(lambda: stats(one)["clients"] == 0)
    assert stats(one)["leases"] == 0
    os.kill(other.pid, signal.SIGCONT)
    check(answer.result())


@pytest.mark.parametrize("rounds", [10, pytest.param(60, marks=pytest.mark.nightly)])
@pytest.mark.timeout(600)
def test_prefill_killed_at_any_moment_leaves_no_wrong_byte(cast, until, rounds):
    dice = random.Random(rounds)
    other = cast.start("d")
    one, usual_s = cast.start("p"), []
    for _ in range(2):  # while the two meet, and when they have
        outcome = decode(other, prefill(one)).result()
        check(outcome, BLOCKS)
        usual_s.append(outcome["load_s"])
    one.kill()
    before, seen = other.ask("holdings"), set()
    for number in range(rounds):
        one = cast.start("p")
        if number % 2:  # so that it is known, and the kill does not come while the two meet
            check(decode(other, prefill(one)).result(), BLOCKS)
        answer = decode(other, prefill(one))
        time.sleep(dice.uniform(0, 1.5) * usual_s[number % 2])
        one.kill()
        outcome = answer.result()
        check(outcome)
        assert outcome["load_s"] < MISS_S
        seen.add(outcome["loaded"])
    assert stats(other)["loads_under_way"] == 0
    settle(other, before, until)
    if rounds == 60:  # the kills did come before, and after
        assert {0, BLOCKS} <= seen


@pytest.mark.parametrize("rounds", [10, pytest.param(60, marks=pytest.mark.nightly)])
@pytest.mark.timeout(600)
def test_decode_killed_at_any_moment_gives_its_blocks_back(cast, until, rounds):
    dice = random.Random(rounds)
    one, other = cast.start("p"), cast.start("d")
    check(decode(other, prefill(one)).result(), BLOCKS)
    other.kill()
    until(lambda: stats(one)["leases"] == 0)
    before = one.ask("holdings")
    for number in range(rounds):
        other = cast.start("d")
        answer = decode(other, prefill(one))
        # At least until it has asked: for one that never comes, the lease has to run out.
        until(lambda number=number: stats(one)["lookups_total"] > number + 1)
        if number % 2:
            check(answer.result(), BLOCKS)  # it has come to rest, and so has what serves it
        else:
            time.sleep(dice.uniform(0, 0.03))
        other.kill()
        until(lambda: stats(one)["leases"] == 0, within_s=MISS_S)
    settle(one, before, until)
    check(decode(cast.start("d"), prefill(one)).result(), BLOCKS)
