"""What the conformance kits share: the rule about overriding, registration, statistics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wtransfer.registry.registry import registry

if TYPE_CHECKING:
    from collections.abc import Mapping


class ConformanceKit:
    """Base of the kits: a test may be overridden only by one that is marked as failing."""

    def __init_subclass__(cls) -> None:
        """Check the tests that a subclass overrides.

        Raises:
            TypeError: One of them is not marked as an expected failure with a reason.
        """
        super().__init_subclass__()
        kits = [base for base in cls.__mro__[1:] if ConformanceKit in base.__bases__]
        for name, value in vars(cls).items():
            if name.startswith("test_") and any(hasattr(kit, name) for kit in kits):
                marks = getattr(value, "pytestmark", [])
                if not any(mark.name == "xfail" and mark.kwargs.get("reason") for mark in marks):
                    raise TypeError(
                        f"{cls.__name__} overrides {name} of the conformance kit; mark it "
                        "@pytest.mark.xfail(reason=...) and call super(), or leave it alone"
                    )


def registered_name(group: str, backend: type | None) -> str:
    """Register a backend class that is not installed, once, and return its name.

    Args:
        group: ``engines``, ``connectors`` or ``specs``.
        backend: The class that a subclass of the kit states.
    """
    kind = group[:-1]
    assert backend is not None, f"state the {kind} or the {kind}_cls that is tested"
    name = f"conformance of {backend.__qualname__} at {id(backend):x}"
    if not registry(group).registered(name):
        registry(group).register(name, backend)
    return name


def checked_stats(stats: Mapping[str, Any], side: str) -> dict[str, float]:
    """Return the statistics of one side with its name before each; fail unless they are numbers."""
    for name, value in stats.items():
        assert isinstance(name, str), f"{name!r} of the {side} is not a name"
        assert isinstance(value, (int, float)), f"{name} of the {side} is {value!r}, not a number"
    return {f"{side} {name}": value for name, value in stats.items()}


def fallen_counters(before: Mapping[str, float], after: Mapping[str, float]) -> list[str]:
    """Return the names of counters, which end in ``_total``, that are lower than before."""
    return [k for k, v in before.items() if k.endswith("_total") and after.get(k, 0) < v]
