"""What a user asks of ``wtransfer push``, checked before anything is loaded or sent."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path  # noqa: TC003  # dataclasses keep their hints resolvable
from typing import Any

import click

from wtransfer.errors import AddressError, AuthenticationError
from wtransfer.transport.auth import resolve_token
from wtransfer.weight_sync.http.client import parse_url


@dataclass(frozen=True)
class Order:
    """One push. Fields are the command's options."""

    checkpoint: Path | None
    """Folder or file of the weights; None: a rollback."""
    hosts: tuple[str, ...]
    """Workers' URLs."""
    engine: str
    """Engine name."""
    options: tuple[str, ...]
    """``key=value``, as given."""
    label: str | None
    """Label of the update."""
    rollback: str | None
    """Label of a kept version to go back to."""
    dry_run: bool
    """Whether to end before the commit."""
    stay: bool
    """Whether to serve late workers afterwards."""
    as_json: bool
    """Whether to print a document instead of text."""
    token_file: str | None
    """Owner-only file with the token."""
    listen: str | None
    """Address of the publisher."""
    deadline_s: float
    """Longest time without progress."""
    on_lost_worker: Any
    """``abort`` or ``drop``."""
    nonfinite: Any
    """``allow``, ``warn`` or ``reject``."""

    def check(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            click.UsageError: It says what is wrong, and what to write.
        """
        if (self.checkpoint is None) == (self.rollback is None):
            raise click.UsageError("give either a checkpoint DIR or --rollback LABEL")
        if self.rollback is not None and self.label is not None:
            raise click.UsageError("--rollback takes the label from the kept version: omit --label")
        for option, label in (("--rollback", self.rollback), ("--label", self.label)):
            if label == "":
                raise click.UsageError(f"{option} is empty: give the label of a version")
        if not self.version:
            raise click.UsageError(f"{self.checkpoint} has no name to be the label: add --label")
        if self.stay and self.dry_run:
            raise click.UsageError("--stay has nothing to serve after --dry-run: omit one of them")
        if len(set(self.hosts)) < len(self.hosts):
            raise click.UsageError("a worker is named twice: give each --to once")
        self._check_urls()
        if self.stay and self.token is None:
            raise click.UsageError(
                "--stay is for workers that know the token: give --token-file, or set "
                "WTRANSFER_TOKEN here and for them"
            )

    def _check_urls(self) -> None:
        try:
            for each in self.hosts:
                parse_url(each)
        except AddressError as error:
            raise click.UsageError(str(error)) from error

    @property
    def version(self) -> str:
        """Label: as given, or the name of the checkpoint's folder."""
        if self.rollback is not None or self.label is not None:
            return self.rollback or self.label or ""
        assert self.checkpoint is not None
        path = self.checkpoint.resolve()
        folder = path.parent if path.is_file() else path
        # A file name may hold bytes that are no text, and a label travels as text.
        return folder.name.encode(errors="replace").decode()

    @property
    def token(self) -> str | None:
        """The shared secret, if there is one.

        Raises:
            click.UsageError: The token file cannot be trusted or read.
        """
        try:
            if self.token_file is not None:
                return resolve_token(None, {"WTRANSFER_TOKEN_FILE": self.token_file})
            return resolve_token(None)
        except AuthenticationError as error:
            raise click.UsageError(str(error)) from error

    def remote_hosts(self) -> list[str]:
        """Return the workers that are on other hosts; looks names up, which may block.

        Raises:
            AddressError: A name is not known.
        """
        urls = map(parse_url, self.hosts)
        return [url.name for url in urls if not url.is_local]
