"""How the heads of the served model are divided among ranks, and their outputs joined."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from wtransfer.testing.mini_engine.shape import ServedShape
    from wtransfer.transport.communicator import Communicator


class Shards:
    """The part of one rank.

    Every rank has the whole weights, and computes and caches the keys and values of its own heads.

    Args:
        shape: Of the model.
        group: The ranks; None: there is one.

    Raises:
        ValueError: The key heads cannot be divided evenly.
    """

    def __init__(self, shape: ServedShape, group: Communicator | None = None) -> None:
        self._group = group
        self.rank = group.rank if group else 0
        """This rank."""
        self.size = group.size if group else 1
        """Number of ranks."""
        if shape.num_kv_heads % self.size:
            raise ValueError(
                f"{shape.num_kv_heads} key heads cannot be divided among {self.size} ranks"
            )
        count = shape.num_kv_heads // self.size
        self.heads = range(self.rank * count, (self.rank + 1) * count)
        """Key heads of this rank."""

    def join(self, part: torch.Tensor) -> torch.Tensor:
        """Return the parts of all ranks side by side, in order of rank.

        Args:
            part: ``(rows, this rank's columns)``; the same shape everywhere.
        """
        return torch.cat(self._exchange(part), dim=-1)

    def any(self, flag: bool) -> bool:
        """Return whether any rank says so: the same answer everywhere."""
        return any(bool(each) for each in self._exchange(torch.tensor([flag])))

    def _exchange(self, part: torch.Tensor) -> list[torch.Tensor]:
        if self._group is None:
            return [part]
        parts = [torch.empty_like(part) for _ in range(self.size)]
        parts[self.rank] = part.contiguous()
        # Begun all together, waited for together: ranks need not take turns.
        begun = [
            self._group.broadcast(each.view(-1).view(torch.uint8), root)
            for root, each in enumerate(parts)
        ]
        for each in begun:
            each.wait()
        return parts

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
            self._group = None
