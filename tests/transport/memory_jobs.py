"""What the children of the memory tests run, each under limits of its own."""

import contextlib
import os
import resource
from pathlib import Path

from wtransfer.errors import DescriptorLimitError, StagingMemoryError
from wtransfer.transport import memory

NBYTES = 64 << 20


@contextlib.contextmanager
def limited(kind, value):
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def descriptors():
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


def address_space():
    return int(Path("/proc/self/statm").read_text().split()[0]) * memory.PAGE_NBYTES


def raises(expected, call):
    try:
        call()
    except expected:
        return True
    return False


def too_little_address_space():
    segment = memory.Segment(NBYTES)
    with limited(resource.RLIMIT_AS, address_space() + NBYTES // 2):
        assert 0 <= memory.available_memory() <= NBYTES // 2
        assert raises(StagingMemoryError, lambda: memory.Segment(NBYTES))
        assert raises(StagingMemoryError, lambda: memory.map_private(segment.fd, NBYTES))
    assert len(memory.map_private(segment.fd, NBYTES)) == NBYTES
    segment.close()


def too_few_descriptors():
    segment = memory.Segment(4096)
    before = descriptors()
    with limited(resource.RLIMIT_NOFILE, 64):
        taken = []
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        assert raises(DescriptorLimitError, lambda: memory.Segment(4096))
        # A mapping takes none, and was given back whatever the refused segment had taken.
        assert len(memory.map_private(segment.fd, 4096)) == 4096
        os.close(taken.pop())
        # Nor does a segment take more than its own.
        memory.Segment(4096).close()
        taken.append(os.open("/dev/null", os.O_RDONLY))
        for fd in taken:
            os.close(fd)
    assert descriptors() == before
