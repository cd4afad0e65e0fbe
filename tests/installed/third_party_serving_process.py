"""One serving process of many over one store, with a third party's connector or tier.

Prints, for each request, whether the tokens are those of a fresh model, and how many were loaded. A
request is the number of its prompt, and a salt after a colon if it has one.
"""

from __future__ import annotations

import json
import sys

import torch

from wtransfer.testing.mini_engine.config import CacheShape, EngineConfig
from wtransfer.testing.mini_engine.engine import LocalExecutor, make_engine
from wtransfer.testing.mini_engine.worker import make_worker


def main(site: str, connector: str, options: dict, seed: int, *requests: str) -> None:
    sys.path.insert(0, site)
    torch.set_num_threads(1)
    plain = EngineConfig(seed=seed, cache=CacheShape(16, 12))
    with_it = EngineConfig(seed=plain.seed, cache=plain.cache, connector=connector, options=options)
    report = []
    with (
        make_engine(plain) as fresh,
        make_engine(with_it, LocalExecutor(make_worker(with_it, owns_process=True))) as host,
    ):
        for each in requests:
            number, _, salt = each.partition(":")
            prompt = [(7 * i + int(number)) % 251 for i in range(70)]
            # What the cache of the host itself has is not what is asked for.
            for pool in (fresh.scheduler.pool, host.scheduler.pool):
                pool.reset()
            before = host.scheduler.counts["tokens_loaded"]
            request = host.submit(prompt, 4)
            request.cache_salt = salt or None
            host.run()
            is_right = request.output == fresh.generate([prompt], 4)[0]
            report.append([is_right, host.scheduler.counts["tokens_loaded"] - before])
    print(json.dumps(report))  # noqa: T201
