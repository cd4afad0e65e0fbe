"""One serving process of many over one folder, with the third party's connector.

Prints, for each request, whether the tokens are those of a fresh model, and how many were loaded. A
request is the number of its prompt, and a salt after a colon if it has one.
"""

from __future__ import annotations

import json
import sys

import torch

from wtransfer.testing.mini_engine.build import HostSettings, make_host, make_local_host
from wtransfer.testing.mini_engine.loop import LocalWorkers
from wtransfer.testing.mini_engine.shape import CacheShape
from wtransfer.testing.mini_engine.sole_worker import make_sole_worker


def main(folder: str, seed: str, *requests: str) -> None:
    torch.set_num_threads(1)
    plain = HostSettings(seed=int(seed), cache=CacheShape(16, 12))
    with_it = HostSettings(
        seed=plain.seed, cache=plain.cache, connector="acme-folder", options={"folder": folder}
    )
    report = []
    with (
        make_local_host(plain) as fresh,
        make_host(with_it, LocalWorkers(make_sole_worker(with_it))) as host,
    ):
        for each in requests:
            number, _, salt = each.partition(":")
            prompt = [(7 * i + int(number)) % 251 for i in range(70)]
            # What the cache of the host itself has is not what is asked for.
            for pool in (fresh.scheduler.pool, host.scheduler.pool):
                pool.forget_all()
            before = host.scheduler.counts["tokens_loaded"]
            request = host.submit(prompt, 4)
            request.cache_salt = salt or None
            host.run()
            is_right = request.output == fresh.generate([prompt], 4)[0]
            report.append([is_right, host.scheduler.counts["tokens_loaded"] - before])
    print(json.dumps(report))  # noqa: T201


main(*sys.argv[1:])
