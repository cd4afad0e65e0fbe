"""``wtransfer worker``: hold a checkpoint in memory, behind HTTP, and take what publishers send.

What it does is a few lines of Python::

    session = WorkerSession(tensors)
    with WorkerServer(session, listen="unix:@worker-0"):
        while True:
            session.commit_pending(timeout_s=1.0)
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from wtransfer.commands.shared import EndSignal, deadline_option, end_signals, token_file_option
from wtransfer.errors import CommitError, WTransferError
from wtransfer.transport.handshake import new_token, resolve_token

if TYPE_CHECKING:
    import torch

    from wtransfer.weight_sync.worker.session import WorkerSession

_WAIT_S = 1.0


@dataclass(frozen=True)
class WorkerOrder:
    """What a user asks for. Fields are the command's options."""

    checkpoint: Path
    """Folder or file of the first weights."""
    listen: str
    """Where to serve HTTP."""
    join: tuple[str, ...]
    """Publishers, or folders of versions."""
    token_file: str | None
    """Owner-only file with the token."""
    name: str | None
    """Name of the worker."""
    commit: Any
    """``adopt`` or ``copy``."""
    accept_unsealed: str | None
    """Engine for updates that are no rounds."""
    deadline_s: float
    """Longest time without progress."""

    def token(self) -> str | None:
        """Return the token that was given.

        Raises:
            AuthenticationError: Its file cannot be trusted or read.
        """
        if self.token_file is not None:
            return resolve_token(None, {"WTRANSFER_TOKEN_FILE": self.token_file})
        return resolve_token(None)


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
    help="Where to serve: tcp:HOST:PORT (port 0: a free one), unix:@NAME or unix:/PATH.",
)
@click.option(
    "--join",
    multiple=True,
    metavar="ADDRESS",
    help="A publisher to follow, or file:/ROOT, a folder of versions. Repeat for more.",
)
@token_file_option
@click.option("--name", help="Name in reports. Default: host and process id.")
@click.option(
    "--commit",
    type=click.Choice(["adopt", "copy"]),
    default="adopt",
    show_default=True,
    help="Whether to take over the staged memory, or to copy from it.",
)
@click.option(
    "--accept-unsealed",
    metavar="ENGINE",
    help="Also take updates that no publisher has digested, by this engine.",
)
@deadline_option
def worker(**arguments: Any) -> None:
    """Hold the weights of a checkpoint, and take new ones from publishers until ended.

    It serves HTTP under the names of vLLM's routes: `wtransfer push --to` reaches it, and so does
    GET /weight_info. The token comes from --token-file or WTRANSFER_TOKEN; without any, a new one
    is made and shown once. SIGINT and SIGTERM end it, with exit code 0.
    """
    try:
        with end_signals():
            run(WorkerOrder(**arguments))
    except EndSignal:
        sys.exit(0)
    except WTransferError as error:
        raise click.ClickException(str(error)) from error
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def run(order: WorkerOrder) -> NoReturn:
    """Serve until `EndSignal`.

    Raises:
        WTransferError: The checkpoint cannot be read, the address is taken, or the like.
        ValueError: What was asked for cannot be meant.
    """
    from wtransfer.weight_sync.http.worker_server import WorkerServer
    from wtransfer.weight_sync.worker.session import WorkerSession

    given = order.token()
    token = given or new_token()
    tensors = _tensors(order.checkpoint)
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(
            WorkerSession(
                tensors,
                token=token,
                commit=order.commit,
                deadline_s=order.deadline_s,
                name=order.name,
            )
        )
        for address in order.join:
            session.join(address)
        server = stack.enter_context(
            WorkerServer(
                session,
                listen=order.listen,
                token=token,
                accept_unsealed=order.accept_unsealed,
                deadline_s=order.deadline_s,
            )
        )
        if given is None:
            click.echo(f"token: {token} (a new one, for publishers: set it as WTRANSFER_TOKEN)")
        nbytes = sum(each.nbytes for each in tensors.values())
        click.echo(
            f"ready: {server.url} (worker {session.name}, {len(tensors)} tensors, {nbytes:,} bytes)"
        )
        _serve(session)


def _tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    from wtransfer.checkpoint.source import CheckpointSource

    return dict(CheckpointSource(checkpoint).iter_full())


def _serve(session: WorkerSession) -> NoReturn:
    while True:
        try:
            applied = session.commit_pending(timeout_s=_WAIT_S)
        except CommitError as error:
            # The old version is back, or the state says `empty`; either can be mended by a push.
            click.echo(str(error), err=True)
            continue
        if applied:
            held = session.ledger.held
            click.echo(f"now {held.version!r}: {held.fingerprint} (verified by {held.verified})")
