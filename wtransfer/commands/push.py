"""``wtransfer push``: bring a checkpoint into running workers.

What it does is a few lines of Python::

    with Publisher(CheckpointSource(folder), hosts=["unix:@worker-0"]) as publisher:
        print(publisher.publish("step-7"))
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wtransfer.commands.ending import EndSignal, end_signals
from wtransfer.commands.options import deadline_option, token_file_option
from wtransfer.commands.order import Order
from wtransfer.commands.outcome import Outcome
from wtransfer.commands.progress import view_of, watch
from wtransfer.errors import AddressError, PluginError, RoundAbortedError, WTransferError

if TYPE_CHECKING:
    from wtransfer.weight_sync.report import Report
    from wtransfer.weight_sync.trainer.publisher import Publisher
    from wtransfer.weight_sync.trainer.round import Round


@click.command()
@click.argument("checkpoint", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--to",
    "hosts",
    multiple=True,
    required=True,
    metavar="URL",
    help="A worker: http://host:port, tcp:host:port, unix:@name or unix:/path. Repeat for more.",
)
@click.option("--engine", default="shm", show_default=True, help="What moves the weights.")
@click.option(
    "-o", "options", multiple=True, metavar="KEY=VALUE", help="Option of the engine. Repeat."
)
@click.option("--label", help="What people shall call this version. Default: DIR's name.")
@click.option("--dry-run", is_flag=True, help="Send and verify everything, apply nothing.")
@click.option("--rollback", metavar="LABEL", help="Go back to a version that the engine keeps.")
@click.option("--stay", is_flag=True, help="Afterwards bring late workers up to date, until ended.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, nothing else.")
@token_file_option
@click.option("--listen", metavar="ADDRESS", help="Where workers dial in. Default: a Unix socket.")
@deadline_option
@click.option(
    "--on-lost-worker",
    type=click.Choice(["abort", "drop"]),
    default="abort",
    show_default=True,
    help="Whether the others go on when a worker is lost.",
)
@click.option(
    "--nonfinite",
    type=click.Choice(["allow", "warn", "reject"]),
    default="allow",
    show_default=True,
    help="What NaN or infinity in the weights does; allow does not look for it.",
)
def push(**arguments: Any) -> None:
    """Bring the weights of the checkpoint DIR into running workers, all or nothing.

    DIR is a folder of safetensors files, or one such file. The workers must know the same token,
    from --token-file or WTRANSFER_TOKEN. The exit code is 0 only if every worker has proven that
    it has the weights; 1 if any has not, 2 if the command cannot be meant.
    """
    order = Order(**arguments)
    sys.exit(run(order))


def run(order: Order) -> int:
    """Push, tell what came of it, and return the exit code.

    Raises:
        click.UsageError: The order cannot be meant.
    """
    outcome = Outcome(order)
    try:
        with end_signals():
            order.check()
            with _publisher(order, outcome) as publisher:
                _transfer(publisher, outcome)
                _tell(outcome)
                if order.stay:
                    _stay(publisher, order)
    except EndSignal as signal:
        if outcome.report is None:
            outcome.exit_code = signal.exit_code
            outcome.error = outcome.error or _interruption(signal)
            _tell(outcome)
    except WTransferError as error:
        outcome.error = error
        _tell(outcome)
    return outcome.code


def _publisher(order: Order, outcome: Outcome) -> Publisher:
    options = _engine_options(order)
    from wtransfer.weight_sync.trainer.publisher import Publisher

    try:
        publisher = Publisher(
            _source(order),
            engine=order.engine,
            options=options,
            listen=order.listen,
            token=order.token,
            hosts=order.hosts,
            on_lost_worker=order.on_lost_worker,
            nonfinite=order.nonfinite,
            deadline_s=order.deadline_s,
        )
    except AddressError as error:
        raise click.UsageError(str(error)) from error
    except ValueError as error:
        if isinstance(error, WTransferError):
            raise
        raise click.UsageError(str(error)) from error
    outcome.address, outcome.hosts = publisher.address, publisher.hosts
    return publisher


def _engine_options(order: Order) -> dict[str, Any]:
    """Return the engine's options; engine and order must fit each other."""
    from wtransfer.commands.engine_options import typed_options
    from wtransfer.engines.factory import WeightTransferTrainerFactory
    from wtransfer.registry.registry import registry

    try:
        engine_cls = registry("engines").get(order.engine)
        trainer_cls = WeightTransferTrainerFactory.trainer_class(order.engine)
        remote = order.remote_hosts()
    except (PluginError, AddressError) as error:
        raise click.UsageError(str(error)) from error
    if remote and not getattr(engine_cls, "multi_host", False):
        raise click.UsageError(
            f"engine {order.engine!r} reaches workers on this host only, and {remote[0]} is on "
            "another: use one that crosses hosts (--engine file -o path=SHARED_FOLDER), with "
            "--listen tcp:HOST:PORT where they can dial this one"
        )
    return typed_options(order.engine, trainer_cls.init_info_cls, order.options)


def _source(order: Order) -> Any:
    if order.checkpoint is None:
        # A rollback sends what the engine keeps.
        return {}
    from wtransfer.checkpoint.source import CheckpointSource

    return CheckpointSource(order.checkpoint)


def _transfer(publisher: Publisher, outcome: Outcome) -> None:
    order = outcome.order
    begin = publisher.publish if order.rollback is None else publisher.rollback
    round_ = begin(order.version, wait=False, dry_run=order.dry_run)
    try:
        outcome.report = _watched(round_, order)
    except EndSignal as signal:
        outcome.error = _interruption(signal, round_)
        raise


def _watched(round_: Round, order: Order) -> Report:
    with view_of(silent=order.as_json) as view:
        watch(round_, view)
    return round_.result()


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


def _tell(outcome: Outcome) -> None:
    if outcome.order.as_json:
        click.echo(json.dumps(outcome.document(), indent=2))
        return
    for line in outcome.lines():
        click.echo(line)
    for line in outcome.complaints():
        click.echo(line, err=True)


def _stay(publisher: Publisher, order: Order) -> None:
    if not order.as_json:
        click.echo(f"staying until ended; late workers join with --join {publisher.address}")
    with contextlib.suppress(EndSignal):
        threading.Event().wait()
