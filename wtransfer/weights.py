"""Weight sources of a trainer and targets of a worker: tensors by name, without a transfer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

LoadWeights = Callable[["Iterable[tuple[str, torch.Tensor]]"], object]
"""Takes tensors that have arrived, as ``(name, tensor)``; raises once the round is over."""


@dataclass(frozen=True)
class ParamMeta:
    """One tensor of a source, known without transferring it."""

    name: str
    """Name as the workers know it."""
    dtype: torch.dtype
    """Dtype on the wire."""
    shape: tuple[int, ...]
    """Whole shape, also where ranks hold shards."""
    owners: tuple[int, ...] | None = None
    """Trainer ranks that hold a part; None: every rank holds all of it."""
    mesh: Any = None
    """Torch device mesh of a sharded tensor; it is gathered over the mesh's groups."""
    placements: tuple[Any, ...] | None = None
    """Torch placement per mesh axis of a sharded tensor; given together with `mesh`. Such a tensor
    is gathered from what each rank's ``iter_local`` yields."""
    digest: str | None = None
    """xxh3-128 that its bytes must have, where the source knows it (a sealed checkpoint): a round
    in which the digest differs is ended."""

    @property
    def mesh_shape(self) -> tuple[int, ...] | None:
        """Shape of the mesh over `owners`, as plain numbers; None: every rank holds all of it.

        Source: vLLM 0.33's field of that name.
        """
        if self.mesh is not None:
            return tuple(self.mesh.shape)
        return None if self.owners is None else (len(self.owners),)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class WeightSource(Protocol):
    """The trainer's weights: their metadata, and fresh passes over them.

    A source whose tensors are not in memory may have a method ``iter_unread()`` as well: the pass
    of `iter_full`, with an object in place of each tensor that has its ``dtype``, ``shape`` and
    ``nbytes``, ``read(into, start)``, which fills a memoryview with its bytes from ``start`` on,
    and ``load()``, which returns the tensor. Engines that copy then have it read into their own
    memory (`CheckpointSource` is one).

    A source of quantised weights may have ``scheme``, the canonical text of the quantisation: a
    worker whose target states another refuses the plan. It may have ``config``, the entries of the
    model's ``config.json``, or None: serving engines refuse an update of another configuration than
    that of the checkpoint they serve.
    """

    @property
    def metadata(self) -> Sequence[ParamMeta]:
        """Every tensor, in the order in which the passes yield them. Moves no data."""

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole tensors, one at a time, in the order of `metadata`."""

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what this rank holds. Without sharding the same as `iter_full`."""


@dataclass(frozen=True)
class TensorSpec:
    """Tensor that a target expects under one name."""

    dtype: torch.dtype
    """Dtype of the tensor as the target holds it."""
    shape: tuple[int, ...]
    """Its shape."""
    aliases: tuple[str, ...] = ()
    """Other names of the same storage (tied weights); each of them covers it."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class WeightTarget(Protocol):
    """Destination of a worker session: a model, a state dict, or a serving engine's model.

    Methods run on the thread that owns the model, except `schema`, which may run on the session's
    thread at any time.

    Six optional members: ``forget()``, called when the model has lost its weights otherwise than
    by a commit: a target that keeps the set applied last, for `capture`, drops it then;
    ``vouched_as``, the object by which `process_weights` knows the model, where that is not the
    target itself; ``scheme``, how the weights of an update must be quantised (empty: any way that
    has the names, dtypes and shapes of `schema`); ``check_config(text)``, called as `schema` is
    with the configuration of an update (JSON), which raises a `SchemaError` if the model computes
    by another, else returns notes for the report; ``base()``, called as `schema` is, which returns
    the tensors that the worker began with, by name, where they outlive every update (a checkpoint
    on disk), else None: what an update leaves as it is, is proven and applied from there; and
    ``proven``, false where the model may compute with other weights than those it was given: its KV
    cache then has a name that only this process knows.
    """

    def schema(self) -> Mapping[str, TensorSpec] | None:
        """Return name -> spec in the form in which updates arrive; None: the last whole update."""

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Make the model consist of these tensors.

        May raise at any point; the session then applies the previous set, so a second call after
        a failed one must work. The tensors stay valid until the next `apply` has returned.
        """

    def capture(self) -> Mapping[str, torch.Tensor] | None:
        """Return the tensors with which `apply` restores the present state; None: it cannot."""
