"""Progress of a round on standard error, of a caller that waits for it."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import sys
import threading
import time
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from rich.console import Console

from wtransfer.testing.fleet import Fleet, GatedSource, committing
from wtransfer.weight_sync.trainer.progress_display import Bars, Lines

MB = 1_000_000
DISPLAY = "wtransfer.weight_sync.trainer.progress_display"


class Held:
    """A round that has brought the half of its 2 MB to two workers, until it may go on."""

    def __init__(self, fleet, source, until):
        self.fleet, self.source = fleet, source
        self.round = fleet.publisher.publish("v1", wait=False)
        until(lambda: min(self.round.progress().values(), default=0) == MB)

    def finish(self):
        self.source.gate.set()
        assert self.fleet.finish(self.round).ok


@pytest.fixture
def held_by(until):
    """Make a round of so many workers."""
    with contextlib.ExitStack() as stack:

        def make(num_workers):
            tensors = {f"w{i}": torch.zeros(MB // 4) for i in range(2)}
            source = GatedSource(tensors)
            source.gate.clear()
            fleet = stack.enter_context(Fleet(source, deadline_s=5.0, options={"bucket_nbytes": 1}))
            for _ in range(num_workers):
                fleet.join({name: torch.zeros_like(each) for name, each in tensors.items()})
            stack.callback(source.gate.set)
            return Held(fleet, source, until)

        yield make


@pytest.fixture
def held(held_by):
    return held_by(2)


def test_a_bar_for_each_worker_says_how_far_it_is(held):
    screen = io.StringIO()
    with Bars(Console(file=screen, force_terminal=True, width=100)) as bars:
        bars.show(held.round)
        seen = screen.getvalue()
        for text in ("worker-0", "worker-1", "transfer", "1.0/2.0 MB"):
            assert text in seen
        held.finish()
        bars.show(held.round)
        assert "2.0/2.0 MB" in screen.getvalue()


@pytest.mark.parametrize("num_workers", [2, 5])
def test_of_many_workers_the_slowest_has_the_one_bar(held_by, num_workers):
    held = held_by(num_workers)
    screen = io.StringIO()
    with Bars(Console(file=screen, force_terminal=True, width=120)) as bars:
        bars.show(held.round)
        seen = screen.getvalue()
    assert ("slowest of 5: worker-" in seen) == (num_workers == 5)
    # Beside the percent, the rate and the time left.
    assert ("worker-1" in seen and "worker-0" in seen) == (num_workers == 2)
    assert "50%" in seen
    held.finish()


LINE = re.compile(
    r"\d\d:\d\d:\d\d  transfer 50 %  1\.0 of 2\.0 MB at worker-\d, the slowest of 2"
    r"(  \d+\.\d MB/s  \d+ s left)?\n"
)


def test_lines_say_how_far_the_last_worker_is_at_each_tenth_and_after_a_while(
    held, capsys, monkeypatch
):
    lines = Lines()
    lines.show(held.round)
    # The round is not 10 s old.
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(f"{DISPLAY}._FIRST_LINE_S", 0.0)
    lines.show(held.round)
    lines.show(held.round)
    assert LINE.fullmatch(capsys.readouterr().err)
    monkeypatch.setattr(f"{DISPLAY}._LINE_S", 0.0)
    lines.show(held.round)
    assert LINE.fullmatch(capsys.readouterr().err)
    held.finish()
    lines.show(held.round)
    assert capsys.readouterr().err == ""


@pytest.fixture
def now(monkeypatch):
    """The time of the display, in seconds, in a list."""
    now = [100.0]
    monkeypatch.setattr(f"{DISPLAY}.time", SimpleNamespace(monotonic=lambda: now[0], strftime=str))
    return now


class Moving:
    """A stand-in for a round that moves as the test says."""

    phase, nbytes, failed, done = "transfer", 100 * MB, False, 10 * MB
    host_by_worker: ClassVar = {"vm:1/0": "unix:@worker-0"}

    def progress(self):
        return {"vm:1/0": self.done}


def test_first_line_comes_after_ten_seconds_and_the_next_at_a_tenth_or_after_a_minute(capsys, now):
    lines, round_ = Lines(), Moving()
    # Nothing was shown for a second before.
    for at, megabytes, num_lines in (
        (108.9, 15, 0),
        (109.1, 16, 1),
        (110.0, 19, 0),
        (111.0, 20, 1),
        (112.0, 29, 0),
        (113.0, 51, 1),
        (172.9, 52, 0),
        (173.1, 52, 1),
    ):
        now[0], round_.done = at, megabytes * MB
        lines.show(round_)
        assert capsys.readouterr().err.count(f" {megabytes} %") == num_lines, at


def test_rate_and_time_left_count_from_the_first_byte_that_was_seen(capsys, monkeypatch, now):
    monkeypatch.setattr(f"{DISPLAY}._FIRST_LINE_S", 0.0)
    lines = Lines()
    lines.show(round_ := Moving())
    assert capsys.readouterr().err.endswith("10.0 of 100.0 MB at unix:@worker-0 (vm:1/0)\n")
    now[0], round_.done = 102.0, 50 * MB
    lines.show(round_)
    assert capsys.readouterr().err.endswith("(vm:1/0)  20.0 MB/s  2 s left\n")
    # Within the same tenth.
    now[0], round_.done = 103.0, 51 * MB
    lines.show(round_)
    assert capsys.readouterr().err == ""


class Named:
    """A stand-in for a round of a worker by its host's name and its own."""

    phase, nbytes, failed = "transfer", 2 * MB, False

    def __init__(self, host, name):
        self.host_by_worker, self.name = {name: host}, name

    def progress(self):
        return {self.name: MB}


@pytest.mark.parametrize(
    ("host", "name", "shown"),
    [
        ("http://[fe80::1]:8000", "w", "http://[fe80::1]:8000 (w)"),
        ("unix:@x", "[/x]", "unix:@x ([/x])"),
        ("unix:@x", "\x1b]0;w\x07", r"unix:@x (\x1b]0;w\x07)"),
    ],
)
def test_hosts_and_names_are_shown_as_they_are_and_cannot_steer_a_terminal(
    host, name, shown, capsys, monkeypatch
):
    screen = io.StringIO()
    with Bars(Console(file=screen, width=120)) as bars:
        bars.show(Named(host, name))
    assert shown in screen.getvalue()
    monkeypatch.setattr(f"{DISPLAY}._FIRST_LINE_S", 0.0)
    Lines().show(Named(host, name))
    assert f" at {shown}" in capsys.readouterr().err


class Screen:
    """A terminal, and all that was written to it."""

    def __init__(self):
        self.ours, theirs = pty.openpty()
        self.text = ""
        self.file = os.fdopen(theirs, "w")
        self.thread = threading.Thread(target=self.read)
        self.thread.start()

    def read(self):
        # EIO: the other end is closed.
        with contextlib.suppress(OSError):
            while chunk := os.read(self.ours, 4096):
                self.text += chunk.decode()

    def close(self):
        self.file.close()
        self.thread.join()
        os.close(self.ours)


@pytest.fixture
def screen():
    it = Screen()
    yield it
    it.close()


@pytest.fixture
def publish(until):
    """Publish through a gate, which opens at an event."""

    def run(progress, opens=None):
        tensors = {f"w{i}": torch.ones(MB // 4) for i in range(2)}
        source = GatedSource(tensors)

        def open_gate():
            try:
                until(opens)
            finally:
                source.gate.set()

        if opens is not None:
            source.gate.clear()
            threading.Thread(target=open_gate).start()
        with Fleet(source, progress=progress, options={"bucket_nbytes": 1}) as fleet:
            held = {name: torch.zeros_like(each) for name, each in tensors.items()}
            session = fleet.join(held).session
            with committing(session):
                fleet.publisher.publish("v1").raise_unless_ok()

    return run


@pytest.mark.parametrize("progress", [None, True])
def test_publish_shows_bars_on_a_terminal(publish, screen, until, monkeypatch, progress):
    monkeypatch.setattr(sys, "stderr", screen.file)
    publish(progress, opens=lambda: "1.0/2.0 MB" in screen.text)
    # The last one, of a round that is over.
    until(lambda: "2.0/2.0 MB" in screen.text)


def test_publish_shows_lines_in_a_file_if_it_is_told_to(publish, monkeypatch):
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    monkeypatch.setattr(f"{DISPLAY}._FIRST_LINE_S", 0.0)
    publish(progress=True, opens=lambda: "1.0 of 2.0 MB at worker-0" in file.getvalue())
    assert "1.0 of 2.0 MB at worker-0" in file.getvalue()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_publish_that_takes_long_is_silent_without_a_terminal(
    publish, screen, until, monkeypatch, is_terminal
):
    file = screen.file if is_terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    begun = time.monotonic()
    publish(progress=False if is_terminal else None, opens=lambda: time.monotonic() - begun > 1.5)
    print("over", file=file, flush=True)
    until(lambda: "over" in (screen.text if is_terminal else file.getvalue()))
    assert (screen.text if is_terminal else file.getvalue()).strip() == "over"


def test_publish_that_is_over_at_once_shows_nothing(publish, screen, until, monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen.file)
    monkeypatch.setattr("wtransfer.weight_sync.trainer.progress_display._QUIET_S", 60.0)
    publish(progress=True)
    print("over", file=screen.file, flush=True)
    until(lambda: "over" in screen.text)
    assert screen.text.strip() == "over"


class Odd(io.StringIO):
    """Standard error of a notebook or a supervisor: it has no `isatty`."""

    @property
    def isatty(self):
        raise AttributeError("isatty")


class Gone(io.StringIO):
    """A terminal that was hung up."""

    def isatty(self):
        return True

    def write(self, text):
        raise OSError(5, "Input/output error")


def closed():
    file = io.StringIO()
    file.close()
    return file


@pytest.mark.parametrize("progress", [None, False, True])
@pytest.mark.parametrize("make", [Odd, closed, Gone, lambda: None])
def test_round_ends_well_whatever_standard_error_is(publish, monkeypatch, progress, make):
    monkeypatch.setattr(sys, "stderr", make())
    monkeypatch.setattr("wtransfer.weight_sync.trainer.progress_display._QUIET_S", 0.0)
    begun = time.monotonic()
    publish(progress, opens=lambda: time.monotonic() - begun > 0.3)


def test_output_of_the_program_stays_its_own_beside_bars(publish, screen, monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen.file)
    monkeypatch.setattr(sys, "stdout", out)

    def opens():
        sys.stdout.write("a line\n")
        return "1.0/2.0 MB" in screen.text

    publish(None, opens=opens)
    sys.stdout.write("a line\n")
    assert set(out.getvalue().split("\n")) == {"a line", ""}
    assert "a line" not in screen.text
