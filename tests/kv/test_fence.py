"""The fence's state machine: single events by a table, then any order of them."""

from __future__ import annotations

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

from wtransfer.kv.fence import InvalidatedKeys, SchedulerFence, WorkerFence
from wtransfer.kv.keys import BlockHashes, fence_key, make_offload_key
from wtransfer.weight_version import ProcessWeights, instance_fingerprint, known_versions

A, B = ("A", 1), ("B", 2)
KEY = make_offload_key(b"block")


@pytest.fixture
def fence():
    """Of two ranks that have reported the same weights."""
    made = SchedulerFence(2)
    made.update({0: A, 1: A})
    return made


# -- the scheduler's side


def test_no_request_begins_before_all_ranks_have_reported():
    fence = SchedulerFence(2)
    assert fence.begin("r") is None
    assert not fence.update({0: A})
    assert (fence.current, fence.begin("r")) == (None, None)
    assert not fence.update({1: A}), "the first weights are no change"
    assert fence.begin("r") == "A"
    assert known_versions([A, A]) == fence.versions("r")


@pytest.mark.parametrize(
    ("reports", "is_stale", "num_changes"),
    [
        ([], False, 0),
        ([{0: A}, {}, {0: A, 1: A}], False, 0),
        ([{0: B, 1: B}], True, 1),
        ([{1: B}], True, 1),
        ([{1: None}], True, 0),
        ([{1: None}, {1: A}], True, 0),
        ([{0: B, 1: B}, {0: ("A", 3), 1: ("A", 3)}], True, 2),
        ([{0: ("A", 3), 1: ("A", 3)}], True, 0),
        ([{0: None, 1: None}, {0: B, 1: B}], True, 1),
        ([{0: ("A", 0)}], False, 0),
    ],
    ids=[
        "no report",
        "the same again",
        "a commit",
        "a commit of one rank",
        "a commit begins",
        "a commit begins and changes nothing",
        "there and back",
        "there and back in one report",
        "a commit in two reports",
        "an overtaken report",
    ],
)
def test_a_request_is_stale_for_good_once_any_rank_reports_anything_else(
    fence, reports, is_stale, num_changes
):
    fence.begin("r")
    fence.ensure_begun("r")
    assert sum(fence.update(each) for each in reports) == num_changes
    fence.ensure_begun("r")
    expected = (None, None) if is_stale else (known_versions([A, A]), "A")
    assert (fence.versions("r"), fence.fingerprint("r")) == expected


def test_ranks_of_different_weights_have_a_fingerprint_together(fence):
    fence.update({1: B})
    together = fence.begin("r")
    assert instance_fingerprint(known_versions([A, B])) == together
    assert together not in ("A", "B")
    fence.update({0: ("B", 3), 1: ("A", 3)})
    assert fence.begin("r") not in ("A", "B", together), "which rank has which weights matters"


def test_a_request_without_blocks_begins_again_with_the_current_weights(fence):
    """Before its first blocks, and when it has lost them: all of it is computed from then on."""
    assert fence.begin("r") == "A"
    fence.update({0: B, 1: B})
    assert fence.begin("r") == "B"
    fence.ensure_begun("r")
    assert known_versions([B, B]) == fence.versions("r")


def test_a_request_that_got_blocks_while_the_weights_were_unknown_is_stale():
    fence = SchedulerFence(1)
    fence.ensure_begun("r")
    fence.update({0: A})
    fence.ensure_begun("r")
    assert fence.fingerprint("r") is None


def test_a_request_that_has_ended_leaves_nothing_to_the_next_of_its_name(fence):
    fence.begin("r")
    fence.update({0: B, 1: B})
    fence.forget("r")
    fence.ensure_begun("r")
    assert fence.fingerprint("r") == "B"
    fence.forget("r")
    assert fence.versions("r") is None


@pytest.mark.parametrize("report", [{0: 7}, {5: A}, {0: ()}])
def test_a_fence_that_fails_is_closed_for_good_and_logged_once(fence, caplog, report):
    fence.begin("r")
    for each in (report, {0: B, 1: B}, report, {0: ("C", 3), 1: ("C", 3)}):
        assert not fence.update(each)
        assert (fence.current, fence.begin("s"), fence.versions("r")) == (None, None, None)
    assert [record.exc_info is not None for record in caplog.records] == [True]


def test_an_overtaken_report_is_ignored_also_after_a_commit_has_begun(process):
    fence, held = SchedulerFence(1), process.hold("A")
    before = list(process.version())
    held.settle("B")
    after = list(process.version())
    for report, expected in ((after, after), (before, after), (None, None), (before, None)):
        fence.update({0: report})
        assert fence.current == (None if expected is None else known_versions([expected]))
    fence.update({0: after})
    assert known_versions([after]) == fence.current


def test_a_rank_that_was_restarted_is_believed_whatever_its_epoch():
    fence = SchedulerFence(1)
    processes = sorted((ProcessWeights() for _ in range(2)), key=lambda each: each.version().epoch)
    for weights in (processes[1], processes[0], processes[1]):
        fence.update({0: weights.version()})
        assert known_versions([weights.version()]) == fence.current


# -- the worker's side


@pytest.fixture
def process():
    return ProcessWeights()


@pytest.mark.parametrize(
    ("settled", "is_admitted"), [([], True), (["B"], False), (["B", "A"], False)]
)
def test_a_worker_admits_what_was_planned_for_the_version_it_has(process, settled, is_admitted):
    held = process.hold("A")
    fence = WorkerFence(1, process)
    planned = [("another rank", 7), tuple(fence.version())]
    for fingerprint in settled:
        held.settle(fingerprint)
    assert fence.admits(planned) is is_admitted
    # Some hosts make lists of tuples.
    assert fence.admits([list(each) for each in planned]) is is_admitted


@pytest.mark.parametrize("others", [[], [("A", 1)], [None]])
def test_a_worker_admits_nothing_without_the_versions_of_all_ranks(process, others):
    process.hold("A")
    fence = WorkerFence(1, process)
    own = [tuple(fence.version())] if others == [None] else []
    assert not fence.admits([*others, *own])


def test_a_worker_admits_nothing_while_its_weights_change(process):
    held = process.hold("A")
    fence = WorkerFence(0, process)
    planned = [fence.version()]
    with held.changing(lambda: "A"):
        assert not fence.admits(planned)
        assert (fence.version(), fence.report()) == (None, {0: None})
    assert fence.report() == {0: fence.version()}


# -- invalidated keys


def test_an_invalidated_key_is_replaced_each_time_and_keeps_its_block():
    invalidated, seen = InvalidatedKeys(), [fence_key(KEY, "A")]
    for _ in range(3):
        assert invalidated.add(seen[-1:]) == 1
        seen += invalidated.valid(seen[:1])
    assert len(set(seen)) == 4
    assert {key[16:] for key in seen} == {KEY}
    assert invalidated.valid(seen) == seen[-1:] * 4
    assert invalidated.add(seen[:3]) == 0, "a late failure says nothing of the replacement"
    assert invalidated.valid(seen[3:]) == seen[3:]


def test_the_number_of_invalidated_keys_is_bounded(monkeypatch):
    monkeypatch.setattr(InvalidatedKeys, "MAX_KEYS", 3)
    invalidated = InvalidatedKeys()
    keys = [fence_key(KEY, str(number)) for number in range(5)]
    assert invalidated.add(keys) == 5
    pairs = zip(keys, invalidated.valid(keys), strict=True)
    assert [key == valid for key, valid in pairs] == [True, True, False, False, False]


# -- any order of events


DAMAGED = "damaged"
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=3)


class Rank:
    """A process: its weights, a cache, and its part of a tier that trusts everybody."""

    def __init__(self, number):
        self.weights = ProcessWeights()
        self.model = self.weights.hold("A")
        self.fence = WorkerFence(number, self.weights)
        self.name, self.changing = "A", None
        self.cache, self.tier = {}, {}

    def begin_commit(self):
        if self.changing is None:
            self.changing = self.model.changing(lambda: self.name)
            self.changing.__enter__()
            self.name = None

    def commit(self, name):
        self.begin_commit()
        self.name = name
        self.changing.__exit__(None, None, None)
        self.changing = None


class Request:
    """Tokens, one a block; blocks have what they were really computed from as content."""

    def __init__(self, name, tokens, weights, hash_nbytes):
        self.name, self.tokens, self.weights = name, tokens, weights
        hashes = BlockHashes(1, b"", lambda data: bytes([sum(data) % 251])[:hash_nbytes])
        hashes.extend(tokens)
        self.hashes = hashes.pairs
        self.blocks, self.is_busy = [], False


class Job:
    def __init__(self, request, keys, blocks, versions, ranks, *, is_load):
        self.request, self.keys, self.blocks, self.is_load = request, keys, blocks, is_load
        self.versions = versions
        self.planned, self.running = dict(ranks), {}
        self.success = True


class Instance(RuleBasedStateMachine):
    """A scheduler and ranks that do what the table says, and nothing else against stale KV."""

    requests = Bundle("requests")
    found = None

    @initialize(num_ranks=st.integers(1, 3), hash_nbytes=st.sampled_from([0, 1]))
    def start_instance(self, num_ranks, hash_nbytes):
        self.fence, self.invalidated = SchedulerFence(num_ranks), InvalidatedKeys()
        self.ranks = [Rank(number) for number in range(num_ranks)]
        self.hash_nbytes, self.num_requests, self.num_blocks = hash_nbytes, 0, 0
        self.kept, self.jobs, self.on_the_way = set(), [], []
        self.report_all()

    # -- weights

    @rule(number=st.integers(0, 2))
    def begin_commit(self, number):
        self.ranks[number % len(self.ranks)].begin_commit()

    @rule(number=st.integers(0, 2), name=st.sampled_from("AB"))
    def commit_one(self, number, name):
        self.ranks[number % len(self.ranks)].commit(name)

    @rule(name=st.sampled_from("AB"), is_reported=st.booleans())
    def commit(self, name, is_reported):
        for rank in self.ranks:
            rank.commit(name)
        if is_reported:
            self.report_all()

    @rule()
    def report_all(self):
        for rank in self.ranks:
            self.fence.update(rank.fence.report())

    @rule(number=st.integers(0, 2))
    def send_report(self, number):
        """A step ends; its result may arrive after a later report."""
        version = self.ranks[number % len(self.ranks)].fence.report()
        self.on_the_way += [version] if None not in version.values() else []

    @precondition(lambda self: self.on_the_way)
    @rule(data=st.data())
    def receive_report(self, data):
        index = data.draw(st.integers(0, len(self.on_the_way) - 1))
        self.fence.update(self.on_the_way.pop(index))

    # -- requests

    @rule(target=requests, tokens=TOKENS)
    def submit_request(self, tokens):
        self.num_requests += 1
        names = tuple(rank.name for rank in self.ranks)
        request = Request(str(self.num_requests), tokens, names, self.hash_nbytes)
        self.fence.begin(request.name)
        self.fence.ensure_begun(request.name)
        return request

    @rule(request=requests)
    def compute(self, request):
        """Compute the next block with whatever weights there are."""
        names = tuple(rank.name for rank in self.ranks)
        if request.is_busy or len(request.blocks) == len(request.tokens) or None in names:
            return
        token = request.tokens[len(request.blocks)]
        for rank in self.ranks:
            before = rank.cache[request.blocks[-1]] if request.blocks else ()
            rank.cache[self.num_blocks] = (names, token, before)
        request.blocks.append(self.num_blocks)
        self.num_blocks += 1

    @rule(request=requests)
    def preempt(self, request):
        if not request.is_busy:
            request.blocks.clear()
            request.weights = tuple(rank.name for rank in self.ranks)
            self.fence.begin(request.name)

    @rule(request=consumes(requests))
    def end(self, request):
        self.fence.forget(request.name)

    # -- jobs

    def keys(self, request, first, end):
        fingerprint = self.fence.fingerprint(request.name)
        if fingerprint is None:
            self.found["stale"] += 1
            return []
        pairs = request.hashes[first:end]
        keys = [fence_key(make_offload_key(each), fingerprint, check) for each, check in pairs]
        return self.invalidated.valid(keys)

    @rule(request=requests)
    def plan_load(self, request):
        if request.is_busy:
            return
        keys = self.keys(request, len(request.blocks), len(request.tokens))
        while keys and not self.kept.issuperset(keys):
            keys.pop()
        blocks = list(range(self.num_blocks, self.num_blocks + len(keys)))
        self.num_blocks += len(keys)
        self.plan(request, keys, blocks, is_load=True)
        request.blocks += blocks

    @rule(request=requests)
    def plan_store(self, request):
        if not request.is_busy:
            keys = self.keys(request, 0, len(request.blocks))
            self.plan(request, keys, request.blocks[: len(keys)], is_load=False)

    def plan(self, request, keys, blocks, *, is_load):
        if keys:
            request.is_busy = True
            versions = self.fence.versions(request.name)
            ranks = enumerate(self.ranks)
            self.jobs.append(Job(request, keys, blocks, versions, ranks, is_load=is_load))

    @precondition(lambda self: any(job.planned for job in self.jobs))
    @rule(data=st.data())
    def submit_one(self, data):
        job = data.draw(st.sampled_from([job for job in self.jobs if job.planned]))
        self.submit(job, data.draw(st.sampled_from(sorted(job.planned))))

    @precondition(lambda self: any(job.running for job in self.jobs))
    @rule(data=st.data())
    def finish_one(self, data):
        job = data.draw(st.sampled_from([job for job in self.jobs if job.running]))
        self.finish(job, data.draw(st.sampled_from(sorted(job.running))))

    @rule()
    def finish_all(self):
        for job in list(self.jobs):
            for number in sorted(job.planned):
                self.submit(job, number)
            for number in sorted(job.running):
                self.finish(job, number)

    def submit(self, job, number):
        rank = job.planned.pop(number)
        if rank.fence.admits(job.versions):
            job.running[number] = rank
            return
        self.found["refused"] += 1
        job.success = False
        self.complete(job)

    def finish(self, job, number):
        rank = job.running.pop(number)
        for key, block in zip(job.keys, job.blocks, strict=True):
            if job.is_load:
                rank.cache[block] = rank.tier[key]
                job.success &= rank.cache[block] != DAMAGED
            else:
                # Kept already under this key, perhaps: the tier has one place for it.
                rank.tier.setdefault(key, rank.cache[block])
        if job.is_load and not rank.fence.admits(job.versions):
            self.found["outdated"] += 1
            job.success = False
        self.complete(job)

    def complete(self, job):
        if job.planned or job.running:
            return
        self.jobs.remove(job)
        request = job.request
        request.is_busy = False
        if not job.is_load:
            self.kept.update(job.keys if job.success else ())
            return
        first = len(request.blocks) - len(job.blocks)
        if job.success:
            self.found["loaded"] += 1
            self.judge(request, first)
            return
        del request.blocks[first:]
        if job.versions is self.fence.current:
            self.found["invalidated"] += self.invalidated.add(job.keys)

    def judge(self, request, first):
        """Compare what was loaded with what the weights at the request's start compute."""
        expected = ()
        for place, block in enumerate(request.blocks):
            expected = (request.weights, request.tokens[place], expected)
            if place >= first:
                assert [expected] * len(self.ranks) == [rank.cache[block] for rank in self.ranks]

    @rule(number=st.integers(0, 2), data=st.data())
    def damage(self, number, data):
        tier = self.ranks[number % len(self.ranks)].tier
        intact = sorted(self.kept & tier.keys())
        if intact:
            tier[data.draw(st.sampled_from(intact))] = DAMAGED

    @rule(tokens=TOKENS, is_reported=st.booleans())
    def serve(self, tokens, is_reported):
        """Take the straight way, so that there is something to find."""
        if is_reported:
            self.report_all()
        request = self.submit_request(tokens)
        self.plan_load(request)
        self.finish_all()
        while len(request.blocks) < len(tokens) and all(rank.name for rank in self.ranks):
            self.compute(request)
        self.plan_store(request)
        self.finish_all()

    @rule(tokens=TOKENS)
    def serve_through_commits(self, tokens):
        """Change the weights there and back between two reports, for all that is computed."""
        self.report_all()
        request = self.submit_request(tokens)
        names = [rank.name or "A" for rank in self.ranks]
        for rank in self.ranks:
            rank.commit("there")
        while len(request.blocks) < len(tokens):
            self.compute(request)
        for rank, name in zip(self.ranks, names, strict=True):
            rank.commit(name)
        self.plan_store(request)
        self.finish_all()

    @rule(target=requests, tokens=TOKENS)
    def start_to_load(self, tokens):
        """Begin as most requests do: with a load that runs on all ranks."""
        self.report_all()
        request = self.submit_request(tokens)
        self.plan_load(request)
        for job in list(self.jobs):
            for number in sorted(job.planned):
                self.submit(job, number)
        return request


def run(max_examples, num_steps, **options):
    Instance.found = dict.fromkeys(("loaded", "refused", "outdated", "stale", "invalidated"), 0)
    run_state_machine_as_test(
        Instance,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=num_steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
            derandomize=True,
            **options,
        ),
    )


def test_no_block_of_other_weights_is_loaded_in_any_order_of_events():
    """FAULTS 47."""
    run(100, 40)
    # The witness: there was something to find, and something to refuse in each of the ways.
    assert min(Instance.found.values()) > 0, Instance.found


@pytest.mark.nightly
def test_no_such_block_is_loaded_in_many_more_orders():
    run(1_000, 80)


def compares_fingerprints(fence, versions):
    version = fence.version()
    return version is not None and versions[fence.rank].fingerprint == version.fingerprint


HOLES = {
    "the worker admits everything": (WorkerFence, "admits", lambda fence, versions: True),
    "the worker compares fingerprints": (WorkerFence, "admits", compares_fingerprints),
    "keys lack the weights": (
        SchedulerFence,
        "fingerprint",
        lambda fence, name: "" if fence.versions(name) else None,
    ),
    "requests carry the current versions": (
        SchedulerFence,
        "versions",
        lambda fence, name: fence.current,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("hole", HOLES)
def test_the_state_machine_finds_a_hole_in_the_fence(monkeypatch, hole):
    monkeypatch.setattr(*HOLES[hole])
    with pytest.raises(AssertionError):
        run(400, 40, phases=[Phase.generate], report_multiple_bugs=False, print_blob=False)
