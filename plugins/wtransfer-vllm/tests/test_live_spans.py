"""Spans of live answers: a fresh engine of each span's version generates its tokens."""

import random
from contextlib import ExitStack, closing

import pytest
from engines import PROMPTS, RANKS_ENV, Engine, publish

from wtransfer_vllm import in_flight

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

FEW_BLOCKS = {"num_gpu_blocks_override": 5}
"""So few that vLLM preempts requests by itself, too."""
ENGINES = {
    "three processes": {"processes": 3},
    "asynchronous scheduling": {"processes": 3, "async_scheduling": True} | FEW_BLOCKS,
    "two pipeline stages": {"processes": 4, "env": RANKS_ENV, "pipeline_parallel_size": 2}
    | FEW_BLOCKS,
}
"""Of the last two each has two batches in flight."""
KEPT = {
    f"{name}, kept": options | {"env": options.get("env", {}) | {in_flight.VARIABLE: "keep"}}
    for name, options in ENGINES.items()
}
"""The same, where requests that run at a commit keep their KV until vLLM preempts them."""

ROUNDING = 0.0625
"""A step of bfloat16 between 8 and 16, where logits are. A fresh engine adds in another order, so
that of two tokens that are as likely the other one may come first."""


class Load:
    """Requests of different lengths, and commits of two sets of weights in turn.

    Args:
        engine: Serves the requests.
        num_requests: Number of requests that have not ended, at each commit.
    """

    def __init__(self, engine, num_requests):
        self.prompts, self.tokens = {}, {}
        self.spans = {}
        """Request -> its spans: first token, end, label, fingerprint, whether on older KV."""
        self.expected = {}
        """Request -> its tokens at each commit -> label, fingerprint: all that its spans can be
        where the engine core runs in these steps only."""
        self.names = {None: "A"}
        """Fingerprint -> name of the weights; None: those that the engine was started with."""
        self._engine = engine
        self._num_requests = num_requests
        self._random = random.Random(num_requests)

    def run(self, publisher, held, weights, num_commits):
        for number in range(num_commits):
            self._fill()
            name, label = "AB"[number % 2], f"step-{number // 2}"  # each label names two sets
            held.update(weights[name])
            report = publish(publisher, self._engine, label)
            self.names[report.fingerprint] = name
            for request, tokens in self.tokens.items():
                self.expected[request][len(tokens)] = (label, report.fingerprint)
            self._step(self._random.choice([0, 1, 2, 3, 8, 20]) if number else 5)
        self._step(10_000)
        assert self.spans.keys() == self.prompts.keys()

    def _fill(self):
        while len(self.prompts) - len(self.spans) < self._num_requests:
            prompt = self._random.choices(range(3, 250), k=self._random.choice([3, 20, 70, 140]))
            name = f"{self._engine.process.pid}-{self._num_requests}-{len(self.prompts)}"
            self.prompts[name], self.tokens[name], self.expected[name] = prompt, [], {}
            length = self._random.choice([1, 5, 20, 60, 140])
            self._engine.do("begin", name, {"prompt_token_ids": prompt}, length)

    def _step(self, num_steps):
        seen = self._engine.do("step", num_steps)
        for request in self.prompts:
            self.tokens[request] = seen["tokens"][request]
            if request in seen["spans"]:
                self.spans[request] = seen["spans"][request]


@pytest.fixture
def check_spans(models, tmp_path):
    """Scores each span on a fresh engine of its version, without us."""

    def check(load):
        with ExitStack() as stack:
            engines = {
                name: stack.enter_context(closing(Engine(tmp_path, model=str(models / name))))
                for name in "AB"
            }
            for name, engine in engines.items():
                texts = {each: load.prompts[each] + load.tokens[each] for each in load.spans}
                gaps = dict(zip(texts, engine.do("score", list(texts.values())), strict=True))
                for request, spans in load.spans.items():
                    bounds = [0, *(end for _, end, *_ in spans)]
                    assert bounds == [*(start for start, *_ in spans), len(load.tokens[request])]
                    # Each token rests on those before it, whatever weights those are of.
                    before = len(load.prompts[request]) - 1
                    of_tokens = gaps[request][before:]
                    for start, end, _, fingerprint, on_older_kv in spans:
                        if load.names[fingerprint] == name and not on_older_kv:
                            assert max(of_tokens[start:end]) <= ROUNDING, (request, start, end)

    return check


@pytest.fixture
def engine(request, models, tmp_path):
    if request.param == "in process":
        yield request.getfixturevalue("in_process")
        return
    options = {"model": str(models / "A"), "weight_transfer_config": {"backend": "shm"}}
    more = (ENGINES | KEPT)[request.param]
    with closing(Engine(tmp_path, **options, **more)) as engine:
        if "pipeline_parallel_size" in more:
            engine.do("rpc", "make_pipeline_buffers")
        yield engine


@pytest.fixture
def run(engine, joined, weights):
    """Runs requests and commits; returns the load that has ended."""

    def run_load(num_commits, num_requests):
        load = Load(engine, num_requests)
        load.run(*joined("A"), weights, num_commits)
        return load

    return run_load


@pytest.fixture(
    params=[False, pytest.param(True, marks=pytest.mark.nightly)], ids=["recompute", "keep"]
)
def keeps(engine, request):
    """Whether requests that run at a commit keep their KV."""
    engine.do("keep_in_flight", request.param)
    yield request.param
    engine.do("keep_in_flight", False)


@pytest.mark.parametrize("engine", ["in process"], indirect=True)
@pytest.mark.parametrize(
    ("num_commits", "num_requests"), [(4, 8), pytest.param(20, 32, marks=pytest.mark.nightly)]
)
def test_each_span_begins_at_its_commit_and_a_fresh_engine_gives_its_tokens(
    run, keeps, check_spans, num_commits, num_requests
):
    load = run(num_commits, num_requests)
    for request, spans in load.spans.items():
        begun = dict(load.expected[request])
        begun.pop(len(load.tokens[request]), None)
        found = {start: (version, identity) for start, _, version, identity, _ in spans}
        assert (request, found) == (request, begun)
        # At the commit that begins a request's first span it was waiting.
        older = [on_older_kv for *_, on_older_kv in spans]
        assert older == [keeps and start > 0 for start, *_ in spans]
    check_spans(load)


@pytest.fixture
def in_flight_batches(engine):
    """Batches are in flight, as under stages of a pipeline."""
    engine.do("queue_batches", 3)
    yield
    engine.do("queue_batches", 1)


@pytest.mark.parametrize("engine", ["in process"], indirect=True)
@pytest.mark.parametrize("keeps", [True], indirect=True)
@pytest.mark.usefixtures("in_flight_batches", "keeps")
def test_kept_request_is_over_older_kv_to_the_token_in_flight_at_its_preemption(
    engine, joined, weights, fresh
):
    publisher, held = joined("A")
    before = publish(publisher, engine, "a").fingerprint
    engine.do("begin", "kept", PROMPTS[1], 30)
    num_old = len(engine.do("step", 10)["tokens"]["kept"])
    held.update(weights["B"])
    after = publish(publisher, engine, "b").fingerprint
    num_mixed = len(engine.do("step", 10)["tokens"]["kept"])
    engine.do("preempt_in_flight")
    found = engine.do("step", 1000)
    (*old, is_old), (*mixed, is_mixed), (*new, is_new) = found["spans"]["kept"]
    # A token is in flight at the commit, and one at the preemption.
    assert old[0] == 0
    assert old[1] in (num_old, num_old + 1)
    assert mixed[1] in (num_mixed, num_mixed + 1, num_mixed + 2)
    assert (old[2:], mixed[2:], new[2:]) == (["a", before], ["b", after], ["b", after])
    assert (is_old, is_mixed, is_new) == (False, True, False)
    assert found["tokens"]["kept"][: old[1]] == fresh["A"][1][: old[1]]


@pytest.mark.parametrize("engine", ["in process"], indirect=True)
@pytest.mark.usefixtures("in_flight_batches")
def test_token_in_flight_of_a_request_that_vllm_had_preempted_is_of_the_weights_before(
    engine, joined, weights, fresh
):
    publisher, held = joined("A")
    before = publish(publisher, engine, "a").fingerprint
    engine.do("begin", "preempted", PROMPTS[1], 16)
    engine.do("step", 10)
    engine.do("preempt_in_flight")
    num_tokens = len(engine.do("step", 0)["tokens"]["preempted"])
    held.update(weights["B"])
    after = publish(publisher, engine, "b").fingerprint
    seen = engine.do("step", 1000)
    own = num_tokens + 1
    assert seen["spans"]["preempted"] == [
        [0, own, "a", before, False],
        [own, 16, "b", after, False],
    ]
    assert seen["tokens"]["preempted"][:own] == fresh["A"][1][:own]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("engine", "num_commits", "num_requests"),
    [
        ("three processes", 20, 32),
        ("asynchronous scheduling", 200, 16),
        ("two pipeline stages", 200, 16),
        ("three processes, kept", 20, 32),
        ("asynchronous scheduling, kept", 200, 16),
        ("two pipeline stages, kept", 200, 16),
    ],
    indirect=["engine"],
)
def test_every_token_is_explained_while_the_engine_core_runs_by_itself(
    request, run, check_spans, num_commits, num_requests
):
    load = run(num_commits, num_requests)
    later = [each[4] for spans in load.spans.values() for each in spans[1:]]
    name = request.node.callspec.params["engine"]
    assert any(later) == (name in KEPT)
    # Where blocks are few, vLLM preempts requests that were kept.
    assert False in later or name == "three processes, kept"
    check_spans(load)
