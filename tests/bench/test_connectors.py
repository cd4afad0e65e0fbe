from pathlib import Path

import bench_cases
import pytest
from bench_cases import Prepared

from wtransfer.bench import connectors
from wtransfer.bench.connectors import KINDS, Settings, StampModel
from wtransfer.bench.harness import Runner
from wtransfer.errors import DigestMismatchError, PeerLostError
from wtransfer.testing.mini_engine.cache import PagedCache
from wtransfer.testing.mini_engine.config import CacheShape, ModelShape

SHM, _, STORAGE = (kind.connector for kind in KINDS[:3])


def run(runner, connector, decode=connectors.decode, prefill=connectors.prefill, **of_prefill):
    keywords = {"connector": connector, "block_nbytes": 8192, "num_blocks": 5, "num_rounds": 2}
    return runner.run("a test", decode, prefill, 1, **keywords, **of_prefill)


@pytest.mark.slow
def test_rounds_of_a_connector_are_timed_beside_plain_copies(runner):
    found = run(runner, SHM).trainer
    assert found.keys() == {"load", "load_memcpy", "save", "save_memcpy"}
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in found.values())


def test_scheduler_side_is_asked_again_and_again(runner):
    keywords = {"connector": SHM, "num_blocks": 5, "num_rounds": 2, "pause_s": 0.0}
    found = runner.run("a test", connectors.plan, **keywords).trainer
    assert len(found) == 2
    assert min(found) > 0


def test_rows_have_the_goals_of_their_kind_direction_and_block():
    seconds = {key: [1.0] for key in ("load", "load_memcpy", "save", "save_memcpy")}

    def goals(settings):
        return {
            row.name: row.measure(Prepared(seconds)).goal
            for row in connectors.rows(settings)
            if not row.name.startswith("plan")
        }

    found = goals(Settings())
    assert found.pop("load-shm-2MiB") == found.pop("save-shm-2MiB") == (">=", 0.85)
    assert found.pop("load-storage-2MiB") == (">=", 0.6)
    assert found.pop("load-storage-128KiB") == (">=", 0.15)
    assert {"load-shm-128KiB", "load-process-group-128KiB", "save-storage-2MiB"} <= found.keys()
    assert set(found.values()) == {None}
    assert set(goals(Settings.quick()).values()) == {None}


def test_files_of_a_killed_process_are_in_the_runs_folder_and_go_with_it(tmp_path):
    folder, seen = tmp_path / "kept", tmp_path / "seen"
    folder.mkdir()
    sides = (bench_cases.decode, bench_cases.prefill_and_die)
    with Runner(["bench_cases"], str(folder)) as runner, pytest.raises(PeerLostError):
        run(runner, STORAGE, *sides, seen=str(seen))
    files = seen.read_text().splitlines()
    assert files
    assert all(Path(file).is_relative_to(folder) for file in files)
    assert list(folder.iterdir()) == []


def test_side_that_dies_ends_the_case_and_no_process_is_left(runner, children):
    with pytest.raises(PeerLostError, match=r"_and_die\) ended with -9"):
        run(runner, SHM, prefill=bench_cases.prefill_and_die)
    assert children() == []


def test_other_bytes_are_no_measurement(runner):
    said = "round 0 of the bench brought other bytes than were computed: block 4 of 5, layer 31"
    with pytest.raises(PeerLostError, match=said):
        run(runner, STORAGE, prefill=bench_cases.prefill_another_page)


def test_load_that_brings_too_little_is_no_measurement(runner):
    with pytest.raises(PeerLostError, match="SharedMemoryConnector brought 64 of 80 tokens"):
        run(runner, SHM, prefill=bench_cases.prefill_one_block_less)


@pytest.fixture
def cache():
    return PagedCache(ModelShape(32, 1, 1, 1), CacheShape(16, 4), 1)


@pytest.fixture
def model(cache):
    """A model that has written blocks 2, 0 and 1 in round 3."""
    made = StampModel()
    made.use(cache)
    spans = [type("Span", (), {"start": 0, "tokens": [3], "block_ids": ([2, 0, 1, 3],)})]
    made.forward(spans, cache, None, lambda _: None, lambda _: None)
    return made


def test_pages_are_known_by_round_place_and_layer(model, cache):
    model.check(3, [2, 0, 1])
    for number, block_ids, at in ((2, [2, 0, 1], 0), (3, [2, 1, 0], 1), (3, [2, 0, 3], 2)):
        with pytest.raises(DigestMismatchError, match=f"block {at} of 3, layer 0"):
            model.check(number, block_ids)
    first, second = cache.layers[5], cache.layers[6]
    first[1], second[1] = second[1].clone(), first[1].clone()
    with pytest.raises(DigestMismatchError, match="block 2 of 3, layer 5"):
        model.check(3, [2, 0, 1])


def test_words_that_have_changed_places_are_other_bytes(model, cache):
    page = cache.layers[0][2].view(-1)
    page[:8], page[8:16] = page[8:16].clone(), page[:8].clone()
    with pytest.raises(DigestMismatchError, match="block 0 of 3, layer 0"):
        model.check(3, [2, 0, 1])
