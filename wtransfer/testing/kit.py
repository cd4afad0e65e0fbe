"""Base of the conformance kits: expected failures, the smoke test, and runs without a test file.

A backend is tested by a subclass of its kit in a test module, by
``pytest --pyargs wtransfer.testing --wtransfer-engine NAME`` if it is installed, or from Python::

    from wtransfer.testing.kit import check_engine

    report = check_engine(MyEngine, some_option=1)
    print(report)
    assert report.ok
"""

from __future__ import annotations

import atexit
import contextlib
import difflib
import functools
import importlib
import inspect
import io
import json
import logging
import os
import re
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import pytest

from wtransfer.calls import SerialThread, start_call
from wtransfer.errors import (
    ConnectorOptionError,
    DigestMismatchError,
    OffloadingOptionError,
    PluginError,
    StallError,
    TruncatedError,
    raised_at,
)
from wtransfer.registry.discovery import CORE
from wtransfer.registry.resolve import registry
from wtransfer.testing.pytest_plugin import (
    KINDS,
    NOT_TESTED,
    NOTE,
    WARNED,
    Findings,
    choose,
)
from wtransfer.testing.zygote import Zygote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import FrameType
    from typing import NoReturn

    from wtransfer.testing.zygote import Child

T = TypeVar("T")
Test = TypeVar("Test", bound="Callable[..., None]")


IMPORT_S = 60.0
"""Time for the import of a backend in a process that has torch, in seconds."""
MAX_HUNG = 3
"""Tests of a backend that may hang before its other tests are skipped."""
HANGS_AFTER = 6
"""Multiple of a kit's `deadline_s` after which a call of the backend is given up."""
LONG_TIMES = 10
"""Multiple of that where tests that take minutes run as well."""


class Hint(NamedTuple):
    """Usual cause of an error, whichever test it ends."""

    says: str
    """Ends the sentence "Usually this means that ..."."""
    text: str = ""
    """Part of the error's text, or of a cause's; empty: any."""
    error: type[BaseException] = BaseException
    """Class of the error, or of a cause."""
    is_sure: bool = True
    """True if the test's own hint is wrong then. False: it follows."""


_NO_OPTIONS = (
    "the kit was not given the options that the backend needs: return them from options_in, set "
    "options, or pass them by name"
)
HINTS = (
    Hint(
        "the memory of a tensor must be writable: map shared files with mmap.ACCESS_COPY or "
        "ACCESS_WRITE",
        "buffer is not writable",
    ),
    Hint(
        "threads share a connection of sqlite: give each thread its own, or take a lock and "
        "connect with check_same_thread=False",
        "SQLite objects created in a thread",
    ),
    Hint(_NO_OPTIONS, error=OffloadingOptionError),
    Hint(_NO_OPTIONS, error=ConnectorOptionError),
    # Of an engine.
    Hint(
        "memory in which tensors were delivered in an earlier round is taken for another one "
        "though a worker has them, as from two sets of buffers in turn: take memory that no tensor "
        "refers to any more, or declare 'return'",
        "means valid until the worker releases them",
    ),
    Hint(_NO_OPTIONS, "Invalid options for ", ValueError),
    Hint(
        "the trainer passes another info to client.update_weights() than update_info_cls says",
        "parse_update_info raised ValueError: Invalid update_info for ",
    ),
    Hint(
        "the side that writes or sends these bytes ends too early, or has not flushed them",
        error=TruncatedError,
    ),
    Hint("a method lacks its return, or returns another type", "() returned ", TypeError),
    Hint(
        "the last token of a prompt must be computed: get_num_new_matched_tokens() is at most "
        "num_tokens - 1",
        "were loaded, also the last one, ",
    ),
    Hint("a library is not installed here, or not under this name", error=ModuleNotFoundError),
    Hint(
        "the store of this test is full, which is no fault of the backend: give it more room",
        "No space left on device",
    ),
    Hint(
        "what a side opens or starts is not ended on each of its paths, also that of an error: its "
        "threads, processes, sockets, files, memory; a `with` block ends them",
        "of two fleets that were closed",
    ),
    Hint(
        "descriptors are opened for each call, or each object, and not closed",
        "Too many open files",
    ),
    Hint(
        "memory or a file was rewritten while it was read",
        error=DigestMismatchError,
        is_sure=False,
    ),
    Hint(
        "nothing listens at the address that the options name", "Connection refused", is_sure=False
    ),
    Hint(
        "a call waits without an end, for a lock, a peer or a server: give each a time-out; or the "
        "machine or store is slower: raise deadline_s",
        "has not returned",
        is_sure=False,
    ),
)
"""Hints that go before those of the tests, the surest first."""
_MISTAKES = (NameError, AttributeError, TypeError, NotImplementedError)
_MISTAKE = re.compile(rf"raised ({'|'.join(each.__name__ for each in _MISTAKES)}): ")
_OWN_ERROR = re.compile(r"raised \w+: (?!injected)")
_HERE = str(Path(__file__).parents[1])
_LIBRARY = str(Path(os.__file__).parent)
_NOT_BACKENDS = ("_pytest", "msgspec", "numpy", "pluggy", "pytest", "torch")
"""Packages that the kits call themselves."""


def usually(hint: str) -> Callable[[Test], Test]:
    """Add the usual cause to every failure of a kit's test.

    A hint that belongs to the error goes before the test's own (`HINTS`), and so does a mistake in
    the backend's own code.

    Args:
        hint: Ends the sentence "Usually this means that ...".
    """

    def end(error: BaseException) -> str:
        return f"\nUsually this means that {_hint(error, hint)}."

    def decorate(test: Any) -> Any:
        @functools.wraps(test)
        def explained(self: ConformanceKit, *args: Any, **kwargs: Any) -> None:
            try:
                self.run_test(functools.partial(test, self, *args, **kwargs))
            except AssertionError as error:
                self._count_stall(error)
                error.args = (f"{error}{end(error)}",)
                raise
            except (Exception, pytest.fail.Exception) as error:
                at = f" (at {raised_at(error)})" if _is_by_backend(error) else ""
                said, usual = f"{type(error).__name__}: {error}{at}", end(error)
                self._count_stall(error)
                # The framework may have given up a call of the backend before the kit does.
                if isinstance(error, StallError) and (hung := self._under_way()):
                    self._note_hang()
                    said, usual = f"{said}\n{hung}", end(AssertionError(hung))
                raise AssertionError(f"{said}{usual}") from error

        return explained

    return decorate


def _hint(error: BaseException, own: str) -> str:
    """Return the usual cause of an error: its class's or its text's, else the test's own."""
    chain: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each not in chain:
        chain.append(each)
        each = each.__cause__
    for hint in HINTS:
        if any(isinstance(each, hint.error) and hint.text in str(each) for each in chain):
            return hint.says if hint.is_sure else f"{hint.says}; or that {own}"
    for each in chain:
        *_, (frame, line) = [(None, 0), *traceback.walk_tb(each.__traceback__)]
        file = frame.f_code.co_filename if frame is not None else _HERE
        if isinstance(each, _MISTAKES) and not file.startswith(_HERE):
            return f"the code itself has a mistake, at {Path(file).name}:{line}; or that {own}"
    if _MISTAKE.search(str(error)):
        return f"the backend's own code has this mistake; or that {own}"
    if _OWN_ERROR.search(str(error)):
        return f"the backend itself raises this error, at the place that it names; or that {own}"
    for each in chain:
        if _is_by_backend(each):
            what = type(each).__name__
            return f"the backend raises {what} itself, at {raised_at(each)}; or that {own}"
    return own


@functools.cache
def kit_zygote() -> Zygote:
    """Return the process whose children are instances, ranks and tiers: one for all kits."""
    zygote = Zygote(preload=["torch", "wtransfer.testing.mini_engine.instance"])
    atexit.register(zygote.close)
    return zygote


def _is_by_backend(error: BaseException) -> bool:
    """Return whether the backend's code raised an error, or a library that it called."""
    is_by_backend = False
    for frame, _ in traceback.walk_tb(error.__traceback__):
        file, top = frame.f_code.co_filename, frame.f_globals.get("__name__", "").partition(".")[0]
        if top == CORE:
            # The backend may have called what raises.
            is_by_backend = False
        elif top not in _NOT_BACKENDS and (
            "site-packages" in file or not file.startswith(_LIBRARY)
        ):
            is_by_backend = True
    return is_by_backend


class ConformanceKit:
    """Base of the kits.

    A test cannot be overridden; `expected_failures` says which ones a backend may fail. Where a
    kit's smoke test, its first one, fails, the tests after it are skipped: they would fail for the
    same reason, many of them at the end of a deadline. After the third test that hangs, later tests
    are skipped as well.

    Attributes:
        expected_failures: Reasons by test, or by test and parameters (``test_name[id]``): each of
            these has to fail, and fails the run if it passes. Read by the pytest plug-in of
            wtransfer.
        deadline_s: Bound on waits, in seconds.
        is_long: True: also the tests that take minutes, as ``--wtransfer-long`` says.
        smoke_test: Name of the kit's smoke test, whose body runs within `is_smoke_test`.
    """

    expected_failures: ClassVar[Mapping[str, str]] = {}
    deadline_s: ClassVar[float] = 10.0
    is_long: ClassVar[bool] = False
    smoke_test: ClassVar[str] = ""
    _smoke_failed: ClassVar[type | None] = None
    _hung: ClassVar[dict[type, list[str]]] = {}
    _contract: ClassVar[tuple[type, ...]] = ()
    """Classes whose methods a backend has, to name the one that hangs."""
    _earlier: frozenset[threading.Thread] = frozenset()
    """Threads from before the test, among them those of earlier tests that hang."""
    _test_name: str | None = None
    _has_hung = False
    _calls: SerialThread
    user_properties: list[tuple[str, Any]]
    """Properties of the test that runs, as pytest reports them."""

    @pytest.fixture(autouse=True)
    def _call_on_one_thread(self) -> Iterator[None]:
        self._calls = SerialThread("kit")
        yield
        self._calls.stop()

    @pytest.fixture(autouse=True)
    def _keep_request(self, request: pytest.FixtureRequest) -> None:
        self.user_properties = request.node.user_properties
        self._asks_long = self.is_long or request.config.getoption("wtransfer_long", False)

    def note(self, text: str) -> None:
        """Add a finding that is no failure to the end of the run."""
        self.user_properties.append((NOTE, f"{type(self).__name__}: {text}"))

    def not_tested(self, what: str) -> None:
        """Add a question that this test could not ask of the backend to the end of the run.

        Args:
            what: The question; and after a colon, what the author can give, so that it is asked.
        """
        self.user_properties.append((NOT_TESTED, f"{type(self).__name__}: NOT TESTED: {what}"))

    def skip_not_tested(self, what: str) -> NoReturn:
        """Skip a test that could not ask its question: see `not_tested`."""
        self.not_tested(what)
        pytest.skip(f"NOT TESTED: {what}")

    def skip_unless_long(self) -> None:
        """Skip a test that takes minutes, unless the run has been told to take them."""
        if not self._asks_long:
            pytest.skip("it takes minutes: run it with --wtransfer-long")

    @pytest.fixture(autouse=True)
    def _note_warnings(self, request: pytest.FixtureRequest) -> Iterator[None]:
        """Record what the backend's own logger says, for the summary of the run."""
        logger, warned = logging.getLogger(self._logger_name()), _Warned()
        logger.addHandler(warned)
        yield
        logger.removeHandler(warned)
        request.node.user_properties += [(WARNED, said) for said in warned.said.items()]

    def _backend(self) -> type | None:
        """Return the class that is tested; None: it cannot be loaded, or is not stated."""
        for kind, group in (*KINDS.items(), ("policy", "")):
            stated: type | None = getattr(self, f"{kind}_cls", None)
            if stated is not None:
                return stated
            if group and (name := getattr(self, kind, "")):
                with contextlib.suppress(PluginError):
                    return registry(group).get(name)
        return None

    def _logger_name(self) -> str:
        """Return the name of the backend's logger: of its package, or of a module of ours."""
        module = getattr(self._backend(), "__module__", "") or __name__
        top = module.partition(".")[0]
        return module if top == CORE else top

    @usually(
        "the module does at its top what belongs into a constructor, or into the first call that "
        "needs it: hosts import a backend to look at it, and fork afterwards"
    )
    def test_import_leaves_the_process_as_it_was(
        self, wtransfer_spawn: Callable[..., Child], tmp_path: Path
    ) -> None:
        """Settings that all modules share stay; no thread, socket, process or file is left."""
        backend = self._backend()
        name = getattr(backend, "__module__", "") or getattr(self, "module_path", None) or ""
        file = getattr(sys.modules.get(name), "__file__", None) or ""
        # A script would run the kit again.
        if not name or name == "__main__":
            self.skip_not_tested("what the import does: put the backend into a module of its own")
        folder, told = tmp_path / "current", tmp_path / "told"
        folder.mkdir()
        asked = (os.getpid(), name, file, sys.path, str(folder))
        wtransfer_spawn("wtransfer.testing.import_effects:tell", *asked, stdout=told).wait(IMPORT_S)
        answer = json.loads(told.read_text("utf-8").splitlines()[-1])
        if "error" in answer:
            self.skip_not_tested(
                f"what the import does: another process cannot import {name} ({answer['error']})"
            )
        what = Path(file).name or name
        assert not answer["changed"], f"as {what} is imported: {'; '.join(answer['changed'])}"

    def run_test(self, test: Callable[[], None]) -> None:
        """Run the body of a test that has a hint; a kit may bound its time by `run_bounded`."""
        test()

    def run_bounded(self, call: Callable[[], T], what: str) -> T:
        """Make calls of the backend on the test's thread, which is left behind where they hang.

        One thread constructs, calls and ends a backend, as in a host.

        Args:
            call: The calls.
            what: Their name in the failure, where no method of the backend is found in them.

        Raises:
            AssertionError: They take longer.
        """
        made = self._calls.submit(call)
        bound_s = HANGS_AFTER * self.deadline_s * (LONG_TIMES if self._asks_long else 1)
        if not made.done.wait(bound_s):
            self._note_hang()
            raise AssertionError(self._under_way(bound_s) or _not_returned([what], bound_s))
        # Raises failures, and exceptions that are none, such as a skip.
        outcome: T = made.outcome()
        return outcome

    def _under_way(self, within_s: float | None = None) -> str:
        """Name the backend's methods that threads of this test are in; empty if there are none.

        Args:
            within_s: Time that they had, in seconds, where that is known.
        """
        frames, found = sys._current_frames(), dict[str, None]()  # noqa: SLF001  # documented
        for thread in threading.enumerate():
            frame = None if thread in self._earlier else frames.get(thread.ident or 0)
            if method := _method_in(frame, self._contract):
                found[method] = None
        return _not_returned(list(found), within_s) if found else ""

    def end_bounded(self, end: Callable[[], object], what: str) -> None:
        """End at the end of a test what it has made, as `run_bounded`.

        After a test that has hung the end is given `deadline_s`, and no failure of its own: a call
        that still runs may hold it up.
        """
        if self._has_hung:
            start_call(end, "kit").done.wait(self.deadline_s)
        else:
            self.run_bounded(end, what)

    @pytest.fixture(autouse=True)
    def _skip_after_failed_smoke_test(self, request: pytest.FixtureRequest) -> None:
        # Only for this class: subclasses test other backends.
        if self._smoke_failed is type(self) and request.function.__name__ != self.smoke_test:
            pytest.skip(f"{self.smoke_test} has failed")
        if len(hung := self._hung.get(type(self), [])) >= MAX_HUNG:
            pytest.skip(
                f"{len(hung)} tests have hung, each for its whole time: {', '.join(hung)}; the "
                "others were not run. Bound every call of the backend by a time-out, and run again"
            )
        self._earlier = frozenset(threading.enumerate())
        name = request.node.name
        is_expected = {name, name.partition("[")[0]} & self.expected_failures.keys()
        self._test_name = None if is_expected else name

    def _note_hang(self) -> None:
        """Count a test that has hung; after `MAX_HUNG` the tests that follow are skipped."""
        self._has_hung = True
        self._count_hang()

    def _count_stall(self, error: BaseException) -> None:
        """Count a failed test in which the framework gave a call up before the kit did."""
        if isinstance(error, StallError) or StallError.__name__ in str(error):
            self._count_hang()

    def _count_hang(self) -> None:
        counted = self._hung.setdefault(type(self), [])
        if self._test_name is not None and self._test_name not in counted:
            counted.append(self._test_name)

    @contextlib.contextmanager
    def is_smoke_test(self) -> Iterator[None]:
        """Skip all later tests of the class if the block fails."""
        cls = type(self)
        cls._smoke_failed = None
        try:
            yield
        except Exception:
            # A smoke test that is expected to fail says nothing about the other tests.
            if self.smoke_test not in self.expected_failures:
                cls._smoke_failed = cls
            raise

    def __init_subclass__(cls) -> None:
        """Check that a subclass overrides no test, and states known tests and reasons.

        Raises:
            TypeError: The subclass overrides a test, or expects a failure of an unknown test, or
                without a reason.
        """
        super().__init_subclass__()
        kits = [base for base in cls.__mro__[1:] if ConformanceKit in base.__bases__]
        tests = {name: kit for kit in kits for name in dir(kit) if name.startswith("test_")}
        for name, kit in tests.items():
            if getattr(cls, name) is not getattr(kit, name):
                raise TypeError(
                    f"{cls.__name__} overrides {name} of the conformance kit. Leave the test as it "
                    "is; if the backend may fail it, say why: "
                    f'expected_failures = {{"{name}": "the reason"}}'
                )
        for entry, reason in cls.expected_failures.items():
            name = entry.partition("[")[0]
            if name not in tests:
                close = difflib.get_close_matches(name, tests, n=3)
                hint = f" Did you mean {' or '.join(close)}?" if close else ""
                raise TypeError(
                    f"{cls.__name__} expects {entry} to fail, which is no test of the kit.{hint}"
                )
            if not isinstance(reason, str) or not reason.strip():
                raise TypeError(
                    f"{cls.__name__} expects {entry} to fail and gives no reason: {reason!r}; "
                    "state in a sentence why the backend may fail it"
                )


def _method_in(frame: FrameType | None, contract: tuple[type, ...]) -> str:
    """Return the innermost call of a contract's method in a stack: its name, and what it is to do.

    Args:
        frame: The innermost frame.
        contract: Classes one of which the method's object, or class, is derived from.
    """
    while frame is not None:
        code = frame.f_code
        own = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        cls = own if isinstance(own, type) else type(own)
        bases = [base for base in contract if base in cls.__mro__ and hasattr(base, code.co_name)]
        if bases:
            told = inspect.getdoc(getattr(bases[0], code.co_name)) or ""
            first = f" ({told.splitlines()[0]})" if told and code.co_name != "__init__" else ""
            return f"{code.co_name}() of {cls.__name__}{first}"
        frame = frame.f_back
    return ""


def _not_returned(calls: list[str], within_s: float | None) -> str:
    have = "has" if len(calls) == 1 else "have"
    within = "" if within_s is None else f" in {within_s:g} s"
    return f"{' and '.join(calls)} {have} not returned{within}"


class _Warned(logging.Handler):
    """Keeps the first text of each warning, and of each error, that is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: dict[str, str] = {}
        """Logger, level and form of the text -> the first text."""

    def emit(self, record: logging.LogRecord) -> None:
        key = f"{record.levelname} of {record.name}: {record.msg}"
        self.said.setdefault(key, f"{record.levelname} of {record.name}: {record.getMessage()}")


def registered_name(group: str, backend: type | None, kind: str = "") -> str:
    """Register a backend class that is not installed, once, and return its name.

    Args:
        group: ``engines``, ``connectors`` or ``specs``.
        backend: The class that a subclass of the kit states.
        kind: Kind of the backend, where the group has several.
    """
    kind = kind or group[:-1]
    assert backend is not None, f"state the {kind} or the {kind}_cls that is tested"
    name = f"conformance of {backend.__qualname__} at {id(backend):x}"
    if not registry(group).registered(name):
        registry(group).register(name, backend)
    return name


@contextlib.contextmanager
def recorded_unpickling() -> Iterator[list[str]]:
    """Record the functions of `pickle` that load, called by this thread or by one it starts.

    Yields:
        Their names.
    """
    loads: list[str] = []

    def watch(frame: FrameType, event: str, function: Any) -> None:
        modules, name = {frame.f_globals.get("__name__")}, frame.f_code.co_name
        if event == "c_call":
            owner = type(getattr(function, "__self__", None))
            modules = {function.__module__, *(base.__module__ for base in owner.__mro__)}
            name = function.__name__
        if event in ("call", "c_call") and "load" in name and modules & {"pickle", "_pickle"}:
            loads.append(name)

    before = sys.getprofile(), threading.getprofile()
    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        yield loads
    finally:
        sys.setprofile(before[0])
        threading.setprofile(before[1])


def checked_stats(stats: Mapping[str, Any], side: str) -> dict[str, float]:
    """Return the statistics of one side with its name before each; fail unless they are numbers."""
    for name, value in stats.items():
        assert isinstance(name, str), f"{name!r} of the {side} is not a name"
        assert isinstance(value, (int, float)), f"{name} of the {side} is {value!r}, not a number"
    return {f"{side} {name}": value for name, value in stats.items()}


def fallen_counters(before: Mapping[str, float], after: Mapping[str, float]) -> list[str]:
    """Return the names of counters, which end in ``_total``, that are lower than before."""
    return [k for k, v in before.items() if k.endswith("_total") and after.get(k, 0) < v]


# -- runs without a test file


@dataclass
class Report:
    """Results of a kit for one backend."""

    backend: str
    """Kind and name."""
    passed: list[str] = field(default_factory=list)
    """Tests, with their parameters in brackets."""
    failed: dict[str, str] = field(default_factory=dict)
    """Messages by test, each with its hint, where the test has one."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Reasons by test, expected failures among them."""
    findings: Findings = field(default_factory=Findings)
    """Findings that are no failures, such as much time per tensor; questions that could not be
    asked; warnings and errors that the backend's own logger has had in this process."""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """True if tests have passed, and none has failed."""
        return bool(self.passed) and not self.failed

    def __str__(self) -> str:
        numbers = (len(self.passed), len(self.failed), len(self.skipped))
        counts = "{} passed, {} failed, {} skipped".format(*numbers)
        lines = [f"{self.backend}: {counts} in {self.seconds:.1f} s"]
        lines += [f"FAILED {name}: {_indented(text)}" for name, text in self.failed.items()]
        tests: dict[str, list[str]] = {}
        for name, text in self.skipped.items():
            tests.setdefault(text, []).append(name)
        for text, names in tests.items():
            which = names[0] if len(names) == 1 else f"{len(names)} tests"
            lines.append(f"skipped {which}: {_indented(text)}")
        return "\n".join([*lines, *self.findings.lines()])

    @property
    def not_tested(self) -> list[str]:
        """Questions that could not be asked of the backend."""
        return self.findings.not_tested

    # Hooks of pytest, by which the report fills itself.

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record an error of the collection."""
        if report.failed:
            self.failed[report.nodeid] = _message(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record a test; a test whose teardown fails has failed, too."""
        name = report.nodeid.split("::", 2)[-1]
        self.findings.take(report)
        if report.failed:
            earlier = [self.failed[name]] if name in self.failed else []
            self.failed[name] = "\n".join([*earlier, _message(report)])
            if name in self.passed:
                self.passed.remove(name)
        elif report.skipped:
            self.skipped[name] = getattr(report, "wasxfail", "") or _message(report)
        elif report.when == "call":
            self.passed.append(name)


def check_engine(
    backend: str | type, *, attributes: Mapping[str, Any] | None = None, **options: Any
) -> Report:
    """Run the kit of engines in this process, which may take minutes, and print nothing.

    Args:
        backend: Name of an installed engine, or the worker class, wherever it is defined.
        attributes: Of the kit, such as ``deadline_s``: see `EngineConformance`.
        options: Of the trainer side. ``{folder}`` in a text is an empty folder, another one in each
            test, and for each publisher.

    Raises:
        PluginError: No engine has this name, or it cannot be loaded.
        TypeError: The backend is of another kind, or the kit has no attribute of this name.
    """
    return _check("engine", backend, attributes, options)


def check_connector(
    backend: str | type, *, attributes: Mapping[str, Any] | None = None, **options: Any
) -> Report:
    """Run the kit of connectors: see `check_engine`.

    Attributes that connectors often need are ``kind`` and ``is_shared``, and ``in_processes`` is
    False where the connector is given as a class.
    """
    return _check("connector", backend, attributes, options)


def check_spec(
    backend: str | type, *, attributes: Mapping[str, Any] | None = None, **options: Any
) -> Report:
    """Run the kit of offloading specs: see `check_engine`.

    The attribute ``size_option`` names the option that bounds the size in bytes; without it the
    tests of evictions are skipped.
    """
    return _check("spec", backend, attributes, options)


def check_tier(
    backend: str | type, *, attributes: Mapping[str, Any] | None = None, **options: Any
) -> Report:
    """Run the kit of tiers: see `check_engine`.

    The attribute ``in_processes`` is False where the tier is given as a class.
    """
    return _check("tier", backend, attributes, options)


def kit_class(
    kind: str, backend: str | type, attributes: Mapping[str, Any], options: Mapping[str, Any]
) -> type[ConformanceKit]:
    """Return a subclass of a kit that tests one backend.

    Args:
        kind: One of `KINDS`.
        backend: Its name, or its class.
        attributes: Of the kit.
        options: Of the backend; ``{folder}`` in a text is a folder of the test's own.

    Raises:
        PluginError: No backend has this name, or it cannot be loaded.
        TypeError: The kit has no attribute of this name, or the backend is of another kind, or
            missing.
    """
    if not isinstance(backend, str | type):
        raise TypeError(f"name the {kind} that is tested, or give its class, not {backend!r}")
    kit = getattr(
        importlib.import_module(f"wtransfer.testing.{kind}"), f"{kind.title()}Conformance"
    )
    known = [each for base in kit.__mro__ for each in vars(base).get("__annotations__", ())]
    for name in attributes:
        if name in (kind, f"{kind}_cls"):
            raise TypeError(f"The {kind} is {backend!r} already: leave the attribute {name!r} out")
        if name == "options":
            raise TypeError("Options are given beside the attributes, each by its own name")
        if name not in known or name.startswith("_"):
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise TypeError(f"The kit of {kind}s has no attribute {name!r}.{hint}")
    found = registry(KINDS[kind]).get(backend) if isinstance(backend, str) else backend
    for other, base in _bases().items():
        if other != kind and issubclass(found, base):
            an = "an" if other == "engine" else "a"
            raise TypeError(f"{backend!r} is {an} {other}: run the kit of {other}s, not of {kind}s")
    members: dict[str, Any] = {kind: backend}
    if not isinstance(backend, str):
        members = {f"{kind}_cls": backend}
        # Other processes do not find the class.
        members |= {"in_processes": False} if "in_processes" in known else {}
    name = backend if isinstance(backend, str) else backend.__qualname__
    members |= {**attributes, "options": dict(options)}
    made: type[ConformanceKit] = type(
        f"Test_{kind}_{re.sub(r'[^0-9A-Za-z]+', '_', name)}", (_OptionsInFolder, kit), members
    )
    return made


def _bases() -> dict[str, type]:
    """Return the base class of the backends of each kind."""
    # Imported late: kits of a single kind import this module as well.
    from wtransfer.connectors.interface import KVConnectorBase_V1
    from wtransfer.engines.interface import WeightTransferEngine
    from wtransfer.specs.interface import OffloadingSpec, Tier

    return {
        "engine": WeightTransferEngine,
        "connector": KVConnectorBase_V1,
        "spec": OffloadingSpec,
        "tier": Tier,
    }


class _OptionsInFolder:
    """Options whose texts name the folder that the kit gives."""

    options: ClassVar[Mapping[str, Any]]

    def options_in(self, folder: Path) -> dict[str, Any]:
        return {
            name: value.replace("{folder}", str(folder)) if isinstance(value, str) else value
            for name, value in self.options.items()
        }


class _Chosen:
    """Hands the class of a kit to the pytest plug-in, and notes whether the user ends the run."""

    def __init__(self, made: type[ConformanceKit]) -> None:
        self._made = made
        self.is_interrupted = False

    # Before the plug-in looks for it.
    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        choose(config, [self._made])

    def pytest_keyboard_interrupt(self) -> None:
        """Note an interrupt, or a call of ``pytest.exit``."""
        self.is_interrupted = True


def _check(
    kind: str,
    backend: str | type,
    attributes: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> Report:
    made = kit_class(kind, backend, attributes or {}, options)
    report = Report(f"{kind} {backend if isinstance(backend, str) else backend.__qualname__}")
    chosen, output = _Chosen(made), io.StringIO()
    # Use neither the settings nor the conftest files of the caller's folder. The plug-in is named
    # as its entry point is: pytest would refuse to load it under two names.
    arguments = ["--pyargs", "wtransfer.testing", "-p", "wtransfer", "-p", "no:cacheprovider"]
    arguments += ["-c", os.devnull, f"--rootdir={Path(__file__).parent}", "--noconftest"]
    began = time.perf_counter()
    # Drop the options of the caller's own runs: their plug-ins may be absent here.
    own = os.environ.pop("PYTEST_ADDOPTS", None)
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = pytest.main([*arguments, "-q", "--no-summary"], [report, chosen])
    finally:
        if own is not None:
            os.environ["PYTEST_ADDOPTS"] = own
    report.seconds = time.perf_counter() - began
    if chosen.is_interrupted:
        raise KeyboardInterrupt
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not report.failed:
        raise RuntimeError(f"pytest has ended with {code!r}:\n{output.getvalue().strip()}")
    return report


def _message(report: pytest.CollectReport | pytest.TestReport) -> str:
    """Return the message of a report, without the code around it."""
    found: Any = report.longrepr
    if isinstance(found, tuple):
        return str(found[2]).removeprefix("Skipped: ")
    crash = getattr(found, "reprcrash", None)
    return str(found if crash is None else crash.message)


def _indented(text: str) -> str:
    return text.strip().replace("\n", "\n    ")
