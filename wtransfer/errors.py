"""Every exception a caller may catch.

Every class is a `WTransferError` and the built-in that fits, so that both ``except WTransferError``
and ordinary handlers work. Facts (worker, round, piece, plug-in, ...) are attributes; those that
locate the failure are appended to the text, so that the code that learns them adds them once
(`WTransferError.add_facts`) and they are never formatted twice.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any, ClassVar, TypeAlias, get_origin, get_type_hints

Fact: TypeAlias = str | int | float | bool | list[str] | None
"""Types of a fact that travels to another process."""


class WTransferError(Exception):
    """Base of all errors raised by wtransfer.

    Args:
        message: The sentence: what failed, expected and got, what exists, what to do.
        **facts: Kept as attributes.
    """

    located_by: ClassVar[tuple[str, ...]] = ("plugin", "worker", "round_id", "version", "phase")
    """Facts that are appended to the text, in this order."""

    plugin: str | None = None
    """Backend, as ``kind:name``, that the failure belongs to."""
    worker: str | None = None
    """Peer that failed or reported the failure."""
    round_id: str | None = None
    """Round in which the failure happened."""
    version: str | None = None
    """Label of the update."""
    phase: str | None = None
    """Step of the round: plan, transfer, seal, commit or release."""
    piece: str | None = None
    """Tensor concerned; the first, where there are several."""

    def __init__(self, message: str = "", **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        # Not through add_facts: a fact whose class default is not None may be given here, too.
        vars(self).update(facts)

    def add_facts(self, **facts: Any) -> None:
        """Set facts that are not known yet; known ones stay as they are."""
        for name, value in facts.items():
            if getattr(self, name, None) is None:
                setattr(self, name, value)

    def __str__(self) -> str:
        located = [
            f"{name.removesuffix('_id')} {getattr(self, name)}"
            for name in self.located_by
            if getattr(self, name) is not None and not self._says(str(getattr(self, name)))
        ]
        return f"{self.message} [{', '.join(located)}]" if located else self.message

    def _says(self, fact: str) -> bool:
        """Return whether the message names a fact already, as a word and not within another.

        A worker may be called as a word of any message is: quotes tell them apart.
        """
        around = (r"['\"]", r"['\"]") if fact.isalpha() else (r"(?<![\w-])", r"(?![\w-])")
        return re.search(re.escape(fact).join(around), self.message) is not None


# -- plug-ins ---------------------------------------------------------------------------------


class PluginError(WTransferError):
    """A backend could not be found, chosen, loaded or trusted; only this name is affected."""

    kind: str | None = None
    """Word of the group: engines, connectors or specs."""
    name: str | None = None
    """Name as it was asked for."""
    distribution: str | None = None
    """Distribution that declares the backend."""
    distribution_version: str | None = None
    """Its version."""


class RegistrationError(PluginError, ValueError):
    """A registration at run time is not complete: what is missing stands in the text."""


class AlreadyRegisteredError(RegistrationError):
    """A name was registered twice at run time, or hides a built-in."""


class PluginSettingError(PluginError, ValueError):
    """An environment variable that chooses among plug-ins cannot be read; nothing is guessed."""


class UnknownBackendError(PluginError, LookupError, ValueError):
    """No backend has this name here; the text lists those that exist."""

    available: tuple[str, ...] = ()
    """Names that exist."""


class PluginNotInstalledError(UnknownBackendError):
    """The name belongs to a distribution that is not installed; the text says which."""


class PluginBlockedError(PluginError, ValueError):
    """The backend exists; ``WTRANSFER_PLUGINS`` or ``WTRANSFER_PLUGINS_BLOCK`` excludes it."""


class PluginAmbiguousError(PluginError, ValueError):
    """Several distributions offer the name; the text shows the pin to write."""


class PluginBrokenError(PluginError, ImportError):
    """The backend's module or class could not be loaded; the cause is kept."""


class PluginTypeError(PluginError, TypeError, AssertionError):
    """The loaded object is not what its group requires."""


class PluginIncompatibleError(PluginError, RuntimeError):
    """The plug-in asks for another version of wtransfer."""


# -- what an update consists of ---------------------------------------------------------------


class ManifestError(WTransferError, ValueError):
    """A manifest that no worker could take: names, dtypes, shapes or counts are not valid."""


class SchemaError(WTransferError, ValueError):
    """Valid pieces that do not fit the target: other names, dtypes or shapes."""

    mismatches: list[str] | None = None
    """One line per piece: name, wanted, got."""


class IncompleteUpdateError(WTransferError, ValueError):
    """Pieces of the plan never arrived."""

    missing: list[str] | None = None
    """Their names."""


class DigestMismatchError(WTransferError, ValueError):
    """Pieces arrived with other bytes than the trainer digested."""

    pieces: list[str] | None = None
    """Their names."""


class NonfiniteError(WTransferError, ValueError):
    """The weights hold NaN or infinity and the policy is ``reject``."""


class SourceError(WTransferError, ValueError):
    """A weight source contradicts itself: its iteration differs from its metadata."""


class StagingMemoryError(WTransferError, MemoryError):
    """There is not enough memory to stage the update."""


# -- rounds -----------------------------------------------------------------------------------


class NoWorkersError(WTransferError, RuntimeError):
    """Fewer workers have joined than the round needs."""


class RoundBusyError(WTransferError, RuntimeError):
    """Another round is active, or a commit is pending; the text names holder and age."""


class RoundAbortedError(WTransferError, RuntimeError):
    """The round was ended before its commit; every worker keeps its old version."""


class CommitError(WTransferError, RuntimeError):
    """Applying a verified update failed; the old version is back unless `restored` is false.

    A publisher raises it where no worker holds the update at the end of a round whose commit was
    sent (with its `report`), and where it failed itself after that (`restored` is false).
    """

    restored: bool = True
    """True if the worker holds the version it had before; of a publisher: every worker does."""
    report: Any = None
    """The round's `Report`, of a publisher that has one; not sent to other processes."""


class VersionNotKeptError(WTransferError, LookupError):
    """There is no such version to go back to."""


class EngineError(WTransferError, RuntimeError):
    """An engine raised something of its own; type and text are kept."""


class NotInitializedError(WTransferError, RuntimeError):
    """An engine was used before it was initialised."""


class ClosedError(WTransferError, RuntimeError):
    """The object was closed."""


class ForkedError(WTransferError, RuntimeError):
    """The object belongs to the parent process; make a new one after ``fork()``."""


# -- KV cache ---------------------------------------------------------------------------------


class BlockNotKeptError(WTransferError, LookupError):
    """A KV block was to be loaded that is not kept, or not whole yet."""


class EvictionPolicyError(WTransferError, RuntimeError):
    """An eviction policy raised, or named blocks that it may not evict; nothing was evicted."""


class ConnectorGenerationError(WTransferError, ValueError):
    """A connector of a generation was asked for that this process does not run."""


class ConnectorRoleError(WTransferError, RuntimeError):
    """A method of a connector's other side was called, or one out of its time."""


class KVTransferConfigError(WTransferError, ValueError, AssertionError):
    """A config says nothing of where KV cache goes, and something that moves it was asked for."""


class ConnectorOptionError(WTransferError, ValueError):
    """An option of a connector is missing or cannot be used; the text says what can."""


class KVLayoutError(WTransferError, ValueError):
    """Two sides keep their KV cache in ways that do not fit; `field` says in what they differ."""

    field: str | None = None
    """Name of the differing field."""


class OffloadingOptionError(WTransferError, ValueError):
    """An option of an offloading spec is missing or cannot be used; the text says what can."""


class CacheLayoutError(ConnectorOptionError, OffloadingOptionError):
    """The KV cache cannot be copied by block, as it is laid out; the text says what is expected."""


# -- peers ------------------------------------------------------------------------------------


class PeerError(WTransferError, ConnectionError):
    """Base of what goes wrong between two processes."""


class PeerLostError(PeerError):
    """The peer's process or connection ended."""


class GroupError(PeerError):
    """A process group could not be formed, or broke: a rank is gone, late, or not alone."""


class AuthenticationError(PeerError):
    """The peer could not prove that it knows the token, or belongs to another user."""


class ProtocolError(PeerError):
    """The peer speaks another protocol, or breaks this one; both versions are named."""


class ChecksumError(PeerError):
    """A frame arrived with flipped bits."""


class TruncatedError(PeerError, EOFError):
    """The peer's bytes ended in the middle of a frame or payload."""


class LimitError(PeerError, ValueError):
    """The peer announced more than is allowed; nothing was allocated for it."""


class HostsError(WTransferError, RuntimeError):
    """Several hosts that were called at once have failed; the text has the error of each."""

    errors: dict[str, WTransferError] | None = None
    """Host -> its error; not sent to other processes."""


class AddressError(WTransferError, ValueError):
    """An address that cannot be understood, listened at or dialed from here."""


class AddressInUseError(WTransferError, OSError):
    """The address is in use."""

    made_at: str | None = None
    """``FILE:LINE`` of the code of this process that listens there; None: not this process."""


class SegmentGoneError(PeerError, LookupError):
    """The peer does not lend this shared segment (any more): its round is over."""


class DescriptorLimitError(WTransferError, OSError):
    """No file descriptor is left, in this process or on this machine."""


class StorageError(WTransferError, OSError):
    """Files could not be read or written: no room, no permission, a failing disk, a bad name."""


class StorageInUseError(StorageError):
    """Another process has the folder to itself; the text names it."""


class StallError(WTransferError, TimeoutError):
    """A peer or a step made no progress within its deadline."""

    seconds: float | None = None
    """The deadline, in seconds."""


class RemoteError(WTransferError, RuntimeError):
    """A peer reported an error of a class that this version does not know."""


def called_from() -> str:
    """Return ``FILE:LINE`` of the code outside of this package that is calling it, for texts."""
    frame = sys._getframe(1)  # noqa: SLF001  # `inspect` is slow to import
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def raised_at(error: BaseException) -> str:
    """Return ``FILE:LINE`` of the code outside of this package that raised; empty: there is none.

    Of the file by which the call has left this package: what that file calls may have raised.
    """
    place, path, step = "", None, error.__traceback__
    while step is not None:
        code = step.tb_frame.f_code
        if path is None and not _is_ours(step.tb_frame.f_globals.get("__name__", "")):
            path = code.co_filename
        if code.co_filename == path:
            place = f"{os.path.basename(path)}:{step.tb_lineno}"  # noqa: PTH119  # no pathlib here
        step = step.tb_next
    return place


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == __name__.partition(".")[0]


def _subclasses(cls: type[WTransferError]) -> dict[str, type[WTransferError]]:
    found = {cls.__name__: cls}
    for sub in cls.__subclasses__():
        found |= _subclasses(sub)
    return found


# A closed table: a peer's word selects among these and never among anything else.
_BY_NAME = _subclasses(WTransferError)
_LOCAL_ATTRIBUTES = frozenset({"message", "report"})


def to_wire(error: BaseException) -> tuple[str, str, dict[str, Fact]]:
    """Describe an error for another process.

    Returns:
        Class name, message and the facts that are plain data. Errors that are not ours become an
        `EngineError` that states type and text.
    """
    if not isinstance(error, WTransferError) or type(error).__name__ not in _BY_NAME:
        return EngineError.__name__, f"{type(error).__name__}: {error}", {}
    facts: dict[str, Fact] = {
        name: value
        for name, value in vars(error).items()
        if name not in _LOCAL_ATTRIBUTES and isinstance(value, (str, int, float, list))
    }
    return type(error).__name__, error.message, facts


def from_wire(kind: str, message: str, facts: dict[str, Fact]) -> WTransferError:
    """Rebuild an error that a peer described; unknown classes become `RemoteError`.

    Args:
        kind: Class name.
        message: The peer's sentence.
        facts: Facts; names that the class does not declare, and values of another type than it
            declares, are dropped.
    """
    cls = _BY_NAME.get(kind)
    if cls is None:
        return RemoteError(f"{kind}: {message}")
    hints = get_type_hints(cls)
    known = {
        name: value
        for name, value in facts.items()
        if name not in _LOCAL_ATTRIBUTES and _fits(value, hints.get(name))
    }
    return cls(message, **known)


def _fits(value: Fact, hint: Any) -> bool:
    # A class variable governs how every error of its class is shown: no peer's to set.
    if hint is None or get_origin(hint) is ClassVar:
        return False
    import msgspec

    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError:
        return False
    return True
