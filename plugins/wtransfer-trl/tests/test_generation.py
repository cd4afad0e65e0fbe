"""A generation is of the policy that was published last. TRL's own objects, over stand-ins."""

import math
import os
import re
import secrets
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from stand_ins import Policy, Server, generate, generation_by, weights
from trl.experimental.online_dpo import OnlineDPOTrainer
from wtransfer.errors import WTransferError

import wtransfer_trl

pytestmark = pytest.mark.usefixtures("restored")

RANKS = Path(__file__).with_name("ranks.py")
VLLM_TESTS = Path(__file__).parents[2] / "wtransfer-vllm" / "tests"
PICTURES = [["a picture"]]
"""Asks by TRL's other route, whose answers have spans."""


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("WTRANSFER_TOKEN", secrets.token_hex(32))


@pytest.fixture
def server():
    server = Server()
    yield server
    server.close()


@pytest.fixture
def generating(server):
    """Maker of a generation whose policy, 7, was published."""
    made = []

    def make(policy=7, **arguments):
        wtransfer_trl.install(**arguments)
        made.append(generation_by(server, Policy(policy)))
        generation = made[-1].__enter__()
        generation.sync_weights()
        return generation

    yield make
    for each in made:
        each.__exit__(None, None, None)


def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def catch_up(generation):
    """Wait until the publisher has brought a restarted server up to date."""
    publisher = generation.vllm_client.communicator._publisher
    publisher.invite()
    until(lambda: [each.version for each in publisher.workers()] == [publisher.version])


def numbers():
    logs = {}
    wtransfer_trl.Metrics().on_log(None, SimpleNamespace(log_history=[]), None, logs=logs)
    return logs["wtransfer/version"], logs["wtransfer/stale_steps"]


@pytest.mark.parametrize("images", [None, PICTURES])
def test_server_that_holds_the_policy_generates_once(generating, server, images):
    generation = generating()
    assert generate(generation, images) == 7
    assert server.answers == [7]
    assert numbers() == (1, 0)


def test_server_that_was_restarted_before_a_generation_is_updated_first(generating, server):
    generation = generating()
    server.restart()
    assert generate(generation) == 7
    assert set(server.answers) == {7}


@pytest.mark.parametrize("images", [None, PICTURES])
def test_generation_of_a_server_that_was_restarted_meanwhile_is_repeated(
    generating, server, images, caplog
):
    generation = generating()
    # TRL's client sends a request again where the connection was lost.
    server.before = iter([server.restart_in_request])
    assert generate(generation, images) == 7
    assert server.answers == [0, 7]
    assert numbers() == (2, 0)
    assert re.search("the vLLM server .* trl-.*-1", caplog.text)


def test_generation_is_repeated_though_the_server_was_brought_up_to_date_meanwhile(
    generating, server
):
    generation = generating()
    server.before = iter([server.restart_in_request])
    server.after = iter([lambda: catch_up(generation)])
    assert generate(generation) == 7
    assert server.answers == [0, 7]


def test_second_generation_is_once_where_the_server_was_brought_up_to_date_before(
    generating, server
):
    generation = generating()
    server.restart()
    catch_up(generation)
    assert generate(generation) == 7
    assert server.answers == [7]
    assert numbers() == (1, 0)


@pytest.mark.parametrize("on_error", ["raise", "keep"])
@pytest.mark.parametrize("images", [None, PICTURES])
def test_server_that_is_restarted_each_time_raises(generating, server, on_error, images):
    generation = generating(on_error=on_error)
    server.before = iter([server.restart_in_request] * 2)
    with pytest.raises(WTransferError, match="also after the policy was published again"):
        generate(generation, images)
    assert server.answers == [0, 0]


def test_policy_that_cannot_be_published_again_raises_with_keep(generating, server):
    generation = generating(on_error="keep", return_s=0, deadline_s=5)
    server.before = iter([lambda: server.restart_in_request(more=torch.zeros(1))])
    with pytest.raises(WTransferError, match=r"holds None, expected trl-.*-1"):
        generate(generation)
    assert server.answers == [0]


def test_spans_tell_without_a_further_question(generating, server):
    generation = generating()
    server.after = iter([server.close])
    assert generate(generation, PICTURES) == 7


@pytest.mark.parametrize("tag", ["{}-1", "{}-1@{}+older-kv", "{}-2@{}", "empty"])
def test_tokens_of_other_weights_by_their_spans_are_repeated(generating, server, tag):
    generation = generating()
    server.tag = tag.format(server.session.version.rpartition("-")[0], server.session.fingerprint)

    def mend():
        server.tag = None

    server.after = iter([mend])
    assert generate(generation, PICTURES) == 7
    assert server.answers == [7, 7]


def test_failed_update_leaves_generations_to_the_policy_before(generating, server):
    generation = generating(on_error="keep", nonfinite="reject")
    generation.model.load_state_dict(weights(math.nan))
    generation.sync_weights()
    assert generate(generation) == 7
    assert server.answers == [7]
    assert numbers() == (1, 1)


def test_version_is_what_the_server_holds_and_not_the_last_success(generating, server):
    generation = generating(on_error="keep", return_s=0, deadline_s=5)
    assert numbers() == (1, 0)
    server.close()
    generation.sync_weights()
    assert numbers() == (0, 2)
    server.start()
    catch_up(generation)
    assert generate(generation) == 7
    assert server.answers == [7]
    assert numbers() == (1, 1)


def test_update_of_an_earlier_run_is_none_of_this_run(generating, server):
    earlier = generating()
    earlier.vllm_client.close_communicator()
    label = server.session.version
    later = generating(math.nan, on_error="keep", nonfinite="reject")
    assert server.session.version == label
    assert numbers() == (0, 1)
    later.model.load_state_dict(weights(8))
    later.sync_weights()
    assert numbers() == (2, 0)
    assert label.rpartition("-")[0] != server.session.version.rpartition("-")[0]


def test_closed_client_generates_unchecked(generating, server):
    generation = generating()
    generation.vllm_client.close_communicator()
    server.restart()
    assert generate(generation) == 0


def online_dpo_of(generation):
    """TRL's trainer, as far as its generation by a server reads it."""
    trainer = OnlineDPOTrainer.__new__(OnlineDPOTrainer)
    trainer.model, trainer.vllm_client = generation.model, generation.vllm_client
    trainer.accelerator, trainer.vllm_mode = generation.accelerator, "server"
    trainer.is_fsdp_enabled = False
    trainer.state = SimpleNamespace(global_step=1)
    trainer.args = SimpleNamespace(generation_kwargs={})
    trainer.generation_config = SimpleNamespace(max_tokens=1)
    trainer.num_generations = 1
    trainer.repetition_penalty = trainer.temperature = trainer.top_p = 1.0
    trainer.top_k = trainer.min_p = None
    trainer.processing_class = lambda **_: {"input_ids": torch.zeros(1, 1, dtype=torch.long)}
    return trainer


def test_online_dpo_generates_again_as_well(generating, server):
    generation = generating()
    trainer = online_dpo_of(generation)
    server.before = iter([server.restart_in_request])
    generation.model.load_state_dict(weights(8))
    completions, _ = trainer._generate_vllm_server(["Once"])
    assert completions == [[8]]
    assert server.answers == [0, 8]


def test_ranks_of_a_sharded_policy_publish_again_together(tmp_path):
    store = tmp_path / "store"
    # The store is where ranks meet; accelerate wants an address all the same.
    env = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    env |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(VLLM_TESTS), os.environ.get("PYTHONPATH", "")])
    ranks = [
        subprocess.Popen(
            [sys.executable, RANKS, str(rank), str(store)],
            env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [rank.returncode for rank in ranks] == [0, 0], told
    assert [out.splitlines() for out, _ in told] == [["7", "[0, 7]", "True"], ["7", "True"]]
