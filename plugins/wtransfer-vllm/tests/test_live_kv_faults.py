"""What goes wrong around KV in a live vLLM: it is computed, with the tokens of a fresh one."""

import contextlib
import os
import signal
import time

import pytest
from kv import (
    BLOCK_SIZE,
    OFFLOADING,
    PROMPTS,
    STORAGE,
    TO_ANOTHER,
    check_same,
    count_hits,
    forget_prefixes,
    start,
)

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

nightly = pytest.mark.nightly
RECOMPUTE = {"policy": "recompute"}
TOKEN_NBYTES = 1024
"""KV cache of a token: 2 layers, 2 heads, 32 float32, keys and values."""


@pytest.fixture
def engines(sealed, tmp_path):
    """Maker of engines with a connector, which are closed at the end."""
    with contextlib.ExitStack() as stack:

        def make(connector, *, model="A", folder=sealed, **options):
            env = {"WTRANSFER_CACHE": str(tmp_path / "cache")}
            engine = start(tmp_path, folder / model, connector, env=env, **options)
            stack.callback(engine.close)
            return engine

        yield make


def block_files(folder):
    """Return the files of all blocks in the storage connector's folder, once all are written."""
    blocks, before = folder / "kv" / "wtransfer-kv-2" / "blocks", None
    while not before or sorted(blocks.iterdir()) != before:
        before = sorted(blocks.iterdir())
        time.sleep(0.5)
    return before


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(file):
    os.truncate(file, file.stat().st_size // 2)


@pytest.mark.parametrize(
    "damage", [flip, pytest.param(cut, marks=nightly)], ids=["tampered", "truncated"]
)
def test_damaged_blocks_are_computed(engines, fresh_kv, tmp_path, damage):
    engine = engines(STORAGE, kv=RECOMPUTE)
    engine.do("answer", PROMPTS)
    for file in block_files(tmp_path)[::2]:
        damage(file)
    forget_prefixes(engine)
    check_same(engine.do("answer", PROMPTS), fresh_kv["A"])
    # They were removed and stored again.
    block_files(tmp_path)
    forget_prefixes(engine)
    again, hits = count_hits(engine, lambda: engine.do("answer", PROMPTS))
    check_same(again, fresh_kv["A"])
    assert hits >= len(PROMPTS) * 6 * BLOCK_SIZE


@nightly
def test_load_that_is_not_reported_is_computed_in_other_blocks(engines, fresh_kv, tmp_path):
    gate = tmp_path / "gate"
    options = {
        "spec_name": "HeldSpec",
        "spec_module_path": "held_spec",
        "cpu_bytes_to_use": 64 << 20,
        "gate": str(gate),
        "spoils": True,
        "deadline_s": 1.0,
    }
    engine = engines(("wtransfer-OffloadingConnector", lambda _: options), kv=RECOMPUTE)
    engine.do("answer", PROMPTS)
    forget_prefixes(engine)
    # vLLM has the beginning of one of them: its blocks are shared, and are not written.
    engine.do("answer", [PROMPTS[0][: 3 * BLOCK_SIZE]], 1)
    gate.touch()
    check_same(engine.do("answer", PROMPTS), fresh_kv["A"])
    assert not engine.do("forget_prefixes"), "the blocks are held"
    gate.unlink()
    check_same(engine.do("answer", PROMPTS), fresh_kv["A"])
    forget_prefixes(engine)
    served, hits = count_hits(engine, lambda: engine.do("answer", PROMPTS))
    check_same(served, fresh_kv["A"])
    assert hits >= 3 * BLOCK_SIZE, "what was late is suspect, and what lies before it is not"
    assert "HeldSpec has not reported a load of request" in engine.log.read_text()


@nightly
def test_foreign_blocks_and_blocks_of_old_weights_are_computed(engines, fresh_kv, tmp_path):
    engines(STORAGE, kv=RECOMPUTE).do("answer", PROMPTS)
    of_a = block_files(tmp_path)
    engine = engines(STORAGE, kv=RECOMPUTE, model="B")
    engine.do("answer", PROMPTS)
    of_b = sorted({*block_files(tmp_path)} - {*of_a})
    # Each file of B becomes another block of B, or the block of A that has its place.
    kept = [file.read_bytes() for file in of_b]
    for number, file in enumerate(of_b):
        foreign = kept[number - 1] if number % 2 else of_a[number].read_bytes()
        file.write_bytes(foreign)
    forget_prefixes(engine)
    check_same(engine.do("answer", PROMPTS), fresh_kv["B"])


@nightly
@pytest.mark.parametrize("stopped_first", [True, False], ids=["in mid-transfer", "before it"])
@pytest.mark.parametrize("kind", TO_ANOTHER)
def test_a_prefill_instance_that_is_killed_costs_a_recompute_and_no_block(
    engines, fresh_kv, kind, stopped_first
):
    shape = {"processes": 3}
    prefill = engines(TO_ANOTHER[kind], kv={"role": "kv_producer"}, **shape)
    decode = engines(TO_ANOTHER[kind], kv={"role": "kv_consumer"} | RECOMPUTE, **shape)
    wish = [{"do_remote_decode": True}] * len(PROMPTS)
    transfers = [each["transfer"] for each in prefill.do("answer", PROMPTS, 1, wish)]
    if stopped_first:
        os.killpg(prefill.process.pid, signal.SIGSTOP)
        decode.do("begin", "loading", PROMPTS[0], 16, transfers[0])
        assert not decode.do("step", 5)["tokens"]["loading"]
    os.killpg(prefill.process.pid, signal.SIGKILL)
    prefill.process.wait(20)
    if stopped_first:
        limit = time.monotonic() + 40
        while not (state := decode.do("step", 5))["ended"]:
            assert time.monotonic() < limit
        assert state["tokens"]["loading"] == fresh_kv["A"][0]["tokens"]
    served = decode.do("answer", PROMPTS, 16, transfers)
    check_same(served, fresh_kv["A"])
    check_same(decode.do("answer", PROMPTS), fresh_kv["A"])
    assert decode.do("counters")["vllm:kv_cache_usage_perc"] == 0


def crowd(number):
    """Return prompts that share beginns of several blocks, and end in their own ways."""
    shared = [prompt[: 5 * BLOCK_SIZE] for prompt in PROMPTS]
    return [f"{shared[each % 2]} and this is number {each} of them" for each in range(number)]


@pytest.fixture(scope="module")
def fresh_crowd(sealed, tmp_path_factory):
    engine = start(tmp_path_factory.mktemp("fresh"), sealed / "A")
    # One by one, so that none of them depends on another.
    answers = [engine.do("answer", [prompt], 24)[0] for prompt in crowd(50)]
    engine.close()
    return answers


@nightly
@pytest.mark.parametrize(
    ("connector", "shape"),
    [
        pytest.param(OFFLOADING, {}, id="offloading, one process"),
        pytest.param(STORAGE, {"processes": 3}, id="storage, three processes"),
        pytest.param(OFFLOADING, {"processes": 3}, id="offloading, three processes"),
    ],
)
def test_fifty_requests_at_once_with_shared_prefixes_and_preemptions(
    engines, fresh_crowd, connector, shape
):
    # Room for 40 blocks: of two beginnings, and for less than one block of its own for each.
    engine = engines(connector, kv_cache_memory_bytes=40 * BLOCK_SIZE * TOKEN_NBYTES, **shape)
    for _ in range(3):
        check_same(engine.do("answer", crowd(50), 24), fresh_crowd)
        forget_prefixes(engine)
    counters = engine.do("counters")
    assert counters["vllm:num_preemptions"] > 0
    assert counters["vllm:external_prefix_cache_hits"] > 0


@nightly
def test_an_instance_that_was_killed_leaves_its_blocks_to_the_next(
    engines, models, fresh_kv, tmp_path
):
    first = engines(STORAGE, folder=models)
    # This checkpoint is not sealed: its digest is worked out once, and kept.
    wait_until(lambda: list((tmp_path / "cache").rglob("fingerprint.json")))
    first.do("answer", ["a step by which the scheduler's side hears of it"])
    first.do("answer", PROMPTS)
    block_files(tmp_path)
    os.killpg(first.process.pid, signal.SIGKILL)
    first.process.wait(20)
    second = engines(STORAGE, folder=models)
    # From the first request on.
    served, hits = count_hits(second, lambda: second.do("answer", PROMPTS))
    check_same(served, fresh_kv["A"])
    assert hits >= len(PROMPTS) * 6 * BLOCK_SIZE


def wait_until(condition):
    limit = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.05)
