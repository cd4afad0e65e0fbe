"""Tensors as bytes and bytes as tensors, without copying either way.

The wire knows dtypes by name. Names are looked up in a table that is built here, once, from
`wtransfer.dtypes.DTYPES`; a peer's word never reaches ``getattr``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from wtransfer.dtypes import DTYPES
from wtransfer.errors import ManifestError, SourceError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    ByteArray: TypeAlias = npt.NDArray[np.uint8]
    """One-dimensional uint8 array."""

# Older torch releases lack some of the dtypes; such dtypes are refused by name there.
_BY_NAME: dict[str, torch.dtype] = {
    name: dtype for name in DTYPES if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
_BY_DTYPE: dict[torch.dtype, str] = {dtype: name for name, dtype in _BY_NAME.items()}

PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types with torch's own behaviour; a subclass may override any of it."""


def own_memory(nbytes: int) -> ByteArray:
    """Return memory of this process that begins as the memory of tensors does, at a whole line.

    numpy's own begins 16 bytes into one. Copying pieces of a tensor to there takes ten times as
    long on some processors (AMD's of the third generation, for one).
    """
    memory: ByteArray = torch.empty(nbytes, dtype=torch.uint8, device="cpu").numpy()
    return memory


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a wire name.

    Args:
        name: Key of `wtransfer.dtypes.DTYPES`.

    Raises:
        ManifestError: The name is not in the table, or this torch lacks the dtype.
    """
    dtype = _BY_NAME.get(name)
    if dtype is None:
        reason = f"torch {torch.__version__} lacks it" if name in DTYPES else "no such dtype"
        raise ManifestError(
            f"dtype {name[:80]!r} cannot be used here: {reason}; there are {', '.join(_BY_NAME)}"
        )
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return the wire name of a torch dtype.

    Raises:
        ManifestError: The dtype does not travel (quantised or sub-byte ones, ``complex32``).
    """
    name = _BY_DTYPE.get(dtype)
    if name is None:
        raise ManifestError(
            f"tensors of {dtype} cannot be sent; the dtypes that can are {', '.join(_BY_NAME)}"
        )
    return name


def lacks_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's storage ends before its last element: a read would overrun it.

    Cost: about 0.5 us.
    """
    numel = tensor.numel()
    if tensor.layout is not torch.strided or tensor.is_meta or numel == 0:
        return False
    if type(tensor) not in PLAIN_TYPES and hasattr(tensor, "full_tensor"):
        return False
    if not tensor.is_contiguous():
        dims = zip(tensor.shape, tensor.stride(), strict=True)
        numel = 1 + sum((size - 1) * stride for size, stride in dims)
    end = tensor.storage_offset() + numel
    return end * tensor.itemsize > tensor.untyped_storage().nbytes()


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor detached, contiguous and without pending operations, on its device.

    A tensor with a pending conjugation or negation holds other bytes than its values.

    Cost: nothing for a contiguous tensor, else one copy of it.
    """
    is_plain = type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided
    if is_plain and tensor.dtype is torch.bool:
        # As bytes: torch turns every byte but 0 into 1.
        return tensor.detach().view(torch.uint8).contiguous().view(torch.bool)
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def flat_address(tensor: torch.Tensor) -> int | None:
    """Return the host address of a tensor's bytes; None: not in host memory, or not in C order.

    Cost: about 0.5 us.
    """
    if (
        type(tensor) in PLAIN_TYPES
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    ):
        # 0 for a tensor without elements, or without memory.
        return tensor.data_ptr() or None
    return None


def byte_view(tensor: torch.Tensor) -> ByteArray:
    """Return a tensor's memory as bytes, without a copy.

    Args:
        tensor: Dense, contiguous, on the CPU; any dtype, any rank, also empty.

    Returns:
        uint8 array of shape ``(tensor.nbytes,)`` that shares and keeps alive the memory.

    Raises:
        SourceError: The tensor's memory cannot be viewed (strided, sparse, on a device, meta).

    Cost: about 2.5 us, whatever the size.
    """
    try:
        view: ByteArray = tensor.detach().view(-1).view(torch.uint8).numpy()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise SourceError(
            f"a tensor of {tensor.dtype}, shape {tuple(tensor.shape)}, layout {tensor.layout} on "
            f"device {tensor.device} has no byte view; pass `plain(tensor.cpu())`"
        ) from error
    return view
