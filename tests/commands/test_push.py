"""``wtransfer push``, as a user runs it, into workers behind HTTP."""

from __future__ import annotations

import json
import logging
import os
import re
import runpy
import secrets
import signal
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file

pytest.importorskip("uvicorn")

from wtransfer import TrainerInitInfo
from wtransfer.cli import main
from wtransfer.commands.push import NOT_EVERYWHERE, typed_options
from wtransfer.testing.contents import contents
from wtransfer.weight_sync.messages import Vote
from wtransfer.weight_sync.worker import participant
from wtransfer.weight_sync.worker.session import WorkerSession

HTTP = Path(__file__).parents[1] / "weight_sync" / "http"
HttpWorker = runpy.run_path(str(HTTP / "worker_in_process.py"))["HttpWorker"]
TOKEN = secrets.token_hex(16)
pytestmark = pytest.mark.usefixtures("leaves_nothing")
PATIENCE_S = 25.0  # less than the deadline of a push: what ends within it was ended
WEIGHTS = {f"layer.{i}": torch.arange(12.0).view(3, 4) + 100 * i for i in range(4)}


@pytest.fixture(autouse=True)
def token_around(monkeypatch):
    monkeypatch.setenv("WTRANSFER_TOKEN", TOKEN)


@pytest.fixture
def start_worker(leaves_nothing):
    workers = []

    def start(tensors=None, **options):
        zeros = {name: torch.zeros_like(tensor) for name, tensor in WEIGHTS.items()}
        options = {"token": TOKEN, "name": f"w{len(workers)}", **options}
        workers.append(HttpWorker(tensors or zeros, **options))
        return workers[-1]

    yield start
    for each in workers:
        each.close()


@pytest.fixture
def workers(start_worker):
    return [start_worker(), start_worker()]


@pytest.fixture
def write(tmp_path):
    """Maker of checkpoint folders."""

    def make(name="step-7", **changes):
        folder = tmp_path / name
        folder.mkdir()
        save_file({**WEIGHTS, **changes}, folder / "model.safetensors")
        return str(folder)

    return make


def push(*arguments, to=()):
    targets = [part for each in to for part in ("--to", getattr(each, "address", each))]
    return CliRunner().invoke(main, ["push", *arguments, *targets], catch_exceptions=False)


def documents(*arguments, to=()):
    done = push(*arguments, "--json", to=to)
    assert done.stderr == ""
    return done.exit_code, json.loads(done.stdout)


# -- a push


def test_every_worker_has_the_checkpoint_and_the_table_says_so(workers, write):
    done = push(write(), to=workers)
    assert (done.exit_code, [contents(w.tensors) for w in workers]) == (0, [contents(WEIGHTS)] * 2)
    first = workers[0].session
    assert {each.session.version for each in workers} == {"step-7"}
    lines = done.stdout.splitlines()
    assert lines[0].startswith("step-7  committed  0.0 MB in ")
    assert lines[1] == f"fingerprint  {first.fingerprint}"
    assert lines[2].split()[:3] == ["seconds", "here", "init"]
    head = "worker host outcome holds digests MB accept transfer verify wait commit"
    assert lines[4].split() == head.split()
    # In the order in which the workers dialed in.
    rows = sorted(line.split()[:5] for line in lines[5:])
    assert rows == [
        ["w" + str(i), w.address, "committed", "step-7", "equal"] for i, w in enumerate(workers)
    ]
    # A short push is over before there is progress to show.
    assert done.stderr == ""


def test_stages_are_shown_as_bars_where_that_is_asked_for(workers, write):
    folder = write()
    without = push(folder, to=workers).stdout.splitlines()
    with_bars = push(folder, "--stages", to=workers).stdout.splitlines()
    nothing, *bars, legend = with_bars[len(without) :]
    assert nothing == ""
    hosts = [each.address for each in workers]
    assert sorted(line.split()[0] for line in bars) == sorted(["publisher", *hosts])
    assert legend.split()[:6] == ["i", "init", "p", "plan", "t", "transfer"]


def test_one_document_has_everything(workers, write):
    code, document = documents(write(), "--label", "mine", to=workers)
    assert code == 0
    assert {key: document[key] for key in ("ok", "outcome", "label", "engine", "error")} == {
        "ok": True,
        "outcome": "committed",
        "label": "mine",
        "engine": "shm",
        "error": None,
    }
    assert document["fingerprint"] == workers[0].session.fingerprint
    assert set(document["seconds"]) == {
        "init",
        "plan",
        "transfer",
        "prepare",
        "commit",
        "finish",
        "total",
    }
    assert document["hosts"] == {each.address: each.session.status().worker for each in workers}
    row = min(document["workers"], key=lambda each: each["worker"])
    assert {key: row[key] for key in ("worker", "host", "outcome", "version", "nbytes")} == {
        "worker": "w0",
        "host": workers[0].address,
        "outcome": "committed",
        "version": "mine",
        "nbytes": 192,
    }
    assert row["digests_equal"]
    assert set(row["seconds"]) == {"accept", "transfer", "verify", "wait", "commit"}


def test_a_file_is_labelled_by_its_folder(workers, write):
    code, document = documents(f"{write('epoch-3')}/model.safetensors", to=workers)
    assert (code, document["label"]) == (0, "epoch-3")


def test_a_label_cannot_steer_the_terminal(workers, write):
    label = "one\nw9  committed\x1b[2J"
    done = push(write(), "--label", label, to=workers)
    shown = "one\\nw9  committed\\x1b[2J"
    lines = done.stdout.splitlines()
    assert (done.exit_code, len(lines)) == (0, 7)
    assert [shown in lines[i] for i in (0, 5, 6)] == [True] * 3
    assert done.stdout.replace("\n", "").isprintable()
    _, document = documents(write("next"), "--label", label, to=workers)
    assert [document["label"], *(w["version"] for w in document["workers"])] == [label] * 3


def test_a_stage_of_a_worker_cannot_steer_the_terminal(monkeypatch, workers, write):
    def vote(round_id, fingerprint, nbytes, seconds):
        return Vote(round_id, fingerprint, nbytes, {**seconds, "x\x1b[2J\n": float("nan")})

    monkeypatch.setattr(participant, "Vote", vote)
    done = push(write(), "--stages", to=workers)
    assert done.exit_code == 0
    assert done.stdout.count("x\\x1b[2J\\n") == 2  # the head of a column, the line of letters
    assert done.stdout.replace("\n", "").isprintable()


def test_options_reach_the_engine_in_their_types(workers, write):
    code, _ = documents(write(), "-o", "bucket_nbytes=64", to=workers)
    assert code == 0


def test_a_dry_run_proves_and_changes_nothing(workers, write):
    before = [contents(each.tensors) for each in workers]
    done = push(write(), "--dry-run", to=workers)
    assert done.exit_code == 0
    assert done.stdout.startswith("step-7  verified")
    assert [contents(each.tensors) for each in workers] == before
    assert [each.session.version for each in workers] == [None, None]


def test_the_token_may_come_from_a_file(start_worker, write, tmp_path, monkeypatch):
    monkeypatch.delenv("WTRANSFER_TOKEN")
    file = tmp_path / "token"
    file.write_text("from-a-file\n")
    file.chmod(0o600)
    worker = start_worker(token="from-a-file")
    assert push(write(), "--token-file", str(file), to=[worker]).exit_code == 0


# -- what goes wrong


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"layer.2": torch.zeros(4, 3)}, "layer.2"),
        ({"layer.1": torch.zeros(3, 4, dtype=torch.float16)}, "layer.1"),
        ({"layer.9": torch.zeros(1)}, "layer.9"),
    ],
    ids=["shape", "dtype", "unknown"],
)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(workers, write, changes, name):
    before = [contents(each.tensors) for each in workers]
    code, document = documents(write("odd", **changes), to=workers)
    assert (code, document["outcome"], document["error"]["type"]) == (1, "failed", "SchemaError")
    assert name in document["error"]["message"]
    assert "[worker w" in document["error"]["message"]
    assert [contents(each.tensors) for each in workers] == before
    assert push(write("good"), to=workers).exit_code == 0


def test_a_folder_without_weights_is_named(workers, tmp_path):
    done = push(str(tmp_path), to=workers)
    assert done.exit_code == 1
    assert "push failed" in done.stderr
    assert "is no checkpoint" in done.stderr


def test_an_unreachable_worker_is_named_and_no_worker_changes(workers, write):
    code, document = documents(write(), to=[*workers, "unix:@wt-test-missing"])
    assert (code, document["error"]["type"]) == (1, "PeerLostError")
    assert "cannot reach unix:@wt-test-missing" in document["error"]["message"]
    assert [each.session.version for each in workers] == [None, None]


def test_an_unreachable_worker_is_left_out_and_named_if_so_told(workers, write):
    missing = "unix:@wt-test-missing"
    code, document = documents(write(), "--on-lost-worker", "drop", to=[*workers, missing])
    # As for a worker that is lost in the round: the others have it, and not all.
    assert (code, document["ok"], document["outcome"]) == (NOT_EVERYWHERE, False, "mixed")
    assert {each["worker"]: each["outcome"] for each in document["workers"]} == {
        "w0": "committed",
        "w1": "committed",
        missing: "dropped",
    }
    assert document["problems"].keys() == {missing}
    assert f"(cannot reach {missing}" in document["problems"][missing]
    assert [each.session.version for each in workers] == ["step-7", "step-7"]


def test_a_name_that_nobody_knows_is_left_out_as_any_host_that_is_absent(workers, write):
    unknown = "http://no-such-host.invalid:8000"
    code, document = documents(write(), "--on-lost-worker", "drop", to=[*workers, unknown])
    assert (code, document["outcome"]) == (NOT_EVERYWHERE, "mixed")
    assert "no-such-host.invalid" in document["problems"][unknown]
    assert [each.session.version for each in workers] == ["step-7", "step-7"]


def test_every_worker_that_refuses_is_named(start_worker, write):
    strangers = [start_worker(token=f"other-{i}") for i in range(2)]
    code, document = documents(write(), to=strangers)
    assert code == 1
    assert {
        host: each["type"] for host, each in document["error"]["hosts"].items()
    } == dict.fromkeys((each.address for each in strangers), "AuthenticationError")
    assert TOKEN not in json.dumps(document)


@pytest.mark.usefixtures("patient_connections")
def test_a_worker_that_does_not_commit_makes_it_fail(start_worker, write):
    fine, idle = start_worker(), start_worker(steps=False)
    code, document = documents(write(), "--deadline", "0.5", to=[fine, idle])
    assert (code, document["ok"], document["outcome"]) == (NOT_EVERYWHERE, False, "mixed")
    assert {each["worker"]: each["outcome"] for each in document["workers"]} == {
        "w0": "committed",
        "w1": "pending",
    }
    assert document["problems"] == {
        "w1": "pending: it has verified the update, and applies it when its model gets to it"
    }


def test_error_names_its_worker_as_the_user_named_it_beside_its_own_name(workers, write):
    done = push(write("odd", **{"layer.1": torch.zeros(3, 5)}), to=workers)
    assert re.search(r"\[worker (w[01]),.*\] \(\1 is unix:@", done.stderr)


def test_the_log_is_written_where_it_is_asked_for_and_only_then(workers, write):
    before = logging.getLogger("wtransfer").handlers[:]
    line = r"^\d[\d: ,-]+ INFO wtransfer\.weight_sync\.trainer\.coordinator: round \w+ "
    by_level = [(["--log-level", level], num) for level, num in (("info", 1), ("warning", 0))]
    both = ["-v", "--log-level", "warning"]
    for number, (option, num_lines) in enumerate([*by_level, (["-v"], 1), (both, 0), ([], 0)]):
        done = push(*option, write(f"step-{number}"), to=workers)
        assert done.exit_code == 0
        assert len(re.findall(line, done.stderr, re.MULTILINE)) == num_lines
    assert logging.getLogger("wtransfer").handlers == before


@pytest.mark.usefixtures("patient_connections")
def test_a_push_that_no_worker_commits_is_told_as_any_other(start_worker, write):
    idle = start_worker(steps=False)
    code, document = documents(write(), "--deadline", "0.5", to=[idle])
    assert (code, document["ok"], document["outcome"]) == (1, False, "mixed")
    assert [(each["worker"], each["outcome"]) for each in document["workers"]] == [
        ("w0", "pending")
    ]
    assert document["problems"].keys() == {"w0"}


class Stubborn:
    """A target that cannot be written."""

    reason = "out of order"

    def schema(self):
        return None

    def apply(self, tensors):
        if any(bool(tensor.any()) for tensor in tensors.values()):
            raise OSError(self.reason)

    def capture(self):
        return {}


def test_a_worker_that_cannot_apply_is_told_of_with_its_reason(start_worker, write):
    fine, broken = start_worker(), start_worker(Stubborn())
    done = push(write(), to=[fine, broken])
    assert done.exit_code == NOT_EVERYWHERE
    assert done.stdout.startswith("step-7  mixed")
    named = f"{broken.address} (w1)  "
    (complaint,) = [line for line in done.stderr.splitlines() if line.startswith(named)]
    assert complaint.startswith(f"{named}restored: it is on its old version, whole: see its log")
    assert "out of order" in complaint


def test_an_error_cannot_steer_the_terminal(start_worker, write):
    class Loud(Stubborn):
        reason = "out of\x1b[2J order"

    done = push(write(), to=[start_worker(Loud())])
    assert done.exit_code == 1
    assert "out of\\x1b[2J order" in done.stderr
    assert "\x1b" not in done.stderr


def test_numbers_that_are_none_can_be_rejected(workers, write):
    spoiled = WEIGHTS["layer.3"].clone()
    spoiled[0, 0] = float("nan")
    folder = write("bad", **{"layer.3": spoiled})
    code, document = documents(folder, "--nonfinite", "reject", to=workers)
    assert (code, document["error"]["type"]) == (1, "NonfiniteError")


def test_a_rollback_needs_an_engine_that_keeps_versions(workers):
    code, document = documents("--rollback", "v1", to=workers)
    assert (code, document["error"]["type"]) == (1, "VersionNotKeptError")
    assert "engine 'shm' keeps no earlier versions" in document["error"]["message"]


# -- what cannot be meant


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "give either a checkpoint DIR or --rollback LABEL"),
        (["d", "--rollback", "x"], "give either a checkpoint DIR or --rollback LABEL"),
        (["--rollback", "x", "--label", "y"], "omit --label"),
        (["--rollback", ""], "--rollback is empty: give the label of a version"),
        (["d", "--label", ""], "--label is empty: give the label of a version"),
        (["d", "--label", "half of a pair \udcff"], "expected a label of 1 to 256 characters"),
        (["--rollback", "v" * 257], "expected a label of 1 to 256 characters"),
        (["/"], "add --label"),
        (
            ["d", "--engine", "file"],
            "'file': missing required field `path`; the options are path (str)",
        ),
        (["--rollback", "x", "--engine", "file"], "engine 'file': missing required field `path`"),
        (["d", "-o", "rank=1"], "-o rank=1: a process that pushes is rank 0"),
        (
            ["d", "-o", "backend=file"],
            "unknown field `backend`; the options are b",
        ),
        (["nowhere"], "'nowhere' does not exist"),
        (["d", "--stay", "--dry-run"], "omit one of them"),
        (["d", "--stages", "--json"], "omit --stages"),
        (["d", "--to", "unix:@a"], "named twice"),
        (["d", "--to", "gopher:a"], "'gopher:a' is no worker's URL"),
        (["d", "--engine", "pigeon"], "Available engines: ["),
        (["d", "-o", "bucket_nbytes"], "-o bucket_nbytes: expected key=value"),
        (["d", "-o", "colour=red"], "unknown field `colour`; the options are b"),
        (
            ["d", "-o", "bucket_nbytes=red"],
            "Expected `int`, got `str` - at `$.bucket_nbytes`; the options are b",
        ),
        (["d", "-o", "bucket_nbytes=0"], "bucket_nbytes is 0, expected > 0, a whole number"),
        (["d", "--listen", "somewhere"], "'somewhere' is no address"),
        (["d", "--to", "http://192.0.2.1:80"], "reaches workers on this host only"),
        (["d", "--token-file", "/nowhere"], "token file '/nowhere'"),
        (["d", "--deadline", "0"], "is not in the range x>0"),
    ],
)
def test_usage_errors_are_reported_before_anything_is_sent(arguments, text, write):
    folder = write()
    given = [folder if each == "d" else each for each in arguments]
    done = push(*given, to=["unix:@a"])
    assert done.exit_code == 2
    assert text in done.stderr
    assert done.stdout == ""


def test_staying_needs_a_token_that_others_can_know(write, monkeypatch):
    monkeypatch.delenv("WTRANSFER_TOKEN")
    done = push(write(), "--stay", to=["unix:@a"])
    assert done.exit_code == 2
    assert "give --token-file, or set WTRANSFER_TOKEN" in done.stderr


@dataclass
class Info:
    path: str
    keep: int = 3
    fast: bool = False
    share: float | None = None


def test_options_are_read_in_every_plain_type():
    pairs = ["path=/a=b", "keep=5", "fast=true", "share=0.5"]
    assert typed_options("mine", Info, pairs) == {
        "path": "/a=b",
        "keep": 5,
        "fast": True,
        "share": 0.5,
    }


@dataclass
class Split(TrainerInitInfo):
    peers: str = ""

    def __post_init__(self):
        self.peers = tuple(self.peers.split(","))


def test_options_are_handed_over_as_they_were_before_the_constructor():
    assert typed_options("mine", Split, ["peers=a,b"]) == {"peers": "a,b"}


def test_options_that_a_push_takes_do_not_include_the_rank():
    with pytest.raises(click.UsageError, match=r"`x`; the options are peers \(str\)$"):
        typed_options("mine", Split, ["x=1"])


# -- signals: real processes


@pytest.fixture
def begin(zygote, tmp_path):
    """Starter of ``wtransfer push`` in a process of its own."""
    children = []

    def start(*arguments, to):
        log = tmp_path / f"push-{len(children)}.log"
        log.touch()
        targets = [part for each in to for part in ("--to", each.address)]
        child = zygote.spawn(
            "worker_in_process:push", [*arguments, *targets], TOKEN, stdout=log, stderr=log
        )
        children.append(child)
        return child, log

    yield start
    for each in children:
        each.kill()
        each.wait(5.0)


def until(condition, what=lambda: ""):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(0.005)


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)]
)
def test_a_signal_ends_a_push_with_every_worker_whole(begin, workers, write, number):
    before = [contents(each.tensors) for each in workers]
    # The second does not get to say whether the plan fits before the push is over.
    asked, release = threading.Event(), threading.Event()
    hold = workers[1].target.schema

    def held_back():
        asked.set()
        release.wait(2 * PATIENCE_S)
        return hold()

    workers[1].target.schema = held_back
    child, log = begin(write(), "--json", to=workers)
    try:
        assert asked.wait(PATIENCE_S), log.read_text()
        os.kill(child.pid, number)
        assert child.wait(PATIENCE_S) == 128 + number
    finally:
        release.set()
    document = json.loads(log.read_text())
    assert (document["ok"], document["outcome"]) == (False, "interrupted")
    assert f"{number.name} ended the push" in document["error"]["message"]
    workers[1].target.schema = hold
    assert [contents(each.tensors) for each in workers] == before
    assert push(write("good"), to=workers).exit_code == 0


def test_stay_brings_late_workers_up_to_date_until_a_signal(begin, workers, write):
    child, log = begin(write(), "--stay", to=workers[:1])
    until(lambda: "late workers join" in log.read_text(), log.read_text)
    address = log.read_text().split("--join ")[1].split()[0]
    tensors = {name: torch.zeros_like(tensor) for name, tensor in WEIGHTS.items()}
    with WorkerSession(tensors, join=address) as late:
        assert late.commit_pending(5)
        assert late.version == "step-7"
        assert contents(tensors) == contents(WEIGHTS)
    os.kill(child.pid, signal.SIGTERM)
    assert child.wait(PATIENCE_S) == 0
    until(lambda: not workers[0].session.status().connected)
    assert workers[0].num_left == 1


def test_a_worker_that_hangs_cannot_keep_a_push_from_ending(begin, write):
    address = f"unix:@wt-test-{secrets.token_hex(4)}"
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(f"\0{address[6:]}")
        silent.listen()
        silent.settimeout(PATIENCE_S)
        child, log = begin(write(), to=[type("Silent", (), {"address": address})])
        with silent.accept()[0]:
            os.kill(child.pid, signal.SIGINT)
            assert child.wait(PATIENCE_S) == 130, log.read_text()
    assert "SIGINT ended the push" in log.read_text()
