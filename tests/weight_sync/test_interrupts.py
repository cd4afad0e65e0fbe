"""FAULTS 49 and 52: a signal handler that raises leaves a publisher, a rank and a worker usable."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import random
import signal
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch.distributed as dist

import wtransfer
from wtransfer.errors import (
    ClosedError,
    CommitError,
    RoundAbortedError,
    RoundBusyError,
    WTransferError,
)
from wtransfer.testing.contents import contents
from wtransfer.weight_sync.trainer.sharded import ShardedSource, TrainerRank

PATIENCE_S = 10.0
STDLIB = Path(threading.__file__).parent
OURS = (
    f"{Path(wtransfer.__file__).parent}/",
    *map(str, (STDLIB / "threading.py", STDLIB / "queue.py", STDLIB / "contextlib.py")),
    f"{STDLIB / 'concurrent' / 'futures'}/",
)


def _is_ours(frame):
    return frame.f_code.co_filename.startswith(OURS[0])


class Interruption(BaseException):
    """What the signal handler raises."""


class InterruptAt:
    """Raises at the n-th place where CPython runs signal handlers, in our code or in what it uses.

    CPython looks for signals as a Python function is entered, after a call of a C function has
    returned, and at a jump back. The profiler's events come at the first two, and what it raises
    passes through the frame as what a handler raises does. `with` enters its lock by no such call.
    The loops of these methods make calls, which leaves nothing to the third. The trace function's
    events would come before any instruction: also between a lock's taking and the `with` block,
    where no signal strikes.
    """

    def __init__(self, number):
        self.left = number
        self.fired = False
        self.where = ""

    def __call__(self, frame, event, arg):
        code = frame.f_code
        if event not in ("call", "c_return") or not code.co_filename.startswith(OURS):
            return
        self.left -= 1
        if self.left < 0 and not self.fired:
            self.fired = True
            what = getattr(arg, "__qualname__", "")
            self.where = f"{code.co_filename}:{frame.f_lineno} {code.co_name} {event} {what}"
            raise Interruption

    def __enter__(self):
        sys.setprofile(self)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)


class Signals:
    """Sends this thread one signal at a random moment of a call."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.mean_s = 0.001
        """How long a call takes that is not interrupted."""
        self.armed = False
        self.where = ""
        self.main = threading.get_ident()
        self.orders = ThreadPoolExecutor(1)
        self.before = signal.signal(signal.SIGUSR1, self.strike)

    def strike(self, _signum, frame):
        # Elsewhere it may be an event loop that is torn, which is not ours.
        if self.armed and any(_is_ours(each) for each, _ in traceback.walk_stack(frame)):
            self.armed = False
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            raise Interruption

    def send(self, delay_s):
        time.sleep(delay_s)
        signal.pthread_kill(self.main, signal.SIGUSR1)

    @contextlib.contextmanager
    def striking(self):
        sent = self.orders.submit(self.send, self.random.uniform(0, 1.2 * self.mean_s))
        begun = time.monotonic()
        self.armed = True
        try:
            yield
        finally:
            if self.armed:
                self.mean_s += (time.monotonic() - begun - self.mean_s) / 16
            self.armed = False
            sent.result()

    def close(self):
        self.orders.shutdown()
        signal.signal(signal.SIGUSR1, self.before)


@pytest.fixture
def signals():
    made = Signals(1)
    yield made
    made.close()


@contextlib.contextmanager
def in_background(loop):
    """Call something again and again on a thread until the end."""
    stopped = threading.Event()

    def run():
        while not stopped.is_set():
            loop()

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        try:
            yield
        finally:
            stopped.set()
        running.result(PATIENCE_S)


class Publishing:
    """A publisher in the hands of this thread, whose worker applies what comes on another one."""

    def __init__(self, made, how):
        self.made = made
        self.publisher = made.publisher
        self.member = made.members[0]
        self.how = how
        self.numbers = itertools.count()
        self.round = None

    @contextlib.contextmanager
    def ready(self):
        with in_background(lambda: self.member.session.commit_pending(0.02)):
            assert self.publisher.publish("kept").ok
            yield

    def act(self):
        publisher = self.publisher
        if self.how == "publish":
            publisher.publish("interrupted")
        elif self.how == "publish and go on":
            round_ = publisher.publish("interrupted", wait=False)
            round_.packed()
            round_.result()
        elif self.how == "publish_async":
            asyncio.run(publisher.publish_async("interrupted"))
        else:
            publisher.rollback("kept")

    def check(self):
        deadline = time.monotonic() + PATIENCE_S
        # The store keeps the last few: the version to go back to is always among them.
        version = "kept"
        self.made.source["layer.0"] += 1
        while True:
            try:
                assert self.publisher.publish(version).ok
                break
            except RoundBusyError:
                # The round that was interrupted may still wind down, for a second at most.
                assert time.monotonic() < deadline
        assert self.member.session.version == version
        assert self.member.contents == contents(self.made.source)


class Worker:
    """A worker in the hands of this thread; its publisher publishes on another one."""

    def __init__(self, made, how):
        self.how = how
        self.made = made
        self.member = self.made.join()
        self.session = self.member.session
        self.pool = ThreadPoolExecutor(1)
        self.numbers = itertools.count()
        self.rounds = []

    @contextlib.contextmanager
    def ready(self):
        with self.pool:
            try:
                yield
            finally:
                # Ends a round that goes on, and with it the call on the other thread.
                self.made.publisher.close()

    def prepare(self):
        self.version = f"v{next(self.numbers)}"
        self.made.source["layer.0"] += 1
        self.round = self.pool.submit(self.made.publisher.publish, self.version)
        if self.how == "commit_pending":
            while not self.session.status().pending:
                assert not self.round.done(), self.round.exception()
                time.sleep(0.0005)

    def act(self):
        if self.how == "wait_for":
            self.session.wait_for(self.version, PATIENCE_S)
        else:
            while not self.session.commit_pending(PATIENCE_S):
                pass

    def finish(self):
        end = time.monotonic() + PATIENCE_S
        while not self.round.done():
            # Long before the publisher's deadline, which would end the round as well.
            assert time.monotonic() < end, (
                f"the publisher of {self.version!r} has heard no outcome of it for {PATIENCE_S:g} s"
            )
            with contextlib.suppress(CommitError):
                self.session.commit_pending(0.001)

    def check(self):
        self.finish()
        with contextlib.suppress(CommitError, RoundAbortedError):
            self.round.result()
        if self.session.state == "behind":
            # The way back was taken, and was whole.
            assert self.session.version != self.version
        self.prepare()
        self.finish()
        assert self.round.result().ok
        assert self.session.version == self.version
        assert self.member.contents == contents(self.made.source)
        self.prepare()


class Rank:
    """Another rank in the hands of this thread; rounds are begun and ended on another one."""

    def __init__(self, source):
        self.store = dist.HashStore()
        self.source = ShardedSource(source, store=self.store, deadline_s=PATIENCE_S)
        _ = self.source.metadata  # names the ranks that are told
        self.source.refuse("of before", RoundAbortedError("there was none"))
        self.rank = TrainerRank({}, store=self.store, deadline_s=PATIENCE_S)

    def said(self, *, left):
        """Wait until the rank takes part in the round, or has left it; for a while only."""
        deadline = time.monotonic() + 0.2
        key, state = "wtransfer/default/0", self.source._lead.state
        while time.monotonic() < deadline:
            if self.store.check([key]):
                said = msgspec.msgpack.decode(self.store.get(key))[1]
                if (said["epoch"], said["attempt"]) == (state.epoch, state.attempt) and (
                    said["left"] or not left
                ):
                    return
            time.sleep(0.001)

    @contextlib.contextmanager
    def ready(self):
        def lead():
            self.source.begin("v")
            self.said(left=False)
            self.source.packed()
            self.source.end(None, "abc")
            # Only the last ends are kept: it must not get ahead of the rank.
            self.said(left=True)

        try:
            with in_background(lead):
                yield
        finally:
            self.rank.close()
            self.source.close()

    def act(self):
        assert self.rank.publish("v") == "abc"

    def check(self):
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                assert self.rank.publish("v") == "abc"
                break
            except RoundBusyError:
                assert time.monotonic() < end


PUBLISHING = ("publish", "publish and go on", "publish_async", "rollback")
WORKER = ("commit_pending", "wait_for")


@pytest.fixture
def subject(request, publishing, fleet, weights, engines, *, spread):
    how = request.param
    if how == "rollback":
        return Publishing(publishing(), how)
    if how in PUBLISHING:
        made = fleet(weights)
        made.join()
        return Publishing(made, how)
    if how == "TrainerRank.publish":
        return Rank(spread)
    return Worker(fleet(weights, engine=engines["memory"], deadline_s=10 * PATIENCE_S), how)


HOWS = (*PUBLISHING, *WORKER, "TrainerRank.publish")
subjects = pytest.mark.parametrize("subject", HOWS, indirect=True)


def interrupted_everywhere(act, check, prepare=lambda: None):
    """Interrupt a call at one place after the other, until it ends before its place is reached."""
    number, fired = -1, True
    while fired:
        number += 1
        prepare()
        interrupt = InterruptAt(number)
        came_out = None
        with interrupt:
            try:
                act()
            except BaseException as error:
                came_out = error
        assert isinstance(came_out, Interruption if interrupt.fired else type(None)), (
            f"at {interrupt.where}: {came_out!r}"
        )
        del came_out
        check()
        fired = interrupt.fired
    return number


@pytest.mark.parametrize(
    # Slow: the ways of `publish` and of `commit_pending`, with rounds on disk, and more of them.
    "subject",
    [
        pytest.param(how, marks=pytest.mark.slow) if how in {"rollback", "wait_for"} else how
        for how in HOWS
    ],
    indirect=True,
)
@pytest.mark.timeout(300)
def test_a_call_interrupted_at_any_place_leaves_its_object_usable(subject):
    with subject.ready():
        getattr(subject, "prepare", lambda: None)()
        assert interrupted_everywhere(subject.act, subject.check) > 20


@pytest.mark.parametrize("how", ["Publisher", "WorkerSession", "TrainerRank"])
@pytest.mark.timeout(300)
def test_a_close_interrupted_at_any_place_closes_all_the_same(fleet, weights, how, until):
    state = SimpleNamespace()

    def prepare():
        state.made = fleet(weights)
        session = state.made.join().session
        state.subject = {
            "Publisher": state.made.publisher,
            "WorkerSession": session,
            "TrainerRank": TrainerRank({}, store=dist.HashStore(), deadline_s=PATIENCE_S),
        }[how]
        state.use = session.commit_pending
        if how != "WorkerSession":
            state.use = functools.partial(state.subject.publish, "v")

    def close():
        state.subject.close()

    def check():
        close()
        with pytest.raises(ClosedError):
            state.use()
        if how == "WorkerSession":
            until(lambda: not state.made.publisher.workers())
        state.made.close()

    assert interrupted_everywhere(close, check, prepare) > 5


def test_result_that_is_interrupted_ends_its_round(fleet, gated, signals):
    made = fleet(gated)
    made.join({name: tensor.clone().zero_() for name, tensor in gated.tensors.items()})
    gated.gate.clear()
    round_ = made.publisher.publish("v", wait=False)
    assert gated.reached.wait(PATIENCE_S)
    # Long after the wait has begun: before it there is no round to end.
    signals.armed = True
    signals.orders.submit(signals.send, 0.5)
    with pytest.raises(Interruption):
        round_.result(PATIENCE_S)
    with pytest.raises(RoundAbortedError, match="interrupted by Interruption"):
        round_.result(PATIENCE_S)
    gated.gate.set()


def storm(subject, signals, num_strikes):
    num_struck = 0
    with subject.ready():
        getattr(subject, "prepare", lambda: None)()
        while num_struck < num_strikes:
            came_out = None
            try:
                with signals.striking():
                    subject.act()
            except Interruption:
                num_struck += 1
            except WTransferError as error:
                came_out = error
            assert came_out is None, (signals.where, came_out)
            subject.check()


@subjects
@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_storm_of_signals_leaves_every_object_usable(subject, signals):
    storm(subject, signals, 200)


@subjects
@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_long_storm_of_signals_leaves_every_object_usable(subject, signals):
    storm(subject, signals, 2000)
