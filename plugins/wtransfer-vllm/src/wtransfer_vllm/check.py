"""Find out whether an update gives the tokens of a fresh engine.

python -m wtransfer_vllm.check MODEL

A worker proves before its first update that vLLM's reload gives every parameter bit for bit
(`wtransfer_vllm.proof`). State that vLLM derives from the weights and keeps elsewhere is seen by
tokens only. So one engine starts on weights A and is updated, another starts on weights B, and both
answer the same prompts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import math
import os
import random
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import click
from wtransfer.checkpoint.source import CheckpointSource, seal
from wtransfer.commands.shared import EndSignal, end_signals
from wtransfer.errors import WTransferError
from wtransfer.transport.handshake import new_token
from wtransfer.weight_sync.trainer.publisher import Publisher

from wtransfer_vllm.check_engine import EngineProcess
from wtransfer_vllm.twins import (
    CheckError,
    copy_nbytes,
    disturb,
    experts_of,
    make_trained,
    make_twin,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Prompts = list[list[int]]
"""Tokens of each prompt."""
Answers = list[dict[str, Any]]
"""For each prompt: its tokens, and the other probable tokens at each step."""

TWINS = {"A": 1, "B": 2}
"""Seed of each twin."""
NUM_TOKENS = 16
"""Tokens of an answer."""
PROMPT_LENGTHS = (5, 40, 200)
"""Tokens of the prompts by which weights are compared."""
KV_PROMPT_LENGTHS = (300, 280)
"""Tokens of the prompts by which KV cache is compared: two blocks each at least, on any device."""
MAX_MODEL_LEN = 512
POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_seq_len")
"""Names of the longest context in a configuration."""
DEFAULTS: dict[str, Any] = {
    # Found where the engine runs: KV cache has the name of its model as vLLM was given it.
    "model": "model",
    "disable_log_stats": False,
    "kv_cache_memory_bytes": 256 << 20,
    # Two engines run at a time.
    "gpu_memory_utilization": 0.4,
}
"""Arguments of ``vllm.LLM``, where ``--vllm`` has no others."""
TRAINED = "update by transformers"
"""Name of the row of an update from a trainer's own model."""
CONNECTOR = "SharedStorageConnector"
LEAST_TOLERANCE = 1e-3
"""Difference of log probabilities up to which they are equal, on any engine."""
NUM_REPEATS = 3
"""Number of times that an engine is asked again, to measure how far its own answers differ."""
MARGIN = 2.0
"""Tolerance, relative to the difference between an engine's own answers to the same prompts."""
EXIT_CODES = {"right": 0, "WRONG": 1, "not checked": 2, "refused": 3}
FACTS = ("model_class", "quantisation", "dtype", "kv_cache", "places", "vllm", "transformers")
"""Facts of the engines, found where they run, that the document has."""


@dataclass
class Row:
    """One comparison."""

    name: str
    """Subject of the comparison."""
    result: Literal["right", "WRONG", "refused", "not run"]
    """``refused``: by vLLM, or by the worker."""
    why: str | None = None
    """The difference, or the reason why there is nothing to compare."""
    seconds: float = 0.0
    """Duration."""


class Engines(NamedTuple):
    """The two engines."""

    updated: EngineProcess
    """The engine that has loaded A."""
    fresh: EngineProcess
    """The engine that has loaded B."""
    facts: dict[str, Any]
    """Facts of what the engines run, as one of them reports."""
    kv_refusal: str | None
    """Reason why the engines have no KV connector."""


@click.command()
@click.argument("model")
@click.option("--full", is_flag=True, help="Check MODEL itself, against a disturbed copy of it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, nothing else.")
@click.option(
    "--backend", default="shm", show_default=True, help="Weight backend, by its name in vLLM."
)
@click.option("--vllm", "more", default="{}", metavar="JSON", help="More arguments of vllm.LLM.")
@click.option(
    "--timeout-s",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    help="Longest wait for an engine's start, and for each of its answers.",
)
def check(
    *, model: str, full: bool, as_json: bool, backend: str, more: str, timeout_s: float
) -> None:
    """Check that vLLM serves MODEL right after an update.

    MODEL is a folder with a config.json, or a name in the local Hugging Face cache. Two random
    models with its configuration, but few layers and experts, are made in a temporary folder. An
    engine is updated from one to the other and back, and must give the tokens of an engine that
    has loaded the same weights.

    The exit code is 0 if every row that ran is right; 1 if one is WRONG; 2 if nothing could be
    checked; 3 if an update from a checkpoint was refused and the engine served on.
    """
    begun = time.monotonic()
    document: dict[str, Any] = {"model": model, "full": full, "backend": backend}
    arguments = _read_arguments(more)
    try:
        with (
            end_signals(),
            tempfile.TemporaryDirectory(prefix="wtransfer-check-") as folder,
            contextlib.ExitStack() as stack,
        ):
            place = _find(model)
            _make_models(place, Path(folder), full=full)
            names = [each.name for each in CheckpointSource(Path(folder) / "A" / "model").metadata]
            document["experts"] = experts_of(place, names)
            # One secret for publisher and engines.
            os.environ.setdefault("WTRANSFER_TOKEN", new_token())
            options = {"weight_transfer_config": {"backend": backend}} | arguments
            engines = _start(stack, Path(folder), options, timeout_s)
            publishing = {
                # vLLM's name of ours where it has one of its own by that name.
                "engine": backend.removeprefix("wtransfer-"),
                "hosts": [engines.updated],
                "deadline_s": timeout_s,
            }
            trained = None if full else functools.partial(make_trained, place, TWINS["A"])
            document |= Comparison(engines, Path(folder), publishing, trained).run()
    except EndSignal as ended:
        sys.exit(ended.exit_code)
    except Exception as error:  # Python's own exit code would say WRONG
        document |= {"result": "not checked", "error": str(error)}
        if not isinstance(error, WTransferError):
            traceback.print_exc()
            document["error"] = f"{type(error).__name__}: {error}"
    document["seconds"] = round(time.monotonic() - begun, 1)
    document["exit_code"] = EXIT_CODES[document["result"]]
    click.echo(json.dumps(document, indent=2) if as_json else _shown(document))
    sys.exit(document["exit_code"])


def _read_arguments(text: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text)
    except ValueError as error:
        raise click.UsageError(f"--vllm is no JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise click.UsageError(f"--vllm is no JSON object: {text}")
    return arguments


def _find(model: str) -> Path:
    """Return the folder of a model.

    Raises:
        CheckError: There is no folder with a configuration.
    """
    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(model, local_files_only=True))
        except Exception as error:
            raise CheckError(
                f"{model} is neither a folder nor in the local cache of models: {error}"
            ) from error
    if not (folder / "config.json").is_file():
        raise CheckError(f"{folder} has no config.json")
    return folder.resolve()


def _make_models(model: Path, folder: Path, *, full: bool) -> None:
    """Make folder/A/model and folder/B/model.

    Raises:
        CheckError: The models cannot be made.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    places = {name: folder / name / "model" for name in TWINS}
    if full:
        gigabytes = copy_nbytes(model) / 1e9
        click.echo(f"writing a disturbed copy, {gigabytes:.1f} GB, below {folder}", err=True)
        places["A"].parent.mkdir()
        places["A"].symlink_to(model)
        disturb(model, places["B"])
    else:
        click.echo("making two twins", err=True)
        with contextlib.redirect_stderr(io.StringIO()):  # bars of progress
            for name, place in places.items():
                make_twin(model, place, TWINS[name])
    # Its KV cache has a name from the start.
    seal(places["B"], "B")


def _start(
    stack: contextlib.ExitStack, folder: Path, options: dict[str, Any], timeout_s: float
) -> Engines:
    """Start both engines; without a KV connector where vLLM or the connector refuses it.

    Raises:
        WTransferError: An engine does not start.
    """
    settings = json.loads((folder / "B" / "model" / "config.json").read_text())
    parts = [settings, *(each for each in settings.values() if isinstance(each, dict))]
    positions = [part[name] for part in parts for name in POSITIONS if part.get(name)]
    found = {
        "max_model_len": min(MAX_MODEL_LEN, *positions),
        # vLLM makes a processor of images, and that a tokenizer, though prompts are tokens.
        "skip_tokenizer_init": not list((folder / "B" / "model").glob("*processor_config.json")),
    }
    options = DEFAULTS | found | options
    storage = {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "kv")},
    }

    def start(options: dict[str, Any], kv_refusal: str | None = None) -> Engines:
        with contextlib.ExitStack() as trial:
            updated, fresh = (
                trial.enter_context(
                    contextlib.closing(EngineProcess(name, folder / model, options, timeout_s))
                )
                for name, model in (("updated", "A"), ("fresh", "B"))
            )
            engines = Engines(updated, fresh, updated.facts() and fresh.facts(), kv_refusal)
            stack.push(trial.pop_all())
        return engines

    click.echo("starting two engines with a KV connector", err=True)
    try:
        return start(options | {"kv_transfer_config": storage})
    except WTransferError as error:
        click.echo("starting two engines without one", err=True)
        return start(options, f"vLLM does not start with {CONNECTOR}: {error}")


class Comparison:
    """Compares the answers of the two engines.

    Args:
        engines: Both engines.
        folder: Folder of their models.
        publishing: Arguments of a publisher to the engine that is updated.
        make_trained: Makes model A as a trainer holds it; None: it is not made.
    """

    def __init__(
        self,
        engines: Engines,
        folder: Path,
        publishing: dict[str, Any],
        make_trained: Callable[[], Any] | None = None,
    ) -> None:
        self._updated, self._fresh, self._facts, self._kv_refusal = engines
        self._folder, self._publishing, self._make_trained = folder, publishing, make_trained
        self._chance = random.Random(0)  # noqa: S311  # any tokens will do
        self._num_salts = 0
        self._tolerances: dict[str, float] = {}

    def run(self) -> dict[str, Any]:
        """Return the facts of the check, every row, and the overall result.

        Raises:
            CheckError: Nothing can be compared, or an engine ended.
        """
        prompts = self._prompts(PROMPT_LENGTHS)
        expected = {"A": self._ask(self._updated, prompts), "B": self._ask(self._fresh, prompts)}
        self._widen("weights", expected["B"], prompts)
        if difference(expected["A"], expected["B"], self._tolerances["weights"]) is None:
            raise CheckError("both models give the same tokens, so that nothing can be compared")
        rows, begun = [], time.monotonic()
        for row in self._rows(prompts, expected):
            row.seconds = round(time.monotonic() - begun, 1)
            click.echo(f"{row.name}: {row.result}", err=True)
            rows.append(row)
            begun = time.monotonic()
        results = [row.result for row in rows]
        is_refused = any(row.name == "serves on" for row in rows)
        return {
            **{name: self._facts[name] for name in FACTS},
            "tolerances": self._tolerances,
            "rows": [dataclasses.asdict(row) for row in rows],
            "result": "WRONG" if "WRONG" in results else "refused" if is_refused else "right",
        }

    def _rows(self, prompts: Prompts, expected: dict[str, Answers]) -> Iterator[Row]:
        served, is_refused = "A", False
        for name, label in (("update", "B"), ("way back", "A"), ("second update", "B")):
            why = self._publish(label, CheckpointSource(self._folder / label / "model"))
            if why is not None:
                is_refused = True
                yield Row(name, "refused", why)
                yield self._compare(
                    "serves on", self._ask(self._updated, prompts), expected[served]
                )
                break
            served = label
            yield self._compare(name, self._ask(self._updated, prompts), expected[served])
        for name, writer, reader in (
            ("KV of a fresh engine", self._fresh, self._updated),
            ("KV of the updated engine", self._updated, self._fresh),
        ):
            if self._kv_refusal is not None:
                yield Row(name, "refused", self._kv_refusal)
            elif is_refused:
                yield Row(name, "not run", "an update was refused")
            else:
                yield self._share_kv(name, writer, reader)
        if is_refused:
            yield Row(TRAINED, "not run", "an update was refused")
        elif self._make_trained is None:
            yield Row(TRAINED, "not run", "with --full no trainer's model is made")
        else:
            folder = self._folder / "A" / "model"
            settings = json.loads((folder / "config.json").read_text())
            base = folder if settings.get("quantization_config") else None
            why = self._publish("A of transformers", self._make_trained(), base)
            served = "B" if why else "A"
            row = self._compare(TRAINED, self._ask(self._updated, prompts), expected[served])
            yield Row(TRAINED, "refused", why) if why and row.result == "right" else row

    def _publish(self, label: str, source: Any, base: Path | None = None) -> str | None:
        """Update the engine from what a publisher takes; return the reason of a refusal, if any."""
        try:
            with Publisher(source, base=base, **self._publishing) as publisher:
                publisher.publish(label).raise_unless_ok()
        except WTransferError as error:
            return str(error)
        return None

    def _share_kv(self, name: str, writer: EngineProcess, reader: EngineProcess) -> Row:
        """Compare answers to prompts whose KV cache another engine has stored."""
        prompts, own, shared = self._prompts(KV_PROMPT_LENGTHS), self._salt(), self._salt()
        computed = self._ask(self._fresh, prompts, own)
        # With vLLM's own prefix cache: some models round otherwise where a prefix is not computed.
        cached, num_loaded = self._load(self._fresh, prompts, own)
        # If vLLM has none for this model, the connector has loaded: that is what is to be compared.
        expected, salt = (computed, None) if num_loaded else (cached, own)
        self._widen("KV", expected, prompts, salt)
        self._ask(writer, prompts, shared)
        if not writer.do("settle", prompts[0][:3]):
            return Row(name, "WRONG", "blocks that were stored stay held")
        if not self._load(writer, prompts, shared)[1]:
            return Row(name, "not run", "vLLM loads no KV cache of this model from a connector")
        answers, num_loaded = self._load(reader, prompts, shared)
        if not num_loaded:
            return Row(name, "WRONG", "the weights are equal, but no stored KV cache was found")
        return self._compare(name, answers, expected, "KV")

    def _load(self, engine: EngineProcess, prompts: Prompts, salt: str) -> tuple[Answers, float]:
        """Return an engine's answers, and the number of tokens that came by the connector."""
        before = engine.do("hits")
        answers = self._ask(engine, prompts, salt)
        return answers, engine.do("hits") - before

    def _ask(self, engine: EngineProcess, prompts: Prompts, salt: str | None = None) -> Answers:
        answers: Answers = engine.do("ask", prompts, salt or self._salt(), NUM_TOKENS)
        return answers

    def _salt(self) -> str:
        """Return a salt under which there is no KV cache yet."""
        self._num_salts += 1
        return f"salt {self._num_salts}"

    def _prompts(self, lengths: tuple[int, ...]) -> Prompts:
        tokens = set(range(self._facts["vocab_size"])) - set(self._facts["special_tokens"])
        room = self._facts["max_model_len"] - NUM_TOKENS
        return [self._chance.choices(sorted(tokens), k=min(each, room)) for each in lengths]

    def _widen(
        self, kind: str, expected: Answers, prompts: Prompts, salt: str | None = None
    ) -> None:
        """Widen a tolerance to the difference of one engine's own answers to the same prompts.

        Raises:
            CheckError: The answers are no numbers, or have nothing in common.
        """
        for _ in range(NUM_REPEATS):
            gaps = [gap for gap, _ in _gaps(self._ask(self._fresh, prompts, salt), expected)]
            if not all(map(math.isfinite, gaps)):
                raise CheckError("an engine answers the same prompts differently, or by no numbers")
            widest = max(self._tolerances.get(kind, LEAST_TOLERANCE), MARGIN * max(gaps))
            self._tolerances[kind] = widest

    def _compare(
        self, name: str, answers: Answers, expected: Answers, kind: str = "weights"
    ) -> Row:
        wrong = difference(answers, expected, self._tolerances[kind])
        return Row(name, "right" if wrong is None else "WRONG", wrong)


def difference(answers: Answers, expected: Answers, tolerance: float) -> str | None:
    """Return where answers are not the expected ones; None: nowhere.

    Each token must be as probable as in the expected answer. Where two tokens are about equally
    probable, either will do, and the text after it is another one.

    Args:
        answers: Answers of an engine.
        expected: Answers of another one.
        tolerance: Difference of log probabilities up to which they are equal.
    """
    gaps = _gaps(answers, expected)
    return next((place for gap, place in gaps if math.isnan(gap) or gap > tolerance), None)


def _gaps(answers: Answers, expected: Answers) -> Iterator[tuple[float, str]]:
    """Yield the difference of log probability of each comparable token, and its place."""
    for index, (mine, theirs) in enumerate(zip(answers, expected, strict=True), start=1):
        tokens = zip(mine["tokens"], theirs["tokens"], strict=True)
        for step, (token, wanted) in enumerate(tokens):
            likely, there = mine["likely"][step], theirs["likely"][step]
            got = likely[str(token)]
            place = (
                f"prompt {index}, step {step + 1}: token {token} with log probability {got:.4f}, "
                f"expected {wanted} with {there[str(wanted)]:.4f}"
            )
            yield abs(got - there.get(str(token), float("-inf"))), place
            if token != wanted:
                break


def _shown(document: dict[str, Any]) -> str:
    """Return the result as people read it."""
    if "error" in document:
        return f"not checked: {document['error']}"
    models = "the model and a disturbed copy" if document["full"] else "two twins"
    within = ", ".join(f"{each:.2g} ({kind})" for kind, each in document["tolerances"].items())
    what = [document["model_class"], document["quantisation"] or "not quantised", document["dtype"]]
    kinds = [document["experts"], f"KV cache groups: {document['kv_cache'] or 'not seen'}"]
    lines = [
        f"{', '.join(what)}; vLLM {document['vllm']}, backend {document['backend']}; {models}",
        "; ".join(filter(None, kinds)),
        *(f"at a commit: {place}: {effect}" for place, effect in document["places"].items()),
        f"log probabilities are equal within {within}",
    ]
    for row in document["rows"]:
        lines.append(f"{row['name']:<26}{row['result']:<9}{row['seconds']:>6.1f} s")
        lines += [f"    {line}" for line in (row["why"] or "").splitlines()]
    return "\n".join([*lines, f"{document['result']}, in {document['seconds']:.1f} s"])


if __name__ == "__main__":
    check()
