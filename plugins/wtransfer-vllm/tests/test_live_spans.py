"""Spans of live answers: a fresh engine of each span's version generates its tokens."""

import random
from contextlib import ExitStack, closing

import pytest
from engines import RANKS_ENV, Engine, publish

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

ENGINES = {
    "three processes": {"processes": 3},
    # Two stages compute two batches at a time; with few blocks vLLM preempts requests in flight.
    "two batches in flight": {
        "processes": 4,
        "env": RANKS_ENV,
        "pipeline_parallel_size": 2,
        "num_gpu_blocks_override": 5,
    },
}


class Load:
    """Requests of different lengths, and commits of two sets of weights in turn.

    Args:
        engine: Serves the requests.
        num_requests: Number of requests that have not ended, at each commit.
    """

    def __init__(self, engine, num_requests):
        self.prompts, self.tokens = {}, {}
        self.spans = {}
        """Request -> its spans: first token, end, label, fingerprint."""
        self.expected = {}
        """Request -> its tokens at each commit -> label, fingerprint: all that its spans can be
        where the engine core runs in these steps only."""
        self.names = {}
        """Fingerprint -> name of the weights."""
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
    """Replays each span on a fresh engine of its version, without us."""

    def check(load):
        jobs = {"A": [], "B": []}
        for request, spans in load.spans.items():
            prompt, tokens = load.prompts[request], load.tokens[request]
            bounds = [0, *(end for _, end, _, _ in spans)]
            assert bounds == [*(start for start, _, _, _ in spans), len(tokens)]
            for start, end, _, fingerprint in spans:
                # Its tokens rest on those before it, whatever weights those are of.
                before = {"prompt_token_ids": prompt + tokens[:start]}
                jobs[load.names[fingerprint]].append((before, tokens[start:end]))
        with ExitStack() as stack:
            engines = {
                name: stack.enter_context(closing(Engine(tmp_path, model=str(models / name))))
                for name in jobs
            }
            for name, engine in engines.items():
                for number, (before, tokens) in enumerate(jobs[name]):
                    engine.do("begin", str(number), before, len(tokens))
                fresh = engine.do("step", 10_000)["tokens"]
                assert list(fresh.values()) == [tokens for _, tokens in jobs[name]]

    return check


@pytest.fixture
def engine(request, models, tmp_path):
    if request.param == "in process":
        yield request.getfixturevalue("in_process")
        return
    options = {"model": str(models / "A"), "weight_transfer_config": {"backend": "shm"}}
    with closing(Engine(tmp_path, **options, **ENGINES[request.param])) as engine:
        if "pipeline_parallel_size" in ENGINES[request.param]:
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


@pytest.mark.parametrize("engine", ["in process"], indirect=True)
@pytest.mark.parametrize(
    ("num_commits", "num_requests"), [(4, 8), pytest.param(20, 32, marks=pytest.mark.nightly)]
)
def test_each_span_begins_at_its_commit_and_a_fresh_engine_gives_its_tokens(
    run, check_spans, num_commits, num_requests
):
    load = run(num_commits, num_requests)
    for request, spans in load.spans.items():
        begun = dict(load.expected[request])
        begun.pop(len(load.tokens[request]), None)
        found = {start: (version, identity) for start, _, version, identity in spans}
        assert (request, found) == (request, begun)
    check_spans(load)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("engine", "num_commits", "num_requests"),
    [("three processes", 20, 32), ("two batches in flight", 200, 16)],
    indirect=["engine"],
)
def test_every_token_is_explained_while_the_engine_core_runs_by_itself(
    run, check_spans, num_commits, num_requests
):
    check_spans(run(num_commits, num_requests))
