"""TRL's own generation in the trainer's process, and the turns in which its engine is updated.

The engine is a stand-in here: `test_live_colocated.py` has vLLM's.
"""

import threading
from types import SimpleNamespace

import pytest
import transformers
from accelerate import Accelerator
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration
from wtransfer.errors import WTransferError

import wtransfer_trl
from wtransfer_trl.policy_llm import TurnClient

pytestmark = pytest.mark.usefixtures("restored")


class Engine:
    """Notes what is asked of an ``LLM``, in order."""

    def __init__(self, **_):
        self.calls = []

    def wake_up(self, tags):
        self.calls.append(f"wake {tags}")

    def update(self, metadata, tensors):
        announced = [(name, tuple(shape)) for name, _, shape in metadata]
        sent = [(name, tuple(tensor.shape)) for name, tensor in tensors]
        self.calls.append("update" if announced == sent else f"{announced} is not {sent}")

    def generate(self, prompts, **_):
        self.calls.append("generate")
        one = SimpleNamespace(token_ids=[1], logprobs=None)
        return [SimpleNamespace(prompt_token_ids=[0], outputs=[one]) for _ in prompts]

    def sleep(self, level):
        self.calls.append(f"sleep {level}")

    def start_weight_update(self):
        self.calls.append("start")

    def finish_weight_update(self, weight_version):
        self.calls.append(f"finish {weight_version}")


@pytest.fixture
def generation(monkeypatch):
    """Maker of TRL's generation over a stand-in of its engine."""
    accelerator = Accelerator(cpu=True)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")  # TRL sets them, and they are taken away again
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )

    def make(**arguments):
        wtransfer_trl.install()
        monkeypatch.setattr(vllm_generation, "LLM", Engine)
        model = transformers.LlamaForCausalLM(config)
        return VLLMGeneration(model, accelerator, None, mode="colocate", **arguments)

    return make


def generate(generation):
    generation.generate([[0]], None, num_generations=1)


def test_weights_wake_for_the_update_and_kv_cache_after_it(generation):
    asleep = generation(enable_sleep_mode=True)
    generate(asleep)
    steps = ["wake ['weights']", "update", "wake ['kv_cache']", "generate", "sleep 2"]
    assert asleep.llm.calls == ["sleep 2", *steps]
    asleep.sync_weights()
    generate(asleep)
    assert asleep.llm.calls == ["sleep 2", *steps, *steps]


def test_engine_that_does_not_sleep_is_updated_where_it_is(generation):
    awake = generation()
    awake.sync_weights()
    generate(awake)
    assert awake.llm.calls == ["update", "generate"]


def test_second_install_replaces_the_first(generation):
    wtransfer_trl.install()
    awake = generation()
    awake.sync_weights()
    assert awake.llm.calls == ["update"]


def test_several_processes_are_refused_before_an_engine_starts(monkeypatch):
    wtransfer_trl.install()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(NotImplementedError, match='use vllm_mode="server"'):
        vllm_generation.LLM(model="anything")


def test_publisher_has_the_engine_in_its_turns_only():
    engine = Engine()
    client = TurnClient(engine)
    refused = pytest.raises(WTransferError, match="the engine is the trainer's between its updates")
    with refused:
        client.start_weight_update()
    with client.opened():
        client.start_weight_update()
        client.finish_weight_update("a")
    with refused:
        client.finish_weight_update("b")
    assert engine.calls == ["start", "finish a"]


def test_turn_ends_when_the_call_under_way_has():
    begun, may_end, order = threading.Event(), threading.Event(), []

    class Slow(Engine):
        def start_weight_update(self):
            begun.set()
            assert may_end.wait(20)
            order.append("called")

    client = TurnClient(Slow())
    thread = threading.Thread(target=client.start_weight_update)
    later = threading.Timer(0.2, may_end.set)
    with client.opened():
        thread.start()
        assert begun.wait(20)
        later.start()
    order.append("closed")
    thread.join()
    assert order == ["called", "closed"]


def test_version_whose_commit_has_failed_waits_for_the_next_turn():
    engine = Engine()
    client = TurnClient(engine)
    with client.opened():
        client.finish_weight_update("a")
        with pytest.raises(WTransferError, match="a has come, and waits for the next update"):
            client.finish_weight_update("a")
        client.finish_weight_update("b")
    with client.opened():
        client.finish_weight_update("a")
    assert engine.calls == ["finish a", "finish b", "finish a"]
