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
import typing
import zipfile
from importlib import metadata
from pathlib import Path
from types import FunctionType

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "wtransfer"
FLOORS = [
    {"errors", "deadline", "calls", "config", "dtypes", "manifest", "weights"},
    {"registry"},
    {"transport"},
    {"checkpoint"},
    {"engines"},
    {"weight_version"},
    {"weight_sync"},
    {"kv"},
    {"specs"},
    {"connectors"},
    {"metrics", "tracing"},
    {"scaffold"},
    {"testing"},
    {"demo", "bench"},
    {"commands"},
    {"cli", "__main__"},
]
"""Who may import whom, for types as well: a room those below it, and its own."""
SPECS_SEEN_BY_CONNECTORS = {
    "wtransfer.specs.interface",
    "wtransfer.specs.factory",
    "wtransfer.specs.seed_adapter",
}


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        yield name, path


MODULES = dict(modules())


class Imports(ast.NodeVisitor):
    """Collects what a module imports, with or without what it imports for types alone."""

    def __init__(self, *, with_types) -> None:
        self.names: set[str] = set()
        self.with_types = with_types

    def visit_If(self, node):
        is_typing = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        if is_typing and not self.with_types:
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
def imports_of(name, *, with_types=False):
    visitor = Imports(with_types=with_types)
    visitor.visit(ast.parse(MODULES[name].read_text("utf-8")))
    return visitor.names


def room_of(module):
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def floor_of(module):
    return next((i for i, floor in enumerate(FLOORS) if room_of(module) in floor), None)


def inner_edges(*, with_types):
    for name in MODULES:
        for target in imports_of(name, with_types=with_types):
            if target in MODULES and target != name and room_of(name) and room_of(target):
                yield name, target


def test_every_module_has_its_floor():
    homeless = [name for name in MODULES if room_of(name) and floor_of(name) is None]
    assert homeless == []


def test_no_room_imports_one_above_it_not_even_for_types():
    upwards = [
        (name, target)
        for name, target in inner_edges(with_types=True)
        if floor_of(target) > floor_of(name)
    ]
    assert upwards == []


def test_connectors_see_of_specs_what_an_author_sees():
    seen = {
        target
        for name, target in inner_edges(with_types=True)
        if (room_of(name), room_of(target)) == ("connectors", "specs")
    }
    assert seen <= SPECS_SEEN_BY_CONNECTORS


def test_trainer_and_worker_do_not_import_each_other():
    sides = ["wtransfer.weight_sync.trainer", "wtransfer.weight_sync.worker"]
    across = [
        (name, target)
        for name, target in inner_edges(with_types=True)
        for one, other in (sides, sides[::-1])
        if name.startswith(one) and target.startswith(other)
    ]
    assert across == []


def test_an_interface_imports_nothing_of_its_room():
    for name in MODULES:
        if name.endswith(".interface"):
            own = {t for t in imports_of(name) if room_of(t) == room_of(name)}
            assert own == set(), name


@pytest.mark.parametrize("with_types", [False, True])
def test_there_are_no_import_cycles(with_types):
    graph = {name: set() for name in MODULES}
    for name, target in inner_edges(with_types=with_types):
        graph[name].add(target)

    def reached(name):
        found, left = set(), [name]
        while left:
            new = graph[left.pop()] - found
            found |= new
            left += new
        return found

    behind = {name: reached(name) for name in graph}
    circles = {
        frozenset(each for each in behind[name] if name in behind[each])
        for name in graph
        if name in behind[name]
    }
    assert circles == set()


def test_ground_floor_and_interfaces_import_neither_torch_nor_pluggy():
    ground = FLOORS[0] | {"weight_version"}
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


def queues_of(tree):
    """Return the attributes whose first entries a module takes, and those that are OrderedDicts."""
    taken, ordered, aliases = set(), set(), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            pairs = [(node.targets[0], node.value)]
            if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = zip(node.targets[0].elts, node.value.elts, strict=True)
            aliases |= {ast.unparse(target): ast.unparse(value) for target, value in pairs}
        elif isinstance(node, ast.AnnAssign) and "OrderedDict" in ast.unparse(node.annotation):
            ordered.add(ast.unparse(node.target))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"iter", "islice"}:
            of = node.args[0]
            of = of.generators[0].iter if isinstance(of, ast.GeneratorExp) else of
            taken.add(re.sub(r"\.(keys|values|items)\(\)$", "", ast.unparse(of)))
    return {aliases.get(each, each) for each in taken}, ordered


@pytest.mark.parametrize("room", ["kv", "specs", "connectors"])
def test_no_plain_dict_is_a_queue_where_there_is_an_entry_for_each_block(room):
    # Finding its first entry takes longer with every entry deleted before it.
    for name, path in MODULES.items():
        if room_of(name) == room:
            taken, ordered = queues_of(ast.parse(path.read_text("utf-8")))
            assert {each for each in taken if each.startswith("self.")} <= ordered, name


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
        if (callable(value) or isinstance(value, property))
        and not (inspect.getdoc(value) or typing.get_origin(value))
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
