"""How much memory a round takes, on the whole host, as the kernel counts it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from wtransfer.bench.jobs import tell
from wtransfer.bench.jobs.publishing import JOIN_S, WARM_UP_ROUNDS, publish_one
from wtransfer.bench.jobs.weights import make
from wtransfer.bench.sets import TensorSet
from wtransfer.deadline import Deadline
from wtransfer.weight_sync.trainer.publisher import Publisher
from wtransfer.weight_sync.trainer.source import StateDictSource

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch

_INTERVAL_S = 0.1
_NUM_EQUAL = 3
_LONGEST_S = 20.0
_NOISE = 0.005


class Footprint(NamedTuple):
    """Memory of several processes; what they share is counted once."""

    nbytes: int
    """All of it (Pss)."""
    shared_nbytes: int
    """Shared memory (Pss_Shmem)."""

    @classmethod
    def of(cls, pids: Iterable[int]) -> Footprint:
        """Return that of processes of this user."""
        each = [_sizes(pid) for pid in pids]
        return cls(sum(s["Pss"] for s in each), sum(s["Pss_Shmem"] for s in each))


def _sizes(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text("ascii").splitlines()[1:]
    return {
        name: int(rest.split()[0]) * 1024 for name, _, rest in (x.partition(":") for x in lines)
    }


def _are_alike(looks: Sequence[Footprint]) -> bool:
    seen = [each.nbytes for each in looks]
    return max(seen) - min(seen) <= _NOISE * max(seen)


class Watched(StateDictSource):
    """Weights that are looked at when they have all been handed over, and not been committed.

    That is when a round takes most memory. It stands still meanwhile: the kernel counts process
    after process, and if pages come and go between two of them, the sum means nothing.

    Args:
        weights: The weights.
    """

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__(weights)
        self.pids: list[int] = []
        """Which processes to look at."""
        self.seen: list[Footprint] = []
        """What was seen, round after round."""

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole tensors."""
        yield from super().iter_full()
        self.seen.append(self._at_rest())

    def _at_rest(self) -> Footprint:
        """Look until nothing moves any more: workers are behind by what was announced last."""
        deadline = Deadline(_LONGEST_S)
        looks = [Footprint.of(self.pids)]
        while len(looks) < _NUM_EQUAL or not _are_alike(looks[-_NUM_EQUAL:]):
            deadline.check("memory that stays as it is")
            time.sleep(_INTERVAL_S)
            looks.append(Footprint.of(self.pids))
        return looks[-1]


def publish_watched(
    address: str, token: str, tensors: list[Any], num_workers: int, num_rounds: int, **_: Any
) -> None:
    """Tell how much memory all processes together had in each round that counts."""
    weights = make(TensorSet(*tensors))
    source = Watched(weights)
    with Publisher(source, listen=address, token=token) as publisher:
        publisher.wait_for_workers(num_workers, JOIN_S)
        source.pids = [os.getpid(), *(int(each.worker) for each in publisher.workers())]
        for number in range(WARM_UP_ROUNDS + num_rounds):
            publish_one(publisher, weights, number)
    counting = source.seen[WARM_UP_ROUNDS:]
    tell(
        nbytes=sum(tensor.nbytes for tensor in weights.values()),
        peak_nbytes=[each.nbytes for each in counting],
        peak_shared_nbytes=[each.shared_nbytes for each in counting],
    )
