"""What the operator decided by environment variables: pins, allow list, block list, deadline.

========================================  ======================================================
``WTRANSFER_PIN``                         ``kind:name=distribution``, separated by commas
``WTRANSFER_PLUGINS``                     only these plug-ins; empty: none. Built-ins always stay
``WTRANSFER_PLUGINS_BLOCK``               not these; may name built-ins as ``wtransfer:name``
``WTRANSFER_LOAD_TIMEOUT_S``              seconds that a plug-in's import may take; 0: import in
                                          the calling thread, without a deadline
========================================  ======================================================

Entries of the two lists are ``distribution`` or ``distribution:name``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wtransfer.errors import PluginSettingError
from wtransfer.registry.discovery import Record, canonical, fold
from wtransfer.registry.kinds import DISCOVERED

if TYPE_CHECKING:
    from collections.abc import Mapping

PIN = "WTRANSFER_PIN"
ALLOW = "WTRANSFER_PLUGINS"
BLOCK = "WTRANSFER_PLUGINS_BLOCK"
LOAD_TIMEOUT = "WTRANSFER_LOAD_TIMEOUT_S"
DEFAULT_LOAD_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Entry:
    """One entry of the allow or block list."""

    text: str
    """As written."""
    distribution: str
    """Distribution, canonical."""
    name: str | None
    """Folded name; None: all of the distribution."""

    def matches(self, record: Record) -> bool:
        """Return whether the entry means this backend."""
        same = self.distribution == canonical(record.distribution)
        return same and self.name in (None, fold(record.name))


@dataclass(frozen=True)
class Policy:
    """The operator's decisions."""

    pins: Mapping[tuple[str, str], str]
    """(kind, folded name) -> distribution as written."""
    allowed: tuple[Entry, ...] | None
    """The only plug-ins allowed; None: all."""
    blocked: tuple[Entry, ...]
    """Those refused."""
    load_timeout_s: float
    """Seconds an import may take; 0: no deadline."""

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Policy:
        """Read the variables.

        Raises:
            PluginSettingError: One of them cannot be read. Going on without it would load what
                the operator did not choose.
        """
        allow = environ.get(ALLOW)
        return cls(
            pins=dict(_pin(text) for text in _split(environ.get(PIN, ""))),
            allowed=None if allow is None else tuple(_entry(ALLOW, e) for e in _split(allow)),
            blocked=tuple(_entry(BLOCK, e) for e in _split(environ.get(BLOCK, ""))),
            load_timeout_s=_seconds(environ.get(LOAD_TIMEOUT)),
        )

    def pin(self, kind: str, name: str) -> str | None:
        """Return the distribution that a name is pinned to."""
        return self.pins.get((kind, fold(name)))

    def refusal(self, record: Record) -> str | None:
        """Return why a backend may not be used, and what to do; None if it may."""
        for entry in self.blocked:
            if entry.matches(record):
                return f"{BLOCK} names {entry.text!r}; remove it there to use it"
        if self.allowed is None or record.origin == "built-in":
            return None
        if any(entry.matches(record) for entry in self.allowed):
            return None
        return f"{ALLOW} does not list it; add {record.distribution!r} there to use it"


def _split(text: str) -> list[str]:
    return [part for part in map(str.strip, text.split(",")) if part]


def _pin(text: str) -> tuple[tuple[str, str], str]:
    place, equals, distribution = text.partition("=")
    kind, colon, name = place.partition(":")
    words = [each.word for each in DISCOVERED]
    if not (equals and colon and name.strip() and distribution.strip() and kind in words):
        raise PluginSettingError(
            f"{PIN} has the entry {text!r}; expected kind:name=distribution with a kind of "
            f"{', '.join(words)}, for example engines:nccl=acme-wt"
        )
    return (kind, fold(name.strip())), distribution.strip()


def _entry(variable: str, text: str) -> Entry:
    distribution, colon, name = map(str.strip, text.partition(":"))
    if not distribution or (colon and not name):
        raise PluginSettingError(
            f"{variable} has the entry {text!r}; expected distribution or distribution:name"
        )
    return Entry(text, canonical(distribution), fold(name) if colon else None)


def _seconds(text: str | None) -> float:
    if text is None:
        return DEFAULT_LOAD_TIMEOUT_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise PluginSettingError(f"{LOAD_TIMEOUT} is {text!r}; expected seconds, 0 or more")
    return seconds
