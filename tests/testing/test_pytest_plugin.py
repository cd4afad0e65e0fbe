"""The kits in an author's own pytest: what it prints, and which configuration it needs."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from wtransfer.testing.fakes import MemoryEngine, MemoryTier
from wtransfer.testing.kit import Report, kit_class
from wtransfer.testing.pytest_plugin import NOT_TESTED, NOTE
from wtransfer.testing.zygote import Zygote

PLUGIN = "wtransfer.testing.pytest_plugin"
POLICY = """
from wtransfer.specs.policies import LRUCachePolicy
from wtransfer.testing.policy import PolicyConformance

class KeepsOne(LRUCachePolicy):
    def evict(self, count, protected, incoming):
        evicted = super().evict(count, protected, incoming)
        return evicted and evicted[1:]

class TestKeepsOne(PolicyConformance):
    policy_cls = KeepsOne
"""

CONNECTOR = """
from wtransfer.testing.connector import ConnectorConformance
from wtransfer.testing.fakes import MemoryConnector

class TestMemory(ConnectorConformance):
    connector_cls = MemoryConnector
"""


WARNS = """
import logging
from wtransfer.testing.fakes import MemoryTier
from wtransfer.testing.tier import TierConformance

class Warns(MemoryTier):
    def put(self, key, data):
        logging.getLogger(__name__).warning("put %d bytes", len(data))
        super().put(key, data)

class TestWarns(TierConformance):
    tier_cls, in_processes = Warns, False

    def options_in(self, folder):
        logging.getLogger("another").warning("not the backend's")
        return {"shelf": str(folder)}
"""


RUN_PYTEST = """
import os, runpy, sys
os.chdir(sys.argv.pop(1))
sys.path.insert(0, "")
runpy.run_module("pytest", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def with_torch(tmp_path_factory):
    """Run a program, but for the import of torch, which would take longer than all the rest."""
    out, err = (tmp_path_factory.mktemp("program") / name for name in ("out", "err"))

    def run(code, *arguments, **environ):
        for each in (out, err):
            each.write_text("")
        child = zygote.spawn("programs:run", code, arguments, environ, stdout=out, stderr=err)
        returncode = child.wait(90.0)
        return subprocess.CompletedProcess(arguments, returncode, out.read_text(), err.read_text())

    with Zygote(preload=["torch"], paths=[Path(__file__).parents[1]]) as zygote:
        yield run


@pytest.fixture
def run(with_torch, tmp_path):
    def run(module, *options):
        (tmp_path / "test_mine.py").write_text(module, "utf-8")
        (tmp_path / "pytest.ini").write_text("[pytest]\n", "utf-8")
        options = ("-q", "-p", "no:cacheprovider", *options)
        # Where wtransfer is installed, its entry point loads the plug-in; here an option does.
        return with_torch(RUN_PYTEST, str(tmp_path), *options, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")

    return run


def test_failed_asserts_of_a_kit_show_the_values(run):
    done = run(POLICY, "-p", PLUGIN, "-k", "test_evict_returns_the_count_asked_for and 5")
    assert "AssertionError: evict(5) returned 4 blocks\nE       assert 4 == 5" in done.stdout


def test_plugin_imports_nothing_heavy():
    code = (
        f"import sys, {PLUGIN}; print(sorted({{'torch', 'numpy', 'msgspec'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


OLD_PYTEST = f"""
import pytest
del pytest.StashKey, pytest.version_tuple
import {PLUGIN} as plugin
assert not hasattr(plugin, "pytest_pycollect_makemodule")
"""


# Every pytest run of an environment loads it: version 6 has neither stashes nor `module_path`.
def test_plugin_is_loaded_by_an_old_pytest():
    run_python("-c", OLD_PYTEST).check_returncode()


def test_connector_kit_is_collected_under_strict_markers(run):
    done = run(CONNECTOR, "--strict-markers", "--collect-only")
    assert done.returncode == 0, done.stdout
    assert "test_weights_change_before_every_call" in done.stdout


def test_expected_failures_are_strict_and_may_name_parameters(run):
    one, every = "test_evict_returns_the_count_asked_for[5]", "test_reorder_keeps_candidates"
    expected = f"    expected_failures = {{{one!r}: 'it keeps one', {every!r}: 'it does not'}}\n"
    module = f"{POLICY}{expected}".replace("return evicted and", "return count == 5 and")
    select = "test_evict_returns_the_count_asked_for or test_reorder_keeps_candidates"
    done = run(module, "-p", PLUGIN, "-ra", "-k", select)
    assert f"XFAIL test_mine.py::TestKeepsOne::{one} - it keeps one" in done.stdout
    assert "[XPASS(strict)] it does not" not in done.stdout
    module = module.replace("return count == 5 and evicted[1:]", "return evicted")
    done = run(module, "-p", PLUGIN, "-ra", "-k", select)
    assert "[XPASS(strict)] it keeps one" in done.stdout
    assert "[XPASS(strict)] it does not" in done.stdout
    assert done.returncode == 1


# -- without a test file


@pytest.fixture
def run_installed(with_torch, tmp_path):
    fixed = ("-q", "-p", "no:cacheprovider", "--strict-markers", "--pyargs", "wtransfer.testing")
    return functools.partial(with_torch, RUN_PYTEST, str(tmp_path), *fixed)


def test_kits_of_installed_backends_run_by_their_names(run_installed):
    done = run_installed(
        *("--wtransfer-engine", "file", "--wtransfer-option", "path={folder}/store"),
        *("--wtransfer-engine", "shm", "--wtransfer-attribute", "deadline_s=30"),
        *("-k", "test_one_round_is_committed or test_infos_are_plain_data", "-vv"),
    )
    # The engine `shm` has no option `path`, and says so.
    assert "Test_engine_file::test_one_round_is_committed PASSED" in done.stdout
    assert "Test_engine_shm::test_one_round_is_committed FAILED" in done.stdout
    assert "Test_engine_shm::test_infos_are_plain_data SKIPPED" in done.stdout
    assert "4 passed" not in done.stdout
    assert done.returncode == 1


@pytest.mark.slow  # a kit of its own for two lines
def test_seconds_and_reasons_of_skips_are_shown(run_installed):
    done = run_installed(
        *("--wtransfer-spec", "CPUOffloadingSpec", "-k", "damaged and last"),
        *("--wtransfer-option", "cpu_bytes_to_use=4194304"),
    )
    assert done.returncode == 0, done.stdout
    assert "slowest 10 durations" in done.stdout
    assert "NOT TESTED: whether damaged blocks are refused" in done.stdout
    assert re.search(", 1 NOT TESTED in [0-9.]+s", done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "name the backend whose kit shall run: --pyargs wtransfer.testing --wtransfer-engine"),
        (["--wtransfer-engine", "smh"], "Invalid weight transfer backend: smh. Available engines:"),
        # Which kit it is, is asked of `kit_class` below as well.
        pytest.param(
            ["--wtransfer-tier", "CPUOffloadingSpec"],
            "'CPUOffloadingSpec' is a spec: run the kit",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--wtransfer-spec", "file"],
            "'file' is a tier: run the kit of tiers",
            marks=pytest.mark.slow,
        ),
        (["--wtransfer-engine", "shm", "--wtransfer-option", "x"], "expected KEY=VALUE, got 'x'"),
        (
            ["--wtransfer-engine", "shm", "--wtransfer-attribute", "deadlines=1"],
            "The kit of engines has no attribute 'deadlines'. Did you mean deadline_s?",
        ),
    ],
)
def test_usage_error_is_one_line(run_installed, options, message):
    done = run_installed(*options)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    (line,) = filter(None, done.stderr.splitlines())
    assert line.startswith(f"ERROR: {message}")
    assert done.stdout.strip() == ""


def test_backend_without_the_package_is_refused(tmp_path):
    (tmp_path / "test_mine.py").write_text("def test_mine(): ...")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--wtransfer-engine=shm"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: a kit runs where it is: add --pyargs wtransfer.testing" in done.stderr


CHECK = """
from wtransfer.errors import UnknownBackendError
from wtransfer.testing.fakes import MemoryEngine
from wtransfer.testing.kit import check_engine, check_spec

class Mine(MemoryEngine):
    def receive_weights(self, update_info, load_weights):
        def load(weights):
            load_weights([each for each in weights if each[1].numel()])
        super().receive_weights(update_info, load)

failures = {
    "test_many_small_tensors_arrive": "empty ones are lost",
    "test_names_of_any_characters_arrive": "it is not sure",
}
report = check_engine(Mine, attributes={"expected_failures": failures})
assert not report.ok
assert report.failed.keys() == {
    "test_empty_and_scalar_tensors_arrive", "test_names_of_any_characters_arrive"
}, report
assert "3 of 5 pieces never arrived" in report.failed["test_empty_and_scalar_tensors_arrive"]
assert report.skipped.keys() == {"test_many_small_tensors_arrive", "test_stranger_gets_nothing"}
assert report.skipped["test_many_small_tensors_arrive"] == "empty ones are lost"
assert len(report.passed) > 30
assert report.seconds > 0
assert str(report).startswith(f"engine Mine: {len(report.passed)} passed, 2 failed, 2 skipped in ")
assert "skipped test_many_small_tensors_arrive: empty ones are lost" in str(report)

# A second one in the same process has a class of its own.
report = check_engine(MemoryEngine)
assert report.ok, report
try:
    check_engine("memroy")
except UnknownBackendError as error:
    print(error)
"""
SMOKE = """
from wtransfer.specs.interface import Tier
from wtransfer.testing.kit import check_tier

class Forgetful(Tier):
    def __init__(self, options): pass
    def contains(self, keys): return [False for _ in keys]
    def put(self, key, data): pass
    def get(self, key, into): return False
    def remove(self, keys): pass

print(check_tier(Forgetful))
"""
INTERRUPT = f"""
import os, signal
from wtransfer.testing.kit import Report
log = Report.pytest_runtest_logreport

def interrupted(self, report):
    log(self, report)
    if report.failed:
        os.kill(os.getpid(), signal.SIGINT)

Report.pytest_runtest_logreport = interrupted
try:
    {SMOKE.strip().replace(chr(10), chr(10) + "    ")}
except KeyboardInterrupt:
    print("KeyboardInterrupt")
"""


@pytest.mark.nightly  # two engines through their whole kit
def test_kit_runs_from_python_on_a_class_of_the_main_module(tmp_path):
    # Settings and conftest files of the folder are not the kit's.
    (tmp_path / "conftest.py").write_text("1 / 0")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    (tmp_path / "mine.py").write_text(CHECK)
    # Nor are the options of the author's own runs.
    done = run_python("mine.py", cwd=tmp_path, env={**os.environ, "PYTEST_ADDOPTS": "-n 2"})
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith("Invalid weight transfer backend: memroy. ")
    assert done.stderr == ""


def run_python(*arguments, **options):
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def test_failed_smoke_test_is_reported_once(with_torch):
    done = with_torch(SMOKE)
    assert done.stderr == ""
    # The class is of a script, whose import nobody asks about.
    counts, failed, hint, _, skipped, told, number = done.stdout.splitlines()
    assert told.startswith("Test_tier_Forgetful: NOT TESTED: what the import does")
    assert number == "1 question NOT TESTED"
    assert "0 passed, 1 failed" in counts
    assert failed.startswith("FAILED test_one_value_is_put_and_found: ")
    assert hint.startswith("    Usually this means that ")
    assert skipped.startswith("skipped ")
    assert skipped.endswith(" tests: test_one_value_is_put_and_found has failed")


def test_interrupt_after_a_failure_is_raised(with_torch):
    done = with_torch(INTERRUPT)
    assert (done.stdout, done.stderr) == ("KeyboardInterrupt\n", "")


def test_findings_and_questions_that_were_not_asked_end_the_report():
    report = Report("engine mine")
    properties = [("ms_per_small_tensor", 3.0), (NOTE, "it is slow"), (NOT_TESTED, "cuda")]
    for when, own in (("call", ()), ("call", properties), ("teardown", properties)):
        report.pytest_runtest_logreport(
            pytest.TestReport(
                *("a::B::test_d", ("a", 1, "d"), {}, "passed", None, when), user_properties=own
            )
        )
        if when == "call":
            assert str(report).endswith(" s")
    assert report.not_tested == ["cuda"]
    assert str(report).endswith(" s\nit is slow\ncuda\n1 question NOT TESTED")


@pytest.mark.parametrize(
    ("kind", "backend", "attributes", "message"),
    [
        ("engine", "shm", {"engine": "gloo"}, "The engine is 'shm' already: leave the attribute"),
        ("engine", "shm", {"engine_cls": int}, "The engine is 'shm' already: leave the attribute"),
        ("engine", "shm", {"options": {}}, "Options are given beside the attributes"),
        ("engine", MemoryTier, {}, "MemoryTier'> is a tier: run the kit of tiers, not of engines"),
        ("tier", MemoryEngine, {}, "MemoryEngine'> is an engine: run the kit of engines, not of"),
        ("engine", None, {}, "name the engine that is tested, or give its class, not None"),
        ("tier", 5, {}, "name the tier that is tested, or give its class, not 5"),
    ],
)
def test_backend_or_attributes_that_do_not_fit_the_kit_are_refused(
    kind, backend, attributes, message
):
    with pytest.raises(TypeError, match=re.escape(message)):
        kit_class(kind, backend, attributes, {})


def test_class_is_not_looked_for_by_other_processes():
    assert kit_class("tier", "file", {}, {}).in_processes
    assert not kit_class("tier", MemoryTier, {}, {}).in_processes
    assert kit_class("tier", MemoryTier, {"in_processes": True}, {}).in_processes


def test_warnings_of_the_backends_own_logger_are_in_the_summary(run):
    done = run(WARNS, "-p", PLUGIN, "-k", "put_replaces or stays_when")
    _, title, summary = done.stdout.partition("said by the backends' own loggers")
    assert title, done.stdout
    # The first text of each form.
    assert "WARNING of test_mine: put 1000 bytes (in 2 tests)" in summary
    assert "not the backend's" not in summary
    assert "2 passed" in summary


def test_backend_whose_import_changes_the_process_is_caught(run):
    done = run(f"import os\nos.environ['ACME'] = 'yes'\n{WARNS}", "-p", PLUGIN, "-k", "test_import")
    said = "as test_mine.py is imported: the variable ACME is 'yes', and was not set"
    assert said in done.stdout
    assert "Usually this means that the module does at its top what belongs into" in done.stdout
    assert done.returncode == 1
