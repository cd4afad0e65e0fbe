"""Which observers are notified, which objects may answer, and that observers affect nothing."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import re
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
from wtransfer.registry import hooks
from wtransfer.registry.hooks import Notifications, PluginManager, hookimpl

COMMIT = {"version": "v", "fingerprint": "f", "round_id": "r", "worker": None}

OBSERVING = """
    from wtransfer import hookimpl
    from builtin_shm import Engine as Base
    notified = []
    class Engine(Base): ...
    @hookimpl
    def wtransfer_weights_committed(version, fingerprint):
        notified.append((version, fingerprint))
"""


class Observer:
    def __init__(self):
        self.notified = []

    @hookimpl
    def wtransfer_weights_committed(self, version):
        self.notified.append(version)


@pytest.fixture
def board():
    return PluginManager()


@pytest.fixture
def no_thread_starts(monkeypatch):
    """Context within which no thread can be started."""

    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    @contextlib.contextmanager
    def refused():
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            yield

    return refused


def test_observer_is_notified_until_it_is_unregistered(board):
    observer = Observer()
    board.register(observer)
    board.notify("wtransfer_weights_committed", **COMMIT)
    board.unregister(observer)
    board.unregister(observer)
    board.notify("wtransfer_weights_committed", **COMMIT)
    assert observer.notified == ["v"]


@pytest.mark.parametrize(
    "error", [ValueError, SystemExit, asyncio.CancelledError, pytest.fail.Exception]
)
def test_error_of_an_observer_is_logged_and_the_others_are_notified(board, caplog, error):
    class Bad:
        @hookimpl
        def wtransfer_weights_committed(self):
            raise error("no")

    first, last = Observer(), Observer()
    for observer in (first, Bad(), last):
        board.register(observer)
    board.notify("wtransfer_weights_committed", **COMMIT)
    assert first.notified == last.notified == ["v"]
    assert "Bad" in caplog.text
    assert "wtransfer_weights_committed" in caplog.text


def test_keyboard_interrupt_passes_on_the_main_thread_only(board, caplog):
    class Interrupted:
        @hookimpl
        def wtransfer_weights_committed(self):
            raise KeyboardInterrupt

    observer = Observer()
    board.register(observer)
    board.register(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        board.notify("wtransfer_weights_committed", **COMMIT)
    assert observer.notified == []
    thread = threading.Thread(
        target=board.notify, args=("wtransfer_weights_committed",), kwargs=COMMIT
    )
    thread.start()
    thread.join(5.0)
    assert observer.notified == ["v"]
    assert "Interrupted" in caplog.text


@pytest.mark.parametrize("within_s", [None, 5.0])
def test_slow_observer_is_named_with_its_hook_and_seconds(board, caplog, monkeypatch, within_s):
    def notify():
        if within_s is None:
            board.notify("wtransfer_weights_committed", **COMMIT)
        else:
            board.notify_within(within_s, "wtransfer_weights_committed", **COMMIT)

    board.register(Observer())
    notify()
    assert caplog.text == ""
    monkeypatch.setattr("wtransfer.registry.hooks.SLOW_S", 0.0)
    notify()
    name = f"{Observer.__module__}.Observer"
    assert re.search(rf"wtransfer_weights_committed took \d+\.\d s in {name}$", caplog.messages[0])


class Hanging:
    """Returns when it is let go."""

    def __init__(self):
        self.num_called, self.gate, self.over = 0, threading.Event(), threading.Event()

    @hookimpl
    def wtransfer_weights_committed(self):
        self.num_called += 1
        self.gate.wait(10.0)
        self.over.set()


def test_observer_that_hangs_is_left_behind_and_named_and_the_others_are_notified(board, caplog):
    hanging, first, last = Hanging(), Observer(), Observer()
    for observer in (first, hanging, last):
        board.register(observer)
    for number in (1, 2):
        board.notify_within(0.05, "wtransfer_weights_committed", **COMMIT)
        assert (first.notified, last.notified) == (["v"] * number,) * 2
    # Not a second time while the first call hangs.
    assert hanging.num_called == 1
    name = f"{Hanging.__module__}.Hanging"
    assert f"wtransfer_weights_committed has not returned within 0.05 s from {name}" in caplog.text
    assert f"is kept from {name}" in caplog.text
    hanging.gate.set()
    assert hanging.over.wait(5.0)
    while hanging.num_called == 1:
        board.notify_within(5.0, "wtransfer_weights_committed", **COMMIT)
    assert hanging.num_called == 2


def test_observer_that_hangs_is_notified_in_a_forked_child(board):
    hanging = Hanging()
    board.register(hanging)
    board.notify_within(0.05, "wtransfer_weights_committed", **COMMIT)
    pid = os.fork()
    if pid == 0:
        hanging.gate.set()
        board.notify_within(5.0, "wtransfer_weights_committed", **COMMIT)
        os._exit(hanging.num_called)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
    hanging.gate.set()
    assert hanging.over.wait(5.0)


def test_observer_that_is_unregistered_meanwhile_is_not_called(board):
    ended = Observer()

    class Ending(Observer):
        @hookimpl
        def wtransfer_weights_committed(self):
            board.unregister(ended)

    board.register(ended)
    board.register(Ending())  # registered last: called first
    board.notify("wtransfer_weights_committed", **COMMIT)
    assert ended.notified == []


def test_observer_that_gets_no_thread_is_left_out_and_named(board, caplog, no_thread_starts):
    observer = Observer()
    board.register(observer)
    with no_thread_starts():
        board.notify_within(5.0, "wtransfer_weights_committed", **COMMIT)
    assert observer.notified == []
    assert f"is kept from {Observer.__module__}.Observer: can't start new thread" in caplog.text
    board.notify_within(5.0, "wtransfer_weights_committed", **COMMIT)
    assert observer.notified == ["v"]


@pytest.mark.parametrize(
    "error", [ValueError, SystemExit, asyncio.CancelledError, KeyboardInterrupt]
)
def test_error_of_an_observer_on_a_thread_of_its_own_is_logged(board, caplog, error):
    class Bad:
        @hookimpl
        def wtransfer_weights_committed(self):
            raise error("no")

    board.register(Bad())
    board.notify_within(5.0, "wtransfer_weights_committed", **COMMIT)
    assert "Bad" in caplog.text
    assert "wtransfer_weights_committed" in caplog.text


@pytest.fixture
def notifications(board):
    made = Notifications(board)
    yield made
    made.close(wait=True)


def commit(number):
    return {**COMMIT, "version": number}


def test_notifications_of_a_worker_keep_their_order_and_wait_for_no_observer(board, notifications):
    hanging, observer = Hanging(), Observer()
    board.register(observer)
    board.register(hanging)
    for number in range(20):
        notifications.notify("wtransfer_weights_committed", **commit(number))
    assert observer.notified == []
    hanging.gate.set()
    notifications.close(wait=True)
    assert observer.notified == [*range(20)]


def test_notifications_behind_a_slow_observer_are_not_held_for_long(
    board, notifications, caplog, monkeypatch, until
):
    monkeypatch.setattr("wtransfer.registry.hooks.WITHIN_S", 0.1)
    monkeypatch.setattr("wtransfer.registry.hooks.LEAST_S", 0.01)
    hanging, observer = Hanging(), Observer()
    board.register(observer)
    board.register(hanging)
    for number in range(20):
        notifications.notify("wtransfer_weights_committed", **commit(number))
    until(lambda: len(observer.notified) == 20)
    assert hanging.num_called == 1
    assert caplog.text.count("has not returned within") == 1
    assert caplog.text.count("is kept from") == 19
    hanging.gate.set()
    assert hanging.over.wait(5.0)


def test_notification_that_comes_late_waits_for_an_observer_the_less(later, until):
    class Recording(PluginManager):
        """Notes how long observers would be waited for, and lets the first call wait."""

        def __init__(self):
            super().__init__()
            self.waits, self.gate = [], threading.Event()

        def notify_within(self, within_s, hook_name, **facts):
            self.waits.append(within_s)
            assert self.gate.wait(10.0)

    recording = Recording()
    recording.register(Observer())
    notifications = Notifications(recording)
    notifications.notify("wtransfer_weights_committed", **COMMIT)
    until(lambda: recording.waits)
    notifications.notify("wtransfer_weights_committed", **COMMIT)
    later(hooks.WITHIN_S)
    notifications.notify("wtransfer_weights_committed", **COMMIT)
    recording.gate.set()
    notifications.close(wait=True)
    assert recording.waits[1] == hooks.LEAST_S
    assert hooks.LEAST_S < recording.waits[2] <= hooks.WITHIN_S


def test_notification_after_the_close_is_made(board, notifications, until):
    observer = Observer()
    board.register(observer)
    notifications.notify("wtransfer_weights_committed", **COMMIT)
    notifications.close(wait=True)
    assert observer.notified == ["v"]
    notifications.notify("wtransfer_weights_committed", **COMMIT)
    until(lambda: observer.notified == ["v", "v"])


def test_notification_for_which_there_is_no_thread_is_logged(
    board, notifications, caplog, no_thread_starts
):
    observer = Observer()
    board.register(observer)
    with no_thread_starts():
        notifications.notify("wtransfer_weights_committed", **COMMIT)
    assert f"is kept from {Observer.__module__}.Observer: can't start new thread" in caplog.text
    notifications.notify("wtransfer_weights_committed", **commit("next"))
    notifications.close(wait=True)
    assert observer.notified == ["next"]


def test_observer_of_a_worker_is_called_in_the_context_of_its_event(board, notifications):
    spans, span = [], contextvars.ContextVar("span")

    class Tracing:
        @hookimpl
        def wtransfer_weights_committed(self):
            spans.append((span.get(), notifications.calls_here()))

    board.register(Tracing())
    span.set("step")
    notifications.notify("wtransfer_weights_committed", **COMMIT)
    notifications.close(wait=True)
    assert spans == [("step", True)]
    assert not notifications.calls_here()


def test_class_is_refused(board):
    with pytest.raises(PluginTypeError, match="got the class Observer"):
        board.register(Observer)


def test_object_that_implements_no_hook_is_refused(board):
    class Forgotten:
        def wtransfer_weights_committed(self): ...

    for silent in (Forgotten(), types.ModuleType("silent")):
        with pytest.raises(PluginTypeError, match="implements no hook, so it would never"):
            board.register(silent)
    # A module of a backend may have none.
    board.register_backend(types.ModuleType("silent"))


def test_second_registration_is_refused(board):
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
def test_refused_observer_leaves_nothing_registered(board, name, function, text):
    bad = type("Bad", (Observer,), {name: hookimpl(function)})()
    with pytest.raises(PluginTypeError, match=text) as caught:
        board.register(bad)
    assert "wtransfer_round_started" in str(caught.value)
    board.notify("wtransfer_weights_committed", **COMMIT)
    assert bad.notified == []
    board.register(Observer())


def test_optional_hook_of_a_later_release_is_accepted(board):
    class Later(Observer):
        @hookimpl(optionalhook=True)
        def wtransfer_from_the_future(self): ...

    later = Later()
    board.register(later)
    board.notify("wtransfer_weights_committed", **COMMIT)
    assert later.notified == ["v"]


def test_wrapper_is_refused(board):
    class Wrapper:
        @hookimpl(wrapper=True)
        def wtransfer_weights_committed(self):
            return (yield)

    with pytest.raises(PluginTypeError, match="as a wrapper"):
        board.register(Wrapper())


def test_registration_evaluates_no_properties(board):
    class Engine(Observer):
        @property
        def rank(self):
            raise RuntimeError("not initialised")

        def shutdown(self): ...

    engine = Engine()
    board.attach(engine)
    board.notify("wtransfer_weights_committed", **COMMIT)
    assert engine.notified == ["v"]


@pytest.mark.parametrize("beside", [False, True])
def test_attached_observer_is_notified_until_the_backends_shutdown(board, beside):
    class Engine(Observer):
        stopped = 0

        def shutdown(self, wait=True):
            self.stopped += 1
            return wait

    engine = Engine()
    observer = Observer() if beside else engine
    board.attach(engine, observer if beside else None)
    board.notify("wtransfer_weights_committed", **COMMIT)
    assert engine.shutdown(wait=False) is False
    board.notify("wtransfer_weights_committed", **COMMIT)
    engine.shutdown()
    assert observer.notified == ["v"]
    assert engine.stopped == 2


def test_backend_with_slots_is_not_kept_registered(board, caplog):
    class Slotted:
        __slots__ = ()

        def shutdown(self): ...

        @hookimpl
        def wtransfer_weights_committed(self): ...

    board.attach(Slotted())
    assert board.get_plugins() == set()
    assert "has __slots__" in caplog.text


def test_backend_without_hooks_is_not_wrapped(board):
    class Engine:
        def shutdown(self): ...

    engine = Engine()
    board.attach(engine)
    assert vars(engine) == {}
    assert board.get_plugins() == set()


def test_module_that_defines_a_loaded_backend_is_notified_once(site):
    site.module("acme_module", OBSERVING)
    site.module("front_module", "from acme_module import Engine")
    site.add("acme-wt", fast="front_module:Engine", again="acme_module:Engine")
    registry = site.engines()
    registry.get("fast")
    registry.get("again")
    site.board.notify("wtransfer_weights_committed", **COMMIT)
    assert sys.modules["acme_module"].notified == [("v", "f")]


@pytest.mark.parametrize(
    ("added", "text"),
    [
        ("def wtransfer_load(kind, name): ...", "implements wtransfer_load"),
        ("def wtransfer_weights_committed(colour): ...", "colour"),
    ],
)
def test_backend_with_a_forbidden_hook_in_its_module_is_refused(site, added, text):
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


def test_application_hook_is_asked_first(site):
    registry = answering(site, lambda kind, name: Mine if name == "shm" else None)
    assert registry.get("shm") is Mine
    assert registry.record("shm").origin == "application"
    assert registry.get("wtransfer:shm").__module__ == "builtin_shm"
    with pytest.raises(UnknownBackendError):
        registry.get("other")


def test_application_hook_may_answer_with_a_class_that_is_loaded_under_another_name(site):
    registry = site.engines()
    loaded = registry.get("shm")
    site.board.register(Answers(lambda kind, name: loaded if name == "alias" else None))
    assert registry.get("alias") is loaded
    assert registry.record("alias").origin == "application"


def test_repeated_look_up_asks_no_hook(site):
    asked = []
    registry = answering(site, lambda kind, name: asked.append((kind, name)))
    registry.get("shm")
    registry.get("shm")
    assert asked == [("engines", "shm")]


@pytest.mark.parametrize("answer", [3, [], types.SimpleNamespace])
def test_answer_of_an_application_hook_is_checked(site, answer):
    registry = answering(site, lambda kind, name: answer)
    with pytest.raises(PluginTypeError, match=r"'shm' \(application\) cannot be used"):
        registry.get("shm")


def test_error_of_an_application_hook_is_named(site):
    def fails(kind, name):
        return 1 / 0

    registry = answering(site, fails)
    with pytest.raises(PluginBrokenError, match="application's wtransfer_load hook") as caught:
        registry.get("shm")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_registration_during_a_load_decides_later_look_ups(site):
    class Other(Mine): ...

    registry = site.engines()

    def registers(kind, name):
        registry.register("fast", Mine)
        return Other

    site.board.register(Answers(registers))
    assert registry.get("fast") is Other
    assert registry.record("fast").origin == "run time"
    site.board.unregister(next(p for p in site.board.get_plugins() if type(p) is Answers))
    assert registry.get("fast") is Mine
