"""Lower tiers of vLLM's own OffloadingConnector, which several engines read: named by the weights."""

import contextlib

import pytest
import wtransfer
from engines import HostError, publish
from kv import (
    BLOCK_SIZE,
    HITS,
    PROMPTS,
    check_same,
    count_hits,
    forget_prefixes,
    start,
)

from wtransfer_vllm import in_flight

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

LEAST_HITS = len(PROMPTS) * 6 * BLOCK_SIZE


def tiers(folder):
    return {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 64 << 20,
        "secondary_tiers": [{"type": "fs", "root_dir": str(folder / "tier")}],
    }


TIERS = ("OffloadingConnector", tiers)
UNDER_MULTI = (
    "MultiConnector",
    lambda folder: {
        "connectors": [
            {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": tiers(folder),
            }
        ]
    },
)


@pytest.fixture
def engines(sealed, tmp_path):
    """Maker of engines whose checkpoints are under one path, by which vLLM names the tier's folder."""
    with contextlib.ExitStack() as stack:
        served = tmp_path / "served"

        def make(model, connector=TIERS, *, env=None, **more):
            served.unlink(missing_ok=True)
            served.symlink_to(sealed / model)
            env = {"WTRANSFER_CACHE": str(tmp_path / "cache")} | (env or {})
            more |= {
                "weight_transfer_config": {"backend": "shm"},
                "worker_extension_cls": "cpu_tiers.Breaking",
            }
            engine = start(tmp_path, served, connector, env=env, **more)
            stack.callback(engine.close)
            engine.wait_started()
            return engine

        yield make


@pytest.fixture
def update(weights):
    """Maker of what publishes to an engine."""
    with contextlib.ExitStack() as stack:

        def make(engine):
            held = {key: tensor.clone() for key, tensor in weights["A"].items()}
            publisher = stack.enter_context(wtransfer.Publisher(held, deadline_s=20))
            engine.invite(publisher)
            publisher.wait_for_workers(1, timeout_s=20)

            def change_to(name):
                held.update(weights[name])
                publish(publisher, engine, name).raise_unless_ok()

            return change_to

        yield make


def ask(engine, name, fresh_kv):
    """Return the hits of answers that are those of a fresh engine with these weights."""
    forget_prefixes(engine)
    answers, hits = count_hits(engine, lambda: engine.do("answer", PROMPTS))
    check_same(answers, fresh_kv[name])
    return hits


@pytest.mark.parametrize(
    "connector", [TIERS, pytest.param(UNDER_MULTI, marks=pytest.mark.nightly)], ids=["one", "multi"]
)
def test_weights_that_come_back_find_their_blocks_and_no_engine_finds_those_of_others(
    engines, update, fresh_kv, connector
):
    first = engines("A", connector)
    change_to = update(first)
    assert ask(first, "A", fresh_kv) == 0
    change_to("B")
    assert ask(first, "B", fresh_kv) == 0
    change_to("A")
    assert ask(first, "A", fresh_kv) >= LEAST_HITS
    change_to("B")
    assert ask(first, "B", fresh_kv) >= LEAST_HITS
    # From the folder alone: another engine that was not updated, and one with B's checkpoint.
    for name in "AB":
        other = engines(name, connector)
        assert ask(other, name, fresh_kv) >= LEAST_HITS
