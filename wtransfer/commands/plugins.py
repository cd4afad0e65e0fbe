"""``wtransfer plugins``: what is installed, and whether it works."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

import click

from wtransfer.errors import PluginError, UnknownBackendError
from wtransfer.registry.discovery import DISCOVERED, installed
from wtransfer.registry.registry import Listed, Registry, host

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wtransfer.registry.discovery import Record

DECLARED = ("devices", "multi_host", "tensors_valid_until", "needs_generation", "trainer_cls")
"""Class attributes by which a backend states what it can do."""

HOSTS = "wtransfer.hosts"
"""Entry-point group of serving engines: functions of a backend's kind, its name and its example
options, that return what to write there, by words."""

as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


@click.group()
def plugins() -> None:
    """List and check installed backends."""


@plugins.command("list")
@as_json
def list_plugins(as_json: bool) -> None:
    """List every backend that is installed. Imports none of them."""
    try:
        listed = [
            each
            for kind in DISCOVERED
            for each in sorted(host.registry(kind.word).listed(), key=_place_in_list)
        ]
    except PluginError as error:
        raise click.ClickException(str(error)) from error
    rows = [_row(each) for each in listed]
    problems = [
        {"distribution": each.distribution, "problem": each.problem}
        for each in host.catalog.diagnostics
    ]
    if as_json:
        click.echo(json.dumps({"plugins": rows, "diagnostics": problems}, indent=2))
        return
    columns = ("kind", "name", "distribution", "version", "origin", "status")
    table = [columns, *(tuple(str(row[column]) for column in columns) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        click.echo("  ".join(cells).rstrip())
    for problem in problems:
        click.echo(f"warning: {problem['distribution']}: {problem['problem']}", err=True)


@plugins.command()
@click.argument("name")
@click.option(
    "--kind",
    type=click.Choice([kind.word for kind in DISCOVERED]),
    help="Look among this kind only.",
)
@as_json
def show(name: str, kind: str | None, as_json: bool) -> None:
    """Load the backend NAME and show what it declares, or why it cannot be used.

    NAME may be distribution:name. The exit code is 1 if it cannot be used.
    """
    found: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    unknown: list[dict[str, Any]] = []
    for each in DISCOVERED:
        if kind not in (None, each.word):
            continue
        registry = host.registry(each.word)
        try:
            found.append(_card(registry, registry.record(name), name))
        except PluginError as error:
            (unknown if type(error) is UnknownBackendError else failed).append(_failure(error))
    # A name that one kind knows needs no word about the others.
    cards = found + failed or unknown
    if as_json:
        click.echo(json.dumps(cards, indent=2))
    else:
        click.echo("\n\n".join(map(_card_text, cards)))
    if any(not card["usable"] for card in cards):
        sys.exit(1)


def _place_in_list(listed: Listed) -> tuple[str, str, str]:
    record = listed.record
    return record.origin, record.name, record.distribution or ""


def _row(listed: Listed) -> dict[str, Any]:
    record = listed.record
    return {
        "kind": record.kind.word,
        "name": record.name,
        "distribution": record.distribution,
        "version": record.version,
        "value": record.value,
        "origin": record.origin,
        "status": listed.status,
    }


def _card(registry: Registry, record: Record, name: str) -> dict[str, Any]:
    row = _row(next(each for each in registry.listed() if each.record is record))
    try:
        cls = registry.get(name)
    except PluginError as error:
        return {**row, **_failure(error)}
    declared = {each: _plain(getattr(cls, each)) for each in DECLARED if hasattr(cls, each)}
    hosts = _in_hosts(record, getattr(cls, "example_options", {}))
    return {**row, "usable": True, "class": _plain(cls), "declared": declared, "hosts": hosts}


def _in_hosts(record: Record, options: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return what each serving engine that is installed here says of a backend."""
    entries: dict[str, Any] = {}
    for distribution in installed():
        # One that cannot be read is in `list`'s warnings.
        with contextlib.suppress(Exception):
            entries |= {each.name: each for each in distribution.entry_points.select(group=HOSTS)}
    hosts: dict[str, dict[str, str]] = {}
    # Called afterwards: what they import may change the path that is searched.
    for name, entry in entries.items():
        try:
            hosts[name] = entry.load()(record.kind.word, record.name, options)
        except Exception as error:  # noqa: PERF203  # one that fails hides none of the others
            hosts[name] = {"error": f"{type(error).__name__}: {error}"}
    return hosts


def _failure(error: PluginError) -> dict[str, Any]:
    cause = error.__cause__
    return {
        "usable": False,
        "error": {
            "class": type(error).__name__,
            "message": str(error),
            "cause": None if cause is None else f"{type(cause).__name__}: {cause}",
        },
    }


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if isinstance(value, type):
        return f"{value.__module__}:{value.__qualname__}"
    if isinstance(value, tuple):
        return list(value)
    return value if isinstance(value, (str, bool, int, type(None))) else repr(value)


def _card_text(card: dict[str, Any]) -> str:
    lines = {k: v for k, v in card.items() if k not in ("usable", "error", "declared", "hosts")}
    lines |= card.get("declared", {})
    for host_name, facts in card.get("hosts", {}).items():
        lines |= {f"{host_name}: {word}": text for word, text in facts.items()}
    error = card.get("error")
    if error is not None:
        lines["error"] = f"{error['class']}: {error['message']}"
        lines["cause"] = error["cause"] or "none"
    lines["usable"] = "yes" if card["usable"] else "no"
    width = max(map(len, lines))
    return "\n".join(f"{key.ljust(width)}  {value}" for key, value in lines.items())
