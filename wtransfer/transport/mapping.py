"""Map descriptors where huge pages fit: at addresses that agree with the file to 2 MiB.

The ``mmap`` module maps wherever the kernel offers room, which for a file is any page. So an
anonymous reservation is made with it, a little larger than needed, and the file is mapped over its
aligned part. The ``mmap`` object goes on owning the whole, and unmaps it when the last array,
tensor or view that was made from it is gone.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from wtransfer.transport.tensors import ByteArray

HUGE_PAGE_NBYTES = 2 * 1024 * 1024
"""Size of a huge page, and alignment of whatever is at least as large."""

# The same number on every architecture that torch runs on; the mmap module names it since 3.13.
_MAP_NORESERVE = 0x4000
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value

_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_mmap.restype = ctypes.c_void_p


def map_file(fd: int, nbytes: int, *, private: bool) -> ByteArray:
    """Map a file from its start, readable and writable.

    Args:
        fd: Descriptor; may be closed afterwards, and none is kept.
        nbytes: Size to map, at least 1 and at most the file's.
        private: Whether what is written stays in this process (copy-on-write).

    Returns:
        uint8 array of shape ``(nbytes,)``. Whatever is made from it keeps it, and it the mapping.

    Raises:
        OSError: The kernel cannot.
    """
    alignment = HUGE_PAGE_NBYTES if nbytes >= HUGE_PAGE_NBYTES else mmap.PAGESIZE
    prot = mmap.PROT_READ | mmap.PROT_WRITE
    owner = mmap.mmap(
        -1,
        nbytes + alignment - mmap.PAGESIZE,
        flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE,
        prot=prot,
    )
    offset = -np.frombuffer(owner, dtype=np.uint8).ctypes.data % alignment
    # Not a slice: slices of a slice would keep the owner, and let go of what is returned here.
    array = np.frombuffer(owner, dtype=np.uint8, count=nbytes, offset=offset)
    flags = _MAP_FIXED | (mmap.MAP_PRIVATE if private else mmap.MAP_SHARED)
    if _mmap(array.ctypes.data, nbytes, prot, flags, fd, 0) == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return array
