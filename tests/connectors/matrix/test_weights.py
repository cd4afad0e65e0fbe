"""Tokens are those of a fresh model with the weights of the moment, and nothing else is loaded.

In each cell conversations are kept by a connector and gone on with: after the weights have changed
while a load was under way and a prompt had some of its tokens, after the way back, after a restart
of all hosts, and where what was kept gives way to others.
"""

from __future__ import annotations

import itertools
import random
import time

import pytest
from matrix_serving_kit import MODEL
from matrix_stacks import Stack

from wtransfer.deadline import Deadline

NEW_TOKENS = 3
CONNECTORS = {
    "arena": Stack(("tier",)),
    "files": Stack(("files",)),
    "arena over files": Stack(("tiered",)),
    "arena, files": Stack(("tier", "files")),
    "shm": Stack(("shm",)),
    "group": Stack(("group",)),
}
OUTLIVING = {"files", "arena over files", "arena, files"}
"""Those that have blocks after a restart."""
CHANGES = {"same weights": (), "change": (1,), "way back": (1, 0)}
"""Seeds of the weights that come one after the other."""
ROOM = {"room": None, "evicting": 96}
"""How many tokens are kept: what is asked last, and cut while that comes; None: all."""
ENDS = ("", "restart")
MARKS = {16: ((), pytest.mark.slow), 4: (pytest.mark.slow, pytest.mark.nightly)}
"""Block size -> marks of cells that have any two other values together, and of the rest."""


def cells():
    """Return all cells; those tried each time have blocks of 16, and any two other values.

    With blocks of 4 as many are slow, and the rest nightly: that size changes how many blocks a
    cell has, and nothing else.
    """
    found = []
    for (i, connector), (j, change) in itertools.product(enumerate(CONNECTORS), enumerate(CHANGES)):
        for k, (room, end) in enumerate(itertools.product(ROOM, ENDS)):
            for block_size, (some, rest) in MARKS.items():
                values = connector, change, room, end, block_size
                marks = some if k == (i + j) % 4 else rest
                name = " ".join(str(each) for each in values if each)
                found.append(pytest.param(*values, id=name, marks=marks))
    return found


def drawn(length, *what):
    dice = random.Random(str(what))
    return [dice.randrange(MODEL.vocabulary) for _ in range(length)]


def gone_on(request):
    """Return a conversation with an answer, and what follows that."""
    return [*request.all_token_ids, *drawn(10, "on", request.num_tokens)]


class Conversations:
    """Conversations with a service, and what is kept of them.

    Args:
        made: The service, which compares every answer with a fresh model's.
        keeps_all: Whether nothing gives way.
        outlives: Whether there are blocks after a restart.
    """

    def __init__(self, made, *, keeps_all, outlives):
        self.made, self.checks_files = made, keeps_all and outlives
        self.finds_all = keeps_all
        """Whether all that is kept is found."""
        self.hands_over = bool(made.stack.p2p_numbers)
        self.kept = []
        """Seeds, and what was computed under them."""
        self.num_loaded = 0

    def hand_over(self, *texts):
        """Have another host compute them, where hosts hand over at all."""
        if not self.hands_over:
            return None
        self.kept += [(self.made.weights.seed, text) for text in texts]
        return self.made.hand_over(0, list(texts), NEW_TOKENS)

    def ask(self, *texts, held=None, change=None):
        """Ask; see that nothing was loaded but what was computed under the weights of now."""
        made, before = self.made, self.made.weights.seed
        made.forget()
        found = made.ask(list(texts), NEW_TOKENS, held, change)
        seed, num_loaded = made.weights.seed, found.counts.get("tokens_loaded", 0)
        if found.cut is not None and not self.hands_over:
            self.kept.append((before, found.cut.prompt_token_ids))
        known = sum(self._num_kept(seed, text) for text in texts)
        assert num_loaded == known if self.finds_all else num_loaded <= known
        self.num_loaded += num_loaded
        if not self.hands_over:
            self.kept += [(seed, each.all_token_ids[:-1]) for each in found.requests]
        made.wait_for_releases()
        if self.checks_files:
            self._check_files()
        return found

    def turn(self, *texts, change=None):
        """Hand over, and ask; return where the texts are held, and what was found."""
        held = self.hand_over(*texts)
        return held, self.ask(*texts, held=held, change=change)

    def _blocks(self):
        """Return the blocks that are kept: their seed, and all tokens up to their end."""
        size = self.made.block_size
        return {
            (seed, *text[:end])
            for seed, text in self.kept
            for end in range(size, len(text) + 1, size)
        }

    def _check_files(self):
        """Wait until all is there that is to be found after a restart; see that nothing else is."""
        number, deadline = len(self._blocks()), Deadline(30.0)
        while len(files := list(self.made.folder.rglob("blocks/*"))) < number:
            deadline.check("blocks")
            time.sleep(0.005)
        assert len(files) == number

    def _num_kept(self, seed, text):
        """Return how many tokens of a text were computed under these weights and are kept."""
        if self.hands_over and (seed, text) not in self.kept:
            return 0
        blocks, size = self._blocks(), self.made.block_size
        ends = range(size, len(text), size)
        return max((end for end in ends if (seed, *text[:end]) in blocks), default=0)


def go_on_for_long(made, connector, change, room, end):
    """Ask before, amid and after changes and a restart."""
    made.may_lose = room == "evicting"
    keeps_all = room == "room"
    talks = Conversations(made, keeps_all=keeps_all, outlives=connector in OUTLIVING)
    # A block that is being stored in an arena is not found, even if its file is there already; in
    # another process nobody is told when its store has ended.
    may_be_storing = (connector, end) == ("arena over files", "killed")
    talks.finds_all = keeps_all and not may_be_storing
    olds = [drawn(40, "old", number) for number in range(2)]
    olds_held, _ = talks.turn(*olds)
    _, found = talks.turn(drawn(40, "going on"))
    _, found = talks.turn(gone_on(found.requests[0]))
    assert talks.num_loaded > 0 or may_be_storing
    cuts = []
    for seed in CHANGES[change]:
        text = gone_on(found.requests[0])
        _, found = talks.turn(text, change=(seed, drawn(18, "cut", seed)))
        cuts += [found.cut.all_token_ids] if found.cut else []
    last = gone_on(found.requests[0])
    last_held = talks.hand_over(last)
    assert bool(made.num_evicted()) == (room == "evicting")
    before = talks.num_loaded
    if end:
        made.restart()
        talks.finds_all = keeps_all
        made.may_lose |= talks.hands_over
        if connector not in OUTLIVING:
            talks.kept.clear()
    talks.ask(last, held=last_held)
    # What was used last gives way last; where files do is not known to an arena over them.
    assert talks.num_loaded > before or end or connector in OUTLIVING
    talks.ask(*olds, held=olds_held)
    if cuts:
        talks.ask(*cuts)


@pytest.mark.parametrize(("connector", "change", "room", "end", "block_size"), cells())
def test_every_answer_is_that_of_the_weights_of_the_moment(  # noqa: PLR0917
    service, connector, change, room, end, block_size
):
    made = service(CONNECTORS[connector], block_size, 512 // block_size, ROOM[room])
    go_on_for_long(made, connector, change, room, end)


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("connector", ["files", "arena over files"])
def test_killed_host_is_followed_by_another_process(process, connector, change):
    """The first has its weights from a publisher, and the second has loaded the same ones."""
    made = process(CONNECTORS[connector], is_updated=change != "same weights")
    go_on_for_long(made, connector, change, "room", "killed")
