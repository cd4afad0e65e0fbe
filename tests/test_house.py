"""The house: who may import whom, what stays light, and what ships."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path
from types import FunctionType

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "wtransfer"
FLOORS = [
    {"errors"},
    {"deadline", "calls"},
    {"config", "manifest", "weight_version"},
    {"transport"},
    {"registry"},
    {"metrics", "tracing"},
    {"kv"},
    {"engines", "checkpoint", "weight_sync", "connectors", "specs"},
    {"testing"},
    {"demo"},
    {"bench"},
    {"scaffold", "commands"},
    {"cli", "__main__"},
]
ROOMS = {"engines", "connectors", "specs"}
ALLOWED_NEIGHBOURS = {
    ("wtransfer.connectors.offloading", neighbour)
    for neighbour in (
        "wtransfer.specs.interface",
        "wtransfer.specs.factory",
        "wtransfer.specs.seed_adapter",
    )
}
"""Packages of one room, and what they may import of another."""


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        yield name, path


MODULES = dict(modules())


class RuntimeImports(ast.NodeVisitor):
    """Collects what is really imported: everything outside ``if TYPE_CHECKING``."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def visit_If(self, node):
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for child in node.orelse:
                self.visit(child)
        else:
            self.generic_visit(node)

    def visit_Import(self, node):
        for alias in node.names:
            self.names.add(alias.name)

    def visit_ImportFrom(self, node):
        assert not node.level, "imports are absolute"
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            self.names.add(full if full in MODULES else node.module)


@functools.cache
def imports_of(name):
    visitor = RuntimeImports()
    visitor.visit(ast.parse(MODULES[name].read_text("utf-8")))
    return visitor.names


def room_of(module):
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def floor_of(module):
    return next((i for i, floor in enumerate(FLOORS) if room_of(module) in floor), None)


def inner_edges():
    for name in MODULES:
        for target in imports_of(name):
            if target in MODULES and room_of(target):
                yield name, target


def test_every_module_has_its_floor():
    homeless = [name for name in MODULES if room_of(name) and floor_of(name) is None]
    assert homeless == []


def test_nobody_imports_upwards():
    upwards = [
        (name, target)
        for name, target in inner_edges()
        if room_of(name) and floor_of(target) > floor_of(name)
    ]
    assert upwards == []


def test_rooms_do_not_look_into_each_other():
    across = {
        (name.rpartition(".")[0], target)
        for name, target in inner_edges()
        if room_of(name) in ROOMS and room_of(target) in ROOMS and room_of(name) != room_of(target)
    }
    assert across <= ALLOWED_NEIGHBOURS


def test_an_interface_imports_nothing_of_its_room():
    for name in MODULES:
        if name.endswith(".interface"):
            own = {t for t in imports_of(name) if room_of(t) == room_of(name)}
            assert own == set(), name


def test_there_are_no_import_cycles():
    graph = {name: set() for name in MODULES}
    for name, target in inner_edges():
        if target != name:
            graph[name].add(target)
    done: set[str] = set()

    def visit(name, path):
        assert name not in path, " -> ".join([*path, name])
        if name not in done:
            for target in graph[name]:
                visit(target, [*path, name])
            done.add(name)

    for name in graph:
        visit(name, [])


def test_ground_floor_and_interfaces_import_neither_torch_nor_pluggy():
    ground = FLOORS[0] | FLOORS[1] | FLOORS[2]
    light = [n for n in MODULES if room_of(n) in ground or n.endswith(".interface")]
    code = (
        "import importlib, sys\n"
        f"for name in {['wtransfer', *light]}:\n"
        "    importlib.import_module(name)\n"
        "    assert not {'torch', 'pluggy'} & set(sys.modules), name\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_only_the_testing_room_imports_pytest():
    users = {
        name for name in MODULES for target in imports_of(name) if target.split(".")[0] == "pytest"
    }
    assert {room_of(name) for name in users} <= {"testing"}


@pytest.mark.parametrize("banned", ["pickle", "multiprocessing", "marshal", "shelve"])
def test_nothing_that_could_unpickle_is_imported(banned):
    users = [n for n in MODULES if any(t.split(".")[0] == banned for t in imports_of(n))]
    assert users == []


def test_no_module_has_a_name_that_says_nothing():
    empty = {"utils", "util", "common", "helpers", "base", "misc"}
    assert [name for name in MODULES if name.rpartition(".")[2] in empty] == []


def test_only_agreed_things_stand_at_the_root():
    shown = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    agreed = {"pyproject.toml", "README.md", "CHANGELOG.md", "wtransfer", "plugins", "tests"}
    # What pip leaves when it builds in place is ignored by git and by us.
    assert shown - {"build", "dist", "wtransfer.egg-info"} <= agreed


def test_installed_entry_points_are_those_of_pyproject():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    declared = {
        (group, name, value)
        for group, entries in project["entry-points"].items()
        for name, value in entries.items()
    }
    installed = {
        (entry.group, entry.name, entry.value)
        for entry in metadata.distribution("wtransfer").entry_points
        if entry.group != "console_scripts"
    }
    assert installed == declared


PUBLIC_MODULES = [
    name
    for name in MODULES
    if name.endswith((".interface", ".factory")) or name in {"wtransfer.errors", "wtransfer.config"}
]


@pytest.mark.parametrize("name", ["wtransfer", *PUBLIC_MODULES])
def test_public_names_have_docstrings(name):
    module = importlib.import_module(name)
    names = getattr(module, "__all__", None) or [
        key for key, value in vars(module).items() if getattr(value, "__module__", "") == name
    ]
    documented = {key: getattr(module, key) for key in names if not key.startswith("_")}
    for key, value in list(documented.items()):
        if inspect.isclass(value) and value.__module__.startswith("wtransfer"):
            documented |= {
                f"{key}.{method}": function
                for method, function in vars(value).items()
                if not method.startswith("_") and isinstance(function, FunctionType | property)
            }
    missing = [
        key
        for key, value in documented.items()
        if (callable(value) or isinstance(value, property)) and not inspect.getdoc(value)
    ]
    assert missing == []


def test_every_test_that_the_table_of_promises_names_exists():
    missing, path = [], None
    for reference in re.findall(r"`([^`\n]+)`", (ROOT / "tests" / "README.md").read_text("utf-8")):
        file, _, name = reference.partition("::")
        if file.endswith(".py"):
            places = (ROOT / "tests" / file, PACKAGE / "testing" / file)
            path = next((each for each in places if each.exists()), None)
        if (file.endswith(".py") and path is None) or (
            name and not name.endswith("*") and path and f"def {name}(" not in path.read_text()
        ):
            missing.append(reference)
    assert missing == []


def test_wheel_and_sdist_hold_the_package_and_nothing_of_the_plugins(tmp_path):
    pytest.importorskip("hatchling")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        wheel_names = archive.namelist()
    assert {name.split("/")[0].split("-")[0] for name in wheel_names} == {"wtransfer"}
    assert "wtransfer/py.typed" in wheel_names
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        tops = {name.split("/")[1] for name in archive.getnames()}
    assert "wtransfer" in tops
    assert "plugins" not in tops
