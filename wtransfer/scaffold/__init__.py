"""``wtransfer plugins new``: a distribution with a small working backend, to be changed.

The files of a kind are those in the folder of its name, and those in ``common``; each is a
`string.Template` with the placeholders that `create` fills, in its path, too.
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

    words = name.split("-")
    module = "_".join(words)
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
        "cls": "".join(word.capitalize() for word in words),
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
    return sorted(written)


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
