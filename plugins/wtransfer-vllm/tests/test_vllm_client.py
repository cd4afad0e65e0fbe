"""vLLM's own client, as its trainers use it, against our worker behind HTTP."""

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
import wtransfer
from wtransfer.engines.interface import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

pytestmark = pytest.mark.live


@dataclass
class InitInfo(WeightTransferInitInfo):
    factor: float


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    values: dict = field(default_factory=dict)


class NumbersEngine(WeightTransferEngine):
    """Takes numbers out of the request itself."""

    init_info_cls, update_info_cls = InitInfo, UpdateInfo

    def init_transfer_engine(self, init_info):
        self.factor = init_info.factor

    def receive_weights(self, update_info, load_weights):
        load_weights((k, torch.tensor(v) * self.factor) for k, v in update_info.values.items())

    def shutdown(self):
        pass


@pytest.fixture(scope="module")
def engine():
    wtransfer.WeightTransferEngineFactory.register_engine("numbers", NumbersEngine)
    return "numbers"


@pytest.fixture
def worker(engine):
    """A worker behind HTTP whose model's thread commits what comes."""
    weights = {"a": torch.zeros(2), "b": torch.zeros(3)}
    ended = threading.Event()
    with (
        wtransfer.WorkerSession(weights) as session,
        wtransfer.WorkerServer(session, token="t", accept_unsealed=engine) as server,
    ):

        def serve():
            while not ended.is_set():
                session.commit_pending(0.05)

        thread = threading.Thread(target=serve)
        thread.start()
        url = server.url.replace("://", "://wtransfer:t@")
        yield SimpleNamespace(url=url, weights=weights, session=session)
        ended.set()
        thread.join()


@pytest.fixture
def client(worker):
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

    return HTTPVLLMWeightSyncClient(worker.url, timeout=20)


def test_it_updates_our_worker(client, worker):
    client.init_weight_transfer_engine({"factor": 2.0})
    client.start_weight_update()
    client.update_weights({"values": {"a": [1.0, 2.0]}})
    client.update_weights({"values": {"b": [3.0, 4.0, 5.0]}})
    client.finish_weight_update("step-1")
    assert worker.session.version == "step-1"
    assert {k: v.tolist() for k, v in worker.weights.items()} == {"a": [2, 4], "b": [6, 8, 10]}
    client.shutdown_weight_transfer_engine()


def test_a_missing_tensor_reaches_it_as_an_error_and_changes_nothing(client, worker):
    import requests

    client.init_weight_transfer_engine({"factor": 2.0})
    client.start_weight_update()
    client.update_weights({"values": {"a": [1.0, 2.0]}})
    with pytest.raises(requests.HTTPError, match="'b'"):
        client.finish_weight_update("step-1")
    assert worker.session.version is None
    assert {k: v.tolist() for k, v in worker.weights.items()} == {"a": [0, 0], "b": [0, 0, 0]}
