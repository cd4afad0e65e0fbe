"""Prefixes in a shared folder: stored by one instance, loaded by another, never wrong."""

from __future__ import annotations

import gc
import shutil
import time
import weakref

import pytest
from host import MODEL
from msgspec.structs import replace
from sides import request_of

from wtransfer.specs.file import FORMAT

CONNECTOR = "SharedStorageConnector"
PROMPT = list(range(30))
NUM_BLOCKS = 7
"""Whole blocks of the prompt; two tokens are left."""


@pytest.fixture
def make(leaves_nothing, host, tmp_path):
    """Maker of hosts that share a folder."""

    def made(**options):
        return host(CONNECTOR, shared_storage_path=str(tmp_path / "shared"), **options)

    return made


def files(tmp_path, pattern="*"):
    return sorted((tmp_path / "shared" / FORMAT / "blocks").glob(pattern))


def ask(connector, request):
    """Return how many tokens can be loaded, once the folder has been looked at."""
    end = time.monotonic() + 10
    while (found := connector.get_num_new_matched_tokens(request, 0)[0]) is None:
        assert time.monotonic() < end
        time.sleep(0.0005)
    return found


def test_prefix_of_one_instance_is_loaded_by_another(make, tmp_path):
    make(num_ranks=2).serve(PROMPT, 6)
    # 30 tokens and 5 that were computed: eight whole blocks.
    assert len(files(tmp_path)) == 8 * 2
    served = make(num_ranks=2).serve(PROMPT, 6)
    assert (served.loaded, served.failures) == (NUM_BLOCKS, 0)


def test_producer_only_stores_and_consumer_only_loads(make, tmp_path):
    consumer, producer = make(role="kv_consumer"), make(role="kv_producer")
    consumer.serve(PROMPT)
    assert files(tmp_path) == []
    assert [producer.serve(PROMPT).matched for _ in range(2)] == [0, 0]
    # Nor does it write what is there.
    assert producer.stats["puts_total"] == len(files(tmp_path)) == NUM_BLOCKS
    assert consumer.serve(PROMPT + PROMPT).loaded == NUM_BLOCKS
    assert len(files(tmp_path)) == NUM_BLOCKS


def test_layouts_do_not_replace_each_others_blocks(make):
    shapes = [{}, {"model": replace(MODEL, num_layers=3)}, {"num_ranks": 2}]
    for loaded in (0, NUM_BLOCKS, NUM_BLOCKS):
        for shape in shapes:
            served = make(**shape).serve(PROMPT)
            assert (served.loaded, served.failures) == (loaded, 0)


@pytest.mark.parametrize("name", ["../../up", "/etc", "a\0b", "n" * 300, "", "ключ"])
def test_model_names_cannot_leave_the_folder(sides, tmp_path, name):
    """FAULTS 35."""
    one, other = (
        sides(CONNECTOR, model=name, shared_storage_path=str(tmp_path / "shared")) for _ in range(2)
    )
    one.keep(request_of("r", 9), [0, 1, 2])
    assert ask(other.scheduler, request_of("s", 9)) == 8
    assert [each.name for each in tmp_path.iterdir()] == ["shared"]
    assert [each.name for each in (tmp_path / "shared").iterdir()] == [FORMAT]


def test_blocks_of_which_one_rank_has_lost_one_are_recomputed_and_stored_right(make, tmp_path):
    """On both ranks: what one computes after that depends on what the other lacks."""
    longer = PROMPT + list(range(50, 71))
    make(num_ranks=2).serve(PROMPT)
    # The key ends in the rank.
    first_rank = sorted(files(tmp_path, "*0000"), key=lambda each: each.stat().st_mtime_ns)
    first_rank[3].write_bytes(b"")
    served = make(num_ranks=2).serve(longer, 3)
    assert (served.matched, served.loaded, served.failures) == (NUM_BLOCKS, 0, 1)
    served = make(num_ranks=2).serve(longer, 3)
    assert (served.matched, served.loaded, served.failures) == (12, 12, 0)


def test_blocks_removed_by_hand_are_stored_again(make, tmp_path):
    made = make()
    made.serve(PROMPT)
    shutil.rmtree(tmp_path / "shared" / FORMAT)
    assert made.serve(PROMPT).loaded == 0
    assert make().serve(PROMPT).loaded == NUM_BLOCKS


def test_reset_is_refused_as_other_instances_share_the_folder(make):
    assert make().scheduler.connector.reset_cache() is False


def test_least_recently_used_prefix_is_evicted_from_its_end(make, tmp_path):
    def nbytes():
        return sum(each.stat().st_size for each in files(tmp_path))

    prompts = {name: [n, *PROMPT] for n, name in enumerate("abcdefgh")}
    make().serve(prompts["a"])
    # One thread: files are written in the order in which they are put.
    small, of_one, most = make(max_bytes=4 * nbytes(), num_io_threads=1), nbytes(), 0
    for name in "bcadefagh":
        small.serve(prompts[name])
        most = max(most, nbytes())
    assert 3 * of_one < most <= 4 * of_one
    assert small.stats["files_evicted_total"] > 0
    found = {}
    for name, prompt in prompts.items():
        request = request_of(name, 31)
        request.prompt_token_ids[:] = request.all_token_ids[:] = prompt
        found[name] = ask(small.scheduler_side.side, request)
    assert [name for name, number in found.items() if number == 28] == ["a", "g", "h"]
    # What goes of a prefix is its end.
    assert found["f"]
    assert not any(found[name] for name in "bcd")


def test_cache_is_released_by_shutdown(sides, tmp_path):
    made = sides(CONNECTOR, shared_storage_path=str(tmp_path))
    made.keep(request_of("r", 9), [0, 1, 2])
    caches = [weakref.ref(each) for each in made.caches[0].values()]
    made.close()
    made.caches.clear()
    gc.collect()
    assert [each() for each in caches] == [None] * len(caches)
