"""vLLM's own client, as its trainers use it, against our worker behind HTTP."""

import threading
from types import SimpleNamespace

import pytest
import torch
import wtransfer

pytestmark = pytest.mark.live


@pytest.fixture
def worker():
    """A worker behind HTTP whose model's thread commits updates."""
    weights = {"a": torch.zeros(2), "b": torch.zeros(3)}
    ended = threading.Event()
    with (
        wtransfer.WorkerSession(weights, commit="copy") as session,
        wtransfer.WorkerServer(session, token="t") as server,
    ):

        def serve():
            while not ended.is_set():
                session.commit_pending(0.05)

        thread = threading.Thread(target=serve)
        thread.start()
        # The token is the password: all that vLLM's client can carry.
        url = server.url.replace("://", "://wtransfer:t@")
        yield SimpleNamespace(url=url, weights=weights, session=session)
        ended.set()
        thread.join()


@pytest.fixture
def client(worker):
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

    return HTTPVLLMWeightSyncClient(worker.url, timeout=20)


def test_it_lets_our_worker_join_a_publisher(client, worker):
    new = {"a": torch.ones(2), "b": torch.ones(3)}
    with wtransfer.Publisher(new, token="t") as publisher:
        client.init_weight_transfer_engine({"wtransfer": {"address": publisher.address}})
        assert publisher.publish("step-1").ok
    assert worker.session.version == "step-1"
    assert {k: v.tolist() for k, v in worker.weights.items()} == {"a": [1, 1], "b": [1, 1, 1]}
    client.shutdown_weight_transfer_engine()
    assert worker.session.publisher is None


@pytest.mark.parametrize("call", ["start_weight_update", "finish_weight_update"])
def test_its_updates_are_refused(client, worker, call):
    import requests

    with pytest.raises(requests.HTTPError, match="403"):
        getattr(client, call)()
    assert worker.session.version is None
