import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from wtransfer.transport import wsum64 as module
from wtransfer.transport.wsum64 import WeightedSum, wsum64

MASK = 2**64 - 1
VECTORS = {
    b"": "00000000000000000000000000000000",
    b"\0": "00000000000000010000000000000001",
    b"abc": "3d005b6f99b4ed529ce8eefcb00a0724",
    bytes(range(256)): "35e09b5613261a20a30a79d4053b1120",
    b"\xff" * 1_000_001: "ea3e7b2148fe5b9e4a6650796cb089ce",
}


def splitmix64(seed):
    while True:
        seed = (seed + 0x9E3779B97F4A7C15) & MASK
        z = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        yield z ^ (z >> 31)


def reference(data):
    """The definition, word for word."""
    padded = data + bytes(-len(data) % 4)
    words = [
        int.from_bytes(padded[i : i + 4], "little", signed=True) for i in range(0, len(padded), 4)
    ]
    lanes = [
        (len(data) + sum(x * (w | 1) for x, w in zip(words, splitmix64(seed), strict=False))) & MASK
        for seed in (0, 1)
    ]
    return f"{lanes[0]:016x}{lanes[1]:016x}"


def compute(data):
    return wsum64(torch.tensor(list(data), dtype=torch.uint8))


def test_the_reference_starts_with_the_published_number():
    assert next(splitmix64(0)) == 0xE220A8397B1DCDAF


@pytest.mark.parametrize(("data", "expected"), VECTORS.items(), ids=[len(k) for k in VECTORS])
def test_vectors(data, expected):
    assert compute(data) == expected
    assert reference(data) == expected


def test_the_docstring_shows_the_same_vectors():
    shown = [line.split()[-1] for line in module.__doc__.splitlines() if line.startswith("    b")]
    assert shown == list(VECTORS.values())[:4]


@given(st.binary(max_size=300))
@settings(deadline=None)
def test_wsum64_equals_its_definition(data):
    assert compute(data) == reference(data)


@given(st.binary(min_size=1, max_size=2000), st.integers(1, 16), st.integers(0, 7))
@settings(deadline=None)
def test_chunks_and_alignment_do_not_matter(data, words_per_chunk, offset):
    memory = torch.zeros(len(data) + offset, dtype=torch.uint8)
    memory[offset:] = torch.tensor(list(data), dtype=torch.uint8)
    total = WeightedSum()
    for part in torch.split(memory[offset:], 4 * words_per_chunk):
        total.update(part)
    assert total.hexdigest() == reference(data)


def test_unaligned_memory_of_foreign_origin():
    buffer = bytearray(b"?" + bytes(range(100)))
    data = torch.frombuffer(buffer, dtype=torch.uint8, offset=1)
    assert wsum64(data) == reference(bytes(range(100)))
    # Aligned again, but not where torch believes its memory to begin.
    assert wsum64(data[3:99]) == reference(bytes(range(3, 99)))


def test_the_cpu_is_worked_on_in_bounded_chunks(monkeypatch):
    sizes = []
    update = WeightedSum.update

    def spy(self, piece):
        sizes.append(piece.numel())
        update(self, piece)

    monkeypatch.setattr(WeightedSum, "update", spy)
    wsum64(torch.zeros(module.CHUNK_NBYTES * 2 + 3, dtype=torch.uint8))
    assert sizes == [module.CHUNK_NBYTES, module.CHUNK_NBYTES, 3]


def test_bytes_of_the_host_are_worked_on_there_whatever_the_default_device_is():
    with torch.device("meta"):
        total = WeightedSum()
        total.update(memoryview(bytearray(b"abc")))
        assert total.hexdigest() == VECTORS[b"abc"]


@pytest.mark.gpu
def test_a_device_gives_the_same_digits():
    data = torch.randint(0, 256, (module.DEVICE_CHUNK_NBYTES + 4099,), dtype=torch.uint8)
    assert wsum64(data.cuda()) == wsum64(data)
