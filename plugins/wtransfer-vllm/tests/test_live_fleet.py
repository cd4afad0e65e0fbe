"""One publisher serves a live vLLM, a live SGLang and a plain worker in one round, all or nothing.

SGLang has an environment of its own (`make_env.py` beside its tests); name its Python:

    WTRANSFER_SGLANG_PYTHON=ENV/bin/python python -m pytest -m nightly THIS_FILE
"""

import contextlib
import importlib.util
import os
from pathlib import Path

import pytest
import torch
import wtransfer
from engines import PROMPTS, until
from server import Server
from sources import HalfwaySource
from wtransfer.engines.shm import ShmWeightTransferEngine
from wtransfer.errors import DigestMismatchError, HostsError, PeerLostError, SchemaError
from wtransfer.testing.fleet import committing

VARIABLE = "WTRANSFER_SGLANG_PYTHON"
SGLANG = Path(__file__).parents[2] / "wtransfer-sglang" / "tests" / "live"
CURRENT_S = 60.0
"""Time in which a server that is up again must be up to date, on a busy machine."""

pytestmark = [
    pytest.mark.live,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        VARIABLE not in os.environ, reason=f"{VARIABLE} names no Python of SGLang's environment"
    ),
]


def module_of_sglang(name):
    """Return a module of SGLang's live tests; some have the names of ours."""
    spec = importlib.util.spec_from_file_location(f"sglang_{name}", SGLANG / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Fleet:
    """A vLLM, an SGLang and a plain worker of model A.

    Args:
        folder: Where logs go.
        models: Folder of the models A and B.
        weights: Model's name -> its weights.
        tokens: Model's name -> the tokens of a fresh vLLM.
    """

    def __init__(self, folder, models, weights, tokens):
        servers = module_of_sglang("server")
        self.wrong_tokens = module_of_sglang("sglang_models").wrong_tokens
        self.prompt, self.token = servers.PROMPT, servers.TOKEN
        self.models, self.weights, self.tokens = models, weights, tokens
        self.folder_of = {}
        self.plain = {name: tensor.clone() for name, tensor in weights["A"].items()}
        with contextlib.ExitStack() as stack:
            self.vllm = stack.enter_context(
                contextlib.closing(
                    Server(folder, models / "A", "shm", env={"WTRANSFER_TOKEN": self.token})
                )
            )
            self.sglang = stack.enter_context(
                contextlib.closing(
                    servers.Server(folder / "sglang", models / "A", python=os.environ[VARIABLE])
                )
            )
            self.sglang.ready()
            self.session, self.worker = stack.enter_context(self.serving(self.plain, "plain"))
            self._stack = stack.pop_all()

    def close(self):
        self._stack.close()

    @contextlib.contextmanager
    def serving(self, tensors, name):
        """Have a plain worker serve tensors within the block; gives its session and address."""
        with (
            wtransfer.WorkerSession(tensors, commit="copy", name=name) as session,
            wtransfer.WorkerServer(session, token=self.token) as server,
            committing(session),
        ):
            yield session, server.url

    @property
    def hosts(self):
        return [self.vllm.url, self.sglang.address, self.worker]

    @contextlib.contextmanager
    def publishing(self, **options):
        """Have one publisher of model A for all within the block; gives it and its source."""
        held = dict(self.weights["A"])
        source = HalfwaySource(held)
        source.held = held
        with wtransfer.Publisher(
            source, hosts=self.hosts, token=self.token, deadline_s=20, **options
        ) as publisher:
            assert set(publisher.hosts) == set(self.hosts)
            yield publisher, source

    def publish(self, publisher, source, name, label):
        """Publish a model under a label; return the report."""
        source.held.update(self.weights[name])
        self.folder_of[label] = self.models / name
        return publisher.publish(label)

    def check(self, name, label, *, without=None):
        """Assert that all hosts hold a version and compute with it, but for one."""
        if without != self.vllm.url:
            assert (self.vllm.tokens(PROMPTS), self.vllm.label()) == (self.tokens[name], label)
        if without != self.sglang.address:
            answer = self.sglang.ask(self.prompt)
            assert answer.versions == [(label, 0, 8)]
            assert self.wrong_tokens(self.folder_of, answer) == []
        assert self.session.version == label
        assert all(map(torch.equal, self.plain.values(), self.weights[name].values()))

    def await_current(self, publisher, host):
        """Wait until a host that was restarted is up to date without any publish."""
        until(
            lambda: any(
                (each.host, each.version) == (host, publisher.version)
                for each in publisher.workers()
            ),
            CURRENT_S,
        )


@pytest.fixture(scope="module")
def fleet(models, weights, fresh, tmp_path_factory):
    fleet = Fleet(tmp_path_factory.mktemp("fleet"), models, weights, fresh)
    yield fleet
    fleet.close()


def test_each_host_commits_and_proves_in_one_round(fleet):
    with fleet.publishing() as (publisher, source):
        for name in "BA":
            report = fleet.publish(publisher, source, name, f"{name}-1")
            print(report)  # noqa: T201
            assert report.raise_unless_ok()
            assert {each.host for each in report.workers} == set(fleet.hosts)
            fleet.check(name, f"{name}-1")


def test_one_that_does_not_fit_leaves_all_as_they_are(fleet):
    other = {name: tensor.clone() for name, tensor in fleet.weights["A"].items()}
    other["lm_head.weight"] = torch.zeros(3, 5)
    with (
        fleet.serving(other, "other") as (_, misfit),
        fleet.publishing() as (publisher, source),
    ):
        assert fleet.publish(publisher, source, "B", "B-2").raise_unless_ok()
        publisher.invite(misfit)
        with pytest.raises(SchemaError, match=r"lm_head\.weight") as refused:
            fleet.publish(publisher, source, "A", "A-2")
        assert "other" in str(refused.value)
        fleet.check("B", "B-2")
        publisher.remove(misfit)
        assert fleet.publish(publisher, source, "A", "A-3").raise_unless_ok()
        fleet.check("A", "A-3")


def test_byte_that_is_spoilt_for_one_keeps_the_new_version_from_all(fleet, monkeypatch):
    receive = ShmWeightTransferEngine.receive_weights

    def receive_spoilt(engine, update_info, load_weights):
        """Receive, as the plain worker of this process does, with one bit flipped."""

        def load(pairs):
            for name, tensor in pairs:
                found = tensor
                if name == "model.norm.weight":
                    found = tensor.clone()
                    found.view(torch.uint8)[0] ^= 1
                load_weights([(name, found)])

        receive(engine, update_info, load)

    with fleet.publishing() as (publisher, source):
        assert fleet.publish(publisher, source, "B", "B-4").raise_unless_ok()
        with monkeypatch.context() as patched:
            patched.setattr(ShmWeightTransferEngine, "receive_weights", receive_spoilt)
            with pytest.raises(DigestMismatchError, match=r"model\.norm\.weight.*plain"):
                fleet.publish(publisher, source, "A", "A-4")
        fleet.check("B", "B-4")
        assert fleet.publish(publisher, source, "A", "A-5").raise_unless_ok()
        fleet.check("A", "A-5")


def test_one_that_is_killed_halfway_leaves_the_others_as_they_are(fleet):
    url = fleet.vllm.url
    with fleet.publishing(return_s=2) as (publisher, source):
        assert fleet.publish(publisher, source, "B", "B-6").raise_unless_ok()
        source.act = fleet.vllm.kill
        with pytest.raises(PeerLostError, match=url):
            fleet.publish(publisher, source, "A", "A-6")
        source.act = None
        with pytest.raises(HostsError, match=f"{url} is absent for "):
            fleet.publish(publisher, source, "A", "A-6")
        fleet.check("B", "B-6", without=url)
        fleet.vllm.start_again()
        fleet.await_current(publisher, url)
        fleet.check("B", "B-6")
        assert fleet.publish(publisher, source, "A", "A-7").raise_unless_ok()
        fleet.check("A", "A-7")


def test_one_that_is_killed_halfway_is_left_out_by_name_where_the_rules_say_so(fleet):
    address = fleet.sglang.address
    with fleet.publishing(on_lost_worker="drop") as (publisher, source):
        source.act = fleet.sglang.kill
        # Lost within the round, then absent as it begins.
        for number, name in ((8, "B"), (9, "A")):
            report = fleet.publish(publisher, source, name, f"{name}-{number}")
            (missed,) = (each for each in report.workers if each not in report.holders)
            assert address in (missed.host, missed.worker)
            assert (missed.outcome, report.ok) == ("dropped", False)
            assert report.raise_unless_ok(left_out=True)
            fleet.check(name, f"{name}-{number}", without=address)
            source.act = None
        fleet.sglang.start_again()
        fleet.await_current(publisher, address)
        fleet.check("A", "A-9")
        assert fleet.publish(publisher, source, "B", "B-10").raise_unless_ok()
        fleet.check("B", "B-10")
