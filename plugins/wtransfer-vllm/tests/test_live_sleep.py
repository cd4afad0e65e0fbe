"""A live vLLM that is put to sleep and woken, as far as that goes on a CPU.

``LLM.sleep`` and ``wake_up`` are vLLM's own: the scheduler pauses, the executor notes what has no
memory. Only the workers' part is not there on a CPU ("sleep mode is not supported on CPU, ignore
it"), so the tests let the memory go themselves.
"""

import contextlib
import os
import subprocess
import sys

import pytest
import tiny_models
import wtransfer
from engines import PROMPTS, Engine, HostError, await_commit, publish, until

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def engine(in_process):
    return in_process


@pytest.fixture
def trainer(engine, joined):
    """A publisher that has brought the engine to B."""
    publisher, held = joined("B")
    publish(publisher, engine, "b")
    return publisher, held


def fall_asleep(engine):
    engine.do("sleep", 2)
    engine.do("rpc", "let_memory_go")


@pytest.mark.nightly
def test_asleep_at_level_2_it_is_empty_and_serves_under_no_label(engine, trainer):
    publisher, _ = trainer
    fall_asleep(engine)
    assert (engine.do("label"), engine.do("session")["state"]) == ("empty", "empty")
    assert engine.do("session")["version"] is None
    # The publisher was told, and does not count it as updated.
    (info,) = publisher.workers()
    assert (info.version, info.fingerprint != publisher.fingerprint) == (None, True)
    with pytest.raises(HostError, match="vLLM is asleep and the weights have no memory"):
        engine.do("start")
    engine.do("wake_up")


def test_version_brought_again_in_sleep_serves_after_wake_up(engine, trainer, fresh):
    publisher, _ = trainer
    fall_asleep(engine)
    until(lambda: [each.state for each in publisher.workers()] == ["pending"])
    assert engine.do("wake_up", ["kv_cache"]) is False
    assert (engine.do("label"), engine.do("session")["state"]) == ("empty", "empty")
    assert engine.do("wake_up", ["weights"]) is True
    assert (engine.do("label"), engine.do("session")["state"]) == ("b", "serving")
    assert engine.tokens(PROMPTS) == fresh["B"]
    until(lambda: [each.state for each in publisher.workers()] == ["serving"])


@pytest.mark.nightly
def test_woken_it_takes_the_next_update(engine, trainer, weights, fresh):
    publisher, held = trainer
    fall_asleep(engine)
    until(lambda: [each.state for each in publisher.workers()] == ["pending"])
    assert engine.do("wake_up", ["weights"]) is False
    held.update({name: tensor.clone() for name, tensor in weights["A"].items()})
    assert publish(publisher, engine, "a").ok
    assert engine.do("wake_up", ["kv_cache"]) is True
    assert (engine.tokens(PROMPTS), engine.do("label")) == (fresh["A"], "a")


@pytest.mark.nightly
def test_an_update_that_was_ordered_before_the_sleep_is_not_lost_in_it(
    engine, trainer, weights, fresh
):
    publisher, held = trainer
    held.update({name: tensor.clone() for name, tensor in weights["A"].items()})
    round_ = publisher.publish("a", wait=False)
    await_commit(round_)
    # It was sent; it is ordered once it is there.
    until(lambda: engine.do("session")["state"] == "pending")
    fall_asleep(engine)
    engine.do("wake_up")
    report = round_.result(20)
    assert [(each.outcome, each.version) for each in report.workers] == [("committed", "a")]
    assert (engine.tokens(PROMPTS), engine.do("label")) == (fresh["A"], "a")


@pytest.mark.nightly
def test_sleep_at_level_1_keeps_weights_and_label(engine, trainer, fresh):
    engine.do("sleep", 1)
    assert (engine.do("label"), engine.do("session")["state"]) == ("b", "serving")
    with pytest.raises(HostError, match="vLLM is asleep"):
        engine.do("start")
    engine.do("wake_up")
    assert (engine.tokens(PROMPTS), engine.do("label")) == (fresh["B"], "b")


@pytest.mark.nightly
def test_engine_without_publisher_stays_empty(engine, fresh):
    fall_asleep(engine)
    assert engine.do("wake_up") is True
    assert (engine.do("label"), engine.do("session")["state"]) == ("empty", "empty")
    assert engine.tokens(PROMPTS) != fresh["B"]


@pytest.mark.nightly
def test_adapter_that_lost_its_memory_is_loaded_again_after_the_commit(models, weights, tmp_path):
    folder = tiny_models.make_adapter(tmp_path / "adapter", 1)
    adapter = {"lora_name": "adapter", "lora_int_id": 1, "lora_path": str(folder)}
    options = {
        "enable_lora": True,
        "max_lora_rank": 8,
        "weight_transfer_config": {"backend": "shm"},
    }
    with contextlib.ExitStack() as stack:
        engine, fresh = (
            stack.enter_context(
                contextlib.closing(Engine(tmp_path, model=str(models / name), **options))
            )
            for name in ("A", "B")
        )
        expected = fresh.do("generate", PROMPTS, 16, adapter)
        assert expected != fresh.tokens(PROMPTS)
        publisher = stack.enter_context(wtransfer.Publisher(weights["B"], deadline_s=10))
        engine.invite(publisher)
        publisher.wait_for_workers(1, timeout_s=20)
        publish(publisher, engine, "b")
        engine.do("generate", PROMPTS, 16, adapter)
        fall_asleep(engine)
        until(lambda: [each.state for each in publisher.workers()] == ["pending"])
        assert engine.do("wake_up") is True
        assert engine.do("generate", PROMPTS, 16, adapter) == expected


@pytest.mark.nightly
def test_vllm_refuses_its_sleep_mode_on_a_cpu(models):
    # Where this fails, sleep has come to the CPU: then the tests above need not let memory go.
    asked = "import sys, vllm.config; vllm.config.ModelConfig(sys.argv[1], enable_sleep_mode=True)"
    done = subprocess.run(
        [sys.executable, "-c", asked, str(models / "A")],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "Sleep mode is not supported on current platform." in done.stderr
