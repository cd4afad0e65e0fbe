"""Our clients of vLLM's engines, and vLLM's own client of our worker behind HTTP."""

import asyncio
import pickle
import threading
from types import SimpleNamespace

import pytest
import torch
import wtransfer
from wtransfer.errors import StallError

from wtransfer_vllm.clients import AsyncLLMClient, LLMClient
from wtransfer_vllm.ray_client import RayClient

pytestmark = pytest.mark.live


class Engine:
    """An engine of the seed era: it has one call for updates."""

    def __init__(self):
        self.calls = []

    def init_weight_transfer_engine(self, request):
        self.calls.append(("init", request.init_info))

    def update_weights(self, request):
        self.calls.append(("update", request.update_info))


class CurrentEngine(Engine):
    def start_weight_update(self):
        self.calls.append(("start", None))

    def finish_weight_update(self, weight_version):
        self.calls.append(("finish", weight_version))


def invite_and_commit(client):
    client.init_weight_transfer_engine({"wtransfer": {"address": "unix:@x"}})
    client.start_weight_update()
    client.update_weights({})
    client.finish_weight_update("v")
    client.leave("unix:@x", timeout_s=5)


INVITED = ("init", {"wtransfer": {"address": "unix:@x"}})
LEFT = ("init", {"wtransfer": {"address": "unix:@x", "leave": True}})
CALLS = [
    (CurrentEngine, [INVITED, ("start", None), ("finish", "v"), LEFT]),
    (Engine, [INVITED, ("update", {}), LEFT]),
]


@pytest.mark.parametrize(("engine_class", "calls"), CALLS)
def test_client_commits_by_the_calls_that_the_engine_has(engine_class, calls):
    engine = engine_class()
    invite_and_commit(LLMClient(engine))
    assert engine.calls == calls


def test_engines_have_a_name_that_people_can_tell_and_the_same_in_each_client():
    first, second = Engine(), Engine()
    names = [LLMClient(each).name for each in (first, second, first)]
    assert names[0] == names[2] != names[1]
    names.append(AsyncLLMClient(Engine(), None).name)
    numbers = [int(name.removeprefix("Async").removeprefix("LLM ")) for name in names]
    assert numbers[1:] == [numbers[0] + 1, numbers[0], numbers[0] + 2]
    assert LLMClient(first, name="judge").name == "judge"
    assert AsyncLLMClient(second, None, name="policy").name == "policy"


def test_async_engine_is_called_in_its_loop():
    threads = set()

    class AsyncEngine(CurrentEngine):
        def __getattribute__(self, name):
            found = super().__getattribute__(name)
            if not callable(found):
                return found

            async def call(*arguments):
                threads.add(threading.get_ident())
                return found(*arguments)

            return call

    async def serve():
        await asyncio.to_thread(
            invite_and_commit, AsyncLLMClient(engine, asyncio.get_running_loop())
        )

    engine = AsyncEngine()
    asyncio.run(serve())
    assert engine.calls == CALLS[0][1]
    assert threads == {threading.get_ident()}


def test_async_engine_that_does_not_answer_is_named_as_one_that_stalls():
    class Silent(CurrentEngine):
        async def start_weight_update(self):
            await asyncio.sleep(60)

    async def serve():
        client = AsyncLLMClient(Silent(), asyncio.get_running_loop(), timeout_s=0.05)
        with pytest.raises(StallError, match=r"did not answer start_weight_update within 0\.05 s"):
            await asyncio.to_thread(client.start_weight_update)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    asyncio.run(serve())


def test_request_for_an_actor_unpickles_as_vllms(monkeypatch):
    from vllm.distributed.weight_transfer import base

    sent = []
    monkeypatch.setattr(RayClient, "call", lambda _, method, *more, **__: sent.extend(more))
    client = RayClient(Engine(), name="actor")
    client.init_weight_transfer_engine({"wtransfer": {"address": "unix:@x", "token": "secret"}})
    client.finish_weight_update()
    assert "secret" not in repr(sent)
    init, update = (pickle.loads(pickle.dumps(each)) for each in sent)
    assert isinstance(init, base.WeightTransferInitRequest)
    assert init.init_info == {"wtransfer": {"address": "unix:@x", "token": "secret"}}
    assert isinstance(update, base.WeightTransferUpdateRequest)
    assert update.update_info == {}


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


def test_vllms_client_lets_a_worker_join_a_publisher(client, worker):
    new = {"a": torch.ones(2), "b": torch.ones(3)}
    with wtransfer.Publisher(new, token="t") as publisher:
        client.init_weight_transfer_engine({"wtransfer": {"address": publisher.address}})
        assert publisher.publish("step-1").ok
    assert worker.session.version == "step-1"
    assert {k: v.tolist() for k, v in worker.weights.items()} == {"a": [1, 1], "b": [1, 1, 1]}
    client.shutdown_weight_transfer_engine()
    assert worker.session.status().publisher is None


@pytest.mark.parametrize("call", ["start_weight_update", "finish_weight_update"])
def test_updates_of_vllms_client_are_refused(client, worker, call):
    import requests

    with pytest.raises(requests.HTTPError, match="403"):
        getattr(client, call)()
    assert worker.session.version is None
