from pathlib import Path

import pytest

from wtransfer.bench.scene import Scene, Stage
from wtransfer.transport.zygote import Zygote

PRELOAD = (
    "torch",
    "wtransfer.bench.jobs.broadcasting",
    "wtransfer.bench.jobs.publishing",
    "wtransfer.bench.jobs.connecting",
    "wtransfer.connectors.shm",
    "wtransfer.connectors.storage.scheduler",
    "wtransfer.connectors.storage.worker",
)


@pytest.fixture(scope="package")
def zygote():
    with Zygote(PRELOAD, paths=[Path(__file__).parent]) as forks:
        yield forks


@pytest.fixture
def play(zygote):
    """Play jobs of `bench_jobs`, or others by their whole name."""

    def run(trainer, worker, num_workers=1, arguments=(), **scene):
        jobs = [each if ":" in each else f"bench_jobs:{each}" for each in (trainer, worker)]
        with Stage(zygote, Scene("a test", *jobs, num_workers, tuple(arguments), **scene)) as stage:
            return stage.play()

    return run
