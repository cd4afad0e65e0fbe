"""What a model has adopted: where its tensors lie since, and how they come to the next update.

Large ones point to staged memory. Small ones have memory of their own, which the first update has
given them: to copy the next one to there is cheaper than to make tensors that point to it.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from wtransfer.transport.tensors import PART, are_flat
from wtransfer.weight_sync.state import memory_address
from wtransfer.weight_sync.worker.homes import Homes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from wtransfer.engines.outline import Outline
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


class Adopted:
    """Where the tensors of a model lie that were pointed elsewhere by an update, by name.

    Anybody may point them elsewhere without a word. So nothing is concluded from what stands here
    but by comparing it with the tensors of the moment.
    """

    def __init__(self) -> None:
        # Replaced in one step: the schema may be asked for while the model's thread is at work.
        self._spots = Spots([], [], {})
        self._homes = Homes()

    def enter(self, name: str, address: int) -> None:
        """Enter where the tensor of this name was pointed to, which is no home."""
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
        return self._homes.has(name, tensor.data_ptr(), tensor.nbytes)

    def forget(self, name: str) -> None:
        """Forget what was adopted under this name: it is not where its tensor lies."""
        self._homes.forget(name)
        if name in self._spots.by_name:
            del self._one_by_one()[name]

    def forget_others(self, names: Collection[str]) -> None:
        """Forget what was adopted under other names than these: there are no such tensors."""
        self._homes.forget_others(names)
        for name in self._spots.by_name.keys() - names:
            del self._one_by_one()[name]

    def staged(self, own: Mapping[str, torch.Tensor]) -> set[int]:
        """Return where staged memory begins that tensors of a model show parts of.

        It need not be their own: others may have come to share it, and have outlasted its owner.

        Args:
            own: The tensors of the model, by name.
        """
        places = set(self._spots.by_name.values()).difference(self._homes.addresses)
        found = map(memory_address, own.values()) if places else ()
        return {place for place in found if place is not None and place in places}

    def is_all_of(self, own: Mapping[str, torch.Tensor], outline: Outline) -> bool:
        """Whether a model consists of what it has adopted, under these names and in these forms.

        Then no two of its names share memory: they would have one address.

        Args:
            own: The tensors of the model, by name.
            outline: Names and forms.

        Cost: about 0.8 us per tensor.
        """
        known = self._known(own, outline)
        return known is not None and _is_at(_in_order(own, outline), outline, known)

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
            Whether it has; if not, nothing was done. What raises may leave it half done.

        Cost: about 3 us per large tensor; 0.9 us and a copy per small one.
        """
        outline = update.outline
        known = self._known(own, outline) if update.all_apart else None
        if known is None:
            return False
        tensors = _in_order(own, outline)
        # All is looked at once more: who has a home keeps its form, which may be another by now.
        if not _is_at(tensors, outline, known):
            return False
        moves = self._homes.moves(update, known)
        if update.memory is not None:
            moves.copy(update.memory)
        if any(moves.leaving):
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
        for name in itertools.compress(update.outline.names, leaving):
            self._homes.forget(name)
        rows = zip(addresses, known, leaving, strict=True)
        return [new if leaves else old for new, old, leaves in rows]

    def _enter(self, name: str, address: int) -> None:
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


def _in_order(own: Mapping[str, torch.Tensor], outline: Outline) -> list[torch.Tensor]:
    """Return a model's tensors, all of which an outline names, in its order."""
    return list(map(own.__getitem__, outline.names))


def _is_at(tensors: list[torch.Tensor], outline: Outline, known: list[int]) -> bool:
    """Whether each tensor lies where it was adopted, in its form."""
    for part in outline.parts(PART):
        own = part.own
        # Others may have no address at all, or show one that says nothing about their elements.
        if not are_flat(tensors[own], part.forms):
            return False
        if list(map(torch.Tensor.data_ptr, tensors[own])) != known[own]:
            return False
    return True


def _num_moved(tensors: list[torch.Tensor], addresses: list[int]) -> int:
    """Return how many of the first ones lie at these addresses."""
    pairs = zip(tensors, addresses, strict=True)
    return len(list(itertools.takewhile(lambda pair: pair[0].data_ptr() == pair[1], pairs)))
