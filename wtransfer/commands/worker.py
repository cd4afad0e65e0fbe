"""``wtransfer worker``: hold a checkpoint in memory, behind HTTP, and take updates of publishers.

A few lines of Python do the same::

    session = WorkerSession(tensors)
    with WorkerServer(session, listen="unix:@worker-0"):
        while True:
            session.commit_pending(timeout_s=1.0)
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import click

from wtransfer.commands.shared import (
    EndSignal,
    deadline_option,
    end_signals,
    plugin_option,
    token_file_option,
)
from wtransfer.errors import AddressError, AuthenticationError, CommitError, WTransferError
from wtransfer.transport.handshake import new_token, resolve_token

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
@plugin_option
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

    It serves HTTP under the names of vLLM's routes: `wtransfer push --to` reaches it, and so does
    GET /weight_info. The token comes from --token-file or WTRANSFER_TOKEN; without any, a new one
    is made and shown once. SIGINT and SIGTERM end it, with exit code 0.
    """
    try:
        with end_signals() as signals, contextlib.ExitStack() as stack:
            from wtransfer.checkpoint.source import CheckpointSource
            from wtransfer.weight_sync.http.server import WorkerServer
            from wtransfer.weight_sync.worker.session import ServingHost, WorkerSession

            environ = {"WTRANSFER_TOKEN_FILE": token_file} if token_file else os.environ
            given = resolve_token(None, environ)
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
            server = stack.enter_context(WorkerServer(session, listen=listen, token=token))
            if given is None:
                click.echo(f"token: {token} (a new one, for publishers: set it as WTRANSFER_TOKEN)")
            nbytes = sum(tensor.nbytes for tensor in tensors.values())
            click.echo(
                f"ready: {server.url} (worker {session.status().worker}, {len(tensors)} tensors, "
                f"{nbytes:,} bytes)"
            )
            while True:
                try:
                    with signals.held_back():
                        applied = session.commit_pending(timeout_s=_WAIT_S)
                except CommitError as error:
                    # The old version is back, or the state is `empty`: a push mends either.
                    click.echo(str(error), err=True)
                    continue
                if applied:
                    now = session.status()
                    click.echo(
                        f"now {now.version!r}: {now.fingerprint} (verified by {now.verified})"
                    )
    except EndSignal:
        sys.exit(0)
    except (AddressError, AuthenticationError) as error:
        raise click.UsageError(str(error)) from error
    except WTransferError as error:
        raise click.ClickException(str(error)) from error
    except ValueError as error:
        raise click.UsageError(str(error)) from error
