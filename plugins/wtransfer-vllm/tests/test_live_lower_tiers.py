"""Lower tiers of vLLM's own OffloadingConnector, which other engines read: named by weights."""

import contextlib
import random
import shutil

import pytest
from engines import HostError, ask_each, until
from kv import BLOCK_SIZE, PROMPTS, check_same, count_hits, forget_prefixes, start
from test_live_kv_weights import run_until

pytestmark = [pytest.mark.live, pytest.mark.nightly, pytest.mark.timeout(600)]

LEAST_HITS = len(PROMPTS) * 6 * BLOCK_SIZE


def tiers(folder):
    return {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 64 << 20,
        "offload_prompt_only": False,
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
    """Maker of engines, whose checkpoints have one path: vLLM names a tier's blocks by it."""
    with contextlib.ExitStack() as stack:
        served = tmp_path / "served"

        def make(model, connector=TIERS, **more):
            served.unlink(missing_ok=True)
            served.symlink_to(sealed / model)
            env = {"WTRANSFER_CACHE": str(tmp_path / "cache")}
            more |= {"weight_transfer_config": {"backend": "shm"}}
            more |= {"worker_extension_cls": "cpu_tiers.Breaking"}
            engine = start(tmp_path, served, connector, env=env, **more)
            stack.callback(engine.close)
            engine.wait_started()
            return engine

        yield make


@pytest.fixture
def unsealed(sealed, tmp_path):
    """Checkpoint A, whose fingerprint is worked out while vLLM serves it."""
    ignored = shutil.ignore_patterns("wtransfer.json")
    return shutil.copytree(sealed / "A", tmp_path / "A", ignore=ignored)


def ask(engine, expected, prompts=PROMPTS):
    """Check that answers are as expected; return how many tokens came by the connector."""
    forget_prefixes(engine)
    answers, hits = count_hits(engine, lambda: engine.do("answer", prompts))
    check_same(answers, expected)
    return hits


def files(tmp_path):
    return set((tmp_path / "tier").rglob("*.bin"))


@pytest.mark.parametrize(
    ("connector", "ranks"),
    [
        (TIERS, 1),
        (UNDER_MULTI, 1),
        (TIERS, 2),
    ],
    ids=["one", "multi", "two ranks"],
)
def test_weights_that_come_back_find_their_blocks_and_no_engine_finds_those_of_others(
    engines, changing, fresh_kv, connector, ranks
):
    first = engines("A", connector, ranks=ranks)
    change_to = changing(first)
    assert ask(first, fresh_kv["A"]) == 0
    change_to("B")
    assert ask(first, fresh_kv["B"]) == 0
    change_to("A")
    assert ask(first, fresh_kv["A"]) >= LEAST_HITS
    change_to("B")
    assert ask(first, fresh_kv["B"]) >= LEAST_HITS
    # From the folder alone: another engine that was not updated, and one with B's checkpoint.
    for name in "AB":
        other = engines(name, connector, ranks=ranks)
        assert ask(other, fresh_kv[name]) >= LEAST_HITS


def test_blocks_of_requests_that_run_at_a_commit_are_of_the_weights_of_their_names(
    engines, changing, sealed, tmp_path
):
    engine = engines("A")
    engine.do("keep_in_flight", True)
    with pytest.raises(HostError, match="'keep', but the KV connector 'OffloadingConnector'"):
        changing(engine)
    engine.do("keep_in_flight", False)
    change_to = changing(engine)
    chosen = random.Random(0)
    prompts = {
        f"{number}": chosen.choices(range(3, 250), k=20 + 25 * number) for number in range(8)
    }
    for number, (name, prompt) in enumerate(prompts.items()):
        # At the commits some have begun to answer, one is in the midst of its prompt, others wait.
        engine.do("begin", name, {"prompt_token_ids": prompt}, 100)
        engine.do("step", 5 if number == 5 else 0)
    engine.do("step", 3)
    for name in "BABA":
        change_to(name)
        engine.do("step", 7)
    change_to("B")
    tokens = run_until(engine, *prompts)["tokens"]
    texts = [{"prompt_token_ids": prompts[name] + tokens[name]} for name in prompts]
    fresh = {name: start(tmp_path, sealed / name) for name in "AB"}
    expected = ask_each(fresh, lambda each: each.do("answer", texts))
    assert ask(engine, expected["B"], texts) > 0
    change_to("A")
    assert ask(engine, expected["A"], texts) > 0
    assert ask(engine, expected["A"], texts) >= sum(
        len(each["prompt_token_ids"]) - 2 * BLOCK_SIZE for each in texts
    )
    for name in "AB":
        assert ask(engines(name), expected[name], texts) > 0


@pytest.mark.parametrize("ranks", [1, 2], ids=["one", "two ranks"])
def test_weights_that_no_other_process_can_name_are_neither_stored_nor_loaded(
    engines, changing, fresh_kv, unsealed, ranks
):
    engine = engines(unsealed, ranks=ranks)
    changing(engine)
    until(lambda: ask(engine, fresh_kv["A"]) >= LEAST_HITS)
    before = files(unsealed.parent)
    assert before
    # Of the same bytes, but nobody has proven them.
    engine.do("rpc", "reload_weights")
    for _ in range(2):
        assert ask(engine, fresh_kv["A"]) == 0
    assert files(unsealed.parent) == before
