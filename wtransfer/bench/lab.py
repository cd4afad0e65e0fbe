"""Where measurements are made: processes with torch imported, and scenes that are played once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wtransfer.bench.rounds import Rounds, Take
from wtransfer.bench.scene import Scene, Stage, Told
from wtransfer.errors import WTransferError
from wtransfer.transport.zygote import Zygote

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

    from wtransfer.bench.settings import Settings

JOBS = "wtransfer.bench.jobs"
"""Where the children's functions are."""
_PRELOAD = (
    "torch",
    *(
        f"{JOBS}.{name}"
        for name in (
            "broadcasting",
            "checkpointing",
            "copying",
            "footprint",
            "joining",
            "killing",
            "publishing",
            "serving",
        )
    ),
)


class Lab:
    """Plays scenes in processes that are gone when it is closed. Use it as a context manager.

    Args:
        settings: What is measured.
        on_scene: Called with the name of every scene before it is played.
    """

    def __init__(self, settings: Settings, on_scene: Callable[[str], None]) -> None:
        self.settings = settings
        self._on_scene = on_scene
        self._played: dict[Scene, Told | WTransferError] = {}
        self._copy_s: dict[Scene, float] = {}
        self._zygote = Zygote(_PRELOAD)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._zygote.close()

    def play(self, scene: Scene) -> Told:
        """Return what a scene yields; one that failed before fails again at once.

        Raises:
            WTransferError: It failed.
        """
        if scene not in self._played:
            self._on_scene(scene.name)
            try:
                self._played[scene] = self._play(scene)
            except WTransferError as error:
                self._played[scene] = error
        told = self._played[scene]
        if isinstance(told, WTransferError):
            raise told
        return told

    def _play(self, scene: Scene) -> Told:
        with Stage(self._zygote, scene) as stage:
            return stage.play()

    def rounds(self, take: Take) -> Rounds:
        """Return rounds of an engine, played between two plain copies of their bytes.

        Raises:
            WTransferError: They failed.
        """
        scene = self._scene_of(take)
        if scene in self._copy_s:
            return Rounds(self.play(scene), self._copy_s[scene])
        nbytes = take.tensors.total_nbytes()
        before_s = self.copy_s(nbytes)
        told = self.play(scene)
        self._copy_s[scene] = min(before_s, self.copy_s(nbytes))
        return Rounds(told, self._copy_s[scene])

    def copy_s(self, nbytes: int) -> float:
        """Return the seconds that a plain copy takes now."""
        job = f"{JOBS}.copying:measure"
        told = self._play(Scene(f"a copy of {nbytes} bytes", job, job, 0, (("nbytes", nbytes),)))
        return float(told.trainer["seconds"])

    def _scene_of(self, take: Take) -> Scene:
        arguments = {
            "tensors": take.tensors.plain(),
            "commit": take.commit,
            "verified": take.verified,
            "engine": take.engine,
            "num_rounds": self.settings.num_rounds,
        }
        return Scene(
            take.name,
            f"{JOBS}.publishing:publish",
            f"{JOBS}.joining:join",
            take.num_workers,
            tuple(arguments.items()),
        )
