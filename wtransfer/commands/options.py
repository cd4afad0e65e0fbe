"""Options that commands share."""

from __future__ import annotations

import click

token_file_option = click.option(
    "--token-file", metavar="FILE", help="Owner-only file with the shared secret."
)
deadline_option = click.option(
    "--deadline",
    "deadline_s",
    type=click.FloatRange(min=0, min_open=True),
    default=30.0,
    metavar="SECONDS",
    show_default=True,
    help="Longest time without progress.",
)
