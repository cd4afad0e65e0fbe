"""What every story of the demo says at its end: the verdict, or the error that ended it."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, NoReturn

import click

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wtransfer.demo.verdict import Check
    from wtransfer.errors import WTransferError


def fail(error: WTransferError, *, as_json: bool) -> NoReturn:
    """Say what ended the demo, and end the process with 1."""
    if as_json:
        click.echo(json.dumps({"ok": False, "error": str(error)}, indent=2))
    else:
        click.echo(f"the demo failed: {error}", err=True)
    sys.exit(1)


def tell_checks(checks: Sequence[Check]) -> None:
    """Write every promise, whether it was kept, and what was seen of it."""
    click.echo()
    for check in checks:
        click.echo(f"[{'ok' if check.kept else 'FAILED'}] {check.promise}\n     {check.seen}")


def tell_end(checks: Sequence[Check], seconds: float) -> None:
    """Write the last line.

    Args:
        checks: The verdict.
        seconds: Duration after imports.
    """
    kept = sum(check.kept for check in checks)
    click.echo(f"\n{kept} of {len(checks)} promises kept, {seconds:.0f} s after imports")
