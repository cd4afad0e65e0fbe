"""Prefill and decode on hosts of their own, whose cables can be pulled."""

from __future__ import annotations

import contextlib
import runpy
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # network namespaces

PARTS = runpy.run_path(str(Path(__file__).parents[2] / "flows" / "namespaces.py"))
PROMPT = list(range(900, 1142))
BLOCKS = 60
SIZE = {"layers": 4, "page_nbytes": 64 * 1024, "num_blocks": 128}
DEADLINE_S = 2.0
OPTIONS = {"shelf_bytes": 64 << 20, "deadline_s": DEADLINE_S}
MISS_S = 1.0


@pytest.fixture
def kind():
    return "ProcessGroupConnector"


@pytest.fixture
def hosts():
    """Two hosts."""
    with contextlib.ExitStack() as stack:
        try:
            network = stack.enter_context(PARTS["Network"](2))
        except PARTS["UnavailableError"] as error:
            pytest.skip(f"needs network namespaces (root on Linux, iproute2): {error}")
        yield network.hosts


@pytest.fixture
def pair(cast, hosts):
    """Prefill and decode, each on its host."""
    return [
        cast.start(name, host=host, options=OPTIONS, **SIZE)
        for name, host in zip(("p", "d"), hosts, strict=True)
    ]


def prefill(one, request_id):
    return one.ask("prefill", request_id=request_id, tokens=PROMPT)


def decode(other, request_id, params):
    return other.begin("decode", request_id=request_id, tokens=PROMPT, params=params)


def worker(rank):
    return rank.ask("stats")["workers"][0]


def test_a_pulled_cable_is_a_miss_in_time_and_the_next_prompt_goes_through(pair, hosts, until):
    one, other = pair
    params = prefill(one, "first")
    # The kernel writes 10.77.0.1 as one number, as it stands in memory.
    assert set(one.ask("listeners")) == {"01004D0A"}
    assert set(other.ask("listeners")) == {"02004D0A"}
    outcome = decode(other, "first", params).result()
    assert (outcome["loaded"], outcome["wrong"]) == (BLOCKS, 0)
    until(lambda: worker(one)["leases"] == 0)
    params = prefill(one, "second")
    hosts[0].link(up=False)
    outcome = decode(other, "second", params).result()
    assert (outcome["matched"], outcome["loaded"], outcome["wrong"]) == (BLOCKS, 0, 0)
    assert outcome["seconds"] < DEADLINE_S * 1.1 + 0.5
    assert worker(other)["blocks_missed_stalled_total"] == BLOCKS
    until(lambda: worker(one)["clients"] == 0)
    hosts[0].link(up=True)
    # The one that never came is kept until its lease runs out; another is not held up by it.
    outcome = decode(other, "third", prefill(one, "third")).result()
    assert (outcome["loaded"], outcome["wrong"]) == (BLOCKS, 0)


def test_either_side_killed_across_hosts_is_heard_of_within_a_second(cast, pair, hosts, until):
    one, other = pair
    assert decode(other, "first", prefill(one, "first")).result()["loaded"] == BLOCKS
    params = prefill(one, "second")
    answer = decode(other, "second", params)
    until(lambda: worker(one)["lookups_total"] == 2)
    other.kill()
    killed = time.monotonic()
    until(lambda: worker(one)["leases"] == worker(one)["clients"] == 0)
    assert time.monotonic() - killed < MISS_S
    del answer
    again = cast.start("d", host=hosts[1], options=OPTIONS, **SIZE)
    params = prefill(one, "third")
    answer = decode(again, "third", params)
    one.kill()
    outcome = answer.result()
    assert outcome["wrong"] == 0
    assert outcome["seconds"] < MISS_S
