"""``wtransfer demo``: train, serve, publish, kill, recover, and judge what was seen."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from wtransfer.demo.conductor import MIN_ROUNDS, Conductor
from wtransfer.demo.document import document
from wtransfer.demo.sizes import ModelShape
from wtransfer.demo.table import Lines, LiveTable, Silence, gaps_in_words
from wtransfer.demo.telling import fail, tell_checks, tell_end
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
@click.option(
    "--kv", is_flag=True, help="Tell another story: KV cache from a prefill to a decode instance."
)
@click.option(
    "--connector",
    default="SharedMemoryConnector",
    metavar="NAME",
    help="What brings the KV cache, with --kv: any connector that is installed.",
    show_default=True,
)
@click.option(
    "-o",
    "options",
    multiple=True,
    metavar="KEY=VALUE",
    help="Option of the connector, with --kv. Repeat.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, nothing else.")
@click.pass_context
def demo(
    ctx: click.Context,
    *,
    rounds: int,
    shape: ModelShape,
    kv: bool,
    connector: str,
    options: tuple[str, ...],
    as_json: bool,
) -> None:
    """Train a small transformer and serve it in two other processes meanwhile.

    Every round brings the weights of the moment to both workers while they generate text. In one
    round a worker is killed half way. The exit status is 0 only if every receipt was right and
    every promise kept.

    With --kv, a long document is read by one process and asked about in another one, which gets the
    keys and values of the first through a connector. The first one is killed, and comes back. The
    exit status is 0 only if every answer is that of a process that has computed everything itself.
    """
    _check_story(ctx, kv)
    if kv:
        from wtransfer.demo.kv.command import tell_kv

        sys.exit(tell_kv(connector, options, as_json=as_json))
    try:
        story, seconds = _run(shape, rounds, as_json)
    except WTransferError as error:
        fail(error, as_json=as_json)
    checks = judge(story)
    if as_json:
        click.echo(json.dumps(document(story, checks, seconds), indent=2))
    else:
        tell(story, checks, seconds)
    sys.exit(0 if all(check.kept for check in checks) else 1)


def _check_story(ctx: click.Context, kv: bool) -> None:
    """Refuse what belongs to the other story.

    Raises:
        UsageError: It was given.
    """
    others = ("rounds", "shape") if kv else ("connector", "options")
    for name in others:
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            flag = next(each.opts[-1] for each in ctx.command.params if each.name == name)
            raise click.UsageError(
                f"{flag} is an option of the demo {'without' if kv else 'with'} --kv"
            )


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
    tell_checks(checks)
    click.echo(f"\n{gaps_in_words(story)}")
    tell_end(checks, seconds)
