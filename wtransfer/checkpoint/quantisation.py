"""Quantised checkpoints: their scheme, by configuration and headers, and weights put into it.

The schemes are one formula: each block of a weight is divided by its scale, which is the largest
magnitude of the block by half the range of the quantised dtype; blocks are rows, parts of rows,
squares, or all of the weight. Two schemes differ in blocks, dtypes and names only, and so need no
file each. In the arithmetic of the compressed-tensors library: bit for bit what it writes, without
the library, which a trainer need not have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from wtransfer.checkpoint.model_config import CONFIG_NAME, read_config
from wtransfer.checkpoint.source import CheckpointSource
from wtransfer.errors import SourceError, StorageError
from wtransfer.transport.files import Folder
from wtransfer.transport.tensors import dtype_name

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from wtransfer.weights import ParamMeta

CHUNK_NBYTES = 1 << 20
"""Bytes of a weight that are in work at a time."""
KNOWN = "compressed-tensors of 8 bits (symmetric, not packed) and fp8, activations dynamic"
"""Schemes that can be made, for errors."""

_FORMATS = ("int-quantized", "float-quantized", "naive-quantized")
_DTYPES = {"int": torch.int8, "float": torch.float8_e4m3fn}
_QUANTISED = frozenset({torch.int8, torch.float8_e4m3fn, torch.float8_e5m2})
"""Dtypes of quantised weights. Integers of other sizes are masks and counts, or are packed."""
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BITS = 8
_MATRIX_NDIM = 2
_MEASURED = (
    *("input_scale", "output_scale", "activation_scale", "input_global_scale"),
    *("q_scale", "k_scale", "v_scale", "prob_scale"),
)
"""Last parts of the names of scales that calibration has measured on data."""
_UNKNOWN = ("weight_zero_point", "weight_g_idx", "weight_packed", "weight_global_scale")
"""Last parts of the names of tensors of schemes that cannot be made."""


class Scheme(NamedTuple):
    """Form of the quantised weights of a checkpoint."""

    name: str
    """Canonical text; equal for equal forms."""
    dtype: torch.dtype
    """Dtype of quantised weights."""
    block: tuple[int | None, int | None]
    """Rows and columns of a weight that have one scale; None: all of them."""
    scale: str = "weight_scale"
    """Last part of a scale's name, in the place of ``weight``."""
    may_cut: bool = True
    """Whether the last block of a row or column may be smaller than the others."""

    def grid(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the numbers of blocks below and beside each other."""
        (rows, columns), (height, width) = shape, self.block_of(shape)
        return -(-rows // height), -(-columns // width)

    def block_of(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return the rows and columns of a block of a weight."""
        height, width = self.block
        return height or shape[0], width or shape[1]


class QuantisedForm(NamedTuple):
    """A quantised weight of a checkpoint."""

    scale: ParamMeta
    """Its scales."""
    weight: ParamMeta
    """The weight."""


# -- the scheme


def scheme_name(settings: Mapping[str, Any] | None) -> str:
    """Return the canonical text of a ``quantization_config``; empty for None.

    Of a scheme that cannot be made: its method.
    """
    if settings is None:
        return ""
    try:
        return scheme_of(settings).name
    except SourceError:
        return str(settings.get("quant_method", "unknown"))


def scheme_of(settings: Mapping[str, Any]) -> Scheme:
    """Return the scheme that a ``quantization_config`` states.

    Raises:
        SourceError: The scheme cannot be made of weights alone, or is not known.
    """
    method = settings.get("quant_method")
    makers = {"compressed-tensors": _compressed_tensors, "fp8": _fp8}
    if method not in makers:
        raise _cannot(f"a checkpoint quantised by {method!r}")
    try:
        return makers[method](settings)
    except SourceError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise SourceError(
            f"the quantization_config of {method!r} cannot be read: {type(error).__name__}: {error}"
        ) from error


def _compressed_tensors(settings: Mapping[str, Any]) -> Scheme:
    # Checkpoints that are not sparse may say so, and how sparse they happen to be.
    is_sparse = (settings.get("sparsity_config") or {}).get("format", "dense") != "dense"
    odd = [name for name in ("transform_config", "kv_cache_scheme") if settings.get(name)]
    if is_sparse or odd:
        raise _cannot(f"a checkpoint with a {odd[0] if odd else 'sparsity_config'}")
    groups = [each for each in settings["config_groups"].values() if each.get("weights")]
    found = {_of_group(each, settings.get("format")) for each in groups}
    if len(found) != 1:
        names = ", ".join(sorted(each.name for each in found)) or "none"
        raise SourceError(
            f"a checkpoint of compressed-tensors must quantise its weights in one way; this has "
            f"{names}"
        )
    return found.pop()


def _of_group(group: Mapping[str, Any], overall: str | None) -> Scheme:
    written = group.get("format") or overall
    if written not in _FORMATS:
        raise _cannot(f"format {written!r} of compressed-tensors")
    activations = group.get("input_activations")
    if (activations and activations.get("dynamic") is not True) or group.get("output_activations"):
        raise _cannot("static scales of activations, which calibration measures on data,")
    weights = group["weights"]
    kind, bits, strategy = weights["type"], weights["num_bits"], weights["strategy"]
    if not weights.get("symmetric", True):
        raise _cannot("a checkpoint of asymmetric weights, which have zero points,")
    odd = [name for name in ("dynamic", "actorder", "scale_dtype") if weights.get(name)]
    if bits != _BITS or kind not in _DTYPES or odd:
        told = "".join(f" with {name} {weights[name]!r}" for name in odd)
        raise _cannot(f"a checkpoint of {kind!r} weights of {bits} bits{told}")
    size = weights.get("group_size")
    height, width = weights.get("block_structure") or (None, None)
    blocks = {
        "tensor": ("tensor", (None, None)),
        "channel": ("channel", (1, None)),
        "group": (f"group{size}", (1, size or 0)),
        "block": (f"block{height}x{width}", (height or 0, width or 0)),
    }
    text, block = blocks.get(strategy, ("", (0, 0)))
    if not _are_sizes(block):
        raise _cannot(f"a checkpoint with scales by {strategy!r}, of size {size or block}")
    name = f"compressed-tensors:{'int8' if kind == 'int' else 'fp8'}:{text}:symmetric"
    return Scheme(name, _DTYPES[kind], block, may_cut=strategy != "group")


def _are_sizes(block: Sequence[object]) -> bool:
    return all(size is None or (type(size) is int and size > 0) for size in block)


def _fp8(settings: Mapping[str, Any]) -> Scheme:
    if settings.get("activation_scheme", "dynamic") != "dynamic":
        raise _cannot("static scales of activations, which calibration measures on data,")
    odd = {"fmt": (None, "e4m3"), "scale_fmt": (None, "float"), "store_dtype": (None,)}
    for name, known in odd.items():
        if settings.get(name) not in known:
            raise _cannot(f"fp8 with {name} {settings[name]!r}")
    block = settings.get("weight_block_size")
    if block is None:
        return Scheme("fp8:tensor", torch.float8_e4m3fn, (None, None))
    height, width = block
    if not _are_sizes(block) or None in block:
        raise _cannot(f"fp8 with weight_block_size {block!r}")
    name = f"fp8:block{height}x{width}"
    return Scheme(name, torch.float8_e4m3fn, (height, width), "weight_scale_inv")


def _cannot(what: str) -> SourceError:
    return SourceError(f"{what} cannot be made of the weights in training; known are {KNOWN}")


# -- the checkpoint


def read_quantised(
    folder: str | os.PathLike[str],
) -> tuple[Scheme, dict[str, QuantisedForm]] | None:
    """Return the scheme of a checkpoint and its quantised weights; None: it is not quantised.

    Args:
        folder: Folder of the checkpoint.

    Raises:
        SourceError: No such checkpoint; or quantised in a scheme, or with tensors, that cannot be
            made of weights alone. The text names the tensor where one is at fault.
    """
    metas = {meta.name: meta for meta in CheckpointSource(folder, sealed=False).metadata}
    settings = _settings(folder)
    if settings is None:
        odd = [name for name, meta in metas.items() if meta.dtype in _DTYPES.values()]
        if odd:
            raise SourceError(
                f"{str(folder)!r} has quantised weights, first {odd[0]!r}, and its {CONFIG_NAME} "
                "has no quantization_config that says how",
                piece=odd[0],
            )
        return None
    try:
        scheme = scheme_of(settings)
        return scheme, _forms(scheme, metas)
    except SourceError as error:
        error.message = f"{str(folder)!r}: {error.message}"
        raise


def _settings(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    try:
        with Folder(folder, follow=True) as opened:
            config = read_config(opened) or {}
    except StorageError as error:
        raise SourceError(f"'{folder}/{CONFIG_NAME}' cannot be read: {error}") from error
    text = config.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, dict) else None
    found = config.get("quantization_config") or config.get("compression_config") or inner
    if found is not None and not isinstance(found, dict):
        raise SourceError(f"'{folder}/{CONFIG_NAME}': quantization_config is {found!r:.80}")
    return found


def _forms(scheme: Scheme, metas: Mapping[str, ParamMeta]) -> dict[str, QuantisedForm]:
    forms: dict[str, QuantisedForm] = {}
    scales = {name for name in metas if name.endswith(f".{scheme.scale}")}
    for name, meta in metas.items():
        prefix, _, last = name.rpartition(".")
        if last in _MEASURED:
            raise _at(name, f"{name!r} was measured on data, and follows from no weights")
        if last in _UNKNOWN or meta.dtype in _QUANTISED - {scheme.dtype}:
            raise _at(name, f"{name!r} ({dtype_name(meta.dtype)}) is not of scheme {scheme.name}")
        if meta.dtype != scheme.dtype:
            continue
        if last != "weight" or len(meta.shape) != _MATRIX_NDIM or 0 in meta.shape:
            raise _at(
                name,
                f"{name!r} of shape {list(meta.shape)} is quantised; only matrices that are named "
                "'*.weight' can be made",
            )
        scale = metas.get(f"{prefix}.{scheme.scale}")
        if scale is None:
            raise _at(name, f"{name!r} is quantised and has lost its scale {prefix}.{scheme.scale}")
        _check_scale(scheme, meta, scale)
        scales.discard(scale.name)
        forms[name] = QuantisedForm(scale, meta)
    if scales:
        name = min(scales)
        raise _at(name, f"{name!r} is the scale of no quantised weight")
    return forms


def _check_scale(scheme: Scheme, weight: ParamMeta, scale: ParamMeta) -> None:
    (height, width), (rows, columns) = scheme.block_of(weight.shape), weight.shape
    if not scheme.may_cut and (rows % height or columns % width):
        raise _at(
            weight.name,
            f"{weight.name!r} of shape {[rows, columns]} does not divide into groups of {width}",
        )
    grid = scheme.grid(weight.shape)
    shapes = ((), (1,)) if scheme.block == (None, None) else (grid,)
    if tuple(scale.shape) not in shapes or scale.dtype not in _SCALE_DTYPES:
        raise _at(
            scale.name,
            f"{scale.name!r} is {dtype_name(scale.dtype)} {list(scale.shape)}; by scheme "
            f"{scheme.name} it is a float of shape {list(shapes[-1])}",
        )


def _at(name: str, text: str) -> SourceError:
    return SourceError(text, piece=name)


# -- the weights


class QuantisedTensor:
    """A quantised weight, computed as it is read: never in memory as a whole, unless loaded.

    Args:
        weight: The weight in training; unchanged until all was read.
        scale: Its scales, of `scales_of`.
        scheme: The scheme.
    """

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor, scheme: Scheme) -> None:
        self.dtype = scheme.dtype
        """Dtype of the quantised weight."""
        self.shape = tuple(weight.shape)
        """Its shape."""
        self.nbytes = weight.numel() * scheme.dtype.itemsize
        """Its size in bytes."""
        self._weight = weight.detach()
        self._block = scheme.block_of(weight.shape)
        self._scale = scale.reshape(scheme.grid(weight.shape))
        limits = torch.iinfo if scheme.dtype == torch.int8 else torch.finfo
        self._limits = (limits(scheme.dtype).min, limits(scheme.dtype).max)

    def read(self, into: memoryview, start: int) -> None:
        """Compute bytes, from byte `start` on, until `into` is full."""
        columns = self.shape[1]
        first, stop = start // columns, -(-(start + len(into)) // columns)
        found = self._rows(first, stop).contiguous().view(torch.uint8).view(-1)
        skip = start - first * columns
        torch.frombuffer(into, dtype=torch.uint8).copy_(found[skip : skip + len(into)])

    def load(self) -> torch.Tensor:
        """Compute the whole weight into memory of its own, on the device of the weight."""
        into = torch.empty(self.shape, dtype=self.dtype, device=self._weight.device)
        step = _num_rows(self._weight)
        for first in range(0, self.shape[0], step):
            into[first : first + step] = self._rows(first, first + step)
        return into

    def _rows(self, first: int, stop: int) -> torch.Tensor:
        """Return quantised rows."""
        height, width = self._block
        with torch.no_grad():
            weight = self._weight[first:stop]
            at = torch.arange(first, first + len(weight), device=self._scale.device) // height
            scale = self._scale[at]
            if weight.shape[1] % width:
                scale = scale.repeat_interleave(width, dim=1)[:, : weight.shape[1]]
                divided = weight / scale
            else:
                divided = (weight.view(len(weight), -1, width) / scale.unsqueeze(2)).flatten(1)
            # The dtype of a quotient is that of both, by torch: so does the library.
            divided.clamp_(*self._limits)
            return (divided.round_() if self.dtype == torch.int8 else divided).to(self.dtype)


def scales_of(weight: torch.Tensor, scheme: Scheme, form: ParamMeta) -> torch.Tensor:
    """Return the scales of a weight, of the largest magnitude of each block.

    Args:
        weight: The weight; NaN and infinity in it are there in the scale of its block.
        scheme: The scheme.
        form: Dtype and shape of the scales.

    Cost: one pass; memory for `CHUNK_NBYTES` of the weight, twice.
    """
    with torch.no_grad():
        largest = _largest(weight.detach(), scheme).float()
        # compressed-tensors has half the range of the dtype: 127.5 for int8.
        low, high = (-128, 127) if scheme.dtype == torch.int8 else (-448, 448)
        scale = (largest / ((high - low) / 2)).to(form.dtype)
        # No division by 0, in a block of zeros.
        scale = torch.where(scale == 0, torch.finfo(form.dtype).eps, scale)
    return scale.reshape(form.shape)


def _largest(weight: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Return the largest magnitude of each block."""
    height, width = scheme.block_of(weight.shape)
    is_one = scheme.block == (None, None)
    height = 1 if is_one else height
    step = max(1, _num_rows(weight) // height) * height
    # Made at once: results of the parts, kept one by one amid larger memory that comes and goes,
    # would keep the allocator from using that again, and all of it has the size of the weight.
    largest = weight.new_empty(-(-weight.shape[0] // height), -(-weight.shape[1] // width))
    for first in range(0, weight.shape[0], step):
        part = weight[first : first + step].abs()
        cut = (0, -part.shape[1] % width, 0, -part.shape[0] % height)
        part = torch.nn.functional.pad(part, cut)
        blocks = part.reshape(part.shape[0] // height, height, part.shape[1] // width, width)
        begin = first // height
        largest[begin : begin + len(blocks)] = blocks.amax((1, 3))
    return largest.amax().reshape(1, 1) if is_one else largest


def _num_rows(weight: torch.Tensor) -> int:
    """Return how many rows of a weight are in work at a time."""
    return max(1, CHUNK_NBYTES // (weight.shape[1] * weight.itemsize))
