"""What is seen of a push while it is under way."""

from __future__ import annotations

import io
import threading

import pytest
import torch
from rich.console import Console

from wtransfer.commands import progress
from wtransfer.commands.progress import Bars, Lines, Silence, arrived, view_of, watch
from wtransfer.errors import SchemaError
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


@pytest.fixture
def held(fleet):
    """A fleet, and a round of it that has brought the half of its 2 MB to both workers."""
    source = Gated({f"w{i}": torch.zeros(MB // 4) for i in range(2)})
    made = fleet(source, options={"bucket_nbytes": 1})
    for _ in range(2):
        made.join({f"w{i}": torch.zeros(MB // 4) for i in range(2)})
    round_ = made.publisher.publish("v1", wait=False)
    while min(round_.progress().values()) < MB:
        assert not round_.done
    yield made, round_, source
    source.gate.set()


def finish(held):
    made, round_, source = held
    source.gate.set()
    assert made.finish(round_).ok


def test_a_bar_for_each_worker_says_how_far_it_is(held):
    _, round_, _ = held
    screen = io.StringIO()
    with Bars(Console(file=screen, force_terminal=True, width=100)) as view:
        view.show(round_)
        seen = screen.getvalue()
        assert [name in seen for name in ("worker-0", "worker-1", "transfer", "1.0/2.0 MB")] == [
            True
        ] * 4
        finish(held)
        view.show(round_)
        assert "2.0/2.0 MB" in screen.getvalue()


def test_lines_say_how_far_the_last_one_is(held, capsys, monkeypatch):
    monkeypatch.setattr(progress, "_LINE_S", 0.0)
    _, round_, _ = held
    view = Lines()
    view.show(round_)
    view.show(round_)
    first, *_ = round_.progress()
    assert capsys.readouterr().err.splitlines()[-1] == f"transfer  1.0 of 2.0 MB at {first}"
    finish(held)
    view.show(round_)
    assert "over" not in capsys.readouterr().err


def test_what_is_verified_has_arrived(held):
    _, round_, _ = held
    assert set(arrived(round_).values()) == {MB}
    finish(held)
    assert set(arrived(round_).values()) == {2 * MB}


def test_watching_ends_with_the_round(held):
    _, round_, _ = held
    watching = threading.Thread(target=watch, args=(round_, Silence()))
    watching.start()
    finish(held)
    watching.join(1)
    assert not watching.is_alive()


def test_watching_a_round_that_fails_raises_why(fleet, weights):
    made = fleet(weights)
    made.join({"other": torch.zeros(1)})
    with pytest.raises(SchemaError):
        watch(made.publisher.publish("v1", wait=False), Silence())


def test_without_a_terminal_there_are_no_bars():
    assert isinstance(view_of(silent=True), Silence)
    assert isinstance(view_of(silent=False), Lines)
