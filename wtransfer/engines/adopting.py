"""What a model has adopted: where its tensors lie since, and how they come to the next update.

Large ones point to staged memory. Small ones have memory of their own, which the first update has
given them: to copy the next one to there is cheaper than to make tensors that point to it.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import torch

from wtransfer.engines.homes import Homes
from wtransfer.transport.tensors import PART, are_flat, are_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from wtransfer.engines.outline import Outline, Part
    from wtransfer.engines.staged import StagedTensors


class Spots:
    """Where tensors were pointed to: all of a model, each apart from the others, or any.

    Args:
        names: Names, in the order of the last update; none where they may not be all.
        addresses: First byte of each.
        by_name: The same, by name; None: made when it is wanted.
    """

    def __init__(
        self, names: list[str], addresses: list[int], by_name: dict[str, int] | None = None
    ) -> None:
        self.names = names
        self.addresses = addresses
        self._by_name = by_name

    @property
    def by_name(self) -> dict[str, int]:
        """Name -> first byte."""
        # Two threads that ask at the same time make two that are equal.
        if self._by_name is None:
            self._by_name = dict(zip(self.names, self.addresses, strict=True))
        return self._by_name


class Look(NamedTuple):
    """A model that was found as it had adopted an update."""

    spots: Spots
    """Where its tensors lay."""
    forms: list[tuple[object, ...]]
    """In which forms."""
    ids: list[int]
    """Which objects they were."""

    def is_of(self, spots: Spots, forms: list[tuple[object, ...]]) -> bool:
        """Whether it was a look at what lies there, in these forms."""
        return self.spots is spots and self.forms == forms

    def has(self, tensors: list[torch.Tensor], part: Part) -> bool:
        """Whether these are the objects that were looked at."""
        own = self.ids[part.first : part.first + len(tensors)]
        return are_plain(tensors) and list(map(id, tensors)) == own


class Adopted:
    """Where the tensors of a model lie that were pointed elsewhere by an update, by name.

    Anybody may point them elsewhere without a word. So nothing is concluded from what stands here
    but by comparing it with the tensors of the moment.
    """

    def __init__(self) -> None:
        # Replaced in one step: the schema may be asked for while the model's thread is at work.
        self._spots = Spots([], [], {})
        self._homes = Homes()
        self._look: Look | None = None

    def enter(self, name: str, address: int) -> None:
        """Enter where the tensor of this name was pointed to, in staged memory."""
        self._homes.forget(name)
        self._enter(name, address)

    def give_home(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor to which the one of this name shall be pointed, and stay.

        Args:
            name: Name.
            like: The tensor that it has now.
        """
        home = self._homes.give(name, like)
        self._enter(name, home.data_ptr())
        return home

    def is_home(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether this tensor lies in the home of this name."""
        return self.is_at(name, tensor.data_ptr()) and self._homes.has(name, tensor.nbytes)

    def is_at(self, name: str, address: int) -> bool:
        """Whether the tensor of this name was adopted, and lies where it did then."""
        return self._spots.by_name.get(name) == address

    def is_all_of(self, own: Mapping[str, torch.Tensor], outline: Outline) -> bool:
        """Whether a model consists of what it has adopted, under these names and in these forms.

        Then no two of its names share memory: they would have one address.

        Args:
            own: The tensors of the model, by name.
            outline: Names and forms.

        Cost: about 0.8 us per tensor.
        """
        spots, known, self._look = self._spots, self._known(own, outline), None
        if known is None:
            return False
        ids: list[int] = []
        for tensors, part in _in_parts(own, outline):
            if not _unmoved(tensors, part, known):
                return False
            ids += map(id, tensors)
        self._look = Look(spots, outline.forms, ids)
        return True

    def exchange(
        self,
        own: Mapping[str, torch.Tensor],
        update: StagedTensors,
        note: Callable[[str], object],
    ) -> bool:
        """Bring a model from what it has adopted to an update, if that is right beyond doubt.

        It is where the model is all of what it has adopted, and the update consists of places in
        memory that are apart: what is asked of each tensor otherwise, is known of these.

        Args:
            own: The tensors of the model, by name.
            update: What it shall consist of.
            note: Called with the name at which it broke, if it did.

        Returns:
            Whether it has. If not, some may have been: adopt each by itself, also these.

        Cost: about 2 us per large tensor; 0.6 us and a copy per small one.
        """
        outline = update.outline
        spots = self._spots
        known = self._known(own, outline) if update.all_apart else None
        if known is None:
            return False
        # What was asked of each when the plan was judged is not asked again, for this update.
        look, self._look = self._look, None
        if look is not None and not look.is_of(spots, outline.forms):
            look = None
        parts = list(_in_parts(own, outline))
        for tensors, part in parts:
            seen = look is not None and look.has(tensors, part) and _lie(tensors, part, known)
            if not (seen or _unmoved(tensors, part, known)):
                return False
        moves = self._homes.moves(update)
        if moves.copies:
            assert update.memory is not None, "an update of places has memory"
            moves.copy(update.memory)
        if any(moves.leaving):
            tensors = [tensor for some, _ in parts for tensor in some]
            known = self._point(tensors, known, update, moves.leaving, note)
        self._spots = Spots(outline.names, known)
        return True

    def _point(
        self,
        tensors: list[torch.Tensor],
        known: list[int],
        update: StagedTensors,
        leaving: list[bool],
        note: Callable[[str], object],
    ) -> list[int]:
        """Point those tensors of a model that leave to an update; return where all lie then."""
        addresses = list(update.addresses())
        own = list(itertools.compress(tensors, leaving))
        try:
            # Each is made, and let go of, in its turn: see `StagedTensors`.
            for tensor, new in zip(own, update.made(leaving), strict=True):
                tensor.data = new
        except BaseException:
            names = list(itertools.compress(update.outline.names, leaving))
            goals = list(itertools.compress(addresses, leaving))
            moved = _num_moved(own, goals)
            self._one_by_one().update(zip(names[:moved], goals, strict=False))
            note(names[min(moved, len(names) - 1)])
            raise
        rows = zip(addresses, known, leaving, strict=True)
        return [new if leaves else old for new, old, leaves in rows]

    def _enter(self, name: str, address: int) -> None:
        self._look = None
        self._one_by_one()[name] = address

    def _one_by_one(self) -> dict[str, int]:
        """Return the addresses by name, to be added to."""
        if self._spots.names:
            self._spots = Spots([], [], self._spots.by_name)
        return self._spots.by_name

    def _known(self, own: Mapping[str, torch.Tensor], outline: Outline) -> list[int] | None:
        """Return where each tensor was pointed to, by number.

        Returns:
            None unless the model has these names and no other, and each was adopted apart from
            others.
        """
        names, spots = outline.names, self._spots
        if names == spots.names and names == list(own):
            return spots.addresses
        if outline.numbers.keys() != own.keys():
            return None
        found = list(map(spots.by_name.get, names))
        addresses = [address for address in found if address is not None]
        return addresses if len(set(addresses)) == len(names) else None


def _in_parts(
    own: Mapping[str, torch.Tensor], outline: Outline
) -> Iterator[tuple[list[torch.Tensor], Part]]:
    """Yield a model part by part: its tensors, and what the outline says of them."""
    names = outline.names
    tensors = list(own.values()) if list(own) == names else list(map(own.__getitem__, names))
    for part in outline.parts(PART):
        yield tensors[part.first : part.first + len(part.names)], part


def _unmoved(tensors: list[torch.Tensor], part: Part, known: list[int]) -> bool:
    """Whether each tensor of a part lies where it was adopted, in its form."""
    # Others may have no address at all, or show one that says nothing about their elements.
    return are_flat(tensors, part.forms) and _lie(tensors, part, known)


def _lie(tensors: list[torch.Tensor], part: Part, known: list[int]) -> bool:
    """Whether each tensor of a part lies where it was adopted."""
    return list(map(torch.Tensor.data_ptr, tensors)) == _own(part, known)


def _own(part: Part, column: list[int]) -> list[int]:
    return column[part.first : part.first + len(part.names)]


def _num_moved(tensors: list[torch.Tensor], addresses: list[int]) -> int:
    """Return how many of the first ones lie at these addresses."""
    pairs = zip(tensors, addresses, strict=True)
    return len(list(itertools.takewhile(lambda pair: pair[0].data_ptr() == pair[1], pairs)))
