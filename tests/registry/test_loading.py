"""A backend that cannot be loaded: the error names it, keeps the cause, and affects no other."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from importlib.util import find_spec

import pytest

from wtransfer import hookimpl
from wtransfer.errors import (
    PluginBrokenError,
    PluginIncompatibleError,
    PluginTypeError,
)


def failure(registry, name, cls):
    with pytest.raises(cls) as caught:
        registry.get(name)
    error = caught.value
    assert type(error) is cls
    assert error.plugin == f"engines:{name}"
    assert (error.distribution, error.distribution_version) == ("acme-wt", "1.0")
    assert "(acme-wt 1.0)" in error.message
    return error


def broken(site, source, value="acme_module:Engine", **environ):
    site.module("acme_module", source)
    site.add("acme-wt", bad=value)
    return site.engines(**environ)


@pytest.mark.parametrize(
    ("source", "cause", "text"),
    [
        ("1 / 0", ZeroDivisionError, "ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", SystemExit, "SystemExit: 3"),
        ("raise KeyboardInterrupt", KeyboardInterrupt, "KeyboardInterrupt: "),
        ("import no_such_thing", ModuleNotFoundError, "No module named 'no_such_thing'"),
        ("def f(:", SyntaxError, "SyntaxError: "),
        ("", AttributeError, "has no attribute 'Engine'"),
        ("class Odd(BaseException): ...\nraise Odd('x')", BaseException, "Odd: x"),
    ],
)
def test_error_of_an_import_is_the_cause(site, source, cause, text):
    registry = broken(site, source)
    error = failure(registry, "bad", PluginBrokenError)
    assert isinstance(error.__cause__, cause)
    assert isinstance(error, ImportError)
    assert text in str(error)
    assert "cannot be loaded from 'acme_module:Engine'" in str(error)
    assert registry.get("shm").__name__ == "Engine"


@pytest.mark.skipif(
    sys.version_info < (3, 11),
    reason="the importlib-metadata of Python 3.10 leaves such a distribution out, as malformed",
)
@pytest.mark.parametrize(
    "value", ["acme_module", "acme module:Engine", "acme_module:", ":Engine", "a..b:C", "a:b:c", ""]
)
def test_value_of_another_form_is_not_imported(site, value):
    registry = broken(site, "raise SystemExit", value=value)
    error = failure(registry, "bad", PluginBrokenError)
    assert f"its place {value!r} is not of the form 'module:Class'" in str(error)


def test_extras_and_spaces_in_a_value_are_allowed(site):
    site.module("acme_module")
    site.add("acme-wt", good="acme_module : Engine [fast]")
    assert site.engines().get("good").__module__ == "acme_module"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("Engine = 3", "is an object of type int; expected a class like"),
        ("def Engine(config, parallel_config): ...", "is an object of type function"),
        (
            "class Engine:\n def shutdown(self): ...\n receive_weights = 3",
            (
                "is the class Engine without init_transfer_engine, receive_weights; expected "
                "init_transfer_engine, receive_weights, shutdown, as in "
                "wtransfer.engines.interface:WeightTransferEngine"
            ),
        ),
        (
            (
                "from wtransfer.engines.interface import WeightTransferEngine\n"
                "class Engine(WeightTransferEngine):\n def shutdown(self): ..."
            ),
            "is the class Engine with abstract methods left: init_transfer_engine, receive_weights",
        ),
    ],
)
def test_object_that_is_no_engine_is_refused(site, source, text):
    registry = broken(site, source)
    error = failure(registry, "bad", PluginTypeError)
    assert text in str(error)
    assert isinstance(error, TypeError)
    assert isinstance(error, AssertionError)


@pytest.mark.parametrize(
    ("word", "base"),
    [
        ("connectors", "wtransfer.connectors.interface:Connector"),
        ("specs", "wtransfer.specs.interface:OffloadingSpec"),
    ],
)
def test_connector_or_spec_without_its_base_class_is_refused(site, word, base):
    registry = site.host().registry(word)
    registry.register("fast", dict)
    with pytest.raises(PluginTypeError, match=f"is the class dict; expected a subclass of {base}"):
        registry.get("fast")


@pytest.mark.parametrize(
    ("requirement", "needs"), [("wtransfer>=9", ">=9"), ("WTransfer <0.1", "<0.1")]
)
def test_incompatible_plugin_is_refused_before_its_import(site, requirement, needs):
    site.module("acme_module", "raise SystemExit")
    site.add("acme-wt", requires=["torch", requirement], bad="acme_module:Engine")
    error = failure(site.engines(), "bad", PluginIncompatibleError)
    assert f"needs wtransfer{needs}, and wtransfer 0.1.0 is installed" in str(error)


@pytest.mark.parametrize(
    "requirement",
    ["wtransfer>=0.1,<1", "wtransfer-nccl>=9", "wtransfer>=9; extra == 'new'", "not a requirement"],
)
def test_requirement_that_holds_or_names_another_distribution_passes(site, requirement):
    site.module("acme_module")
    site.add("acme-wt", requires=[requirement], good="acme_module:Engine")
    assert site.engines().get("good").__module__ == "acme_module"


def test_development_release_of_wtransfer_satisfies_earlier_bounds(site):
    metadata = site.root / "wtransfer-0.1.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("0.1.0", "0.2.0.dev1"))
    site.module("acme_module")
    site.add("acme-wt", requires=["wtransfer>=0.1"], good="acme_module:Engine")
    assert site.engines().get("good").__module__ == "acme_module"


def test_unreadable_requirement_on_wtransfer_is_an_error(site):
    site.module("acme_module")
    site.add("acme-wt", requires=["wtransfer >== 1"], bad="acme_module:Engine")
    error = failure(site.engines(), "bad", PluginBrokenError)
    assert "its requirement 'wtransfer >== 1' cannot be read" in str(error)


def test_failed_load_is_remembered_with_its_cause(site, tmp_path):
    counter = tmp_path / "count"
    registry = broken(site, f"with open({str(counter)!r}, 'a') as f: f.write('x')\n1 / 0")
    errors = [failure(registry, "bad", PluginBrokenError) for _ in range(3)]
    assert counter.read_text() == "x"
    assert len({id(error) for error in errors}) == 3
    assert len({id(error.__cause__) for error in errors}) == 1
    assert len({str(error) for error in errors}) == 1
    # Nothing of an earlier raise is dragged along.
    assert errors[0].__traceback__ is not errors[1].__traceback__


def test_spellings_of_one_name_load_it_once(site):
    site.module("acme_module")
    site.add("acme-wt", My_fast="acme_module:Engine")
    notified = []

    class Observer:
        @hookimpl
        def wtransfer_backend_loaded(self, name):
            notified.append(name)

    registry = site.engines()
    site.board.register(Observer())
    for name in ("my-fast", "MY_FAST", "acme-wt:my_fast"):
        registry.get(name)
    assert notified == ["My_fast"]


def test_concurrent_look_ups_load_and_notify_once(site):
    site.module("acme_module", "import time\ntime.sleep(0.2)\nfrom builtin_shm import Engine")
    site.add("acme-wt", slow="acme_module:Engine")
    notified = []

    class Observer:
        @hookimpl
        def wtransfer_backend_loaded(self, cls):
            notified.append(cls)

    registry = site.engines()
    site.board.register(Observer())
    found = []
    threads = [threading.Thread(target=lambda: found.append(registry.get("slow"))) for _ in "1234"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert notified == found[:1]


@pytest.fixture
def gate(tmp_path):
    """A file whose existence lets a hanging import go on, so that no thread outlives the test."""
    path = tmp_path / "gate"
    yield path
    path.touch()
    for thread in threading.enumerate():
        if thread.name.startswith("wtransfer-import"):
            thread.join(10)
            assert not thread.is_alive()


def test_other_backends_load_while_an_import_hangs(site, gate):
    source = f"import os, time\nwhile not os.path.exists({str(gate)!r}):\n    time.sleep(0.01)"
    registry = broken(site, source, WTRANSFER_LOAD_TIMEOUT_S="30")
    caught = []

    def ask():
        try:
            registry.get("bad")
        except PluginBrokenError as error:
            caught.append(error)

    hanging = threading.Thread(target=ask)
    hanging.start()
    assert registry.get("shm").__name__ == "Engine"
    assert hanging.is_alive()
    gate.touch()
    hanging.join(10)
    assert "has no attribute 'Engine'" in str(caught[0])


def test_timeout_zero_imports_in_the_calling_thread(site):
    source = "import threading\nfrom builtin_shm import Engine\nwho = threading.current_thread()"
    registry = broken(site, source, WTRANSFER_LOAD_TIMEOUT_S="0")
    registry.get("bad")
    import acme_module

    assert acme_module.who is threading.current_thread()


def test_backend_that_looks_up_itself_during_its_import_is_broken(site):
    source = "import asked\nasked.registry.get('bad')\nclass Engine: ..."
    registry = broken(site, source, WTRANSFER_LOAD_TIMEOUT_S="0")
    site.module("asked", "registry = None")
    import asked

    asked.registry = registry
    error = failure(registry, "bad", PluginBrokenError)
    assert "has no attribute 'Engine'" in str(error)


LOAD_TWO = """
from wtransfer.registry.resolve import registry
for name in ("gloo", "file"):
    try:
        registry("engines").get(name)
    except ImportError as error:
        print(type(error.__cause__).__name__, "|", error)
    else:
        print("loaded")
"""

FAILING_BACKEND = "[torch.backends]\ntpu = acme_tpu:autoload\n"
MALFORMED = "[acme.group]\nno equals sign\n"


def load_two(site, **environ):
    # The process finds the real wtransfer.
    shutil.rmtree(site.root / "wtransfer-0.1.0.dist-info", ignore_errors=True)
    paths = [str(site.root), *filter(None, [os.environ.get("PYTHONPATH")])]
    clean = {key: text for key, text in os.environ.items() if "AUTOLOAD" not in key}
    environ = {**clean, "PYTHONPATH": os.pathsep.join(paths), **environ}
    done = subprocess.run(
        [sys.executable, "-c", LOAD_TWO], env=environ, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
@pytest.mark.parametrize(
    ("entries", "error", "cause"),
    [
        (FAILING_BACKEND, "RuntimeError", "OSError: libtpu.so: cannot open shared object file"),
        # What a listing shows of such a distribution, `installed/test_bad_plugins.py` has.
        pytest.param(MALFORMED, "TypeError", "TypeError: ", marks=pytest.mark.slow),
    ],
)
def test_distribution_that_breaks_the_import_of_torch_is_named(site, entries, error, cause):
    info = site.add("acme-tpu")
    (info / "entry_points.txt").write_text(entries)
    source = "def autoload():\n    raise OSError('libtpu.so: cannot open shared object file')"
    site.module("acme_tpu", source)
    # Torch fails to be imported again, for a reason that misleads: the first one is shown.
    for name, line in zip(("gloo", "file"), load_two(site), strict=True):
        assert line.startswith(f"{error} | The weight transfer engine {name!r} (wtransfer ")
        assert "cannot be loaded: `import torch` itself fails while torch loads the device" in line
        assert cause in line
        assert "Concerned: acme-tpu. Every backend that needs torch is affected." in line
        assert "set TORCH_DEVICE_BACKEND_AUTOLOAD=0, and start the process again" in line


# All of `installed/test_bad_plugins.py` runs so, too.
@pytest.mark.slow
def test_backends_load_without_the_device_backends_of_other_distributions(site):
    info = site.add("acme-tpu")
    (info / "entry_points.txt").write_text(FAILING_BACKEND)
    site.module("acme_tpu", "1 / 0")
    assert load_two(site, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == ["loaded", "loaded"]


def test_torch_that_cannot_be_imported_is_the_cause(site):
    site.module("torch", "raise OSError('libtorch.so: cannot open shared object file')")
    for line in load_two(site):
        assert "cannot be loaded: `import torch` itself fails: OSError: libtorch.so: " in line
        assert "Concerned" not in line
