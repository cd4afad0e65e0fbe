"""An engine from outside the repository works by its name, and gets the promises for nothing.

Its worker side is the seed's contract and one line, its trainer side is in the style of vLLM's;
neither knows of digests, versions or other workers (`third_party_engine`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PATIENCE_S = 30.0
TOKEN = "third-party-tests-" + "0" * 32


@pytest.fixture(scope="module")
def site(pip_install):
    """The folder into which pip has installed the engine."""
    return pip_install("third_party_engine")


class Peer:
    """One process."""

    def __init__(self, site, *arguments):
        clean = {
            key: value for key, value in os.environ.items() if not key.startswith("WTRANSFER_")
        }
        path = os.pathsep.join(filter(None, [str(site), clean.get("PYTHONPATH")]))
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "third_party_peer.py"), *arguments],
            env={**clean, "PYTHONPATH": path, "WTRANSFER_TOKEN": TOKEN},
            cwd=site,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self.process.pid

    def say(self, *order):
        self.process.stdin.write(" ".join(map(str, order)) + "\n")
        self.process.stdin.flush()

    def hear(self):
        line = self.process.stdout.readline()
        assert line, "the process has ended"
        return json.loads(line)

    def ask(self, *order):
        self.say(*order)
        return self.hear()

    def end(self):
        self.process.kill()
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


class Site:
    """A publisher and two workers."""

    def __init__(self, site, folder, stack):
        def start(*arguments):
            peer = Peer(site, *arguments)
            stack.callback(peer.end)
            return peer

        self.folder = folder
        self.publisher = start("publisher", str(folder))
        address = self.publisher.hear()["address"]
        self.workers = [start("worker", f"w{i}", address) for i in range(2)]
        for worker in self.workers:
            worker.hear()
        assert self.publisher.ask("wait", 2) == {"workers": 2}

    def states(self):
        return [worker.ask("state") for worker in self.workers]

    def holds(self, version, report):
        """Whether both workers hold these weights, bit for bit."""
        return [
            {k: state[k] for k in ("version", "fingerprint", "contents")} for state in self.states()
        ] == [
            {
                "version": version,
                "fingerprint": report["fingerprint"],
                "contents": report["contents"],
            }
        ] * 2


@pytest.fixture
def site_of_three(site, tmp_path):
    with contextlib.ExitStack() as stack:
        yield Site(site, tmp_path, stack)


def test_engine_is_found_by_name_with_its_distribution_and_not_imported(site):
    code = (
        "from wtransfer.registry.resolve import registry; import sys;"
        "r = registry('engines').record('acme-file');"
        "print(r.distribution, r.version, 'acme_file_engine' in sys.modules)"
    )
    env = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["acme-file-engine", "1.2.3", "False"]


def test_engine_has_at_most_70_lines_and_none_on_digests_or_versions():
    files = (HERE / "third_party_engine" / "src").rglob("*.py")
    lines = [line for file in files for line in file.read_text().splitlines() if line.strip()]
    assert len(lines) <= 70
    assert not any("digest" in line or "version" in line for line in lines)


@pytest.mark.slow
def test_rounds_through_it_are_proven_and_leave_nothing(site_of_three):
    for number in (1, 2, 3):
        report = site_of_three.publisher.ask("publish", number)
        assert report["ok"], report
        assert report["outcomes"] == {"w0": "committed", "w1": "committed"}
        assert report["proven"] == [True, True]
        assert site_of_three.holds(f"v{number}", report)
    for peer in [*site_of_three.workers, site_of_three.publisher]:
        assert peer.ask("close") == {"closed": True}
        assert peer.process.wait(PATIENCE_S) == 0
    assert list(site_of_three.folder.iterdir()) == []


# FAULTS 2, 6: promises 1 and 2, without a line of its own.
@pytest.mark.parametrize(
    ("damage", "error"),
    [
        pytest.param("drop", "IncompleteUpdateError", marks=pytest.mark.nightly),
        pytest.param("flip", "DigestMismatchError", marks=pytest.mark.slow),
    ],
)
def test_a_tensor_lost_or_changed_on_one_worker_keeps_both_on_the_old_version(
    site_of_three, damage, error
):
    first = site_of_three.publisher.ask("publish", 1)
    assert site_of_three.workers[1].ask("damage", damage) == {"damaged": damage}
    failed = site_of_three.publisher.ask("publish", 2)
    assert error in failed["kinds"]
    assert (failed["worker"], failed["piece"]) == ("w1", "norm")
    assert site_of_three.holds("v1", first)
    third = site_of_three.publisher.ask("publish", 3)
    assert third["ok"]
    assert site_of_three.holds("v3", third)


# FAULTS 14: promise 4, without a line of its own.
@pytest.mark.slow
def test_a_worker_that_is_stopped_is_named_in_time(site_of_three):
    first = site_of_three.publisher.ask("publish", 1)
    os.kill(site_of_three.workers[1].pid, signal.SIGSTOP)
    failed = site_of_three.publisher.ask("publish", 2)
    assert "TimeoutError" in failed["kinds"]
    assert "w1" in failed["text"]
    os.kill(site_of_three.workers[1].pid, signal.SIGCONT)
    assert site_of_three.holds("v1", first)
    assert site_of_three.publisher.ask("wait", 2) == {"workers": 2}
    third = site_of_three.publisher.ask("publish", 3)
    assert third["ok"], third
    assert site_of_three.holds("v3", third)


# FAULTS 42.
@pytest.mark.parametrize(
    "changes",
    [{"version": "1.2.4"}, pytest.param({"name": "acme-fork"}, marks=pytest.mark.slow)],
    ids=str,
)
def test_a_worker_with_the_engine_in_another_version_or_from_elsewhere_refuses(
    pip_install, tmp_path, changes
):
    trainers = pip_install("third_party_engine")
    workers = pip_install("third_party_engine", **changes)
    name, version = changes.get("name", "acme-file-engine"), changes.get("version", "1.2.3")
    with contextlib.ExitStack() as stack:
        publisher = Peer(trainers, "publisher", str(tmp_path))
        stack.callback(publisher.end)
        address = publisher.hear()["address"]
        for site, worker in ((trainers, "same"), (workers, "other")):
            peer = Peer(site, "worker", worker, address)
            stack.callback(peer.end)
            peer.hear()
        assert publisher.ask("wait", 2) == {"workers": 2}
        failed = publisher.ask("publish", 1)
        assert "PluginIncompatibleError" in failed["kinds"]
        assert failed["worker"] == "other"
        assert (
            "weight transfer engine 'acme-file' comes from acme-file-engine 1.2.3 on the trainer "
            f"and from {name} {version} here; install the same distribution and version on both "
            "sides"
        ) in failed["text"]
        assert peer.ask("state")["version"] is None


def test_a_worker_without_the_engine_says_which_distribution_the_trainer_has(pip_install, tmp_path):
    trainers = pip_install("third_party_engine")
    with contextlib.ExitStack() as stack:
        publisher = Peer(trainers, "publisher", str(tmp_path))
        stack.callback(publisher.end)
        worker = Peer(tmp_path, "worker", "without", publisher.hear()["address"])
        stack.callback(worker.end)
        worker.hear()
        assert publisher.ask("wait", 1) == {"workers": 1}
        failed = publisher.ask("publish", 1)
        assert "UnknownBackendError" in failed["kinds"]
        assert "(the trainer has it from acme-file-engine 1.2.3)" in failed["text"]


@pytest.mark.slow
def test_patch_releases_of_one_contract_work_together(pip_install, tmp_path):
    releases = [
        pip_install("third_party_engine", version=version, contract_version="1.0")
        for version in ("1.2.3", "1.2.4")
    ]
    next_contract = pip_install("third_party_engine", version="1.3.0", contract_version="1.1")
    for trainers, workers in (releases, releases[::-1]):
        with contextlib.ExitStack() as stack:
            publisher = Peer(trainers, "publisher", str(tmp_path))
            stack.callback(publisher.end)
            address = publisher.hear()["address"]
            for site, name in ((trainers, "same"), (workers, "other")):
                peer = Peer(site, "worker", name, address)
                stack.callback(peer.end)
                peer.hear()
            assert publisher.ask("wait", 2) == {"workers": 2}
            done = publisher.ask("publish", 1)
            assert done["outcomes"] == {"same": "committed", "other": "committed"}, done
            late = Peer(next_contract, "worker", "next", address)
            stack.callback(late.end)
            late.hear()
            number, cause = 2, "(contract 1.1, there 1.0)"
            # Until it has joined, and has refused.
            while cause not in (done := publisher.ask("publish", number))["errors"].get("next", ""):
                number += 1
            assert done["outcomes"] == {
                "same": "committed",
                "other": "committed",
                "next": "behind",
            }, done
            assert "PluginIncompatibleError" in done["errors"]["next"]
            assert peer.ask("state")["version"] == f"v{number}"
            assert late.ask("state")["version"] is None
