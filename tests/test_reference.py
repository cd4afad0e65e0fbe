"""The reference and the code have the same public names, in both directions."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from pathlib import Path

import click
import pytest

import wtransfer
from wtransfer import errors
from wtransfer.cli import main
from wtransfer.registry import hooks

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "wtransfer"
REFERENCE = (PACKAGE / "REFERENCE.md").read_text("utf-8")
ROOMS = ("engines", "connectors", "specs")
CONTRACTS = [f"wtransfer.{room}.{module}" for room in ROOMS for module in ("interface", "factory")]
SOURCES = [*PACKAGE.rglob("*.py"), *ROOT.glob("plugins/*/src/**/*.py")]
GUIDES = [
    ROOT / "README.md",
    *PACKAGE.rglob("*/README.md"),
    *PACKAGE.glob("scaffold/**/*.template"),
    *PACKAGE.glob("scaffold/*_*.py"),
]
VARIABLE = re.compile(r"(?:WTRANSFER|VLLM_USE)_[A-Z0-9_]+")


def rows(level: int, title: str) -> list[str]:
    """Return the first column below a heading, up to the next one of any level."""
    heading = f"{'#' * level} {title}\n"
    assert REFERENCE.count(f"\n{heading}") == 1, f"{heading.strip()!r} is missing, or there twice"
    section = re.split(r"\n#+ ", REFERENCE.split(f"\n{heading}")[1])[0]
    lines = [line for line in section.splitlines() if re.match(r"\| (?!name )", line)]
    names = [re.match(r"\| `([^`]+)` \| .*\w.* \|$", line) for line in lines]
    assert [line for line, name in zip(lines, names, strict=True) if not name] == []
    return [name[1] for name in names if name]


def check(documented: list[str], expected: set[str]) -> None:
    """Fail unless each of the names is documented, once, and nothing else is."""
    assert len(documented) == len(set(documented)), "a line twice"
    # What the page lacks, and what it has though the code lacks it.
    assert (expected - set(documented), set(documented) - expected) == (set(), set())


def test_names_of_the_package():
    check(rows(2, "`wtransfer`"), set(wtransfer.__all__))


@pytest.mark.parametrize("module", CONTRACTS)
def test_names_of_a_contract(module):
    defined = {
        name
        for name, value in vars(importlib.import_module(module)).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__ == module
    }
    expected = defined - set(wtransfer.__all__)
    if expected:
        check(rows(2, f"`{module}`"), expected)
    else:
        assert f"`{module}`" not in REFERENCE


def test_further_import_paths_exist_and_have_every_kit():
    documented = rows(2, "Further import paths")
    for path in documented:
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(module), name), path
    kits = {
        f"wtransfer.testing.{path.stem}.{node.name}"
        for path in (PACKAGE / "testing").glob("*.py")
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name.endswith("Conformance")
    }
    check([path for path in documented if path.endswith("Conformance")], kits)


def members(cls: type) -> set[str]:
    """Return what is public of a class: methods with their arguments, attributes by name."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    stored = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    found = set()
    for name in {*dir(cls), *getattr(cls, "__dataclass_fields__", {}), *stored}:
        value = getattr(cls, name, None)
        if inspect.isfunction(value):
            found.add(f"{name}({', '.join([*inspect.signature(value).parameters][1:])})")
        else:
            found.add(name)
    return {each for each in found if not each.startswith("_")}


def held() -> dict[str, type]:
    """Return the documented classes of weight updates whose members callers use, by name."""
    paths = [f"wtransfer.{name}" for name in wtransfer.__all__] + rows(2, "Further import paths")
    found = {}
    for path in paths:
        module, _, name = path.rpartition(".")
        value = getattr(importlib.import_module(module), name)
        if inspect.isclass(value) and value.__module__.startswith("wtransfer.weight_sync."):
            found[name] = value
    # Handed to a publisher, which calls it.
    del found["ShardedSource"]
    return found


HELD = held()


def test_classes_with_members():
    check(re.findall(r"^### Members of `(\w+)`$", REFERENCE, re.MULTILINE), set(HELD))


@pytest.mark.parametrize("name", HELD)
def test_members_of_a_class(name):
    check(rows(3, f"Members of `{name}`"), members(HELD[name]))


def test_a_session_stays_small():
    assert len(rows(3, "Members of `WorkerSession`")) <= 16


def imports(text: str) -> set[str]:
    """Return what a text of Python, or a template of one, imports from here."""
    statements = re.findall(
        r"^from (wtransfer[\w.]*) import (\([^)]*\)|[^\n#]*)", text, re.MULTILINE
    )
    return {
        f"{module}.{name}" for module, names in statements for name in re.findall(r"\w+", names)
    }


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_of_guides_and_new_packages_are_public(path):
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        text = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    homes = ["wtransfer", *CONTRACTS]
    documented = {f"{home}.{name}" for home in homes for name in wtransfer.__all__}
    documented |= set(rows(2, "Further import paths"))
    documented |= {f"wtransfer.errors.{name}" for name in rows(2, "Errors of `wtransfer.errors`")}
    for module in CONTRACTS:
        if f"`{module}`" in REFERENCE:
            documented |= {f"{module}.{name}" for name in rows(2, f"`{module}`")}
    assert imports(text) - documented == set()


def test_hooks_and_their_arguments():
    signatures = {
        f"{name}({', '.join(inspect.signature(getattr(hooks, name)).parameters)})"
        for name in hooks.HOOKS
    }
    check(rows(2, "Hooks"), signatures)


def test_variables_of_the_environment():
    read = {
        node.value
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and VARIABLE.fullmatch(node.value)
    }
    check(rows(2, "Environment"), read)


def commands(command: click.Command, path: str) -> dict[str, set[str]]:
    """Return path of a command -> its options, for it and all below it."""
    options = [each for each in command.params if isinstance(each, click.Option)]
    found = {path: {"/".join([*each.opts, *each.secondary_opts]) for each in options}}
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            found |= commands(below, f"{path} {name}")
    return found


COMMANDS = commands(main, "wtransfer")


def test_commands():
    check(re.findall(r"^### `(wtransfer[^`]*)`$", REFERENCE, re.MULTILINE), set(COMMANDS))


@pytest.mark.parametrize("path", COMMANDS)
def test_options_of_a_command(path):
    check(rows(3, f"`{path}`"), COMMANDS[path])


def test_errors_and_what_they_are_besides():
    classes = {
        name: [base.__name__ for base in value.__bases__ if base is not Exception]
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.WTransferError)
    }
    check(rows(2, "Errors of `wtransfer.errors`"), set(classes))
    for name, bases in classes.items():
        also = ", ".join(f"`{base}`" for base in bases)
        assert f"\n| `{name}` | {also} | " in REFERENCE, f"{name} is also {also}"
