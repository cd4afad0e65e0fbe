"""The states of a worker, and the events between them: each is tried in every state."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from drawing import LINE_HEIGHT, Picture

from wtransfer.errors import CommitError
from wtransfer.weight_sync.messages import Ack, Commit, Rollback
from wtransfer.weight_sync.worker.committer import Committer, Place
from wtransfer.weight_sync.worker.session import WorkerSession
from wtransfer.weight_sync.worker.weight_state import WeightSet

if TYPE_CHECKING:
    from collections.abc import Iterable

PLACES = {
    "fresh": (20, 24),
    "pending": (322, 24),
    "serving": (654, 24),
    "behind": (322, 290),
    "empty": (654, 290),
}
"""Left upper corner of each state's box."""
SIZE = (156, 62)
MEANINGS = {
    "fresh": ("old", "no update yet"),
    "pending": ("work", "verified, not applied"),
    "serving": ("new", "the last commit"),
    "behind": ("old", "an older version"),
    "empty": ("bad", "must not serve"),
}
"""Kind of box, and meaning, of each state."""


SEVERAL = "several ranks"
CALL = f"`{WorkerSession.commit_pending.__name__}()`"
LOST = f"`{WorkerSession.weights_lost.__name__}()`"
ARROWS: dict[tuple[str, str], tuple[list[tuple[float, float]], tuple[float, float], Any]] = {
    ("fresh", "pending"): ([(176, 55), (322, 55)], (249, 48), "middle"),
    ("serving", "pending"): ([(654, 42), (478, 42)], (566, 36), "middle"),
    ("pending", "serving"): ([(478, 66), (654, 66)], (566, 83), "middle"),
    ("pending", "behind"): ([(372, 86), (372, 290)], (362, 160), "end"),
    ("behind", "pending"): ([(428, 290), (428, 86)], (438, 262), "start"),
    ("pending", "empty"): ([(478, 80), (654, 300)], (556, 134), "start"),
    ("empty", "serving"): ([(754, 290), (754, 86)], (746, 214), "end"),
}
"""Points of the arrow between two states, place of its first line of text, anchor of its text."""


class Worker:
    """A committer, a model of one number, and a publisher that orders what it may.

    Args:
        num_ranks: Ranks of its instance; the publisher finishes a commit as soon as it is told.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.num_failures = 0
        self.number = 0
        self.committer = Committer(
            self,
            set(),  # it is known by an object that is gone: closed, it leaves no model behind
            Place("worker", "instance", 0, num_ranks, None),
            SimpleNamespace(send=self.finish, lock=threading.RLock(), close=lambda: None),
            keep_previous=True,
            cast=False,
            cast_hint="",
            deadline_s=1.0,
        )

    def close(self) -> None:
        self.committer.close()

    @property
    def state(self) -> str:
        return self.committer.weight_state.state

    @property
    def is_pending(self) -> bool:
        return self.committer.weight_state.pending is not None

    # -- the model

    def schema(self) -> None:
        return None

    def capture(self) -> dict[str, int]:
        return {"a": self.number}

    def apply(self, tensors: Any) -> None:
        if self.num_failures:
            self.num_failures -= 1
            raise RuntimeError
        self.number = tensors["a"]

    # -- what may happen

    def order(self) -> None:
        state = self.committer.weight_state
        if not self.is_pending:
            held = WeightSet("v", "fingerprint", None, {"a": 1})
            update = SimpleNamespace(
                publisher=SimpleNamespace(address="unix:@played", connected=True),
                round_id="round",
                version="v",
                held=held,
                seconds={},
                facts={"round_id": "round", "version": "v", "worker": "worker"},
                drop=lambda _reason: None,
            )
            state.plan(update)
            state.prepare("round")
            state.verified(update)
            state.commit("round")

    def finish(self, message: object) -> None:
        if isinstance(message, Ack):
            self.committer.weight_state.finish("round")

    def commit(self, num_failures: int = 0) -> None:
        self.num_failures = num_failures
        with contextlib.suppress(CommitError):
            self.committer.commit()
        self.num_failures = 0

    def events(self) -> dict[str, Any]:
        state = self.committer.weight_state
        # Of several ranks, as `RoundState` does.
        of_several = {f"`{Rollback.__name__}` ({SEVERAL})": lambda: state.rollback("round", "why")}
        return {
            f"`{Commit.__name__}`": self.order,
            CALL: self.commit,
            f"{CALL} fails,\nthe old version is back": lambda: self.commit(1),
            f"{CALL} fails,\nand so does the way back": lambda: self.commit(2),
            f"`{WorkerSession.discard_pending.__name__}()`": self.committer.discard,
            LOST: lambda: self.committer.weights_lost("why"),
            f"the publisher is lost ({SEVERAL})": state.publisher_lost,
            **(of_several if self.num_ranks > 1 else {}),
        }


def transitions(num_ranks: int) -> dict[tuple[str, str], list[str]]:
    """Return (state, next state) -> the events that lead there: each is tried in every state."""
    found: dict[tuple[str, str], list[str]] = {}
    seen: set[tuple[str, bool]] = set()
    left: list[list[str]] = [[]]
    with contextlib.closing(Worker(num_ranks)) as worker:
        names = list(worker.events())
    while left:
        path = left.pop(0)
        before = _after(path, num_ranks)
        if before in seen:
            continue
        seen.add(before)
        for name in names:
            pair = before[0], _after([*path, name], num_ranks)[0]
            if pair[0] != pair[1] and name not in found.setdefault(pair, []):
                found[pair].append(name)
            left.append([*path, name])
    return found


def _after(path: Iterable[str], num_ranks: int) -> tuple[str, bool]:
    """Return the state of a worker after some events, and whether a set is pending."""
    with contextlib.closing(Worker(num_ranks)) as worker:
        for name in path:
            worker.events()[name]()
        return worker.state, worker.is_pending


def draw() -> Picture:
    """Return the picture."""
    found: dict[tuple[str, str], list[str]] = {}
    for num_ranks in (1, 2):
        for pair, events in transitions(num_ranks).items():
            known = found.setdefault(pair, [])
            known += [each for each in events if each not in known]
    from_any = found_from(found, LOST)
    assert from_any == {(each, "empty") for each in PLACES if each != "empty"}
    for pair in from_any:
        found[pair].remove(LOST)
    found = {pair: events for pair, events in found.items() if events}
    assert set(found) == set(ARROWS), set(found) ^ set(ARROWS)
    # A commit that is ordered leaves a worker *empty* until it is applied.
    assert found["empty", "serving"] == [CALL]
    found["empty", "serving"] = [f"`{Commit.__name__}`, then\n{CALL}"]
    words = (f"{a} to {b} by {' or '.join(events)}" for (a, b), events in found.items())
    desc = f"{'; '.join(words)}; to empty from any state by {LOST}"
    picture = Picture(376, "The states of a worker", desc)
    for name, (x, y) in PLACES.items():
        kind, meaning = MEANINGS[name]
        picture.box(x, y, *SIZE, f"`{name}`", meaning, kind=kind)
    for pair, (points, (x, y), anchor) in ARROWS.items():
        picture.arrow(*points)
        for number, line in enumerate(line for event in found[pair] for line in event.split("\n")):
            picture.text(x, y + LINE_HEIGHT * number, line, anchor=anchor)
    picture.arrow((498, 340), (654, 340))
    picture.text(570, 332, LOST, anchor="middle")
    picture.text(570, 358, "from any state", anchor="middle")
    return picture


def found_from(found: dict[tuple[str, str], list[str]], event: str) -> set[tuple[str, str]]:
    """Return the transitions that an event makes."""
    return {pair for pair, events in found.items() if event in events}
