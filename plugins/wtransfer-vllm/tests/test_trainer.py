"""wtransfer's engines as trainer engines of vLLM's factory; the workers are plain ones."""

import json
import subprocess
import sys
import threading
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
import transformers
import wtransfer
from safetensors.torch import load_file
from tiny_models import of_experts
from vllm.distributed.weight_transfer.base import ModuleSource, ParamMeta
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from wtransfer.errors import CommitError, SchemaError, SourceError
from wtransfer.testing.fleet import committing
from wtransfer.weight_sync.http.client import HttpClient
from wtransfer.weight_sync.worker.target import StateDictTarget

from wtransfer_vllm import trainer
from wtransfer_vllm.names import vllm_names

pytestmark = pytest.mark.live

RANKS = Path(__file__).parent / "live" / "fsdp_ranks.py"


@contextmanager
def serving(model, name="plain"):
    """A worker behind HTTP, which commits whenever it can; its client."""
    with (
        closing(wtransfer.WorkerSession(model, name=name, instance=name)) as session,
        closing(wtransfer.WorkerServer(session)) as server,
        committing(session),
    ):
        yield server


@contextmanager
def training(model, server, backend="shm", source=None, **more):
    engine = WeightTransferTrainerFactory.trainer_init(
        trainer.init_info(backend, rank=0, **more),
        client=HttpClient(server.address, server.token),
        source=source or ModuleSource(model),
    )
    try:
        yield engine
    finally:
        engine.shutdown()


@pytest.fixture
def pair():
    """A model in training, and another that a worker serves."""
    torch.manual_seed(1)
    return torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)


def same(pair):
    return all(
        torch.equal(a, b) for a, b in zip(*(each.parameters() for each in pair), strict=True)
    )


def test_every_engine_has_a_twin_of_the_name_that_workers_know():
    registry = WeightTransferTrainerFactory._registry
    names = vllm_names("engines").values()
    assert {"shm", "file", "gloo"} <= set(names)
    for name in names:
        cls = registry[name]()
        assert issubclass(cls, trainer.TrainerEngine)
        assert cls.init_info_cls.backend == name
        info = trainer.init_info(name, rank=3)
        assert (type(info), info.backend, info.is_sender) == (cls.init_info_cls, name, False)
    assert not issubclass(registry["nccl"](), trainer.TrainerEngine)  # vLLM's own stays


def test_rounds_commit_what_the_module_holds(pair, tmp_path):
    model, served = pair
    options = {"path": str(tmp_path / "versions")}
    with serving(served) as server, training(model, server, "file", options=options) as engine:
        for number in range(3):
            with torch.no_grad():
                model.weight.add_(1)
            report = engine.send_weights()
            assert (report.version, report.outcome) == (f"round-{number + 1}", "committed")
            assert engine.report is report
            assert same(pair)
        assert engine.send_weights(weight_version="mine").version == "mine"


def test_refused_round_raises_and_the_next_one_commits(pair):
    model, served = pair

    class Source(ModuleSource):
        shape = (5,)

        def metadata(self):
            first, second = super().metadata()
            return [first, ParamMeta(second.name, second.dtype, self.shape)]

    source = Source(model)
    before = [each.clone() for each in served.parameters()]
    with serving(served) as server, training(model, server, source=source) as engine:
        with pytest.raises(SchemaError, match="bias: wanted"):
            engine.send_weights("v1")
        assert all(map(torch.equal, before, served.parameters()))
        source.shape = (4,)
        engine.send_weights("v2")
        assert same(pair)
        source.shape = (5,)
        with pytest.raises(SchemaError, match="bias: wanted"):
            engine.send_weights("v3")
        assert engine.report is None


def test_engine_that_was_shut_down_leaves_its_workers_to_another(pair):
    model, served = pair
    with serving(served) as server:
        for _ in range(2):
            with torch.no_grad():
                model.weight.add_(1)
            with training(model, server) as engine:
                engine.send_weights()
            assert same(pair)


def saved(model, folder):
    """Return what transformers writes of a model."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def test_experts_are_published_as_their_checkpoint_has_them(tmp_path):
    model = of_experts(1)
    served = {name: torch.zeros_like(each) for name, each in saved(model, tmp_path).items()}
    with serving(served) as server, training(model, server) as engine:
        for _ in range(2):
            engine.send_weights()
            wanted = saved(model, tmp_path)
            assert served.keys() == wanted.keys()
            assert all(torch.equal(served[name], wanted[name]) for name in wanted)
            with torch.no_grad():
                for each in model.parameters():
                    each.add_(1)


def test_source_of_ones_own_yields_the_form_that_travels(tmp_path):
    class Source(ModuleSource):
        """Splits by itself."""

        def metadata(self):
            return [ParamMeta(name, each.dtype, tuple(each.shape)) for name, each in self]

        def __iter__(self):
            return iter(saved(model, tmp_path).items())

    model = of_experts(1)
    served = {name: torch.zeros_like(each) for name, each in saved(model, tmp_path).items()}
    with serving(served) as server, training(model, server, source=Source(model)) as engine:
        engine.send_weights()
        assert all(torch.equal(served[name], each) for name, each in saved(model, tmp_path).items())


def test_source_derived_from_vllms_may_yield_the_form_of_the_model():
    class Source(ModuleSource):
        """Of workers that hold the model as the trainer does."""

    model = of_experts(1)
    own = {name: torch.zeros_like(each) for name, each in model.named_parameters()}
    with serving(own) as server, training(model, server, source=Source(model)) as engine:
        engine.send_weights()
    assert all(torch.equal(own[name], each) for name, each in model.named_parameters())


def test_rank_that_does_not_send_reads_its_source(pair):
    read = []

    class Source(ModuleSource):
        def __iter__(self):
            for name, tensor in super().__iter__():
                read.append(name)
                yield name, tensor

    engine = WeightTransferTrainerFactory.trainer_init(
        trainer.init_info("shm", rank=1), client=None, source=Source(pair[0])
    )
    assert engine.send_weights() is None
    assert read == ["weight", "bias"]
    engine.shutdown()


def test_form_that_cannot_be_had_is_raised_when_the_source_was_read(monkeypatch):
    def changed(*_):
        raise TypeError("revert_weight_conversion() takes no state dict")

    one_pass, read = ModuleSource.__iter__, []

    def noted(source):
        for name, tensor in one_pass(source):
            read.append(name)
            yield name, tensor

    model = of_experts(1)
    names = [name for name, _ in model.named_parameters()]
    monkeypatch.setattr(transformers.modeling_utils, "revert_weight_conversion", changed)
    monkeypatch.setattr(ModuleSource, "__iter__", noted)
    refused = pytest.raises(SourceError, match=r"Qwen3MoeForCausalLM: .*takes no state dict")
    with serving(model.state_dict()) as server, training(model, server) as engine, refused:
        engine.send_weights()
    assert read == names


def test_source_of_a_later_release_has_a_method_for_its_pass(pair):
    model, served = pair

    class Source:
        def metadata(self):
            return ModuleSource(model).metadata()

        def iter_full(self):
            return iter(ModuleSource(model))

    with serving(served) as server, training(model, server, source=Source()) as engine:
        engine.send_weights()
        assert same(pair)


def test_worker_that_was_restarted_is_invited_again(pair):
    model, served = pair
    with serving(served) as server, training(model, server) as engine:
        engine.send_weights("v1")
        engine.client.leave(engine.publisher.address)
        with torch.no_grad():
            model.weight.add_(1)
        engine.send_weights("v2")
        assert same(pair)


def test_one_of_several_workers_behind_a_client_is_invited_again_or_told_to_refuse(pair):
    model, served = pair
    other = torch.nn.Linear(8, 4)
    refused = threading.Event()

    class Refusing(StateDictTarget):
        """A model whose own loading fails once."""

        def apply(self, given):
            if refused.is_set():
                refused.clear()
                raise RuntimeError("the model says no")
            super().apply(given)

    class Client:
        """Leads to two servers, as vLLM's client of several Ray actors does."""

        def __init__(self, *servers):
            self.clients = [HttpClient(each.address, each.token) for each in servers]

        def init_weight_transfer_engine(self, init_info):
            for each in self.clients:
                each.init_weight_transfer_engine(init_info)

        def start_weight_update(self):
            """Nothing: workers commit by themselves."""

        def finish_weight_update(self, weight_version=None):
            """Nothing."""

    with (
        serving(served, "one") as first,
        serving(Refusing(other.state_dict()), "two") as second,
    ):
        engine = WeightTransferTrainerFactory.trainer_init(
            trainer.init_info("shm", rank=0),
            client=Client(first, second),
            source=ModuleSource(model),
        )
        engine.send_weights("v1")
        # As after its restart: it has forgotten its publisher.
        engine.client.clients[1].leave(engine.publisher.address)
        with torch.no_grad():
            model.weight.add_(1)
        engine.send_weights("v2")
        refused.set()
        with pytest.raises(CommitError, match="the model says no"):
            engine.send_weights("v3")
        assert not engine.report.ok
        engine.shutdown()
    assert torch.equal(served.weight, model.weight)
    assert torch.equal(other.weight, model.weight)


def test_metadata_that_fails_leaves_no_rank_in_a_gather(pair):
    model, served = pair

    class Source(ModuleSource):
        fails, num_read = True, 0

        def metadata(self):
            if self.fails:
                raise OSError("no shapes")
            return super().metadata()

        def __iter__(self):
            for each in super().__iter__():
                self.num_read += 1
                yield each

    source = Source(model)
    with serving(served) as server, training(model, server, source=source) as engine:
        with pytest.raises(OSError, match="no shapes"):
            engine.send_weights()
        assert source.num_read == 2
        source.fails = False
        engine.send_weights()
        assert same(pair)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda: trainer.init_info("sgm", rank=0),
            ValueError,
            "no trainer engine 'sgm' here, only",
        ),
        (lambda: trainer.init_info("nccl", rank=0), ValueError, "no trainer engine 'nccl' here"),
        (lambda: trainer.init_info("shm", rank="0"), TypeError, "rank is '0', expected an integer"),
        (lambda: trainer.init_info("shm", rank=0, hosts=[]), TypeError, "hosts: given by"),
        (lambda: trainer.TrainerEngine.trainer_init(None, client=None), TypeError, "NoneType, exp"),
        (
            lambda: trainer.TrainerEngine.trainer_init(None, client=None, source={}),
            TypeError,
            r"source is dict, expected a WeightSource of vLLM, such as .*ModuleSource\(model\)",
        ),
        (
            lambda: trainer.TrainerEngine.trainer_init(
                trainer.init_info("shm", rank=0, speed=3), client=None, source=ModuleSource(None)
            ),
            TypeError,
            "speed",
        ),
    ],
    ids=["unknown", "of vLLM", "rank", "hosts", "none", "mapping", "argument"],
)
def test_wrong_input_is_named(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_wrong_option_of_an_engine_is_named(pair):
    with (
        serving(pair[1]) as server,
        pytest.raises(ValueError, match="unknown field `slots`"),
        training(pair[0], server, options={"slots": 2}),
    ):
        pass


@pytest.mark.nightly
def test_ranks_of_an_fsdp_module_gather_in_step_also_after_a_refused_round(tmp_path):
    torch.manual_seed(0)
    served = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    with serving(served) as server:
        url = f"http://wtransfer:{server.token}@{server.address.removeprefix('tcp:')}"
        command = [sys.executable, str(RANKS)]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), "2", str(tmp_path / "store"), url],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            outputs = [rank.communicate(timeout=120) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    first, second = ([json.loads(line) for line in out.splitlines()] for out, _ in outputs)
    assert [line["outcome"] for line in first] == ["committed", "SchemaError", "committed"]
    assert [line["outcome"] for line in second] == [None] * 3
    total = sum(float(each.detach().sum()) for each in served.parameters())
    assert total == pytest.approx(first[-1]["total"])
