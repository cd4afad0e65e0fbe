"""Random interleavings of requests, commits and copies, judged by who knows what computed what."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from wtransfer.specs.fence.marks import FenceNote
from wtransfer.specs.fence.worker import FencedWorker

PARTS = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("fence_world.py"))))
MAX_RANKS = 3
RANKS = st.integers(0, MAX_RANKS - 1)
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=3).map(tuple)
FOUND = {"loaded": 0, "changes": 0, "refused": 0}


class FenceMachine(RuleBasedStateMachine):
    """Any order of events, with hashes so weak that different sequences meet all the time."""

    requests = Bundle("requests")

    @initialize(num_ranks=st.integers(1, MAX_RANKS), hash_nbits=st.sampled_from([3, 128]))
    def begin(self, num_ranks, hash_nbits):
        self.world = PARTS.World(num_ranks, capacity=7, hash_nbits=hash_nbits)
        self.world.tell()

    def _rank(self, number):
        return self.world.ranks[number % len(self.world.ranks)]

    def _number(self, number):
        return number % len(self.world.ranks)

    @rule(target=requests, tokens=TOKENS)
    def start(self, tokens):
        return self.world.start(tokens)

    @rule(request=requests)
    def compute(self, request):
        changing = any(rank.name is None for rank in self.world.ranks)
        if not request.busy and len(request.blocks) < len(request.tokens) and not changing:
            self.world.compute(request)

    @rule(request=requests)
    def load(self, request):
        if not request.busy:
            self.world.load(request)

    @rule(request=requests)
    def store(self, request):
        if not request.busy and request.blocks:
            self.world.store(request)

    @rule(target=requests, tokens=TOKENS)
    def load_at_once(self, tokens):
        """Begin as most requests do: with a load on its way to all ranks."""
        self.world.tell()
        request = self.world.start(tokens)
        job_id = self.world.load(request)
        if job_id is not None:
            for number in range(len(self.world.ranks)):
                self.world.submit(job_id, number)
        return request

    @rule(tokens=TOKENS, told=st.booleans())
    def serve(self, tokens, told):
        """Take the straight way, so that there is something to find."""
        if told:
            self.world.tell()
        request = self.world.start(tokens)
        self.world.load(request)
        self.world.finish_all()
        if all(rank.name for rank in self.world.ranks):
            while len(request.blocks) < len(tokens):
                self.world.compute(request)
            self.world.store(request)
            self.world.finish_all()

    @rule(request=consumes(requests))
    def end(self, request):
        self.world.manager.on_request_finished(request.context)

    @precondition(lambda self: self.world.jobs)
    @rule(data=st.data(), number=RANKS)
    def submit(self, data, number):
        job_id = data.draw(st.sampled_from(sorted(self.world.jobs)))
        if self._number(number) in self.world.jobs[job_id][5]:
            self.world.submit(job_id, self._number(number))

    @precondition(lambda self: self.world.jobs)
    @rule(data=st.data(), number=RANKS)
    def copy(self, data, number):
        self._rank(number).inner.run(data.draw(st.sampled_from(sorted(self.world.jobs))))

    @rule(number=RANKS)
    def collect(self, number):
        self.world.collect(self._number(number))

    @rule()
    def finish_all(self):
        self.world.finish_all()

    @rule(number=RANKS, name=st.sampled_from("AB"))
    def commit_one(self, number, name):
        self._rank(number).commit(name)

    @rule(name=st.sampled_from("AB"), told=st.booleans())
    def commit_all(self, name, told):
        for rank in self.world.ranks:
            rank.commit(name)
        if told:
            self.world.tell()

    @rule()
    def there_and_back(self):
        """Change twice, and nobody is told in between."""
        names = self.world.names()
        for rank in self.world.ranks:
            rank.commit("there")
        for rank, name in zip(self.world.ranks, names, strict=True):
            rank.commit(name or "A")

    @rule(number=RANKS)
    def begin_change(self, number):
        self._rank(number).begin_change()

    @rule()
    def tell(self):
        self.world.tell()

    @rule()
    def take_events(self):
        """Whatever an index believes to be there, is found."""
        self.world.take_events()
        stamps = self.world.manager._stamps
        if stamps is None or None in self.world.names():
            return
        self.world.finish_all()
        self.world.take_events()
        kept = {key[16:] for key, whole in self.world.inner.kept.items() if whole}
        assert self.world.index <= kept

    def teardown(self):
        if hasattr(self, "world"):
            self.world.finish_all()
            stats = self.world.manager.get_stats()
            assert self.world.manager._failure is None
            assert self.world.inner.pins.total() == 0
            FOUND["loaded"] += self.world.num_loaded
            FOUND["changes"] += stats["fence_changes_total"]
            FOUND["refused"] += sum(
                value
                for rank in self.world.ranks
                for name, value in rank.worker.get_stats().items()
                if name.startswith("fence_")
            )


def run(max_examples, steps, **options):
    run_state_machine_as_test(
        FenceMachine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
            derandomize=True,
            **options,
        ),
    )


def test_no_hit_is_a_block_of_other_weights_or_of_a_request_that_lived_through_a_commit():
    FOUND.update(dict.fromkeys(FOUND, 0))
    run(80, 40)
    # The witness: there was something to find, weights did change, and jobs were refused.
    assert min(FOUND["loaded"], FOUND["changes"], FOUND["refused"]) > 0, FOUND


@pytest.mark.nightly
def test_no_such_hit_in_many_more_interleavings():
    run(1_000, 80)


def admits_all(worker, marked):
    return worker.stamp()


def fences_by_nothing(note, key, witnesses, spoiled):
    note._fenced[key] = key
    return key


def fences_without_witnesses(note, key, witnesses, spoiled):
    return FENCE(note, key, None, spoiled)


FENCE = FenceNote.fence
BREAKAGES = {
    "the worker compares nothing": (FencedWorker, "_admitted", admits_all),
    "keys without weights": (FenceNote, "fence", fences_by_nothing),
    "keys without witnesses": (FenceNote, "fence", fences_without_witnesses),
    "a load is not compared again": (FencedWorker, "_judged", lambda worker, result: result),
}


@pytest.mark.slow
@pytest.mark.parametrize("breakage", BREAKAGES)
def test_the_judge_catches_a_fence_with_a_hole(monkeypatch, breakage):
    monkeypatch.setattr(*BREAKAGES[breakage])
    with pytest.raises((AssertionError, KeyError)):
        run(400, 40, phases=[Phase.generate], report_multiple_bugs=False, print_blob=False)
