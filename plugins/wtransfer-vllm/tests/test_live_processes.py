"""A live vLLM in its three processes, and with two tensor-parallel ranks."""

import functools

import pytest
import wtransfer
from engines import (
    PROMPTS,
    Engine,
    HostError,
    ask_each,
    await_commit,
    check_update,
    publish,
    report_of,
    start_ranks,
)
from starting import check_costs, noted

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def startup(tmp_path_factory):
    """Where the engine's processes note how they start, and the environment for that."""
    return noted(tmp_path_factory.mktemp("startup"))


@pytest.fixture(scope="module")
def engine(models, startup, tmp_path_factory):
    engine = Engine(
        tmp_path_factory.mktemp("host"),
        processes=3,
        env=startup[1],
        model=str(models / "A"),
        weight_transfer_config={"backend": "shm"},
    )
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def ranks(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    engine = start_ranks(folder, models / "A", weight_transfer_config={"backend": "shm"})
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def fresh_ranks(ranks, models, tmp_path_factory):
    """Model's name -> tokens of two ranks as they were loaded: of A, before any update."""
    of_b = start_ranks(tmp_path_factory.mktemp("fresh"), models / "B")
    ranks.wait_started()
    assert ranks.do("label") == "default"
    return {"A": ranks.tokens(PROMPTS)} | ask_each({"B": of_b}, lambda b: b.tokens(PROMPTS))


@pytest.mark.nightly  # a server has two processes
def test_each_of_an_engines_processes_registers_once(engine, startup, record_property):
    engine.wait_started()
    check_costs(startup[0], 3, record_property)


@pytest.mark.nightly  # a server has two processes
def test_three_processes_serve_the_new_weights_and_the_old_again(engine, weights, fresh):
    held = dict(weights["A"])
    assert engine.tokens(PROMPTS) == fresh["A"]
    with wtransfer.Publisher(held, deadline_s=10) as publisher:
        engine.invite(publisher)
        publisher.wait_for_workers(1, timeout_s=20)
        for name in ("B", "A"):
            held.update(weights[name])
            update = functools.partial(publish, publisher, engine, name)
            report = check_update(engine, update, fresh[name], name)
            assert [worker.outcome for worker in report.workers] == ["committed"]


@pytest.mark.nightly  # a server has two processes
def test_a_failed_commit_in_another_process_is_told_and_undone(engine, weights, fresh):
    with wtransfer.Publisher(weights["A"], deadline_s=10) as publisher:
        engine.invite(publisher)
        publisher.wait_for_workers(1, timeout_s=20)
        publish(publisher, engine, "a")
    with wtransfer.Publisher(weights["B"], deadline_s=10) as publisher:
        engine.invite(publisher)
        publisher.wait_for_workers(1, timeout_s=20)
        engine.do("rpc", "break_loader", 9)
        with pytest.raises(HostError, match="broken at"):
            publish(publisher, engine, "b")
        assert engine.tokens(PROMPTS) == fresh["A"]
        assert engine.do("label") == "a"


def test_two_ranks_commit_as_one(fresh_ranks, ranks, weights):
    held = dict(weights["A"])
    with wtransfer.Publisher(held, deadline_s=10) as publisher:
        ranks.invite(publisher)
        publisher.wait_for_workers(1, timeout_s=20)
        for name in ("B", "A"):
            held.update(weights[name])
            update = functools.partial(publish, publisher, ranks, name)
            report = check_update(ranks, update, fresh_ranks[name], name)
            assert [worker.outcome for worker in report.workers] == ["committed", "committed"]
            assert len({worker.instance for worker in report.workers}) == 1


def test_a_rank_that_cannot_load_takes_the_other_one_back_with_it(fresh_ranks, ranks, weights):
    with wtransfer.Publisher(weights["A"], deadline_s=10) as publisher:
        ranks.invite(publisher)
        publisher.wait_for_workers(1, timeout_s=20)
        publish(publisher, ranks, "a")
        assert ranks.tokens(PROMPTS) == fresh_ranks["A"]
    with wtransfer.Publisher(weights["B"], deadline_s=10) as publisher:
        ranks.invite(publisher)
        publisher.wait_for_workers(1, timeout_s=20)
        ranks.do("rpc", "break_loader", 11, 1)
        round_ = publisher.publish("b", wait=False)
        await_commit(round_)
        ranks.do("start")
        with pytest.raises(HostError, match=r"broken at|rolled back"):
            ranks.do("finish", "b")
        outcomes = sorted(worker.outcome for worker in report_of(round_).workers)
        assert outcomes == ["restored", "reverted"]
        assert (ranks.tokens(PROMPTS), ranks.do("label")) == (fresh_ranks["A"], "a")
