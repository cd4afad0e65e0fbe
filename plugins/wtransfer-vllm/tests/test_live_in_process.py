"""A live vLLM in one process: updates, their faults, and what is served after each."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import tiny_models
import wtransfer
from engines import PROMPTS, Engine, HostError, await_commit, publish, report_of
from wtransfer.errors import CommitError, SchemaError

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def engine(in_process):
    return in_process


@pytest.fixture
def trainer(engine, joined):
    """A publisher that has brought the engine to A, where it does not serve A from the start."""
    publisher, held = joined("A")
    if engine.do("session")["version"] is not None:
        publish(publisher, engine, "a")
    return publisher, held


def become(held, weights):
    for name, tensor in weights.items():
        held[name] = tensor.clone()


def catch_up(engine, version):
    """Commit what the publisher sends to a worker that is behind, without being asked."""
    limit = time.monotonic() + 20
    while engine.do("session")["version"] != version:
        assert time.monotonic() < limit
        engine.do("start")
        with contextlib.suppress(HostError):
            engine.do("finish", version)
    assert engine.do("session") | {"name": ""} == {
        "state": "serving",
        "version": version,
        "name": "",
    }


def test_the_first_failed_commit_restores_the_checkpoint(engine, trainer, weights, fresh):
    # Before any commit: the way back is the checkpoint on disk.
    publisher, held = trainer
    assert engine.do("session")["version"] is None
    assert engine.tokens(PROMPTS) == fresh["A"]
    become(held, weights["B"])
    engine.do("rpc", "break_loader", 7)
    with pytest.raises(HostError, match="broken at"):
        publish(publisher, engine, "b")
    assert engine.tokens(PROMPTS) == fresh["A"]
    assert engine.do("label") == "default"
    # Behind, until the publisher has brought the same version again.
    catch_up(engine, "b")
    assert engine.tokens(PROMPTS) == fresh["B"]


@pytest.mark.covers("weights", release="0.32.0", how="live")
def test_an_update_gives_the_tokens_of_a_fresh_engine_and_back_again(
    engine, trainer, weights, fresh
):
    publisher, held = trainer
    assert engine.tokens(PROMPTS) == fresh["A"]
    for name in ("B", "A", "B"):
        become(held, weights[name])
        report = publish(publisher, engine, f"step-{name}")
        assert [worker.outcome for worker in report.workers] == ["committed"]
        assert report.workers[0].digests_equal
        assert engine.tokens(PROMPTS) == fresh[name]
        assert engine.do("label") == f"step-{name}"


def test_update_after_one_that_was_left_started_is_committed_without_an_error(
    engine, trainer, weights, fresh
):
    publisher, held = trainer
    engine.do("start")  # and its trainer is gone
    become(held, weights["B"])
    report = publish(publisher, engine, "b")
    assert [worker.outcome for worker in report.workers] == ["committed"]
    assert (engine.tokens(PROMPTS), engine.do("label")) == (fresh["B"], "b")


def test_a_request_that_runs_at_the_commit_leaves_nothing_stale(engine, trainer, weights, fresh):
    publisher, held = trainer
    engine.do("begin", "running", PROMPTS[0], 40)
    before = engine.do("step", 10)["tokens"]["running"]
    become(held, weights["B"])
    publish(publisher, engine, "b")
    # The same prompt joins while the first one, which began with A, is still running.
    engine.do("begin", "after", PROMPTS[0], 16)
    tokens = engine.do("step", 60)["tokens"]
    assert tokens["after"][: len(fresh["B"][0])] == fresh["B"][0]
    assert (len(tokens["running"]), tokens["running"][: len(before)]) == (40, before)
    assert engine.tokens(PROMPTS) == fresh["B"]


def test_generation_goes_on_during_the_transfer(engine, trainer, weights, fresh):
    publisher, held = trainer
    become(held, weights["B"])
    engine.do("begin", "long", PROMPTS[1], 60)
    engine.do("step", 5)
    round_ = publisher.publish("b", wait=False)
    stepped = engine.do("step", 10)
    await_commit(round_)
    assert len(stepped["tokens"]["long"]) == 15
    engine.do("start")
    engine.do("finish", "b")
    assert round_.result(20).workers[0].outcome == "committed"
    engine.do("step", 60)
    assert engine.tokens(PROMPTS) == fresh["B"]


@pytest.mark.nightly
def test_every_tensor_at_which_the_loader_may_fail_leaves_the_old_version(
    engine, trainer, weights, fresh
):
    publisher, held = trainer
    for at in range(len(weights["A"])):
        become(held, weights["B"])
        engine.do("rpc", "break_loader", at)
        round_ = publisher.publish(f"broken-{at}", wait=False)
        await_commit(round_)
        engine.do("start")
        with pytest.raises(HostError, match="broken at"):
            engine.do("finish", f"broken-{at}")
        report = report_of(round_)
        assert [worker.outcome for worker in report.workers] == ["restored"], at
        assert isinstance(report.workers[0].error, CommitError)
        assert engine.tokens(PROMPTS[:1]) == fresh["A"][:1], at
        assert engine.do("label") == "a"
        catch_up(engine, f"broken-{at}")
        assert engine.tokens(PROMPTS[:1]) == fresh["B"][:1], at
        become(held, weights["A"])
        publish(publisher, engine, "a")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda held: held.pop("model.layers.1.self_attn.k_proj.weight"),
        lambda held: held.update({"model.norm.weight": held["model.norm.weight"][:64].clone()}),
        lambda held: held.update({"model.norm.weight": held["model.norm.weight"].float()}),
    ],
    ids=["a fused part is missing", "another shape", "another dtype"],
)
def test_an_update_that_does_not_fit_is_refused_before_it_moves(
    engine, trainer, weights, fresh, spoil
):
    publisher, held = trainer
    become(held, weights["B"])
    spoil(held)
    with pytest.raises(SchemaError, match=r"k_proj|norm") as refused:
        publisher.publish("spoilt")
    of_dtype = "float32 [128]" in str(refused.value)
    assert ("WTRANSFER_VLLM_CAST=1 in the environment of vLLM" in str(refused.value)) is of_dtype
    assert engine.tokens(PROMPTS) == fresh["A"]
    held.clear()
    become(held, weights["B"])
    publish(publisher, engine, "b")
    assert engine.tokens(PROMPTS) == fresh["B"]


TRAINER = """
import json, sys, time
import torch, wtransfer
from safetensors.torch import load_file
weights = load_file(sys.argv[1])

class Slow:
    metadata = wtransfer.weight_sync.trainer.source.as_source(weights).metadata
    def iter_full(self):
        for index, (name, tensor) in enumerate(weights.items()):
            if index == 10:
                print("half", flush=True)
                time.sleep(600)
            yield name, tensor

with wtransfer.Publisher(Slow(), deadline_s=60) as publisher:
    print(json.dumps({"address": publisher.address, "token": publisher.token}), flush=True)
    publisher.wait_for_workers(1, timeout_s=20)
    publisher.publish("half")
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_trainer_that_ends_in_mid_round_does_not_stop_generation(
    engine, models, weights, fresh, how
):
    code = textwrap.dedent(TRAINER).replace(
        "import torch, wtransfer",
        "import torch, wtransfer\nimport wtransfer.weight_sync.trainer.source",
    )
    command = [sys.executable, "-c", code, str(models / "B" / "model.safetensors")]
    before = engine.tokens(PROMPTS)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            import json

            engine.do("init", {"wtransfer": json.loads(process.stdout.readline())})
            assert process.stdout.readline() == "half\n"
            engine.do("begin", f"during {how.name}", PROMPTS[1], 60)
            engine.do("step", 5)
            os.kill(process.pid, how)
            stepped = engine.do("step", 40)
            assert len(stepped["tokens"][f"during {how.name}"]) == 45
            engine.do("step", 20)
            assert engine.tokens(PROMPTS) == before
        finally:
            process.kill()
    with wtransfer.Publisher(weights["B"], deadline_s=10) as publisher:
        engine.invite(publisher)
        publisher.wait_for_workers(1, timeout_s=20)
        publish(publisher, engine, "after")
        assert engine.tokens(PROMPTS) == fresh["B"]
    engine.do("shutdown_engine")


def test_foreign_update_is_refused_and_changes_nothing(engine, trainer, weights, fresh):
    publisher, held = trainer
    label = engine.do("label")
    engine.do("start")
    with pytest.raises(HostError, match="of another trainer"):
        engine.do("update", {"names": ["x"], "dtype_names": ["float32"], "shapes": [[1]]})
    with pytest.raises(HostError, match="no verified update was there"):
        engine.do("finish", "theirs")
    assert engine.do("label") == label
    assert engine.tokens(PROMPTS) == fresh["A"]
    with pytest.raises(HostError, match="names no publisher"):
        engine.do("init", {"master_address": "127.0.0.1", "master_port": 1})
    become(held, weights["B"])
    publish(publisher, engine, "b")
    assert engine.tokens(PROMPTS) == fresh["B"]


def test_a_publisher_lost_after_its_order_leaves_a_commit_that_the_next_ones_init_makes(
    engine, weights, fresh, trainer
):
    trainer[0].close()  # a worker has one publisher at a time
    with wtransfer.Publisher(weights["B"]) as lost:
        # Of its rounds alone: a busy machine's connections are silent for longer.
        lost._rules = dataclasses.replace(lost._rules, deadline_s=1.0)
        engine.invite(lost)
        lost.wait_for_workers(1, timeout_s=20)
        report = report_of(lost.publish("b", wait=False))
        assert [worker.outcome for worker in report.workers] == ["pending"]
    assert engine.tokens(PROMPTS) == fresh["A"]
    with wtransfer.Publisher(weights["A"], deadline_s=10) as publisher:
        engine.invite(publisher)
        assert engine.tokens(PROMPTS) == fresh["B"]
        assert engine.do("label") == "b"
        publisher.wait_for_workers(1, timeout_s=20)
        publish(publisher, engine, "a")
        assert engine.tokens(PROMPTS) == fresh["A"]


@pytest.mark.nightly
def test_without_a_checkpoint_a_failed_first_commit_empties_the_worker_until_the_next(
    models, tmp_path, weights, fresh
):
    engine = Engine(
        tmp_path,
        model=str(models / "A"),
        load_format="dummy",
        weight_transfer_config={"backend": "shm"},
    )
    try:
        with wtransfer.Publisher(weights["B"], deadline_s=10) as publisher:
            engine.invite(publisher)
            publisher.wait_for_workers(1, timeout_s=20)
            engine.do("rpc", "break_loader", 7)
            with pytest.raises(HostError, match="must not serve"):
                publish(publisher, engine, "b")
            assert engine.do("label") == "empty"
            catch_up(engine, "b")
            assert (engine.tokens(PROMPTS), engine.do("label")) == (fresh["B"], "b")
    finally:
        engine.close()


@pytest.mark.nightly
@pytest.mark.parametrize("with_head", [True, False])
def test_tied_embeddings_are_one_tensor_with_or_without_a_head(tmp_path, with_head):
    head = "lm_head.weight"
    for name, seed in (("A", 3), ("B", 4)):
        without = None if with_head else head
        tiny_models.make(tmp_path / name, seed, tied=True, without=without)
    fresh = Engine(tmp_path, model=str(tmp_path / "B"))
    b = fresh.tokens(PROMPTS)
    fresh.close()
    engine = Engine(tmp_path, model=str(tmp_path / "A"), weight_transfer_config={"backend": "shm"})
    a = engine.tokens(PROMPTS)
    held = tiny_models.weights(4, tied=True)
    if not with_head:
        del held[head]
    try:
        with wtransfer.Publisher(held, deadline_s=10) as publisher:
            engine.invite(publisher)
            publisher.wait_for_workers(1, timeout_s=20)
            publish(publisher, engine, "b")
            assert engine.tokens(PROMPTS) == b
            become(held, tiny_models.weights(3, tied=True))
            # A trainer may name what is one tensor once only.
            del held[head]
            publish(publisher, engine, "a")
            assert engine.tokens(PROMPTS) == a
    finally:
        engine.close()


@pytest.mark.nightly
def test_float32_masters_are_taken_where_the_environment_allows_it(
    models, tmp_path, weights, fresh
):
    def masters(name):
        # What an optimizer has: more digits than the checkpoint, which is what they round to.
        return {key: tensor.float() * (1 + 2**-12) for key, tensor in weights[name].items()}

    engine = Engine(
        tmp_path,
        env={"WTRANSFER_VLLM_CAST": "1"},
        model=str(models / "A"),
        weight_transfer_config={"backend": "shm"},
    )
    try:
        held = masters("B")
        with wtransfer.Publisher(held, deadline_s=10) as publisher:
            engine.invite(publisher)
            publisher.wait_for_workers(1, timeout_s=20)
            (worker,) = publish(publisher, engine, "b").workers
            assert (worker.outcome, worker.digests_equal) == ("committed", True)
            assert worker.nbytes == sum(tensor.nbytes for tensor in held.values())
            assert engine.tokens(PROMPTS) == fresh["B"]
            # The way back is a set of masters as well.
            become(held, masters("A"))
            engine.do("rpc", "break_loader", 7)
            with pytest.raises(HostError, match="broken at"):
                publish(publisher, engine, "a")
            assert engine.tokens(PROMPTS) == fresh["B"]
            catch_up(engine, "a")
            assert engine.tokens(PROMPTS) == fresh["A"]
    finally:
        engine.close()


@pytest.mark.nightly
def test_engine_whose_kv_other_engines_read_by_tokens_takes_no_update(
    models, tmp_path, weights, fresh
):
    engine = Engine(
        tmp_path,
        model=str(models / "A"),
        weight_transfer_config={"backend": "shm"},
        kv_transfer_config={
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "kv")},
        },
    )
    try:
        assert engine.tokens(PROMPTS) == fresh["A"]
        assert list((tmp_path / "kv").iterdir()), "the connector has stored nothing"
        with wtransfer.Publisher(weights["B"], deadline_s=10) as publisher:
            with pytest.raises(HostError, match="other engines read its store"):
                engine.invite(publisher)
            assert publisher.workers() == []
        assert engine.tokens(PROMPTS) == fresh["A"]
    finally:
        engine.close()


def test_a_reload_that_fails_takes_the_label_with_it(engine, trainer, weights, fresh):
    publisher, held = trainer
    become(held, weights["B"])
    publish(publisher, engine, "b")
    engine.do("rpc", "break_loader", 7)
    with pytest.raises(HostError, match="broken at"):
        engine.do("rpc", "reload_weights")
    assert (engine.do("label"), engine.do("session")["state"]) == ("empty", "empty")
    # The publisher knows, and has brought it again.
    catch_up(engine, "b")
    assert (engine.tokens(PROMPTS), engine.do("label")) == (fresh["B"], "b")


def test_label_is_that_of_the_weights_and_not_of_the_caller(engine, trainer, weights, fresh):
    publisher, held = trainer
    become(held, weights["B"])
    round_ = publisher.publish("b", wait=False)
    await_commit(round_)
    engine.do("start")
    engine.do("finish", "theirs")
    assert [worker.outcome for worker in round_.result(20).workers] == ["committed"]
    assert (engine.do("label"), engine.tokens(PROMPTS)) == ("b", fresh["B"])


def test_weights_reloaded_from_disk_are_not_called_by_the_old_label(engine, trainer, fresh):
    engine.do("rpc", "reload_weights")
    assert (engine.do("label"), engine.do("session")["state"]) == ("empty", "empty")
    assert engine.tokens(PROMPTS) == fresh["A"]
