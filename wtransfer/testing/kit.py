"""Base of the conformance kits: the rule about overriding, the smoke test, registration."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import pytest

from wtransfer.registry.registry import registry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

Test = TypeVar("Test", bound="Callable[..., None]")


def usually(hint: str) -> Callable[[Test], Test]:
    """Add to every failure of a kit's test what it usually means.

    Args:
        hint: Ends the sentence "Usually this means that ...".
    """
    end = f"\nUsually this means that {hint}."

    def decorate(test: Any) -> Any:
        @functools.wraps(test)
        def explained(self: ConformanceKit, *args: Any, **kwargs: Any) -> None:
            try:
                self.run_test(functools.partial(test, self, *args, **kwargs))
            except AssertionError as error:
                error.args = (f"{error}{end}",)
                raise
            except Exception as error:
                raise AssertionError(f"{type(error).__name__}: {error}{end}") from error

        return explained

    return decorate


class ConformanceKit:
    """Base of the kits.

    A test may be overridden only by one that is marked as failing. Where a kit's smoke test, its
    first one, fails, the tests after it are skipped: they would fail for the same reason, many of
    them at the end of a deadline.
    """

    smoke_test: ClassVar[str] = ""
    """Name of the kit's smoke test, whose body runs within `is_smoke_test`."""
    _smoke_failure: ClassVar[tuple[type, str] | None] = None

    def run_test(self, test: Callable[[], None]) -> None:
        """Run the body of a test that has a hint; a kit may bound its time."""
        test()

    @pytest.fixture(autouse=True)
    def _skip_after_failed_smoke_test(self, request: pytest.FixtureRequest) -> None:
        # Of this class alone: subclasses test other backends.
        cls, error = self._smoke_failure or (None, "")
        if cls is type(self) and request.function.__name__ != self.smoke_test:
            pytest.skip(f"{self.smoke_test} has failed: {error}")

    @contextlib.contextmanager
    def is_smoke_test(self) -> Iterator[None]:
        """Skip all later tests of the class if the block fails."""
        cls = type(self)
        cls._smoke_failure = None
        try:
            yield
        except Exception as error:
            kit = next(base for base in cls.__mro__ if ConformanceKit in base.__bases__)
            # One that a subclass has marked as failing says nothing about the other tests.
            if getattr(cls, self.smoke_test) is getattr(kit, self.smoke_test):
                cls._smoke_failure = cls, f"{type(error).__name__}: {error}"
            raise

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


def registered_name(group: str, backend: type | None, kind: str = "") -> str:
    """Register a backend class that is not installed, once, and return its name.

    Args:
        group: ``engines``, ``connectors`` or ``specs``.
        backend: The class that a subclass of the kit states.
        kind: What it is, where the group has several kinds.
    """
    kind = kind or group[:-1]
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
