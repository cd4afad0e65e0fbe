"""What tests of KV connectors in vLLM have in common."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from engines import Engine, start_ranks

THIRD_PARTIES = Path(__file__).parents[4] / "tests" / "installed"

BLOCK_SIZE = 32
"""Tokens per block: as small as vLLM's attention on CPUs takes it."""
PROMPTS = [
    "".join(f"Sentence {number} of the first conversation. " for number in range(8)),
    "".join(f"The other one, part {number}, is about this. " for number in range(9)),
]
"""Each of several blocks; a token is about one letter."""
HITS = "vllm:external_prefix_cache_hits"
LOCAL_HITS = "vllm:prefix_cache_hits"
PLAIN = {"dtype": "float32", "block_size": BLOCK_SIZE, "max_num_seqs": 64}

STORAGE = ("SharedStorageConnector", lambda folder: {"shared_storage_path": f"{folder}/kv"})
OFFLOADING = ("wtransfer-OffloadingConnector", lambda _: {"cpu_bytes_to_use": 64 << 20})
TIERING = (
    "wtransfer-OffloadingConnector",
    lambda folder: {
        "tier": "file",
        "shared_storage_path": f"{folder}/tier",
        "cpu_bytes_to_use": 64 << 20,
    },
)
THIRD_PARTY_SPEC = (
    "wtransfer-OffloadingConnector",
    lambda folder: {"spec_name": "acme-disk", "disk_bytes_to_use": 64 << 20, "folder": str(folder)},
)
THIRD_PARTY_TIER = (
    "SharedStorageConnector",
    lambda folder: {"tier": "acme-shelf", "folder": str(folder)},
)
THIRD_PARTY = ("acme-folder", lambda folder: {"folder": str(folder)})
MULTI = (
    "wtransfer-MultiConnector",
    lambda folder: {
        "connectors": [
            {"kv_connector": name, "kv_connector_extra_config": options(folder)}
            for name, options in (OFFLOADING, STORAGE)
        ]
    },
)
TO_A_STORE = {
    "storage": STORAGE,
    "offloading": OFFLOADING,
    "tiering": TIERING,
    "third-party spec": THIRD_PARTY_SPEC,
    "third-party tier": THIRD_PARTY_TIER,
    "third party": THIRD_PARTY,
    "multi": MULTI,
}
"""Connectors by which an instance finds again what it has computed."""
TO_ANOTHER = {
    "shared memory": ("SharedMemoryConnector", lambda _: {}),
    "process group": ("ProcessGroupConnector", lambda _: {"token": "of the two instances"}),
}
"""Connectors from a prefill instance to a decode instance."""


def install_third_parties(folder):
    """Install the third parties' packages for engines started with the environment returned."""
    kinds = ("connector", "spec", "tier")
    return install([str(THIRD_PARTIES / f"third_party_{kind}") for kind in kinds], folder)


def install(packages, folder):
    """Install packages for engines started with the environment returned."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    # The build backend is there already; nothing is fetched.
    options = ["--no-deps", "--no-build-isolation", "--target", str(folder)]
    subprocess.run([*pip, *options, *packages], check=True, timeout=300)
    path = [str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, path))}


def config(connector, folder, *, role="kv_both", policy="fail", **more):
    """Return a ``kv_transfer_config``."""
    name, options = connector
    return {
        "kv_connector": name,
        "kv_role": role,
        "kv_connector_extra_config": options(folder),
        "kv_load_failure_policy": policy,
    } | more


def start(folder, model, connector=None, *, ranks=1, processes=1, env=None, kv=None, **options):
    """Start an engine with a connector; `kv` are further fields of its configuration."""
    transfer = {}
    if connector is not None:
        transfer = {"kv_transfer_config": config(connector, folder, **(kv or {}))}
    options = PLAIN | {"disable_log_stats": False} | transfer | options
    if ranks > 1:
        return start_ranks(folder, model, env=env, **options)
    return Engine(folder, processes=processes, env=env, model=str(model), **options)


def check_same(served, fresh, within=1e-3):
    """Check that answers are those of a fresh engine, with logarithms that differ by less.

    Tokens are as probable as there. Where the two most probable ones are as good as equal, either
    will do, and what follows is another text.
    """
    assert [each["ended"] for each in served] == [each["ended"] for each in fresh]
    for mine, theirs in zip(served, fresh, strict=True):
        steps = zip(mine["tokens"], theirs["tokens"], theirs["likely"], strict=True)
        for number, (token, expected, likely) in enumerate(steps):
            told = mine["likely"][number][str(token)]
            assert abs(told - likely.get(str(token), float("-inf"))) < within, (
                f"step {number}: {token} at {told}, expected {expected}: {likely}"
            )
            if token != expected:
                break


def forget_prefixes(engine):
    """Empty vLLM's own prefix cache, once nothing that has ended is still being stored."""
    for _ in range(100):
        # A step, with less than a block: what has been stored is known after it.
        engine.do("answer", ["."], 2)
        if engine.do("forget_prefixes"):
            return
    raise AssertionError("blocks are still held")


def count_hits(engine, call, counter=HITS):
    """Return what a call returns, and how many tokens came by the connector meanwhile."""
    before = engine.do("counters").get(counter, 0)
    result = call()
    return result, engine.do("counters").get(counter, 0) - before
