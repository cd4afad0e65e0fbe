"""Live tests need vLLM: `make_env.py` makes the environment. Without it they skip, loudly."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "live")]

IS_INSTALLED = importlib.util.find_spec("wtransfer_vllm") is not None
# Without the plug-in there is nothing to test; `test_installed.py` says so.
collect_ignore_glob = [] if IS_INSTALLED else ["test_[!i]*.py"]


def pytest_collection_modifyitems(items):
    missing = importlib.util.find_spec("vllm") is None
    for item in items:
        if missing and "live" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed: tests/make_env.py ENV"))


def pytest_configure(config):
    config.addinivalue_line("markers", "live: needs vLLM")
    config.addinivalue_line(
        "markers",
        "covers(*kinds, release, how): that it has passed is entered in releases.json, from which "
        "README.md has its table, where WTRANSFER_RELEASES=1 asks for that",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    mark = item.get_closest_marker("covers")
    if mark and os.environ.get("WTRANSFER_RELEASES") and call.when == "call" and report.passed:
        import release_table

        release_table.enter(mark.args, **mark.kwargs)
    return report


@pytest.fixture(scope="session", autouse=True)
def one_token():
    """One secret for all vLLMs and publishers of this run that are not given another one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WTRANSFER_TOKEN", secrets.token_hex(32))
        yield


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Folder with models A and B, of two seeds."""
    import tiny_models

    folder = tmp_path_factory.mktemp("models")
    tiny_models.make(folder / "A", 1)
    tiny_models.make(folder / "B", 2)
    return folder


@pytest.fixture(scope="session")
def sealed(tmp_path_factory):
    """Folder with models A and B and their digests: what vLLM computes has its name at once."""
    import tiny_models

    folder = tmp_path_factory.mktemp("sealed")
    for seed, name in enumerate("AB", start=1):
        tiny_models.make(folder / name, seed)
        command = [sys.executable, "-m", "wtransfer", "seal", str(folder / name)]
        subprocess.run(command, check=True, timeout=60)
    return folder


@pytest.fixture(scope="session")
def weights():
    """Model's name -> its weights."""
    import tiny_models

    return {"A": tiny_models.weights(1), "B": tiny_models.weights(2)}


@pytest.fixture(scope="session")
def in_process(models, tmp_path_factory):
    """An engine in one process, of model A at first; each test begins with what it publishes."""
    from engines import Engine

    options = {"model": str(models / "A"), "weight_transfer_config": {"backend": "shm"}}
    with contextlib.closing(Engine(tmp_path_factory.mktemp("host"), **options)) as engine:
        yield engine


@pytest.fixture
def joined(engine, weights):
    """Maker of a publisher that the module's engine has joined, and of what it holds, by name."""
    import wtransfer

    with contextlib.ExitStack() as stack:

        def join(name):
            held = {key: tensor.clone() for key, tensor in weights[name].items()}
            publisher = stack.enter_context(wtransfer.Publisher(held, deadline_s=10))
            engine.invite(publisher)
            publisher.wait_for_workers(1, timeout_s=20)
            return publisher, held

        yield join
    engine.do("shutdown_engine")


@pytest.fixture
def changing(weights):
    """Maker of what publishes weights, by their name, to an engine that has A."""
    import wtransfer
    from engines import publish

    with contextlib.ExitStack() as stack:

        def make(engine, *, of=weights.__getitem__, deadline_s=20):
            held = {key: tensor.clone() for key, tensor in of("A").items()}
            publisher = stack.enter_context(wtransfer.Publisher(held, deadline_s=deadline_s))
            engine.invite(publisher)
            publisher.wait_for_workers(1, timeout_s=20)

            def change_to(name, label=None):
                for key, tensor in of(name).items():
                    held[key].copy_(tensor)
                publish(publisher, engine, label or name).raise_unless_ok()

            return change_to

        yield make


@pytest.fixture(scope="session")
def fresh(models, tmp_path_factory):
    """Model's name -> the tokens of a fresh vLLM without us, prompt by prompt."""
    from engines import PROMPTS, Engine, ask_each

    folder = tmp_path_factory.mktemp("fresh")
    engines = {name: Engine(folder, model=str(models / name)) for name in ("A", "B")}
    tokens = ask_each(engines, lambda engine: engine.tokens(PROMPTS))
    assert tokens["A"] != tokens["B"]
    (folder / "tokens.json").write_text(json.dumps(tokens))
    return tokens


@pytest.fixture(scope="session")
def fresh_kv_of(sealed, tmp_path_factory):
    """Number of tokens -> answers by model's name, of a fresh vLLM without us."""
    from engines import ask_each
    from kv import PROMPTS, start

    folder = tmp_path_factory.mktemp("fresh")
    engines = {name: start(folder, sealed / name) for name in ("A", "B")}
    longest = ask_each(engines, lambda engine: engine.do("answer", PROMPTS, 40))
    assert longest["A"][0]["tokens"] != longest["B"][0]["tokens"]

    def cut(answer, num_tokens):
        if len(answer["tokens"]) <= num_tokens:
            return answer
        shorter = {key: answer[key][:num_tokens] for key in ("tokens", "likely")}
        return answer | shorter | {"ended": "length"}

    return lambda num_tokens: {
        name: [cut(each, num_tokens) for each in answers] for name, answers in longest.items()
    }


@pytest.fixture(scope="session")
def fresh_kv(fresh_kv_of):
    """Model's name -> the answers of a fresh vLLM without us, as `kv.check_same` compares them."""
    return fresh_kv_of(16)


@pytest.fixture(scope="session")
def fresh_ranks(models, tmp_path_factory):
    """Model's name -> tokens of two fresh ranks: they add in another order than one does."""
    from engines import PROMPTS, ask_each, start_ranks

    folder = tmp_path_factory.mktemp("fresh")
    engines = {name: start_ranks(folder, models / name) for name in ("A", "B")}
    return ask_each(engines, lambda engine: engine.tokens(PROMPTS))
