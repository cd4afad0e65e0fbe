"""Pytest plug-in, loaded by pytest itself: options and expected failures of the kits.

``pytest --pyargs wtransfer.testing --wtransfer-engine NAME`` runs the kit of an installed backend.
Failed asserts of the kits show the values compared. The plug-in imports nothing but pytest: every
pytest run of an environment with wtransfer loads it.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

KINDS = {"engine": "engines", "connector": "connectors", "spec": "specs", "tier": "specs"}
"""Kinds of backends that have a kit, and where each is registered."""
PACKAGE = "wtransfer.testing"
_CHOSEN = "_wtransfer_kit_classes"
COLLECTED = Path(__file__).with_name("test_installed.py")
_IS_RECENT = hasattr(pytest, "version_tuple")  # since 7.0
NOTE, NOT_TESTED, WARNED = "wtransfer_note", "wtransfer_not_tested", "wtransfer_warned"
"""Properties of a test: a finding, a question that it could not ask, a backend's warning."""
NUM_DURATIONS = 10
"""Slowest tests to name at the end."""

# Registered one by one: the package is imported already, as this module is in it.
pytest.register_assert_rewrite(*(f"{PACKAGE}.{name}" for name in (*KINDS, "kit", "policy")))


class Findings:
    """What tests of kits have to tell that is no failure."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        """Findings, such as much time per tensor."""
        self.not_tested: list[str] = []
        """Questions that could not be asked of the backend."""
        self._said: dict[str, str] = {}
        self._counts: dict[str, int] = {}

    def take(self, report: Any) -> None:
        """Add those of a test that has ended; any other report has none."""
        if getattr(report, "when", "") == "teardown":
            for name, said in report.user_properties:
                if name == WARNED:
                    key, text = said
                    self._said.setdefault(key, text)
                    self._counts[key] = self._counts.get(key, 0) + 1
                elif name in (NOTE, NOT_TESTED):
                    known = self.notes if name == NOTE else self.not_tested
                    # Several tests may lack the same.
                    known += [] if said in known else [said]

    def warned(self) -> list[str]:
        """Return a line for each warning of a backend's own logger, and in how many tests."""
        return [f"{text} (in {self._counts[key]} tests)" for key, text in self._said.items()]

    def lines(self) -> list[str]:
        """Return all of them; the last line says how many questions were not asked."""
        number = len(self.not_tested)
        last = [f"{number} question{'s' * (number > 1)} NOT TESTED"] if number else []
        return [*self.warned(), *self.notes, *self.not_tested, *last]


def pytest_report_teststatus(report: Any) -> tuple[str, str, str] | None:
    """Count the tests that could not ask a question in the last line of the run."""
    is_over = getattr(report, "when", "") == "teardown" and report.passed
    if is_over and any(name == NOT_TESTED for name, _ in report.user_properties):
        return "NOT TESTED", "", ""
    return None


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Show what tests of kits have found that is no failure, and what they could not ask."""
    findings = Findings()
    for reports in terminalreporter.stats.values():
        for report in reports:
            findings.take(report)
    parts = {
        "said by the backends' own loggers": findings.warned(),
        "found by the kits": findings.notes,
        "NOT TESTED": findings.not_tested,
    }
    for title, lines in parts.items():
        if lines:
            terminalreporter.section(title)
            for line in lines:
                terminalreporter.line(line)


@pytest.fixture(scope="session")
def wtransfer_spawn() -> Any:
    """What forks a process for a kit; begun before a test counts what is open."""
    return importlib.import_module(f"{PACKAGE}.kit").kit_zygote().spawn


def choose(config: pytest.Config, classes: list[type[Any]]) -> None:
    """Set the classes that `test_installed` has in a run."""
    # Not in config.stash: pytest before version 7 has none, and must run without a kit.
    vars(config)[_CHOSEN] = classes


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that name a backend."""
    group = parser.getgroup("wtransfer", "wtransfer: kits of backends (--pyargs wtransfer.testing)")
    for kind in KINDS:
        group.addoption(
            f"--wtransfer-{kind}",
            action="append",
            default=[],
            metavar="NAME",
            help=f"Run the kit on the installed {kind} NAME. Repeatable.",
        )
    group.addoption(
        "--wtransfer-plugin",
        action="append",
        default=[],
        metavar="FILE.py:CLASS",
        help="Let a class of a file, which is not installed, be found by its name. Repeatable.",
    )
    group.addoption(
        "--wtransfer-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="Option of the backend: VALUE is JSON, else a text, in which {folder} is an empty "
        "folder of each test. Repeatable.",
    )
    group.addoption(
        "--wtransfer-long",
        action="store_true",
        help="Run also the tests of the kits that take minutes.",
    )
    group.addoption(
        "--wtransfer-attribute",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="Attribute of the kit's class, such as deadline_s=30 or kind=transfer. Repeatable.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make a class of the kit for each named backend.

    Raises:
        UsageError: A kit is asked for without a backend, or a backend cannot be found.
    """
    if _CHOSEN in vars(config):
        return
    option = config.option
    chosen = [(kind, name) for kind in KINDS for name in getattr(option, f"wtransfer_{kind}")]
    is_asked = option.pyargs and any(each.partition("::")[0] == PACKAGE for each in config.args)
    if not chosen:
        if is_asked:
            raise pytest.UsageError(
                f"name the backend whose kit shall run: --pyargs {PACKAGE} --wtransfer-engine NAME "
                "(or --wtransfer-connector, --wtransfer-spec, --wtransfer-tier)"
            )
        return
    if not _IS_RECENT:
        raise pytest.UsageError(f"the kits need pytest 7 or later, this is {pytest.__version__}")
    if not is_asked:
        raise pytest.UsageError(f"a kit runs where it is: add --pyargs {PACKAGE}")
    from wtransfer.errors import PluginError

    # Imported late, and by name: `kit` imports this module, and the kits, which import torch.
    kit_class = importlib.import_module(f"{PACKAGE}.kit").kit_class
    add_file = importlib.import_module("wtransfer.registry.resolve").add_file
    options = dict(map(_pair, option.wtransfer_option))
    attributes = dict(map(_pair, option.wtransfer_attribute))
    try:
        for place in option.wtransfer_plugin:
            # The class is of the kind whose kit it is given to.
            kinds = {KINDS[kind] for kind, name in chosen if place.endswith(f":{name}")}
            if not kinds:
                raise TypeError(f"name the class of {place} as the backend whose kit shall run")
            for kind in kinds:
                add_file(kind, place)
        made = [kit_class(kind, name, attributes, options) for kind, name in chosen]
    except (PluginError, TypeError) as error:
        raise pytest.UsageError(str(error)) from error
    choose(config, made)
    # Kits take minutes: report the slowest tests, and the reasons of skips.
    option.durations = NUM_DURATIONS if option.durations is None else option.durations
    option.reportchars += "a"


if _IS_RECENT:  # an older pytest refuses a plug-in whose hook has an unknown argument

    def pytest_pycollect_makemodule(
        module_path: Path, parent: pytest.Collector
    ) -> pytest.Module | None:
        """Put the classes into `test_installed`."""
        if module_path != COLLECTED:
            return None
        module = pytest.Module.from_parent(parent, path=module_path)
        # Not the imported module: another run in this process has other classes.
        module.obj = types.ModuleType(f"{PACKAGE}.{COLLECTED.stem}")
        classes = vars(parent.config).get(_CHOSEN, [])
        vars(module.obj).update({cls.__name__: cls for cls in classes})
        return module


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests that a subclass of a kit expects to fail."""
    kit = sys.modules.get(f"{PACKAGE}.kit")
    cls = getattr(item, "cls", None)
    if kit is None or cls is None or not issubclass(cls, kit.ConformanceKit):
        return
    for name in (item.name, item.name.partition("[")[0]):
        reason = cls.expected_failures.get(name)
        if reason is not None:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
            return


def _pair(text: str) -> tuple[str, Any]:
    """Read ``key=value``.

    Raises:
        UsageError: The text has another form.
    """
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise pytest.UsageError(f"expected KEY=VALUE, got {text!r}")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value
