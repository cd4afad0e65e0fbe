"""Which hooks the factory lets be called; `test_seed_specs.py` has the rest of its contract."""

from __future__ import annotations

import pytest

from wtransfer.config import OffloadingConfig
from wtransfer.registry import hooks
from wtransfer.registry import resolve as registry_module
from wtransfer.registry.hooks import PluginManager, hookimpl
from wtransfer.registry.resolve import Host
from wtransfer.specs.factory import OffloadingSpecFactory
from wtransfer.specs.interface import OffloadingSpec


@pytest.fixture(autouse=True)
def fresh_host(monkeypatch):
    """What is installed, without what other tests registered."""
    monkeypatch.setattr(registry_module, "host", Host({}, board=PluginManager()))


class Side:
    num_commits = num_shutdowns = 0

    @hookimpl
    def wtransfer_weights_committed(self):
        self.num_commits += 1

    def shutdown(self):
        self.num_shutdowns += 1


class WithSlots:
    __slots__ = ()

    def shutdown(self): ...


class Plain(OffloadingSpec):
    make_side = object

    def __init__(self, config):
        self.side = self.make_side()

    def get_manager(self):
        return self.side

    def get_worker(self, kv_caches):
        return self.side


class Observing(Plain):
    num_commits = 0

    @hookimpl
    def wtransfer_weights_committed(self):
        self.num_commits += 1


def create(base, make_side):
    cls = type("Mine", (base,), {"make_side": make_side})
    registry_module.registry("specs").register("mine", cls)
    return OffloadingSpecFactory.create_spec(OffloadingConfig({"spec_name": "mine"}))


def commit():
    facts = {"version": "v", "fingerprint": "f", "round_id": "r", "worker": None}
    hooks.notify("wtransfer_weights_committed", **facts)


@pytest.mark.parametrize("arguments", [(), (None,)])
def test_hooks_of_spec_and_side_are_called_until_that_side_is_shut_down(arguments):
    spec = create(Observing, Side)
    make = spec.get_worker if arguments else spec.get_manager
    side = make(*arguments)
    shutdown = side.shutdown
    assert make(*arguments) is side
    assert side.shutdown is shutdown, "replaced once"
    commit()
    side.shutdown()
    commit()
    assert (spec.num_commits, side.num_commits, side.num_shutdowns) == (1, 1, 1)


def test_side_with_slots_is_returned_and_ends_the_notifications_of_its_spec(caplog):
    spec = create(Observing, WithSlots)
    assert spec.get_manager() is spec.side
    commit()
    assert spec.num_commits == 0
    assert "has __slots__" in caplog.text


@pytest.mark.parametrize("make_side", [object, WithSlots])
def test_side_without_hooks_is_returned_as_it_is(make_side):
    before = set(map(id, hooks.board.get_plugins()))
    spec = create(Plain, make_side)
    assert spec.get_manager() is spec.get_worker(None) is spec.side
    assert set(map(id, hooks.board.get_plugins())) == before


def test_spec_that_accepts_no_attributes_is_returned_as_it_is():
    class Closed(Plain):
        def __setattr__(self, name, value):
            if name != "side":
                raise AttributeError(name)
            super().__setattr__(name, value)

    spec = create(Closed, Side)
    assert spec.get_manager() is spec.side
