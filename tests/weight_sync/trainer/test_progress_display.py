"""Progress of a round on standard error, of a caller that waits for it."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import sys
import threading
import time

import pytest
import torch
from rich.console import Console

from wtransfer.testing.fleet import Fleet, committing
from wtransfer.weight_sync.trainer.progress_display import Bars, Lines
from wtransfer.weight_sync.trainer.source import StateDictSource

MB = 1_000_000


class Gated(StateDictSource):
    """Waits at its last tensor."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self.gate = threading.Event()

    def iter_full(self):
        pairs = list(super().iter_full())
        yield from pairs[:-1]
        self.gate.wait(10)
        yield pairs[-1]


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
def held(until):
    tensors = {f"w{i}": torch.zeros(MB // 4) for i in range(2)}
    source = Gated(tensors)
    with Fleet(source, deadline_s=5.0, options={"bucket_nbytes": 1}) as fleet:
        for _ in range(2):
            fleet.join({name: torch.zeros_like(each) for name, each in tensors.items()})
        yield Held(fleet, source, until)
        source.gate.set()


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


def test_lines_say_how_far_the_last_worker_is_at_most_once_a_second(held, capsys, monkeypatch):
    monkeypatch.setattr("wtransfer.weight_sync.trainer.progress_display._LINE_S", 1000.0)
    first = next(iter(held.round.progress()))
    line = f"transfer  1.0 of 2.0 MB at {first}\n"
    lines = Lines()
    lines.show(held.round)
    lines.show(held.round)
    assert capsys.readouterr().err == line
    monkeypatch.setattr("wtransfer.weight_sync.trainer.progress_display._LINE_S", 0.0)
    lines.show(held.round)
    assert capsys.readouterr().err == line
    held.finish()
    lines.show(held.round)
    assert capsys.readouterr().err == ""


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
        source = Gated(tensors)
        if opens is None:
            source.gate.set()
        else:
            threading.Thread(target=lambda: (until(opens), source.gate.set())).start()
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
