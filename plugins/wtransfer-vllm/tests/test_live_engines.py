"""Engines other than shm on a live vLLM: ``file``, and one that has never heard of vLLM."""

import subprocess
import sys
from pathlib import Path

import pytest
from engines import PROMPTS, Engine, Trainer

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

THIRD_PARTY = Path(__file__).parents[3] / "tests" / "installed" / "third_party_engine"
LIVE = Path(__file__).parent / "live"


@pytest.fixture(scope="module")
def third_party(tmp_path_factory):
    """Environment in which an engine is installed that has never heard of vLLM."""
    site = tmp_path_factory.mktemp("site")
    install = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--target", str(site)]
    copy = tmp_path_factory.mktemp("source") / "engine"
    subprocess.run(["cp", "-r", str(THIRD_PARTY), str(copy)], check=True)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *install, str(copy)]
    subprocess.run(command, check=True, timeout=120)
    return {"PYTHONPATH": f"{site}:{Path(__file__).parent / 'live'}"}


def start(name, models, folder, env=None):
    return Engine(
        folder,
        env=env,
        model=str(models / "A"),
        weight_transfer_config={"backend": name},
    )


def check_there_and_back(engine, trainer, models, fresh):
    engine.join(trainer.address, trainer.token)
    for name in ("B", "A"):
        checkpoint = models / name / "model.safetensors"
        assert trainer.publish(engine, checkpoint, name) == ["committed"]
        assert (engine.tokens(PROMPTS), engine.do("label")) == (fresh[name], name)


def test_versions_in_files_serve_a_live_engine(models, tmp_path, fresh):
    engine = start("file", models, tmp_path)
    trainer = Trainer("file", path=str(tmp_path / "versions"))
    try:
        check_there_and_back(engine, trainer, models, fresh)
    finally:
        trainer.close()
        engine.close()


def test_an_engine_that_has_never_heard_of_vllm_serves_it_and_is_watched(
    models, third_party, tmp_path, fresh
):
    engine = start("acme-file", models, tmp_path, third_party)
    trainer = Trainer("acme-file", env=third_party)
    try:
        check_there_and_back(engine, trainer, models, fresh)
        trainer.close()
        for spoil, words in (("Flipping", "other bytes"), ("Dropping", "self_attn.k_proj")):
            trainer = Trainer("acme-file", env=third_party, spoil=spoil)
            engine.join(trainer.address, trainer.token)
            error = trainer.fail(models / "B" / "model.safetensors", spoil)
            assert words in error
            assert (engine.tokens(PROMPTS), engine.do("label")) == (fresh["A"], "A")
            trainer.close()
        trainer = Trainer("acme-file", env=third_party)
        check_there_and_back(engine, trainer, models, fresh)
    finally:
        trainer.close()
        engine.close()
