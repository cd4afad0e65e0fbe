"""From a name to one record, among what was discovered: never silently between two candidates."""

from __future__ import annotations

import difflib
import logging
from typing import TYPE_CHECKING

from wtransfer.errors import (
    PluginAmbiguousError,
    PluginBlockedError,
    PluginNotInstalledError,
    UnknownBackendError,
)
from wtransfer.registry.discovery import Record, canonical, fold
from wtransfer.registry.policy import PIN, Policy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from wtransfer.registry.kinds import Kind

logger = logging.getLogger(__name__)


class Shelf:
    """The discovered backends of one kind, seen through the operator's policy.

    Args:
        kind: The kind.
        records: Its records.
        policy: Pins, allow list and block list.
    """

    def __init__(self, kind: Kind, records: Iterable[Record], policy: Policy) -> None:
        self._kind = kind
        self._policy = policy
        self._by_name: dict[str, list[Record]] = {}
        self._warned: set[str] = set()
        for record in records:
            self._by_name.setdefault(fold(record.name), []).append(record)

    @property
    def records(self) -> list[Record]:
        """Everything on the shelf, also what is blocked."""
        return [record for records in self._by_name.values() for record in records]

    def pinned(self, name: str, others: Iterable[str] = ()) -> Record | None:
        """Return what the operator pinned the name to, if anything.

        Args:
            name: A plain name.
            others: Further names that exist, for the error.

        Raises:
            UnknownBackendError: The pinned distribution does not offer it.
            PluginBlockedError: It is blocked as well.
        """
        distribution = self._policy.pin(self._kind.word, name)
        return None if distribution is None else self._addressed(name, distribution, name, others)

    def find(self, name: str, others: Iterable[str] = ()) -> Record:
        """Return the backend that a name means: the built-in, else the only one discovered.

        Args:
            name: A name in any case, with ``_`` or ``-``; or ``distribution:name``.
            others: Further names that exist, for the error.

        Raises:
            UnknownBackendError: Nobody offers it.
            PluginBlockedError: The policy excludes it.
            PluginAmbiguousError: Several distributions offer it.
        """
        distribution, colon, plain = name.rpartition(":")
        if colon:
            return self._addressed(name, distribution, plain, others)
        meant = self._meant(name)
        self._warn_once(name, meant)
        return self._choose(name, meant, others)

    def names(self) -> list[str]:
        """Return, for every backend that is allowed, the shortest name that means it."""
        return [self._shortest(record) for record in self._usable(self.records)]

    def status(self, record: Record) -> str:
        """Return one line about what happens when the record's name is used."""
        refusal = self._policy.refusal(record)
        if refusal is not None:
            return f"blocked: {refusal}"
        shortest = self._shortest(record)
        if shortest != record.name:
            return f"conflict: address it as {shortest}"
        pin = self._policy.pin(self._kind.word, record.name)
        return "available" if pin is None else f"available, pinned by {PIN}"

    def _meant(self, name: str) -> list[Record]:
        """Return what a plain name stands for: one distribution's, unless nothing was decided."""
        found = self._by_name.get(fold(name), [])
        pin = self._policy.pin(self._kind.word, name)
        if pin is not None:
            return _from(pin, found)
        return [record for record in found if record.origin == "built-in"] or found

    def _usable(self, records: list[Record]) -> list[Record]:
        return [record for record in records if self._policy.refusal(record) is None]

    def _shortest(self, record: Record) -> str:
        meant = {each.distribution for each in self._usable(self._meant(record.name))}
        plain = meant == {record.distribution}
        return record.name if plain else f"{record.distribution}:{record.name}"

    def _addressed(self, asked: str, distribution: str, name: str, others: Iterable[str]) -> Record:
        found = _from(distribution, self._by_name.get(fold(name), []))
        return self._choose(asked, found, others, distribution=distribution)

    def _choose(
        self,
        name: str,
        found: list[Record],
        others: Iterable[str],
        distribution: str | None = None,
    ) -> Record:
        usable = self._usable(found)
        if not found:
            raise self._missing(name, others, distribution)
        if not usable:
            raise self._blocked(name, found)
        if len({record.distribution for record in usable}) > 1:
            raise self._ambiguous(name, usable)
        exact = [record for record in usable if record.name == name.rpartition(":")[2]] or usable
        if len(exact) > 1:
            raise self._ambiguous_within(name, exact)
        return exact[0]

    def _warn_once(self, name: str, meant: list[Record]) -> None:
        hidden = [r for r in self._usable(self._by_name.get(fold(name), [])) if r not in meant]
        if not hidden or fold(name) in self._warned:
            return
        self._warned.add(fold(name))
        logger.warning(
            "The built-in %s %s is used, though %s would answer to this name, too: "
            "set %s, or address it as %r",
            self._kind.noun,
            meant[0],
            " and ".join(map(str, hidden)),
            _pin_line(self._kind, hidden[0]),
            f"{hidden[0].distribution}:{hidden[0].name}",
        )

    def _missing(
        self, name: str, others: Iterable[str], distribution: str | None
    ) -> UnknownBackendError:
        available = sorted({*self.names(), *others})
        start = self._kind.unknown.format(name=name, available=available)
        facts = {"kind": self._kind.word, "name": name, "available": tuple(available)}
        provider = self._kind.first_party.get(fold(name.rpartition(":")[2]))
        if provider and (distribution is None or canonical(distribution) == provider):
            return PluginNotInstalledError(
                f"{start}. It is provided by {provider!r}, which is not installed here: "
                f"pip install {provider}",
                distribution=provider,
                **facts,
            )
        if distribution is not None:
            source = f" ({PIN} asks for it)" if ":" not in name else ""
            return UnknownBackendError(
                f"{start}. No distribution {distribution!r} that is installed here offers "
                f"it{source}.{self._offers(name)}",
                **facts,
            )
        return UnknownBackendError(
            f"{start}.{_nearest(name, available)} Install the distribution that provides it, or "
            "register it at run time.",
            **facts,
        )

    def _offers(self, name: str) -> str:
        found = self._by_name.get(fold(name.rpartition(":")[2]), [])
        return f" Offered by: {', '.join(map(str, found))}." if found else ""

    def _blocked(self, name: str, found: list[Record]) -> PluginBlockedError:
        reasons = "; ".join(f"{record}: {self._policy.refusal(record)}" for record in found)
        return PluginBlockedError(
            f"The {self._kind.noun} {name!r} is installed and blocked here. {reasons}.",
            **{**found[0].facts, "name": name},
        )

    def _ambiguous(self, name: str, usable: list[Record]) -> PluginAmbiguousError:
        pins = " or ".join(_pin_line(self._kind, record) for record in usable)
        return PluginAmbiguousError(
            f"The {self._kind.noun} {name!r} is offered by several distributions: "
            f"{', '.join(map(str, usable))}. Choose one: set {pins}, or address it as "
            f"{' or '.join(repr(f'{r.distribution}:{r.name}') for r in usable)}.",
            kind=self._kind.word,
            name=name,
        )

    def _ambiguous_within(self, name: str, exact: list[Record]) -> PluginAmbiguousError:
        values = ", ".join(f"{record.name!r} = {record.value!r}" for record in exact)
        return PluginAmbiguousError(
            f"The {self._kind.noun} {name!r} is declared more than once by {exact[0].distribution} "
            f"{exact[0].version}: {values}. Write the name exactly as declared; where two are "
            "equal, only the distribution's author can mend it.",
            **{**exact[0].facts, "name": name},
        )


def _from(distribution: str, records: list[Record]) -> list[Record]:
    wanted = canonical(distribution)
    return [record for record in records if canonical(record.distribution) == wanted]


def _pin_line(kind: Kind, record: Record) -> str:
    return f'{PIN}="{kind.word}:{record.name}={record.distribution}"'


def _nearest(name: str, available: list[str]) -> str:
    by_fold = {fold(each): each for each in available}
    close = difflib.get_close_matches(fold(name), by_fold, n=1)
    return f" Did you mean {by_fold[close[0]]!r}?" if close else ""
