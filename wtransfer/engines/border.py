"""Calls into an engine of either side: every exception becomes a `WTransferError`."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any, TypeVar

from wtransfer.calls import Call, start_call
from wtransfer.errors import EngineError, WTransferError
from wtransfer.transport.memory import is_out_of_memory, out_of_memory

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

T = TypeVar("T")

UNBLOCK_GRACE_S = 1.0
"""Seconds an engine gets to return after ``abort_weight_update`` before its thread is abandoned."""


def call_engine(method: str, call: Callable[[], T], plugin: str) -> T:
    """Call a method of an engine.

    Args:
        method: Name of the method, for errors.
        call: The call.
        plugin: The engine, for errors.

    Raises:
        WTransferError: The engine has raised; exceptions of other classes are translated.
    """
    try:
        return call()
    except WTransferError as error:
        error.add_facts(plugin=plugin)
        raise
    except BaseException as error:
        raise engine_error(method, error, plugin) from error


def engine_error(method: str, error: BaseException, plugin: str) -> WTransferError:
    """Return our error for an exception that an engine raised."""
    # The text of an error is code of the plug-in as well, which may raise.
    with contextlib.suppress(Exception):
        if is_out_of_memory(error):
            shortage = out_of_memory("the update's", error)
            shortage.add_facts(plugin=plugin)
            return shortage
        return EngineError(f"{method} raised {type(error).__name__}: {error}", plugin=plugin)
    return EngineError(
        f"{method} raised {type(error).__name__}: its text cannot be shown", plugin=plugin
    )


def guarded(what: str, call: Callable[[], object] | None) -> None:
    """Call into an engine where a failure must not stop the caller: failures are logged."""
    if call is None:
        return
    try:
        call()
    except BaseException:
        logger.exception("an engine failed in %s", what)


def shut_down_apart(engine: Any) -> Call:
    """Shut an engine down on a thread of its own: a hung engine may hang in this call, too."""
    return start_call(
        lambda: guarded("shutdown", getattr(engine, "shutdown", None)), "wtransfer-shutdown"
    )
