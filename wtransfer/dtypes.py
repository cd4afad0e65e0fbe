"""Dtypes that travel, by name: one table for plans, checkpoints and the search for NaN.

A dtype is added here and nowhere else. Without torch: a peer's word is looked up in the table
before anything is made of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping


class WireDtype(NamedTuple):
    """Properties of a dtype, known without torch."""

    itemsize: int
    """Bytes of an element."""
    safetensors: str | None
    """Its name in safetensors files; None: the format has none."""
    nonfinite: tuple[tuple[int, int], ...] = ()
    """First and last word of each run of NaN or infinite words, as unsigned integers; of a
    complex dtype, words of a part. Empty where every word is finite."""
    num_parts: int = 1
    """Parts of an element: 2 for complex."""
    num_packed: int = 1
    """Numbers that an element holds, of which files count each in the last dimension."""


_FLOAT32 = ((0x7F80_0000, 0x7FFF_FFFF), (0xFF80_0000, 0xFFFF_FFFF))
_FLOAT64 = (
    (0x7FF0_0000_0000_0000, 0x7FFF_FFFF_FFFF_FFFF),
    (0xFFF0_0000_0000_0000, 0xFFFF_FFFF_FFFF_FFFF),
)
_FNUZ = ((0x80, 0x80),)  # one NaN, where others have minus zero, and no infinity

WIRE_DTYPES: Mapping[str, WireDtype] = {
    "bool": WireDtype(1, "BOOL"),
    "uint8": WireDtype(1, "U8"),
    "uint16": WireDtype(2, "U16"),
    "uint32": WireDtype(4, "U32"),
    "uint64": WireDtype(8, "U64"),
    "int8": WireDtype(1, "I8"),
    "int16": WireDtype(2, "I16"),
    "int32": WireDtype(4, "I32"),
    "int64": WireDtype(8, "I64"),
    "float8_e4m3fn": WireDtype(1, "F8_E4M3", ((0x7F, 0x7F), (0xFF, 0xFF))),
    "float8_e4m3fnuz": WireDtype(1, "F8_E4M3FNUZ", _FNUZ),
    "float8_e5m2": WireDtype(1, "F8_E5M2", ((0x7C, 0x7F), (0xFC, 0xFF))),
    "float8_e5m2fnuz": WireDtype(1, "F8_E5M2FNUZ", _FNUZ),
    "float8_e8m0fnu": WireDtype(1, "F8_E8M0", ((0xFF, 0xFF),)),
    # Every pattern is finite.
    "float4_e2m1fn_x2": WireDtype(1, "F4", num_packed=2),
    "float16": WireDtype(2, "F16", ((0x7C00, 0x7FFF), (0xFC00, 0xFFFF))),
    "bfloat16": WireDtype(2, "BF16", ((0x7F80, 0x7FFF), (0xFF80, 0xFFFF))),
    "float32": WireDtype(4, "F32", _FLOAT32),
    "float64": WireDtype(8, "F64", _FLOAT64),
    "complex64": WireDtype(8, "C64", _FLOAT32, num_parts=2),
    "complex128": WireDtype(16, None, _FLOAT64, num_parts=2),
}
"""Every dtype that is sent, by its torch name."""

DTYPES: Mapping[str, int] = {name: each.itemsize for name, each in WIRE_DTYPES.items()}
"""Wire dtypes and their item size in bytes. A peer's dtype is looked up here and nowhere else."""
