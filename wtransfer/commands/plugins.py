"""``wtransfer plugins``: what is installed, and whether it works."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

import click

from wtransfer.errors import PluginError, UnknownBackendError
from wtransfer.registry.discovery import Record, installed
from wtransfer.registry.kinds import DISCOVERED
from wtransfer.registry.registry import Registry, host

if TYPE_CHECKING:
    from collections.abc import Mapping

DECLARED = ("devices", "multi_host", "tensors_valid_until", "needs_generation", "trainer_cls")
"""Class attributes by which a backend states what it can do."""

HOSTS = "wtransfer.hosts"
"""Entry-point group of serving engines: functions of a backend's kind, its name and its example
options, that return what to write there, by words."""
COLUMNS = ("kind", "name", "distribution", "version", "origin", "status")

as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


@click.group()
def plugins() -> None:
    """List and check installed backends."""


@plugins.command("list")
@as_json
def list_plugins(as_json: bool) -> None:
    """List every backend that is installed. Imports none of them."""
    try:
        rows = [
            _row(registry, record) for registry in _registries() for record in _sorted(registry)
        ]
    except PluginError as error:
        raise click.ClickException(str(error)) from error
    problems = [
        {"distribution": each.distribution, "problem": each.problem}
        for each in host.catalog.diagnostics
    ]
    if as_json:
        click.echo(json.dumps({"plugins": rows, "diagnostics": problems}, indent=2))
        return
    _print_table(rows)
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
    found, errors = _look_up(name, kind)
    cards = [_card(registry, record, name) for registry, record in found]
    cards += [_failure(error) for error in errors]
    if as_json:
        click.echo(json.dumps(cards, indent=2))
    else:
        click.echo("\n\n".join(map(_spell_card, cards)))
    if any(not card["usable"] for card in cards):
        sys.exit(1)


def _registries(kind: str | None = None) -> list[Registry]:
    return [host.registry(each.word) for each in DISCOVERED if kind in (None, each.word)]


def _sorted(registry: Registry) -> list[Record]:
    return sorted(registry.shelf.records, key=lambda r: (r.origin, r.name, r.distribution or ""))


def _row(registry: Registry, record: Record) -> dict[str, Any]:
    return {
        "kind": record.kind,
        "name": record.name,
        "distribution": record.distribution,
        "version": record.version,
        "value": record.value,
        "origin": record.origin,
        "status": registry.shelf.status(record),
    }


def _look_up(
    name: str, kind: str | None
) -> tuple[list[tuple[Registry, Record]], list[PluginError]]:
    """Return what the name means in each kind, and the errors worth showing."""
    answers = [(registry, _record(registry, name)) for registry in _registries(kind)]
    found = [(registry, answer) for registry, answer in answers if isinstance(answer, Record)]
    errors = [answer for _, answer in answers if isinstance(answer, PluginError)]
    telling = [error for error in errors if type(error) is not UnknownBackendError]
    # A name that one kind knows needs no word about the others.
    return found, telling if found or telling else errors


def _record(registry: Registry, name: str) -> Record | PluginError:
    try:
        return registry.record(name)
    except PluginError as error:
        return error


def _card(registry: Registry, record: Record, name: str) -> dict[str, Any]:
    card = _row(registry, record)
    try:
        cls = registry.get(name)
    except PluginError as error:
        return {**card, **_failure(error)}
    declared = {each: _spell(getattr(cls, each)) for each in DECLARED if hasattr(cls, each)}
    hosts = _in_hosts(record, getattr(cls, "example_options", {}))
    return {**card, "usable": True, "class": _spell(cls), "declared": declared, "hosts": hosts}


def _in_hosts(record: Record, options: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return what each serving engine that is installed here says of a backend."""
    entries: dict[str, Any] = {}
    for distribution in installed():
        # One that cannot be read is in `list`'s warnings.
        with contextlib.suppress(Exception):
            entries |= {each.name: each for each in distribution.entry_points.select(group=HOSTS)}
    # Called afterwards: what they import may change the path that is searched.
    return {name: _in_host(entry, record, options) for name, entry in entries.items()}


def _in_host(entry: Any, record: Record, options: Mapping[str, Any]) -> dict[str, str]:
    try:
        told: dict[str, str] = entry.load()(record.kind, record.name, options)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return told


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


def _spell(value: Any) -> Any:
    if isinstance(value, type):
        return f"{value.__module__}:{value.__qualname__}"
    if isinstance(value, tuple):
        return list(value)
    return value if isinstance(value, (str, bool, int, type(None))) else repr(value)


def _print_table(rows: list[dict[str, Any]]) -> None:
    table = [COLUMNS, *(tuple(str(row[column]) for column in COLUMNS) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        click.echo("  ".join(cells).rstrip())


def _spell_card(card: dict[str, Any]) -> str:
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
