"""The KV demo: compute in one instance, answer in another; kill the first, and start it again."""

from __future__ import annotations

import contextlib
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import TYPE_CHECKING, Any

from wtransfer.demo.output import Check, Progress, Result, cell
from wtransfer.testing.mini_engine.config import CacheShape, EngineConfig, ModelShape
from wtransfer.testing.mini_engine.instance import MODULES, Instance
from wtransfer.testing.mini_engine.router import Router
from wtransfer.testing.zygote import Zygote

if TYPE_CHECKING:
    from wtransfer.testing.mini_engine.instance import Answer
    from wtransfer.testing.zygote import Child

PREFILL, DECODE, FRESH = "prefill", "decode", "fresh"
"""The instances. The last one has no connector: it computes everything itself."""
ROLES = {PREFILL: "kv_producer", DECODE: "kv_consumer"}
NUM_BEFORE, NUM_AFTER = 2, 2
"""Prompts before the kill, and after the prefill instance was started again."""
_BLOCK_SIZE = 16
_NUM_DOCUMENT_TOKENS = 2000  # shared by all prompts; a token is a byte
_NUM_NEW_TOKENS = 8
_STORE_S = 0.3
_MAX_OTHER_TOKENS = 256  # of a question and its answer
_MODEL = ModelShape(num_layers=4, width=128, num_heads=4, num_kv_heads=2)
_QUESTIONS = (
    "When is __del__ called?",
    "What does __hash__ return?",
    "Which method makes an instance callable?",
    "What is a descriptor?",
    "How are classes made?",
    "What does __slots__ save?",
)

HEADER = "no. prefill tokens loaded computed  fill  ttft alone  load same"
LEGEND = (
    "tokens: of the prompt. loaded: those whose keys and values came from prefill. computed: those "
    "that decode has computed itself. fill: ms of prefill, with what it has of earlier prompts. "
    "ttft: ms of decode from then on to its first token. alone: the same of an instance that loads "
    "nothing. load: ms of ttft spent on the load. same: the answer equals that of the instance "
    "that loads nothing."
)


@dataclass(frozen=True)
class Row:
    """One prompt, answered by the decode instance, and by one that computes all of it."""

    number: int
    """Counts from 1."""
    prefill: str
    """State of the prefill instance: ``alive``, ``killed`` after it had computed the prompt, or
    ``gone``."""
    num_prompt: int
    """Tokens of the prompt."""
    num_loaded: int
    """Prompt tokens whose keys and values came through the connector."""
    num_computed: int
    """Prompt tokens that the decode instance has computed."""
    prefill_s: float | None
    """Seconds until the prefill instance had computed the prompt."""
    first_token_s: float | None
    """Seconds from there to the first token of the decode instance."""
    load_s: float | None
    """Seconds of that spent waiting for keys and values."""
    fresh_s: float | None
    """Seconds to the first token where everything is computed."""
    tokens: list[int]
    """The answer."""
    expected: list[int]
    """The answer where everything is computed."""
    num_expected_computed: int
    """Prompt tokens that were computed there."""

    @property
    def same(self) -> bool:
        """True if the answer is right."""
        return bool(self.tokens) and self.tokens == self.expected

    def cells(self) -> tuple[str, ...]:
        """Return the row as text, one cell per column."""
        seconds = (self.prefill_s, self.first_token_s, self.fresh_s, self.load_s)
        return (
            str(self.number),
            self.prefill,
            str(self.num_prompt),
            str(self.num_loaded),
            str(self.num_computed),
            *(cell(each, 0, 1e3) for each in seconds),
            "yes" if self.same else "NO",
        )


class Main(contextlib.ExitStack):
    """Starts the instances and asks the prompts. Use as a context manager: it ends every process.

    Args:
        connector: Name of the connector.
        options: Its options.
        progress: Prints rows and events.
    """

    def __init__(self, connector: str, options: dict[str, Any], progress: Progress) -> None:
        super().__init__()
        self._rows: list[Row] = []
        self._progress = progress
        folder = tempfile.TemporaryDirectory(prefix="wtransfer-demo-")
        self._folder = Path(self.enter_context(folder))
        self._instances: dict[str, Instance] = {}
        self._connector = connector
        # Options that the built-in connectors need in order to hold all prompts.
        needed: dict[str, dict[str, Any]] = {
            "SharedMemoryConnector": {"staging_bytes": 64 << 20},
            "SharedStorageConnector": {"shared_storage_path": str(self._folder / "shared")},
        }
        self._options = {**needed.get(connector, {}), **options}

    def run(self) -> Result:
        """Start the instances, ask all prompts, and end every process."""
        # Most of the time of a start is the import of torch: once for all.
        self._zygote = self.enter_context(Zygote(["torch", *MODULES]))
        for name in (PREFILL, DECODE, FRESH):
            self._start(name)
        self._router = Router(self._instances[PREFILL], self._instances[DECODE])
        for prefill in (*["alive"] * NUM_BEFORE, "killed", "gone"):
            self._ask(prefill)
        self._instances.pop(PREFILL).close()
        self._router.prefill = self._start(PREFILL)
        pid = self._router.prefill.processes[0].pid
        self._progress.event(f"{PREFILL} is back as process {pid}, and knows nothing")
        for _ in range(NUM_AFTER):
            self._ask("alive")
        exits = {name: instance.close() for name, instance in self._instances.items()}
        num_shared = _NUM_DOCUMENT_TOKENS // _BLOCK_SIZE * _BLOCK_SIZE
        facts = {
            "connector": self._connector,
            "prompts": [asdict(row) | {"same": row.same} for row in self._rows],
            "events": self._progress.events,
        }
        return Result(judge(self._rows, exits, num_shared), facts)

    def _ask(self, prefill: str) -> None:
        """Have a prompt answered by prefill and decode, and by the fresh instance.

        Args:
            prefill: State of the prefill instance, as in `Row`.
        """
        number = len(self._rows) + 1
        self._progress.status(f"prompt {number}")
        document = topics["specialnames"].encode()[:_NUM_DOCUMENT_TOKENS]
        question = _QUESTIONS[number % len(_QUESTIONS)]
        prompt = list(document + f"\n\nQuestion {number}: {question}\n".encode())
        decode, fresh = self._instances[DECODE], self._instances[FRESH]
        # As if other requests had needed the blocks: no hit shown is of the local cache.
        decode.forget_cache()
        fresh.forget_cache()
        handed = self._router.hand_over(prompt)
        if handed.answer and not handed.answer.kv_transfer_params:
            # A connector that hands nothing over with the request stores beside the steps.
            time.sleep(_STORE_S)
        if handed.why:
            self._progress.event(f"prompt {number}: {DECODE} was asked alone: {handed.why}")
        if prefill == "killed":
            self._instances[PREFILL].kill()
            self._progress.event(
                f"prompt {number}: {PREFILL} was killed (SIGKILL) when it had answered, before "
                f"{DECODE} had anything from it"
            )
        answer = self._router.go_on(prompt, _NUM_NEW_TOKENS, handed).answer
        # One after the other: the instances would take the processor from each other.
        expected = fresh.ask(prompt, _NUM_NEW_TOKENS)
        num_loaded = answer.counts.get("tokens_loaded", 0)
        row = Row(
            number=number,
            prefill=prefill,
            num_prompt=len(prompt),
            num_loaded=num_loaded,
            num_computed=_num_prompt_computed(answer),
            prefill_s=handed.answer.total_s if handed.answer else None,
            first_token_s=answer.first_token_s,
            load_s=answer.load_s if num_loaded else None,
            fresh_s=expected.first_token_s,
            tokens=answer.tokens,
            expected=expected.tokens,
            num_expected_computed=_num_prompt_computed(expected),
        )
        self._rows.append(row)
        self._progress.row(row.cells())

    def _start(self, name: str) -> Instance:
        self._progress.status(f"starting {name}")
        num_blocks = -(-(_NUM_DOCUMENT_TOKENS + _MAX_OTHER_TOKENS) // _BLOCK_SIZE)
        settings = EngineConfig(
            _MODEL,
            CacheShape(_BLOCK_SIZE, 2 * num_blocks),
            connector=self._connector if name in ROLES else None,
            options=self._options,
            role=ROLES.get(name, "kv_both"),
            engine_id=name,
        )
        instance = self._instances[name] = Instance(settings, self._spawn)
        self.callback(instance.close)
        return instance

    def _spawn(self, target: str, address: str) -> Child:
        # Warnings, as of a lost instance, are expected: the demo itself reports their causes.
        log = self._folder / "log"
        return self._zygote.spawn(target, address, stdout=log, stderr=log)


def _num_prompt_computed(answer: Answer) -> int:
    # Every token of the answer but the last was computed as well, to get the next one.
    return answer.counts.get("tokens_computed", 0) - len(answer.tokens[1:])


def judge(rows: list[Row], exits: dict[str, list[int]], num_shared: int) -> list[Check]:
    """Return one check per promise.

    Args:
        rows: Rows of all prompts.
        exits: Instance -> exit status of each of its processes; without the killed ones.
        num_shared: Tokens that all prompts have in common, in whole blocks.
    """
    wrong = [row.number for row in rows if not row.same]
    # An instance that had something in its cache is no reference.
    not_fresh = [row.number for row in rows if row.num_expected_computed != row.num_prompt]
    without = [row for row in rows if row.prefill != "alive"]
    last_without = max((row.number for row in without), default=0)
    alive = [row for row in rows if row.prefill == "alive"]

    def loads(promise: str, rows: list[Row], num_expected: int) -> Check:
        # A connector may hand over the end of a prompt a moment later than the answer.
        whole = [row for row in rows if row.num_loaded >= num_shared]
        return Check(
            promise,
            len(whole) == len(rows) == num_expected,
            f"{sum(row.num_loaded for row in rows)} tokens loaded and "
            f"{sum(row.num_computed for row in rows)} computed of "
            f"{sum(row.num_prompt for row in rows)}, in {len(rows)} prompts",
        )

    return [
        Check(
            "every answer is, token for token, that of an instance that computes everything itself",
            bool(rows) and not wrong and not not_fresh,
            f"{len(rows)} answers"
            + (f", wrong: {wrong}" if wrong else ", all equal")
            + (f", reference not computed: {not_fresh}" if not_fresh else ""),
        ),
        loads(
            "what one instance has computed, the other loads",
            [row for row in alive if row.number < last_without],
            NUM_BEFORE,
        ),
        Check(
            "a killed instance costs time, and nothing else",
            [row.prefill for row in without] == ["killed", "gone"]
            and all(row.same for row in without),
            ", ".join(
                f"prompt {row.number} ({row.prefill}): {row.num_computed} of {row.num_prompt} "
                "tokens computed"
                for row in without
            ),
        ),
        loads(
            "an instance that comes back is used again",
            [row for row in alive if row.number > last_without],
            NUM_AFTER,
        ),
        Check(
            "every process ends when asked",
            bool(exits) and not any(any(statuses) for statuses in exits.values()),
            ", ".join(f"{name} exit {statuses}" for name, statuses in exits.items()),
        ),
    ]


def run_kv(connector: str, options: dict[str, Any], *, quiet: bool) -> Result:
    """Run the demo.

    Args:
        connector: Name of the connector.
        options: Its options.
        quiet: Print nothing.

    Raises:
        WTransferError: An instance could not be made, or was lost unexpectedly.
    """
    with (
        Progress(HEADER, LEGEND, quiet=quiet) as progress,
        Main(connector, options, progress) as main,
    ):
        return main.run()
