"""The options that a backend takes, from the source of the classes that hold them."""

from __future__ import annotations

import ast
import contextlib
import inspect
import itertools
import pkgutil
import textwrap
from typing import Any


def options_of(declared: Any) -> list[dict[str, str | None]]:
    """Return name, type, default (None: required) and help of each option, as far as can be read.

    Args:
        declared: A class, or ``"package.module:Class"``, or a tuple of such: ``options_cls``.
    """
    found: dict[str, dict[str, str | None]] = {}
    for named in declared if isinstance(declared, tuple) else (declared,):
        with contextlib.suppress(Exception):
            cls = pkgutil.resolve_name(named) if isinstance(named, str) else named
            for base in reversed(cls.__mro__[:-1]):
                found |= _fields(base)
    return list(found.values())


def _fields(cls: type[Any]) -> dict[str, dict[str, str | None]]:
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, TypeError):  # built into an extension
        return {}
    assert isinstance(tree, ast.ClassDef)
    fields = {}
    for node, after in itertools.zip_longest(tree.body, tree.body[1:]):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        form = ast.unparse(_Unannotated().visit(node.annotation))
        if "ClassVar" in form:
            continue
        value: ast.expr | None = node.value
        if isinstance(value, ast.Call):  # field(default=...)
            value = next((each.value for each in value.keywords if each.arg == "default"), value)
        says = after.value if isinstance(after, ast.Expr) else None
        text = says.value if isinstance(says, ast.Constant) else ""
        fields[node.target.id] = {
            "name": node.target.id,
            "type": form,
            "default": None if value is None else ast.unparse(value),
            "help": " ".join(str(text).split()),
        }
    return fields


class _Unannotated(ast.NodeTransformer):
    """Replaces ``Annotated[int, ...]`` by ``int``."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if ast.unparse(node.value).endswith("Annotated") and isinstance(node.slice, ast.Tuple):
            return node.slice.elts[0]
        return self.generic_visit(node)
