"""``wtransfer plugins new``: a distribution with a small working backend, to be changed.

The backend of a kind is a module beside this one, written under another name and class; the guides
show it, and the kits are tested with it. All else is in the folder of the kind's name and in
``common``: each file is a `string.Template`, as is its path.
"""

from __future__ import annotations

import re
from string import Template
from typing import TYPE_CHECKING

from wtransfer.errors import PluginSettingError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.abc import Traversable
    from pathlib import Path

GROUPS = {
    "connector": "wtransfer.connectors",
    "engine": "wtransfer.engines",
    "spec": "wtransfer.specs",
    "tier": "wtransfer.specs",
}
"""Kind -> entry-point group."""
EXAMPLES = {
    "connector": "shelf-connector",
    "engine": "stream-engine",
    "spec": "memory-spec",
    "tier": "shelf-tier",
}
"""Kind -> name of the backend that is written under another name."""
SUFFIX = ".template"


def create(kind: str, name: str, folder: Path) -> list[Path]:
    """Write a distribution of that name; return its files.

    Args:
        kind: One of `GROUPS`.
        name: Of the distribution and the backend: two or more lower-case words joined by hyphens.
        folder: Made; must not be there.

    Raises:
        PluginSettingError: The name cannot be that of a distribution and a module, or is taken.
        FileExistsError: The folder is there.
    """
    from importlib import metadata
    from importlib.resources import files
    from importlib.util import find_spec

    module, cls = _module(name), _class(name)
    # One word would be the name of a built-in, of a keyword, or of much else.
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)+", name):
        raise PluginSettingError(
            f"{name!r} cannot name a distribution and its module: expected two or more lower-case "
            "words joined by hyphens, for example acme-shelf"
        )
    if find_spec(module) is not None:
        raise PluginSettingError(f"there is a module {module} already: take another name")
    values = {
        "name": name,
        "module": module,
        "cls": cls,
        "group": GROUPS[kind],
        "kind": kind,
        "core": _contract(metadata.version("wtransfer")),
    }
    folder.mkdir(parents=True)
    written = []
    for part in ("common", kind):
        for path, source in _walk(files(__name__) / part):
            place = folder / Template(path.removesuffix(SUFFIX)).substitute(values)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(Template(source.read_text("utf-8")).substitute(values), "utf-8")
            written.append(place)
    example = EXAMPLES[kind]
    text = (files(__name__) / f"{_module(example)}.py").read_text("utf-8")
    place = folder / "src" / module / "__init__.py"
    place.write_text(text.replace(example, name).replace(_class(example), cls), "utf-8")
    return sorted([*written, place])


def _module(name: str) -> str:
    return name.replace("-", "_")


def _class(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("-"))


def _contract(version: str) -> str:
    """Return the releases with the same contracts as this one."""
    major, minor, *_ = (int(part) for part in re.findall(r"\d+", version))
    return f">={major}.{minor},<{major}.{minor + 1}"


def _walk(folder: Traversable, path: str = "") -> Iterator[tuple[str, Traversable]]:
    for each in folder.iterdir():
        if each.is_dir():
            yield from _walk(each, f"{path}{each.name}/")
        elif each.name.endswith(SUFFIX):
            yield f"{path}{each.name}", each
