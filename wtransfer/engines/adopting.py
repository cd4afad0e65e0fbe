"""What a model has adopted: tensors that point to staged memory, and how they come to the next."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import torch

from wtransfer.transport.tensors import PART, are_plain, have_forms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from wtransfer.engines.outline import Outline, Part
    from wtransfer.engines.staged import StagedTensors


class Spots:
    """Where tensors were pointed to: all of one update, each apart from the others, or any.

    Args:
        names: Names, in the order of the update; none where it is not known to be all of one.
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
    """Where the tensors of a model lie that were pointed to staged memory, by name.

    Anybody may point them elsewhere without a word. So nothing is concluded from what stands here
    but by comparing it with the tensors of the moment.
    """

    def __init__(self) -> None:
        # Replaced in one step: the schema may be asked for while the model's thread is at work.
        self._spots = Spots([], [], {})
        self._look: Look | None = None

    def enter(self, name: str, address: int) -> None:
        """Enter where the tensor of this name was pointed to."""
        self._look = None
        self._one_by_one()[name] = address

    def is_at(self, name: str, address: int) -> bool:
        """Whether the tensor of this name was adopted, and lies where it did then."""
        return self._spots.by_name.get(name) == address

    def is_all_of(self, own: Mapping[str, torch.Tensor], outline: Outline) -> bool:
        """Whether a model consists of what it has adopted, under these names and in these forms.

        Then no two of its names share memory: they would have one address.

        Args:
            own: The tensors of the model, by name.
            outline: Names and forms.

        Cost: about 0.6 us per tensor.
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
        """Point a model from what it has adopted to an update, if that is right beyond doubt.

        It is where the model is all of what it has adopted, and the update consists of places in
        memory that are apart: what is asked of each tensor otherwise, is known of these.

        Args:
            own: The tensors of the model, by name.
            update: What it shall consist of.
            note: Called with the name at which it broke, if it did.

        Returns:
            Whether it has. If not, some may have been: adopt each by itself, also these.

        Cost: about 2 us per tensor.
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
        done: list[int] = []
        try:
            for tensors, part in _in_parts(own, outline):
                seen = look is not None and look.has(tensors, part) and _lie(tensors, part, known)
                if not (seen or _unmoved(tensors, part, known)):
                    return False
                addresses = list(update.addresses(part))
                try:
                    # Each is made, and let go of, in its turn: see `StagedTensors`.
                    for tensor, new in zip(tensors, update.made(part), strict=True):
                        tensor.data = new
                except BaseException:
                    note(part.names[_num_moved(tensors, addresses)])
                    raise
                done += addresses
        finally:
            self._enter_first(outline.names, done)
        return True

    def _one_by_one(self) -> dict[str, int]:
        """Return the addresses by name, to be added to."""
        if self._spots.names:
            self._spots = Spots([], [], self._spots.by_name)
        return self._spots.by_name

    def _enter_first(self, names: list[str], addresses: list[int]) -> None:
        """Enter where the tensors of the first names were pointed to."""
        if len(addresses) == len(names):
            self._spots = Spots(names, addresses)
        else:
            self._one_by_one().update(zip(names, addresses, strict=False))

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
    return (
        have_forms(tensors, part.forms)
        and all(map(torch.Tensor.is_contiguous, tensors))
        and _lie(tensors, part, known)
    )


def _lie(tensors: list[torch.Tensor], part: Part, known: list[int]) -> bool:
    """Whether each tensor of a part lies where it was adopted."""
    own = known[part.first : part.first + len(tensors)]
    return list(map(torch.Tensor.data_ptr, tensors)) == own


def _num_moved(tensors: list[torch.Tensor], addresses: list[int]) -> int:
    """Return how many of the first ones lie at these addresses, not counting the last of all."""
    pairs = zip(tensors[:-1], addresses, strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0].data_ptr() == pair[1], pairs)))
