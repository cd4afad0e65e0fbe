"""The conductor: starts the instances, asks, kills one, starts it again, sees all off."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from wtransfer.demo.kv.setting import DECODE, FRESH, PREFILL, KvSetting
from wtransfer.demo.kv.story import KvStory, Row
from wtransfer.demo.memcpy import Memcpy
from wtransfer.testing.mini_engine.instance import MODULES, Instance
from wtransfer.testing.mini_engine.router import Router
from wtransfer.transport.zygote import Zygote

if TYPE_CHECKING:
    from typing_extensions import Self

    from wtransfer.testing.mini_engine.instance import Answer
    from wtransfer.testing.mini_engine.router import Routed
    from wtransfer.transport.zygote import Child

NUM_BEFORE, NUM_AFTER = 2, 2
"""Prompts before the kill, and after the prefill instance has come back."""


class KvView(Protocol):
    """Whatever shows a story while it is being told."""

    def show(self, story: KvStory) -> None:
        """Show it as it is now; called after every change."""


class KvConductor:
    """Runs the story once. Use as a context manager: leaving it ends every process.

    Args:
        setting: What it is about.
        view: Shows it; None: nobody watches.
    """

    def __init__(self, setting: KvSetting, view: KvView | None = None) -> None:
        self.story = KvStory()
        """What happened so far."""
        self._setting = setting
        self._view = view
        self._stack = contextlib.ExitStack()
        self._instances: dict[str, Instance] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self) -> None:
        """Start every process; most of its time is the import of torch, once for all.

        Raises:
            WTransferError: An instance could not be made.
        """
        folder = tempfile.TemporaryDirectory(prefix="wtransfer-demo-")
        self._folder = Path(self._stack.enter_context(folder))
        self._zygote = self._stack.enter_context(Zygote(["torch", *MODULES]))
        for name in (PREFILL, DECODE, FRESH):
            self._start(name)
        self._router = Router(self._instances[PREFILL], self._instances[DECODE])

    def run(self) -> KvStory:
        """Tell the whole story, after `start`.

        Raises:
            WTransferError: An instance is lost that should not be.
        """
        for _ in range(NUM_BEFORE):
            self._ask()
        self._ask_and_kill()
        self._ask("gone")
        self._come_back()
        for _ in range(NUM_AFTER):
            self._ask()
        for name in list(self._instances):
            self._see_off(name)
        return self.story

    # -- the story --------------------------------------------------------------------------------

    def _ask(self, prefill: str = "alive") -> None:
        prompt = self._next_prompt()
        self._add(prompt, prefill, self._router.ask(prompt, self._setting.num_new_tokens))

    def _ask_and_kill(self) -> None:
        """Kill the prefill instance when it has said where its blocks are, and before they go."""
        prompt = self._next_prompt()
        handed = self._router.hand_over(prompt)
        self._instances[PREFILL].kill()
        self._tell(
            f"prompt {len(self.story.rows) + 1}: {PREFILL} was killed (SIGKILL) when it had "
            f"answered, before {DECODE} had anything from it"
        )
        routed = self._router.go_on(prompt, self._setting.num_new_tokens, handed)
        self._add(prompt, "killed", routed)

    def _come_back(self) -> None:
        self._instances.pop(PREFILL).close()
        self._router.prefill = self._start(PREFILL)
        pid = self._router.prefill.processes[0].pid
        self._tell(f"{PREFILL} is back as process {pid}, and knows nothing")

    def _next_prompt(self) -> list[int]:
        # As if others had been served meanwhile: what is shown is what comes from elsewhere.
        self._instances[DECODE].forget_cache()
        self._instances[FRESH].forget_cache()
        return self._setting.prompt(len(self.story.rows) + 1)

    def _add(self, prompt: list[int], prefill: str, routed: Routed) -> None:
        if routed.handed.why:
            why = routed.handed.why
            self._tell(f"prompt {len(self.story.rows) + 1}: {DECODE} was asked alone: {why}")
        # One after the other: they would take the processor from each other.
        fresh = self._instances[FRESH].ask(prompt, self._setting.num_new_tokens)
        self.story.rows.append(self._row(len(prompt), prefill, routed, fresh))
        self._show()

    def _row(self, num_prompt: int, prefill: str, routed: Routed, fresh: Answer) -> Row:
        answer, handed = routed.answer, routed.handed.answer
        num_loaded = answer.counts.get("tokens_loaded", 0)
        nbytes = self._nbytes(num_loaded)
        return Row(
            len(self.story.rows) + 1,
            prefill,
            num_prompt,
            num_loaded,
            answer.counts.get("tokens_cached", 0),
            nbytes,
            handed.total_s if handed else None,
            answer.first_token_s,
            answer.load_s if num_loaded else None,
            Memcpy(nbytes).seconds() if nbytes else None,
            fresh.first_token_s,
            answer.tokens,
            fresh.tokens,
            fresh.counts.get("tokens_computed", 0) - len(fresh.tokens[1:]),
        )

    def _nbytes(self, num_tokens: int) -> int:
        cache = self._instances[DECODE].config.kv_cache_config
        return num_tokens // cache.block_size * cache.bytes_per_block

    # -- its parts --------------------------------------------------------------------------------

    def _start(self, name: str) -> Instance:
        instance = Instance(self._setting.host(name, str(self._folder / "shared")), self._spawn)
        self._stack.callback(instance.close)
        self._instances[name] = instance
        return instance

    def _spawn(self, target: str, address: str) -> Child:
        # What they warn of, a lost instance say, is a part of the story and told by it.
        log = self._folder / "log"
        return self._zygote.spawn(target, address, stdout=log, stderr=log)

    def _see_off(self, name: str) -> None:
        self.story.exits[name] = self._instances.pop(name).close()

    def _tell(self, event: str) -> None:
        self.story.events.append(event)
        self._show()

    def _show(self) -> None:
        if self._view is not None:
            self._view.show(self.story)
