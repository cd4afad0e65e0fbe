"""The whole command, with real connectors between real processes; and that it notices mistakes."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from wtransfer.bench import scratch
from wtransfer.bench.command import bench
from wtransfer.bench.connectors import ConnectorSettings, connector_measures
from wtransfer.bench.jobs.kv_cache import KVCache
from wtransfer.bench.kinds import BETWEEN_INSTANCES, SHM, STORAGE
from wtransfer.bench.rows import connector_blocks
from wtransfer.bench.run import measure_rows
from wtransfer.bench.settings import Settings
from wtransfer.errors import DigestMismatchError, PeerLostError

RUN = [sys.executable, "-m", "wtransfer", "bench", "connectors"]
TINY = ("--quick", "--nbytes", "4MiB", "--blocks", "2MiB,64KiB", "--rounds", "1")
BLOCKS = {
    f"{way}-{kind}-{size}"
    for way in ("load", "save")
    for kind in ("shm", "process-group", "storage")
    for size in ("2MiB", "64KiB")
}
PLANS = {f"plan-{each}" for each in ("shm", "process-group", "storage", "offloading", "multi")}

DECODE, PREFILL = connector_blocks.DECODE, connector_blocks.PREFILL
PLAN = "wtransfer.bench.jobs.planning:measure"
SMALL = {"block_nbytes": 8192, "num_blocks": 5, "num_rounds": 2, "folder": None}


def refused(*arguments):
    result = CliRunner().invoke(bench, ["connectors", *arguments])
    assert result.exit_code != 0
    return " ".join(result.output.split())


def small(connector, **more):
    return (SMALL | {"connector": connector} | more).items()


def wait_until_gone(path):
    end = time.monotonic() + 20
    while Path(path).exists():
        assert time.monotonic() < end, f"{path} is still there"
        time.sleep(0.01)


@pytest.mark.slow
def test_every_row_is_measured():
    done = subprocess.run(
        [*RUN, *TINY, "--json"], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    rows = told["rows"]
    assert {name: row["error"] for name, row in rows.items()} == dict.fromkeys(BLOCKS | PLANS)
    for row in rows.values():
        assert 0 < row["low"] <= row["median"] <= row["high"]
        assert (row["reached"] is None) == (row["goal"] is None)
    # So few bytes say nothing of it.
    assert not any(row["goal"] for row in rows.values())
    assert told["settings"]["block_nbytes"] == [2 << 20, 64 << 10]
    assert told["settings"]["num_planned"] == 200


def test_one_row_has_a_goal():
    made = [each for each in connector_measures(ConnectorSettings()) if hasattr(each, "direction")]
    assert [each.name for each in made if each._is_the_goals()] == ["load-shm-2MiB"]


def test_what_is_measured_if_nothing_is_said():
    rows = {each.name for each in connector_measures(ConnectorSettings())}
    assert {"load-shm-2MiB", "load-process-group-128KiB", "save-storage-2MiB"} | PLANS <= rows
    assert ConnectorSettings().num_planned == 2000


@pytest.mark.parametrize(
    "connector",
    [SHM.connector]
    + [
        pytest.param(each.connector, marks=pytest.mark.slow)
        for each in BETWEEN_INSTANCES
        if each is not SHM
    ],
)
def test_rounds_of_a_connector_are_told_with_plain_copies_beside(play, connector):
    told = play(DECODE, PREFILL, arguments=small(connector)).trainer
    assert told.keys() == {"load", "load_memcpy", "save", "save_memcpy"}
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in told.values())


@pytest.mark.parametrize("connector", ["OffloadingConnector", "MultiConnector"])
def test_the_schedulers_side_is_asked_again_and_again(play, connector):
    told = play(PLAN, PLAN, num_workers=0, arguments=small(connector, pause_s=0.0)).trainer
    assert told.keys() == {"plan"}
    assert len(told["plan"]) == 2
    assert min(told["plan"]) > 0


def test_files_are_in_the_folder_that_was_asked_for_and_go_with_a_killed_process(play, tmp_path):
    folder, seen = tmp_path / "kept", tmp_path / "seen"
    folder.mkdir()
    more = {"folder": str(folder), "seen": str(seen)}
    with pytest.raises(PeerLostError):
        play(DECODE, "connector_jobs:prefill_and_die", arguments=small(STORAGE.connector, **more))
    used = Path(seen.read_text())
    assert used.parent == folder
    wait_until_gone(used)


@pytest.mark.parametrize(
    ("decode", "prefill"),
    [(DECODE, "connector_jobs:prefill_and_die"), ("connector_jobs:decode_and_die", PREFILL)],
)
def test_a_side_that_dies_ends_the_scene_and_no_process_is_left(zygote, play, decode, prefill):
    children = Path(f"/proc/{zygote.pid}/task/{zygote.pid}/children")
    with pytest.raises(PeerLostError, match=r"ended with -9|the bench's \w+ (has ended|is gone)"):
        play(decode, prefill, arguments=small(SHM.connector))
    assert children.read_text().split() == []


def test_bytes_that_are_not_what_they_should_be_are_noticed(play):
    said = "round 0 of the bench brought other bytes than were computed: block 4 of 5, layer 31"
    with pytest.raises(PeerLostError, match=said):
        play(DECODE, "connector_jobs:prefill_one_other_byte", arguments=small(STORAGE.connector))


def test_a_load_that_brings_too_little_is_no_measurement(play):
    with pytest.raises(PeerLostError, match="SharedMemoryConnector found 64 of 80 tokens"):
        play(DECODE, "connector_jobs:prefill_one_block_less", arguments=small(SHM.connector))


@pytest.mark.slow
def test_a_row_whose_child_dies_has_failed_and_the_next_is_measured(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    monkeypatch.setattr(connector_blocks, "PREFILL", "connector_jobs:prefill_and_die")
    settings = ConnectorSettings((64 << 10,), 1 << 20, num_planned=4, num_rounds=1)
    rows = {each.name: each for each in connector_measures(settings)}
    chosen = [rows["load-shm-64KiB"], rows["plan-shm"]]
    failed, measured = measure_rows(chosen, Settings(), lambda _: None)
    assert re.search("ended with -9|has ended|is gone", failed.error)
    assert measured.spread.median > 0


def test_a_cache_knows_its_bytes_by_round_place_and_layer():
    cache = KVCache(4, 32 * 16)
    cache.compute(3, [2, 0, 1])
    cache.check(3, [2, 0, 1])
    for number, block_ids, at in ((2, [2, 0, 1], 0), (3, [2, 1, 0], 1), (3, [2, 0, 3], 2)):
        with pytest.raises(DigestMismatchError, match=f"block {at} of 3, layer 0"):
            cache.check(number, block_ids)
    first, second = cache.layers["layer.5"], cache.layers["layer.6"]
    first[1], second[1] = second[1].clone(), first[1].clone()
    with pytest.raises(DigestMismatchError, match="block 2 of 3, layer 5"):
        cache.check(3, [2, 0, 1])


def test_words_that_have_changed_places_are_other_bytes():
    cache = KVCache(1, 32 * 16)
    cache.compute(0, [0])
    page = cache.layers["layer.0"][0]
    page[:8], page[8:] = page[8:].clone(), page[:8].clone()
    with pytest.raises(DigestMismatchError, match="block 0 of 1, layer 0"):
        cache.check(0, [0])


def test_a_folder_goes_though_something_in_it_has_gone_already(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    vanishing = (
        "import shutil\n"
        "real = shutil.rmtree\n"
        "def vanished(path):\n"
        "    shutil.rmtree = real\n"
        "    raise FileNotFoundError('renamed meanwhile')\n"
        "shutil.rmtree = vanished\n"
    )
    script = [sys.executable, "-I", "-S", "-c", vanishing + scratch._REMOVE, str(folder)]
    subprocess.run(script, stdin=subprocess.DEVNULL, timeout=30, check=True)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--only", "speed"), "there is no row 'speed'; there are load-shm-2MiB, save-shm-2MiB,"),
        (
            ("--blocks", "5000"),
            "blocks of 5000 bytes: expected a multiple of 256, 8 for each of 32",
        ),
        (("--blocks", "2048"), "at least 4096"),
        (("--blocks", "512MiB"), "at most the 268435456 of a round"),
        (("--nbytes", "100000GiB"), "this run needs"),
        (("--folder", "/nowhere/at/all"), "'/nowhere/at/all' does not exist"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments, said):
    assert said in refused(*arguments)


def test_conducting_needs_no_torch():
    code = "import sys, wtransfer.bench.connectors; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
