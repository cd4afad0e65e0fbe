"""``wtransfer worker`` as a user runs it."""

from __future__ import annotations

import math
import os
import re
import runpy
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")

from wtransfer import Publisher
from wtransfer.errors import HostsError, SchemaError
from wtransfer.transport.digests import digest
from wtransfer.weight_sync.http.client import HttpClient

PARTS = runpy.run_path(str(Path(__file__).with_name("http_worker.py")))
WorkerProcess, WEIGHTS = PARTS["WorkerProcess"], PARTS["WEIGHTS"]


@pytest.fixture
def start(zygote, tmp_path):
    processes = []

    def make(*arguments, **options):
        processes.append(WorkerProcess(zygote, tmp_path, *arguments, **options))
        return processes[-1]

    yield make
    for each in processes:
        each.end()


def test_its_weights_are_its_own_whatever_happens_to_the_files(start, tmp_path):
    worker = start().until_ready()
    client = HttpClient(worker.url, worker.token)
    expected = {name: digest(tensor) for name, tensor in WEIGHTS.items()}
    file = tmp_path / "checkpoint" / "model.safetensors"
    with file.open("r+b") as opened:
        opened.write(b"\xff" * file.stat().st_size)
    assert client.weight_info(digests=True)["digests"] == expected
    # Pages of a mapping that lie behind the end are a signal for whoever reads them.
    os.truncate(file, 0)
    assert client.weight_info(digests=True)["digests"] == expected
    assert worker.child.poll() is None


@pytest.mark.parametrize("commit", ["adopt", "copy"])
def test_worker_command_commits_a_published_version_and_logs_it(start, commit, until):
    worker = start("--commit", commit).until_ready()
    changed = {name: tensor + 1 for name, tensor in WEIGHTS.items()}
    with Publisher(changed, hosts=[worker.url], host_token=worker.token) as publisher:
        report = publisher.publish("step-1")
    worker.until_it_says(f"now 'step-1': {report.fingerprint} (verified by digests)")
    digests = HttpClient(worker.url, worker.token).weight_info(digests=True)["digests"]
    assert digests == {name: digest(tensor) for name, tensor in changed.items()}

    def scrape():
        return worker.ask(b"GET /metrics\r\n\r\n")[0].decode()

    counted = 'wtransfer_rounds_ended_total{error="",outcome="committed",side="worker"} 1.0'
    # The worker waits for no observer.
    until(lambda: counted in scrape())
    scraped = scrape()
    assert f'fingerprint="{report.fingerprint}",state="serving",version="step-1"' in scraped


def test_worker_command_casts_masters_of_more_bits_if_told_to_and_says_how_if_not(start):
    masters = {name: tensor.double() for name, tensor in WEIGHTS.items()}
    for arguments in ((), ("--cast",)):
        worker = start(*arguments).until_ready()
        with Publisher(masters, hosts=[worker.url], host_token=worker.token) as publisher:
            if arguments:
                publisher.publish("step-1").raise_unless_ok()
                continue
            with pytest.raises(SchemaError, match="floating dtypes: wtransfer worker --cast"):
                publisher.publish("step-1")
    held = HttpClient(worker.url, worker.token).weight_info(digests=True)["digests"]
    assert held == {name: digest(tensor) for name, tensor in WEIGHTS.items()}


def test_worker_command_joins_the_publisher_at_the_given_address(start):
    with Publisher(WEIGHTS, token="shared") as publisher:
        start("--join", publisher.address, token="shared")
        publisher.wait_for_workers(1, timeout_s=20)
        assert publisher.publish("step-1").ok


CLOCK = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  "


def test_worker_command_says_what_it_waits_for_and_when_that_is_there(start, tmp_path):
    folder = tmp_path / "ty\x1b[2Jpo"
    missing = start("--join", f"file:{folder}")
    address = f"unix:@wt-test-{secrets.token_hex(8)}"
    worker = start("--log-level", "info", "--join", address, token="shared")
    # It cannot steer a terminal.
    folder = tmp_path / r"ty\x1b[2Jpo"
    missing.until_it_says(f"waiting for file:{folder}: {folder} does not exist; is the path right?")
    worker.until_it_says(f"waiting for {address}: it is not reached; is it there?")
    with Publisher(WEIGHTS, token="shared", listen=address) as publisher:
        worker.until_it_says(f"joined {address}")
        publisher.wait_for_workers(1)
        publisher.publish("step-1").raise_unless_ok()
        worker.until_it_says("now 'step-1'")
    worker.until_it_says(f"lost {address}: dialing again")
    for said in ("waiting for", "joined", "now", "lost"):
        assert len(re.findall(f"{CLOCK}{said}", worker.output, re.MULTILINE)) == 1, worker.output
    assert re.search(r"^\d[\d: ,-]+ INFO wtransfer\.\S+committer: ", worker.output, re.MULTILINE)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly_within_a_second(start, number, until):
    fastest_s = math.inf
    # One time in three at least, for a busy machine stands still for seconds.
    for _ in range(3):
        worker = start().until_ready()
        with Publisher(
            WEIGHTS, hosts=[worker.url], return_s=0, host_token=worker.token
        ) as publisher:
            publisher.publish("step-1")
            begin = time.monotonic()
            os.kill(worker.child.pid, number)
            assert worker.child.wait(10.0) == 0, worker.output
            fastest_s = min(fastest_s, time.monotonic() - begin)
            until(lambda: not publisher.hosts)
            with pytest.raises(HostsError, match="absent"):
                publisher.publish("step-2")
        # Half of it is the interpreter's exit, with torch in it.
        if fastest_s < 2:
            break
    assert fastest_s < 2


def test_without_a_token_it_makes_one_and_shows_it_once(start, zygote, tmp_path):
    start().end()  # for the checkpoint that it makes
    log = tmp_path / "tokenless.log"
    child = zygote.spawn(
        "wtransfer.cli:main",
        ["worker", "--checkpoint", str(tmp_path / "checkpoint")],
        stdout=log,
        stderr=log,
    )
    end = time.monotonic() + 20
    while not log.exists() or "ready: " not in log.read_text():
        assert time.monotonic() < end
        time.sleep(0.01)
    output = log.read_text()
    (token,) = re.findall(r"^token: (\S+) ", output, re.MULTILINE)
    (url,) = re.findall(r"^ready: (\S+) ", output, re.MULTILINE)
    assert HttpClient(url, token).weight_info()["state"] == "fresh"
    assert output.count(token) == 1
    os.kill(child.pid, signal.SIGTERM)
    assert child.wait(10.0) == 0


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--listen", "somewhere"], 2, "Error: 'somewhere' is no address"),
        (["--join", "somewhere"], 2, "Error: 'somewhere' is no address"),
        (["--token-file", "/nowhere"], 2, "token file '/nowhere'"),
        (["--checkpoint", "/nowhere"], 2, "does not exist"),
        (["--commit", "perhaps"], 2, "is not one of"),
        (["--accept-unsealed", "file"], 2, "No such option"),
        (["--checkpoint", "/proc"], 1, "is no checkpoint"),
    ],
)
def test_usage_errors_exit_with_2_and_failures_with_1(start, arguments, code, text):
    worker = start(*arguments)
    assert worker.child.wait(20.0) == code
    assert re.search(text, worker.output), worker.output
    assert "Traceback" not in worker.output


def test_help_imports_neither_torch_nor_a_server():
    code = (
        "import sys\nfrom wtransfer.cli import main\n"
        "try:\n    main(['worker', '--help'])\n"
        "finally:\n    print({'torch', 'uvicorn'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.endswith("set()\n")
