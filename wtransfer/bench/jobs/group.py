"""A process group of the scene's own: gloo on loopback, met through a file without a name."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

if TYPE_CHECKING:
    from typing_extensions import Self

DEADLINE = timedelta(seconds=60)
"""How long any one step may take."""


# torch describes these to type checkers only in part.
_torch: Any = dist


def _options() -> Any:
    options = _torch.ProcessGroupGloo._Options()  # noqa: SLF001 - torch gives them no other name
    options._timeout = DEADLINE  # noqa: SLF001
    options._devices = [_torch.ProcessGroupGloo.create_device(hostname="127.0.0.1")]  # noqa: SLF001
    return options


class Group:
    """All processes of a scene; rank 0 sends.

    Args:
        store: File that all of them open.
        rank: Of this process.
        num_workers: Processes beside rank 0.
    """

    def __init__(self, store: str, rank: int, num_workers: int) -> None:
        self.rank = rank
        size = 1 + num_workers
        self._gloo = _torch.ProcessGroupGloo(_torch.FileStore(store, size), rank, size, _options())
        self._from_trainer = dist.BroadcastOptions()
        self._from_trainer.rootRank = 0

    @classmethod
    def of(cls, store: str, rank: int, num_workers: int) -> Self:
        """Return the group when all have come."""
        group = cls(store, rank, num_workers)
        group.meet()
        return group

    def broadcast(self, tensor: torch.Tensor) -> dist.Work:
        """Begin to bring rank 0's bytes to all; wait for it with `finish`."""
        work: dist.Work = self._gloo.broadcast([tensor], self._from_trainer)
        return work

    def finish(self, work: dist.Work) -> None:
        """Wait until a step is done."""
        work.wait(DEADLINE)

    def meet(self, *, good: bool = True) -> bool:
        """Wait for all; return whether it is good for everyone."""
        bad = torch.tensor([0 if good else 1], dtype=torch.int64)
        self.finish(self._gloo.allreduce([bad]))
        return int(bad[0]) == 0
