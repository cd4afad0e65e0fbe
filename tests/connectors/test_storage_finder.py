"""Looking for blocks: never less often than is safe, and not much more often."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from wtransfer.connectors.storage.finder import REMEMBERED_S, Finder
from wtransfer.connectors.storage.store import Store, file_name, shelf_name

NUM_RANKS = 8
NAMES = [bytes([n]) * 36 for n in range(50)]
SHELF = shelf_name(b"root", "fingerprint")


class Clock:
    """A clock that stands still until it is told to go on."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Looks:
    """How often something was looked for in the folder since the last time."""

    def __init__(self, monkeypatch):
        self._number, stat = 0, os.stat

        def counting(*args, **more):
            self._number += 1
            return stat(*args, **more)

        monkeypatch.setattr(os, "stat", counting)

    def __call__(self):
        number, self._number = self._number, 0
        return number


@pytest.fixture
def store(tmp_path):
    made = Store(str(tmp_path))
    yield made
    made.close()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def finder(store, clock):
    return Finder(store, NUM_RANKS, clock)


@pytest.fixture
def keep(store):
    """Stores blocks, of all ranks."""

    def make(names, shelf=SHELF):
        with store.make_shelf(shelf) as opened:
            for name in names:
                for rank in range(NUM_RANKS):
                    (Path(opened.path) / file_name(name, rank)).touch()

    return make


@pytest.fixture
def lose(store):
    """Removes the file of one rank."""
    return lambda name, rank=3: (Path(store.path) / SHELF / file_name(name, rank)).unlink()


@pytest.fixture
def looks(monkeypatch, keep):
    keep(NAMES[:40])
    return Looks(monkeypatch)


def test_each_block_is_looked_for_once(finder, looks):
    assert (finder.num_found(SHELF, NAMES), looks()) == (40, 40 * NUM_RANKS + 1)
    # The last one that is there, and the next one, which is not.
    assert (finder.num_found(SHELF, NAMES), looks()) == (40, NUM_RANKS + 1)
    assert (finder.num_found(SHELF, NAMES[10:40]), looks()) == (30, NUM_RANKS)
    assert (finder.num_found(SHELF, NAMES[:10]), looks()) == (10, NUM_RANKS)


def test_another_request_that_begins_alike_is_looked_for_from_there_on(finder, looks, keep):
    other = [*NAMES[:30], *(bytes([n]) * 36 for n in range(100, 110))]
    keep(other[30:])
    finder.num_found(SHELF, NAMES[:30])
    looks()
    assert (finder.num_found(SHELF, other), looks()) == (40, 11 * NUM_RANKS)


def test_what_comes_is_found_at_once(finder, looks, keep):
    finder.num_found(SHELF, NAMES)
    keep(NAMES[40:45])
    assert finder.num_found(SHELF, NAMES) == 45


@pytest.mark.parametrize("rank", [0, 7])
def test_an_end_that_goes_is_missed_at_once(finder, looks, lose, rank):
    finder.num_found(SHELF, NAMES)
    for name in NAMES[39:30:-1]:
        lose(name, rank)
        assert finder.num_found(SHELF, NAMES) == NAMES.index(name)


@pytest.mark.parametrize("num_kept", [0, 3])
def test_a_shelf_that_goes_is_missed_at_once(finder, looks, store, keep, num_kept):
    finder.num_found(SHELF, NAMES)
    store.remove_shelf(SHELF)
    if num_kept:
        keep(NAMES[:num_kept])
    assert finder.num_found(SHELF, NAMES) == num_kept


def test_nothing_of_a_shelf_that_was_seen_to_be_gone_is_remembered(finder, looks, store, keep):
    finder.num_found(SHELF, NAMES)
    store.remove_shelf(SHELF)
    assert finder.num_found(SHELF, NAMES) == 0
    keep(NAMES[5:40])
    assert finder.num_found(SHELF, NAMES) == 0


def test_a_middle_that_goes_is_missed_after_a_moment(finder, looks, lose, clock):
    finder.num_found(SHELF, NAMES)
    lose(NAMES[7])
    clock.now += REMEMBERED_S * 0.9
    assert finder.num_found(SHELF, NAMES) == 40
    # Not from the last time on that somebody has asked, but from when it was seen.
    clock.now += REMEMBERED_S * 0.2
    assert finder.num_found(SHELF, NAMES) == 7


def test_a_middle_that_goes_is_missed_at_once_by_who_is_told_to_look(finder, looks, lose):
    finder.num_found(SHELF, NAMES)
    lose(NAMES[7])
    finder.forget()
    assert finder.num_found(SHELF, NAMES) == 7


def test_a_look_that_takes_long_is_not_in_vain(store, looks, monkeypatch):
    """On a slow disk what was seen would else be forgotten before it is of use."""
    clock = Clock()
    stat = os.stat

    def slow(*args, **more):
        clock.now += 0.1
        return stat(*args, **more)

    monkeypatch.setattr(os, "stat", slow)
    finder = Finder(store, NUM_RANKS, clock)
    finder.num_found(SHELF, NAMES[:40])
    looks()
    assert (finder.num_found(SHELF, NAMES[:40]), looks()) == (40, NUM_RANKS)


def test_what_was_seen_on_one_shelf_is_not_taken_to_be_on_another(finder, looks, keep):
    other = shelf_name(b"root", "another fingerprint")
    keep([NAMES[39]], other)
    finder.num_found(SHELF, NAMES)
    assert finder.num_found(other, NAMES) == 0
    assert finder.num_found(SHELF, NAMES) == 40
