"""``wtransfer worker``: hold a checkpoint in memory, behind HTTP, and take updates of publishers.

A few lines of Python do the same::

    session = WorkerSession(tensors)
    with WorkerServer(session, listen="unix:@worker-0"):
        while True:
            session.commit_pending(timeout_s=1.0)
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wtransfer import hooks
from wtransfer.commands.shared import (
    EndSignal,
    deadline_option,
    end_signals,
    given_token,
    logging_option,
    token_file_option,
)
from wtransfer.errors import (
    AddressError,
    AuthenticationError,
    CommitError,
    PluginNotInstalledError,
    WTransferError,
)
from wtransfer.registry.option import plugin_option
from wtransfer.transport.handshake import new_token
from wtransfer.weight_sync.report import printable

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from wtransfer.weight_sync.worker.session import WorkerSession, WorkerStatus

_CLOCK = "%Y-%m-%d %H:%M:%S"
_PATIENCE_S = 1.0
"""Seconds until it says that it waits for its publisher."""
_WAIT_S = 0.2  # a signal takes as long, at most


@click.command()
@click.option(
    "--checkpoint",
    required=True,
    metavar="DIR",
    type=click.Path(path_type=Path, exists=True),
    help="Folder of safetensors files, or one such file: the first weights.",
)
@click.option(
    "--listen",
    default="tcp:127.0.0.1:0",
    show_default=True,
    metavar="ADDRESS",
    help="Address to serve: tcp:HOST:PORT (port 0: a free one), unix:@NAME or unix:/PATH.",
)
@click.option(
    "--join",
    metavar="ADDRESS",
    help="The publisher to follow, or file:/ROOT, a folder of versions.",
)
@token_file_option
@plugin_option("engines")
@click.option("--name", help="Name in reports. Default: host and process id.")
@click.option(
    "--commit",
    type=click.Choice(["adopt", "copy"]),
    default="adopt",
    show_default=True,
    help="Adopt the staged memory, or copy from it.",
)
@click.option(
    "--cast",
    is_flag=True,
    help="Take updates in another floating dtype than the checkpoint's, such as float32 masters.",
)
@deadline_option
@logging_option
def worker(
    *,
    checkpoint: Path,
    listen: str,
    join: str | None,
    token_file: str | None,
    name: str | None,
    commit: Any,
    cast: bool,
    deadline_s: float,
) -> None:
    """Hold the weights of a checkpoint, and take new ones from publishers until ended.

    It serves HTTP under the names of vLLM's routes: `wtransfer push` and `wtransfer status` reach
    it by --to, and so do GET /weight_info, /healthz, /readyz and /metrics. The token comes from
    --token-file or WTRANSFER_TOKEN; without any, a new one is made and shown once. SIGINT and
    SIGTERM end it, with exit code 0.
    """
    try:
        with end_signals() as signals, contextlib.ExitStack() as stack:
            from wtransfer.checkpoint.source import CheckpointSource
            from wtransfer.weight_sync.http.server import WorkerServer
            from wtransfer.weight_sync.worker.session import ServingHost, WorkerSession

            given = given_token(token_file)
            token = given or new_token()
            tensors = dict(CheckpointSource(checkpoint).iter_full())
            session = stack.enter_context(
                WorkerSession(
                    tensors,
                    join=join,
                    token=token,
                    commit=commit,
                    cast=cast,
                    serving_host=ServingHost(cast_hint="wtransfer worker --cast"),
                    deadline_s=deadline_s,
                    name=name,
                )
            )
            metrics = _metrics(session, stack)
            server = stack.enter_context(
                WorkerServer(session, listen=listen, token=token, metrics=metrics)
            )
            if given is None:
                click.echo(f"token: {token} (a new one, for publishers: set it as WTRANSFER_TOKEN)")
            nbytes = sum(tensor.nbytes for tensor in tensors.values())
            click.echo(
                f"ready: {server.url} (worker {session.status().worker}, {len(tensors)} tensors, "
                f"{nbytes:,} bytes) at {time.strftime(_CLOCK)}"
            )
            joined = None if join is None else _Joined(join)
            while True:
                if joined is not None:
                    joined.look(session.status())
                try:
                    with signals.held_back():
                        applied = session.commit_pending(timeout_s=_WAIT_S)
                except CommitError as error:
                    # The old version is back, or the state is `empty`: a push mends either.
                    click.echo(f"{time.strftime(_CLOCK)}  {error}", err=True)
                    continue
                if applied:
                    now = session.status()
                    click.echo(
                        f"{time.strftime(_CLOCK)}  now {now.version!r}: {now.fingerprint} "
                        f"(verified by {now.verified})"
                    )
    except EndSignal:
        sys.exit(0)
    except (AddressError, AuthenticationError) as error:
        raise click.UsageError(str(error)) from error
    except WTransferError as error:
        raise click.ClickException(str(error)) from error
    except ValueError as error:
        raise click.UsageError(str(error)) from error


class _Joined:
    """Says once when the publisher, or the folder, of ``--join`` is waited for, reached, or lost.

    Args:
        address: As the user wrote it.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._since = time.monotonic()
        self._said = ""

    def look(self, status: WorkerStatus) -> None:
        """Say what has changed."""
        if status.connected:
            self._say("joined")
        elif self._said == "joined":
            self._say("lost", "dialing again")
        elif self._said != "lost" and time.monotonic() - self._since >= _PATIENCE_S:
            why = str(status.refusal) if status.refusal else "it is not reached; is it there?"
            folder = self._address.removeprefix("file:")
            if folder != self._address and status.refusal is None:
                there = "holds no version yet" if Path(folder).is_dir() else "does not exist"
                why = f"{folder} {there}; is the path right?"
            self._say("waiting for", why)

    def _say(self, word: str, why: str = "") -> None:
        if word != self._said:
            text = f": {why}" if why else ""
            # A refusal is the publisher's text.
            click.echo(printable(f"{time.strftime(_CLOCK)}  {word} {self._address}{text}"))
            self._said = word


def _metrics(session: WorkerSession, stack: contextlib.ExitStack) -> CollectorRegistry | None:
    """Return the worker's metrics, observed until the stack is left; None: no prometheus-client."""
    from wtransfer.metrics import RoundCollector

    try:
        rounds = RoundCollector(session=session)
    except PluginNotInstalledError:
        return None
    from prometheus_client import CollectorRegistry

    hooks.register(rounds)
    stack.callback(hooks.unregister, rounds)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(rounds)
    return registry
