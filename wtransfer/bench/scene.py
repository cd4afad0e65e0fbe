"""A scene: one trainer process and its workers, started, watched and seen off."""

from __future__ import annotations

import json
import os
import secrets
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wtransfer.deadline import Deadline
from wtransfer.errors import PeerLostError, StallError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

    from typing_extensions import Self

    from wtransfer.transport.zygote import Child, Zygote

POLL_S = 0.05
"""How often the children are looked at, in seconds."""
LEAVE_S = 10.0
"""How long workers may take to end after their trainer, in seconds."""
_TAIL_NBYTES = 2000


@dataclass(frozen=True)
class Scene:
    """What to play. Equal scenes are played once.

    Both jobs are called with keywords: the arguments, ``rank`` (0: the trainer), ``num_workers``,
    and where to meet: ``address`` and ``token``, or ``store``. What they tell
    (`wtransfer.bench.jobs`) is what the scene yields.
    """

    name: str
    """For people."""
    trainer: str
    """``"module:function"`` that the trainer runs; the scene is over when it returns."""
    worker: str
    """``"module:function"`` that each worker runs."""
    num_workers: int
    """How many of them."""
    arguments: tuple[tuple[str, Any], ...]
    """Keywords of both."""
    replaces_killed: bool = False
    """Whether a new worker takes the place of one that was killed."""
    timeout_s: float = 600.0
    """When it has failed."""


def workers_in_words(number: int) -> str:
    """Return how many workers there are."""
    return f"{number} worker{'' if number == 1 else 's'}"


@dataclass(frozen=True)
class Told:
    """What the processes of a scene said."""

    trainer: dict[str, Any]
    """The trainer."""
    workers: tuple[dict[str, Any], ...]
    """Those of the workers that said something."""


class Output:
    """Where a child writes: a file without a name, so that nothing can be left behind."""

    def __init__(self) -> None:
        self._file: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self.path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        """By which a child of this user opens it."""

    def text(self) -> str:
        """Return what was written so far."""
        descriptor = self._file.fileno()
        written = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        return written.decode("utf-8", "replace")

    def close(self) -> None:
        """Let go of it."""
        self._file.close()


class Actor:
    """One process of a scene."""

    def __init__(self, zygote: Zygote, job: str, keywords: dict[str, Any]) -> None:
        self.job = job
        self._output, self._errors = Output(), Output()
        self._child: Child = zygote.spawn(
            job, stdout=self._output.path, stderr=self._errors.path, **keywords
        )

    def poll(self) -> int | None:
        """Return its return code, None while it runs."""
        return self._child.poll()

    def told(self) -> dict[str, Any]:
        """Return what it told; empty if nothing."""
        lines = self._output.text().splitlines()
        found: dict[str, Any] = json.loads(lines[-1]) if lines else {}
        return found

    def last_words(self) -> str:
        """Return the end of what it wrote to standard error."""
        return self._errors.text()[-_TAIL_NBYTES:].strip()

    def see_off(self, timeout_s: float) -> None:
        """Wait for its end, and kill it when that does not come."""
        try:
            self._child.wait(timeout_s)
        except StallError:
            self._child.kill()
            self._child.wait(LEAVE_S)

    def close(self) -> None:
        """Let go of its output."""
        self._output.close()
        self._errors.close()


class Stage:
    """Plays one scene. Use it as a context manager: whatever happens, the children are gone.

    Args:
        zygote: Forks them.
        scene: Is played.
    """

    def __init__(self, zygote: Zygote, scene: Scene) -> None:
        self._zygote = zygote
        self._scene = scene
        self._deadline = Deadline(scene.timeout_s)
        # Rendezvous of process groups, where a scene has one; as nameless as the outputs.
        self._store = Output()
        self._keywords = {
            "address": f"unix:@wtransfer-bench-{secrets.token_hex(8)}",
            "token": secrets.token_hex(16),
            "store": self._store.path,
            "num_workers": scene.num_workers,
            **dict(scene.arguments),
        }
        self._actors: list[Actor] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            for actor in self._actors:
                actor.see_off(0.0)
        finally:
            for actor in self._actors:
                actor.close()
            self._store.close()

    def play(self) -> Told:
        """Play it to its end.

        Raises:
            PeerLostError: A process failed; the text has its last words.
            StallError: It takes too long.
        """
        trainer = self._start(self._scene.trainer, 0)
        workers = [self._start(self._scene.worker, 1 + n) for n in range(self._scene.num_workers)]
        while (code := trainer.poll()) is None:
            self._deadline.check(f"the bench's scene {self._scene.name!r}")
            workers = list(self._still_there(workers))
            time.sleep(POLL_S)
        if code != 0:
            raise self._lost(trainer, code)
        for worker in workers:
            worker.see_off(LEAVE_S)
        return Told(trainer.told(), tuple(filter(None, (each.told() for each in workers))))

    def _start(self, job: str, rank: int) -> Actor:
        actor = Actor(self._zygote, job, {"rank": rank, **self._keywords})
        self._actors.append(actor)
        return actor

    def _still_there(self, workers: list[Actor]) -> Iterator[Actor]:
        for rank, worker in enumerate(workers, 1):
            code = worker.poll()
            if code in (None, 0):
                yield worker
            elif self._scene.replaces_killed and code < 0:
                yield self._start(self._scene.worker, rank)
            else:
                raise self._lost(worker, code)

    def _lost(self, actor: Actor, code: int) -> PeerLostError:
        return PeerLostError(
            f"a process of the bench ({actor.job}) ended with {code} in the scene "
            f"{self._scene.name!r}: {actor.last_words()}"
        )
