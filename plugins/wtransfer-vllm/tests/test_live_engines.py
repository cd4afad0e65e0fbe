"""Engines other than shm on a live vLLM: ``file``, and one that has never heard of vLLM."""

import functools
import os
import shutil
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from engines import PROMPTS, Engine, Trainer, check_update, start_ranks
from server import Server
from stream import Stream

pytestmark = [pytest.mark.live, pytest.mark.nightly, pytest.mark.timeout(600)]

THIRD_PARTY = Path(__file__).parents[3] / "tests" / "installed" / "third_party_engine"
LIVE = Path(__file__).parent / "live"
NUM_STREAMED = 480
"""Tokens of a request that runs beside an update."""


@dataclass(frozen=True)
class Backend:
    """An engine, and what its trainers and workers are started with."""

    name: str
    options: dict = field(default_factory=dict)
    env: dict = field(default_factory=dict)

    @property
    def config(self):
        return {"weight_transfer_config": {"backend": self.name}}

    def serve(self, folder, models, processes=1):
        """Start an engine of model A."""
        options = {"model": str(models / "A")} | self.config
        return Engine(folder, processes=processes, env=self.env, **options)

    def train(self, **settings):
        """Start a trainer's process."""
        return Trainer(self.name, env=self.env, options=self.options, **settings)


@pytest.fixture(scope="module")
def third_party(tmp_path_factory):
    """Environment in which an engine is installed that has never heard of vLLM."""
    site = tmp_path_factory.mktemp("site")
    install = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--target", str(site)]
    copy = tmp_path_factory.mktemp("source") / "engine"
    shutil.copytree(THIRD_PARTY, copy)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *install, str(copy)]
    subprocess.run(command, check=True, timeout=120)
    return {"PYTHONPATH": os.pathsep.join([str(site), str(LIVE)])}


@pytest.fixture(params=["file", "acme-file"])
def backend(request, tmp_path):
    if request.param == "file":
        return Backend("file", {"path": str(tmp_path / "versions")})
    return Backend(request.param, env=request.getfixturevalue("third_party"))


def check_there_and_back(engine, trainer, models, fresh, num_ranks=1):
    engine.join(trainer.address, trainer.token)
    for name in ("B", "A"):
        checkpoint = models / name / "model.safetensors"
        update = functools.partial(trainer.publish, engine, checkpoint, name)
        assert check_update(engine, update, fresh[name], name) == ["committed"] * num_ranks


@pytest.mark.parametrize("backend", ["file"], indirect=True)
def test_versions_in_files_serve_a_live_engine(backend, models, tmp_path, fresh):
    with closing(backend.serve(tmp_path, models)) as engine, closing(backend.train()) as trainer:
        check_there_and_back(engine, trainer, models, fresh)


@pytest.mark.parametrize("backend", ["acme-file"], indirect=True)
def test_an_engine_that_has_never_heard_of_vllm_serves_it_and_is_watched(
    backend, models, tmp_path, fresh
):
    with closing(backend.serve(tmp_path, models)) as engine:
        with closing(backend.train()) as trainer:
            check_there_and_back(engine, trainer, models, fresh)
        for spoil, words in (("Flipping", "other bytes"), ("Dropping", "self_attn.k_proj")):
            with closing(backend.train(spoil=spoil)) as trainer:
                engine.join(trainer.address, trainer.token)
                error = trainer.fail(models / "B" / "model.safetensors", spoil)
                assert words in error
                assert (engine.tokens(PROMPTS), engine.do("label")) == (fresh["A"], "A")
        with closing(backend.train()) as trainer:
            check_there_and_back(engine, trainer, models, fresh)


def test_three_processes_are_served_by_any_engine(backend, models, tmp_path, fresh):
    with (
        closing(backend.serve(tmp_path, models, processes=3)) as engine,
        closing(backend.train()) as trainer,
    ):
        check_there_and_back(engine, trainer, models, fresh)


def test_two_ranks_are_served_by_any_engine(backend, models, tmp_path, fresh_ranks):
    with (
        closing(start_ranks(tmp_path, models / "A", env=backend.env, **backend.config)) as engine,
        closing(backend.train()) as trainer,
    ):
        check_there_and_back(engine, trainer, models, fresh_ranks, num_ranks=2)


@pytest.mark.parametrize("backend", ["file", "acme-file"], indirect=True)
def test_a_server_is_served_by_any_engine(backend, models, tmp_path, fresh):
    with (
        closing(Server(tmp_path, models / "A", backend.name, backend.env)) as server,
        closing(backend.train(hosts=[server.url])) as trainer,
    ):
        for name in ("B", "A"):
            stream = Stream(server.url, PROMPTS[1], NUM_STREAMED)
            outcomes = trainer.publish_to_hosts(models / name / "model.safetensors", name)
            assert outcomes == ["committed"]
            assert (server.tokens(PROMPTS), server.label()) == (fresh[name], name)
            # Another request was running when it began, and was not harmed. Whether it still was at
            # the commit is up to how fast this machine writes files: `check_update` sees to that.
            stream.end()
            assert stream.ended_by == "length"
