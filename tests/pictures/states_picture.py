"""The states of a worker, and the events that lead from one to another, found by trying all."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from drawing import LINE_HEIGHT, Picture

from wtransfer.errors import CommitError
from wtransfer.weight_sync.messages import Commit, Rollback
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


LOST = f"`{WorkerSession.weights_lost.__name__}()`"
ARROWS: dict[tuple[str, str], tuple[list[tuple[float, float]], tuple[float, float], Any]] = {
    ("fresh", "pending"): ([(176, 55), (322, 55)], (249, 48), "middle"),
    ("serving", "pending"): ([(654, 42), (478, 42)], (566, 36), "middle"),
    ("pending", "serving"): ([(478, 66), (654, 66)], (566, 83), "middle"),
    ("pending", "behind"): ([(372, 86), (372, 290)], (362, 160), "end"),
    ("behind", "pending"): ([(428, 290), (428, 86)], (438, 262), "start"),
    ("pending", "empty"): ([(478, 80), (654, 300)], (556, 134), "start"),
    ("empty", "serving"): ([(754, 290), (754, 86)], (746, 240), "end"),
}
"""Points of the arrow between two states, place of its first line of text, anchor of its text."""


class Worker:
    """A committer, a model of one number, and a publisher that orders what it may."""

    def __init__(self) -> None:
        self.num_failures = 0
        self.number = 0
        self.committer = Committer(
            self,
            self,
            Place("worker", "instance", 0, 1, None),
            SimpleNamespace(send=lambda _: None, lock=threading.RLock(), close=lambda: None),
            keep_previous=True,
            cast=False,
            cast_hint="",
            deadline_s=1.0,
        )

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

    def commit(self, num_failures: int = 0) -> None:
        self.num_failures = num_failures
        with contextlib.suppress(CommitError):
            self.committer.commit()
        self.num_failures = 0

    def events(self) -> dict[str, Any]:
        call = f"`{WorkerSession.commit_pending.__name__}()`"
        return {
            f"`{Commit.__name__}`": self.order,
            call: self.commit,
            f"{call} fails,\nthe old version is back": lambda: self.commit(1),
            f"{call} fails,\nand so does the way back": lambda: self.commit(2),
            f"`{WorkerSession.discard_pending.__name__}()`": self.committer.discard,
            f"`{Rollback.__name__}`": lambda: self.committer.weight_state.rollback("round", "why"),
            LOST: lambda: self.committer.weights_lost("why"),
        }


def transitions() -> dict[tuple[str, str], list[str]]:
    """Return (state, next state) -> the events that lead there, by trying all, in any order."""
    found: dict[tuple[str, str], list[str]] = {}
    seen: set[tuple[str, bool]] = set()
    left: list[list[str]] = [[]]
    while left:
        path = left.pop(0)
        names = list(Worker().events())
        worker = _after(path)
        if (worker.state, worker.is_pending) in seen:
            continue
        seen.add((worker.state, worker.is_pending))
        for name in names:
            before, after = worker.state, _after([*path, name]).state
            if after != before and name not in found.setdefault((before, after), []):
                found[before, after].append(name)
            left.append([*path, name])
    return found


def _after(path: Iterable[str]) -> Worker:
    worker = Worker()
    for name in path:
        worker.events()[name]()
    return worker


def draw() -> Picture:
    """Return the picture."""
    found = transitions()
    from_any = found_from(found, LOST)
    assert from_any == {(each, "empty") for each in PLACES if each != "empty"}
    for pair in from_any:
        found[pair].remove(LOST)
    found = {pair: events for pair, events in found.items() if events}
    assert set(found) == set(ARROWS), set(found) ^ set(ARROWS)
    words = (f"{a} to {b} by {' or '.join(events)}" for (a, b), events in found.items())
    desc = f"{'; '.join(words)}; to empty from any state by {LOST}".replace("`", "")
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
