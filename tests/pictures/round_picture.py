"""A round as a time line: who sends what to whom in which phase, and which weights serve meanwhile.

Phases, stages and states are those of a round that is run here; messages those that the machine of
a publisher's rounds sends, and their order.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from drawing import CODE_WIDTH, Picture

from wtransfer.testing.fleet import Fleet, GatedSource
from wtransfer.weight_sync.messages import (
    Accept,
    Ack,
    Commit,
    Data,
    Finish,
    Hello,
    Plan,
    Prepare,
    Received,
    Vote,
)
from wtransfer.weight_sync.trainer.round_handle import Round
from wtransfer.weight_sync.trainer.round_state import RoundState
from wtransfer.weight_sync.trainer.workers import Worker

OLD, NEW = "step-6", "step-7"
WIDTHS = {"init": 40, "plan": 106, "transfer": 172, "prepare": 120, "commit": 222, "finish": 54}
"""Of each phase of the publisher, in pixels."""
STAGES = {"accept": "plan", "transfer": "transfer", "verify": "prepare", "commit": "commit"}
"""Phase in which a worker has a stage; it waits for its model before it commits."""
LEFT = 104


def recorded_round() -> Any:
    """Run a round with two workers, and return what became of it."""
    source = GatedSource({"a": torch.ones(2), "b": torch.ones(2)})
    fleet = Fleet(source)
    try:
        workers = [fleet.join({"a": torch.zeros(2), "b": torch.zeros(2)}) for _ in range(2)]
        sessions = [each.session for each in workers]
        fleet.publish(OLD)
        source.reached.clear()
        source.gate.clear()
        round_ = fleet.publisher.publish(NEW, wait=False)
        assert source.reached.wait(10)
        assert [(each.version, each.state) for each in sessions] == [(OLD, "serving")] * 2
        assert round_.phase == "transfer"
        source.gate.set()
        for each in sessions:
            while each.state != "pending":
                assert not round_.wait(0.001)
            # Every worker has voted, and serves the old version until the call that applies the
            # new one.
            assert (each.version, round_.phase) == (OLD, "commit")
        for each in sessions:
            each.commit_pending()
            assert (each.version, each.state) == (NEW, "serving")
        report = round_.result()
    finally:
        fleet.close()
    phases = [each for each in report.seconds if each != "total"]
    ends = [sum(report.seconds[each] for each in phases[: n + 1]) for n in range(len(phases))]
    packed_in = next(p for p, end in zip(phases, ends, strict=True) if report.packed_s <= end)
    stages = [list(each.seconds) for each in report.workers]
    assert stages[0] == stages[1]
    return SimpleNamespace(phases=phases, packed_in=packed_in, stages=stages[0])


def recorded_messages() -> dict[str, list[tuple[str, str]]]:
    """Return phase -> messages in their order, each with its arrow: from the trainer or to it."""
    found: dict[str, list[tuple[str, str]]] = {}
    phase = "plan"

    def note(arrow: str, message: object) -> None:
        found.setdefault(phase, []).append((arrow, type(message).__name__))

    no_connection: Any = None
    worker = Worker(no_connection, Hello("w", "i", 0, 1, OLD, "f", "serving"))

    def answer(message: Any) -> None:
        note("back", message)
        round_.answer(worker, message)

    def send(workers: list[Worker], message: object) -> None:
        if workers:
            note("out", message)

    round_ = RoundState("r", NEW, [[worker]], send)
    round_.plan(Plan("r", NEW, None), "manifest")
    answer(Accept("r", []))
    phase = "transfer"
    answer(Received("r", round_.data({})))
    phase = "prepare"
    round_.prepare("f", [])
    answer(Vote("r", "f", 1, {}))
    phase = "commit"
    round_.commit("f")
    answer(Ack("r", "committed", NEW, "f", "serving", {}))
    assert round_.settled
    expected = [Plan, Accept, Data, Received, Prepare, Vote, Commit, Ack, Finish]
    assert [name for each in found.values() for _, name in each] == [e.__name__ for e in expected]
    return found


def draw() -> Picture:
    """Return the picture."""
    recorded, messages = recorded_round(), recorded_messages()
    assert set(recorded.phases) == set(WIDTHS), recorded.phases
    assert {*recorded.stages} == {*STAGES, "wait"}, recorded.stages
    starts, x = {}, LEFT
    for phase in recorded.phases:
        starts[phase] = x
        x += WIDTHS[phase]
    end = x
    commit = starts["commit"]
    picture = Picture(
        432,
        "A round of weights as a time line",
        f"The publisher goes through the phases {', '.join(recorded.phases)}. Two workers serve "
        f"{OLD} until each applies {NEW} between two steps of its model, after all have verified "
        "every digest. The trainer trains on as soon as its weights are read.",
    )
    for phase in recorded.phases:
        picture.rule(starts[phase], 16, 388)
    # Lanes from above: worker, its messages, the trainer, messages, the other worker.
    for number, (serves, stages, arrows, commits_at) in enumerate(
        [(20, 56, (84, 166), 72), (350, 316, (316, 234), 90)]
    ):
        picture.text(16, serves + 19, f"worker {number}")
        applies = commit + commits_at
        pause = len(" commit ") * CODE_WIDTH
        picture.box(LEFT, serves, applies - LEFT, 28, f"serves `{OLD}`", kind="old")
        picture.text(applies + pause / 2, serves + 19, "~pause", anchor="middle")
        new = (applies + pause, serves, end - applies - pause, 28)
        picture.box(*new, f"serves `{NEW}`", kind="new")
        for stage, phase in STAGES.items():
            place = (starts[phase] + 3, WIDTHS[phase] - 6)
            if stage == "commit":
                waits = commit + 12
                picture.box(waits, stages, applies - waits, 28, "`wait`", kind="plain")
                place = (applies, pause)
            picture.box(place[0], stages, place[1], 28, f"`{stage}`", kind="work")
        draw_messages(picture, messages, starts, arrows, applies + pause)
    picture.text(16, 188, "trainer")
    for phase in recorded.phases:
        picture.box(starts[phase] + 1, 168, WIDTHS[phase] - 2, 30, f"`{phase}`")
    packed = starts[recorded.packed_in] + 0.72 * WIDTHS[recorded.packed_in]
    reads = starts[recorded.packed_in]
    picture.box(reads + 1, 204, packed - reads - 1, 28, "weights are read", kind="old")
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
    applied: float,
) -> None:
    """Draw the messages between one worker and the trainer, in the space between their lanes."""
    at_worker, at_trainer = between
    middle = (at_worker + at_trainer) / 2 + 4
    for phase, sent in messages.items():
        x = starts[phase] + 8
        for arrow, name in sent:
            if arrow == "back" and phase == "commit":
                # Not before the worker has applied the update.
                x = applied + 4
            ends = [(x, at_trainer), (x, at_worker)]
            picture.arrow(*(ends if arrow == "out" else ends[::-1]))
            picture.text(x + 5, middle, f"`{name}`")
            x += len(name) * CODE_WIDTH + 14
