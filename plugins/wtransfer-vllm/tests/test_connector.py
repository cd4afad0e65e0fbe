"""The adapter between vLLM's connectors and ours, driven call by call as vLLM drives it."""

import types
import warnings
from dataclasses import dataclass

import pytest
import torch

from wtransfer_vllm.names import is_ours, remember

pytest.importorskip("vllm", reason="vLLM is not installed: tests/make_env.py ENV")

from wtransfer.config import KVCacheGroup
from wtransfer.connectors.interface import KVConnectorBase_V1, KVConnectorMetadata, KVEvent
from wtransfer.connectors.offloading.events import BlockEvents
from wtransfer.errors import ConnectorOptionError
from wtransfer.registry.resolve import registry
from wtransfer.specs.interface import Medium

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of what vLLM imports
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_events import BlockRemoved
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, supports_hma
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
        UniformTypeKVCacheSpecs,
    )
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class bag(types.SimpleNamespace):  # noqa: N801  # as a function
    """One to which weak references can be made."""


LAYERS = ("layer.0", "layer.1")


@dataclass
class Plan(KVConnectorMetadata):
    number: int = 0


class Scripted(KVConnectorBase_V1):
    """Answers what the test says, and writes down what it is called with."""

    names_weights = True
    answers: dict = {}  # noqa: RUF012

    def __init__(self, vllm_config, role, kv_cache_config=None):
        super().__init__(vllm_config, role, kv_cache_config)
        self.calls = []

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return self.answers["matched"]

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self.calls.append("alloc")

    def build_connector_meta(self, scheduler_output):
        return Plan(len(self.calls))

    def request_finished(self, request, block_ids):
        return self.answers["stays"], None

    def start_load_kv(self, forward_context, **kwargs):
        self.calls.append("load")

    def wait_for_layer_load(self, layer_name):
        self.calls.append(f"wait {layer_name}")

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        self.calls.append(f"save {layer_name}")

    def wait_for_save(self):
        self.calls.append("saved")

    def get_finished(self, finished_req_ids):
        return self.answers.pop("finished", (None, None))

    def get_failed_recving(self):
        return self.answers.pop("failed", set())

    def get_block_ids_with_load_errors(self):
        return self.answers.pop("errors", set())

    def get_stats(self):
        return self.answers.get("stats", {})

    def take_events(self):
        return self.answers.pop("events", ())


PAGE = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
FULL = FullAttentionSpec(block_size=16, **PAGE)


def window(size=64, **more):
    return SlidingWindowSpec(block_size=16, sliding_window=size, **PAGE, **more)


def states(mode="align", **more):
    shapes = {"shapes": ((4, 8), (8, 8)), "dtypes": (torch.float32,) * 2}
    return MambaSpec(block_size=16, mamba_cache_mode=mode, **shapes, **more)


def cache_config(spec=FULL, *others):
    """Return vLLM's cache: both layers of one group, or each of a group of its own."""
    specs = (spec, *others)
    layers = [[layer] for layer in LAYERS] if others else [list(LAYERS)]
    groups = [KVCacheGroupSpec(names, each) for names, each in zip(layers, specs, strict=True)]
    # As in vLLM, each part of the one allocation states the size of the whole.
    tensors = [bag(size=4 * 2 * 1024) for _ in specs]
    return KVCacheConfig(num_blocks=4, kv_cache_tensors=tensors, kv_cache_groups=groups)


HYBRID = (FULL, window(64))


@pytest.fixture
def adapter(tmp_path, monkeypatch):
    """Maker of one side of the adapter over the scripted connector."""
    monkeypatch.setattr(Scripted, "answers", {"matched": (0, False), "stays": False})
    monkeypatch.setattr(Scripted, "supports_hma", False)
    monkeypatch.setenv("WTRANSFER_CACHE", str(tmp_path))
    if not is_ours("connectors", "scripted"):
        registry("connectors").register("scripted", Scripted)
        remember("connectors", "scripted", "scripted")
        KVConnectorFactory.register_connector("scripted", "wtransfer_vllm.connector", "scripted")
    config = bag(
        kv_transfer_config=KVTransferConfig(kv_connector="scripted", kv_role="kv_both"),
        model_config=bag(model=str(tmp_path / "nowhere"), dtype="float32", hf_config=None),
        load_config=bag(load_format="dummy"),
        cache_config=bag(block_size=16, cache_dtype="auto"),
        parallel_config=bag(rank=0, world_size=1, tensor_parallel_size=1),
        scheduler_config=bag(disable_hybrid_kv_cache_manager=True),
    )

    def make(role, kv_cache_config=None, *, batches=1, draft=None):
        config.max_concurrent_batches, config.speculative_config = batches, draft
        side = KVConnectorFactory.create_connector(
            config, KVConnectorRole[role], kv_cache_config or cache_config()
        )
        if role == "WORKER":
            side.register_kv_caches({layer: torch.zeros(4, 256) for layer in LAYERS})
        return side, side._inner

    make.config = config
    return make


def request(name):
    return bag(request_id=name)


def blocks(*ids):
    return bag(get_block_ids=lambda: (list(ids),))


def plan(scheduler, *, name=None, ids=(), num_tokens=0):
    """Let the scheduler's side plan a step, with a load if a request is named."""
    if name is not None:
        scheduler.get_num_new_matched_tokens(request(name), 0)
        scheduler.update_state_after_alloc(request(name), blocks(*ids), num_tokens)
    return scheduler.build_connector_meta(bag(total_num_scheduled_tokens=1))


def step(worker, metadata, *, forward=True, finished=()):
    """Take a step as vLLM's model runner does; return what it reports."""
    worker.handle_preemptions(metadata)
    worker.bind_connector_metadata(metadata)
    worker.start_load_kv(None)
    for layer in LAYERS if forward else ():
        worker.wait_for_layer_load(layer)
        worker.save_kv_layer(layer, None, None)
    worker.wait_for_save()
    results = worker.get_transfer_results(set(finished))
    errors = worker.get_block_ids_with_load_errors()
    worker.clear_connector_metadata()
    return results, errors


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_class_that_vllm_takes_by_its_module_names_the_argument_to_write(adapter, role):
    transfer = adapter.config.kv_transfer_config
    transfer.kv_connector = "SharedStorageConnector"
    transfer.kv_connector_module_path = "wtransfer.connectors.shared_storage"
    transfer.kv_connector_extra_config = {"shared_storage_path": "/nowhere"}
    text = 'write only its name there as "kv_connector", without "kv_connector_module_path"'
    with pytest.raises(ConnectorOptionError, match=text):
        KVConnectorFactory.create_connector(adapter.config, role, cache_config())


def test_step_over_failed_loads_is_not_saved(adapter):
    (scheduler, _), (worker, inner) = adapter("SCHEDULER"), adapter("WORKER")
    Scripted.answers["matched"] = (16, False)
    metadata = plan(scheduler, name="sync", ids=(2, 3), num_tokens=16)
    Scripted.answers["errors"] = {2}
    _, errors = step(worker, metadata)
    assert errors == {2}
    assert "saved" not in inner.calls


def test_failed_asynchronous_load_does_not_prevent_saving(adapter):
    (scheduler, _), (worker, inner) = adapter("SCHEDULER"), adapter("WORKER")
    Scripted.answers["matched"] = (16, True)
    metadata = plan(scheduler, name="waiting", ids=(2, 3), num_tokens=16)
    Scripted.answers["errors"] = {2}
    _, errors = step(worker, metadata)
    assert errors == {2}
    assert "saved" in inner.calls
    # Nor do errors of a step before it.
    _, errors = step(worker, plan(scheduler))
    assert (errors, inner.calls.count("saved")) == (set(), 2)


def test_layer_loads_are_awaited_without_a_forward_pass(adapter):
    (scheduler, _), (worker, inner) = adapter("SCHEDULER"), adapter("WORKER")
    step(worker, plan(scheduler), forward=False)
    assert inner.calls == ["load", "saved", "wait layer.0", "wait layer.1"]
    inner.calls.clear()
    step(worker, plan(scheduler))
    assert [each for each in inner.calls if each.startswith("wait")] == [
        "wait layer.0",
        "wait layer.1",
    ]


def test_deferred_save_precedes_get_finished_and_happens_once(adapter):
    (scheduler, _), (worker, inner) = adapter("SCHEDULER"), adapter("WORKER")
    worker.bind_connector_metadata(plan(scheduler))
    worker.start_load_kv(None)
    # vLLM defers the save until the draft tokens are there.
    worker.get_transfer_results(set())
    assert inner.calls == ["load", "saved"]
    worker.get_block_ids_with_load_errors()
    worker.wait_for_save()
    worker.clear_connector_metadata()
    assert inner.calls.count("saved") == 1


def test_step_planned_before_a_failed_load_was_reported_is_not_saved(adapter):
    (scheduler, _), (worker, inner) = adapter("SCHEDULER"), adapter("WORKER", batches=2)
    Scripted.answers["matched"] = (16, False)
    metadata = plan(scheduler, name="sync", ids=(2, 3), num_tokens=16)
    Scripted.answers["errors"] = {2}
    step(worker, metadata)
    step(worker, plan(scheduler))
    assert "saved" not in inner.calls
    step(worker, plan(scheduler))
    assert "saved" in inner.calls


def test_latent_attention_is_refused_where_vllm_computes_none_over_a_prefix(adapter):
    # On a CPU without AMX vLLM turns its prefix cache off: tokens over a loaded prefix were others.
    latent = cache_config(MLAAttentionSpec(block_size=16, **PAGE))
    adapter.config.cache_config.enable_prefix_caching = False
    for role in ("SCHEDULER", "WORKER"):
        with pytest.raises(
            ConnectorOptionError, match="other tokens over a prefix that was loaded"
        ):
            adapter(role, latent)
    adapter("SCHEDULER")
    adapter.config.cache_config.enable_prefix_caching = True
    adapter("SCHEDULER", latent)


def test_draft_model_is_refused_under_a_layerwise_connector(adapter):
    with pytest.raises(ConnectorOptionError, match="saves KV layer by layer, and the draft model"):
        adapter("WORKER", draft=bag(draft_model_config=bag()))
    adapter("WORKER", draft=bag(draft_model_config=None))


def test_reset_cache_keeps_stored_kv(adapter):
    side, _ = adapter("SCHEDULER")
    assert side.reset_cache() is None


def test_early_report_does_not_end_a_reused_request_id(adapter):
    (scheduler, _), (worker, _) = adapter("SCHEDULER"), adapter("WORKER")
    Scripted.answers["finished"] = (None, {"again"})
    step(worker, plan(scheduler))
    Scripted.answers["matched"] = (16, True)
    results, _ = step(worker, plan(scheduler, name="again", ids=(1,), num_tokens=16))
    assert results.finished_recving == set()


def test_request_that_begins_anew_is_named_as_failed_when_it_is_received(adapter):
    (scheduler, _), (worker, _) = adapter("SCHEDULER"), adapter("WORKER")
    Scripted.answers["matched"] = (16, True)
    for number, name in enumerate("ab"):
        metadata = plan(scheduler, name=name, ids=(number,), num_tokens=16)
        worker.bind_connector_metadata(metadata)
    Scripted.answers.update(failed={"a", "b", "c"}, finished=(None, {"a"}))
    results = worker.get_transfer_results(set())
    assert (results.finished_recving, results.failed_recving) == ({"a"}, {"a"})
    Scripted.answers["finished"] = (None, {"b"})
    assert worker.get_transfer_results(set()).failed_recving == {"b"}


def test_block_pool_of_vllm_is_what_connectors_hold_blocks_with(adapter):
    side, _ = adapter("SCHEDULER")
    pool = BlockPool(4, enable_caching=True, hash_block_size=16)
    bound = []
    side._inner.bind_gpu_block_pool = bound.append
    side.bind_gpu_block_pool(pool)
    (held,) = bound
    # What the offloading connector calls: the block stays although its request lets go of it.
    (block,) = held.get_new_blocks(1)
    held.touch([held.blocks[block.block_id]])
    free = held.get_num_free_blocks()
    held.free_blocks([block])
    assert held.get_num_free_blocks() == free
    held.free_blocks([held.blocks[block.block_id]])
    assert held.get_num_free_blocks() == free + 1


def test_unawaited_request_is_not_reported(adapter):
    (scheduler, _), (worker, _) = adapter("SCHEDULER"), adapter("WORKER")
    Scripted.answers["finished"] = ({"never heard of"}, {"nor of this"})
    results, _ = step(worker, plan(scheduler), finished={"never heard of"})
    assert (results.finished_sending, results.finished_recving) == (set(), set())


def test_finished_request_is_reported_once(adapter):
    (scheduler, _), (worker, _) = adapter("SCHEDULER"), adapter("WORKER")
    Scripted.answers["stays"] = True
    assert scheduler.request_finished(request("one"), [1]) == (True, None)
    Scripted.answers["finished"] = ({"one"}, {"one"})
    results, _ = step(worker, plan(scheduler), finished={"one"})
    assert (results.finished_sending, results.finished_recving) == ({"one"}, set())
    Scripted.answers["finished"] = ({"one"}, {"one"})
    results, _ = step(worker, plan(scheduler))
    assert (results.finished_sending, results.finished_recving) == (set(), set())


def test_early_report_is_kept_until_the_request_has_ended(adapter):
    (scheduler, _), (worker, _) = adapter("SCHEDULER"), adapter("WORKER")
    Scripted.answers["finished"] = ({"early", "freed"}, None)
    results, _ = step(worker, plan(scheduler))
    assert results.finished_sending == set()
    Scripted.answers["stays"] = True
    scheduler.request_finished(request("early"), [1])
    Scripted.answers["stays"] = False
    scheduler.request_finished(request("freed"), [2])
    results, _ = step(worker, plan(scheduler), finished={"early", "freed"})
    assert results.finished_sending == {"early"}
    assert not worker._early


@pytest.mark.parametrize("named_as", [0, 1], ids=["sent", "received"])
def test_request_aborted_during_its_load_is_reported_as_received_once(adapter, named_as):
    (scheduler, _), (worker, _) = adapter("SCHEDULER"), adapter("WORKER")
    Scripted.answers |= {"matched": (16, True), "stays": True}
    step(worker, plan(scheduler, name="aborted", ids=(1, 2), num_tokens=16))
    assert scheduler.request_finished(request("aborted"), [1, 2])[0] is True
    step(worker, plan(scheduler), finished={"aborted"})
    Scripted.answers["finished"] = [({"aborted"}, None), (None, {"aborted"})][named_as]
    results, _ = step(worker, plan(scheduler))
    assert (results.finished_sending, results.finished_recving) == (set(), {"aborted"})
    scheduler.update_connector_output(KVConnectorOutput(finished_recving={"aborted"}))
    Scripted.answers["finished"] = ({"aborted"}, {"aborted"})
    results, _ = step(worker, plan(scheduler))
    assert (results.finished_sending, results.finished_recving) == (set(), set())


def test_cache_that_a_connector_cannot_move_is_refused_by_its_groups(adapter):
    text = (
        r"2 groups \(FullAttentionSpec of 1 layers, SlidingWindowSpec of 1 layers\); this "
        "connector moves one group of FullAttentionSpec or MLAAttentionSpec; OffloadingConnector"
    )
    with pytest.raises(ConnectorOptionError, match=text):
        adapter("SCHEDULER", cache_config(*HYBRID))
    with pytest.raises(ConnectorOptionError, match=r"1 groups \(SlidingWindowSpec of 2 layers\)"):
        adapter("WORKER", cache_config(window()))
    blocks_of_32 = FullAttentionSpec(block_size=32, **PAGE)
    with pytest.raises(ConnectorOptionError, match=r"of 16 and 32 tokens, .*parallelism"):
        adapter("WORKER", cache_config(blocks_of_32))


def test_groups_with_blocks_of_several_sizes_are_refused_with_the_option_that_helps(
    adapter, monkeypatch
):
    monkeypatch.setattr(Scripted, "supports_hma", True)
    wide = FullAttentionSpec(block_size=32, **PAGE)
    text = r"of 16 and 32 tokens, .* \(Gemma 4\): start vLLM with --disable-hybrid-kv-cache-manager"
    with pytest.raises(ConnectorOptionError, match=text):
        adapter("SCHEDULER", cache_config(wide, window()))


UNKNOWN = ChunkedLocalAttentionSpec(block_size=16, attention_chunk_size=64, **PAGE)


def test_kind_of_cache_that_no_connector_knows_is_refused_under_any(adapter, monkeypatch):
    monkeypatch.setattr(Scripted, "supports_hma", True)
    for others in ((FULL, UNKNOWN), (UNKNOWN,)):
        with pytest.raises(ConnectorOptionError, match=r"ChunkedLocalAttentionSpec of \d layers"):
            adapter("SCHEDULER", cache_config(*others))
    for others in (states("none"), states("all"), states(num_speculative_blocks=2)):
        with pytest.raises(ConnectorOptionError, match="the latter with prefix caching in mode"):
            adapter("WORKER", cache_config(FULL, others))


@pytest.mark.parametrize(
    ("specs", "groups"),
    [
        ((FULL,), [KVCacheGroup()]),
        ((window(64),), [KVCacheGroup((), 64)]),
        (HYBRID, [KVCacheGroup(LAYERS[:1]), KVCacheGroup(LAYERS[1:], 64)]),
        (
            (window(64), window(32, extra_retained_tokens=2)),
            [KVCacheGroup(LAYERS[:1], 64), KVCacheGroup(LAYERS[1:], 34)],
        ),
        (
            (UniformTypeKVCacheSpecs(16, dict.fromkeys(LAYERS, window(48))),),
            [KVCacheGroup((), 48)],
        ),
        ((states(), FULL), [KVCacheGroup(LAYERS[:1], None, True), KVCacheGroup(LAYERS[1:])]),
    ],
)
def test_connector_gets_the_groups_of_vllm(adapter, monkeypatch, specs, groups):
    monkeypatch.setattr(Scripted, "supports_hma", True)
    _, inner = adapter("WORKER", cache_config(*specs))
    assert list(inner.kv_cache_config.groups) == groups
    assert inner.kv_cache_config.bytes_per_block == 2048


def test_vllm_keeps_its_hybrid_allocator_for_connectors_that_say_so():
    from wtransfer_vllm import connector, plugin

    plugin.register()
    found = {
        name: supports_hma(getattr(connector, name))
        for name in ("wtransfer-OffloadingConnector", "SharedStorageConnector")
    }
    assert found == dict.fromkeys(found, True)
    others = ("SharedMemoryConnector", "ProcessGroupConnector", "wtransfer-MultiConnector")
    assert not any(supports_hma(getattr(connector, name)) for name in others)


@pytest.fixture
def hybrid(adapter, monkeypatch):
    """Both sides of the adapter for a model with two groups."""
    monkeypatch.setattr(Scripted, "supports_hma", True)
    return [adapter(role, cache_config(*HYBRID)) for role in ("SCHEDULER", "WORKER")]


def plan_loads(scheduler, **block_ids):
    """Plan a step in which requests begin to load into the blocks of two groups."""
    Scripted.answers["matched"] = (16, True)
    for name, ids in block_ids.items():
        scheduler.get_num_new_matched_tokens(request(name), 0)
        scheduler.update_state_after_alloc(
            request(name), bag(get_block_ids=lambda ids=ids: ids), 16
        )
    return scheduler.build_connector_meta(bag(total_num_scheduled_tokens=1))


@pytest.mark.parametrize("named_early", [False, True])
def test_of_several_groups_vllm_is_told_of_requests_and_not_of_blocks(hybrid, named_early):
    (scheduler, _), (worker, _) = hybrid
    metadata = plan_loads(scheduler, a=([1], [2]), b=([3], [0, 2]), c=([3], [4]))
    Scripted.answers["finished"] = (None, set() if named_early else {"a", "b", "c"})
    Scripted.answers["errors"] = {2}
    results, errors = step(worker, metadata)
    if named_early:
        assert (results.finished_recving, results.failed_recving, errors) == (set(), set(), set())
        Scripted.answers["finished"] = (None, {"a", "b", "c"})
        results, errors = step(worker, plan(scheduler))
    assert results.finished_recving == {"a", "b", "c"}
    assert results.failed_recving == {"a", "b"}
    assert errors == set(), "vLLM would end the engine core"


def test_load_within_a_step_is_not_asked_for_where_vllm_takes_no_failure_of_it(hybrid):
    (scheduler, _), _ = hybrid
    Scripted.answers["matched"] = (16, False)
    assert scheduler.get_num_new_matched_tokens(request("r"), 0) == (0, False)
    Scripted.answers["matched"] = (16, True)
    assert scheduler.get_num_new_matched_tokens(request("r"), 0) == (16, True)
    Scripted.answers["matched"] = (None, False)
    assert scheduler.get_num_new_matched_tokens(request("r"), 0) == (None, False)


def test_request_ends_with_the_blocks_of_all_groups(hybrid):
    (scheduler, inner), _ = hybrid
    ended = []
    inner.request_finished = lambda _, block_ids: ended.append(block_ids) or (False, None)
    assert scheduler.request_finished_all_groups(request("r"), ([1, 2], [0, 3])) == (False, None)
    assert ended == [[1, 2, 0, 3]]


def test_cache_whose_first_dimension_is_not_blocks_is_refused(adapter):
    worker, _ = adapter("WORKER")
    with pytest.raises(ConnectorOptionError, match=r"layer 'x' has shape \(2, 4, 16\)"):
        worker.register_kv_caches({"x": torch.zeros(2, 4, 16)})


def test_connector_gets_its_own_name_and_the_cache_shape(adapter):
    _, inner = adapter("WORKER")
    assert inner.config.kv_transfer_config.kv_connector == "scripted"
    shape = inner.kv_cache_config
    assert (shape.num_blocks, shape.block_size, shape.bytes_per_block) == (4, 16, 2048)


def test_counters_add_up_over_ranks_and_intervals_and_gauges_do_not(adapter, monkeypatch):
    (worker, _), (other, _) = adapter("WORKER"), adapter("WORKER")
    monkeypatch.setattr("wtransfer_vllm.kv_stats.INTERVAL_S", 0.0)
    build = type(worker).build_kv_connector_stats
    Scripted.answers["stats"] = {"blocks_loaded_total": 3, "slots": 7, "never_total": 0}
    together = worker.get_kv_connector_stats().aggregate(other.get_kv_connector_stats())
    Scripted.answers["stats"] = {"blocks_loaded_total": 5, "slots": 6, "never_total": 0}
    together.aggregate(build(worker.get_kv_connector_stats().to_dict()))
    assert together.reduce() == {"worker_blocks_loaded_total": 8, "worker_slots": 6}
    assert worker.get_kv_connector_stats() is None
    # A gauge that falls to 0 is told; numbers that cannot be read end no step.
    Scripted.answers["stats"] = {"blocks_loaded_total": 5, "slots": 0}
    stats = worker.get_kv_connector_stats()
    assert (stats.data, stats.is_empty()) == ({"worker_slots": 0}, False)
    Scripted.answers["stats"] = {"slots": "many", "loads_total": 1}
    assert worker.get_kv_connector_stats().data == {"worker_loads_total": 1}
    Scripted.answers["stats"] = None
    assert worker.get_kv_connector_stats() is None
    assert build().is_empty()
    assert not together.is_empty()


def test_step_that_computes_nothing_tells_the_numbers_that_stay_while_the_engine_is_idle(adapter):
    (scheduler, _), (worker, _) = adapter("SCHEDULER"), adapter("WORKER")

    def step(num_tokens, **stats):
        Scripted.answers["stats"] = stats
        metadata = scheduler.build_connector_meta(bag(total_num_scheduled_tokens=num_tokens))
        worker.bind_connector_metadata(metadata)
        told = [side.get_kv_connector_stats() for side in (worker, scheduler)]
        worker.clear_connector_metadata()
        return [each and each.data for each in told]

    assert step(1, storing=1) == [{"worker_storing": 1}, {"scheduler_storing": 1}]
    assert step(1, storing=2) == [None, None], "within the interval"
    assert step(0, storing=0) == [{"worker_storing": 0}, {"scheduler_storing": 0}]
    assert step(0, storing=0) == [None, None]
    assert step(1, storing=3) == [None, None]


def hashed_request(num_tokens, **more):
    """Return a request of vLLM's own, with its block hashes."""
    init_none_hash(sha256)
    return Request(
        "r",
        list(range(num_tokens)),
        SamplingParams(max_tokens=1),
        None,
        block_hasher=get_request_block_hasher(16, sha256),
        **more,
    )


@pytest.mark.parametrize("hashes_are_numbers", [False, True])
def test_events_say_of_blocks_what_vllm_says_of_its_own(adapter, monkeypatch, hashes_are_numbers):
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", str(int(hashes_are_numbers)))
    adapter.config.kv_events_config = bag(enable_kv_cache_events=True)
    side, _ = adapter("SCHEDULER")
    pool = BlockPool(8, enable_caching=True, hash_block_size=16, enable_kv_cache_events=True)
    request = hashed_request(96, cache_salt="a tenant")
    blocks = pool.get_new_blocks(6)
    for first, end in ((0, 2), (2, 6)):
        pool.cache_full_blocks(request, blocks, first, end, 16, 0)
    theirs = pool.take_events()
    ours = []
    for per_chunk, chunk in ((2, 0), (2, 1), (2, 2)):
        made = BlockEvents(16, per_chunk, enabled=True)
        (kept,) = made.describe(request, {b"key": (0, chunk)}, "weights").values()
        ours.append(KVEvent(kept.blocks, Medium.CPU, removed=False))
    Scripted.answers["events"] = ours
    stored = side.take_events()
    assert side.take_events() == []
    for event in theirs:
        event.medium, event.kv_cache_spec_kind = "CPU", "full_attention"
    first, rest = theirs
    assert stored[0] == first
    # The other four blocks are two chunks of ours.
    assert [each.parent_block_hash for each in stored[1:]] == [
        rest.parent_block_hash,
        rest.block_hashes[1],
    ]
    for name in ("block_hashes", "token_ids", "extra_keys"):
        told = [value for each in stored[1:] for value in getattr(each, name)]
        assert told == getattr(rest, name)
    # Removed are all at once; an event of another class is no event of vLLM's blocks.
    removed = [KVEvent(each.blocks, each.medium, removed=True) for each in ours]
    Scripted.answers["events"] = [removed[0], object(), *removed[1:]]
    hashes = [*first.block_hashes, *rest.block_hashes]
    assert side.take_events() == [BlockRemoved(block_hashes=hashes, medium="CPU", group_idx=0)]


def test_hash_of_vllm_before_a_picture_does_not_know_it_and_no_event_tells_it():
    requests = [
        hashed_request(
            48,
            mm_features=[MultiModalFeatureSpec(None, "image", name, PlaceholderRange(20, 4))],
        )
        for name in ("one", "two")
    ]
    one, two = (each.block_hashes for each in requests)
    assert one[0] == two[0]
    assert one[1] != two[1]
    made = BlockEvents(16, 1, enabled=True)
    places = {b"key %d" % number: (0, number) for number in range(3)}
    assert [made.describe(each, places, "weights") for each in requests] == [{}, {}]


def test_kinds_of_groups_are_asked_for_where_events_are_enabled(adapter, monkeypatch):
    asked = []
    kind = bag(value="full_attention")
    monkeypatch.setattr(
        "vllm.v1.kv_cache_interface.get_kv_cache_spec_kind", lambda spec: asked.append(spec) or kind
    )
    adapter("SCHEDULER")
    assert asked == []
    adapter.config.kv_events_config = bag(enable_kv_cache_events=True)
    adapter("SCHEDULER")
    assert len(asked) == 1


def test_events_are_enabled_in_a_connector_where_they_are_in_vllm(adapter):
    adapter.config.kv_events_config = bag(enable_kv_cache_events=True)
    _, inner = adapter("SCHEDULER")
    assert inner.config.kv_events_config.enable_kv_cache_events


def test_class_level_answers_of_the_adapter(adapter):
    side, _ = adapter("SCHEDULER")
    cls = type(side)
    assert (cls.__name__, cls.__module__) == ("scripted", "wtransfer_vllm.connector")
    assert cls.requires_piecewise_for_cudagraph({}) is True
    assert cls.get_required_kvcache_layout(side._vllm_config) is None
    assert side.requires_kv_delivery is False
    assert side.supports_divergent_local_hybrid_hits is False


LEFT = {
    "bind_kv_cache_manager": "for connectors that look into vLLM's block pool",
    "finish_forward": "loads of a step end before it does",
    "get_external_cache_hit_sources": "vLLM counts them as external",
    "get_kv_connector_kv_cache_events": "events are the scheduler's side's to tell",
    "get_loaded_kv_cache_group_ids": "loaded are all groups of a prefix cache, as vLLM takes it",
    "get_mem_pool_context": "the cache lies in vLLM's own memory",
    "has_connector_metadata": "kept by the base class",
    "register_finished_partial_tail": "only whole blocks are kept",
    "reset_capture_state": "nothing is done while graphs are captured",
    "restore_kv_caches": "views of tensors stay valid where their memory is mapped again",
    "role": "kept by the base class",
    "set_host_xfer_buffer_ops": "no buffer of vLLM's is used",
    "supports_divergent_local_hybrid_hits": "a load begins where all groups have their blocks",
    "supports_sleep_mode": "it can: no address is registered anywhere",
    "unregister_kv_caches": "see restore_kv_caches",
}
"""Of vLLM's base class, what the adapter leaves as it is, and why."""


def test_every_method_of_vllms_base_class_is_adapted_or_left_for_a_reason(adapter):
    side, _ = adapter("SCHEDULER")
    adapted = type(side).__mro__[1]
    base = adapted.__mro__[1]
    theirs = {name for name in vars(base) if not name.startswith("_")}
    assert theirs - vars(adapted).keys() <= LEFT.keys()
    assert not LEFT.keys() & vars(adapted).keys()
