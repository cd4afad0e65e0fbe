import pytest
from bench_cases import Prepared

from wtransfer.bench import offload, tiers
from wtransfer.bench.harness import MIB, Setup
from wtransfer.bench.offload import Settings
from wtransfer.errors import DigestMismatchError, OffloadingOptionError

SETUP = Setup(0, 0, "", "", "")
SMALL = {"block_nbytes": 32 << 10, "num_blocks": 4, "num_rounds": 1}


@pytest.fixture(autouse=True)
def _priority(monkeypatch):
    """Leave the priority of the test's process as it is."""
    monkeypatch.setattr(offload.os, "nice", lambda _niceness: None)


def test_goals_are_those_of_large_blocks_and_checksummed_copies():
    rows = {row.name: row for row in offload.rows(Settings())}
    found = {"memcpy-put": [1.0], "memcpy-get": [1.0]} | {
        key: [2.0] for key in ("put", "get", "put-unverified", "get-unverified")
    }
    goals = {
        name: row.measure(Prepared(found)).goal
        for name, row in rows.items()
        if name.startswith(("put", "get"))
    }
    assert goals.pop("put-2MiB") == goals.pop("get-2MiB") == (">=", 0.9)
    assert goals.pop("put-128KiB") == goals.pop("get-128KiB") == (">=", 0.6)
    assert {"put-16KiB", "put-16KiB-unverified"} <= goals.keys()
    assert set(goals.values()) == {None}
    assert offload.goal_of_copies(offload.GOALS, 2 * MIB, 64 * MIB) is None


def test_vllms_manager_stands_beside_ours_or_the_row_says_why_not():
    found = offload.time_managers(SETUP, num_blocks=64, num_rounds=1, policy="lru")
    assert found["ours"].keys() == set(offload.OPERATIONS)
    assert all(len(each) == 1 and each[0] > 0 for each in found["ours"].values())
    assert bool(found["vllm"]) != bool(found["missing"])


def test_round_times_every_way_to_copy(one_thread):
    found = offload.copy_rounds(SETUP, **SMALL)
    ways = {"put", "get", "put-unverified", "get-unverified"}
    assert found.keys() == ways | {"memcpy-put", "memcpy-get"}
    assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in found.values())


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        # Nothing was ever stored: loads fail, and say so.
        ("submit_store", "loads_failed_absent_total"),
        ("submit_load", "round 0 of the bench brought other bytes"),
    ],
)
def test_copies_that_do_nothing_are_no_measurement(one_thread, monkeypatch, broken, said):
    make = offload.Arena.__init__

    def make_broken(arena, *arguments, **keywords):
        make(arena, *arguments, **keywords)
        setattr(arena._worker, broken, lambda *_: True)

    monkeypatch.setattr(offload.Arena, "__init__", make_broken)
    with pytest.raises(DigestMismatchError, match=said):
        offload.copy_rounds(SETUP, **SMALL)


def test_tier_stands_beside_its_client(one_thread, tmp_path):
    setup = SETUP._replace(folder=str(tmp_path))
    found = tiers.tier_rounds(setup, options={"tier": "file"}, **SMALL)
    ways = {
        f"{way}-{direction}" for way in ("memcpy", "client", "ours") for direction in ("put", "get")
    }
    assert found.keys() == ways
    assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in found.values())
    assert not list(tmp_path.rglob("blocks/*"))


def test_blocks_are_found_though_answers_are_soon_of_no_use(one_thread, tmp_path, monkeypatch):
    setup = SETUP._replace(folder=str(tmp_path))
    monkeypatch.setattr("wtransfer.specs.tier_manager.FRESH_S", 0.002)
    many = {**SMALL, "block_nbytes": 1 << 10, "num_blocks": 256}
    found = tiers.tier_rounds(setup, options={"tier": "file"}, **many)
    assert found["ours-get"][0] > 0


def test_load_from_a_tier_stands_beside_computing(one_thread, tmp_path):
    setup = SETUP._replace(folder=str(tmp_path))
    found = tiers.serve_twice(setup, options={"tier": "file"})
    assert min(found.values()) > 0


def test_spec_that_is_no_tier_is_refused():
    with pytest.raises(OffloadingOptionError, match="CPUOffloadingSpec"):
        tiers.tier_rounds(SETUP, options={"tier": "CPUOffloadingSpec"}, **SMALL)


def test_rows_of_a_tier_are_measured_in_place_of_those_of_the_arena():
    rows = [row.name for row in tiers.rows(Settings(tier="file"))]
    assert rows[:2] == ["tier-put-2MiB", "tier-get-2MiB"]
    assert rows[-1] == "tier-recompute"
    assert len(rows) == 7
