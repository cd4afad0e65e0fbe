"""Sizes as people write them: ``2GiB``, ``512MiB``, ``20000x4KiB``."""

from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}
# One element.
_LEAST_NBYTES = 2
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_nbytes(text: str) -> int:
    """Return a size in bytes.

    Args:
        text: A number, and a unit or none: ``4096``, ``4KiB``, ``1.5 GiB``, ``2GB``.

    Raises:
        ValueError: It is none, or not above 0.
    """
    matched = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(matched[2].upper()) if matched else None
    if matched is None or unit is None or not float(matched[1]) * unit >= 1:
        raise ValueError(f"{text!r} is no size; write a number and a unit: 512MiB, 2GiB, 4096")
    return int(float(matched[1]) * unit)


def parse_many(text: str) -> tuple[int, int]:
    """Return how many tensors, and the bytes of each.

    Args:
        text: ``20000x4KiB``.

    Raises:
        ValueError: It is not of this form.
    """
    number, sign, size = text.partition("x")
    if not (sign and number.isdecimal() and int(number)) or parse_nbytes(size) < _LEAST_NBYTES:
        raise ValueError(f"{text!r} is not NUMBERxSIZE; write 20000x4KiB")
    return int(number), parse_nbytes(size)


def in_words(nbytes: int) -> str:
    """Return a size as people write it."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.4g} {unit}"
    return f"{nbytes} B"
