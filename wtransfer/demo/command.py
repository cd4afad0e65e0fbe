"""``wtransfer demo``: train, serve, publish, kill, recover, and judge what was seen."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, NoReturn

import click

from wtransfer.demo.conductor import MIN_ROUNDS, Conductor
from wtransfer.demo.document import document
from wtransfer.demo.sizes import ModelShape
from wtransfer.demo.table import Lines, LiveTable, Silence, gaps_in_words
from wtransfer.demo.verdict import judge
from wtransfer.errors import WTransferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wtransfer.demo.story import Story
    from wtransfer.demo.verdict import Check

_DEFAULT_ROUNDS = 8


def _shape(_ctx: click.Context, _param: click.Parameter, size: str) -> ModelShape:
    try:
        return ModelShape.parse(size)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@click.command()
@click.option(
    "--rounds",
    type=click.IntRange(min=MIN_ROUNDS),
    default=_DEFAULT_ROUNDS,
    help="Number of rounds.",
    show_default=True,
)
@click.option(
    "--model-size",
    "shape",
    callback=_shape,
    default="small",
    metavar="SIZE",
    help="tiny, small, medium, large, or a number of million parameters.",
    show_default=True,
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, nothing else.")
def demo(rounds: int, shape: ModelShape, as_json: bool) -> None:
    """Train a small transformer and serve it in two other processes meanwhile.

    Every round brings the weights of the moment to both workers while they generate text. In one
    round a worker is killed half way. The exit status is 0 only if every receipt was right and
    every promise kept.
    """
    try:
        story, seconds = _run(shape, rounds, as_json)
    except WTransferError as error:
        _fail(error, as_json)
    checks = judge(story)
    if as_json:
        click.echo(json.dumps(document(story, checks, seconds), indent=2))
    else:
        tell(story, checks, seconds)
    sys.exit(0 if all(check.kept for check in checks) else 1)


def _run(shape: ModelShape, rounds: int, as_json: bool) -> tuple[Story, float]:
    with _view(as_json) as view, Conductor(shape, rounds, view) as conductor:
        conductor.start()
        began = time.monotonic()
        story = conductor.run()
        view.close(story)
        return story, time.monotonic() - began


def _view(as_json: bool) -> LiveTable | Lines | Silence:
    if as_json:
        return Silence()
    if not sys.stdout.isatty():
        return Lines(click.echo)
    from rich.console import Console

    return LiveTable(Console())


def _fail(error: WTransferError, as_json: bool) -> NoReturn:
    if as_json:
        click.echo(json.dumps({"ok": False, "error": str(error)}, indent=2))
    else:
        click.echo(f"the demo failed: {error}", err=True)
    sys.exit(1)


def tell(story: Story, checks: Sequence[Check], seconds: float) -> None:
    """Write what is left to say: samples of the text, and the verdict.

    Args:
        story: The run.
        checks: Its verdict.
        seconds: Duration after imports.
    """
    for title, sample in (("before", story.samples[:1]), ("after", story.samples[-1:])):
        for each in sample:
            click.echo(f"\n{title} ({each.worker}, {each.version or 'untrained'}):\n  {each.text}")
    click.echo()
    for check in checks:
        click.echo(f"[{'ok' if check.kept else 'FAILED'}] {check.promise}\n     {check.seen}")
    click.echo(f"\n{gaps_in_words(story)}")
    kept = sum(check.kept for check in checks)
    click.echo(f"\n{kept} of {len(checks)} promises kept, {seconds:.0f} s after imports")
