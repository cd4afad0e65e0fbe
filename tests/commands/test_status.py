"""``wtransfer status``, as an operator runs it, against workers that are processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import secrets
import signal
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("uvicorn")

from wtransfer import Publisher
from wtransfer.cli import main
from wtransfer.commands.status import DIFFERS, UNREACHABLE
from wtransfer.testing.fleet import Fleet, GatedSource
from wtransfer.transport.channel import Listener, random_address
from wtransfer.weight_sync.messages import CODEC, FleetStatus

PARTS = runpy.run_path(str(Path(__file__).parents[1] / "flows" / "http_worker.py"))
WorkerProcess, WEIGHTS = PARTS["WorkerProcess"], PARTS["WEIGHTS"]
TOKEN = secrets.token_hex(16)
USAGE = 2
OTHER = "0" * 32


@pytest.fixture(autouse=True)
def token_around(monkeypatch):
    monkeypatch.setenv("WTRANSFER_TOKEN", TOKEN)


@pytest.fixture
def start(zygote, tmp_path):
    processes = []

    def make(*arguments):
        processes.append(WorkerProcess(zygote, tmp_path, *arguments, token=TOKEN))
        return processes[-1]

    yield make
    for each in processes:
        if each.child.poll() is None:
            os.kill(each.child.pid, signal.SIGKILL)
            each.child.wait(10.0)


def status(*arguments, to=()):
    targets = [part for each in to for part in ("--to", getattr(each, "url", each))]
    return CliRunner().invoke(main, ["status", *arguments, *targets], catch_exceptions=False)


def document(*arguments, to=()):
    done = status(*arguments, "--json", to=to)
    assert done.stderr == ""
    read = json.loads(done.stdout)
    assert (read["code"], read["ok"]) == (done.exit_code, done.exit_code == 0)
    return read


def held(read):
    return {each["worker"]: (each["version"], each["state"]) for each in read["workers"]}


def test_fleet_of_which_one_is_behind_one_is_killed_and_one_restarted(start, until):
    workers = [start("--name", f"w{i}") for i in range(3)]
    for each in workers:
        each.until_ready()
    first, second = workers[:2]
    read = document(to=workers)
    assert (read["code"], set(held(read).values())) == (0, {(None, "fresh")})
    with Publisher(WEIGHTS, hosts=[first.url, second.url], token=TOKEN) as publisher:
        report = publisher.publish("v1").raise_unless_ok()
        # The third has no part in it.
        read = document(to=workers)
        assert held(read) == {
            "w0": ("v1", "serving"),
            "w1": ("v1", "serving"),
            "w2": (None, "fresh"),
        }
        assert read["code"] == DIFFERS
        assert read["workers"][0]["fingerprint"] == report.fingerprint
        assert read["workers"][0]["host"] == first.url
        of_publisher = ("--join", publisher.address)
        assert document(*of_publisher)["code"] == 0
        os.kill(second.child.pid, signal.SIGKILL)
        until(lambda: document(*of_publisher)["code"] == UNREACHABLE)
        read = document(*of_publisher)
        assert held(read) == {"w0": ("v1", "serving")}
        assert [(each["worker"], each["version"]) for each in read["lost"]] == [("w1", "v1")]
        assert list(read["unreachable"]) == [second.url]
        done = status(to=[first, second])
        assert done.exit_code == UNREACHABLE
        assert f"{second.url}  not reached: cannot reach {second.url}" in done.stderr
        # Its name again, at an address of its own.
        again = start("--name", "w1", "--join", publisher.address).until_ready()
        until(lambda: held(document(*of_publisher)).get("w1") == ("v1", "serving"))
        read = document(*of_publisher, to=[first, again])
        # The host that was named is absent, whoever has taken the name of its worker.
        assert (read["code"], len(read["workers"]), read["lost"]) == (UNREACHABLE, 2, [])
        publisher.remove(second.url)
        read = document(*of_publisher, to=[first, again])
        assert (read["code"], len(read["workers"]), read["lost"]) == (0, 2, [])


def test_probe_tells_by_its_exit_code_whether_these_weights_are_served(start):
    worker = start("--name", "w0").until_ready()
    with Publisher(WEIGHTS, hosts=[worker.url], token=TOKEN) as publisher:
        fingerprint = publisher.publish("v1").fingerprint
        for ready, code in ((fingerprint, 0), (OTHER, DIFFERS)):
            done = status("--ready", ready, to=[worker])
            assert (done.exit_code, done.stdout) == (code, "")
            assert (f"w0  not ready: serving, holds {fingerprint}" in done.stderr) == bool(code)
        # Paused or not, it does not know.
        done = status("--ready", fingerprint, "--join", publisher.address, to=[worker])
        assert (done.exit_code, "does not know of pauses" in done.stderr) == (USAGE, True)
    worker.ask(b"POST /pause\r\n\r\n")
    done = status("--ready", fingerprint, to=[worker])
    assert (done.exit_code, "paused (abort)" in done.stderr) == (DIFFERS, True)
    worker.end()
    assert status("--ready", fingerprint, to=[worker]).exit_code == UNREACHABLE


def test_round_under_way_is_shown_with_its_phase_and_bytes_and_the_observer_is_no_member(until):
    source = GatedSource({f"w{i}": torch.zeros(250_000) for i in range(2)})
    source.gate.clear()
    options = {"bucket_nbytes": 1}
    with Fleet(source, options=options, token=TOKEN) as fleet, contextlib.ExitStack() as stack:
        stack.callback(source.gate.set)
        session = fleet.join({f"w{i}": torch.zeros(250_000) for i in range(2)}).session
        round_ = fleet.publisher.publish("v1", wait=False)
        until(lambda: session.status().update and session.status().update.staged_nbytes == 10**6)
        until(lambda: round_.progress() == {"worker-0": 10**6})
        read = document("--join", fleet.publisher.address)
        (worker,) = read["workers"]
        assert (read["round"]["round_id"], read["round"]["phase"]) == (round_.round_id, "transfer")
        assert (worker["staged_nbytes"], worker["nbytes"]) == (10**6, 2 * 10**6)
        assert "transfer 1.0 of 2.0 MB" in status("--join", fleet.publisher.address).stdout
        update = session.status().update
        assert (update.round_id, update.phase) == (round_.round_id, "transfer")
        before = time.monotonic()
        source.gate.set()
        assert len(fleet.finish(round_).workers) == 1
        read = document("--join", fleet.publisher.address)
        # Both count from the commit, which came after `before`.
        for since_s in (read["workers"][0]["since_s"], session.status().since_s):
            assert since_s <= time.monotonic() - before
        assert (read["round"], read["last_error"], session.status().update) == (None, None, None)


def test_last_error_of_a_round_and_of_its_worker_are_shown():
    with Fleet({"a": torch.zeros(4)}, token=TOKEN) as fleet:
        fleet.join({"b": torch.zeros(4)})
        with pytest.raises(ValueError, match="names") as caught:
            fleet.publish("v1")
        read = document("--join", fleet.publisher.address)
        assert str(caught.value)[:40] in read["last_error"]
        assert read["workers"][0]["last_error"][:20] in read["last_error"]
        assert "last error: " in status("--join", fleet.publisher.address).stdout


def test_what_a_publisher_says_cannot_steer_a_terminal():
    said = FleetStatus("v1", "\x1b[2J", [], [], {}, None, None)
    listener = Listener(
        CODEC,
        address=random_address(),
        token=TOKEN,
        on_open=lambda _connection: None,
        on_message=lambda connection, _message: connection.send(said),
        on_close=lambda _connection, _error: None,
        deadline_s=5.0,
    )
    done = status("--join", listener.address)
    listener.close()
    assert (done.exit_code, done.stdout.count("\x1b"), "[2J" in done.stdout) == (0, 0, True)


class LabelOnly(BaseHTTPRequestHandler):
    """A stand-in for vLLM's server: it tells its label, and asks for no token."""

    def do_GET(self):
        body = json.dumps({"weight_version": self.server.label}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def serve():
    servers = []

    def make(label):
        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), LabelOnly))
        servers[-1].label = label
        threading.Thread(target=servers[-1].serve_forever, args=(0.02,)).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield make
    for each in servers:
        each.shutdown()
        each.server_close()


@pytest.mark.parametrize(
    ("labels", "code"),
    [(("v1", "v1"), 0), (("v1", "v2"), DIFFERS), (("empty", "empty"), DIFFERS)],
)
def test_serving_engines_that_tell_a_label_alone_are_compared_by_it(serve, labels, code):
    urls = [serve(label) for label in labels]
    assert document(to=urls)["code"] == code
    # Its weights may be others: a label is no proof.
    assert status("--ready", OTHER, to=urls).exit_code == DIFFERS


def test_versions_that_differ_count_before_a_host_that_does_not_answer(serve):
    same, other, missing = serve("v1"), serve("v2"), f"unix:@wt-test-{secrets.token_hex(8)}"
    for to, code in (([same, missing], UNREACHABLE), ([same, other, missing], DIFFERS)):
        read = document(to=to)
        assert (read["code"], [*read["unreachable"]]) == (code, [missing])
    assert status("--ready", OTHER, to=[same, missing]).exit_code == DIFFERS


def test_answers_that_are_no_worker_s_are_no_state(serve):
    url = serve({"of": "another shape"})
    read = document(to=[url])
    assert (read["code"], read["workers"]) == (UNREACHABLE, [])
    assert "no worker of wtransfer" in read["unreachable"][url]


@pytest.mark.parametrize("place", ["--join", "--to"])
def test_silent_peers_are_given_up_at_the_deadline(place):
    with socket.socket(socket.AF_UNIX) as silent:
        name = f"wt-test-{secrets.token_hex(8)}"
        silent.bind(f"\0{name}")
        silent.listen()
        done = status(place, f"unix:@{name}", "--deadline", "0.2")
    assert done.exit_code == UNREACHABLE
    assert f"unix:@{name}  not reached" in done.stderr
    assert "within 0.2 s" in done.stderr
    assert ("a worker is asked by --to" in done.stderr) == (place == "--join")


def test_publisher_that_lets_observers_in_and_never_answers_is_given_up_at_the_deadline():
    listener = Listener(
        CODEC,
        address=random_address(),
        token=TOKEN,
        on_open=lambda _connection: None,
        on_message=lambda _connection, _message: None,
        on_close=lambda _connection, _error: None,
        deadline_s=0.4,
    )
    # Its pings are no answer.
    done = status("--join", listener.address, "--deadline", "0.3")
    listener.close()
    assert done.exit_code == UNREACHABLE
    assert "within 0.3 s" in done.stderr


def test_wrong_token_and_no_publisher_are_told_apart(monkeypatch):
    with Publisher(WEIGHTS, token=TOKEN) as publisher:
        monkeypatch.setenv("WTRANSFER_TOKEN", "another")
        done = status("--join", publisher.address)
        assert done.exit_code == UNREACHABLE
        assert "could not prove that it knows the token" in done.stderr
    done = status("--join", publisher.address)
    assert (done.exit_code, "cannot reach" in done.stderr) == (UNREACHABLE, True)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "give a publisher"),
        (["--join", "somewhere"], "is no address"),
        (["--to", "somewhere"], "no worker's URL"),
        (["--join", "unix:@x", "--token-file", "/nowhere"], "token file '/nowhere'"),
        (["--join", "unix:@x", "--watch", "--json"], "--watch is for people"),
        (["--join", "unix:@x", "--ready", OTHER], "ask the workers by --to"),
        (["--to", "unix:@x", "--ready", ""], "is no fingerprint"),
        (["--to", "unix:@x", "--ready", "v1"], "is no fingerprint"),
    ],
)
def test_usage_errors(arguments, text):
    done = status(*arguments)
    assert (done.exit_code, text in done.stderr) == (USAGE, True)


def test_publisher_is_asked_with_a_token_only(monkeypatch):
    monkeypatch.delenv("WTRANSFER_TOKEN")
    done = status("--join", "unix:@x")
    assert (done.exit_code, "needs the token" in done.stderr) == (USAGE, True)


def test_signal_ends_a_look_that_waits_for_an_answer(zygote, tmp_path):
    log, name = tmp_path / "status.log", f"wt-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"\0{name}")
        silent.listen()
        silent.settimeout(20.0)
        place = ["status", "--to", f"unix:@{name}", "--deadline", "30"]
        child = zygote.spawn("wtransfer.cli:main", place, stdout=log, stderr=log)
        # The probe of the client, and its request: from here on it waits.
        connections = [silent.accept()[0] for _ in range(2)]
        os.kill(child.pid, signal.SIGTERM)
        assert child.wait(10.0) == 128 + signal.SIGTERM
        for each in connections:
            each.close()
    assert log.read_text() == ""


@pytest.mark.slow
def test_watching_looks_again_until_it_is_ended(zygote, tmp_path, until):
    log = tmp_path / "watch.log"
    with Fleet({"a": torch.zeros(4)}, token=TOKEN) as fleet:
        fleet.join()
        token_file = tmp_path / "token"
        token_file.touch(mode=0o600)
        token_file.write_text(TOKEN)
        options = ["--token-file", str(token_file)]
        child = zygote.spawn(
            "wtransfer.cli:main",
            ["status", "--watch", "--join", fleet.publisher.address, *options],
            stdout=log,
            stderr=log,
        )
        until(lambda: log.exists() and "fresh" in log.read_text())
        fleet.publish("v1")
        until(lambda: "serving" in log.read_text())
        os.kill(child.pid, signal.SIGTERM)
        assert child.wait(10.0) == 0, log.read_text()
