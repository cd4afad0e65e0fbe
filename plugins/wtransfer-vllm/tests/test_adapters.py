"""Names of adapters that are loaded again, beside vLLM's own requests, hashes and KV cache."""

import asyncio
import types
import warnings

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: tests/make_env.py ENV")

from wtransfer_vllm.adapters import load_once
from wtransfer_vllm.engine_core import watch
from wtransfer_vllm.names import remember

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of what vLLM imports
    from vllm import SamplingParams
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.lora.request import LoRARequest
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request

bag = types.SimpleNamespace
SIZE = 4
"""Tokens of a block."""
TOKENS = list(range(10))


def adapter(name="policy", number=1, path="/adapter", **more):
    return LoRARequest(name, number, path, **more)


class EngineCore:
    """An engine core with vLLM's own KV cache, whose workers write down what they load."""

    def __init__(self, *, towers=False):
        remember("engines", "shm", "shm")
        hash_fn = get_hash_fn_by_name("sha256")
        kv_cache_utils.init_none_hash(hash_fn)
        self.hasher = kv_cache_utils.get_request_block_hasher(SIZE, hash_fn)
        spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32)
        groups = [KVCacheGroupSpec(["layer"], spec)]
        self.manager = KVCacheManager(
            KVCacheConfig(num_blocks=32, kv_cache_tensors=[], kv_cache_groups=groups),
            max_model_len=64,
            scheduler_block_size=SIZE,
            hash_block_size=SIZE,
            enable_caching=True,
        )
        self.side = bag(_req_status={})
        self.scheduler = bag(
            kv_cache_manager=self.manager,
            schedule=lambda: self.done.append("schedule"),
            connector=bag(connector_scheduler=self.side),
            requests={},
            pause_state=PauseState.UNPAUSED,
        )
        self.model_executor = bag(sleeping_tags=set())
        self.vllm_config = bag(
            weight_transfer_config=bag(backend="shm"),
            lora_config=bag(enable_tower_connector_lora=towers),
        )
        self.done, self.loaded = [], set()

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        return [getattr(EngineCore, method)(self, *args, **(kwargs or {}))]

    def add_request(self, request):
        assert not request.lora_request.load_inplace
        self.scheduler.requests[request.request_id] = request

    def add_lora(self, lora_request):
        self.done.append(f"load {lora_request.lora_name}")
        if lora_request.lora_path == "/nowhere":
            raise OSError("no such folder")
        self.loaded.add(lora_request.lora_int_id)

    def remove_lora(self, lora_id):
        self.loaded.discard(lora_id)

    def list_loras(self):
        return self.loaded

    def reset_encoder_cache(self):
        self.done.append("encoders")

    def ask(self, lora_request):
        """Return a request that has arrived."""
        name = f"{len(self.side._req_status)}"
        request = Request(
            *(name, TOKENS, SamplingParams(), None),
            lora_request=lora_request,
            block_hasher=self.hasher,
        )
        state = bag(offload_keys=[b"old"], block_ids=[5], next_stored_chunk_idx=1)
        self.side._req_status[name] = bag(req=request, group_states=[state])
        self.add_request(request)
        return request

    def begin(self, request, num_tokens=8):
        """Look a request up, and compute some tokens of it; return how many were found."""
        blocks, found, _ = self.manager.get_computed_blocks(request)
        self.manager.allocate_slots(request, num_tokens - found, found, blocks)
        request.num_computed_tokens = num_tokens
        return found


@pytest.fixture
def core():
    return made()


def made(**more):
    watched = type("EngineCore", (EngineCore,), {})
    watch(watched)
    return watched(**more)


def test_adapter_that_is_loaded_in_place_finds_nothing_of_the_one_before(core):
    core.add_lora(adapter())
    plain = core.ask(adapter())
    held = plain.block_hashes
    first = list(held)
    assert (core.begin(plain), core.begin(core.ask(adapter()))) == (0, 8)
    assert (plain.lora_request.lora_name, plain.block_hashes) == ("policy", first)
    for reload in (1, 2):
        core.add_lora(adapter(load_inplace=True))
        request = core.ask(adapter())
        assert request.block_hashes == first
        assert (core.begin(request), core.begin(core.ask(adapter()))) == (0, 8)
        assert request.lora_request.lora_name == f"policy#{reload}"
        (state,) = core.side._req_status[request.request_id].group_states
        assert (state.offload_keys, state.block_ids) == ([], [])
    # What users passed is as it was, and requests without one are as they were.
    assert core.begin(core.ask(adapter("another", 2))) == 0


def test_requests_that_run_at_a_load_leave_nothing_that_a_request_finds(core):
    core.add_lora(adapter())
    running, waiting = core.ask(adapter()), core.ask(adapter())
    core.begin(running, 4)
    core.add_lora(adapter(load_inplace=True))
    # Over KV of the adapter before.
    core.manager.allocate_slots(running, 4)
    running.num_computed_tokens = 8
    core.manager.free(running)
    assert core.begin(waiting) == 0
    # Preempted, it has the adapter of now.
    core.manager.free(waiting)
    assert core.begin(running) == 8
    assert running.lora_request.lora_name == "policy#1"


def test_requests_that_ask_for_a_load_in_place_have_it_once_before_the_next_batch(core):
    flagged = adapter(load_inplace=True)
    core.add_lora(adapter())
    before = core.ask(adapter())
    asked = [core.ask(flagged) for _ in range(2)]
    assert flagged.load_inplace
    assert core.done == ["load policy"]
    core.scheduler.schedule()
    assert core.done == ["load policy", "load policy", "schedule"]
    assert [core.begin(each) for each in (before, *asked)] == [0, 8, 8]
    assert {each.lora_request.lora_name for each in (before, *asked)} == {"policy#1"}
    core.scheduler.schedule()
    assert core.done[3:] == ["schedule"]
    core.ask(flagged)
    core.scheduler.schedule()
    assert core.done[4:] == ["load policy", "schedule"]


def test_name_that_gets_another_number_and_a_number_that_is_loaded_anew_are_named(core):
    core.add_lora(adapter())
    assert core.begin(core.ask(adapter())) == 0
    core.add_lora(adapter())  # loaded already, which changes nothing
    assert core.begin(core.ask(adapter())) == 8
    # As vLLM's routes do: it is unloaded, and loaded with the next number.
    core.add_lora(adapter(number=2))
    assert core.begin(core.ask(adapter(number=2))) == 0
    assert core.begin(core.ask(adapter())) == 8
    core.loaded.clear()
    core.add_lora(adapter(number=2))
    last = core.ask(adapter(number=2))
    assert (core.begin(last), last.lora_request.lora_name) == (0, "policy#2")
    # A user's name that looks like one of ours.
    like = core.ask(adapter("policy#1", 7))
    assert (core.begin(like), like.lora_request.lora_name) == (0, "policy#1#1")


def test_load_that_fails_half_way_leaves_the_folder_before_under_a_name_of_its_own(core):
    core.add_lora(adapter())
    core.begin(core.ask(adapter()))
    with pytest.raises(OSError, match="no such folder"):
        core.add_lora(adapter(path="/nowhere", load_inplace=True))
    request = core.ask(adapter())
    assert core.begin(request) == 0
    assert request.lora_request.lora_path == "/adapter"
    with pytest.raises(OSError, match="no such folder"):
        core.add_lora(adapter("another", 2, "/nowhere"))
    assert core.begin(core.ask(adapter("another", 2))) == 0


def by_call(core, method, argument):
    getattr(core, method)(argument)


def by_workers(core, method, argument):
    core.collective_rpc(method, args=(argument,))


def by_workers_and_name(core, method, argument):
    name = "lora_request" if method == "add_lora" else "lora_id"
    core.collective_rpc(method, kwargs={name: argument})


@pytest.mark.parametrize("do", [by_call, by_workers, by_workers_and_name])
@pytest.mark.parametrize("name", ["step1", "step2"])
def test_number_that_was_removed_means_what_its_next_request_brings(core, do, name):
    do(core, "add_lora", adapter("step1"))
    assert [core.begin(core.ask(adapter("step1"))) for _ in range(2)] == [0, 8]
    waiting = core.ask(adapter("step1"))
    do(core, "remove_lora", 1)
    assert not core.loaded
    request = core.ask(adapter(name))
    assert core.begin(request) == 0
    assert request.lora_request.lora_name == ("step1#1" if name == "step1" else name)
    assert core.begin(waiting) == (8 if name == "step1" else 0)
    do(core, "add_lora", adapter(name))
    before = core.ask(adapter(name))
    assert core.begin(before) == 0
    do(core, "add_lora", adapter(name, load_inplace=True))
    assert core.begin(core.ask(adapter(name))) == 0


def test_request_that_brings_its_number_another_adapter_has_that_as_in_vllm_alone(core):
    core.add_lora(adapter("step1", path="/1"))
    core.begin(core.ask(adapter("step1", path="/1")))
    core.loaded.clear()  # as at a commit, or with few --max-cpu-loras
    for name, path, ours in (
        ("step2", "/1", "step2"),
        ("step2", "/2", "step2#1"),
        ("step1", "/1", "step1#1"),
    ):
        request = core.ask(adapter(name, path=path))
        assert core.begin(request) == 0
        assert (request.lora_request.lora_name, request.lora_request.lora_path) == (ours, path)
        assert core.begin(core.ask(adapter(name, path=path))) == 8


@pytest.mark.parametrize("by_request", [True, False])
def test_requests_have_the_folder_that_was_loaded_last_in_place(core, by_request):
    core.add_lora(adapter(path="/1"))
    waiting, preempted = core.ask(adapter(path="/1")), core.ask(adapter(path="/1"))
    core.begin(preempted)
    for path in ("/2", "/3"):
        in_place = adapter(path=path, load_inplace=True)
        if by_request:
            core.ask(in_place)
        else:
            core.add_lora(in_place)
        core.scheduler.schedule()
    core.manager.free(preempted)
    late = core.ask(adapter(path="/1"))  # of a front end that did not know yet
    assert [core.begin(each) for each in (waiting, preempted, late)] == [0, 8, 8]
    for each in (waiting, preempted, late):
        assert each.lora_request.lora_path == "/3"
        assert not each.lora_request.load_inplace


def test_load_in_place_is_not_carried_out_for_a_request_that_has_ended(core):
    core.add_lora(adapter())
    core.ask(adapter(path="/2", load_inplace=True))
    aborted = core.ask(adapter(path="/nowhere", load_inplace=True))
    alone = core.ask(adapter("another", 2, "/nowhere", load_inplace=True))
    for each in (aborted, alone):
        del core.scheduler.requests[each.request_id]
    core.scheduler.schedule()
    assert core.done == ["load policy", "load policy", "schedule"]
    request = core.ask(adapter())
    core.begin(request)
    assert request.lora_request.lora_path == "/2"


@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL, "asleep"])
def test_load_in_place_waits_until_vllm_is_awake_and_resumed(core, state):
    if state == "asleep":
        core.model_executor.sleeping_tags = {"weights"}
    else:
        core.scheduler.pause_state = state
    core.ask(adapter(load_inplace=True))
    core.scheduler.schedule()
    assert core.done == ["schedule"]
    core.model_executor.sleeping_tags = set()
    core.scheduler.pause_state = PauseState.UNPAUSED
    core.scheduler.schedule()
    assert core.done == ["schedule", "load policy", "schedule"]


def test_loads_in_place_are_carried_out_in_the_order_of_their_requests(core):
    for number, name in enumerate(("first", "second", "third"), 1):
        core.ask(adapter(name, number, load_inplace=True))
    core.scheduler.schedule()
    assert core.done == ["load first", "load second", "load third", "schedule"]


@pytest.mark.parametrize("towers", [True, False])
def test_encoders_that_adapters_change_are_forgotten_before_the_next_batch(towers):
    core = made(towers=towers)

    def forgets():
        core.done.clear()
        core.scheduler.schedule()
        assert core.done[-1] == "schedule"
        return core.done[:-1] == ["encoders"]

    core.add_lora(adapter())
    core.ask(adapter())
    assert not forgets()
    core.add_lora(adapter(load_inplace=True))
    assert forgets() is towers
    core.ask(adapter(number=2))  # which its request has vLLM load
    assert forgets() is towers
    core.ask(adapter(number=2))
    assert not forgets()
    core.remove_lora(2)
    assert forgets() is towers


@pytest.mark.parametrize("is_ours", [True, False])
def test_server_keeps_no_order_to_load_in_its_table(is_ours):
    async def load_lora_adapter(self, request):
        self.lora_requests[request.lora_name] = adapter(load_inplace=True)
        return "Success"

    models = type("Models", (), {"load_lora_adapter": load_lora_adapter})
    load_once(models, lambda client: client == "a client" and is_ours)
    table = models()
    table.engine_client, table.lora_requests = "a client", {}
    assert asyncio.run(table.load_lora_adapter(bag(lora_name="policy"))) == "Success"
    assert table.lora_requests["policy"].load_inplace is not is_ours
    # vLLM's own has the table and the client under these names.
    assert {"lora_requests", "engine_client"} <= set(OpenAIServingModels.__init__.__code__.co_names)


@pytest.mark.parametrize("models", [None, type("Models", (), {})])
def test_server_of_another_shape_stays_as_it_is(models):
    before = models and dict(vars(models))
    load_once(models, lambda _: True)
    assert (models and dict(vars(models))) == before
