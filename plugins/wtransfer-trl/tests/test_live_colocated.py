"""The script of the guide with vLLM in its process, word for word, with faults beside it."""

import json
import re
from contextlib import closing

import pytest
import torch
from engines import PROMPTS, Engine
from safetensors.torch import load_file
from training import Training, check_that_rewards_rise, versions_of

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

AS_TRL = {
    "enforce_eager": False,
    "max_model_len": None,
    "max_num_batched_tokens": 4096,
    "logprobs_mode": "processed_logprobs",
}
"""The options of TRL's engine on which its numbers depend."""


KEPT = r"update trl-\w+-2 failed, the engine keeps its policy, 1 update\(s\) behind: "


@pytest.fixture
def train(script, models, tmp_path):
    """Maker of a training, with something beside it."""

    def begin(num_steps, script=script, model=models / "A", **beside):
        arguments = [str(model), "colocate", str(num_steps)]
        env = {"WTRANSFER_VLLM_CAST": "1"}
        return Training(tmp_path, script, arguments, env, {"colocated": True} | beside)

    return begin


@pytest.fixture
def sleeping(script):
    """The script of the guide, with vLLM asleep between its generations."""
    asleep, num_replaced = re.subn(
        '("vllm_mode": "colocate"), ', r'\1, "vllm_enable_sleep_mode": True, ', script
    )
    assert num_replaced == 1
    return asleep


def answers(folder, number):
    """Return the answers after a generation: tokens, and the likely ones of each step."""
    return json.loads((folder / f"answers-{number}.json").read_text("utf-8"))


def fresh_answers(folder, number):
    """Return the answers of a fresh vLLM of the policy that the trainer had at an update."""
    with closing(Engine(folder, model=str(folder / f"policy-{number}"), **AS_TRL)) as engine:
        return engine.do("answer", PROMPTS)


def test_policy_of_each_update_is_generated_from_or_else_the_one_before(train, tmp_path):
    with train(3, spoilt=2, on_error="keep") as training:
        told, logged = training.end()
    assert versions_of(told) == [(1, 1, 0), (2, 1, 1), (3, 3, 0)]
    assert re.search(KEPT, logged)
    assert answers(tmp_path, 2) == answers(tmp_path, 1)
    assert answers(tmp_path, 3) == fresh_answers(tmp_path, 3) != answers(tmp_path, 1)


@pytest.mark.nightly
def test_rewards_rise(train):
    with train(12) as training:
        told, _ = training.end()
    check_that_rewards_rise(told)


@pytest.mark.nightly
@pytest.mark.parametrize("fault", ["spoilt", "broken"])
def test_update_that_fails_ends_training(train, fault):
    with train(3, **{fault: 2}) as training:
        told, logged = training.end(status=1)
    assert {"spoilt": "DigestMismatchError", "broken": "broken at"}[fault] in logged
    assert not versions_of(told)
    assert re.findall(r"^generated under trl-\w+-(.*)$", told, re.MULTILINE) == ["1"]


@pytest.mark.nightly
def test_update_that_the_engine_fails_to_load_is_undone_with_keep(train, tmp_path):
    with train(3, broken=2, on_error="keep") as training:
        told, logged = training.end()
    assert re.search(KEPT, logged)
    assert versions_of(told) == [(1, 1, 0), (2, 1, 1), (3, 3, 0)]
    assert answers(tmp_path, 2) == answers(tmp_path, 1)
    assert answers(tmp_path, 3) == fresh_answers(tmp_path, 3)


@pytest.mark.nightly
def test_adapters_are_unmerged_after_each_update_and_after_a_spoilt_one(train, tmp_path):
    with train(3, lora=True, spoilt=2, on_error="keep") as training:
        told, _ = training.end()
    assert re.findall("^unmerged (.*)$", told, re.MULTILINE) == ["True"] * 3
    assert versions_of(told) == [(1, 1, 0), (2, 1, 1), (3, 3, 0)]
    assert answers(tmp_path, 3) == fresh_answers(tmp_path, 3)


@pytest.mark.nightly
def test_experts_are_generated_from_in_the_form_of_their_checkpoint(
    train, saving, experts, tmp_path
):
    with train(3, saving, experts) as training:
        told, _ = training.end()
    assert versions_of(told) == [(1, 1, 0), (2, 2, 0), (3, 3, 0)]
    assert answers(tmp_path, 3) == fresh_answers(tmp_path, 3) != answers(tmp_path, 1)
    sent = load_file(tmp_path / "policy-4" / "model.safetensors")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert sent.keys() == saved.keys()
    assert all(torch.equal(each, saved[name].bfloat16()) for name, each in sent.items())


def steps_of(told):
    step = r"^(update|wake .*|generated under .*|asleep at .*)$"
    return re.findall(step, re.sub(r"trl-\w+-", "trl-", told), re.MULTILINE)


ASLEEP = ["wake weights", "update", "wake kv_cache", "generated under trl-{}", "asleep at level 2"]


@pytest.mark.nightly
@pytest.mark.parametrize("fault", ["spoilt", "broken"])
def test_policy_that_was_lost_in_sleep_is_back_where_an_update_fails(
    train, sleeping, tmp_path, fault
):
    with train(3, sleeping, on_error="keep", **{fault: 2}) as training:
        told, _ = training.end()
    assert versions_of(told) == [(1, 1, 0), (2, 1, 1), (3, 3, 0)]
    expected = [each.format(version) for version in (1, 1, 3) for each in ASLEEP]
    assert steps_of(told) == ["asleep at level 2", *expected]
    assert answers(tmp_path, 2) == answers(tmp_path, 1)
    assert answers(tmp_path, 3) == fresh_answers(tmp_path, 3)


@pytest.mark.nightly
def test_nothing_is_generated_where_no_policy_has_come_after_the_sleep(train, sleeping):
    with train(3, sleeping, on_error="keep", spoilt=1) as training:
        told, logged = training.end(status=1)
    assert "vLLM generates nothing: its weights belong to no policy" in logged
    assert steps_of(told) == ["asleep at level 2", "wake weights", "update", "wake kv_cache"]
