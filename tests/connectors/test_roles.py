"""One name, two sides: each role has its methods and refuses the other's."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import pytest

from wtransfer import KVConnectorFactory, KVTransferConfig, ServingConfig
from wtransfer.connectors.interface import (
    SCHEDULER_METHODS,
    WORKER_METHODS,
    ConnectorScheduler,
    ConnectorWorker,
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from wtransfer.errors import ConnectorOptionError, ConnectorRoleError
from wtransfer.registry import hooks
from wtransfer.registry import resolve as registry_module
from wtransfer.registry.hooks import PluginManager as Board
from wtransfer.registry.hooks import hookimpl
from wtransfer.registry.resolve import Host

SCHEDULER, WORKER = KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER
SERVING = ServingConfig(kv_transfer_config=KVTransferConfig(kv_connector="c"))


@dataclass
class Metadata(KVConnectorMetadata):
    blocks: list[int]


@dataclass
class Loaded(KVConnectorWorkerMetadata):
    blocks: set[int]

    def aggregate(self, other):
        return Loaded(self.blocks & other.blocks)


class Scheduler(ConnectorScheduler):
    def __init__(self, config, kv_cache_config=None):
        super().__init__(config, kv_cache_config)
        self.ended = 0

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 16 - num_computed_tokens, True

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self.blocks = blocks

    def build_connector_meta(self, scheduler_output):
        return Metadata(self.blocks)

    def shutdown(self):
        self.ended += 1


class Worker(ConnectorWorker):
    def start_load_kv(self, forward_context, **kwargs):
        self.loaded = self.metadata.blocks

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        self.saved = (layer_name, kwargs)

    def wait_for_save(self):
        pass

    def build_connector_worker_meta(self):
        return Loaded(set(self.loaded))


class Split(KVConnectorBase_V1):
    scheduler_cls = Scheduler
    worker_cls = Worker


class Joined(KVConnectorBase_V1):
    """Both sides in one class, as in the seed; of the optional methods it has one."""

    get_num_new_matched_tokens = Scheduler.get_num_new_matched_tokens
    update_state_after_alloc = Scheduler.update_state_after_alloc
    build_connector_meta = Scheduler.build_connector_meta
    start_load_kv = Worker.start_load_kv
    wait_for_layer_load = Worker.wait_for_layer_load
    save_kv_layer = Worker.save_kv_layer
    wait_for_save = Worker.wait_for_save

    def request_finished(self, request, block_ids):
        return super().request_finished(request, block_ids)


class Narrower(Joined):
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        found, later = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return min(found, 4), later


@pytest.fixture(params=[Split, Joined], ids=["split", "joined"])
def cls(request):
    return request.param


def test_a_step_goes_from_one_side_to_the_other(cls):
    scheduler, worker = cls(SERVING, SCHEDULER), cls(SERVING, WORKER)
    assert scheduler.get_num_new_matched_tokens("request", 6) == (10, True)
    scheduler.update_state_after_alloc("request", [4, 5], 10)
    told = scheduler.build_connector_meta("step")
    assert not worker.has_connector_metadata()
    worker.bind_connector_metadata(told)
    assert worker.has_connector_metadata()
    worker.start_load_kv("forward")
    worker.save_kv_layer("layer.0", None, None, extra=1)
    side = worker.side or worker
    assert (side.loaded, side.saved) == ([4, 5], ("layer.0", {"extra": 1}))
    worker.clear_connector_metadata()
    assert not worker.has_connector_metadata()


@pytest.mark.parametrize(
    ("role", "names"),
    [(SCHEDULER, WORKER_METHODS), (WORKER, SCHEDULER_METHODS)],
    ids=["scheduler", "worker"],
)
def test_every_method_of_the_other_side_raises(cls, role, names):
    made = cls(SERVING, role)
    other = "worker" if role is SCHEDULER else "scheduler"
    for name in names:
        with pytest.raises(ConnectorRoleError) as caught:
            getattr(made, name)()
        text = f"{cls.__name__}.{name} is for the {other}'s side, and this object was made for"
        assert str(caught.value).startswith(text)


def test_optional_methods_do_nothing_by_default(cls):
    scheduler, worker = cls(SERVING, SCHEDULER), cls(SERVING, WORKER)
    assert scheduler.request_finished("request", [1]) == (False, None)
    assert (scheduler.get_finished_count(), scheduler.reset_cache()) == (None, None)
    assert list(scheduler.take_events()) == []
    assert worker.get_finished(set()) == (None, None)
    assert worker.get_block_ids_with_load_errors() == set()
    scheduler.shutdown()
    worker.shutdown()


def test_only_the_side_of_the_role_is_made():
    class NoWorkerHere(KVConnectorBase_V1):
        scheduler_cls = Scheduler
        worker_cls = "no_such_module:Worker"

    assert isinstance(NoWorkerHere(SERVING, SCHEDULER).side, Scheduler)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        NoWorkerHere(SERVING, WORKER)


def test_the_shutdown_of_a_side_is_that_of_its_connector():
    made = Split(SERVING, SCHEDULER)
    made.shutdown()
    assert made.side.ended == 1


def test_both_sides_get_the_configuration():
    cache = object()
    for role in (SCHEDULER, WORKER):
        made = Split(SERVING, role, cache)
        assert (made.side.config, made.side.kv_cache_config) == (SERVING, cache)
        assert (made.config, made.kv_cache_config, made.role) == (SERVING, cache, role)


def test_a_method_of_ones_own_goes_before_the_side():
    class Counting(Split):
        def get_num_new_matched_tokens(self, request, num_computed_tokens):
            return self.side.get_num_new_matched_tokens(request, num_computed_tokens)[0] + 1, False

    assert Counting(SERVING, SCHEDULER).get_num_new_matched_tokens("r", 0) == (17, False)
    with pytest.raises(ConnectorRoleError):
        Counting(SERVING, WORKER).get_num_new_matched_tokens("r", 0)


def test_a_subclass_reaches_what_it_narrows():
    assert Narrower(SERVING, SCHEDULER).get_num_new_matched_tokens("r", 0) == (4, True)
    with pytest.raises(ConnectorRoleError, match=r"Narrower\.get_num"):
        Narrower(SERVING, WORKER).get_num_new_matched_tokens("r", 0)


def test_one_side_alone_is_refused():
    with pytest.raises(TypeError, match="Half names one side only; name both scheduler_cls and"):

        class Half(KVConnectorBase_V1):
            scheduler_cls = Scheduler


class SchedulerHalf(KVConnectorBase_V1):
    get_num_new_matched_tokens = Scheduler.get_num_new_matched_tokens
    update_state_after_alloc = Scheduler.update_state_after_alloc
    build_connector_meta = Scheduler.build_connector_meta


class WorkerHalf(KVConnectorBase_V1):
    start_load_kv = Worker.start_load_kv
    wait_for_layer_load = Worker.wait_for_layer_load
    save_kv_layer = Worker.save_kv_layer
    wait_for_save = Worker.wait_for_save


class Counting(KVConnectorBase_V1):
    def get_finished(self, finished_req_ids):
        return finished_req_ids, None


class Plain:
    """No connector: a class that others are mixed with."""

    def get_block_ids_with_load_errors(self):
        return {7}


def test_classes_may_be_mixed():
    class Mixed(SchedulerHalf, WorkerHalf, Counting):
        pass

    class WithPlain(Plain, Mixed):
        pass

    assert Mixed(SERVING, WORKER).get_finished({"r"}) == ({"r"}, None)
    assert Mixed(SERVING, SCHEDULER).get_num_new_matched_tokens("r", 0) == (16, True)
    assert WithPlain(SERVING, WORKER).get_block_ids_with_load_errors() == {7}
    for cls, name in ((Mixed, "get_finished"), (WithPlain, "get_block_ids_with_load_errors")):
        with pytest.raises(ConnectorRoleError, match=name):
            getattr(cls(SERVING, SCHEDULER), name)()


def test_a_delegating_connector_has_the_metadata_of_its_side():
    worker = Split(SERVING, WORKER)
    worker.bind_connector_metadata(Metadata([3]))
    assert worker.metadata.blocks == worker._get_connector_metadata().blocks == [3]


def test_hooks_of_a_side_are_heard(monkeypatch):
    heard = []

    class Listening(Scheduler):
        @hookimpl
        def wtransfer_weights_committed(self, version):
            heard.append(version)

    class Outer(KVConnectorBase_V1):
        scheduler_cls = Listening
        worker_cls = Worker

    board = Board()
    monkeypatch.setattr(hooks, "board", board)
    monkeypatch.setattr(registry_module, "host", Host({}, board=board))
    registry_module.registry("connectors").register("listening", Outer)
    serving = ServingConfig(kv_transfer_config=KVTransferConfig(kv_connector="listening"))
    made = KVConnectorFactory.create_connector_v1(serving, SCHEDULER)
    facts = {"fingerprint": "f", "round_id": "r", "worker": "w"}
    board.notify("wtransfer_weights_committed", version="v1", **facts)
    made.shutdown()
    board.notify("wtransfer_weights_committed", version="v2", **facts)
    assert heard == ["v1"]


def test_without_a_transfer_config_nothing_is_made():
    with pytest.raises(ValueError, match="Split needs kv_transfer_config"):
        Split(ServingConfig(), WORKER)


def test_role_of_another_engine_is_refused_with_the_argument_to_write(cls):
    foreign = enum.Enum("KVConnectorRole", "SCHEDULER WORKER", module="engine")
    for role in (foreign.SCHEDULER, foreign.WORKER):
        with pytest.raises(ConnectorOptionError, match='"kv_connector_module_path"') as caught:
            cls(SERVING, role)
        assert f"{cls.__name__} was made with a role of engine" in str(caught.value)


def test_metadata_is_there_within_a_step_only(cls):
    worker = cls(SERVING, WORKER)
    side = worker.side or worker
    with pytest.raises(ConnectorRoleError, match="has no metadata outside a step"):
        _ = side.metadata


def test_output_that_says_nothing_is_empty():
    assert KVConnectorOutput().is_empty()
    assert not KVConnectorOutput(invalid_block_ids={1}).is_empty()
