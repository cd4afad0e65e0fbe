"""``wtransfer seal``: write the digests of a checkpoint beside it, and check them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from wtransfer.commands.shared import usage_errors
from wtransfer.errors import WTransferError
from wtransfer.manifest import check_label


@click.command()
@click.argument(
    "checkpoint",
    metavar="DIR",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
)
@click.option(
    "--check", "checks", is_flag=True, help="Write nothing: compare, and name what differs."
)
@click.option("--label", help="Name of this version, for people.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, nothing else.")
def seal(checkpoint: Path, checks: bool, label: str | None, as_json: bool) -> None:
    """Write wtransfer.json, with the digest of every tensor, beside the checkpoint in DIR.

    A push of DIR then sends these very bytes, or fails and names the tensor. The exit code is 1 if
    DIR is no whole checkpoint, or, with --check, if any tensor differs from what was sealed; 2 on a
    usage error.
    """
    if checks and label is not None:
        raise click.UsageError("--check writes no label: omit one of them")
    if label is not None:
        with usage_errors():
            check_label(label)
    from wtransfer.checkpoint import source

    try:
        manifest, wrong = (
            source.check(checkpoint) if checks else (source.seal(checkpoint, label), {})
        )
        document: dict[str, Any] = {
            "ok": not wrong,
            "label": manifest.version,
            "fingerprint": manifest.fingerprint,
            "num_tensors": len(manifest.pieces),
            "nbytes": manifest.manifest.nbytes,
        }
        if checks:
            document["differences"] = wrong
    except WTransferError as error:
        document = {"ok": False, "error": {"type": type(error).__name__, "message": str(error)}}
    if as_json:
        click.echo(json.dumps({"checkpoint": str(checkpoint), **document}, indent=2))
    else:
        _print(document, "checked" if checks else "sealed")
    sys.exit(0 if document["ok"] else 1)


def _print(document: dict[str, Any], done: str) -> None:
    if "error" in document:
        click.echo(f"not {done}: {document['error']['message']}", err=True)
        return
    wrong = document.get("differences", {})
    for name, problem in wrong.items():
        click.echo(f"{name!r} {problem}")
    click.echo(
        f"{done}  {document['num_tensors']} tensors, {document['nbytes'] / 1e6:.1f} MB"
        + (f", {len(wrong)} of them differ" if wrong else "")
    )
    click.echo(f"fingerprint  {document['fingerprint']}")
