"""TRL's own client and iterator; the server is a plain worker of wtransfer."""

import contextlib
import copy
import logging
import math
import re
import secrets
import threading
import time
from contextlib import closing, contextmanager
from types import SimpleNamespace

import peft
import pytest
import torch
import transformers
import trl
import wtransfer
from safetensors.torch import load_file
from tiny_models import of_experts
from trl.experimental.async_distillation import AsyncDistillationTrainer
from trl.experimental.async_grpo import AsyncGRPOTrainer
from trl.experimental.online_dpo import OnlineDPOTrainer
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from wtransfer.errors import (
    AuthenticationError,
    CommitError,
    HostsError,
    SourceError,
    WTransferError,
)
from wtransfer.testing.fleet import committing
from wtransfer.weight_sync.worker.target import StateDictTarget

import wtransfer_trl
from wtransfer_trl.policy_sync import PolicySync

TOKEN = "0123456789abcdef" * 4


class Client(VLLMClient):
    """TRL's client, of a server that has no route but those of weights."""

    def __init__(self, base_url):
        self.config = {"backend": "shm"}
        self.base_url = base_url
        self.communicator = None

    def get_server_info(self):
        return {"weight_transfer_config": self.config}


@pytest.fixture(autouse=True)
def shared_token(restored, monkeypatch):
    monkeypatch.setenv("WTRANSFER_TOKEN", TOKEN)


@contextmanager
def working(target, join=None):
    """A worker which commits whenever it can."""
    with (
        closing(wtransfer.WorkerSession(target, join=join, instance=str(join))) as session,
        committing(session),
    ):
        yield session


@contextmanager
def serving(tensors, listen="tcp:127.0.0.1:0"):
    """A worker behind HTTP."""
    with (
        working(tensors) as session,
        closing(wtransfer.WorkerServer(session, listen=listen)) as server,
    ):
        yield server


class Refusing(StateDictTarget):
    """A model whose own loading may fail."""

    is_refusing = False

    def apply(self, given):
        # The weights before it takes: they are put back.
        if self.is_refusing and not same(dict(given), tensors(1.0)):
            raise RuntimeError("the model says no")
        super().apply(given)


@contextmanager
def connected(server, **arguments):
    wtransfer_trl.install(**arguments)
    client = Client(url_of(server))
    client.init_communicator()
    try:
        yield client
    finally:
        client.close_communicator()
        assert client.communicator is None


def url_of(server):
    return server.address.replace("tcp:", "http://")


def tensors(value):
    return {"a": torch.full((4, 3), value), "b": torch.full((5,), value)}


def push(client, values):
    metadata = [(name, "float32", list(each.shape)) for name, each in values.items()]
    client.update_named_params(metadata, iter(values.items()))
    client.reset_prefix_cache()


def send_whole_set_and_fail(client):
    for name, tensor in tensors(1.0).items():
        client.update_named_param(name, tensor)
    raise RuntimeError("gathering failed")


def logged():
    state = SimpleNamespace(log_history=[{"reward": 1.0}])
    logs = {"reward": 1.0}
    wtransfer_trl.Metrics().on_log(None, state, None, logs=logs)
    assert state.log_history == [logs]
    return {name.removeprefix("wtransfer/"): value for name, value in logs.items()}


def failed(number, state, num_behind):
    """The words in which a failed update is logged."""
    return re.compile(rf"update trl-\w+-{number} failed, {state}, {num_behind} update\(s\) behind:")


def until(condition, timeout_s=20.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def same(first, second):
    return all(torch.equal(first[name], second[name]) for name in first | second)


def test_updates_of_a_stream_commit_and_are_counted():
    served = tensors(0.0)
    with serving(served) as server, connected(server) as client:
        for number in (1, 2, 3):
            push(client, tensors(float(number)))
            assert same(served, tensors(float(number)))
            numbers = logged()
            assert (numbers["version"], numbers["stale_steps"]) == (number, 0)
            assert (numbers["bytes"], numbers["seconds"] > 0) == (17 * 4, True)


def test_client_that_was_closed_leaves_its_server_to_another():
    served = tensors(0.0)
    with serving(served) as server:
        for number in (1, 2):
            with connected(server) as client:
                push(client, tensors(float(number)))
            assert same(served, tensors(float(number)))


def test_tensors_of_a_block_are_one_update_of_what_they_were():
    served = tensors(0.0)
    with serving(served) as server, connected(server) as client:
        with client.weight_update():
            for name, tensor in tensors(1.0).items():
                client.update_named_param(name, tensor)
                tensor.zero_()  # as an adapter that is unmerged within the block
            assert same(served, tensors(0.0))
        assert same(served, tensors(1.0))
        assert logged()["version"] == 1


def test_block_that_raises_publishes_nothing():
    served = tensors(0.0)
    with serving(served) as server, connected(server) as client:
        with pytest.raises(RuntimeError, match="gathering"), client.weight_update():
            send_whole_set_and_fail(client)
        assert same(served, tensors(0.0))
        push(client, tensors(2.0))
        assert same(served, tensors(2.0))


def test_tensor_outside_of_a_block_is_refused():
    within = pytest.raises(RuntimeError, match=r"within `with client.weight_update\(\):`")
    with serving(tensors(0.0)) as server, connected(server) as client, within:
        client.update_named_param("a", torch.ones(4, 3))


def test_unknown_names_raise_and_the_next_update_commits():
    served = tensors(0.0)
    with serving(served) as server, connected(server) as client:
        with pytest.raises(WTransferError, match=r"model\.a"):
            push(client, {f"model.{name}": each for name, each in tensors(1.0).items()})
        assert same(served, tensors(0.0))
        push(client, tensors(2.0))
        assert same(served, tensors(2.0))


def test_failed_updates_are_logged_and_counted_with_keep(caplog):
    served = tensors(0.0)
    with serving(served) as server, connected(server, on_error="keep") as client:
        push(client, tensors(1.0))
        with caplog.at_level(logging.ERROR, "wtransfer_trl"):
            for _ in range(2):
                push(client, {"a": torch.ones(4, 3), "c": torch.ones(5)})
        assert failed(3, "the server keeps its policy", 2).search(caplog.text)
        assert same(served, tensors(1.0))
        assert (logged()["version"], logged()["stale_steps"]) == (1, 2)
        push(client, tensors(4.0))
        assert same(served, tensors(4.0))
        assert (logged()["version"], logged()["stale_steps"]) == (4, 0)
        push(client, {"a": torch.ones(4, 3)})
        assert (logged()["version"], logged()["stale_steps"]) == (4, 1)


@pytest.mark.parametrize("on_error", ["raise", "keep"])
def test_next_update_brings_to_one_set_what_a_commit_has_left_on_two(on_error, caplog):
    served, others = tensors(0.0), tensors(0.0)
    target = Refusing(others)
    listen = f"unix:@{secrets.token_hex(8)}"
    with (
        serving(served) as server,
        connected(server, on_error=on_error, listen=listen) as client,
        working(target, listen),
    ):
        push(client, tensors(1.0))
        # Late, it is brought up to date.
        until(lambda: same(others, tensors(1.0)))
        target.is_refusing = True
        raised = pytest.raises(CommitError, match="the model says no")
        with raised if on_error == "raise" else contextlib.nullcontext():
            push(client, tensors(2.0))
        assert (same(served, tensors(2.0)), same(others, tensors(1.0))) == (True, True)
        # The server that generates holds it, and the other worker does not.
        assert (logged()["version"], logged()["stale_steps"]) == (2, 0)
        told = failed(2, "the server may serve two policies until an update succeeds", 0)
        assert bool(told.search(caplog.text)) == (on_error == "keep")
        target.is_refusing = False
        push(client, tensors(3.0))
        assert (same(served, tensors(3.0)), same(others, tensors(3.0))) == (True, True)
        assert (logged()["version"], logged()["stale_steps"]) == (3, 0)


class Gathered:
    """A stream that notes what was read, and may raise at one of its tensors."""

    def __init__(self, values, fails_at=None):
        self.values, self.fails_at, self.read = values, fails_at, []

    def __iter__(self):
        for name, tensor in self.values.items():
            if name == self.fails_at:
                raise RuntimeError("out of memory")
            self.read.append(name)
            yield name, tensor


def test_update_that_fails_is_told_by_its_cause_also_where_vllm_says_no_more_what_it_holds(caplog):
    def ended():
        raise RuntimeError("the engine has ended")

    served = tensors(0.0)
    with serving(served) as server:
        policy = PolicySync(url_of(server), on_error="keep", return_s=5, held=ended)
        with closing(policy):
            policy.update(None, {"a": torch.ones(4, 3), "c": torch.ones(5)}.items())
    assert failed(1, "the server keeps its policy", 1).search(caplog.text)
    assert "does not say which policy it holds: the engine has ended" in caplog.text
    assert same(served, tensors(0.0))


@pytest.mark.parametrize("refused", [False, True])
def test_stream_that_fails_is_raised_also_with_keep(refused):
    served = tensors(0.0) | ({"more": torch.zeros(1)} if refused else {})
    with serving(served) as server, connected(server, on_error="keep") as client:
        metadata = [(name, "float32", list(each.shape)) for name, each in tensors(1.0).items()]
        with pytest.raises(WTransferError):
            client.update_named_params(metadata, Gathered(tensors(1.0), "b"))


def test_update_whose_metadata_is_wrong_reads_its_stream_all_the_same():
    with serving(tensors(0.0)) as server, connected(server, on_error="keep") as client:
        stream = Gathered(tensors(1.0))
        with pytest.raises(AttributeError, match="float99"):
            client.update_named_params([("a", "float99", [4, 3])], stream)
        assert stream.read == ["a", "b"]


class Large(torch.Tensor):
    """A tensor of which there is room for one."""

    def clone(self):
        raise torch.OutOfMemoryError("no room for a copy")


def send_without_room(client, passed):
    for name, tensor in tensors(1.0).items():
        client.update_named_param(name, tensor.as_subclass(Large))
        passed.append(name)
    rest = Gathered(tensors(1.0))
    client.update_named_params([], rest)
    passed += rest.read


def test_copy_that_fails_is_raised_when_the_block_is_over():
    served, passed = tensors(0.0), []
    with serving(served) as server, connected(server, on_error="keep") as client:
        with pytest.raises(torch.OutOfMemoryError), client.weight_update():
            send_without_room(client, passed)
        assert passed == ["a", "b"] * 2
        assert same(served, tensors(0.0))
        with client.weight_update():
            client.update_named_params([], tensors(2.0).items())
        assert same(served, tensors(2.0))


def test_first_update_that_fails_is_logged_as_version_zero(caplog):
    target = Refusing(tensors(1.0))
    with serving(target) as server, connected(server, on_error="keep") as client:
        target.is_refusing = True
        push(client, tensors(2.0))
        # The only worker has put its weights back.
        assert failed(1, "the server keeps its policy", 1).search(caplog.text)
        assert (logged()["version"], logged()["stale_steps"]) == (0, 1)


def test_server_that_is_away_is_said_to_be(caplog):
    with serving(tensors(0.0)) as server:
        wtransfer_trl.install(return_s=0, on_error="keep")
        client = Client(url_of(server))
        client.init_communicator()
    with closing(client.communicator):
        push(client, tensors(1.0))
    assert failed(1, "the server was not reached", 1).search(caplog.text)


def test_client_that_connects_again_leaves_its_server_first():
    served = tensors(0.0)
    with serving(served) as server, connected(server) as client:
        client.init_communicator()
        push(client, tensors(1.0))
        assert same(served, tensors(1.0))


def test_server_that_was_restarted_is_invited_again():
    with serving(tensors(0.0)) as server:
        listen = server.address
        wtransfer_trl.install(return_s=30)
        client = Client(url_of(server))
        client.init_communicator()
        push(client, tensors(1.0))
    served, came_back = tensors(0.0), threading.Event()

    def restart():
        with serving(served, listen):
            assert came_back.wait(30)

    timer = threading.Timer(1.5, restart)
    timer.start()
    try:
        push(client, tensors(2.0))
        assert same(served, tensors(2.0))
    finally:
        came_back.set()
        timer.join()
        client.close_communicator()


def test_server_that_stays_away_raises_within_its_bound():
    with serving(tensors(0.0)) as server:
        wtransfer_trl.install(return_s=1)
        client = Client(url_of(server))
        client.init_communicator()
    begun = time.monotonic()
    with closing(client.communicator), pytest.raises(HostsError, match="1 of 1 hosts are absent"):
        push(client, tensors(1.0))
    assert time.monotonic() - begun < 30


def test_server_without_an_engine_and_wrong_token_are_named():
    with serving(tensors(0.0)) as server:
        wtransfer_trl.install("file", options={"path": "unused"})
        client = Client(url_of(server))
        client.config = None
        with pytest.raises(WTransferError, match="no weight-transfer engine; start it with --wei"):
            client.init_communicator()
        wtransfer_trl.install(token="f" * 64)
        client.config = {"backend": "shm"}
        with pytest.raises(AuthenticationError, match="token"):
            client.init_communicator()


@pytest.mark.parametrize("version", ["1.15.2", "1.17.0"])
def test_other_trl_and_wrong_argument_are_refused_and_replace_nothing(monkeypatch, version):
    own = VLLMClient.weight_update
    with pytest.raises(ValueError, match="'raise' or 'keep'"):
        wtransfer_trl.install(on_error="ignore")
    with pytest.raises(ValueError, match="'raise' or 'keep'"):
        wtransfer_trl.WeightTransfer("http://127.0.0.1:1", on_error="ignore")
    monkeypatch.setattr(trl, "__version__", version)
    with pytest.raises(ImportError, match=rf"this is TRL {version}: .*trl>=1.16,<1.17"):
        wtransfer_trl.install()
    assert VLLMClient.weight_update is own


def adapted():
    """A tiny model with an adapter that does something, as TRL trains it."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = peft.get_peft_model(
        transformers.LlamaForCausalLM(config), peft.LoraConfig(target_modules=["q_proj", "v_proj"])
    )
    for name, each in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(each)
    return model


def generation_of(model, client, mode="server"):
    """TRL's `VLLMGeneration`, as far as its `sync_weights` reads it."""
    generation = VLLMGeneration.__new__(VLLMGeneration)
    generation.model, generation.vllm_client, generation.mode = model, client, mode
    generation.enable_sleep_mode = False
    generation.llm = SimpleNamespace(update=client.communicator.update)
    generation.accelerator = SimpleNamespace(is_main_process=True)
    generation._dist = SimpleNamespace(gather_params=lambda _: contextlib.nullcontext())
    generation._dist.is_fsdp = False
    generation._weight_metadata = None
    return generation.sync_weights


def colocated_generation_of(model, client):
    """The same, updating as an engine of its process does, by a sync that a server has here."""
    return generation_of(model, client, "colocate")


def online_dpo_of(model, client):
    """TRL's trainer, as far as its update of the weights reads it."""
    trainer = OnlineDPOTrainer.__new__(OnlineDPOTrainer)
    trainer.model, trainer.vllm_client, trainer.vllm_mode = model, client, "server"
    trainer.accelerator = SimpleNamespace(
        is_main_process=True, state=SimpleNamespace(deepspeed_plugin=None)
    )
    trainer.is_fsdp_enabled = False
    return trainer._move_model_to_vllm


def merged_and_unmerged(model, num_passes):
    """Return an equal model after passes of TRL's, and what the last one sends, by name."""
    copied = copy.deepcopy(model)
    for _ in range(num_passes):
        copied.merge_adapter()
        sent = {
            name.removeprefix("base_model.model.").replace(".base_layer", ""): each.clone()
            for name, each in copied.named_parameters()
            if "lora" not in name
        }
        copied.unmerge_adapter()
    return copied, sent


@pytest.mark.parametrize("is_refused", [False, True])
@pytest.mark.parametrize(
    ("update_of", "num_passes"),
    [
        (generation_of, 2),  # one pass for metadata, and one for the tensors
        (colocated_generation_of, 2),
        (online_dpo_of, 1),
    ],
)
def test_adapters_are_unmerged_after_every_update(update_of, num_passes, is_refused):
    model = adapted()
    expected, wanted = merged_and_unmerged(model, num_passes)
    served = {name: torch.zeros_like(each) for name, each in wanted.items()}
    if is_refused:
        served["more"] = torch.zeros(1)
    with serving(served) as server, connected(server) as client:
        if is_refused:
            with pytest.raises(WTransferError):
                update_of(model, client)()
            assert not any(map(torch.any, served.values()))
        else:
            update_of(model, client)()
            assert same(served, wanted)
    assert same(dict(model.named_parameters()), dict(expected.named_parameters()))
    assert not any(getattr(each, "merged", False) for each in model.modules())


def test_trainer_that_sends_tensor_by_tensor_makes_one_update_of_each_step():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    served = {name: torch.zeros_like(each) for name, each in model.named_parameters()}
    with serving(served) as server, connected(server) as client:
        update = online_dpo_of(model, client)
        for number in (1, 2):
            update()
            assert same(served, dict(model.named_parameters()))
            assert logged()["version"] == number
            with torch.no_grad():
                for each in model.parameters():
                    each.add_(1)


def test_rank_without_the_server_gathers_and_sends_nothing():
    model, read = torch.nn.Linear(3, 4), []
    wtransfer_trl.install()
    update = online_dpo_of(model, None)
    trainer = update.__self__
    del trainer.vllm_client
    trainer.accelerator.is_main_process = False
    named_parameters = model.named_parameters

    def noted():
        for name, tensor in named_parameters():
            read.append(name)
            yield name, tensor

    model.named_parameters = noted
    update()
    assert read == ["weight", "bias"]


class Trainer:
    """What TRL's asynchronous trainers do with their ``weight_transfer=``, in their order."""

    def __init__(self, weight_transfer):
        self.weight_transfer = weight_transfer
        weight_transfer.init_weight_transfer()

    def sync(self, values):
        read = []

        def stream():
            for name, tensor in values.items():
                read.append(name)
                yield name, tensor

        self.weight_transfer.pause()
        try:
            self.weight_transfer.send_weights(stream())
        finally:
            assert read == list(values)
        self.weight_transfer.resume()


def test_asynchronous_trainer_publishes_what_its_iterator_yields():
    served = tensors(0.0)
    with serving(served) as server:
        transfer = wtransfer_trl.WeightTransfer(url_of(server), nonfinite="reject")
        with pytest.raises(RuntimeError, match="init_weight_transfer"):
            transfer.send_weights(iter(()))
        trainer = Trainer(transfer)
        try:
            trainer.sync(tensors(1.0))
            assert same(served, tensors(1.0))
            with pytest.raises(WTransferError, match="NaN"):
                trainer.sync(tensors(math.nan))
            assert same(served, tensors(1.0))
            assert (logged()["version"], logged()["stale_steps"]) == (1, 1)
            trainer.sync(tensors(3.0))
            assert same(served, tensors(3.0))
        finally:
            transfer.destroy()
            transfer.destroy()
        with connected(server) as client:
            push(client, tensors(4.0))
        assert same(served, tensors(4.0))


def test_asynchronous_trainer_goes_on_with_keep(caplog):
    served = tensors(0.0)
    with serving(served) as server:
        transfer = wtransfer_trl.WeightTransfer(url_of(server), on_error="keep", nonfinite="reject")
        trainer = Trainer(transfer)
        try:
            trainer.sync(tensors(math.nan))
            assert failed(1, "the server keeps its policy", 1).search(caplog.text)
            trainer.sync(tensors(3.0))
            assert same(served, tensors(3.0))
        finally:
            transfer.destroy()


def saved(model, folder):
    """Return what transformers writes of a model."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("update_of", [generation_of, colocated_generation_of, online_dpo_of])
def test_experts_are_published_as_their_checkpoint_has_them(update_of, tmp_path):
    model = of_experts()
    served = {name: torch.zeros_like(each) for name, each in saved(model, tmp_path).items()}
    with serving(served) as server, connected(server) as client:
        update = update_of(model, client)
        for number in (1, 2):
            update()
            assert same(served, saved(model, tmp_path))
            assert logged()["version"] == number
            with torch.no_grad():
                for each in model.parameters():
                    each.add_(1)


@pytest.mark.parametrize("update_of", [generation_of, colocated_generation_of, online_dpo_of])
def test_adapters_of_experts_are_published_merged(update_of, tmp_path):
    adapters = peft.LoraConfig(
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        init_lora_weights=False,
    )
    model = peft.get_peft_model(of_experts(), adapters)
    base = saved(of_experts(), tmp_path)
    wanted = saved(copy.deepcopy(model).merge_and_unload(), tmp_path)
    served = {name: torch.zeros_like(each) for name, each in base.items()}
    with serving(served) as server, connected(server) as client:
        update_of(model, client)()
    assert served.keys() == wanted.keys()
    assert all(torch.allclose(served[name], wanted[name], atol=1e-5) for name in served)
    changed = {name.split(".")[-2] for name in base if not torch.equal(base[name], served[name])}
    assert changed == {"q_proj", "gate_proj", "up_proj", "down_proj"}


def test_experts_are_sent_by_views_one_layer_at_a_time():
    model = of_experts()
    wtransfer_trl.install()
    generation = VLLMGeneration.__new__(VLLMGeneration)
    generation.model, generation._weight_metadata = model, None
    generation._dist = SimpleNamespace(
        is_fsdp=False, gather_params=lambda _: contextlib.nullcontext()
    )
    told = list(generation._iter_named_params())
    assert all(each.is_meta for _, each in told)
    announced = [(name, each.dtype, each.shape) for name, each in told]
    generation._weight_metadata = announced
    sent = list(generation._iter_named_params())
    assert [(name, each.dtype, each.shape) for name, each in sent] == announced
    own = [each.untyped_storage().data_ptr() for each in model.parameters()]
    found = [each.untyped_storage().data_ptr() for _, each in sent]
    assert list(dict.fromkeys(found)) == own


@pytest.mark.parametrize("trainer", [AsyncGRPOTrainer, AsyncDistillationTrainer])
def test_asynchronous_trainer_publishes_experts_as_their_checkpoint_has_them(trainer, tmp_path):
    model = of_experts()
    served = {name: torch.zeros_like(each) for name, each in saved(model, tmp_path).items()}
    training = trainer.__new__(trainer)
    training.model = model
    training.accelerator = SimpleNamespace(
        device=torch.device("cpu"), unwrap_model=lambda each: each
    )
    with serving(served) as server:
        transfer = wtransfer_trl.WeightTransfer(url_of(server))
        transfer.init_weight_transfer()
        # The other ranks of a trainer have none, and read the pass as it is.
        assert [name for name, _ in training._streaming_iter()] == list(model.state_dict())
        # Another sender has the form that it had.
        training.weight_transfer = object()
        assert [name for name, _ in training._streaming_iter()] == list(model.state_dict())
        training.weight_transfer = transfer
        with closing(transfer._sync):
            for _ in range(2):
                transfer.send_weights(training._streaming_iter())
                assert same(served, saved(model, tmp_path))
                with torch.no_grad():
                    for each in model.parameters():
                        each.add_(1)


@pytest.mark.parametrize("update_of", [generation_of, colocated_generation_of, online_dpo_of])
def test_form_that_cannot_be_had_is_an_error_once_the_adapters_are_unmerged(update_of):
    model = peft.get_peft_model(of_experts(), peft.LoraConfig(target_modules=["q_proj"]))
    # As of a release of transformers that has changed.
    model.get_base_model()._weight_conversions = [object()]
    with serving(tensors(0.0)) as server, connected(server) as client:
        update = update_of(model, client)
        for _ in range(2):
            with pytest.raises(SourceError, match="Qwen3MoeForCausalLM: the form of the weights"):
                update()
            layers = [each for each in model.modules() if hasattr(each, "merged")]
            assert layers
            assert not any(each.merged for each in layers)


@pytest.mark.parametrize("trainer", [AsyncGRPOTrainer, AsyncDistillationTrainer])
def test_form_that_cannot_be_had_leaves_no_rank_of_an_asynchronous_trainer_in_a_gather(trainer):
    model, num_read = of_experts(), 0
    model._weight_conversions = [object()]
    named_parameters = model.named_parameters

    def counted():
        nonlocal num_read
        yield from named_parameters()
        num_read += 1

    model.named_parameters = counted
    training = trainer.__new__(trainer)
    training.model = model
    training.accelerator = SimpleNamespace(
        device=torch.device("cpu"), unwrap_model=lambda each: each
    )
    with serving(tensors(0.0)) as server:
        training.weight_transfer = transfer = wtransfer_trl.WeightTransfer(url_of(server))
        transfer.init_weight_transfer()
        with closing(transfer._sync), pytest.raises(SourceError, match="the form of the weights"):
            list(training._streaming_iter())
    # Names and shapes, and the pass that the other ranks gather beside.
    assert num_read == 2
    transfer.destroy()
    assert transfer.form is None
