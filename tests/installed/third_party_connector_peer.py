"""One serving process with the third party's connector; prints what came of it."""

from __future__ import annotations

import json
import sys

import torch

from wtransfer.testing.mini_engine.config import CacheShape, EngineConfig
from wtransfer.testing.mini_engine.engine import make_engine
from wtransfer.weight_version import process_weights

PROMPT = [(7 * i) % 251 for i in range(70)]


def main(folder: str, how: str) -> None:
    torch.set_num_threads(1)
    name, path = {
        "name": ("acme-folder", None),
        "path": ("FolderConnector", "acme_folder_connector.connector"),
    }[how]
    plain = {"cache": CacheShape(16, 12)}
    settings = EngineConfig(
        seed=3, connector=name, module_path=path, options={"folder": folder}, **plain
    )
    held = process_weights.hold("A")
    truths = []
    for seed in (3, 4):
        with make_engine(EngineConfig(seed=seed, **plain)) as host:
            truths += host.generate([PROMPT], 4)
    with make_engine(settings) as host:
        (computed,) = host.generate([PROMPT], 4)
    with make_engine(settings) as host:
        (loaded,) = host.generate([PROMPT], 4)
        num_loaded = host.scheduler.counts["tokens_loaded"]
        with held.changing(lambda: "B"):
            host.executor.worker.model.draw_weights(4)
        (changed,) = host.generate([PROMPT], 4)
        more_loaded = host.scheduler.counts["tokens_loaded"] - num_loaded
    report = {
        "computed": computed == truths[0],
        "loaded": loaded == truths[0],
        "tokens loaded": num_loaded,
        "with other weights": changed == truths[1] != truths[0],
        "tokens loaded then": more_loaded,
    }
    print(json.dumps(report))  # noqa: T201


main(*sys.argv[1:])
