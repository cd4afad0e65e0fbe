"""Prefill and decode on hosts of their own, whose cables can be pulled."""

from __future__ import annotations

import contextlib
import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # network namespaces

PARTS = runpy.run_path(str(Path(__file__).parents[2] / "flows" / "namespaces.py"))
PROMPT = [n % 251 for n in range(642)]
BLOCKS = 40
DEADLINE_S = 3.5  # a busy machine stands still for seconds
MISS_S = 10.0  # a load that only its usual deadline ends takes 30 s


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
def start_pair(cast, hosts):
    """Starter of prefill and decode, each on its host."""

    def start(**options):
        names = zip(("p", "d"), hosts, strict=True)
        return [cast.start(name, host=host, **options) for name, host in names]

    return start


def prefill(one):
    return one.ask("prefill", prompt=PROMPT)


def decode(other, params):
    return other.begin("decode", prompt=PROMPT, params=params)


def stats(rank):
    return rank.ask("stats")


def test_a_pulled_cable_is_a_miss_in_time_and_the_next_prompt_goes_through(
    start_pair, hosts, until
):
    one, other = start_pair(deadline_s=DEADLINE_S)
    params = prefill(one)
    # The kernel writes 10.77.0.1 as one number, as it stands in memory.
    assert set(one.ask("listeners")) == {"01004D0A"}
    assert set(other.ask("listeners")) == {"02004D0A"}
    assert decode(other, params).result()["loaded"] == BLOCKS
    until(lambda: stats(one)["leases"] == 0)
    params = prefill(one)
    hosts[0].link(up=False)
    outcome = decode(other, params).result()
    assert (outcome["matched"], outcome["loaded"]) == (BLOCKS, 0)
    assert outcome["load_s"] < MISS_S
    assert stats(other)["blocks_missed_stalled_total"] == BLOCKS
    until(lambda: stats(one)["clients"] == 0)
    hosts[0].link(up=True)
    # The one that never came is kept until its lease runs out; another is not held up by it.
    assert decode(other, prefill(one)).result()["loaded"] == BLOCKS


def test_either_side_killed_across_hosts_is_heard_of_soon(cast, start_pair, hosts, until):
    one, other = start_pair()
    assert decode(other, prefill(one)).result()["loaded"] == BLOCKS
    answer = decode(other, prefill(one))
    until(lambda: stats(one)["lookups_total"] == 2)
    other.kill()
    until(lambda: stats(one)["leases"] == stats(one)["clients"] == 0, within_s=MISS_S)
    del answer
    again = cast.start("d", host=hosts[1])
    params = prefill(one)
    answer = decode(again, params)
    one.kill()
    assert answer.result()["load_s"] < MISS_S
