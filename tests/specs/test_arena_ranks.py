"""Ranks of one host: one arena, found by engine id, whoever comes, goes and comes again."""

import os
import secrets
import signal
import time
from pathlib import Path

import pytest


@pytest.fixture
def engine():
    """What all ranks of one engine have in common."""
    return {
        "engine_id": f"engine-{secrets.token_hex(4)}",
        "world_size": 2,
        "num_slots": 6,
        "num_blocks": 4,
        "deadline_s": 5.0,
    }


@pytest.fixture
def pair(start_rank, engine):
    """Both ranks of an engine."""
    zero, one = start_rank(), start_rank()
    # The one that has to wait for the other comes first.
    one.order("open", rank=1, **engine)
    inode = zero.ask("open", rank=0, **engine)
    assert one.answer() == inode
    return zero, one


def test_ranks_have_one_arena_and_each_its_own_part(pair):
    for rank in pair:
        assert rank.ask("store", number=3, slot=2)
    for rank in pair:
        assert rank.ask("load", number=3, slot=2) == [True, True]
        assert rank.ask("look")["whole"] == 1


def test_what_one_rank_has_not_stored_is_not_there_for_it(pair):
    zero, one = pair
    assert zero.ask("store", number=3, slot=2)
    assert one.ask("load", number=3, slot=2) == [False, False]
    assert one.ask("failures") == {"loads_failed_absent": 1}


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_takes_nothing_along_and_finds_its_blocks_again(
    pair, killed, start_rank, engine
):
    for rank in pair:
        assert rank.ask("store", number=3, slot=2)
    pair[killed].kill()
    other = pair[1 - killed]
    assert other.ask("load", number=3, slot=2) == [True, True]
    assert other.ask("store", number=4, slot=3)
    again = start_rank(rank=killed, **engine)
    assert again.ask("load", number=3, slot=2) == [True, True]
    assert again.ask("store", number=4, slot=3)
    assert again.ask("load", number=4, slot=3) == [True, True]
    assert other.ask("load", number=4, slot=3) == [True, True]


def test_the_arena_goes_from_rank_to_rank(start_rank, engine):
    """Nobody who made it is there any more, and it is still the same one."""
    ranks = [start_rank(rank=rank, **{**engine, "world_size": 3}) for rank in range(3)]
    ranks[1].ask("store", number=3, slot=2)
    ranks[0].kill()
    ranks[2].kill()
    ranks[2] = start_rank(rank=2, **{**engine, "world_size": 3})
    ranks[0] = start_rank(rank=0, **{**engine, "world_size": 3})
    ranks[1].kill()
    ranks[1] = start_rank(rank=1, **{**engine, "world_size": 3})
    assert ranks[1].ask("load", number=3, slot=2) == [True, True]


def test_a_rank_that_leaves_in_good_order_can_come_again(pair, engine):
    _, one = pair
    assert one.ask("store", number=3, slot=2)
    one.ask("close")
    one.ask("open", rank=1, **engine)
    assert one.ask("load", number=3, slot=2) == [True, True]


def test_when_all_have_gone_a_new_arena_is_empty(pair, start_rank, engine):
    zero, one = pair
    assert one.ask("store", number=3, slot=2)
    zero.kill()
    one.kill()
    zero = start_rank(rank=0, **engine)
    one = start_rank(rank=1, **engine)
    assert one.ask("look") == {"whole": 0, "empty": one.ask("num_slots"), "begun": 0, "wrong": 0}


def test_a_rank_of_another_layout_is_refused_and_the_field_named(pair, start_rank, engine):
    pair[1].kill()
    late = start_rank()
    engine = {**engine, "deadline_s": 0.3}
    with pytest.raises(start_rank.error) as caught:
        late.ask("open", rank=1, **{**engine, "num_slots": 12})
    assert caught.value.kind == "ProtocolError"
    assert f"rank 1 of engine '{engine['engine_id']}' wants an arena with num_slots" in str(
        caught.value
    )
    with pytest.raises(start_rank.error, match="wants an arena with part_nbytes 4096"):
        late.ask("open", rank=1, **{**engine, "page_nbytes": [1024], "num_layers": 4})
    with pytest.raises(start_rank.error, match="wants an arena with num_ranks 3"):
        late.ask("open", rank=1, **{**engine, "world_size": 3})
    late.ask("open", rank=1, **engine)


def test_an_engine_that_is_ending_is_waited_for_though_its_arena_is_another(
    pair, start_rank, engine
):
    """It had another size, and its last rank takes a while to go."""
    zero, one = pair
    zero.kill()
    again = start_rank()
    again.order("open", rank=0, **{**engine, "num_slots": 12})
    time.sleep(0.5)
    one.kill()
    inode = again.answer()
    other = start_rank()
    assert other.ask("open", rank=1, **{**engine, "num_slots": 12}) == inode


def test_two_engines_with_one_id_are_told_apart(pair, start_rank, engine):
    third = start_rank()
    with pytest.raises(start_rank.error) as caught:
        third.ask("open", rank=0, **{**engine, "deadline_s": 0.3})
    assert caught.value.kind == "AddressInUseError"
    assert (
        f"rank 0 of engine '{engine['engine_id']}' is there already, as process {pair[0].pid}"
        in caught.value.text
    )
    assert pair[0].ask("store", number=3, slot=2), "nobody is disturbed"


def test_engines_with_other_ids_have_other_arenas(pair, start_rank, engine):
    other = {**engine, "engine_id": engine["engine_id"] + "-2"}
    third = start_rank(rank=0, **other)
    assert pair[0].ask("store", number=3, slot=2)
    assert third.ask("look")["whole"] == 0


def test_a_rank_that_is_left_alone_says_so(start_rank, engine):
    alone = start_rank()
    with pytest.raises(start_rank.error) as caught:
        alone.ask("open", rank=1, **{**engine, "deadline_s": 0.3})
    assert caught.value.kind == "StallError"
    assert "rank 1 of 2" in caught.value.text
    assert "found no arena within 0.3 s: rank 0, which makes it, has not got" in caught.value.text
    # What it had claimed is free again.
    zero = start_rank(rank=0, **engine)
    alone.ask("open", rank=1, **engine)
    assert zero.ask("store", number=3, slot=2)


def test_a_rank_that_has_stopped_does_not_keep_another_from_coming(start_rank, engine):
    options = {**engine, "world_size": 3}
    ranks = [start_rank(rank=rank, **options) for rank in range(3)]
    ranks[1].ask("store", number=3, slot=2)
    ranks[1].kill()
    os.kill(ranks[0].pid, signal.SIGSTOP)
    again = start_rank(rank=1, **options)
    assert again.ask("load", number=3, slot=2) == [True, True]
    os.kill(ranks[0].pid, signal.SIGCONT)


def test_nothing_of_it_has_a_name_in_a_file_system(pair):
    names = {
        line.split()[-1]
        for line in Path("/proc/net/unix").read_text().splitlines()
        if "wtransfer-arena" in line
    }
    assert names
    assert all(name.startswith("@") for name in names)
    assert not list(Path("/dev/shm").glob("*wtransfer*"))
