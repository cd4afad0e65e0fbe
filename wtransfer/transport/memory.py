"""Anonymous shared memory: made and pre-faulted by one process, mapped privately by others.

A segment has no name in any file system, so nothing is left behind however its processes end. A
process reaches it only through the descriptor (`wtransfer.transport.lease`).

Fresh pages cost ten times a copy. Pages are therefore touched once, ahead of use: by the writer
with MADV_POPULATE_WRITE when the segment is made, by a reader with MADV_POPULATE_READ as it goes
along. MAP_POPULATE is never used: on a private writable mapping it copies every page, which doubles
the memory and freezes the mapping at the segment's content of that moment.

Segments consist of huge pages where the kernel has them to give (MADV_COLLAPSE, Linux 6.1): a copy
is a tenth faster then, and entering a GiB into a reader's page table, or taking it out, costs 1 ms
and not 60.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import resource
import select
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from wtransfer.calls import Changed, forget_frames, start_call
from wtransfer.errors import (
    ClosedError,
    DescriptorLimitError,
    StagingMemoryError,
    TruncatedError,
    WTransferError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from wtransfer.transport.tensors import ByteArray

PAGE_NBYTES = mmap.PAGESIZE
"""Size of a page."""
ADVISE_NBYTES = 8 * 1024 * 1024
"""Bytes populated by one system call; it holds the address space's lock meanwhile."""
HUGE_PAGE_NBYTES = 2 * 1024 * 1024
"""Size of a huge page, and alignment of mappings that are at least as large."""

# Not in the mmap module yet; Linux 5.14, the last one 6.1.
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25

_COLLAPSE_S = 0.25
"""Longest time spent on huge pages, in seconds; they save 0.1 s per GiB and round. On a machine
short of them, or of memory that it has ever touched, small ones have to do."""

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_madvise.restype = ctypes.c_int

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


class Segment:
    """Shared memory of fixed size that this process writes and others map.

    Args:
        nbytes: Size; also 0.
        on_step: Called again and again while the memory is taken, which may last, with the number
            of bytes that are there; ends that by raising.
        populated: Whether to take the memory now. If not, `populate` must follow for every range
            before it is written to (`PopulatingAhead`): a write that finds no memory left is
            SIGBUS.

    Raises:
        StagingMemoryError: There is not that much memory.
        DescriptorLimitError: No descriptor is left.

    Cost: 0.5 s per GiB and more, once: reuse segments.
    """

    def __init__(
        self,
        nbytes: int,
        on_step: Callable[[int], object] | None = None,
        *,
        populated: bool = True,
    ) -> None:
        require_memory(nbytes, "a shared segment")
        with os_errors(f"making a shared segment of {nbytes:,} bytes"):
            self._own(_sealed_memory(nbytes), nbytes)
        if populated:
            self.populate(0, nbytes, on_step)

    @classmethod
    def of(cls, fd: int, nbytes: int) -> Segment:
        """Map a segment that another process made, so that both write to the same memory.

        Args:
            fd: Descriptor of the segment; belongs to the result from here on, also after a failure.
            nbytes: Size of the segment.

        Raises:
            TruncatedError: The segment is smaller; touching memory past its end would be SIGBUS.
            StagingMemoryError: There is no address space left.
        """
        segment = cls.__new__(cls)
        with os_errors(f"mapping {nbytes:,} bytes"):
            segment._own(fd, nbytes)  # noqa: SLF001  # its own constructor
        return segment

    def _own(self, fd: int, nbytes: int) -> None:
        self.nbytes = nbytes
        """Size in bytes."""
        # Also closes the descriptor of a segment that is dropped, here below or later.
        self._held: select.epoll | None = closed_when_dropped(fd)
        _require_size(fd, nbytes)
        self._buffer: ByteArray | None = map_file(fd, max(nbytes, 1), private=False)[:nbytes]

    def populate(
        self, start: int, length: int, on_step: Callable[[int], object] | None = None
    ) -> None:
        """Take the memory of a range, or enter it into the page table if it is there.

        Args:
            start: First byte.
            length: Number of bytes.
            on_step: Called again and again with the number of bytes that are there; ends the call
                by raising.

        Raises:
            StagingMemoryError: There is not that much memory.
            ClosedError: The segment was closed.
        """
        part = self.buffer[start : start + length]
        with os_errors(f"taking {length:,} bytes of shared memory"):
            _populate(part, 0, length, _MADV_POPULATE_WRITE, on_step)

    @property
    def fd(self) -> int:
        """Descriptor to hand over; it stays the segment's own.

        Raises:
            ClosedError: The segment was closed.
        """
        if (held := self._held) is None:
            raise ClosedError("this shared segment was closed; make another one")
        return held.fileno()

    @property
    def buffer(self) -> ByteArray:
        """The memory, writable, shape ``(nbytes,)``; views of it outlive `close`.

        Raises:
            ClosedError: The segment was closed.
        """
        if self._buffer is None:
            raise ClosedError("this shared segment was closed; make another one")
        return self._buffer

    def close(self) -> None:
        """Release descriptor and mapping; the memory is freed with its last user anywhere."""
        self._buffer = self._held = None


class PopulatingAhead:
    """Takes a segment's memory on a thread of its own, ahead of the writes to it.

    Args:
        segment: Made with ``populated=False``.
        on_step: Called again and again on that thread; ends it by raising.
    """

    def __init__(self, segment: Segment, on_step: Callable[[], object]) -> None:
        self.failed = False
        """True if not all of the memory was taken: the segment must not be written to."""
        self._segment = segment
        self._on_step = on_step
        self._changed = Changed()
        self._nbytes = 0
        self._error: BaseException | None = None
        start_call(self._run, "wtransfer-populate")

    def wait(self, nbytes: int) -> None:
        """Wait until the first `nbytes` may be written to.

        Raises:
            StagingMemoryError: There is not that much memory.
            BaseException: As `on_step`.
        """
        self._changed.wait_for(lambda: self._nbytes >= nbytes or self.failed)
        if self._nbytes < nbytes and self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._segment.populate(0, self._segment.nbytes, self._note)
        except BaseException as error:
            # Without frames: they hold the memory, also of a segment that is closed by now.
            forget_frames(error)
            self._error, self.failed = error.with_traceback(None), True
        self._changed.notify_all()

    def _note(self, nbytes: int) -> None:
        # Raises for a segment that was closed: nothing will be written to it.
        _ = self._segment.buffer
        self._on_step()
        self._nbytes = nbytes
        self._changed.notify_all()


def _sealed_memory(nbytes: int) -> int:
    fd = os.memfd_create("wtransfer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, max(nbytes, 1))
        # Sealed: no process can truncate it under a reader, which would die of SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(fd)
        raise
    return fd


def closed_when_dropped(fd: int) -> select.epoll:
    """Return an object with whose end a descriptor of any kind is closed.

    By C alone: a finaliser in Python is a place for signal handlers, whose exception is lost there,
    with the descriptor. Of Python's own classes of C this one asks nothing of the descriptor, and
    closes it without a warning.
    """
    return select.epoll.fromfd(fd)


class _Mapping(mmap.mmap):
    """Memory that keeps an object for as long as it is mapped."""

    kept: object = None


def map_private(fd: int, nbytes: int, kept: object = None) -> ByteArray:
    """Map a segment copy-on-write: writes stay in this process.

    Pages that were never written here show the segment's *present* content: a process that maps a
    segment needs a lease on it, so that its owner does not rewrite it.

    Args:
        fd: Descriptor; may be closed afterwards.
        nbytes: Size to map.
        kept: An object to keep for as long as the mapping.

    Returns:
        uint8 array, not populated. The mapping ends with it and all views made from it.

    Raises:
        TruncatedError: The segment is smaller; reading past its end would be SIGBUS.
        StagingMemoryError: There is no address space left.
    """
    _require_size(fd, nbytes)
    with os_errors(f"mapping {nbytes:,} bytes"):
        return map_file(fd, max(nbytes, 1), private=True, kept=kept)


def _require_size(fd: int, nbytes: int) -> None:
    size = os.fstat(fd).st_size
    if size < nbytes:
        raise TruncatedError(f"a segment of {nbytes:,} bytes was announced, it has {size:,}")


def populate(mapping: ByteArray, start: int, length: int) -> None:
    """Enter a range's pages into the page table, for reading, so that no fault hits it later.

    Args:
        mapping: Result of `map_private`.
        start: First byte.
        length: Number of bytes.

    Raises:
        StagingMemoryError: The kernel cannot.

    Cost: about 60 ms per GiB, 1 ms for huge pages; other threads run meanwhile.
    """
    with os_errors(f"populating {length:,} bytes"):
        _populate(mapping, start, length, _MADV_POPULATE_READ)


def _populate(
    mapping: ByteArray,
    start: int,
    length: int,
    advice: int,
    on_step: Callable[[int], object] | None = None,
) -> None:
    end = min(start + length, mapping.size)
    collapse_s = _COLLAPSE_S if advice == _MADV_POPULATE_WRITE else 0.0
    for at in range(start - start % PAGE_NBYTES, end, ADVISE_NBYTES):
        stop = min(at + ADVISE_NBYTES, end)
        if collapse_s > 0:
            begun = time.monotonic()
            collapsed = _collapse(mapping[at:stop])
            collapse_s = collapse_s - (time.monotonic() - begun) if collapsed else 0.0
        # By ctypes, not mmap.madvise: that would hold the interpreter lock and stop serving.
        if _madvise(mapping.ctypes.data + at, stop - at, advice) != 0:
            if ctypes.get_errno() != errno.EINVAL:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            _touch(mapping[at:stop:PAGE_NBYTES], write=advice == _MADV_POPULATE_WRITE)
        if on_step is not None:
            on_step(stop - start)


def _collapse(part: ByteArray) -> bool:
    """Make shared memory consist of huge pages, bytes stay; return False if the kernel refuses."""
    nbytes = part.size - part.size % HUGE_PAGE_NBYTES
    # The kernel collapses a range only if it holds at least one small page.
    _touch(part[:nbytes:HUGE_PAGE_NBYTES], write=True)
    return not nbytes or _madvise(part.ctypes.data, nbytes, _MADV_COLLAPSE) == 0


def _touch(one_byte_per_page: ByteArray, *, write: bool) -> None:
    """Populate by hand, for kernels that do not know the advice."""
    if write:
        np.bitwise_or(one_byte_per_page, 0, out=one_byte_per_page)
    else:
        one_byte_per_page.max()


@contextlib.contextmanager
def os_errors(what: str) -> Iterator[None]:
    """Translate the kernel's errors for a lack of memory or descriptors.

    Args:
        what: The operation, to start the sentence.

    Raises:
        StagingMemoryError: No memory or address space.
        DescriptorLimitError: No descriptor.
    """
    try:
        yield
    except WTransferError:
        raise
    except MemoryError as error:
        raise StagingMemoryError(f"{what} failed: out of memory") from error
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise DescriptorLimitError(
                f"{what} failed: {error.strerror}; raise the limit (ulimit -n) or close files"
            ) from error
        if error.errno in (errno.ENOMEM, errno.ENOSPC, errno.EFAULT, errno.EFBIG):
            raise StagingMemoryError(f"{what} failed: {error.strerror}") from error
        raise


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of torch or the system means a shortage of memory."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOMEM, errno.ENOSPC)
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "alloc" in str(error) and "memory" in str(error)


def out_of_memory(nbytes: int | str, cause: BaseException) -> StagingMemoryError:
    """Return the error for a shortage of staging memory."""
    return StagingMemoryError(
        f"no memory to stage {nbytes} bytes: {cause}; free memory, or use an engine that stages "
        "once per host (shm)"
    )


# -- available memory -------------------------------------------------------------------------


def require_memory(nbytes: int, what: str) -> None:
    """Raise unless this process may still take that much memory.

    Args:
        nbytes: Bytes needed.
        what: Purpose of the bytes, to start the sentence.

    Raises:
        StagingMemoryError: With both numbers.
    """
    available = available_memory()
    if nbytes > available:
        raise StagingMemoryError(
            f"{what} needs {nbytes:,} bytes, {available:,} are available to this process; free "
            "memory, raise its limits or send less at a time"
        )


def available_memory() -> int:
    """Return the bytes that this process may still take, by the narrowest limit that holds for it.

    Counted are the machine (MemAvailable), the control groups (v2 and v1, every level; inactive
    file cache counts as free) and RLIMIT_AS.

    Raises:
        DescriptorLimitError: No descriptor is left to read the limits.

    Cost: about 0.2 ms.
    """
    with os_errors("finding out how much memory there is"):
        return max(0, min([_machine_free(), *_cgroups_free(), *_address_space_free()]))


def _machine_free() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise StagingMemoryError("/proc/meminfo has no MemAvailable; Linux 3.14 or later is needed")


def _address_space_free() -> Iterator[int]:
    soft, _hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        num_pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        yield soft - num_pages * PAGE_NBYTES


class _CgroupFiles(NamedTuple):
    limit: str
    usage: str
    inactive_cache: str

    def free(self, folder: Path) -> Iterator[int]:
        """Yield the bytes that one group still allows; nothing without a limit or such files."""
        with contextlib.suppress(OSError, ValueError):
            limit = int((folder / self.limit).read_text(encoding="ascii"))
            used = int((folder / self.usage).read_text(encoding="ascii"))
            stat = (folder / "memory.stat").read_text(encoding="ascii")
            counts = dict(line.split() for line in stat.splitlines())
            yield limit - used + int(counts.get(self.inactive_cache, 0))


_V2 = _CgroupFiles("memory.max", "memory.current", "inactive_file")
_V1 = _CgroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _cgroups_free(
    membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError):
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                yield from _levels_free(_V2, root, path)
            elif "memory" in controllers.split(","):
                yield from _levels_free(_V1, root / "memory", path)


def _levels_free(files: _CgroupFiles, root: Path, path: str) -> Iterator[int]:
    # In a container the path may be the host's and not exist; the root is the container's then.
    folder = root / path.lstrip("/")
    while folder.is_relative_to(root):
        yield from files.free(folder)
        folder = folder.parent


def map_file(fd: int, nbytes: int, *, private: bool, kept: object = None) -> ByteArray:
    """Map a file from its start, readable and writable, where huge pages fit.

    The ``mmap`` module maps wherever the kernel offers room, which for a file is any page. So an
    anonymous reservation is made with it, a little larger than needed, and the file is mapped over
    its part that agrees with the file to 2 MiB. The ``mmap`` object goes on owning the whole, and
    unmaps it when the last array, tensor or view that was made from it is gone.

    Args:
        fd: Descriptor; may be closed afterwards, and none is kept.
        nbytes: Size to map, at least 1 and at most the file's.
        private: Whether writes stay in this process (copy-on-write).
        kept: An object to keep for as long as the mapping.

    Returns:
        uint8 array of shape ``(nbytes,)``. Views made from it keep it, and it the mapping.

    Raises:
        OSError: The kernel cannot.
    """
    alignment = HUGE_PAGE_NBYTES if nbytes >= HUGE_PAGE_NBYTES else mmap.PAGESIZE
    prot = mmap.PROT_READ | mmap.PROT_WRITE
    owner = _Mapping(
        -1,
        nbytes + alignment - mmap.PAGESIZE,
        flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE,
        prot=prot,
    )
    owner.kept = kept
    offset = -np.frombuffer(owner, dtype=np.uint8).ctypes.data % alignment
    # Not a slice: slices of a slice would keep the owner, not the array that is returned here.
    array = np.frombuffer(owner, dtype=np.uint8, count=nbytes, offset=offset)
    flags = _MAP_FIXED | (mmap.MAP_PRIVATE if private else mmap.MAP_SHARED)
    if _mmap(array.ctypes.data, nbytes, prot, flags, fd, 0) == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return array
