"""What ``wtransfer plugins new`` writes, by its names in a live vLLM: weights and KV cache."""

import contextlib
import subprocess
import sys

import pytest
from engines import Trainer
from kv import BLOCK_SIZE, PROMPTS, check_same, count_hits, forget_prefixes, install, start

pytestmark = [pytest.mark.live, pytest.mark.nightly, pytest.mark.timeout(600)]

CONNECTORS = {
    "connector": ("acme-connector", lambda folder: {"folder": str(folder)}),
    "spec": (
        "wtransfer-OffloadingConnector",
        lambda _: {"spec_name": "acme-spec", "memory_bytes_to_use": 64 << 20},
    ),
    "tier": (
        "SharedStorageConnector",
        lambda folder: {"tier": "acme-tier", "folder": str(folder)},
    ),
}
LEAST_HITS = len(PROMPTS) * 6 * BLOCK_SIZE


@pytest.fixture(scope="module")
def env(tmp_path_factory):
    """Environment in which a package of each kind is installed."""
    folder = tmp_path_factory.mktemp("new")
    packages = {kind: str(folder / kind) for kind in ("engine", *CONNECTORS)}
    for kind, package in packages.items():
        new = ["plugins", "new", kind, f"acme-{kind}", "--folder", package]
        subprocess.run([sys.executable, "-m", "wtransfer", *new], check=True, timeout=60)
    return install(packages.values(), folder / "site")


@pytest.mark.parametrize(
    "kind",
    [
        "connector",
        # By the adapter they come as those of third parties do in `test_live_kv.py`.
        "spec",
        "tier",
    ],
)
def test_prefixes_come_back_until_the_weights_change(kind, env, sealed, fresh_kv, tmp_path):
    weights = {"weight_transfer_config": {"backend": "acme-engine"}}
    env = env | {"WTRANSFER_CACHE": str(tmp_path / "cache")}
    with contextlib.ExitStack() as stack:
        engine = start(tmp_path, sealed / "A", CONNECTORS[kind], env=env, **weights)
        stack.callback(engine.close)
        trainer = stack.enter_context(contextlib.closing(Trainer("acme-engine", env=env)))
        engine.join(trainer.address, trainer.token)
        for name in ("A", "B"):
            if name == "B":
                checkpoint = sealed / "B" / "model.safetensors"
                assert trainer.publish(engine, checkpoint, "B") == ["committed"]
            computed, hits = count_hits(engine, lambda: engine.do("answer", PROMPTS))
            check_same(computed, fresh_kv[name])
            assert hits == 0
            forget_prefixes(engine)
            loaded, hits = count_hits(engine, lambda: engine.do("answer", PROMPTS))
            check_same(loaded, fresh_kv[name])
            assert hits >= LEAST_HITS
