"""Wait, within a deadline, for what an engine does on its own thread."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, InvalidStateError, wait
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from wtransfer.calls import forget_frames

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from wtransfer.deadline import Deadline
    from wtransfer.weight_sync.worker.hosted import HostedEngine

T = TypeVar("T")


class Step(NamedTuple):
    """Something that an engine is at."""

    running: threading.Event
    """Set when it has returned."""
    outcome: Future[Any]
    """What it came to; whoever waits for it goes on when this is set."""

    def end(self, error: BaseException) -> None:
        """Let whoever waits go on with an error, unless the engine has answered already."""
        with contextlib.suppress(InvalidStateError):
            self.outcome.set_exception(error)


def on_engine(
    engine: HostedEngine,
    step: Callable[[], T],
    deadline: Deadline,
    what: str,
    note: Callable[[Step], None] = lambda _step: None,
) -> T:
    """Run a step on an engine's thread, and return or raise what it does.

    Args:
        engine: Whose thread.
        step: What to run.
        deadline: Bounds the wait; the step may restart it.
        what: The engine's method, for errors.
        note: Given what a step can be ended by.
    """
    outcome: Future[T] = Future()

    def guarded() -> None:
        try:
            result = step()
        except BaseException as error:
            # Whoever was first, the engine or who ended its step, is right.
            with contextlib.suppress(InvalidStateError):
                outcome.set_exception(error)
        else:
            with contextlib.suppress(InvalidStateError):
                outcome.set_result(result)

    running = engine.submit(guarded)
    note(Step(running, outcome))
    while not outcome.done():
        wait([outcome], deadline.remaining())
        if deadline.expired and not outcome.done():
            engine.abort_in_background(running)
            deadline.check(f"{what} of engine {engine.name!r}")
    # Else the error would keep tensors, by the frames that it passed through.
    forget_frames(outcome.exception())
    return outcome.result()
