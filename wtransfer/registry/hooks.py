"""The hooks: what wtransfer asks and tells, and how to listen.

An application registers an object or a module with functions marked by `hookimpl`::

    class Log:
        @wtransfer.hookimpl
        def wtransfer_weights_committed(self, version, fingerprint):
            print(version, fingerprint)

    wtransfer.hooks.register(Log())

A function declares only the arguments it wants. The module that defines a loaded backend is
registered by itself, and so is a backend's object that implements a hook, until its ``shutdown``.

Observers observe: they are called one by one, and one that raises is logged and disturbs nobody.
They are called on the thread where the thing happened, so they must not block. There is no hook
per tensor or block.
"""

from __future__ import annotations

import inspect
import logging
import sys
import threading
from typing import TYPE_CHECKING, Any

import pluggy

from wtransfer.errors import AlreadyRegisteredError, PluginTypeError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PROJECT = "wtransfer"
LOAD = "wtransfer_load"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

logger = logging.getLogger(__name__)


@hookspec(firstresult=True)
def wtransfer_load(kind: str, name: str) -> type | None:
    """Return the class of a backend, or None to leave the answer to others.

    Called once for each name, when it is first used; the answer is remembered. Only an object that
    the application registered may implement it: it is asked before pins and plug-ins.

    Args:
        kind: ``engines``, ``connectors``, ``specs`` or ``trainers``.
        name: The name as it was asked for.
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
    """A round began: on the trainer with its plan, on a worker when it accepted the plan.

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
        error: Why.
        round_id: The round.
        version: Label of the update.
        worker: Name of the worker session; None on the trainer.
    """


class _Manager(pluggy.PluginManager):
    def parse_hookimpl_opts(self, plugin: object, name: str) -> Any:
        # Releases of pluggy differ in whether they evaluate every property of an object here; an
        # engine's may well raise before it is initialised.
        static = inspect.getattr_static(plugin, name, None)
        marked = hasattr(getattr(static, "__func__", static), f"{PROJECT}_impl")
        return super().parse_hookimpl_opts(plugin, name) if marked else None


class Board:
    """Who listens. The process has one; tests make their own."""

    def __init__(self) -> None:
        self.manager: pluggy.PluginManager = _Manager(PROJECT)
        self.manager.add_hookspecs(sys.modules[__name__])
        # Registering checks first and acts then; calling needs no lock, pluggy copies its lists.
        self._lock = threading.RLock()

    def register(self, observer: object) -> None:
        """Let an object or module of the application listen.

        Raises:
            PluginTypeError: It is a class, or an implementation fits no hook.
            AlreadyRegisteredError: It listens already.
        """
        self._register(observer, may_answer=True)

    def unregister(self, observer: object) -> None:
        """Let it listen no more; nothing happens if it does not."""
        with self._lock:
            if self.manager.is_registered(observer):
                self.manager.unregister(observer)

    def register_backend(self, observer: object) -> None:
        """Let a backend's module or object listen, once; it may not answer ``wtransfer_load``.

        Raises:
            PluginTypeError: It does answer, or an implementation fits no hook.
        """
        with self._lock:
            if not self.manager.is_registered(observer):
                self._register(observer, may_answer=False)

    def hears(self, observer: object) -> bool:
        """Whether an object implements a hook."""
        return any(self._implementations(observer))

    def attach(self, backend: Any) -> None:
        """Let an object that a factory made listen until its ``shutdown`` is called.

        Args:
            backend: Anything with a ``shutdown`` method; nothing happens if it has no hooks.

        Raises:
            PluginTypeError: An implementation fits no hook.
        """
        if not self.hears(backend):
            return
        shutdown = backend.shutdown

        def leave(*args: Any, **kwargs: Any) -> Any:
            self.unregister(backend)
            return shutdown(*args, **kwargs)

        self.register_backend(backend)
        backend.shutdown = leave

    def notify(self, hook_name: str, **facts: object) -> None:
        """Tell every observer, the last registered first. Never raises an observer's error.

        Only Ctrl-C on the main thread passes, for it belongs to the user.

        Args:
            hook_name: One of the hooks above, but ``wtransfer_load``.
            **facts: All of its arguments.
        """
        caller = getattr(self.manager.hook, hook_name)
        assert caller.spec is not None
        assert set(facts) == set(caller.spec.argnames), f"{hook_name} takes {caller.spec.argnames}"
        for implementation in reversed(caller.get_hookimpls()):
            _tell(implementation, hook_name, facts)

    def _register(self, observer: object, *, may_answer: bool) -> None:
        if isinstance(observer, type):
            raise PluginTypeError(
                f"hooks.register got the class {observer.__name__}; expected an object or a "
                "module: of a class the argument self would count as one of the hook's"
            )
        for hook_name, options in self._implementations(observer):
            _check_implementation(observer, hook_name, options, may_answer=may_answer)
        with self._lock:
            if self.manager.is_registered(observer):
                raise AlreadyRegisteredError(f"{observer!r} is registered for hooks already")
            try:
                self.manager.register(observer)
                self.manager.check_pending()
            except pluggy.PluginValidationError as error:
                # Some releases of pluggy leave half of a refused plug-in behind.
                self.unregister(observer)
                raise PluginTypeError(
                    f"{observer!r} implements a hook that does not fit: {error}. "
                    f"The hooks are {', '.join(_HOOKS)}"
                ) from error

    def _implementations(self, observer: object) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for name in dir(observer):
            options = self.manager.parse_hookimpl_opts(observer, name)
            if options is not None:
                yield options.get("specname") or name, options


def _tell(observer: pluggy.HookImpl, hook_name: str, facts: Mapping[str, object]) -> None:
    try:
        observer.function(*(facts[each] for each in observer.argnames))
    except BaseException as error:  # CancelledError and pytest's outcomes are no Exception
        # Ctrl-C strikes the main thread wherever it is: it is the user's, not the observer's.
        on_main = threading.current_thread() is threading.main_thread()
        if isinstance(error, KeyboardInterrupt) and on_main:
            raise
        logger.exception("observer %r failed in %s", observer.plugin, hook_name)


def _check_implementation(
    observer: object, hook_name: str, options: Mapping[str, Any], *, may_answer: bool
) -> None:
    if hook_name == LOAD:
        if not may_answer:
            raise PluginTypeError(
                f"{observer!r} implements {LOAD}, by which it could replace other backends; only "
                "an object that the application passes to wtransfer.hooks.register may"
            )
    elif options.get("wrapper") or options.get("hookwrapper"):
        raise PluginTypeError(
            f"{observer!r} implements {hook_name} as a wrapper; observers are called one by one, "
            "and there is nothing to wrap"
        )


_HOOKS = tuple(name for name in list(vars()) if name.startswith("wtransfer_"))

board = Board()
"""The process's own."""

register = board.register
unregister = board.unregister
notify = board.notify
