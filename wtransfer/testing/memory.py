"""The smallest engine: it moves tensors within one process, and knows the seed's contract only.

A fake in the sense that no other process can use it, and otherwise real. Tests run faults against
it that a faster engine could hide; authors may read it as an example.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from wtransfer.engines.interface import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

if TYPE_CHECKING:
    import torch

    from wtransfer.engines.interface import LoadWeights

_SHELVES: dict[str, dict[str, torch.Tensor]] = {}


@dataclass
class MemoryInitInfo(WeightTransferInitInfo):
    """Where the trainer puts tensors."""

    shelf: str
    """Its name; known in one process only."""


@dataclass
class MemoryUpdateInfo(WeightTransferUpdateInfo):
    """What lies there."""

    names: list[str] = field(default_factory=list)
    """Names of the tensors."""


class MemoryTrainerEngine(TrainerWeightTransferEngine[TrainerInitInfo]):
    """Puts copies of all tensors on a shelf."""

    init_info_cls = TrainerInitInfo

    def __init__(self, init_info: TrainerInitInfo, **arguments: Any) -> None:
        super().__init__(init_info, **arguments)
        self._shelf = secrets.token_hex(8)
        _SHELVES[self._shelf] = {}

    def worker_init_info(self) -> dict[str, Any]:
        """Return the shelf's name."""
        return {"shelf": self._shelf}

    def send_weights(self) -> None:
        """Fill the shelf and tell the workers."""
        assert self.source is not None
        tensors = {name: tensor.clone() for name, tensor in self.source.iter_full()}
        _SHELVES[self._shelf] = tensors
        self.client.update_weights({"names": list(tensors)})

    def shutdown(self) -> None:
        """Clear the shelf."""
        _SHELVES.pop(self._shelf, None)


class MemoryEngine(WeightTransferEngine[MemoryInitInfo, MemoryUpdateInfo]):
    """Takes tensors from the shelf, one after the other through one buffer.

    The buffer is overwritten as soon as ``load_weights`` has returned, as real transports do.
    """

    init_info_cls = MemoryInitInfo
    update_info_cls = MemoryUpdateInfo
    trainer_cls: ClassVar[type] = MemoryTrainerEngine

    def init_transfer_engine(self, init_info: MemoryInitInfo) -> None:
        """Remember the shelf."""
        self._shelf = init_info.shelf

    def receive_weights(self, update_info: MemoryUpdateInfo, load_weights: LoadWeights) -> None:
        """Hand out each tensor in the buffer."""
        import torch

        tensors = _SHELVES[self._shelf]
        largest = max((tensors[name].nbytes for name in update_info.names), default=0)
        buffer = torch.empty(largest, dtype=torch.uint8, device="cpu")
        for name in update_info.names:
            tensor = tensors[name]
            view = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            load_weights([(name, view.copy_(tensor))])
            buffer.fill_(0xFF)

    def shutdown(self) -> None:
        """Hold nothing: there is nothing to release."""
