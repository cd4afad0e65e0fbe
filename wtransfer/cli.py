"""The command line. Commands live with the code they call and are imported when they are used."""

from __future__ import annotations

import importlib
from typing import NamedTuple

import click


class Place(NamedTuple):
    """Location of a command, and its line in the overview."""

    module: str
    """Module that defines the command."""
    attr: str
    """Name in that module."""
    summary: str
    """One line; here, so that the overview imports no command."""


COMMANDS = {
    "bench": Place(
        "wtransfer.bench.command", "bench", "Measure here what is promised, beside its goals."
    ),
    "demo": Place(
        "wtransfer.demo.command", "demo", "Train, publish and serve a small model, and watch it."
    ),
    "plugins": Place("wtransfer.commands.plugins", "plugins", "List and check installed backends."),
    "push": Place("wtransfer.commands.push", "push", "Bring a checkpoint into running workers."),
    "seal": Place("wtransfer.commands.seal", "seal", "Write down the digests of a checkpoint."),
    "status": Place(
        "wtransfer.commands.status", "status", "Show which worker holds which version."
    ),
    "worker": Place(
        "wtransfer.commands.worker", "worker", "Serve a checkpoint, and take updates of it."
    ),
}


class LazyGroup(click.Group):
    """A group that knows its commands by place."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # click's signature
        """Return the names."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import the command."""
        place = COMMANDS.get(cmd_name)
        if place is None:
            return None
        command = getattr(importlib.import_module(place.module), place.attr)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Look up the command; an unknown one is a usage error that lists the commands."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            there_are = f"The commands are {', '.join(sorted(COMMANDS))}."
            raise click.UsageError(f"{error.message} {there_are}", ctx) from error

    def format_commands(
        self,
        ctx: click.Context,  # noqa: ARG002  # click's signature
        formatter: click.HelpFormatter,
    ) -> None:
        """Write the overview without importing any command."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name].summary) for name in sorted(COMMANDS)])


@click.group(cls=LazyGroup)
@click.version_option(package_name="wtransfer")
def main() -> None:
    """Move weights from a trainer to its workers, and KV cache between instances and tiers."""
