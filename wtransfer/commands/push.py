"""``wtransfer push``: bring a checkpoint into running workers.

In Python the same is::

    with Publisher(CheckpointSource(folder), hosts=["unix:@worker-0"]) as publisher:
        print(publisher.publish("step-7").raise_unless_ok())
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wtransfer.commands.shared import (
    EndSignal,
    deadline_option,
    end_signals,
    given_token,
    logging_option,
    table,
    token_file_option,
    usage_errors,
)
from wtransfer.config import option_values
from wtransfer.errors import (
    AddressError,
    AuthenticationError,
    CommitError,
    HostsError,
    PluginError,
    RoundAbortedError,
    WTransferError,
    to_wire,
)
from wtransfer.manifest import check_label
from wtransfer.registry.option import plugin_option
from wtransfer.weight_sync.http.client import parse_url
from wtransfer.weight_sync.report import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from wtransfer.weight_sync.http.client import EndpointUrl
    from wtransfer.weight_sync.report import Report, WorkerReport
    from wtransfer.weight_sync.trainer.publisher import Publisher
    from wtransfer.weight_sync.trainer.round_handle import Round

ADVICE = {
    "pending": "it has verified the update, and applies it when its model gets to it",
    "restored": "it is on its old version, whole: see its log, then push again",
    "reverted": "it is on its old version, whole: another rank failed; push again",
    "discarded": "it is on its old version, whole: its host declined the update; push again",
    "empty": "it holds no whole version and must not serve: restart it, then push again",
    "lost": "it was lost, so what it holds is not known: look at it, then push again",
    "dropped": "it was absent, refused, or was lost before the commit: start it, then push again",
    "behind": "it took no part, or ranks of its instance are missing: push again",
}
"""Advice about a worker that did not commit, by its outcome."""

NOT_EVERYWHERE = 3
"""Exit code: committed, but not by every worker and host."""
_COLUMNS = ("worker", "host", "outcome", "holds", "digests", "MB")
_NUM_TEXT_COLUMNS = 5


@click.command()
@click.argument(
    "checkpoint", metavar="[DIR]", required=False, type=click.Path(path_type=Path, exists=True)
)
@click.option(
    "--to",
    "hosts",
    multiple=True,
    required=True,
    metavar="URL",
    help="A worker: http://host:port, tcp:host:port, unix:@name or unix:/path. Repeat for more.",
)
@click.option("--engine", default="shm", show_default=True, help="Engine that moves the weights.")
@plugin_option("engines")
@click.option(
    "-o", "options", multiple=True, metavar="KEY=VALUE", help="Option of the engine. Repeat."
)
@click.option("--label", help="Name of this version, for people. Default: DIR's name.")
@click.option("--dry-run", is_flag=True, help="Send and verify everything, apply nothing.")
@click.option("--rollback", metavar="LABEL", help="Go back to a version that the engine keeps.")
@click.option("--stay", is_flag=True, help="Afterwards bring late workers up to date, until ended.")
@click.option("--stages", is_flag=True, help="Show the seconds of each stage as bars, too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, nothing else.")
@token_file_option
@click.option(
    "--listen", metavar="ADDRESS", help="Address that workers dial. Default: a Unix socket."
)
@deadline_option
@click.option(
    "--on-lost-worker",
    type=click.Choice(["abort", "drop"]),
    default="abort",
    show_default=True,
    help="Abort the round for all, or drop the worker, if one is lost or does not join.",
)
@click.option(
    "--nonfinite",
    type=click.Choice(["allow", "warn", "reject"]),
    default="allow",
    show_default=True,
    help="Effect of NaN or infinity in the weights; allow skips the check.",
)
@logging_option
def push(**arguments: Any) -> None:
    """Bring the weights of the checkpoint DIR into running workers, all or nothing.

    DIR is a folder of safetensors files, or one such file. The workers must know the same token,
    from --token-file or WTRANSFER_TOKEN. The exit code is 0 only if every worker has proven that
    it has the weights; 3 if some have and another, or a host that was dropped, has not; 1 if none
    has, 2 on a usage error.
    """
    order = _Order(**arguments)
    outcome = _Outcome(order)
    try:
        with end_signals():
            order.check()
            with _publisher(order) as publisher:
                outcome.address, outcome.hosts = publisher.address, publisher.hosts
                _transfer(publisher, order, outcome)
                outcome.print()
                if order.stay:
                    if not order.as_json:
                        click.echo(
                            "staying until ended; late workers join with --join "
                            f"{publisher.address}"
                        )
                    with contextlib.suppress(EndSignal):
                        # In slices, as a signal may come just before a wait.
                        while True:
                            time.sleep(1.0)
    except EndSignal as signal:
        if outcome.report is None:
            outcome.exit_code = signal.exit_code
            outcome.error = outcome.error or _interruption(signal)
            outcome.print()
    except WTransferError as error:
        outcome.error = error
        outcome.print()
    sys.exit(outcome.code)


@dataclass(frozen=True)
class _Order:
    """The command's options, checked before anything is loaded or sent."""

    checkpoint: Path | None
    hosts: tuple[str, ...]
    engine: str
    options: tuple[str, ...]
    label: str | None
    rollback: str | None
    dry_run: bool
    stay: bool
    stages: bool
    as_json: bool
    token_file: str | None
    listen: str | None
    deadline_s: float
    on_lost_worker: Any
    nonfinite: Any

    def check(self) -> None:
        """Raise `click.UsageError` unless the options fit each other."""
        if (self.checkpoint is None) == (self.rollback is None):
            raise click.UsageError("give either a checkpoint DIR or --rollback LABEL")
        if self.rollback is not None and self.label is not None:
            raise click.UsageError("--rollback takes the label from the kept version: omit --label")
        for option, label in (("--rollback", self.rollback), ("--label", self.label)):
            if label == "":
                raise click.UsageError(f"{option} is empty: give the label of a version")
            if label is not None:
                with usage_errors():
                    check_label(label)
        if not self.version:
            raise click.UsageError(f"{self.checkpoint} has no name to be the label: add --label")
        if self.stages and self.as_json:
            raise click.UsageError("--json has the seconds of each stage: omit --stages")
        if self.stay and self.dry_run:
            raise click.UsageError("--stay has nothing to serve after --dry-run: omit one of them")
        if len(set(self.hosts)) < len(self.hosts):
            raise click.UsageError("a worker is named twice: give each --to once")
        with usage_errors(AddressError):
            for each in self.hosts:
                parse_url(each)
        if self.stay and self.token is None:
            raise click.UsageError(
                "--stay is for workers that know the token: give --token-file, or set "
                "WTRANSFER_TOKEN here and for them"
            )

    @property
    def version(self) -> str:
        """Label: as given, or the name of the checkpoint's folder."""
        if self.checkpoint is None or self.label is not None:
            return self.rollback or self.label or ""
        path = self.checkpoint.resolve()
        folder = path.parent if path.is_file() else path
        # A file name may hold bytes that are no text, and a label travels as text.
        return folder.name.encode(errors="replace").decode()

    @property
    def token(self) -> str | None:
        with usage_errors(AuthenticationError):
            return given_token(self.token_file)


def _publisher(order: _Order) -> Publisher:
    from wtransfer.engines.factory import WeightTransferTrainerFactory
    from wtransfer.registry.resolve import registry

    with usage_errors(PluginError, AddressError):
        engine_cls = registry("engines").get(order.engine)
        trainer_cls = WeightTransferTrainerFactory.trainer_class(order.engine)
        remote = [url.name for url in map(parse_url, order.hosts) if _is_remote(url)]
    # By a path a container of this host, with an address of its own, is reached as well.
    at_path = (order.listen or "").startswith("unix:/")
    if remote and not (at_path or getattr(engine_cls, "multi_host", False)):
        raise click.UsageError(
            f"engine {order.engine!r} reaches workers on this host only, and {remote[0]} is on "
            "another: use one that crosses hosts (--engine file -o path=SHARED_FOLDER), with "
            "--listen tcp:HOST:PORT where they can dial this one; containers of this host need "
            "only share a volume (--listen unix:/PATH)"
        )
    options = typed_options(order.engine, trainer_cls.init_info_cls, order.options)
    from wtransfer.checkpoint.source import CheckpointSource
    from wtransfer.weight_sync.trainer.publisher import Publisher

    with usage_errors(AddressError):
        return Publisher(
            # A rollback sends what the engine keeps.
            {} if order.checkpoint is None else CheckpointSource(order.checkpoint),
            engine=order.engine,
            options=options,
            listen=order.listen,
            token=order.token,
            hosts=order.hosts,
            on_lost_worker=order.on_lost_worker,
            nonfinite=order.nonfinite,
            deadline_s=order.deadline_s,
        )


def _is_remote(url: EndpointUrl) -> bool:
    try:
        return not url.is_local
    except AddressError:
        # A name that nobody knows is that host's error, and may be known later.
        return False


def typed_options(engine: str, info_cls: Any, pairs: Sequence[str]) -> dict[str, Any]:
    """Read ``-o key=value`` in the types that an engine's options class declares.

    Args:
        engine: Engine name, for errors.
        info_cls: Class of its options.
        pairs: ``key=value``, each.

    Returns:
        Option -> value.

    Raises:
        click.UsageError: Not a pair, or as `option_values`.
    """
    texts: dict[str, str] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        name = key.strip().replace("-", "_")
        if not equals or name == "rank":
            problem = "a process that pushes is rank 0" if equals else "expected key=value"
            raise click.UsageError(f"-o {pair}: {problem}")
        texts[name] = text
    where = f"options (-o) of engine {engine!r}"
    return option_values(texts, info_cls, click.UsageError, where, strict=False, without=("rank",))


# -- while it is under way


def _transfer(publisher: Publisher, order: _Order, outcome: _Outcome) -> None:
    from wtransfer.weight_sync.trainer.progress_display import watch

    begin = publisher.publish if order.rollback is None else publisher.rollback
    round_ = begin(order.version, wait=False, dry_run=order.dry_run)
    try:
        watch(round_, progress=not order.as_json)
        outcome.report = round_.result()
    except CommitError as error:
        if error.report is None:
            raise
        outcome.report = error.report
    except EndSignal as signal:
        # Now: closing the publisher ends the round.
        outcome.error = _interruption(signal, round_)
        raise


def _interruption(signal: EndSignal, round_: Round | None = None) -> RoundAbortedError:
    if round_ is not None and round_.committing:
        return RoundAbortedError(
            f"{signal} came after the commit had begun: workers that had verified the update may "
            "apply it; ask them (GET /weight_info), or push again",
            version=round_.version,
            phase="commit",
        )
    text = f"{signal} ended the push; every worker is on the version that it had"
    return RoundAbortedError(text, phase=None if round_ is None else round_.phase)


# -- when it is over


class _Outcome:
    """Result of a push that is over, or that never began."""

    def __init__(self, order: _Order) -> None:
        self.order = order
        self.address: str | None = None
        self.hosts: dict[str, str | None] = {}  # host -> worker
        self.report: Report | None = None
        self.error: WTransferError | None = None
        self.exit_code: int | None = None  # where a signal ended it

    @property
    def code(self) -> int:
        if self.exit_code is not None:
            return self.exit_code
        report = self.report
        if report is None or not any(self._is_held_by(each) for each in report.workers):
            return 1
        return 0 if report.ok else NOT_EVERYWHERE

    def _word(self) -> str:
        if self.report is None:
            return "failed" if self.exit_code is None else "interrupted"
        return self.report.outcome

    def _is_held_by(self, each: WorkerReport) -> bool:
        """Return whether a worker holds the update; after a dry run, whether it has verified it."""
        assert self.report is not None
        return each.digests_equal if self.report.dry_run else each in self.report.holders

    def _problems(self) -> list[tuple[WorkerReport, str]]:
        """Return problem and advice of each worker and host that does not hold the update.

        Workers that joined by themselves and do not count are none: they are in the table.
        """
        found = []
        for each in self.report.workers if self.report is not None else ():
            if not self._is_held_by(each) and each.outcome not in ("behind", "gone"):
                why = f" ({each.error})" if each.error is not None else ""
                other = "its digests are others than those that were sent"
                found.append((each, f"{each.outcome}: {ADVICE.get(each.outcome, other)}{why}"))
        return found

    def _host_of(self, worker: str) -> str | None:
        return next((host for host, name in self.hosts.items() if name == worker), None)

    def print(self) -> None:
        if self.order.as_json:
            click.echo(json.dumps(self._document(), indent=2))
            return
        if self.report is not None:
            for line in self._lines(self.report):
                click.echo(line)
        if self.error is not None:
            text = f"push {self._word()}: {self.error}"
            worker = getattr(self.error, "worker", None) or ""
            host = self._host_of(worker)
            if host is not None and host not in text:
                # Users know the URL that they wrote, and errors the worker's own name.
                text += f" ({worker} is {host})"
            click.echo("\n".join(map(printable, text.split("\n"))), err=True)
        for each, problem in self._problems():
            text = "\n".join(map(printable, problem.split("\n")))
            click.echo(f"{printable(each.label)}  {text}", err=True)

    def _document(self) -> dict[str, Any]:
        order, report = self.order, self.report
        document: dict[str, Any] = {
            "ok": report is not None and report.ok,
            "outcome": self._word(),
            "label": order.version,
            "dry_run": order.dry_run,
            "rollback": order.rollback is not None,
            "engine": order.engine,
            "checkpoint": None if order.checkpoint is None else str(order.checkpoint),
            "address": self.address,
            "hosts": self.hosts,
            "error": _described(self.error),
        }
        if report is not None:
            document |= {
                "round_id": report.round_id,
                "fingerprint": report.fingerprint,
                "nbytes": report.nbytes,
                "seconds": report.seconds,
                "packed_s": report.packed_s,
                "nonfinite": report.nonfinite,
                "problems": {each.worker: text for each, text in self._problems()},
            }
        workers = [
            vars(each) | {"error": _described(each.error)}
            for each in (report.workers if report is not None else ())
        ]
        return document | {"workers": workers}

    def _lines(self, report: Report) -> Iterator[str]:
        """Yield the result as people read it."""
        total = report.seconds.get("total", 0.0)
        label = printable(report.version)
        yield f"{label}  {self._word()}  {report.nbytes / 1e6:.1f} MB in {total:.3f} s"
        yield f"fingerprint  {report.fingerprint}"
        phases = "  ".join(f"{phase} {s:.3f}" for phase, s in report.seconds.items())
        yield f"seconds here  {phases}  read {report.packed_s:.3f}"
        if report.nonfinite:
            yield f"{len(report.nonfinite)} tensors hold NaN or infinity"
        yield ""
        stages = list(dict.fromkeys(stage for each in report.workers for stage in each.seconds))
        rows = [(*_COLUMNS, *map(printable, stages))]
        rows += [self._cells(each, stages) for each in report.workers]
        yield from table(rows, _NUM_TEXT_COLUMNS)
        if self.order.stages:
            yield ""
            yield report.stages()
        for each in report.workers:
            yield from (printable(f"{each.worker}: {note}") for note in each.notes)

    def _cells(self, each: WorkerReport, stages: Sequence[str]) -> tuple[str, ...]:
        return (
            printable(each.worker),
            printable(each.host or "-"),
            each.outcome,
            printable(each.version or "-"),
            "equal" if each.digests_equal else "-",
            f"{each.nbytes / 1e6:.1f}",
            *(f"{each.seconds[stage]:.3f}" if stage in each.seconds else "-" for stage in stages),
        )


def _described(error: WTransferError | None) -> dict[str, Any] | None:
    """Return an error as plain data: class, text, facts, and the errors of every host."""
    if error is None:
        return None
    kind, _, facts = to_wire(error)
    document: dict[str, Any] = {**facts, "type": kind, "message": str(error)}
    if isinstance(error, HostsError) and error.errors is not None:
        document["hosts"] = {host: _described(each) for host, each in error.errors.items()}
    return document
