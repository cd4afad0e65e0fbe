"""How fast bytes are copied, digested and screened. Run: ``pytest tests/benchmarks/bench_*.py``."""

import numpy as np
import pytest
import torch
import xxhash

from wtransfer.transport.digests import copy_digest, digest
from wtransfer.transport.nonfinite import count_nonfinite

pytest.importorskip("pytest_benchmark")

LARGE_NBYTES = 256 << 20
SMALL_NBYTES = 4096
NUM_SMALL = 2000


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def large():
    return torch.randn(LARGE_NBYTES // 2).to(torch.bfloat16)


@pytest.fixture(scope="module")
def small():
    return [torch.randn(SMALL_NBYTES // 2).to(torch.bfloat16) for _ in range(NUM_SMALL)]


@pytest.fixture(scope="module")
def memory():
    return np.full(LARGE_NBYTES, 1, dtype=np.uint8)


def test_large_memcpy(benchmark, large, memory):
    benchmark(np.copyto, memory, large.view(torch.uint8).numpy())


def test_large_copy_then_digest(benchmark, large, memory):
    source = large.view(torch.uint8).numpy()

    def two_passes():
        np.copyto(memory, source)
        return xxhash.xxh3_128_hexdigest(memory)

    benchmark(two_passes)


@pytest.mark.parametrize("screen", [False, True])
def test_large_copy_digest(benchmark, large, memory, screen):
    benchmark(copy_digest, memory, large, "xxh3-128", screen)


def test_large_digest(benchmark, large):
    benchmark(digest, large)


def test_large_nonfinite(benchmark, large):
    benchmark(count_nonfinite, large)


def test_large_wsum64(benchmark, large):
    benchmark.pedantic(digest, (large, "wsum64"), rounds=2)


@pytest.mark.parametrize("screen", [False, True])
def test_small_copy_digest(benchmark, small, memory, screen):
    """Divide by 2,000 for one tensor."""
    slots = [memory[i * SMALL_NBYTES : (i + 1) * SMALL_NBYTES] for i in range(NUM_SMALL)]

    def every_tensor():
        for slot, tensor in zip(slots, small, strict=True):
            copy_digest(slot, tensor, "xxh3-128", screen)

    benchmark(every_tensor)
