"""A trainer of several ranks whose weights are sharded by FSDP, between real processes."""

from __future__ import annotations

import re
import signal
import time

import pytest

NUM_ROUNDS = 20
NUM_TENSORS = 6
NUMEL = 4097  # uneven on two ranks and on three
EARLY_S = 10.0  # a round that only its deadline ends takes 30 s


@pytest.fixture
def ranks(flow):
    """Maker of the ranks of a trainer: the one that publishes, and the others."""

    def make(num_ranks=2, *, host=0, **options):
        flow.size = {"num_tensors": NUM_TENSORS, "numel": NUMEL}
        common = {"num_ranks": num_ranks, "host": host}
        made = {}
        # The rank that hosts the store knows its port.
        for rank in sorted(range(num_ranks), key=lambda rank: rank != host):
            own = common if rank else common | options
            made[rank] = flow._start("flow_sharded:main", f"rank{rank}", {"rank": rank, **own})
            common["port"] = common.get("port") or made[rank].ask("port")
        first, *others = (made[rank] for rank in range(num_ranks))
        together([first, *others], "init")
        flow.where = first.ask("where")
        return first, *others

    return make


def together(puppets, order, **options):
    """Give all the same order, and return what came of it."""
    for puppet in puppets:
        puppet.order(order, **options)
    return [puppet.answer() for puppet in puppets]


def begin(first, others, number):
    """Begin to publish on every rank, as training loops do."""
    for other in others:
        other.order("take_part", number=number)
    first.order("publish", number=number)


def publish(flow, first, others, number, workers):
    """Publish on every rank, and check that all say what every worker holds."""
    begin(first, others, number)
    report = first.answer()
    assert report["ok"], report["text"]
    assert {report["fingerprint"]} == {other.answer() for other in others}
    assert {worker.name for worker in workers} == set(report["workers"])
    for worker in workers:
        ack = report["workers"][worker.name]
        assert ("committed", f"v{number}") == (ack["outcome"], ack["version"])
        assert report["fingerprint"] == ack["fingerprint"]
        assert report["fingerprint"] == flow.holds(worker, number)["fingerprint"]
    return report["fingerprint"]


def in_step(first, others):
    """Check that the trainer's own group is as good as before."""
    assert {1.0 + len(others)} == set(together([first, *others], "all_reduce"))


# -- what works


def test_two_ranks_publish_round_after_round_to_three_workers(flow, ranks):
    first, *others = ranks(engine="gloo")
    workers = flow.workers(3)
    first.ask("wait", n=3)
    seen, holdings = [], []
    for number in range(1, NUM_ROUNDS + 1):
        seen.append(publish(flow, first, others, number, workers))
        holdings.append([puppet.holdings() for puppet in (first, *others)])
    assert len(set(seen)) == NUM_ROUNDS
    left_over = flow.left_over(holdings[3], lambda: [p.holdings() for p in (first, *others)])
    assert not any(left_over), left_over
    for worker in workers:
        versions = [version for version, _, _ in worker.looks() if version]
        assert [f"v{number}" for number in range(1, NUM_ROUNDS + 1)] == versions
    in_step(first, others)


# -- what fails, and what is left then


def fails_everywhere(failing, first, others, cls, text):
    """Expect all ranks to fail with the same error, all at once."""
    ended = []
    for puppet in (first, *others):
        with failing(cls) as seen:
            puppet.answer()
        assert text in seen.error.text
        ended.append(seen.ended)
    assert max(ended) - min(ended) < 1
    return seen


@pytest.mark.slow
def test_a_plan_that_workers_refuse_ends_the_round_on_every_rank(flow, failing, ranks):
    first, other = ranks(engine="shm")
    stranger = flow.worker(numel=8)
    first.ask("wait", n=1)
    begin(first, [other], 1)
    fails_everywhere(failing, first, [other], "SchemaError", "layers.0: wanted float32 [8]")
    in_step(first, [other])
    stranger.end()
    worker = flow.worker()
    flow.until(lambda: len(first.ask("workers")) == 1)
    first.ask("wait", n=1)
    publish(flow, first, [other], 2, [worker])


@pytest.mark.slow
def test_ranks_that_have_other_tensors_are_refused(flow, failing, ranks):
    first, other = ranks(engine="shm")
    worker = flow.worker()
    first.ask("wait", n=1)
    other.ask("distribute", number=NUM_TENSORS - 1)
    begin(first, [other], 1)
    text = (
        "the trainer's ranks differ at tensor 0: rank 0 has 'layers.0': float32 [4097] as (S(0)) "
        "over 2 ranks on ranks [0, 1], rank 1 has 'layers.0': float32 [64] as (S(0)) over 2 ranks "
        "on ranks [0, 1]"
    )
    fails_everywhere(failing, first, [other], "SourceError", text)
    flow.holds(worker, 0)
    in_step(first, [other])


@pytest.mark.slow
@pytest.mark.parametrize(("which", "how"), [(1, "name"), (0, "raises")])
def test_a_rank_that_diverges_in_mid_pass_is_named_and_no_rank_hangs(
    flow, failing, ranks, which, how
):
    first, other = ranks(engine="gloo")
    worker = flow.worker()
    first.ask("wait", n=1)
    (first, other)[which].ask("diverge", how=how)
    begin(first, [other], 1)
    text = {
        "name": "yields ('layers.other', torch.float32,",
        "raises": "raised OSError: the disk is gone",
    }
    fails_everywhere(failing, first, [other], "SourceError", text[how])
    flow.holds(worker, 0)
    in_step(first, [other])
    (first, other)[which].ask("diverge", how=None)
    publish(flow, first, [other], 2, [worker])


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1])
def test_rank_that_fails_inside_a_gather_is_named_long_before_the_deadline(
    flow, failing, ranks, which
):
    puppets = first, *others = ranks(3, engine="gloo")
    worker = flow.worker()
    first.ask("wait", n=1)
    puppets[which].ask("diverge", how="inside a gather")
    begun = time.monotonic()
    begin(first, others, 1)
    for puppet in puppets:
        with failing("EngineError") as failed:
            puppet.answer()
        assert f"failed on trainer rank {which}: OutOfMemoryError: no memory" in failed.error.text
        assert "that mesh is no longer in step: rebuild it" in failed.error.text
        assert failed.ended - begun < EARLY_S
    flow.holds(worker, 0)
    # A gather of the next version would be one with those that hang in the last.
    for puppet in puppets:
        puppet.ask("diverge", how=None)
    begin(first, others, 2)
    for puppet in puppets:
        with failing("StallError") as stalled:
            puppet.answer()
        assert "that mesh is no longer in step: rebuild it" in stalled.error.text
    flow.holds(worker, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "how"),
    [
        ("midst", signal.SIGKILL),
        ("between", signal.SIGKILL),
        ("between", signal.SIGSTOP),  # its connections stay: the gather hangs
    ],
)
def test_a_rank_that_is_lost_is_named_long_before_the_deadline(flow, failing, ranks, phase, how):
    first, other, third = ranks(3, engine="gloo")
    worker = flow.worker()
    first.ask("wait", n=1)
    other.witness.hold(phase)
    begin(first, [other, third], 1)
    other.until_held()
    time.sleep(0.5)  # the others enter the gather
    killed = other.kill() if how == signal.SIGKILL else other.signal(how)
    for survivor in (first, third):
        with failing("PeerLostError") as lost:
            survivor.answer()
        assert "trainer rank 1 was lost" in lost.error.text
        # Inside a gather it takes the mesh with it.
        assert ("that mesh is no longer in step: rebuild it" in lost.error.text) == (
            phase == "between"
        )
        assert lost.ended - killed < EARLY_S
        if silence := re.search(r"no sign of life for ([\d.]+) s", lost.error.text):
            assert float(silence[1]) >= 2.5  # no rank is given up earlier
    flow.holds(worker, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        (0, "midst", "the trainer's store is gone, with it the way to the other ranks"),
        (1, "midst", "the publishing rank of this trainer was lost"),
        (0, "between", "that mesh is no longer in step: rebuild it"),
        (1, "between", "that mesh is no longer in step: rebuild it"),
    ],
    ids=["with the store", "alone", "inside a gather with the store", "inside a gather"],
)
def test_a_publishing_rank_that_is_killed_lets_the_others_go(flow, failing, ranks, case):
    host, phase, text = case
    first, other = ranks(engine="gloo", host=host)
    worker = flow.worker()
    first.ask("wait", n=1)
    first.witness.hold(phase)
    begin(first, [other], 1)
    first.until_held()
    time.sleep(0.5)  # the other enters the gather
    killed = first.kill()
    with failing("PeerLostError") as lost:
        other.answer()
    assert text in lost.error.text
    assert lost.ended - killed < EARLY_S
    flow.holds(worker, 0)


@pytest.mark.slow
def test_a_round_that_is_called_off_ends_on_every_rank(flow, failing, ranks):
    first, other = ranks(engine="gloo")
    worker = flow.worker()
    first.ask("wait", n=1)
    other.witness.hold("midst")
    other.order("take_part", number=1)
    first.ask("begin", number=1)
    other.until_held()
    # From here on it waits for the other one, whatever is done.
    flow.until(lambda: first.phase == "midst")
    aborted = time.monotonic()
    first.ask("abort")
    with failing("RoundAbortedError") as ended:
        first.ask("result")
    assert ended.ended - aborted < 1
    other.go_on()
    with failing("RoundAbortedError") as ended:
        other.answer()
    # The wait was ended; nothing had to be left behind.
    assert "does not return" not in first.last_words(None)
    in_step(first, [other])
    publish(flow, first, [other], 2, [worker])


@pytest.mark.slow
def test_no_rank_returns_while_a_gather_runs(flow, failing, ranks):
    first, other = ranks(engine="gloo")
    worker = flow.worker()
    first.ask("wait", n=1)
    other.witness.hold("between")
    other.order("take_part", number=1)
    first.ask("begin", number=1)
    other.until_held()
    flow.until(lambda: first.phase == "between")
    first.ask("abort")
    with failing("StallError"):
        first.ask("result", within_s=1.0)
    other.go_on()
    with failing("RoundAbortedError"):
        first.ask("result")
    with failing("RoundAbortedError"):
        other.answer()
    in_step(first, [other])
    publish(flow, first, [other], 2, [worker])
