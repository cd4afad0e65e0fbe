"""The script of the guide against the server of the guide, word for word, with faults beside it."""

import re
from contextlib import closing

import pytest
from engines import PROMPTS, Engine
from server import ServerOfWords
from training import Training, check_that_rewards_rise, rows_of, versions_of

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]


@pytest.fixture
def train(script, server, models, token, tmp_path):
    """Maker of a training, by a script that is the guide's where no other is given."""

    def begin(num_steps, script=script, **beside):
        arguments = [str(models / "A"), server.url, str(num_steps)]
        return Training(tmp_path, script, arguments, token, beside)

    return begin


def number_of(label):
    """Return the number of the update that a label is of."""
    return int(re.fullmatch(r"trl-[0-9a-f]{8}-(\d+)", label)[1])


def test_every_step_publishes_its_policy(train, server):
    with train(3) as training:
        told, _ = training.end()
    assert versions_of(told) == [(1, 1, 0), (2, 2, 0), (3, 3, 0)]
    assert number_of(server.label()) == 3


@pytest.mark.nightly
def test_rewards_rise(train):
    with train(12) as training:
        told, _ = training.end()
    check_that_rewards_rise(told)


@pytest.mark.nightly
def test_without_install_trl_refuses_to_update_without_a_gpu(train, script):
    without, num_left_out = re.subn(r"(?m)^wtransfer_trl\.install\(.*\n", "", script)
    assert num_left_out == 1
    with train(3, without) as training:
        told, logged = training.end(status=1)
    assert "needs a CUDA device, got 'cpu'" in logged
    assert not rows_of(told)


@pytest.mark.nightly
def test_server_that_was_killed_before_an_update_gets_the_whole_set(train, server):
    with train(8, hold=5) as training:
        training.wait_for("generated 5")
        assert number_of(server.label()) == 5
        server.kill()
        training.go_on()
        # It waits for a server, and there is none yet.
        training.wait_for("updating after 5")
        server.start_again()
        told, _ = training.end()
    assert versions_of(told) == [(step, step, 0) for step in range(1, 9)]
    assert number_of(server.label()) == 8


@pytest.mark.nightly
def test_generation_of_a_server_that_was_killed_after_the_update_is_repeated(train, server):
    with train(8, hold_within=5) as training:
        training.wait_for("generating 5")
        assert number_of(server.label()) == 5
        server.kill()
        server.start_again()
        training.go_on()
        told, logged = training.end()
    # The fifth policy is published twice, and its second generation is the sixth.
    assert versions_of(told) == [(step, step + (step > 4), 0) for step in range(1, 9)]
    _, *accepted = re.findall("^generated under (.*)$", told, re.MULTILINE)
    assert [number_of(label) for label in accepted] == [6, 7, 8, 9]
    assert re.search(r"the vLLM server .* trl-\w+-5", logged)


@pytest.mark.nightly
def test_spoilt_update_ends_training_and_the_old_policy_serves(train, server):
    with train(12, spoilt=8) as training:
        told, logged = training.end(status=1)
    assert "DigestMismatchError" in logged
    assert not rows_of(told)
    assert number_of(server.label()) == 7
    assert server.tokens(["Once upon a time"])


@pytest.mark.nightly
def test_spoilt_update_is_told_and_training_goes_on_with_keep(train, server):
    with train(12, spoilt=8, on_error="keep") as training:
        told, logged = training.end()
    expected = r"update trl-\w+-8 failed, the server keeps its policy, 1 update\(s\) behind: "
    assert re.search(expected, logged)
    expected = [(step, step, 0) for step in range(1, 13)]
    expected[7] = (8, 7, 1)
    assert versions_of(told) == expected
    assert number_of(server.label()) == 12


@pytest.mark.nightly
def test_adapters_are_unmerged_after_each_update_and_after_a_spoilt_one(train):
    with train(3, lora=True, spoilt=2, on_error="keep") as training:
        told, logged = training.end()
    assert re.search(r"update trl-\w+-2 failed", logged)
    assert re.findall("^unmerged (.*)$", told, re.MULTILINE) == ["True"] * 3
    assert versions_of(told) == [(1, 1, 0), (2, 1, 1), (3, 3, 0)]


@pytest.fixture
def experts_server(server_words, models, experts, token, tmp_path):
    """The server of the guide, of a model of experts."""
    words = server_words.replace(f"{models / 'A'} ", f"{experts} ")
    with closing(ServerOfWords(tmp_path, words, token)) as server:
        yield server


@pytest.mark.nightly
def test_server_computes_with_the_experts_that_were_trained(
    saving, experts_server, experts, token, tmp_path
):
    before = experts_server.tokens(PROMPTS)
    arguments = [str(experts), experts_server.url, "12"]
    with Training(tmp_path, saving, arguments, token, {}) as training:
        told, _ = training.end()
    assert versions_of(told) == [(step, step, 0) for step in range(1, 13)]
    assert number_of(experts_server.label()) == 13
    served = experts_server.tokens(PROMPTS)
    options = {"dtype": "bfloat16", "max_model_len": 512, "kv_cache_memory_bytes": 64 << 20}
    with closing(Engine(tmp_path, model=str(tmp_path / "saved"), **options)) as fresh:
        assert fresh.tokens(PROMPTS) == served != before
