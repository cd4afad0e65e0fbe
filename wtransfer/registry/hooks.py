"""The hooks: questions and notifications of wtransfer, and how to observe.

An application registers an object or a module with functions marked by `hookimpl`::

    class Log:
        @wtransfer.hookimpl
        def wtransfer_weights_committed(self, version, fingerprint):
            print(version, fingerprint)

    wtransfer.hooks.register(Log())

A function declares only the arguments it wants. The module that defines a loaded backend is
registered automatically, and so is a backend's object that implements a hook, until its
``shutdown``.

Observers observe: they are called one by one, and the error of one is logged and affects neither
the others nor the caller. Those of a load are called on the thread that loads, so they must not
block; those of a round come on threads of their own. A publisher waits for each no longer than its
deadline; a worker's round waits for none (`Notifications`). An observer that takes more than a
second is named in the log. There is no hook per tensor or block.
"""

from __future__ import annotations

import contextvars
import functools
import logging
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

import pluggy

from wtransfer.calls import Call, SerialThread
from wtransfer.deadline import Deadline
from wtransfer.errors import AlreadyRegisteredError, PluginTypeError, StallError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

PROJECT = "wtransfer"
LOAD = "wtransfer_load"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

logger = logging.getLogger(__name__)

SLOW_S = 1.0
"""Seconds after which an observer is named in the log."""
WITHIN_S = 5.0
"""Longest wait for an observer of a worker's event, in seconds; less for an event that had to wait
for those before it."""
LEAST_S = 0.1
"""Least wait for an observer of a worker, in seconds, however late its call."""


class Report(Protocol):
    """Part of a round's report that observers read (`wtransfer.weight_sync.report.Report`)."""

    @property
    def version(self) -> str:
        """Label of the update."""

    @property
    def fingerprint(self) -> str:
        """Identity of the weights that were sent."""

    @property
    def workers(self) -> Sequence[Any]:
        """Outcome of each worker (`wtransfer.weight_sync.report.WorkerReport`)."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds by phase, and their sum ``total``."""

    @property
    def packed_s(self) -> float:
        """Seconds until the trainer could train on."""

    @property
    def nonfinite(self) -> Mapping[str, int]:
        """Tensors with NaN or infinity -> how many of their elements."""

    @property
    def ok(self) -> bool:
        """True if every worker of the round has proven that it holds the update."""


@hookspec(firstresult=True)
def wtransfer_load(kind: str, name: str) -> type | None:
    """Return the class of a backend, or None to leave the answer to others.

    Called once for each name, when it is first used; the answer is remembered. Only an object that
    the application registered may implement it, and is asked before pins and plug-ins.

    Args:
        kind: ``engines``, ``connectors``, ``specs`` or ``trainers``.
        name: The name as it was written.
    """


@hookspec
def wtransfer_backend_loaded(
    kind: str,
    name: str,
    cls: type,
    distribution: str | None,
    version: str | None,
) -> None:
    """A backend was loaded and checked. Called once for each backend of the process.

    Args:
        kind: Its kind.
        name: Its name as declared.
        cls: The class.
        distribution: Distribution that declares it; None where a program provided it.
        version: Version of that distribution.
    """


@hookspec
def wtransfer_round_started(round_id: str, version: str, worker: str | None) -> None:
    """A round began: on the trainer before its plan, on a worker when the plan has come.

    Args:
        round_id: The round.
        version: Label of the update.
        worker: Name of the worker session; None on the trainer.
    """


@hookspec
def wtransfer_weights_committed(
    version: str, fingerprint: str, round_id: str, worker: str | None
) -> None:
    """New weights serve: on a worker after it applied them, on the trainer when all have.

    Args:
        version: Label of the update.
        fingerprint: Identity of the weights.
        round_id: The round.
        worker: Name of the worker session; None on the trainer.
    """


@hookspec
def wtransfer_round_aborted(
    error: BaseException, round_id: str, version: str, worker: str | None
) -> None:
    """A round ended without a commit; the old version serves on.

    Args:
        error: Cause of the abort.
        round_id: The round.
        version: Label of the update.
        worker: Name of the worker session; None on the trainer.
    """


@hookspec
def wtransfer_round_ended(  # noqa: PLR0917  # an observer declares those that it wants
    round_id: str,
    version: str,
    outcome: str,
    report: Report | None,
    error: BaseException | None,
    seconds: Mapping[str, float],
    nbytes: int,
    num_workers: int,
    is_catch_up: bool,
) -> None:
    """A round of the publisher is over, with any outcome; on the trainer only.

    Called once for each `wtransfer_round_started` of the trainer, on the round's thread, before
    ``publish`` returns.

    Args:
        round_id: The round.
        version: Label of the update.
        outcome: As in the report, ``committed``, ``mixed`` or ``verified``; else ``aborted``, or
            ``failed`` where the publisher failed after its commit was sent.
        report: The report; None where there is none.
        error: Error that ``publish`` raises; else None. There are both where no worker holds the
            version after the commit.
        seconds: Seconds by phase, in their order, and their sum ``total``; of a round that was
            aborted, the last one is the phase that it was aborted in.
        nbytes: Bytes of the update; 0 until it is planned.
        num_workers: Workers that took part.
        is_catch_up: True if it brought the current version to workers that lacked it.
    """


class PluginManager(pluggy.PluginManager):
    """Observers, and the hook by which backends are loaded. The process has one; tests make theirs.

    Registering checks first and acts then; calls need no lock, since pluggy copies its lists.
    """

    def __init__(self) -> None:
        super().__init__(PROJECT)
        self.add_hookspecs(sys.modules[__name__])
        self._lock = threading.RLock()
        self._seconds = dict.fromkeys((hook for hook in HOOKS if hook != LOAD), 0.0)
        self._overdue: dict[int, tuple[object, Call, int]] = {}
        """Identity of an observer -> itself, its call that was given up, and its process."""
        self._callers: dict[threading.Thread, threading.Thread] = {}
        """Thread of an observer -> the thread that waits for it."""

    def register(self, plugin: object, name: str | None = None) -> str | None:
        """Register an object or module of the application.

        Raises:
            PluginTypeError: The object is a class, implements no hook, or an implementation fits
                none.
            AlreadyRegisteredError: The object is registered already.
        """
        if not isinstance(plugin, type) and not self.hears(plugin):
            raise PluginTypeError(
                f"{plugin!r} implements no hook, so it would never be called: mark its functions "
                f"with wtransfer.hookimpl. The hooks are {', '.join(HOOKS)}"
            )
        return self._register(plugin, name)

    def _register(self, plugin: object, name: str | None = None) -> str | None:
        if isinstance(plugin, type):
            raise PluginTypeError(
                f"hooks.register got the class {plugin.__name__}; expected an object or a "
                "module: of a class the argument self would count as one of the hook's"
            )
        problem = ""
        for hook_name, options in self._implementations(plugin):
            if hook_name not in HOOKS and not options.get("optionalhook"):
                problem = f"unknown hook {hook_name!r}"
            elif hook_name != LOAD and (options.get("wrapper") or options.get("hookwrapper")):
                raise PluginTypeError(
                    f"{plugin!r} implements {hook_name} as a wrapper; observers are called one by "
                    "one, and there is nothing to wrap"
                )
        with self._lock:
            if self.is_registered(plugin):
                raise AlreadyRegisteredError(f"{plugin!r} is registered for hooks already")
            try:
                if not problem:
                    return super().register(plugin, name)
            except pluggy.PluginValidationError as error:
                problem = str(error)
        raise PluginTypeError(
            f"{plugin!r} implements a hook that does not fit: {problem}. "
            f"The hooks are {', '.join(HOOKS)}"
        )

    def unregister(self, plugin: object = None, name: str | None = None) -> Any:
        """Unregister an object or module; idempotent."""
        with self._lock:
            return super().unregister(plugin, name) if self.is_registered(plugin) else None

    def register_backend(self, plugin: object) -> None:
        """Register a backend's module or object, which may not answer ``wtransfer_load``.

        Idempotent.

        Raises:
            PluginTypeError: An implementation answers ``wtransfer_load``, or fits no hook.
        """
        with self._lock:
            if self.is_registered(plugin):
                return
            if any(hook_name == LOAD for hook_name, _ in self._implementations(plugin)):
                raise PluginTypeError(
                    f"{plugin!r} implements {LOAD}, by which it could replace other backends; only "
                    "an object that the application passes to wtransfer.hooks.register may"
                )
            self._register(plugin)

    def hears(self, plugin: object) -> bool:
        """Return whether an object implements a hook."""
        return any(self._implementations(plugin))

    def attach(self, backend: Any, plugin: object = None) -> None:
        """Register an object that implements a hook until a backend's ``shutdown`` is called.

        Args:
            backend: Anything with a ``shutdown`` method.
            plugin: The object with the hooks, if there are any; by default the same.

        Raises:
            PluginTypeError: An implementation fits no hook.
        """
        plugin = backend if plugin is None else plugin
        if not self.hears(plugin):
            return
        shutdown = backend.shutdown

        def unregister_and_shut_down(*args: Any, **kwargs: Any) -> Any:
            self.unregister(plugin)
            return shutdown(*args, **kwargs)

        self.register_backend(plugin)
        try:
            backend.shutdown = unregister_and_shut_down
        except AttributeError:
            self.unregister(plugin)
            logger.warning(
                "The hooks of %r are not called: the shutdown of %r, which ends them, cannot be "
                "wrapped; its class has __slots__",
                plugin,
                backend,
            )

    def notify(self, hook_name: str, **facts: object) -> None:
        """Call every observer, the last registered first. Never raises an observer's error.

        Only Ctrl-C on the main thread passes: it belongs to the user.

        Args:
            hook_name: Name of a hook above, but not ``wtransfer_load``.
            **facts: Every argument of the hook.
        """
        self._notify(hook_name, facts, lambda _plugin, observe: observe())

    def notify_within(self, within_s: float, hook_name: str, **facts: object) -> None:
        """Call every observer on a thread of its own, one after the other, in the caller's context.

        Args:
            within_s: Longest wait for one observer, in seconds. One that has not returned by then
                is left to its thread, and is not called again until it has.
            hook_name: As in `notify`.
            **facts: As in `notify`.
        """
        self._notify(hook_name, facts, functools.partial(self._call_within, within_s))

    def _notify(
        self,
        hook_name: str,
        facts: Mapping[str, object],
        make: Callable[[object, Callable[[], object]], object],
    ) -> None:
        caller = getattr(self.hook, hook_name)
        assert caller.spec is not None
        assert set(facts) == set(caller.spec.argnames), f"{hook_name} takes {caller.spec.argnames}"
        for observer in reversed(caller.get_hookimpls()):
            # A backend's may be shut down while the one before it takes its time.
            if not self.is_registered(observer.plugin):
                continue
            observe = functools.partial(observer.function, *(facts[n] for n in observer.argnames))
            begun = time.monotonic()
            skipped = False
            try:
                make(observer.plugin, observe)
            except _SkippedError as error:
                skipped = True
                logger.error("%s %s", hook_name, error)  # noqa: TRY400  # the frames are ours
            # CancelledError and pytest's outcomes are no Exception.
            except BaseException as error:
                # Ctrl-C strikes the main thread wherever it is: it is not the observer's error.
                on_main = threading.current_thread() is threading.main_thread()
                if isinstance(error, KeyboardInterrupt) and on_main:
                    raise
                logger.exception("observer %r failed in %s", observer.plugin, hook_name)
            took_s = time.monotonic() - begun
            with self._lock:
                self._seconds[hook_name] += took_s
            if took_s > SLOW_S and not skipped:
                logger.warning("%s took %.1f s in %s", hook_name, took_s, _named(observer.plugin))

    def observes(self, hook_name: str) -> bool:
        """Return whether there is an observer of a hook."""
        return bool(getattr(self.hook, hook_name).get_hookimpls())

    def seconds(self) -> dict[str, float]:
        """Return, by hook, the seconds for which its observers were waited for so far."""
        with self._lock:
            return dict(self._seconds)

    def caller_of(self, thread: threading.Thread) -> threading.Thread:
        """Return the thread that waits for an observer on this thread; else the thread itself."""
        return self._callers.get(thread, thread)

    def _call_within(self, within_s: float, plugin: object, observe: Callable[[], object]) -> None:
        """Call an observer on a thread of its own, and wait for it.

        Raises:
            _SkippedError: It has not returned in time, or has not yet from an earlier call, or no
                thread can be started for it.
        """
        if (earlier := self._overdue.get(id(plugin))) is not None:
            # A fork()ed child has the call and not its thread.
            if earlier[2] == os.getpid() and not earlier[1].done.is_set():
                raise _SkippedError(f"is kept from {_named(plugin)}, which has not returned yet")
            # Here and not after the call: another thread's, begun before, may be overdue by then.
            self._overdue.pop(id(plugin), None)
        context, caller, own = contextvars.copy_context(), threading.current_thread(), []

        def run() -> None:
            own.append(threading.current_thread())
            self._callers[own[0]] = caller
            try:
                context.run(observe)
            finally:
                self._callers.pop(own[0], None)

        call = Call(run)
        try:
            call.start("wtransfer-observer")
        except RuntimeError as error:
            # Here it would have no bound. At the end of the interpreter there is no other place.
            if threading.main_thread().is_alive():
                raise _SkippedError(f"is kept from {_named(plugin)}: {error}") from error
            call.run()
        if not call.done.wait(within_s):
            for thread in own:
                # No one waits for it any more: it may wait for the round.
                self._callers.pop(thread, None)
            self._overdue[id(plugin)] = plugin, call, os.getpid()
            within = f"{round(within_s, 2):g} s"
            raise _SkippedError(f"has not returned within {within} from {_named(plugin)}")
        try:
            call.outcome()
        except KeyboardInterrupt as error:
            # Its own: Ctrl-C strikes the main thread.
            raise RuntimeError("the observer raised KeyboardInterrupt") from error

    def _implementations(self, plugin: object) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for name in dir(plugin):
            options = self.parse_hookimpl_opts(plugin, name)
            if options is not None:
                yield options.get("specname") or name, options


class Notifications:
    """Notifies observers of a worker's events, in their order, on a thread that nothing waits for.

    So no observer delays a round, nor a host that has paused its serving engine for a commit.

    The order is that in which `notify` was called. A worker calls it under the lock of its state,
    together with the event: the next event, which may be the plan of the next round, needs that
    lock, so its notification comes later.

    The queue holds no notification for long: each observer has what is left of `WITHIN_S` since the
    event as its notification begins, and at least `LEAST_S`. Behind an observer that is slow again
    and again, later ones are thus not waited for, and are kept from it while it runs.
    """

    def __init__(self, board: PluginManager) -> None:
        self._board = board
        self._calls = SerialThread(_NOTIFIER)
        self._closed = False
        # Not `Changed`: it is held for a put, and never while anything is waited for.
        self._lock = threading.Lock()

    def notify(self, hook_name: str, **facts: object) -> None:
        """Queue the notification, with the caller's context; never waits for an observer.

        Args:
            hook_name: As in `PluginManager.notify`.
            **facts: Likewise.
        """
        if not self._board.observes(hook_name):
            return
        deadline, context = Deadline(WITHIN_S), contextvars.copy_context()

        def call() -> None:
            within_s = max(deadline.remaining(), LEAST_S)
            context.run(self._board.notify_within, within_s, hook_name, **facts)

        try:
            with self._lock:
                if self._closed:
                    # Of the commit that was being applied as its worker was closed: the last event.
                    self._calls = SerialThread(_NOTIFIER)
                self._calls.submit(call)
                if self._closed:
                    self._calls.stop()
        except RuntimeError:
            # No thread: there is none for an observer either, which is logged of each of them.
            self._board.notify_within(LEAST_S, hook_name, **facts)

    def calls_here(self) -> bool:
        """Return whether the caller is an observer that is being notified."""
        return self._calls.runs(self._board.caller_of(threading.current_thread()))

    def close(self, *, wait: bool) -> None:
        """End the thread when everything is notified.

        Args:
            wait: Wait for that, for at most `WITHIN_S`.
        """
        with self._lock:
            self._closed = True
            self._calls.stop()
        if wait:
            self._calls.join(WITHIN_S)


class _SkippedError(StallError):
    """An observer has not returned, or was not called; the text names it."""


def _named(plugin: object) -> str:
    kind = type(plugin)
    return getattr(plugin, "__name__", None) or f"{kind.__module__}.{kind.__qualname__}"


_NOTIFIER = "wtransfer-observers"

HOOKS = tuple(name for name in list(vars()) if name.startswith("wtransfer_"))

board = PluginManager()
"""Plugin manager of this process."""

register = board.register
unregister = board.unregister
notify = board.notify
notify_within = board.notify_within
caller_of = board.caller_of
