r"""The digest ``wsum64``: the same 32 digits for the same bytes on every device.

Definition. Let ``n`` be the number of bytes and ``x[i]`` the bytes, padded with zeros to a multiple
of 4, read as little-endian int32 words and sign-extended. Let ``w[s][i]`` be the i-th output
(0-based) of the splitmix64 stream seeded with ``s``, with the lowest bit set. Then ::

    lane[s] = (n + sum over i of x[i] * w[s][i]) mod 2**64        for s in 0, 1
    digest  = lane[0] as 16 hexadecimal digits, then lane[1]

The first output of splitmix64 seeded with 0 is ``0xE220A8397B1DCDAF``. Odd weights make every
single changed word show; distinct ones make order show; 32-bit words keep sign bits off the top of
the product, where pairs of flips would cancel. A sum has no order: any device adds as it likes.

Test vectors ::

    b""                    00000000000000000000000000000000
    b"\0"                  00000000000000010000000000000001
    b"abc"                 3d005b6f99b4ed529ce8eefcb00a0724
    bytes(range(256))      35e09b5613261a20a30a79d4053b1120

Source: splitmix64 is by Steele, Lea and Flood (OOPSLA 2014) and Vigna.
"""

from __future__ import annotations

import torch

CHUNK_NBYTES = 256 * 1024
"""Bytes worked on at a time on the CPU: the temporaries stay in the cache."""
DEVICE_CHUNK_NBYTES = 4 * 1024 * 1024
"""Bytes worked on at a time elsewhere: enough to hide a launch; temporaries take 16 MiB."""

_WORD_NBYTES = 4
_NUM_LANES = 2
_HOST = torch.device("cpu")


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


class WeightedSum:
    """A ``wsum64`` under way, fed in pieces.

    Args:
        device: Device of the pieces; only the two sums are ever copied from there.
    """

    def __init__(self, device: torch.device = _HOST) -> None:
        self._lanes = torch.zeros(_NUM_LANES, dtype=torch.int64, device=device)
        self._nbytes = 0

    def update(self, piece: torch.Tensor | memoryview) -> None:
        """Add the next bytes.

        Args:
            piece: uint8, shape ``(n,)``, contiguous; n is a multiple of 4 in all but the last.
                Memory must be writable, since torch requires it.
        """
        if not isinstance(piece, torch.Tensor):
            piece = torch.frombuffer(piece, dtype=torch.uint8)
        assert self._nbytes % _WORD_NBYTES == 0, "only the last piece may end within a word"
        words = _words(piece)
        start = self._nbytes // _WORD_NBYTES
        for seed in range(_NUM_LANES):
            # int64 wraps around in torch, which is arithmetic modulo 2**64.
            self._lanes[seed] += _weights(seed, start, words).mul_(words).sum()
        self._nbytes += piece.numel()

    def hexdigest(self) -> str:
        """Return the 32 digits for the bytes so far."""
        lanes = [(lane + self._nbytes) % 2**64 for lane in self._lanes.tolist()]
        return "".join(f"{lane:016x}" for lane in lanes)


def wsum64(data: torch.Tensor) -> str:
    """Return the digest of bytes, computed on their device.

    Args:
        data: uint8, shape ``(n,)``, contiguous, on any device. Pinned host memory is read by the
            current CUDA device, a piece at a time: many times faster than on the CPU.

    Returns:
        32 hexadecimal digits.

    Cost: about 30 passes of 64-bit arithmetic, twice; memory for one chunk.
    """
    device = _worked_on_by(data)
    total = WeightedSum(device)
    chunk = CHUNK_NBYTES if device.type == "cpu" else DEVICE_CHUNK_NBYTES
    for start in range(0, data.numel(), chunk):
        total.update(data[start : start + chunk].to(device, non_blocking=True))
    return total.hexdigest()


def _worked_on_by(data: torch.Tensor) -> torch.device:
    # A process that has not touched CUDA is not made to: it can have no pinned memory.
    if data.is_cpu and torch.cuda.is_initialized() and data.is_pinned():  # type: ignore[no-untyped-call]
        return torch.device("cuda", torch.cuda.current_device())
    return data.device


def _words(piece: torch.Tensor) -> torch.Tensor:
    missing = -piece.numel() % _WORD_NBYTES
    aligned = piece.data_ptr() % _WORD_NBYTES == 0 and piece.storage_offset() % _WORD_NBYTES == 0
    if missing or not aligned:
        # A fresh allocation is aligned; and bounded, since pieces are.
        padded = torch.zeros(piece.numel() + missing, dtype=torch.uint8, device=piece.device)
        padded[: piece.numel()] = piece
        piece = padded
    return piece.view(torch.int32)


def _weights(seed: int, start: int, words: torch.Tensor) -> torch.Tensor:
    """Return outputs ``start ...`` of the stream, odd, one for each word."""
    stop = start + words.numel()
    z = torch.arange(start + 1, stop + 1, dtype=torch.int64, device=words.device)
    z.mul_(_GAMMA).add_(seed)
    _xor_shifted(z, 30).mul_(_MIX_1)
    _xor_shifted(z, 27).mul_(_MIX_2)
    return _xor_shifted(z, 31).bitwise_or_(1)


def _xor_shifted(z: torch.Tensor, num_bits: int) -> torch.Tensor:
    # torch shifts arithmetically; the mask takes away the copies of the sign bit.
    return z.bitwise_xor_((z >> num_bits).bitwise_and_(2 ** (64 - num_bits) - 1))
