"""A fleet of ``wtransfer worker`` and its publisher, brought to another release one by one."""

from __future__ import annotations

import json
import os
import runpy
import secrets
import signal
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")

from wtransfer.commands.status import UNREACHABLE

PARTS = runpy.run_path(str(Path(__file__).parents[1] / "flows" / "http_worker.py"))
WorkerProcess, PATIENCE_S = PARTS["WorkerProcess"], PARTS["PATIENCE_S"]
TOKEN = secrets.token_hex(16)
NAMES = ("w0", "w1", "w2")

# It goes on publishing while there is the file `rounds`, and says what came of each round; without
# that file it makes the file `quiet`.
PUBLISHER = """
import json, pathlib, signal, sys, time
site, address, folder, weights, number = sys.argv[1:]
sys.path.insert(0, site)
import wtransfer
from wtransfer.checkpoint.source import CheckpointSource

ended = []
signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
tensors = dict(CheckpointSource(weights).iter_full())
options = {"engine": "acme-file", "options": {"folder": folder}, "listen": address}
with wtransfer.Publisher(tensors, on_lost_worker="drop", deadline_s=10, **options) as publisher:
    publisher.wait_for_workers(3, 20)
    while not ended:
        time.sleep(0.05)
        if not pathlib.Path(folder, "rounds").exists():
            pathlib.Path(folder, "quiet").touch()
            continue
        number = int(number) + 1
        for tensor in tensors.values():
            tensor.fill_(number)
        told = {"version": f"v{number}"}
        try:
            report = publisher.publish(told["version"])
        except wtransfer.WTransferError as error:
            told |= {"error": type(error).__name__, "text": str(error)}
        else:
            here = [each for each in report.workers if each.outcome != "gone"]
            told["outcomes"] = {each.worker: each.outcome for each in here}
            told["errors"] = {each.worker: str(each.error) for each in here}
        print(json.dumps(told), flush=True)
"""


class Site:
    """Three workers that follow one publisher; each may be stopped, and started in a release."""

    def __init__(self, zygote, folder, until):
        self._zygote, self._folder = zygote, folder
        self._until = lambda condition: until(condition, PATIENCE_S)
        self.address = f"unix:@wt-test-{secrets.token_hex(8)}"
        self.publisher, self.workers = None, {}
        self._log, self._errors = folder / "rounds.log", folder / "publisher.log"
        self._log.touch()
        self.go_on()

    def go_on(self):
        (self._folder / "rounds").touch()

    def pause(self):
        """Let no round begin, and wait for the last one."""
        quiet = self._folder / "quiet"
        quiet.unlink(missing_ok=True)
        (self._folder / "rounds").unlink()
        self._until(quiet.exists)

    def start_worker(self, name, site):
        more = ["--name", name, "--join", self.address]
        made = WorkerProcess(self._zygote, self._folder, *more, token=TOKEN, site=site)
        self.workers[name] = made.until_ready()

    def start_publisher(self, site):
        number = self.rounds()[-1]["version"][1:] if self.rounds() else 0
        checkpoint = self._folder / "checkpoint"
        self.publisher = self._zygote.spawn(
            "programs:run",
            PUBLISHER,
            [str(each) for each in (site, self.address, self._folder, checkpoint, number)],
            {"WTRANSFER_TOKEN": TOKEN},
            stdout=self._log,
            stderr=self._errors,
        )

    def stop_worker(self, name):
        assert self.workers.pop(name).end()[0] == 0

    def stop_publisher(self):
        os.kill(self.publisher.pid, signal.SIGTERM)
        assert self.publisher.wait(PATIENCE_S) == 0, self._errors.read_text()

    def rounds(self):
        return [json.loads(line) for line in self._log.read_text().splitlines()]

    def until_round(self, condition):
        """Return the first round from now on that is such."""
        before = len(self.rounds())
        found = []

        def is_there():
            assert self.publisher.poll() is None, self._errors.read_text()
            found[:] = filter(condition, self.rounds()[before:])
            return found

        self._until(is_there)
        return found[0]

    def until_committed(self, *names):
        """Wait for a round that just these workers have committed."""
        expected = dict.fromkeys(names, "committed")
        return self.until_round(lambda each: each.get("outcomes") == expected)

    def status(self, *place):
        """Return the document of ``wtransfer status``, as its process printed it."""
        out = self._folder / f"status-{secrets.token_hex(4)}"
        child = self._zygote.spawn(
            "programs:run",
            "import sys\nfrom wtransfer.cli import main\nmain(sys.argv[1:])",
            ["status", *place, "--json"],
            {"WTRANSFER_TOKEN": TOKEN},
            stdout=out,
        )
        code = child.wait(PATIENCE_S)
        told = json.loads(out.read_text())
        assert told["code"] == code
        return told

    def of_publisher(self):
        return self.status("--join", self.address)

    def of_workers(self):
        to = [part for each in self.workers.values() for part in ("--to", each.url)]
        return self.status(*to)

    def until_one_version(self):
        """Wait for a look, between two rounds, at which all hold one."""
        told = {}

        def agree():
            told.update(self.of_publisher())
            return told["code"] == 0

        self._until(agree)
        assert {each["state"] for each in told["workers"]} == {"serving"}
        assert {each["version"] for each in told["workers"]} == {told["version"]}
        return tuple({each["worker"] for each in told[group]} for group in ("workers", "lost"))

    def close(self):
        for each in (*(each.child for each in self.workers.values()), self.publisher):
            if each is not None and each.poll() is None:
                each.kill()
                each.wait(10.0)


@pytest.fixture
def fleet_of(zygote, tmp_path, until):
    made = Site(zygote, tmp_path, until)

    def start(site):
        for name in NAMES:
            made.start_worker(name, site)
        made.start_publisher(site)
        made.until_committed(*NAMES)
        return made

    yield start
    made.close()


@pytest.fixture(scope="module")
def release(pip_install):
    return lambda version, contract: pip_install(
        "third_party_engine", version=version, contract_version=contract
    )


def upgrade_worker(fleet, name, site):
    fleet.stop_worker(name)
    fleet.start_worker(name, site)


def upgrade_workers(fleet, site):
    for name in NAMES:
        others = [each for each in NAMES if each != name]
        fleet.stop_worker(name)
        fleet.until_committed(*others)
        assert fleet.until_one_version() == (set(others), {name})
        fleet.start_worker(name, site)
        fleet.until_committed(*NAMES)
        assert fleet.until_one_version() == (set(NAMES), set())


def upgrade_publisher(fleet, site):
    fleet.stop_publisher()
    last = fleet.rounds()[-1]["version"]
    assert fleet.of_publisher()["code"] == UNREACHABLE
    told = fleet.of_workers()
    # They serve on.
    assert (told["code"], {each["version"] for each in told["workers"]}) == (0, {last})
    fleet.start_publisher(site)
    fleet.until_committed(*NAMES)
    assert fleet.until_one_version() == (set(NAMES), set())


@pytest.mark.slow
@pytest.mark.parametrize(
    "steps",
    [(upgrade_workers, upgrade_publisher), (upgrade_publisher, upgrade_workers)],
    ids=["workers-first", "publisher-first"],
)
def test_patch_release_comes_to_a_fleet_in_any_order_while_rounds_go_on(fleet_of, release, steps):
    fleet = fleet_of(release("1.2.3", "1.0"))
    for step in steps:
        step(fleet, release("1.2.4", "1.0"))
    for each in fleet.rounds():
        # Every worker has committed, but for one that stops or joins within the round.
        others = [word for word in each["outcomes"].values() if word != "committed"]
        assert others in ([], ["dropped"], ["lost"], ["behind"])


def refusal(there, here):
    (version, contract), (own_version, own_contract) = there, here
    return (
        f"weight transfer engine 'acme-file' comes from acme-file-engine {version} on the trainer "
        f"and from acme-file-engine {own_version} here (contract {own_contract}, there {contract});"
        " install releases of one contract on both sides"
    )


OLD, NEXT = ("1.2.3", "1.0"), ("1.3.0", "1.1")


@pytest.mark.slow
@pytest.mark.parametrize(
    "is_trainer_first", [False, True], ids=["workers-first", "publisher-first"]
)
def test_another_contract_ends_rounds_until_all_have_it_and_every_worker_serves_on(
    fleet_of, release, is_trainer_first
):
    fleet = fleet_of(release(*OLD))
    fleet.pause()
    last = fleet.rounds()[-1]["version"]
    if is_trainer_first:
        fleet.stop_publisher()
        fleet.start_publisher(release(*NEXT))
    else:
        upgrade_worker(fleet, "w0", release(*NEXT))
    fleet.go_on()
    there, here = (NEXT, OLD) if is_trainer_first else (OLD, NEXT)
    if not is_trainer_first:
        # One that has held no version of this publisher ends no round: it is left out.
        told = fleet.until_round(lambda each: each.get("outcomes", {}).get("w0") == "behind")
        assert refusal(there, here) in told["errors"]["w0"]
        for name in NAMES[1:]:
            upgrade_worker(fleet, name, release(*NEXT))
        fleet.stop_publisher()
        fleet.start_publisher(release(*NEXT))
        fleet.until_committed(*NAMES)
        assert fleet.until_one_version() == (set(NAMES), set())
        return
    refused = fleet.until_round(lambda each: "error" in each)
    assert refused["error"] == "PluginIncompatibleError"
    assert refusal(there, here) in refused["text"]
    told = fleet.of_publisher()
    assert refusal(there, here) in told["last_error"]
    # Every worker serves what it had.
    expected = dict.fromkeys(NAMES, (last, "serving"))
    told = fleet.of_workers()
    assert {
        each["worker"]: (each["version"], each["state"]) for each in told["workers"]
    } == expected
    assert told["code"] == 0
    for name in NAMES:
        upgrade_worker(fleet, name, release(*NEXT))
    fleet.until_committed(*NAMES)
    assert fleet.until_one_version() == (set(NAMES), set())
