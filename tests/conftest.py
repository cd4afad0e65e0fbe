"""What holds for every test."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

HERE = Path(__file__).parent
AUDIT = HERE / "audit"

# A runner that was started in the background hands down an ignored SIGINT, and so would every
# process that a test starts and interrupts. With a handler here, they begin with the default.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Torch's store asks for the name of every address that it connects to, and an answer that is lost
# costs it five seconds: tests of waits that end in time would take that for their own.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Threads of torch that wait for each other sleep. By default they spin, and where there are more of
# them than cores, as in runs with pytest-xdist, they spin on the core that the last one waits for.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


# Tests are collected by thousands, and none of them is garbage.
gc.disable()


class Unpickled:
    """Where every interpreter of the test run notes what it unpickles (FAULTS 25)."""

    def __init__(self, path: Path, is_own: bool = True) -> None:
        self.path = path
        self.is_own = is_own

    def found(self) -> list[dict[str, object]]:
        """Return what was noted so far, by whichever process."""
        lines = self.path.read_text("utf-8").splitlines() if self.path.exists() else []
        return [json.loads(line) for line in lines]

    def by_us(self) -> list[dict[str, object]]:
        """Return what was unpickled with a module of wtransfer on the stack."""
        return [each for each in self.found() if any(map(_is_ours, each["stack"]))]


def _is_ours(frame: str) -> bool:
    return "/wtransfer/" in frame and "/tests/" not in frame


def _watch() -> Unpickled:
    audit = runpy.run_path(str(AUDIT / "sitecustomize.py"))
    if is_own := audit["RECORD"] not in os.environ:  # pytest-xdist's workers inherit it
        folder = Path(tempfile.mkdtemp(prefix="wtransfer-tests-"))
        os.environ[audit["RECORD"]] = str(folder / "unpickled")
        # Whatever the tests start is watched as well: Python imports a `sitecustomize` it finds.
        paths = [str(AUDIT), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    audit["watch"]()
    return Unpickled(Path(os.environ[audit["RECORD"]]), is_own)


UNPICKLED = _watch()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def unpickled():
    """The record of what was unpickled, in all processes of this run."""
    return UNPICKLED


@pytest.fixture(scope="session")
def zygote():
    """Forks processes that have torch, and the modules of all folders: to import it takes 2 s."""
    from wtransfer.testing.zygote import Zygote

    folders = (
        "",
        "connectors",
        "connectors/p2p",
        "flows",
        "installed",
        "specs",
        "weight_sync/http",
    )
    preload = ["torch", "wtransfer.testing.connector", "wtransfer.weight_sync.trainer.publisher"]
    preload += ["flow_trainer", "flow_worker", "process_group_jobs", "programs", "puppet"]
    with Zygote(preload, [HERE / each for each in (*folders, "transport")]) as made:
        yield made


@pytest.fixture
def run_program(zygote, tmp_path):
    """Start programs in processes that have torch already; they are killed with the test."""
    started = []

    def start(code, *arguments, **environ):
        out, err = (tmp_path / f"program-{len(started)}.{each}" for each in ("out", "err"))
        for each in (out, err):
            each.touch()
        child = zygote.spawn("programs:run", code, arguments, environ, stdout=out, stderr=err)
        started.append(child)
        return SimpleNamespace(pid=child.pid, wait=child.wait, out=out.read_text, err=err.read_text)

    yield start
    for each in started:
        each.kill()
        each.wait(10.0)


@pytest.fixture(scope="session")
def until():
    """Wait until a condition holds."""

    def wait(condition, timeout_s=10.0):
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.005)

    return wait


class PythonCalls:
    """Notes the Python functions that this thread enters: where signal handlers strike.

    What a handler raises within a finaliser is lost, with what the finaliser has not done yet.
    """

    def __init__(self):
        self.made = []

    def __enter__(self):
        sys.setprofile(self._note)
        return self.made

    def __exit__(self, *_):
        sys.setprofile(None)

    def _note(self, frame, event, _):
        if event == "call" and frame.f_code is not PythonCalls.__exit__.__code__:
            self.made.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")


@pytest.fixture
def python_calls():
    """A context in which every Python function that is entered is noted."""
    return PythonCalls


@pytest.fixture
def one_thread():
    """Let torch compute on one thread: the same bits each time, and few steps of many threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def later(monkeypatch):
    """Let seconds pass at once, for all of this process that asks for the monotonic time.

    What waits on a lock meanwhile goes on waiting as long as it would have.
    """
    clock, passed_s = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock() + passed_s[0])

    def pass_by(seconds):
        passed_s[0] += seconds

    return pass_by


@pytest.fixture
def mount_tmpfs(tmp_path):
    """Mount file systems in memory, of sizes as ``mount`` takes them; skip where it may not."""
    places = []

    def mount(size):
        place = tmp_path / f"tmpfs-{size}"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount: {done.stderr.strip()}")
        places.append(place)
        return place

    yield mount
    for place in places:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture
def leaves_nothing():
    """Fail a test that leaves threads, descriptors or shared memory behind (FAULTS, C3)."""
    from wtransfer.testing.leftovers import Leftovers

    leftovers = Leftovers()
    yield
    leftovers.check(20.0)


@pytest.fixture(scope="session")
def files_in_shm():
    """Look for files of ours in ``/dev/shm``, but for those of benchmarks: they may run beside."""

    def look():
        found = {each.name for each in Path("/dev/shm").glob("*wtransfer*")}
        return {name for name in found if not name.startswith("wtransfer-bench-")}

    return look


@pytest.fixture
def fleet(leaves_nothing):
    """Maker of fleets in this process, which are closed at the end of the test."""
    from wtransfer.testing.fleet import Fleet

    fleets = []

    def make(source, **options):
        made = Fleet(source, **{"deadline_s": 5.0} | options)
        fleets.append(made)
        return made

    yield make
    # A publisher knows why its last round failed, and that error the frames it passed through.
    while fleets:
        fleets.pop().close()


@pytest.fixture(scope="session")
def judged():
    """Let a publisher judge its rounds by another deadline than its connections, for a while."""

    @contextlib.contextmanager
    def judged(publisher, deadline_s):
        rules = publisher._rules
        publisher._rules = dataclasses.replace(rules, deadline_s=deadline_s)
        yield
        publisher._rules = rules

    return judged


@pytest.fixture
def patient_connections(monkeypatch):
    """Let publishers bear 20 s of silence, whatever their deadline for rounds is."""
    from wtransfer.weight_sync.trainer import publisher

    make = publisher.Listener
    monkeypatch.setattr(
        publisher, "Listener", lambda *args, **named: make(*args, **named | {"deadline_s": 20.0})
    )


@pytest.fixture
def weights():
    """Names and tensors: four of one shape and dtype, so that they can be mistaken."""
    import torch

    return {f"layer.{i}": torch.arange(12.0).view(3, 4) + 100 * i for i in range(4)}


@pytest.fixture
def store(tmp_path):
    """Store of the engine ``file``."""
    from wtransfer.checkpoint.versions import VersionStore

    return VersionStore(tmp_path / "store")


@pytest.fixture
def publishing(fleet, store, weights):
    """Maker of fleets with one worker that publish to the store."""

    def make(**options):
        made = fleet(weights, engine="file", options={"path": str(store.root), **options})
        made.join()
        return made

    return make


@pytest.fixture(scope="session")
def engine_faults():
    """What goes wrong in the engines of `engines`; armed by `faults`."""
    from wtransfer.testing.faults import Faults

    return Faults()


@pytest.fixture(scope="session")
def engines(engine_faults):
    """Names of engines: ``memory`` copies on arrival, ``shm`` hands out views; both may fail."""
    from wtransfer.engines.factory import WeightTransferEngineFactory
    from wtransfer.testing.fakes import MemoryEngine

    names = {"memory": "tests-memory", "shm": "tests-shm"}
    WeightTransferEngineFactory.register_engine(names["memory"], engine_faults.wrap(MemoryEngine))
    WeightTransferEngineFactory.register_engine(names["shm"], engine_faults.wrap("shm"))
    return names


@pytest.fixture(params=["memory", "shm"])
def engine(engines, request):
    """Name of an engine; a test that asks for it runs once with each."""
    return engines[request.param]


@pytest.fixture
def faults(engine_faults):
    """What shall go wrong in the engines of this test."""
    yield engine_faults
    engine_faults.disarm()


@pytest.fixture(scope="session")
def libuv():
    """Let libuv, under torch's store, make the pipe that it keeps for the life of the process."""
    from wtransfer.transport.rendezvous import host_rendezvous

    host_rendezvous("127.0.0.1").close()


def pytest_collection_finish():
    """Spare every later collection of garbage what lives as long as the run: thousands of tests."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish(session):
    """Let the run fail if anything was unpickled where peers are heard."""
    found = UNPICKLED.by_us()
    if found:
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR  # no failure of a test


def pytest_terminal_summary(terminalreporter):
    """Say what was unpickled, and where."""
    found = UNPICKLED.by_us()
    terminalreporter.section("unpickled where peers are heard")
    terminalreporter.line(f"{len(found)} times in all processes of this run")
    for each in found[:5]:
        terminalreporter.line(json.dumps(each, indent=1))


def pytest_unconfigure():
    """Remove the record, where this run has made it."""
    if UNPICKLED.is_own:
        shutil.rmtree(UNPICKLED.path.parent, ignore_errors=True)
