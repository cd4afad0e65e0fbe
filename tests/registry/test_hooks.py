"""Who is told what, who may answer, and that observers disturb nobody."""

from __future__ import annotations

import asyncio
import sys
import threading
import types

import pytest

from wtransfer.errors import (
    AlreadyRegisteredError,
    PluginBrokenError,
    PluginTypeError,
    UnknownBackendError,
)
from wtransfer.registry.hooks import Board, hookimpl

COMMIT = {"version": "v", "fingerprint": "f", "round_id": "r", "worker": None}

LISTENING = """
    from wtransfer import hookimpl
    from builtin_shm import Engine as Base
    heard = []
    class Engine(Base): ...
    @hookimpl
    def wtransfer_weights_committed(version, fingerprint):
        heard.append((version, fingerprint))
"""


class Observer:
    def __init__(self):
        self.heard = []

    @hookimpl
    def wtransfer_weights_committed(self, version):
        self.heard.append(version)


@pytest.fixture
def board():
    return Board()


def test_an_observer_hears_until_it_is_unregistered(board):
    observer = Observer()
    board.register(observer)
    board.notify("wtransfer_weights_committed", **COMMIT)
    board.unregister(observer)
    board.unregister(observer)
    board.notify("wtransfer_weights_committed", **COMMIT)
    assert observer.heard == ["v"]


@pytest.mark.parametrize(
    "error", [ValueError, SystemExit, asyncio.CancelledError, pytest.fail.Exception]
)
def test_an_observer_that_raises_is_logged_and_disturbs_nobody(board, caplog, error):
    class Bad:
        @hookimpl
        def wtransfer_weights_committed(self):
            raise error("no")

    first, last = Observer(), Observer()
    for observer in (first, Bad(), last):
        board.register(observer)
    board.notify("wtransfer_weights_committed", **COMMIT)
    assert first.heard == last.heard == ["v"]
    assert "Bad" in caplog.text
    assert "wtransfer_weights_committed" in caplog.text


def test_ctrl_c_is_the_users_on_the_main_thread_and_an_observers_fault_elsewhere(board, caplog):
    class Interrupted:
        @hookimpl
        def wtransfer_weights_committed(self):
            raise KeyboardInterrupt

    observer = Observer()
    board.register(observer)
    board.register(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        board.notify("wtransfer_weights_committed", **COMMIT)
    assert observer.heard == []
    thread = threading.Thread(
        target=board.notify, args=("wtransfer_weights_committed",), kwargs=COMMIT
    )
    thread.start()
    thread.join(5.0)
    assert observer.heard == ["v"]
    assert "Interrupted" in caplog.text


def test_the_notifier_must_give_every_fact(board):
    with pytest.raises(AssertionError, match="takes"):
        board.notify("wtransfer_weights_committed", version="v")


def test_a_class_is_refused(board):
    with pytest.raises(PluginTypeError, match="got the class Observer"):
        board.register(Observer)


def test_an_observer_is_registered_once(board):
    observer = Observer()
    board.register(observer)
    with pytest.raises(AlreadyRegisteredError):
        board.register(observer)


def wrong_argument(self, colour): ...
def unknown_hook(self): ...


@pytest.mark.parametrize(
    ("name", "function", "text"),
    [
        ("wtransfer_weights_committed", wrong_argument, "colour"),
        ("wtransfer_weights_commited", unknown_hook, "unknown hook"),
    ],
)
def test_an_implementation_that_fits_no_hook_is_refused_and_leaves_nothing(
    board, name, function, text
):
    bad = type("Bad", (Observer,), {name: hookimpl(function)})()
    with pytest.raises(PluginTypeError, match=text) as caught:
        board.register(bad)
    assert "wtransfer_round_started" in str(caught.value)
    board.notify("wtransfer_weights_committed", **COMMIT)
    assert bad.heard == []
    board.register(Observer())


def test_a_hook_of_a_later_release_may_be_optional(board):
    class Later(Observer):
        @hookimpl(optionalhook=True)
        def wtransfer_from_the_future(self): ...

    later = Later()
    board.register(later)
    board.notify("wtransfer_weights_committed", **COMMIT)
    assert later.heard == ["v"]


def test_a_wrapper_is_refused(board):
    class Wrapper:
        @hookimpl(wrapper=True)
        def wtransfer_weights_committed(self):
            return (yield)

    with pytest.raises(PluginTypeError, match="as a wrapper"):
        board.register(Wrapper())


def test_properties_are_not_evaluated(board):
    class Engine(Observer):
        @property
        def rank(self):
            raise RuntimeError("not initialised")

        def shutdown(self): ...

    engine = Engine()
    board.attach(engine)
    board.notify("wtransfer_weights_committed", **COMMIT)
    assert engine.heard == ["v"]


def test_static_methods_can_listen(board):
    heard = []

    class Static:
        @staticmethod
        @hookimpl
        def wtransfer_weights_committed(version):
            heard.append(version)

    board.register(Static())
    board.notify("wtransfer_weights_committed", **COMMIT)
    assert heard == ["v"]


def test_an_attached_backend_hears_until_its_shutdown(board):
    class Engine(Observer):
        stopped = 0

        def shutdown(self, wait=True):
            self.stopped += 1
            return wait

    engine = Engine()
    board.attach(engine)
    board.notify("wtransfer_weights_committed", **COMMIT)
    assert engine.shutdown(wait=False) is False
    board.notify("wtransfer_weights_committed", **COMMIT)
    engine.shutdown()
    assert engine.heard == ["v"]
    assert engine.stopped == 2


def test_a_backend_without_hooks_is_left_alone(board):
    class Engine:
        def shutdown(self): ...

    engine = Engine()
    board.attach(engine)
    assert vars(engine) == {}
    assert board.manager.get_plugins() == set()


def test_a_loaded_backends_module_listens(site):
    site.module("acme_module", LISTENING)
    site.add("acme-wt", fast="acme_module:Engine", again="acme_module:Engine")
    registry = site.engines()
    registry.get("fast")
    registry.get("again")
    site.board.notify("wtransfer_weights_committed", **COMMIT)
    assert sys.modules["acme_module"].heard == [("v", "f")]


def test_the_module_that_listens_is_the_one_that_defines_the_class(site):
    site.module("acme_module", LISTENING)
    site.module("front_module", "from acme_module import Engine")
    site.add("acme-wt", fast="front_module:Engine")
    site.engines().get("fast")
    site.board.notify("wtransfer_weights_committed", **COMMIT)
    assert sys.modules["acme_module"].heard == [("v", "f")]


@pytest.mark.parametrize(
    ("added", "text"),
    [
        ("def wtransfer_load(kind, name): ...", "implements wtransfer_load"),
        ("def wtransfer_weights_committed(colour): ...", "colour"),
    ],
)
def test_a_backend_whose_module_has_a_hook_it_may_not_have_is_refused(site, added, text):
    source = "from builtin_shm import Engine as B\nimport wtransfer\nclass Engine(B): ...\n"
    site.module("acme_module", f"{source}@wtransfer.hookimpl\n{added}\n")
    site.add("acme-wt", bad="acme_module:Engine")
    registry = site.engines()
    with pytest.raises(PluginTypeError, match=text) as caught:
        registry.get("bad")
    assert caught.value.distribution == "acme-wt"
    assert registry.get("shm").__module__ == "builtin_shm"


class Answers:
    def __init__(self, answer):
        self.answer = answer

    @hookimpl
    def wtransfer_load(self, kind, name):
        return self.answer(kind, name)


def answering(site, answer, **environ):
    registry = site.engines(**environ)
    site.board.register(Answers(answer))
    return registry


class Mine:
    def __init__(self, config, parallel_config): ...
    def init_transfer_engine(self, init_info): ...
    def receive_weights(self, update_info, load_weights): ...
    def shutdown(self): ...


def test_the_application_may_answer_first(site):
    registry = answering(site, lambda kind, name: Mine if name == "shm" else None)
    assert registry.get("shm") is Mine
    assert registry.record("shm").origin == "application"
    assert registry.get("wtransfer:shm").__module__ == "builtin_shm"
    with pytest.raises(UnknownBackendError):
        registry.get("other")


def test_the_application_is_asked_once_for_each_name(site):
    asked = []
    registry = answering(site, lambda kind, name: asked.append((kind, name)))
    registry.get("shm")
    registry.get("shm")
    assert asked == [("engines", "shm")]


@pytest.mark.parametrize("answer", [3, [], object(), types.SimpleNamespace])
def test_what_the_application_answers_is_checked(site, answer):
    registry = answering(site, lambda kind, name: answer)
    with pytest.raises(PluginTypeError, match=r"'shm' \(application\) cannot be used"):
        registry.get("shm")


def test_an_application_hook_that_raises_is_named(site):
    def fails(kind, name):
        return 1 / 0

    registry = answering(site, fails)
    with pytest.raises(PluginBrokenError, match="application's wtransfer_load hook") as caught:
        registry.get("shm")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_name_registered_while_it_is_loaded_means_what_was_registered(site):
    class Other(Mine): ...

    registry = site.engines()

    def registers(kind, name):
        registry.register("fast", Mine)
        return Other

    site.board.register(Answers(registers))
    assert registry.get("fast") is Other
    assert registry.record("fast").origin == "run time"
    site.board.unregister(next(p for p in site.board.manager.get_plugins() if type(p) is Answers))
    assert registry.get("fast") is Mine
