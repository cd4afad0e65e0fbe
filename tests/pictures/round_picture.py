"""A round as a time line: the messages of each phase, and the weights that serve meanwhile.

Phases, stages and states are those of a round that is run here; messages those that the machine of
a publisher's rounds sends, and their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from drawing import CODE_WIDTH, Picture

from wtransfer.testing.fleet import Fleet, GatedSource
from wtransfer.weight_sync.messages import Accept, Ack, Hello, Plan, Received, Vote
from wtransfer.weight_sync.trainer.round_handle import Round
from wtransfer.weight_sync.trainer.round_state import RoundState
from wtransfer.weight_sync.trainer.workers import Worker
from wtransfer.weight_sync.worker.target import StateDictTarget

if TYPE_CHECKING:
    from collections.abc import Callable

OLD, NEW = "step-6", "step-7"
WIDTHS = {"init": 40, "plan": 118, "transfer": 172, "prepare": 116, "commit": 214, "finish": 54}
"""Of each phase of the publisher, in pixels."""
STAGES = {"accept": "plan", "transfer": "transfer", "verify": "prepare", "commit": "commit"}
"""Phase in which a worker has a stage; it waits for its model before it commits."""
LEFT = 104


class Watched(StateDictTarget):
    """A model that looks at its session and the round before an update is applied."""

    def __init__(self) -> None:
        super().__init__({"a": torch.zeros(2), "b": torch.zeros(2)})
        self.look: Callable[[], Any] = lambda: None

    def apply(self, tensors: Any) -> None:
        self.seen = self.look()
        super().apply(tensors)


def recorded_round() -> tuple[list[str], list[str]]:
    """Run a round with two workers; return the publisher's phases and the stages of a worker."""
    source = GatedSource({"a": torch.ones(2), "b": torch.ones(2)})
    fleet = Fleet(source)
    try:
        models = [Watched(), Watched()]
        sessions = [fleet.join(each).session for each in models]
        fleet.publish(OLD)
        source.reached.clear()
        source.gate.clear()
        round_ = fleet.publisher.publish(NEW, wait=False)
        assert source.reached.wait(10)
        assert [(each.version, each.state) for each in sessions] == [(OLD, "serving")] * 2
        assert round_.phase == "transfer"
        source.gate.set()
        for model, session in zip(models, sessions, strict=True):
            model.look = lambda of=session: (of.version, of.state, round_.phase)
            assert session.commit_pending(10)
            # Every worker had voted, and served the old version until the call that applies the
            # new one.
            assert model.seen == (OLD, "pending", "commit")
            assert (session.version, session.state) == (NEW, "serving")
        report = round_.result()
    finally:
        # First: a pass that waits at the gate does not end otherwise.
        source.gate.set()
        fleet.close()
    stages = [list(each.seconds) for each in report.workers]
    assert stages[0] == stages[1]
    return [each for each in report.seconds if each != "total"], stages[0]


def recorded_messages() -> dict[str, list[tuple[str, str]]]:
    """Return phase -> messages in their order, each with its arrow: from the trainer or to it."""
    found: dict[str, list[tuple[str, str]]] = {}
    no_connection: Any = None
    worker = Worker(no_connection, Hello("w", "i", 0, 1, OLD, "f", "serving"))

    def send(workers: list[Worker], message: object) -> None:
        if workers:
            found[phase].append(("out", type(message).__name__))

    round_ = RoundState("r", NEW, [[worker]], send)
    table: dict[str, tuple[Callable[[], Any], Any]] = {
        "plan": (lambda: round_.plan(Plan("r", NEW, None), "manifest"), Accept("r", [])),
        "transfer": (lambda: round_.data({}), Received("r", 0)),
        "prepare": (lambda: round_.prepare("f", []), Vote("r", "f", 1, {})),
        "commit": (lambda: round_.commit("f"), Ack("r", "committed", NEW, "f", "serving", {})),
    }
    for phase, (begin, answer) in table.items():
        found[phase] = []
        begin()
        found[phase].append(("back", type(answer).__name__))
        assert round_.answer(worker, answer)
    assert round_.settled
    return found


def draw() -> Picture:
    """Return the picture."""
    (phases, stages), messages = recorded_round(), recorded_messages()
    assert set(phases) == set(WIDTHS), phases
    assert {*stages} == {*STAGES, "wait"}, stages
    starts, x = {}, LEFT
    for phase in phases:
        starts[phase] = x
        x += WIDTHS[phase]
    end = x
    commit = starts["commit"]
    picture = Picture(
        432,
        "A round of weights as a time line",
        f"The publisher goes through the phases {', '.join(phases)}. Two workers serve "
        f"{OLD} until each applies {NEW} between two steps of its model, after all have verified "
        "every digest. The trainer trains on as soon as its weights are read.",
    )
    for phase in phases:
        picture.rule(starts[phase], 16, 388)
    # Lanes from above: worker, its messages, the trainer, messages, the other worker.
    for number, (serves, top, arrows, commits_at) in enumerate(
        [(20, 56, (84, 166), 72), (350, 316, (316, 234), 90)]
    ):
        picture.text(16, serves + 19, f"worker {number}")
        applies = commit + commits_at
        pause = len(" commit ") * CODE_WIDTH
        picture.box(LEFT, serves, applies - LEFT, 28, f"serves `{OLD}`", kind="old")
        picture.text(applies + pause / 2, serves + 19, "~pause", anchor="middle")
        new = (applies + pause, serves, end - applies - pause, 28)
        picture.box(*new, f"serves `{NEW}`", kind="new")
        # A worker answers at the end of a stage.
        answers = {
            phase: starts[phase] + WIDTHS[phase] - len(name) * CODE_WIDTH - 10
            for phase, sent in messages.items()
            for arrow, name in sent
            if arrow == "back"
        } | {"commit": applies + pause}
        picture.box(commit + 8, top, applies - commit - 8, 28, "`wait`")
        for stage, phase in STAGES.items():
            x = applies if stage == "commit" else starts[phase] + 8
            picture.box(x, top, answers[phase] - x, 28, f"`{stage}`", kind="work")
        draw_messages(picture, messages, starts, arrows, answers)
    picture.text(16, 188, "trainer")
    for phase in phases:
        picture.box(starts[phase] + 1, 168, WIDTHS[phase] - 2, 30, f"`{phase}`")
    reads = starts["transfer"]
    packed = reads + 0.56 * WIDTHS["transfer"]
    picture.box(reads + 1, 204, packed - reads - 1, 28, "reads weights", kind="old")
    trains = f"trains on, from `{Round.__name__}.{Round.packed.__name__}()`"
    picture.box(packed, 204, end - packed, 28, trains, kind="new")
    picture.text(LEFT, 412, f"~a failure here: every worker keeps `{OLD}`, whole")
    picture.text(commit, 412, "~from here the round only goes forward")
    return picture


def draw_messages(
    picture: Picture,
    messages: dict[str, list[tuple[str, str]]],
    starts: dict[str, float],
    between: tuple[float, float],
    answers: dict[str, float],
) -> None:
    """Draw the messages between one worker and the trainer, in the space between their lanes."""
    at_worker, at_trainer = between
    middle = (at_worker + at_trainer) / 2 + 4
    for phase, sent in messages.items():
        x = starts[phase] + 8
        for arrow, name in sent:
            if arrow == "back":
                x = answers[phase]
            ends = [(x, at_trainer), (x, at_worker)]
            picture.arrow(*(ends if arrow == "out" else ends[::-1]))
            picture.text(x + 5, middle, f"`{name}`")
            x += len(name) * CODE_WIDTH + 14
