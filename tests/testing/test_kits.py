"""Each kit catches backends that are broken in one way each, and passes the rest of them.

The rows stand with the broken backends: each names the test of the kit that it is `caught_by`, with
words that the failure `says` itself and others with which it `hints` at its usual cause, and tests
that it `passes`, as a kit that fails everything proves nothing. The kits run as an author would run
them, in a process of their own.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from wtransfer.testing.connector import ConnectorConformance
from wtransfer.testing.engine import EngineConformance
from wtransfer.testing.fakes import MemoryTier
from wtransfer.testing.kit import check_tier, registered_name
from wtransfer.testing.policy import PolicyConformance
from wtransfer.testing.spec import SpecConformance
from wtransfer.testing.tier import TierConformance

# The first row of all waits for the whole run.
pytestmark = pytest.mark.timeout(600)

HERE = Path(__file__).parent
KITS = {
    "connectors": ConnectorConformance,
    "engines": EngineConformance,
    "policies": PolicyConformance,
    "specs": SpecConformance,
    "tiers": TierConformance,
}
NOT_CAUGHT = {
    # Has the rows of `test_weights_change_between_calls`, and takes minutes.
    "test_weights_change_before_every_call",
    # `test_import_effects.py`: a broken backend would have to be imported here.
    "test_import_leaves_the_process_as_it_was",
    # A broken connector would have to be installed.
    "test_killed_producer_is_a_miss",
}


def read_rows():
    """Return class, test, outcome and words (the failure's own, its hint's) of rows, by kit."""
    rows = {}
    for kind in KITS:
        path = HERE / f"broken_{kind}.py"
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        broken = {name: cls for name, cls in vars(module).items() if name.startswith("Test")}
        rows[kind] = []
        for name, cls in broken.items():
            own = vars(cls)
            rows[kind] += [(name, test, "passed", ("", "")) for test in own.get("passes", ())]
            if own.get("caught_by"):
                words = own.get("says", ""), own.get("hints", "")
                rows[kind].append((name, own["caught_by"], "failed", words))
            rows[kind] += [
                (name, test, "skipped", ("", "")) for test in own.get("expected_failures", ())
            ]
    return rows


ROWS = read_rows()
CASES = [(kind, *row) for kind, rows in ROWS.items() for row in rows]


def run(*nodes, file):
    """Run nodes of broken backends; return the outcomes, and reasons of skipped tests."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={file}"]
    # The processes of the connector kit find the connectors of this folder, too.
    paths = [str(HERE), str(HERE.parent / "connectors"), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [*command, *nodes], capture_output=True, text=True, check=False, env=environ
    )
    assert done.returncode == 1, done.stdout
    found = {}
    for case in ET.parse(file).getroot().iter("testcase"):
        *_, module, cls = case.get("classname").split(".")
        outcome, reason = "passed", ""
        for each in case:
            if each.tag in ("failure", "skipped", "error"):
                outcome, reason = each.tag.replace("failure", "failed"), each.get("message")
                # The message is cut.
                reason = each.text if outcome == "failed" else reason
        # "error": a test that cannot be set up catches nothing. Where the teardown of a failed test
        # fails as well, that is another case of the same name.
        found.setdefault((module, cls, case.get("name")), (outcome, reason))
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    nodes = [f"{HERE / f'broken_{kind}.py'}::{cls}::{test}" for kind, cls, test, *_ in CASES]
    return run(*nodes, file=tmp_path_factory.mktemp("kits") / "junit.xml")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "backend", "test", "expected", "words"), CASES)
def test_outcome_of_a_broken_backend(outcomes, *, kind, backend, test, expected, words):
    outcome, reason = outcomes[f"broken_{kind}", backend, test]
    if outcome == "skipped" and "two hosts, which cannot be made here" in reason:
        pytest.skip(reason)
    assert outcome == expected
    if expected == "failed":
        # Of the error alone: the code beside it has the hint of the test, as every failure has.
        errors = [line.removeprefix("E") for line in reason.splitlines() if line.startswith("E ")]
        said, usually, hint = " ".join(map(str.strip, errors)).partition("Usually this means that")
        assert usually
        assert words[0] in said
        assert words[1] in hint


NOTES = {
    "TestIsSlowPerTensor::test_many_small_tensors_arrive": "a small tensor takes",
    "TestDeclaresCuda::test_declared_attributes_are_valid": "NOT TESTED: cuda, which `devices`",
    "TestGreetsAnyone::test_stranger_gets_nothing": "NOT TESTED: a stranger that speaks",
}


@pytest.mark.slow
def test_finding_that_is_no_failure_is_printed():
    nodes = [f"{HERE / 'broken_engines.py'}::{each}" for each in NOTES]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *nodes]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    for node, note in NOTES.items():
        assert f"{node.partition(':')[0]}: {note}" in done.stdout


@pytest.mark.parametrize("kind", KITS)
def test_every_broken_backend_states_words_of_its_failure(kind):
    # One that fails by a mistake of its own proves nothing.
    assert [row for row in ROWS[kind] if row[2] == "failed" and not row[3][0]] == []


@pytest.mark.parametrize("kind", KITS)
def test_every_test_of_the_kit_catches_a_broken_backend(kind):
    tests = {name for name in dir(KITS[kind]) if name.startswith("test_")}
    failed = [test for _, test, expected, _ in ROWS[kind] if expected == "failed"]
    caught = {test.partition("[")[0] for test in failed}
    assert caught == tests - NOT_CAUGHT


# Without it a connector that never reports a load takes minutes, a deadline for each test.
@pytest.mark.slow  # `test_pytest_plugin.py` has a failed smoke test of the smallest kit each time
def test_failed_smoke_test_skips_the_other_tests(tmp_path):
    node = f"{HERE / 'broken_connectors.py'}::TestReportsNoLoads"
    found = run(node, file=tmp_path / "junit.xml")
    smoke_test = ConnectorConformance.smoke_test
    assert found.pop(("broken_connectors", "TestReportsNoLoads", smoke_test))[0] == "failed"
    # It comes first, and asks another process.
    asked = "test_import_leaves_the_process_as_it_was"
    assert found.pop(("broken_connectors", "TestReportsNoLoads", asked))[0] == "passed"
    assert len(found) > 50
    for outcome, reason in found.values():
        # What the failure says is said once.
        assert (outcome, reason) == ("skipped", f"{smoke_test} has failed")


@pytest.mark.parametrize("kind", KITS)
@pytest.mark.parametrize("where", ["class", "mixin"])
def test_override_is_refused(kind, where):
    kit = KITS[kind]
    test = next(name for name in vars(kit) if name.startswith("test_"))
    mark = pytest.mark.xfail(reason="it says why, and in the wrong place")
    own = {test: mark(lambda self: None)}
    bases = (type("Mixin", (), own), kit) if where == "mixin" else (kit,)
    expected = f'overrides {test} of the conformance kit.*expected_failures = {{"{test}": '
    with pytest.raises(TypeError, match=expected):
        type("TestMine", bases, own if where == "class" else {})


@pytest.mark.parametrize(
    ("failures", "message"),
    [
        ({"test_many_small_tensors_arive": "slow"}, "Did you mean test_many_small_tensors_arrive"),
        ({"many": "slow"}, "expects many to fail, which is no test of the kit.$"),
        ({"test_names_of_any_characters_arrive": " "}, "gives no reason"),
        ({"test_names_of_any_characters_arrive": None}, "gives no reason"),
    ],
)
def test_expected_failure_without_test_or_reason_is_refused(failures, message):
    with pytest.raises(TypeError, match=message):
        type("TestMine", (EngineConformance,), {"expected_failures": failures})


def test_kit_ends_after_the_third_test_that_hangs():
    go_on = threading.Event()

    class Hangs(MemoryTier):
        def remove(self, keys):
            go_on.wait(60)

        def get_stats(self):
            go_on.wait(60)
            return {}

    try:
        report = check_tier(Hangs, shelf="{folder}", attributes={"deadline_s": 0.1})
    finally:
        go_on.set()
    assert len(report.failed) == 3
    assert all("has not returned in 0.6 s" in text for text in report.failed.values())
    (reason, *others) = [text for text in set(report.skipped.values()) if "have hung" in text]
    assert others == []
    assert reason.startswith("3 tests have hung, each for its whole time: test_")
    assert all(name in reason for name in report.failed)
    # Another class begins anew.
    assert report.passed


@pytest.mark.parametrize("kind", KITS)
def test_pydoc_has_a_text_for_each_attribute_of_a_kit(kind):
    told = re.findall(r"^    (\w+): \S", inspect.getdoc(KITS[kind]), re.MULTILINE)
    stated = vars(KITS[kind])["__annotations__"]
    assert told == [name for name in stated if not name.startswith("_")]


@pytest.mark.parametrize("kind", KITS)
def test_further_tests_are_accepted(kind):
    type("TestMine", (KITS[kind],), {"test_something_else": lambda self: None})


@pytest.mark.parametrize(
    ("group", "kind"),
    [("connectors", ""), ("engines", ""), ("specs", ""), ("specs", "tier")],
)
def test_kit_without_a_backend_says_so(group, kind):
    expected = kind or group[:-1]
    with pytest.raises(AssertionError, match=f"state the {expected} or the {expected}_cls"):
        registered_name(group, None, kind)
