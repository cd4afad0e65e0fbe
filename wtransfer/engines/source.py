"""Where a trainer's weights come from: a module, a state dict, or a checkpoint on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from wtransfer.engines.interface import ParamMeta, WeightSource
from wtransfer.engines.state import group_storages, module_tensors
from wtransfer.errors import SourceError

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn

INDEX_NAME = "model.safetensors.index.json"

# The names that the safetensors format gives to dtypes.
_SAFETENSORS_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


class StateDictSource:
    """A mapping of names to tensors. It is read anew in every round.

    Args:
        tensors: Name -> tensor. Names of the same storage are sent once, under the first name.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._mapping = tensors

    def _tensors(self) -> dict[str, torch.Tensor]:
        tensors = {k: v for k, v in self._mapping.items() if isinstance(v, torch.Tensor)}
        return {name: entry.tensors[0] for name, entry in group_storages(tensors).items()}

    @property
    def metadata(self) -> Sequence[ParamMeta]:
        """Name, dtype and whole shape of every tensor."""
        return [ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in self._tensors().items()]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole tensors; a sharded one is gathered, which every rank must take part in."""
        for name, tensor in self._tensors().items():
            gather = getattr(tensor, "full_tensor", None)
            yield name, (gather() if gather else tensor).detach()

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what this rank holds."""
        for name, tensor in self._tensors().items():
            to_local = getattr(tensor, "to_local", None)
            yield name, (to_local() if to_local else tensor).detach()


class ModuleSource(StateDictSource):
    """A module's parameters and persistent buffers, tied storage once.

    Args:
        module: The model in training; ``torch.compile`` and ``DistributedDataParallel`` wrappers
            are looked through.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__({})
        self._module = module

    def _tensors(self) -> dict[str, torch.Tensor]:
        self._mapping = module_tensors(self._module)
        return super()._tensors()


class CheckpointSource:
    """Safetensors on disk in the usual layout: one file, or shards with an index.

    Tensors are read one at a time through a memory map, so a checkpoint larger than memory works.

    Args:
        path: A ``.safetensors`` file, or a folder with one, or with shards and their index.

    Raises:
        SourceError: No such checkpoint, a shard is missing or damaged, a name appears twice.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._metadata: list[ParamMeta] = []
        self._file_of: dict[str, Path] = {}
        for file, names in _files(Path(path)):
            self._read_header(file, names)

    def _read_header(self, file: Path, names: set[str] | None) -> None:
        try:
            with safe_open(file, framework="pt") as reader:
                found = sorted(reader.keys())
                for name in found if names is None else sorted(names):
                    self._add(file, name, reader.get_slice(name))
        except (OSError, SafetensorError) as error:
            raise SourceError(f"cannot read {str(file)!r}: {error}") from error

    def _add(self, file: Path, name: str, header: object) -> None:
        if name in self._file_of:
            raise SourceError(
                f"tensor {name!r} is in {self._file_of[name].name!r} and in {file.name!r}",
                piece=name,
            )
        dtype = header.get_dtype()  # type: ignore[attr-defined]  # safetensors has no stubs
        if dtype not in _SAFETENSORS_DTYPES:
            raise SourceError(f"tensor {name!r} has the unsupported dtype {dtype}", piece=name)
        shape = tuple(header.get_shape())  # type: ignore[attr-defined]
        self._metadata.append(ParamMeta(name, _SAFETENSORS_DTYPES[dtype], shape))
        self._file_of[name] = file

    @property
    def metadata(self) -> Sequence[ParamMeta]:
        """Name, dtype and shape of every tensor, from the files' headers."""
        return self._metadata

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors file by file, each read when it is asked for."""
        names_of: dict[Path, list[str]] = {}
        for meta in self._metadata:
            names_of.setdefault(self._file_of[meta.name], []).append(meta.name)
        for file, names in names_of.items():
            with safe_open(file, framework="pt") as reader:
                for name in names:
                    yield name, reader.get_tensor(name)

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the same: a checkpoint on disk has no ranks."""
        return self.iter_full()


def as_source(model: nn.Module | Mapping[str, torch.Tensor] | WeightSource) -> WeightSource:
    """Return a source for what a user hands in: a module, a mapping, or a source."""
    from collections.abc import Mapping as AnyMapping

    if isinstance(model, torch.nn.Module):
        return ModuleSource(model)
    if isinstance(model, AnyMapping):
        return StateDictSource(model)
    if hasattr(model, "iter_full") and hasattr(model, "metadata"):
        return model
    raise TypeError(
        f"cannot publish a {type(model).__name__}: expected a torch module, a mapping of names to "
        "tensors, or a WeightSource with `metadata` and `iter_full`"
    )


def _files(path: Path) -> list[tuple[Path, set[str] | None]]:
    if path.is_file():
        return [(path, None)]
    if (path / INDEX_NAME).is_file():
        return _indexed_files(path)
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1:
        return [(files[0], None)]
    raise SourceError(
        f"{str(path)!r} is no checkpoint: expected one .safetensors file or {INDEX_NAME}, "
        f"found {len(files)} .safetensors files and no index"
    )


def _indexed_files(folder: Path) -> list[tuple[Path, set[str] | None]]:
    try:
        weight_map = json.loads((folder / INDEX_NAME).read_text("utf-8"))["weight_map"]
        pairs = [(str(name), str(shard)) for name, shard in weight_map.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SourceError(f"{str(folder / INDEX_NAME)!r} is no index: {error}") from error
    shards: dict[str, set[str]] = {}
    for name, shard in pairs:
        # An index names neighbours; anything else could point out of the folder.
        if Path(shard).name != shard:
            raise SourceError(f"{INDEX_NAME} names the file {shard!r}, which is not in its folder")
        shards.setdefault(shard, set()).add(name)
    return [(folder / shard, names) for shard, names in shards.items()]
