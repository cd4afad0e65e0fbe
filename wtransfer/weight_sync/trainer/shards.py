"""How a tensor lies on the ranks of a trainer, and how it becomes whole.

What a source's metadata says of it (`ParamMeta.mesh` and `placements`, torch's own words for a
DTensor) is enough for both, so this serves modules, FSDP2 and sources of one's own alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import xxhash

from wtransfer.errors import SourceError
from wtransfer.transport.tensors import dtype_name, lacks_memory

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from wtransfer.engines.interface import ParamMeta, WeightSource

Layout: TypeAlias = "list[tuple[str, str]]"
"""Name and the rest of every tensor, in order, as text."""


def is_sharded(meta: ParamMeta) -> bool:
    """Whether a tensor must be gathered to be whole."""
    return bool(meta.placements)


def ranks_of(meta: ParamMeta) -> tuple[int, ...]:
    """Return the ranks that must take part in gathering a tensor; none for one that is whole.

    Raises:
        SourceError: The metadata says that several ranks own it, but not how.
    """
    if not is_sharded(meta) and len(meta.owners or ()) <= 1:
        return ()
    if not is_sharded(meta) or meta.mesh is None:
        raise SourceError(
            f"{meta.name!r} has owners, ranks {list(meta.owners or ())}, but no mesh and no "
            "placements that say which part each of them holds; give all three in its ParamMeta, "
            "or none",
            piece=meta.name,
        )
    return tuple(meta.mesh.mesh.flatten().tolist())


def layout_between(metadata: Sequence[ParamMeta], one: int, other: int) -> Layout:
    """Describe what two ranks must agree on before they gather anything.

    Of the mesh that is its ranks only where both are in it: in a grid of ranks, a tensor that
    lies along one axis has other ranks in every row.
    """
    return [(meta.name, _described(meta, one, other)) for meta in metadata]


def digest_of(layout: Layout) -> str:
    """Return a digest of a layout."""
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(layout))


def check_equal(mine: Layout, theirs: Layout, me: str, them: str) -> None:
    """Name the first tensor in which two layouts differ.

    Raises:
        SourceError: There is one.
    """
    for index in range(max(len(mine), len(theirs))):
        here = mine[index] if index < len(mine) else None
        there = theirs[index] if index < len(theirs) else None
        if here != there:
            name = (here or there or ("",))[0]
            raise SourceError(
                f"the trainer's ranks differ at tensor {index}: {me} has {_shown(here)}, {them} "
                f"has {_shown(there)}; every rank must have the same tensors in the same order",
                piece=name,
            )


def iter_shards(
    source: WeightSource, metadata: Sequence[ParamMeta]
) -> Iterator[tuple[int, ParamMeta, torch.Tensor]]:
    """Yield what this rank holds, each held against the metadata before anything is gathered.

    Raises:
        SourceError: The iteration is not what the metadata says; the first tensor is named.
    """
    expected = enumerate(metadata)
    for name, tensor in source.iter_local():
        index, meta = next(expected, (-1, None))
        if meta is None:
            raise SourceError(
                f"the source yields {name!r} after the last tensor of its metadata", piece=name
            )
        _check_shard(meta, name, tensor)
        yield index, meta, tensor
        # Not until the next is here: a gathered one may be large.
        del tensor
    _, left = next(expected, (-1, None))
    if left is not None:
        raise SourceError(
            f"the source ended before {left.name!r}, which its metadata has", piece=left.name
        )


def gathered(meta: ParamMeta, shard: torch.Tensor) -> torch.Tensor:
    """Return a tensor whole. A collective: every rank of its mesh calls it at the same time."""
    import torch
    from torch.distributed.tensor import DTensor

    # This thread's own: by default, operations on parameters are recorded for a backward pass.
    with torch.no_grad():
        whole = DTensor.from_local(
            shard.detach(),
            meta.mesh,
            meta.placements,
            run_check=False,
            shape=torch.Size(meta.shape),
            stride=_strides(meta.shape),
        )
        return whole.full_tensor()


def _described(meta: ParamMeta, one: int, other: int) -> str:
    text = f"{dtype_name(meta.dtype)} {list(meta.shape)}"
    if not is_sharded(meta):
        return text
    ranks = ranks_of(meta)
    grid = "x".join(map(str, meta.mesh.mesh.shape))
    shared = f" on ranks {list(ranks)}" if one in ranks and other in ranks else ""
    placements = ", ".join(map(str, meta.placements or ()))
    return f"{text} as ({placements}) over {grid} ranks{shared}"


def _shown(entry: tuple[str, str] | None) -> str:
    return "none" if entry is None else f"{entry[0]!r}: {entry[1]}"


def _check_shard(meta: ParamMeta, name: str, tensor: torch.Tensor) -> None:
    shape = _shard_shape(meta) if is_sharded(meta) else tuple(meta.shape)
    got = (name, getattr(tensor, "dtype", type(tensor)), tuple(getattr(tensor, "shape", ())))
    expected = (meta.name, meta.dtype, got[2] if shape is None else shape)
    if got != expected:
        raise SourceError(
            f"this rank's pass over the source yields {got}, its metadata says {expected} at this "
            "place; every pass must follow the order of `metadata`",
            piece=meta.name,
        )
    if lacks_memory(tensor):
        raise SourceError(
            f"this rank's part of {name!r} has less memory than its shape needs: its storage was "
            "freed or cut; publish between two steps, while every rank holds its shards",
            piece=name,
        )


def _shard_shape(meta: ParamMeta) -> tuple[int, ...] | None:
    """Return the shape of this rank's part; None where a placement has rules of its own."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    place: Any = meta.mesh.get_coordinate()
    if place is None:
        return None
    shape = list(meta.shape)
    for axis, placement in enumerate(meta.placements or ()):
        if type(placement) is Shard:
            num_parts = int(meta.mesh.mesh.shape[axis])
            # As torch cuts: equal parts, rounded up, so that the last ranks may have less or none.
            part = -(-shape[placement.dim] // num_parts)
            start = min(part * place[axis], shape[placement.dim])
            shape[placement.dim] = min(part, shape[placement.dim] - start)
        elif not isinstance(placement, (Replicate, Partial)):
            return None
    return tuple(shape)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))
