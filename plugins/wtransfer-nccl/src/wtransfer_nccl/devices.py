"""Choice of this process's device, and the report of what is missing where none can be used."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from wtransfer.errors import GroupError, StagingMemoryError
from wtransfer.transport.memory import require_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

DEVICE_VARIABLE = "WTRANSFER_NCCL_DEVICE"
"""Environment variable that names a worker's device, such as ``cuda:1``."""
LOCAL_RANK_VARIABLE = "LOCAL_RANK"
"""Environment variable that launchers set to the number of a process on its host."""

cuda: Any = torch.cuda  # of which torch leaves much untyped


class Lane:
    """A device, and a private stream on it; on the CPU, which has none, just the device.

    The engine's copies, digests and broadcasts run beside the work of the trainer and the model.

    Args:
        device: With a number, if it is CUDA's.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = cuda.Stream(device) if device.type == "cuda" else None

    @property
    def on_cuda(self) -> bool:
        """True if the device is a GPU."""
        return self._stream is not None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Let this thread's work go to the device, on the private stream."""
        if self._stream is None:
            yield
            return
        with cuda.device(self.device), cuda.stream(self._stream):
            yield

    def settle(self) -> None:
        """Wait until all work begun on the device has ended, on any stream.

        The work that follows may read what others wrote, and write where others have read, on
        streams that are unknown here.
        """
        if self._stream is not None:
            cuda.synchronize(self.device)

    def finish(self) -> None:
        """Wait until all work on the private stream has ended."""
        if self._stream is not None:
            self._stream.synchronize()

    def require_room(self, nbytes: int, what: str) -> None:
        """Raise unless the device has room.

        Args:
            nbytes: Bytes needed.
            what: Purpose of the bytes, to start the sentence.

        Raises:
            StagingMemoryError: With both numbers.
        """
        if self._stream is None:
            require_memory(nbytes, what)
            return
        free, total = cuda.mem_get_info(self.device)
        # Memory that torch keeps in its cache is usable for this as well.
        free += cuda.memory_reserved(self.device) - cuda.memory_allocated(self.device)
        if nbytes > free:
            raise StagingMemoryError(
                f"{what} needs {nbytes:,} bytes of {self.device}, {free:,} of its {total:,} are "
                "free; free memory there, or stage in host memory (-o atomic=pinned)"
            )


def require_nccl() -> None:
    """Raise unless NCCL can be used here.

    Raises:
        GroupError: NCCL cannot be used; everything that is missing is named.
    """
    missing = []
    if not torch.distributed.is_available():
        missing.append("this torch was built without torch.distributed")
    elif not torch.distributed.is_nccl_available():
        missing.append("this torch has no NCCL: torch.distributed.is_nccl_available() is False")
    if not torch.cuda.is_available():
        missing.append("it needs a CUDA device: torch.cuda.is_available() is False")
    if missing:
        raise GroupError(
            f"engine 'nccl' cannot be used here with torch {torch.__version__}: "
            f"{'; '.join(missing)}; install a CUDA build of torch on a machine with a GPU, use "
            "engine 'gloo' or 'shm', or rehearse with -o communicator=gloo"
        )


def trainer_lane(communicator: str, device: str) -> Lane:
    """Return the trainer's lane.

    Args:
        communicator: ``nccl`` or ``gloo``.
        device: The option.

    Raises:
        GroupError: There is no such device, or no NCCL.
    """
    return _lane(communicator, device, default=0)


def worker_lane(communicator: str, rank: int) -> Lane:
    """Return a worker's lane: as the environment says, else by its rank in its instance.

    Args:
        communicator: ``nccl`` or ``gloo``.
        rank: Rank within the instance.

    Raises:
        GroupError: There is no such device, or no NCCL.
    """
    return _lane(communicator, os.environ.get(DEVICE_VARIABLE, "cuda"), default=rank)


def _lane(communicator: str, device: str, default: int) -> Lane:
    if communicator != "nccl":
        return Lane(torch.device("cpu"))
    require_nccl()
    return Lane(_cuda_device(device, default, torch.cuda.device_count()))


def _cuda_device(text: str, default: int, num_devices: int) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise GroupError(f"{text!r} is no device: {error}") from error
    if device.type != "cuda":
        raise GroupError(f"device is {text!r}, NCCL needs 'cuda' or 'cuda:NUMBER'")
    index = device.index if ":" in text else None
    if index is None:
        # A process that sees only its own device takes that one, whatever its rank.
        local_rank = os.environ.get(LOCAL_RANK_VARIABLE, str(default))
        if not local_rank.isdecimal():
            raise GroupError(f"{LOCAL_RANK_VARIABLE} is {local_rank!r}, expected a number")
        index = int(local_rank) % num_devices
    if index >= num_devices:
        raise GroupError(f"there is no device {text!r}: this process sees {num_devices}")
    return torch.device("cuda", index)
