"""Tests of a kit may not be overridden, except by one that says why it may fail."""

from __future__ import annotations


def check_excused(cls: type, kit: type) -> None:
    """Look at the tests that a subclass of a kit defines under the kit's names.

    Raises:
        TypeError: One of them is not marked as an expected failure with a reason.
    """
    for name, value in vars(cls).items():
        if name.startswith("test_") and hasattr(kit, name):
            marks = getattr(value, "pytestmark", [])
            if not any(mark.name == "xfail" and mark.kwargs.get("reason") for mark in marks):
                raise TypeError(
                    f"{cls.__name__} overrides {name} of the conformance kit; mark it "
                    "@pytest.mark.xfail(reason=...) and call super(), or leave it alone"
                )
