"""The machine that numbers belong to: without it they mean nothing."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """Where and with what a run was made."""

    cpu: str
    """Model of the processor."""
    num_cores: int
    """Cores that this process may use."""
    memory_nbytes: int
    """Memory of the machine."""
    kernel: str
    """Kernel release."""
    python: str
    """Version."""
    torch: str
    """Version."""
    wtransfer: str
    """Version."""
    load: float
    """Load average of the last minute, before the run; high: others worked here too."""

    @classmethod
    def here(cls) -> Machine:
        """Return this one; torch is not imported."""
        return cls(
            cpu=_cpu(),
            num_cores=len(os.sched_getaffinity(0)),
            memory_nbytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            kernel=f"{platform.system()} {platform.release()}",
            python=platform.python_version(),
            torch=metadata.version("torch"),
            wtransfer=metadata.version("wtransfer"),
            load=os.getloadavg()[0],
        )

    def __str__(self) -> str:
        gib = self.memory_nbytes / (1 << 30)
        return (
            f"{self.cpu}, {self.num_cores} cores, {gib:.0f} GiB, {self.kernel}; Python "
            f"{self.python}, torch {self.torch}, wtransfer {self.wtransfer}; load {self.load:.2f}"
        )


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()
