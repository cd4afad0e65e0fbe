"""Updates of trainers that call the worker themselves, with the calls that vLLM's client makes."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

pytest.importorskip("uvicorn")

import requests

from wtransfer.engines.factory import WeightTransferEngineFactory
from wtransfer.engines.interface import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from wtransfer.errors import (
    ClosedError,
    CommitError,
    EngineError,
    IncompleteUpdateError,
    ManifestError,
    NotInitializedError,
    ProtocolError,
    RoundAbortedError,
    RoundBusyError,
    SchemaError,
    StallError,
    UnknownBackendError,
)
from wtransfer.testing.contents import contents
from wtransfer.weight_sync.http.clients import HttpClient
from wtransfer.weight_sync.http.unsealed.updates import UnsealedUpdates
from wtransfer.weight_sync.http.worker_server import WorkerServer
from wtransfer.weight_sync.trainer.publisher import Publisher
from wtransfer.weight_sync.worker.session import WorkerSession
from wtransfer.weight_sync.worker.target import StateDictTarget

TOKEN = "the-secret"
ENGINE = "tests-lists"
NEW = {"a": [1.0, 2.0, 3.0], "b": [[4.0], [5.0]]}


@dataclass
class ListInitInfo(WeightTransferInitInfo):
    """Nothing is needed, and one thing can go wrong."""

    refuse: str = ""


@dataclass
class ListUpdateInfo(WeightTransferUpdateInfo):
    """Tensors as JSON has them."""

    tensors: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    trouble: str = ""


class ListEngine(WeightTransferEngine[ListInitInfo, ListUpdateInfo]):
    """Receives tensors in the control messages themselves, through one buffer."""

    init_info_cls = ListInitInfo
    update_info_cls = ListUpdateInfo
    released = threading.Event()

    def init_transfer_engine(self, init_info):
        if init_info.refuse == "hang":
            self.released.wait(20)
        elif init_info.refuse:
            raise RuntimeError(init_info.refuse)

    def receive_weights(self, update_info, load_weights):
        if update_info.trouble == "hang":
            self.released.wait(20)
        elif update_info.trouble:
            raise RuntimeError(update_info.trouble)
        dtypes = {"float32": torch.float32, "float64": torch.float64}
        for name, values in update_info.tensors.items():
            tensor = torch.tensor(values, dtype=dtypes[update_info.dtype])
            load_weights([(name, tensor)])
            tensor.fill_(-1)

    def shutdown(self):
        pass


@pytest.fixture(scope="session", autouse=True)
def list_engine():
    WeightTransferEngineFactory.register_engine(ENGINE, ListEngine)


@pytest.fixture(autouse=True)
def release():
    ListEngine.released.clear()
    yield
    ListEngine.released.set()


def model():
    return {"a": torch.zeros(3), "b": torch.zeros(2, 1)}


class Worker:
    """A served session that takes unsealed updates, and the thread that owns its model."""

    def __init__(self, tensors=None, *, target=None, deadline_s=5.0, steps=True, **options):
        self.tensors = model() if tensors is None else tensors
        self.session = WorkerSession(
            target or self.tensors, name="w0", token=TOKEN, commit="copy", **options
        )
        self.server = WorkerServer(
            self.session, token=TOKEN, accept_unsealed=ENGINE, deadline_s=deadline_s
        )
        self.client = HttpClient(self.server.url, TOKEN, timeout_s=20)
        self.errors = []
        self._stopping = threading.Event()
        self._model = threading.Thread(target=self._step, name="model")
        if steps:
            self._model.start()

    def _step(self):
        while not self._stopping.is_set():
            self.commit(0.01)

    def commit(self, timeout_s):
        try:
            return self.session.commit_pending(timeout_s)
        except CommitError as error:
            self.errors.append(str(error))

    def update(self, **update_info):
        self.client.update_weights(update_info)

    def begin(self):
        self.client.init_weight_transfer_engine({})
        self.client.start_weight_update()

    def round(self, tensors, version=None, **update_info):
        self.begin()
        self.update(tensors=tensors, **update_info)
        self.client.finish_weight_update(version)

    @property
    def info(self):
        return self.client.weight_info()

    @property
    def lists(self):
        return {name: tensor.tolist() for name, tensor in self.tensors.items()}

    def close(self):
        self._stopping.set()
        if self._model.ident is not None:
            self._model.join()
        self.server.close()
        self.session.close()


@pytest.fixture
def start(leaves_nothing, release):
    workers = []

    def make(*arguments, **options):
        workers.append(Worker(*arguments, **options))
        return workers[-1]

    yield make
    ListEngine.released.set()
    for each in workers:
        each.close()


@pytest.fixture
def worker(start):
    return start()


class VllmCalls:
    """What vLLM's own HTTP client does, call for call."""

    def __init__(self, base_url):
        self.base_url = base_url

    def post(self, path, json=None):
        response = requests.post(f"{self.base_url}/{path}", json=json, timeout=300)
        response.raise_for_status()

    def round(self, update_info, version):
        self.post("init_weight_transfer_engine", {"init_info": {}})
        self.post("start_weight_update")
        self.post("update_weights", {"update_info": update_info})
        self.post("finish_weight_update", None if version is None else {"weight_version": version})


@pytest.fixture
def vllm(worker):
    return VllmCalls(worker.server.url.replace("//", f"//wtransfer:{TOKEN}@"))


# -- the way it goes


def test_vllms_own_calls_bring_new_weights(worker, vllm):
    vllm.round({"tensors": NEW}, "step-1")
    info = worker.info
    assert worker.lists == NEW
    assert (info["weight_version"], info["verified"]) == ("step-1", "coverage")
    vllm.post("shutdown_weight_transfer_engine")


def test_one_entry_per_rank_is_taken_too(worker, vllm):
    vllm.round([{"tensors": NEW}], "step-1")
    assert worker.lists == NEW


def test_an_entry_for_no_rank_is_refused(worker):
    worker.begin()
    with pytest.raises(ProtocolError, match="0 entries, none of them for rank 0"):
        worker.client.update_weights([])


def test_without_a_label_the_fingerprint_gives_one(worker, vllm):
    vllm.round({"tensors": NEW}, None)
    assert worker.info["weight_version"] == f"unsealed-{worker.info['fingerprint'][:12]}"


def test_tensors_may_come_in_several_calls(worker):
    worker.begin()
    for name, values in NEW.items():
        worker.update(tensors={name: values})
    worker.client.finish_weight_update("step-1")
    assert worker.lists == NEW


def test_the_old_weights_serve_until_the_commit(worker):
    worker.begin()
    worker.update(tensors=NEW)
    assert (worker.lists, worker.info["state"]) == (
        {name: tensor.tolist() for name, tensor in model().items()},
        "fresh",
    )


def test_the_same_bytes_have_the_same_identity_whoever_brings_them(worker):
    worker.round(NEW)
    unsealed = worker.info["fingerprint"]
    tensors = {name: torch.tensor(values) for name, values in NEW.items()}
    with Publisher(tensors, hosts=[worker.server.url], host_token=TOKEN) as publisher:
        publisher.publish("v2")
    info = worker.info
    assert (info["fingerprint"], info["verified"]) == (unsealed, "digests")


def test_after_an_update_the_way_back_is_let_go_of(worker):
    worker.round(NEW)
    assert worker.session.ledger.released
    assert worker.session.ledger._previous is None


def test_a_worker_that_keeps_no_way_back_knows_all_the_same_how_it_was_proven(start):
    worker = start(keep_previous=False)
    worker.round(NEW)
    assert worker.session.ledger.held.tensors is None
    assert worker.info["verified"] == "coverage"


# -- what does not fit is not applied


def refused(worker, cls, text, tensors, **update_info):
    before, fingerprint = contents(worker.tensors), worker.info["fingerprint"]
    with pytest.raises(cls, match=text) as caught:
        worker.round(tensors, "bad", **update_info)
    assert (before, fingerprint) == (contents(worker.tensors), worker.info["fingerprint"])
    worker.round(NEW, "good")
    assert (worker.lists, worker.info["weight_version"]) == (NEW, "good")
    return caught.value


def test_a_missing_tensor_is_named(worker):
    error = refused(worker, IncompleteUpdateError, r"1 of 2 .* never arrived: 'b'", {"a": NEW["a"]})
    assert error.missing == ["b"]


def test_an_update_of_nothing_is_not_whole(worker):
    refused(worker, IncompleteUpdateError, "2 of 2 pieces never arrived: 'a', 'b'", {})


def test_another_shape_is_refused(worker):
    refused(worker, SchemaError, r"'a' as float32 \[2\]", {**NEW, "a": [1.0, 2.0]})


def test_another_dtype_is_refused(worker):
    refused(worker, SchemaError, "'a' as float64", NEW, dtype="float64")


def test_another_dtype_is_cast_where_the_session_says_so(start):
    worker = start(cast=True)
    worker.round(NEW, dtype="float64")
    assert (worker.lists, worker.tensors["a"].dtype) == (NEW, torch.float32)


def test_an_unknown_name_is_refused(worker):
    refused(worker, ManifestError, "delivered 'c'", {**NEW, "c": [1.0]})


def test_a_tensor_that_comes_twice_is_refused(worker):
    worker.begin()
    worker.update(tensors=NEW)
    with pytest.raises(ManifestError, match="'a' twice"):
        worker.update(tensors={"a": NEW["a"]})
    with pytest.raises(RoundAbortedError, match=r"this update is over.*'a' twice"):
        worker.client.finish_weight_update()


def test_an_engine_that_raises_ends_the_update_with_its_text(worker):
    refused(worker, EngineError, "the cable is out", NEW, trouble="the cable is out")


def test_an_engine_that_cannot_be_initialised_says_so(worker):
    with pytest.raises(EngineError, match="no such group"):
        worker.client.init_weight_transfer_engine({"refuse": "no such group"})
    worker.round(NEW)
    assert worker.lists == NEW


def test_unknown_options_of_the_engine_are_refused(worker):
    with pytest.raises(EngineError, match="Invalid init_info for ListEngine"):
        worker.client.init_weight_transfer_engine({"pickle": "gASV"})


def tied():
    tensor = torch.zeros(3)
    return {"embed": tensor, "head": tensor}


@pytest.mark.parametrize("names", [["embed"], ["head"], ["embed", "head"], ["head", "embed"]])
def test_tied_weights_are_covered_by_any_of_their_names(start, names):
    worker = start(tied())
    worker.round({name: [1.0, 2, 3] for name in names})
    assert worker.lists == {"embed": [1, 2, 3], "head": [1, 2, 3]}


def test_tied_weights_that_differ_are_refused(start):
    worker = start(tied())
    with pytest.raises(SchemaError, match=r"'embed' and 'head' are one tensor.*different bytes"):
        worker.round({"embed": [1.0, 2, 3], "head": [1.0, 2, 4]})
    assert worker.lists == {"embed": [0, 0, 0], "head": [0, 0, 0]}


def test_a_model_that_cannot_apply_is_restored_and_the_caller_hears_of_it(start):
    class Shaky(StateDictTarget):
        fails = True

        def apply(self, tensors):
            super().apply({"a": tensors["a"]})
            if self.fails:
                self.fails = False
                raise RuntimeError("the allocator is confused")
            super().apply(tensors)

    tensors = model()
    worker = start(tensors, target=Shaky(tensors, "copy"))
    with pytest.raises(CommitError, match="the allocator is confused") as caught:
        worker.round(NEW, "bad")
    assert caught.value.restored
    assert contents(model()) == contents(worker.tensors)
    worker.round(NEW, "good")
    assert (worker.lists, len(worker.errors)) == (NEW, 1)


# -- one at a time


def test_the_steps_need_their_order(worker):
    for call in (worker.client.start_weight_update, worker.update):
        with pytest.raises(NotInitializedError):
            call()
    worker.client.init_weight_transfer_engine({})
    for call in (worker.update, worker.client.finish_weight_update):
        with pytest.raises(NotInitializedError, match="POST /start_weight_update first"):
            call()


def test_a_second_update_is_refused_with_holder_and_age(worker):
    worker.begin()
    with pytest.raises(RoundBusyError, match=r"of client 127\.0\.0\.1:\d+, \d\.\d s old"):
        worker.client.start_weight_update()
    worker.update(tensors=NEW)
    worker.client.finish_weight_update()
    assert worker.lists == NEW


@pytest.mark.slow
def test_a_client_that_is_silent_for_the_deadline_has_lost_its_update(start):
    worker = start(deadline_s=1.0)
    worker.begin()
    with pytest.raises(RoundBusyError):
        worker.client.start_weight_update()
    end = time.monotonic() + 5
    while worker.session.ledger.busy:
        assert time.monotonic() < end
        time.sleep(0.005)
    with pytest.raises(RoundAbortedError, match=r"client .* was silent for 1 s"):
        worker.update(tensors=NEW)
    worker.round(NEW)
    assert worker.lists == NEW


def test_a_shutdown_frees_the_worker(worker):
    worker.begin()
    worker.client.shutdown_weight_transfer_engine()
    worker.round(NEW)
    assert worker.lists == NEW


def test_a_new_init_frees_the_worker(worker):
    worker.begin()
    worker.round(NEW)
    assert worker.lists == NEW


@pytest.mark.slow
def test_an_engine_that_hangs_costs_its_deadline_and_not_the_worker(start):
    worker = start(deadline_s=1.0)
    worker.begin()
    begin = time.monotonic()
    with pytest.raises(StallError, match="receive_weights of engine"):
        worker.update(tensors=NEW, trouble="hang")
    assert time.monotonic() - begin < 3
    worker.round(NEW)
    assert worker.lists == NEW


@pytest.mark.slow
def test_an_engine_that_hangs_in_its_init_is_given_up(start):
    worker = start(deadline_s=0.5)
    with pytest.raises(StallError, match="init_transfer_engine of engine"):
        worker.client.init_weight_transfer_engine({"refuse": "hang"})
    worker.client.init_weight_transfer_engine({})


def test_a_shutdown_ends_an_update_whose_engine_hangs(start):
    worker = start()
    worker.begin()
    failed = []

    def hang():
        try:
            worker.update(tensors=NEW, trouble="hang")
        except RoundAbortedError as error:
            failed.append(str(error))

    hanging = threading.Thread(target=hang)
    hanging.start()
    time.sleep(0.1)
    worker.client.shutdown_weight_transfer_engine()
    hanging.join(2)
    assert len(failed) == 1
    assert "the engine was shut down" in failed[0]
    assert contents(model()) == contents(worker.tensors)


def test_an_update_and_a_round_do_not_meet(worker):
    tensors = {name: torch.tensor(values) for name, values in NEW.items()}
    with Publisher(tensors, hosts=[worker.server.url], host_token=TOKEN) as publisher:
        worker.begin()
        with pytest.raises(RoundBusyError, match=r"'unsealed'\) of client"):
            publisher.publish("v1")
        worker.client.shutdown_weight_transfer_engine()
        publisher.invite()
        publisher.wait_for_workers(1, timeout_s=5)
        publisher.publish("v2")
    assert worker.info["weight_version"] == "v2"


def test_during_a_round_no_update_begins(worker):
    worker.client.init_weight_transfer_engine({})
    worker.session.ledger.claim(type("Round", (), {"address": "unix:@p"})(), "r1", "v1")
    with pytest.raises(RoundBusyError, match=r"round r1 \('v1'\) of unix:@p"):
        worker.client.start_weight_update()
    worker.session.ledger.free("r1")
    worker.round(NEW)


# -- the model's thread


def test_what_nobody_applies_is_pending_and_still_can_be(start):
    worker = start(steps=False, deadline_s=1.5)
    with pytest.raises(StallError, match="nobody called commit_pending"):
        worker.round(NEW, "late")
    assert worker.info["state"] == "pending"
    with pytest.raises(RoundBusyError, match="commit pending since"):
        worker.begin()
    assert worker.commit(0.0)
    assert (worker.lists, worker.info["verified"]) == (NEW, "coverage")


def test_what_the_owner_discards_is_not_committed(start):
    worker = start(steps=False)
    failed = []

    def finish():
        try:
            worker.round(NEW, "late")
        except RoundAbortedError as error:
            failed.append(str(error))

    finishing = threading.Thread(target=finish)
    finishing.start()
    while not worker.session.discard_pending():
        time.sleep(0.005)
    finishing.join(5)
    assert len(failed) == 1
    assert "discarded by the worker's owner" in failed[0]


def test_a_session_that_closes_ends_the_wait(leaves_nothing):
    with WorkerSession(model(), token=TOKEN) as session:
        updates = UnsealedUpdates(session, ENGINE, 5.0)
        updates.init({})
        updates.start("a test")
        updates.update({"tensors": NEW})
        threading.Timer(0.1, session.close).start()
        with pytest.raises(ClosedError):
            updates.finish("v1")
        updates.shutdown()


# -- who may


def test_a_worker_that_was_not_started_for_it_refuses_and_says_what_to_do(leaves_nothing):
    with (
        WorkerSession(model(), token=TOKEN) as session,
        WorkerServer(session, token=TOKEN) as server,
    ):
        client = HttpClient(server.url, TOKEN)
        calls = [
            lambda: client.init_weight_transfer_engine({"master_address": "10.0.0.1"}),
            client.start_weight_update,
            lambda: client.update_weights({}),
            client.finish_weight_update,
        ]
        for call in calls:
            with pytest.raises(NotInitializedError, match="--accept-unsealed ENGINE"):
                call()
        client.shutdown_weight_transfer_engine()


def test_ranks_of_one_instance_are_not_updated_apart():
    with (
        WorkerSession(model(), token=TOKEN, instance="i", num_ranks=2) as session,
        pytest.raises(ValueError, match="all or none"),
    ):
        UnsealedUpdates(session, ENGINE)


def test_an_engine_that_nobody_has_is_refused():
    with (
        WorkerSession(model(), token=TOKEN) as session,
        pytest.raises(UnknownBackendError),
    ):
        UnsealedUpdates(session, "nowhere")
