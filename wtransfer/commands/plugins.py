"""``wtransfer plugins``: what is installed, and whether it works."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import pkgutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wtransfer.commands.options import options_of
from wtransfer.errors import PluginError, PluginTypeError, UnknownBackendError
from wtransfer.registry.discovery import (
    CORE,
    DISCOVERED,
    ENGINES,
    HOSTS,
    SPECS,
    contract_of,
    installed,
)
from wtransfer.registry.resolve import Listed, Registry, add_file, host
from wtransfer.scaffold import GROUPS, create

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import IO

    from wtransfer.registry.discovery import Record

DECLARED = (
    "devices",
    "multi_host",
    "tensors_valid_until",
    "writes_after_return",
    "contract_version",
    "needs_generation",
    "trainer_cls",
)
"""Class attributes by which a backend declares its abilities."""

TIER = "wtransfer.specs.interface:Tier"
START_S = 30.0
"""Time allowed to a process besides the import of one backend, in seconds."""

as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
of_kind = click.option(
    "--kind",
    type=click.Choice([kind.word for kind in DISCOVERED]),
    help="Look among this kind only.",
)


of_file = click.option(
    "--plugin",
    "file",
    metavar="FILE.py:CLASS",
    help="A class of a file, of the kind that --kind names, in place of NAME.",
)


@click.group()
def plugins() -> None:
    """List and check installed backends."""


@plugins.command("list")
@as_json
def list_plugins(as_json: bool) -> None:
    """List every backend that is installed. Imports none of them."""
    try:
        rows = [_row(each) for each in _listed(None, None)]
    except PluginError as error:
        raise click.ClickException(str(error)) from error
    problems = _problems() + _unmatched()
    if as_json:
        click.echo(json.dumps({"plugins": rows, "diagnostics": problems}, indent=2))
        return
    columns = ("kind", "name", "distribution", "version", "origin", "status")
    echo_row = _begin_table(columns, rows)
    for row in rows:
        echo_row(row)
    _echo_problems(problems)


@plugins.command()
@click.argument("name", required=False)
@of_kind
@of_file
@click.option("--traceback", "with_traceback", is_flag=True, help="Show where its import failed.")
@as_json
def show(
    name: str | None, kind: str | None, file: str | None, with_traceback: bool, as_json: bool
) -> None:
    """Load the backend NAME and show what it declares, or why it cannot be used.

    NAME may be distribution:name. The exit code is 1 if it cannot be used.
    """
    name = _name(name, kind, file)
    if name is None:
        raise click.UsageError("Missing argument 'NAME'.")
    found: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    unknown: list[dict[str, Any]] = []
    # A plug-in may print as it is imported, and the output is for programs.
    with _printing_aside() if as_json else contextlib.nullcontext():
        for each in DISCOVERED:
            if kind not in (None, each.word):
                continue
            registry = host.registry(each.word)
            try:
                found.append(_card(registry, registry.record(name), name, with_traceback))
            except PluginError as error:
                (unknown if type(error) is UnknownBackendError else failed).append(_failure(error))
    # A name that one kind knows needs no word about the others.
    cards = found + failed or (unknown if kind else [_failure(_unknown_error(name))])
    if as_json:
        click.echo(json.dumps(cards, indent=2))
    else:
        click.echo("\n\n".join(map(_card_text, cards)))
    if any(not card["usable"] for card in cards):
        sys.exit(1)


@plugins.command()
@click.argument("name", required=False)
@of_kind
@of_file
@as_json
def check(name: str | None, kind: str | None, file: str | None, as_json: bool) -> None:
    """Load every backend, or NAME, each in a process of its own, and say what to mend.

    Backends that WTRANSFER_PLUGINS or WTRANSFER_PLUGINS_BLOCK excludes are not loaded. The exit
    code is 1 if a backend cannot be used, or not by its name alone, or if entry points cannot be
    read; 2 if no backend has the name NAME.
    """
    # These imports would be a tenth of the time of `list`.
    from concurrent.futures import ThreadPoolExecutor

    name = _name(name, kind, file)
    try:
        listed = _listed(name, kind)
        limit_s = host.settings.load_timeout_s + START_S
    except PluginError as error:
        raise click.UsageError(str(error)) from error
    columns = ("kind", "name", "distribution", "version", "result")
    echo_row = None if as_json else _begin_table(columns, list(map(_row, listed)))
    cards = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for card in pool.map(lambda each: _probe(each, limit_s), listed):
            cards.append(card)
            if echo_row is not None:
                echo_row({**card, "result": _result(card)})
    problems = [] if name else _problems()
    # A list that many hosts have may name what is installed on others: no reason to fail.
    unmatched = _unmatched()
    if as_json:
        click.echo(json.dumps({"plugins": cards, "diagnostics": problems + unmatched}, indent=2))
    else:
        _echo_problems(problems + unmatched)
    is_fine = all(card["usable"] is not False and _is_plain(card) for card in cards)
    sys.exit(0 if is_fine and not problems else 1)


@plugins.command()
@click.argument("name")
@of_kind
def why(name: str, kind: str | None) -> None:
    """Say step by step which backend NAME means. Imports none of them.

    The exit code is 1 where no backend has that name.
    """
    try:
        words = [each.word for each in DISCOVERED if kind in (None, each.word)]
        steps = {word: host.registry(word).explain(name) for word in words}
    except PluginError as error:
        raise click.ClickException(str(error)) from error
    # A name that one kind knows needs no word about the others.
    known = {w: s for w, s in steps.items() if not s[-1].startswith(UnknownBackendError.__name__)}
    for word, lines in (known or steps).items():
        click.echo("\n  ".join([f"{word}:", *lines]))
    _echo_problems(_unmatched())
    if not known:
        sys.exit(1)


@plugins.command()
@click.argument("kind", type=click.Choice(sorted(GROUPS)))
@click.argument("name")
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    help="Folder to write to. Default: NAME, in this folder.",
)
def new(kind: str, name: str, folder: Path | None) -> None:
    """Write a distribution with a small working backend of that KIND, called NAME, to be changed.

    Its tests pass as it is: pip install -e "NAME[test]" && pytest NAME
    """
    folder = folder or Path(name)
    try:
        written = create(kind, name, folder)
    except FileExistsError as error:
        raise click.UsageError(f"{folder} is there already; choose another folder") from error
    except (PluginError, OSError) as error:
        raise click.UsageError(str(error)) from error
    for place in written:
        click.echo(place)
    click.echo(f'now: pip install -e "{folder}[test]" && pytest {folder}')


@contextlib.contextmanager
def _printing_aside() -> Iterator[None]:
    """Send what is printed within the block, by Python or below it, to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _name(name: str | None, kind: str | None, file: str | None) -> str | None:
    """Return the name that is asked for: that of the class, where a file is given."""
    if file is None:
        return name
    if name is not None or kind is None:
        raise click.UsageError(
            "--plugin stands in place of NAME, and beside --kind engines, connectors or specs "
            "(tiers, too)"
        )
    try:
        return add_file(kind, file)
    except PluginError as error:
        raise click.UsageError(str(error)) from error


def _listed(name: str | None, kind: str | None) -> list[Listed]:
    """Return all installed backends, or those that a name means.

    Raises:
        PluginError: No backend has the name, or the settings cannot be read.
    """
    kinds = [each.word for each in DISCOVERED if kind in (None, each.word)]
    every = [
        each for word in kinds for each in sorted(host.registry(word).listed(), key=_place_in_list)
    ]
    if name is None:
        return every
    records, errors = [], []
    for word in kinds:
        try:
            records.append(host.registry(word).record(name))
        except UnknownBackendError as error:  # noqa: PERF203
            errors.append(error)
    if not records:
        raise errors[0] if kind else _unknown_error(name)
    return [each for each in every if each.record in records]


def _probe(listed: Listed, limit_s: float) -> dict[str, Any]:
    """Return the card of a backend, made in a process of its own."""
    import subprocess
    import tempfile

    row = _row(listed)
    if listed.address is None:
        return {**row, "usable": None}
    options = ["show", listed.address, "--kind", row["kind"], "--json"]
    command = [sys.executable, "-m", "wtransfer", "plugins", *options]
    # Not pipes: what an import has started may hold them for ever.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            code = subprocess.run(  # noqa: S603  # this command
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                timeout=limit_s,
                check=False,
            ).returncode
            # Output of the import comes first.
            said = _text(out)
            cards, _ = json.JSONDecoder().raw_decode(said[said.rindex("[\n  {\n") :])
            card: dict[str, Any] = cards[0]
        except subprocess.TimeoutExpired:
            text = f"it was not loaded within {limit_s:g} s, and its process was ended"
        except ValueError:
            last = (_text(err).strip().splitlines() or ["it printed nothing"])[-1]
            text = f"its process ended with {code} while it was loaded: {last}"
        else:
            return row | card | {"status": row["status"]}
    error = {"class": "PluginBrokenError", "message": text, "cause": None}
    return {**row, "usable": False, "error": error}


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _result(card: dict[str, Any]) -> str:
    if card["usable"] is False:
        return f"{card['error']['class']}: {card['error']['message']}"
    loaded = f"ok, {card['import_s']:.2f} s" if card["usable"] else ""
    missing = f"not usable on this machine: {card['missing']}" if card.get("missing") else ""
    return ", ".join(filter(None, [loaded, missing, "" if _is_found(card) else card["status"]]))


def _is_plain(card: dict[str, Any]) -> bool:
    """Return whether a backend is used by its name, or excluded on purpose."""
    return _is_found(card) or card["usable"] is None


def _is_found(card: dict[str, Any]) -> bool:
    return str(card["status"]).startswith("found")


def _problems() -> list[dict[str, str]]:
    return [vars(each) for each in host.catalog.diagnostics]


def _unmatched() -> list[dict[str, str]]:
    return [vars(each) for each in host.settings.unmatched(host.catalog)]


def _begin_table(
    columns: tuple[str, ...], rows: Sequence[Mapping[str, Any]]
) -> Callable[[Mapping[str, Any]], None]:
    """Print the head of a table, and return what prints a row.

    Args:
        columns: Names of the columns.
        rows: What is known of the rows: all but the last column.
    """
    head = {each: each for each in columns}
    widths = [max(len(str(row[each])) for row in (head, *rows)) for each in columns[:-1]]

    def echo_row(row: Mapping[str, Any]) -> None:
        cells = [str(row[each]).ljust(width) for each, width in zip(columns, widths, strict=False)]
        click.echo("  ".join([*cells, str(row[columns[-1]])]).rstrip())

    echo_row(head)
    return echo_row


def _echo_problems(problems: list[dict[str, str]]) -> None:
    for problem in problems:
        click.echo(f"warning: {problem['distribution']}: {problem['problem']}", err=True)


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


def _card(
    registry: Registry, record: Record, name: str, with_traceback: bool = False
) -> dict[str, Any]:
    row = _row(next(each for each in registry.listed() if each.record is record))
    before, began = set(sys.modules), time.perf_counter()
    try:
        cls = registry.get(name)
        import_s = time.perf_counter() - began
        imported = sorted({each.partition(".")[0] for each in sys.modules.keys() - before})
        options_cls = getattr(cls, "options_cls", ())
        if record.kind is ENGINES:
            options_cls = _check_engine(record, name, cls).init_info_cls
        elif record.kind is SPECS and issubclass(cls, pkgutil.resolve_name(TIER)):
            own = options_cls if isinstance(options_cls, tuple) else (options_cls,)
            options_cls = (*own, "wtransfer.specs.tier:TierOptions")
        # Its module may do without; what it moves are tensors.
        host.loader.check_torch(record)
    except PluginError as error:
        return {**row, **_failure(error, with_traceback)}
    missing = _missing(cls)
    declared = {each: _plain(getattr(cls, each)) for each in DECLARED if hasattr(cls, each)}
    if "contract_version" in declared:
        # What is inherited is not stated.
        declared["contract_version"] = contract_of(cls) or "not stated"
    hosts = _in_hosts(record, getattr(cls, "example_options", {}))
    return {
        **row,
        "usable": True,
        "missing": missing,
        "class": _plain(cls),
        "import_s": round(import_s, 3),
        "imported": [
            each
            for each in imported
            if not (each.startswith("_") or each in sys.stdlib_module_names or each == CORE)
        ],
        "declared": declared,
        "options": options_of(options_cls),
        "hosts": hosts,
    }


def _missing(cls: type[Any]) -> str | None:
    """Return why a backend cannot be used on this machine, as its ``available`` says."""
    # An attribute of this name that needs an object is another thing.
    if not isinstance(inspect.getattr_static(cls, "available", None), (classmethod, staticmethod)):
        return None
    try:
        cls.available()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _check_engine(record: Record, name: str, cls: type[Any]) -> type[Any]:
    """Return an engine's trainer side, if every class needed to make both sides is there.

    Raises:
        PluginError: A class cannot be found or loaded, or is of a wrong type.
    """
    from wtransfer.engines.factory import WeightTransferTrainerFactory

    trainer_cls = WeightTransferTrainerFactory.trainer_class(name)
    infos = [(cls, "init_info_cls"), (cls, "update_info_cls"), (trainer_cls, "init_info_cls")]
    for side, attribute in infos:
        if not isinstance(getattr(side, attribute, None), type):
            text = f"cannot be used: {side.__qualname__}.{attribute} is no class; expected one"
            raise record.error(PluginTypeError, f"{text} whose fields are the options.")
    return trainer_cls


def _in_hosts(record: Record, options: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the statements of each serving engine installed here about a backend."""
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


def _failure(error: PluginError, with_traceback: bool = False) -> dict[str, Any]:
    import traceback

    cause = error.__cause__
    said = {
        "class": type(error).__name__,
        "message": str(error),
        "cause": None if cause is None else f"{type(cause).__name__}: {cause}",
    }
    if with_traceback and cause is not None:
        said["traceback"] = "".join(traceback.format_exception(cause))
    return {"usable": False, "error": said}


def _unknown_error(name: str) -> UnknownBackendError:
    """Return the error for a name that no kind knows."""
    import difflib

    names = {kind.word: host.registry(kind.word).names() for kind in DISCOVERED}
    close = difflib.get_close_matches(name, [each for word in names.values() for each in word], n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    there_are = "; ".join(f"{word}: {', '.join(each)}" for word, each in names.items())
    return UnknownBackendError(f"No backend has the name {name!r}.{hint} There are {there_are}.")


def _plain(value: Any) -> Any:
    """Return a value as JSON has it."""
    if isinstance(value, type):
        return f"{value.__module__}:{value.__qualname__}"
    if isinstance(value, tuple):
        return list(value)
    return value if isinstance(value, (str, bool, int, type(None))) else repr(value)


def _card_text(card: dict[str, Any]) -> str:
    apart = ("usable", "missing", "error", "declared", "options", "hosts", "import_s", "imported")
    lines = {k: v for k, v in card.items() if k not in apart}
    if "import_s" in card:
        imported = ", ".join(card["imported"]) or "nothing else"
        lines["import"] = f"{card['import_s']:.2f} s: {imported}"
    lines |= card.get("declared", {})
    for option in card.get("options", ()):
        default = "required" if option["default"] is None else f"= {option['default']}"
        lines[f"option {option['name']}"] = f"{option['type']} {default}: {option['help']}"
    for host_name, facts in card.get("hosts", {}).items():
        lines |= {f"{host_name}: {word}": text for word, text in facts.items()}
    error = card.get("error")
    if error is not None:
        lines["error"] = f"{error['class']}: {error['message']}"
        lines["cause"] = error["cause"] or "none"
    lines["usable"] = "yes" if card["usable"] else "no"
    if card.get("missing"):
        lines["usable"] = f"not on this machine: {card['missing']}"
    width = max(map(len, lines))
    text = "\n".join(f"{key.ljust(width)}  {value}" for key, value in lines.items())
    return text if error is None else f"{text}\n{error.get('traceback', '')}".rstrip()
