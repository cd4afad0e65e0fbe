"""A live vLLM whose reload is at fault takes no update, says why, and serves on bit for bit."""

import concurrent.futures
import contextlib
import json
import secrets
import subprocess
import sys
import threading

import httpx
import pytest
import tiny_models
import torch
import wtransfer
from engines import PROMPTS, Engine, HostError
from faults import FAULTS
from server import Server, plain_worker
from wtransfer.errors import RemoteError
from wtransfer.weight_sync.http.client import HttpClient

pytestmark = [pytest.mark.live, pytest.mark.nightly, pytest.mark.timeout(600)]

NUM_REQUESTS = 100
TOKEN = secrets.token_hex(32)
ENV = {"WTRANSFER_TOKEN": TOKEN}


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """Folder with a model of experts."""
    return tiny_models.make_twin(tmp_path_factory.mktemp("experts"), tiny_models.EXPERTS, 1)


@pytest.fixture(scope="module")
def engine(experts, tmp_path_factory):
    """An engine of that model without a token, in the dtype in which every CPU packs matrices."""
    engine = Engine(
        tmp_path_factory.mktemp("host"),
        env={"WTRANSFER_TOKEN": ""},
        model=str(experts),
        dtype="float32",
        weight_transfer_config={"backend": "shm"},
    )
    yield engine
    engine.close()


def test_each_fault_of_a_reload_is_found_at_the_invitation_and_nothing_is_changed(engine):
    before = engine.do("answer", PROMPTS)
    with wtransfer.Publisher({"w": torch.ones(1)}, deadline_s=10) as publisher:
        for name in FAULTS:
            engine.do("rpc", "break_reload", name)
            with pytest.raises(HostError, match=r"Qwen3Moe.* \(not quantised\) takes no .*layer '"):
                engine.invite(publisher)
            # Remembered: it is not read and compared again.
            with pytest.raises(HostError, match="takes no update"):
                engine.invite(publisher)
            assert engine.do("answer", PROMPTS) == before, name
            assert engine.do("label") == "default"
            engine.do("rpc", "mend_reload")
        assert publisher.workers() == []
        engine.invite(publisher)
        publisher.wait_for_workers(1, timeout_s=20)
    assert engine.do("answer", PROMPTS) == before


STRANGER = """
import json, wtransfer
with wtransfer.Publisher({}, token="its own") as publisher:
    print(json.dumps({"address": publisher.address, "token": "its own"}), flush=True)
    input()
"""


def test_engine_without_a_token_joins_no_publisher_of_another_program(engine):
    command = [sys.executable, "-c", STRANGER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        invitation = json.loads(process.stdout.readline())
        with pytest.raises(HostError, match="set WTRANSFER_TOKEN to one secret in both"):
            engine.do("init", {"wtransfer": invitation})
        process.communicate("\n")
    # The process that started the engine is not another one.
    with wtransfer.Publisher({"w": torch.ones(1)}, token="its own", deadline_s=10) as publisher:
        engine.invite(publisher)
        publisher.wait_for_workers(1, timeout_s=20)


@pytest.fixture(scope="module")
def server(models, tmp_path_factory):
    """A server of model A whose reload loses norms."""
    server = Server(tmp_path_factory.mktemp("server"), models / "A", "shm", env=ENV)
    order = {"method": "break_reload", "args": ["a norm is lost"]}
    httpx.post(f"{server.url}/collective_rpc", json=order, timeout=60).raise_for_status()
    yield server
    server.close()


def answer(url, number):
    """Return the tokens of one request of many, and how probable each was."""
    prompt = f"{number % 7} {PROMPTS[number % len(PROMPTS)]}"
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    body |= {"logprobs": 1, "return_token_ids": True, "ignore_eos": True}
    answered = httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()
    (choice,) = answered.json()["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def test_requests_around_a_refused_invitation_are_answered_by_the_old_weights(server, weights):
    kinds = 7 * len(PROMPTS)
    expected = [answer(server.url, number) for number in range(kinds)]
    invited = threading.Event()

    def invite():
        with contextlib.ExitStack() as stack:
            stack.callback(invited.set)
            with pytest.raises(RemoteError) as refused:
                stack.enter_context(
                    wtransfer.Publisher(weights["B"], hosts=[server.url], token=TOKEN)
                )
            return str(refused.value)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(answer, server.url, number) for number in range(NUM_REQUESTS // 3)]
        refusal = pool.submit(invite)
        while not invited.is_set() or len(asked) < NUM_REQUESTS:
            concurrent.futures.wait(asked[-4:], return_when="FIRST_COMPLETED")
            asked.append(pool.submit(answer, server.url, len(asked)))
        answers = [each.result() for each in asked]
    assert "LlamaForCausalLM (not quantised) takes no update" in refusal.result()
    assert "layer 'model.layers.0.input_layernorm', parameter 'weight'" in refusal.result()
    alone = [expected[number % kinds] for number in range(len(answers))]
    assert [tokens for tokens, _ in answers] == [tokens for tokens, _ in alone]
    assert server.label() == "default"


@pytest.fixture
def other(models, tmp_path):
    """Another host, whose worker has model A as well."""
    with plain_worker(tmp_path, models / "A", TOKEN) as address:
        yield address


@pytest.mark.parametrize("policy", ["abort", "drop"])
def test_other_workers_of_a_refused_server_go_on_as_the_policy_says(server, other, weights, policy):
    options = {"hosts": [server.url, other], "on_lost_worker": policy, "token": TOKEN}
    if policy == "abort":
        with pytest.raises(RemoteError, match=r"layer .*input_layernorm', parameter 'weight'"):
            wtransfer.Publisher(weights["B"], **options)
    else:
        with wtransfer.Publisher(weights["B"], **options) as publisher:
            workers = publisher.publish("b").workers
        (dropped,) = (each for each in workers if each.worker == server.url)
        assert dropped.outcome == "dropped"
        assert "input_layernorm" in str(dropped.error)
        assert [each.outcome for each in workers if each is not dropped] == ["committed"]
    held = HttpClient(other, TOKEN).weight_info()["weight_version"]
    assert held == ("b" if policy == "drop" else None)
    assert server.label() == "default"
