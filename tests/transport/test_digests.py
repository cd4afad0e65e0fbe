import ctypes

import numpy as np
import pytest
import torch
import xxhash

from wtransfer.dtypes import DTYPES
from wtransfer.errors import ManifestError
from wtransfer.manifest import DIGEST_LENGTH
from wtransfer.transport.digests import PIECE_NBYTES, Digested, copy_digest, digest
from wtransfer.transport.wsum64 import wsum64

ALGORITHMS = ["xxh3-128", "wsum64"]
NAMES = [name for name in DTYPES if hasattr(torch, name)]
SIZES = [0, 1, 5, PIECE_NBYTES - 1, PIECE_NBYTES, PIECE_NBYTES + 1, 3 * PIECE_NBYTES + 7]


def some_bytes(nbytes):
    return torch.from_numpy(np.random.default_rng(nbytes).integers(0, 256, nbytes, dtype=np.uint8))


def expected_digest(data, algorithm):
    if algorithm == "wsum64":
        return wsum64(data)
    return xxhash.xxh3_128_hexdigest(data.numpy().tobytes())


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("nbytes", SIZES)
def test_copying_digests_the_bytes_and_copies_them(nbytes, algorithm):
    src = some_bytes(nbytes)
    memory = np.full(nbytes + 128, 0xAA, dtype=np.uint8)
    done = copy_digest(memory[64 : 64 + nbytes], src, algorithm)
    assert done == Digested(expected_digest(src, algorithm), 0)
    assert len(done.hexdigest) == DIGEST_LENGTH
    assert memory[64 : 64 + nbytes].tobytes() == src.numpy().tobytes()
    assert set(memory[:64]) | set(memory[64 + nbytes :]) == {0xAA}
    assert digest(src, algorithm) == done.hexdigest


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("screen", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_every_dtype(name, screen, algorithm):
    raw = some_bytes(48 * DTYPES[name])
    if name == "bool":
        raw %= 2
    tensor = raw.view(getattr(torch, name)).reshape(3, 16)
    dst = np.zeros(raw.numel(), dtype=np.uint8)
    assert copy_digest(dst, tensor, algorithm, screen).hexdigest == digest(raw, algorithm)
    assert dst.tobytes() == raw.numpy().tobytes()
    assert digest(tensor.reshape(16, 3), algorithm) == digest(raw, algorithm)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).reshape(4, 6).T,
        torch.arange(400_000.0)[::3],
        torch.zeros(2, 0, 3).transpose(0, 2),
        torch.tensor(2.5),
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        torch.nn.Parameter(torch.ones(3, 3)),
        torch.ones(3).expand(4, 3),
    ],
    ids=["transposed", "strided", "empty", "scalar", "conj", "neg", "parameter", "expanded"],
)
def test_values_count_not_how_they_lie(tensor, algorithm):
    resolved = tensor.detach().resolve_conj().resolve_neg().contiguous()
    raw = resolved.reshape(-1).view(torch.uint8)
    dst = np.zeros(raw.numel(), dtype=np.uint8)
    assert copy_digest(dst, tensor, algorithm).hexdigest == digest(raw, algorithm)
    assert digest(tensor, algorithm) == digest(raw, algorithm)
    assert dst.tobytes() == raw.numpy().tobytes()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("numel", [64, PIECE_NBYTES])
def test_nonfinite_elements_are_counted_when_asked_for(numel, strided, algorithm):
    src = torch.zeros(2 * numel)[::2] if strided else torch.zeros(numel)
    src[0] = src[numel - 1] = float("nan")
    src[numel // 2] = float("-inf")
    dst = np.zeros(src.nbytes, dtype=np.uint8)
    assert copy_digest(dst, src, algorithm, screen=True).nonfinite == 3
    assert copy_digest(dst, src, algorithm, screen=False).nonfinite == 0


def test_copy_digest_hashes_the_bytes_that_were_written(monkeypatch):
    """A source that changes under the copy gives a digest of the bytes that travel."""
    src = torch.zeros(4 * PIECE_NBYTES, dtype=torch.uint8)
    dst = np.zeros(src.numel(), dtype=np.uint8)
    memmove = ctypes.memmove

    def copy_and_change_the_source(*args):
        memmove(*args)
        src.add_(1)

    monkeypatch.setattr(ctypes, "memmove", copy_and_change_the_source)
    done = copy_digest(dst, src)
    assert done.hexdigest == xxhash.xxh3_128_hexdigest(dst.tobytes())
    assert set(dst) == {0, 1, 2, 3}


@pytest.mark.parametrize("nbytes", [0, 1, 15, 17])
def test_sizes_must_agree(nbytes):
    dst = np.zeros(nbytes, dtype=np.uint8)
    with pytest.raises(ValueError, match=f"of 16 bytes into {nbytes} bytes"):
        copy_digest(dst, torch.zeros(4))
    assert not dst.any()


@pytest.mark.parametrize("algorithm", ["md5", "", "XXH3-128"])
def test_unknown_algorithms_are_refused(algorithm):
    with pytest.raises(ManifestError, match=r"there are 'xxh3-128' and 'wsum64'"):
        digest(torch.zeros(4), algorithm)
    with pytest.raises(ManifestError, match=r"there are 'xxh3-128' and 'wsum64'"):
        copy_digest(np.zeros(16, dtype=np.uint8), torch.zeros(4), algorithm)


def test_bytes_of_a_strided_bool_tensor_are_digested_as_they_are():
    odd = torch.tensor([[0, 1], [2, 255]], dtype=torch.uint8).view(torch.bool)
    assert digest(odd.t()) == xxhash.xxh3_128_hexdigest(bytes([0, 2, 1, 255]))
