"""Configuration in the field's names: Protocols where we are called, dataclasses where we call.

Source: the names and defaults follow vLLM's config classes, so that a serving engine's own
objects can be handed in unchanged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import os
import pkgutil
import sys
import threading
import types
import weakref
from dataclasses import dataclass, field
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    NamedTuple,
    Protocol,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    runtime_checkable,
)

from wtransfer.errors import OffloadingOptionError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

logger = logging.getLogger(__name__)


@runtime_checkable
class HasBackend(Protocol):
    """Part of a weight transfer config that the engine factory reads."""

    @property
    def backend(self) -> str:
        """Name of the engine."""


@dataclass(frozen=True)
class WeightTransferConfig:
    """Choice of the engine that moves the weights."""

    backend: str = "nccl"
    """Engine name in the group ``wtransfer.engines``."""


@dataclass(frozen=True)
class ParallelConfig:
    """Place of one worker process in its serving instance and in the fleet."""

    rank: int = 0
    """Rank within the instance, 0-based."""
    world_size: int = 1
    """Number of ranks of the instance."""
    tensor_parallel_size: int = 1
    """Number of tensor-parallel ranks."""
    pipeline_parallel_size: int = 1
    """Number of pipeline stages."""
    data_parallel_size: int = 1
    """Number of instances that serve the same model."""
    data_parallel_rank: int = 0
    """Rank among the data-parallel instances."""
    data_parallel_index: int = 0
    """Index of this instance among all instances, also where they do not synchronise."""


@dataclass(frozen=True)
class KVTransferConfig:
    """Choice of the connector that moves KV cache, with its options."""

    kv_connector: str | None = None
    """Connector name in the group ``wtransfer.connectors``."""
    engine_id: str | None = None
    """Identity of this serving instance."""
    kv_role: str | None = None
    """``kv_producer``, ``kv_consumer`` or ``kv_both``."""
    kv_connector_module_path: str | None = None
    """Module of a connector that is registered nowhere."""
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)
    """Options of the connector, or of the offloading spec (``spec_name``)."""
    kv_load_failure_policy: str = "recompute"
    """``recompute`` or ``fail``."""


@dataclass(frozen=True)
class KVEventsConfig:
    """Choice of a host to publish which KV blocks it has."""

    enable_kv_cache_events: bool = False
    """True if the host takes a connector's events in every step."""


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers that share one block table of a request."""

    layer_names: tuple[str, ...] = ()
    """Layers of the group; empty: all layers."""
    window: int | None = None
    """Tokens that a token attends to, itself included; None: all that are before it. The host
    releases blocks that the window has passed."""
    has_states: bool = False
    """True if a block holds the layers' state after its last token, as of linear attention, and no
    keys and values. The host names the blocks that will hold one after a step."""

    @property
    def reach(self) -> int | None:
        """Window, by which a state is needed where the last token is."""
        return 2 if self.has_states else self.window


@dataclass(frozen=True)
class KVCacheConfig:
    """Shape of one worker's KV cache."""

    num_blocks: int = 0
    """Number of blocks."""
    block_size: int = 16
    """Tokens per block."""
    bytes_per_block: int = 0
    """KV bytes of one block, of this worker and over all its layers. Connectors that divide a given
    amount of memory into blocks before there is a cache need it: ``OffloadingConnector`` does."""
    groups: tuple[KVCacheGroup, ...] = (KVCacheGroup(),)
    """Groups of layers, in the order of ``get_block_ids()``; a block belongs to one group at a
    time. Several, or a window, need a connector with ``supports_hma``."""


@dataclass(frozen=True)
class ModelConfig:
    """The served model."""

    model: str = ""
    """Name or path of the model."""
    dtype: str = ""
    """Dtype of its computation."""


@dataclass(frozen=True)
class ServingConfig:
    """The configs of one serving instance, held together."""

    weight_transfer_config: WeightTransferConfig = field(default_factory=WeightTransferConfig)
    """The weight engine."""
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    """Place of this process."""
    kv_transfer_config: KVTransferConfig | None = None
    """The connector; None where KV stays in the instance."""
    cache_config: KVCacheConfig | None = None
    """Shape of the KV cache, where it is known before the workers have one."""
    model_config: ModelConfig = field(default_factory=ModelConfig)
    """The served model."""
    kv_events_config: KVEventsConfig | None = None
    """Events of the KV cache; None: none."""


# -- config of an offloading spec -----------------------------------------------------------------


@dataclass(frozen=True)
class OffloadingGroupConfig:
    """One group of layers whose KV cache has blocks of its own."""

    tokens_per_block: int = 16
    """Tokens that one block covers."""
    layer_names: tuple[str, ...] = ()
    """Layers of the group."""
    group_id: int = 0
    """Number of the group."""


@dataclass(frozen=True)
class OffloadingModelConfig:
    """The model whose KV cache is kept."""

    name: str = ""
    """Name or path."""
    dtype: str = "bfloat16"
    """Dtype of the KV cache."""


@dataclass(frozen=True)
class OffloadingCacheConfig:
    """Tokens per hash and blocks per chunk."""

    tokens_per_hash: int = 16
    """Tokens per block hash."""
    blocks_per_chunk: int = 1
    """Blocks of the device that are kept as one."""


@dataclass(frozen=True)
class OffloadingParallelConfig:
    """Place of this process among those that share the spec's tier."""

    rank: int = 0
    """Rank in ``[0, world_size)``; 0 on the scheduler's side."""
    world_size: int = 1
    """Number of workers."""
    tp_size: int = 1
    """Number of tensor-parallel ranks."""
    pp_size: int = 1
    """Number of pipeline stages."""
    data_parallel_index: int = 0
    """Index of this replica."""
    data_parallel_size: int = 1
    """Number of replicas."""


@dataclass(frozen=True)
class OffloadingConfig:
    """Complete configuration of a spec; vLLM's own object fits, too."""

    extra_config: Mapping[str, Any] = field(default_factory=dict)
    """Options, from ``kv_connector_extra_config``."""
    engine_id: str = ""
    """Identity of the serving instance; its ranks find each other by it."""
    worker_kv_bytes_per_block: int = 0
    """KV bytes of one rank in one block, over all groups."""
    groups: tuple[OffloadingGroupConfig, ...] = (OffloadingGroupConfig(),)
    """The groups of layers."""
    model: OffloadingModelConfig = field(default_factory=OffloadingModelConfig)
    """The model."""
    cache: OffloadingCacheConfig = field(default_factory=OffloadingCacheConfig)
    """Hashes and chunks."""
    parallel: OffloadingParallelConfig = field(default_factory=OffloadingParallelConfig)
    """Place of this process among those that share the tier."""
    enable_kv_cache_events: bool = False
    """True if the host takes events from the manager."""


# -- read in more than one room ----------------------------------------------------------------

TOptions = TypeVar("TOptions")

# Reentrant: the constructor of a nested class may read options itself.
_converting = threading.RLock()
# Classes of backends that were warned of.
_undeclared: weakref.WeakSet[type[Any]] = weakref.WeakSet()


def convert_options(options: Mapping[str, Any] | TOptions, cls: type[TOptions]) -> TOptions:
    """Return options as an object of a msgspec struct; such an object as it is.

    One thread at a time: msgspec (0.22) reads the fields of a struct at its first use, and threads
    that do so at once, such as two ranks of one process, end the process.

    Raises:
        msgspec.ValidationError: An option is missing, unknown, or of another type.
    """
    import msgspec

    if isinstance(options, cls):
        return options
    with _converting:
        return msgspec.convert(dict(cast("Mapping[str, Any]", options)), cls)


def backend_options(
    cls: Any, options: Mapping[str, Any], error_cls: type[Exception], shared: Collection[str] = ()
) -> Any:
    """Return options as the constructor of a backend gets them.

    Args:
        cls: The backend. Its ``options_cls`` is the class of the options, or its path. A tuple of
            them, each of which reads its own part: the backend gets the mapping. Without any it
            gets the mapping, too, and is warned of, once, when options are given.
        options: The user's options.
        error_cls: As for `decode_options`.
        shared: Names of options that the caller reads as well; a class need not have them.

    Raises:
        Exception: As for `decode_options`.
    """
    declared = cls.options_cls
    if declared and not isinstance(declared, tuple):
        options_cls = pkgutil.resolve_name(declared) if isinstance(declared, str) else declared
        name = f"kv_connector_extra_config of {cls.__name__}"
        fields = _fields_of(options_cls, error_cls, name)
        own = {k: v for k, v in options.items() if k in fields or k not in shared}
        return _decoded(own, options_cls, fields, error_cls, name)
    if options and not declared and cls not in _undeclared:
        _undeclared.add(cls)
        logger.warning(
            "%s.%s has no options_cls: its options (%s) are not checked. Set options_cls to a "
            "dataclass or msgspec.Struct that has them as fields",
            cls.__module__,
            cls.__qualname__,
            ", ".join(options),
        )
    return options


def decode_options(
    options: Mapping[str, Any], cls: type[TOptions], error_cls: type[Exception], name: str
) -> TOptions:
    """Return options as an object of the class that declares them.

    Args:
        options: Values by name.
        cls: A dataclass, or a `msgspec.Struct`, whose options are named as it encodes its fields.
            A value is left to the constructor if its field has a type that msgspec does not know,
            or one that is imported for type checkers only.
        error_cls: Class of the error.
        name: Name of the options, which begins the error.

    Raises:
        Exception: Of `error_cls`; the class is of neither kind, or an option is unknown, missing,
            of another type, or refused by the constructor. The text has the names and types of all
            options.
    """
    return _decoded(options, cls, _fields_of(cls, error_cls, name), error_cls, name)


def option_values(
    options: Mapping[str, Any],
    cls: type[Any],
    error_cls: type[Exception],
    name: str,
    *,
    strict: bool = True,
    without: Collection[str] = (),
) -> dict[str, Any]:
    """Return options in the types that a class declares, before its constructor sees them.

    Args:
        options: As for `decode_options`.
        cls: Likewise.
        error_cls: Likewise.
        name: Likewise.
        strict: False: a text is read as the field's type, as those of a command line are.
        without: Names of fields that are no options here.

    Raises:
        Exception: As for `decode_options`, except for what the constructor refuses.
    """
    fields = {k: v for k, v in _fields_of(cls, error_cls, name).items() if k not in without}
    with _refusals(fields, error_cls, name):
        return _values(options, fields, strict=strict)


def _decoded(
    options: Mapping[str, Any],
    cls: type[TOptions],
    fields: Mapping[str, _Field],
    error_cls: type[Exception],
    name: str,
) -> TOptions:
    with _refusals(fields, error_cls, name):
        values = _values(options, fields, strict=True)
        return cls(**{fields[k].parameter: v for k, v in values.items()})


def _values(
    options: Mapping[str, Any], fields: Mapping[str, _Field], *, strict: bool
) -> dict[str, Any]:
    unknown = next((each for each in options if each not in fields), None)
    missing = next((k for k, v in fields.items() if v.is_required and k not in options), None)
    if unknown is not None:
        raise ValueError(f"unknown field `{unknown}`")
    if missing is not None:
        raise ValueError(f"missing required field `{missing}`")
    return {k: _converted(k, v, fields[k].hint, strict) for k, v in options.items()}


class _Field(NamedTuple):
    parameter: str
    hint: Any
    is_required: bool


@contextlib.contextmanager
def _refusals(
    fields: Mapping[str, _Field], error_cls: type[Exception], name: str
) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError) as error:
        there_are = ", ".join(f"{k} ({_type_name(v.hint)})" for k, v in fields.items())
        raise error_cls(f"{name}: {error}; the options are {there_are or 'none'}") from error


def _fields_of(cls: type[Any], error_cls: type[Exception], name: str) -> dict[str, _Field]:
    """Return the fields that a class is made with, by the names of the options."""
    import msgspec

    found: Iterable[tuple[str, str, Any]]
    if isinstance(cls, type(msgspec.Struct)):
        # Not by `msgspec.structs.fields`, which fails on a hint for type checkers.
        defaults = cls.__struct_defaults__
        names = cls.__struct_fields__
        first = (msgspec.NODEFAULT,) * (len(names) - len(defaults))
        found = zip(cls.__struct_encode_fields__, names, (*first, *defaults), strict=True)
    elif dataclasses.is_dataclass(cls):
        # By the signature, which has each InitVar.
        found = [(k, k, v.default) for k, v in inspect.signature(cls).parameters.items()]
    else:
        raise error_cls(
            f"{name}: {cls!r} is neither a dataclass nor a msgspec.Struct: make it one, with the "
            "options as its fields"
        )
    hints = _hints_of(cls)
    absent = (msgspec.NODEFAULT, inspect.Parameter.empty)
    return {
        option: _Field(parameter, hints.get(parameter, Any), any(default is x for x in absent))
        for option, parameter, default in found
    }


def _hints_of(cls: type[Any]) -> dict[str, Any]:
    """Return the hints of a class, each by itself; Any for one that cannot be resolved."""
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        names = getattr(sys.modules.get(base.__module__), "__dict__", {})
        for each, hint in inspect.get_annotations(base).items():
            hints[each] = Any
            alone = types.SimpleNamespace(__annotations__={each: hint})
            # As `get_type_hints` does for a class: names of the module hide those of the class.
            with contextlib.suppress(Exception):
                resolved = get_type_hints(alone, dict(vars(base)), names, include_extras=True)[each]
                is_var = isinstance(resolved, dataclasses.InitVar)
                hints[each] = resolved.type if is_var else resolved
    return hints


def _converted(name: str, value: Any, hint: Any, strict: bool) -> Any:
    import msgspec

    try:
        with _converting:
            return msgspec.convert(value, hint, strict=strict, dec_hook=_unknown_type)
    except msgspec.ValidationError as error:
        if isinstance(value, os.PathLike):
            return _converted(name, os.fspath(value), hint, strict)
        text, _, within = str(error).partition(" - at `$")
        raise ValueError(f"{text} - at `$.{name}{within or '`'}") from error
    except (TypeError, NotImplementedError):
        return value


def _unknown_type(hint: Any, value: Any) -> Any:
    raise NotImplementedError


def _type_name(hint: Any) -> str:
    plain = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    is_class = isinstance(plain, type) and get_origin(plain) is None
    return plain.__name__ if is_class else str(plain).replace("typing.", "")


DEFAULT_BLOCK_SIZE = 16
"""Tokens per block where a host does not say."""


def cache_groups(kv_cache_config: Any) -> tuple[KVCacheGroup, ...]:
    """Return the groups of layers of a KV cache; one of all layers where a host does not say."""
    return getattr(kv_cache_config, "groups", None) or (KVCacheGroup(),)


def tokens_per_block(config: Any, kv_cache_config: Any = None) -> int:
    """Return tokens per block of the model's own cache, from where the host says it.

    Args:
        config: The serving engine's configuration, whose ``cache_config`` has the first word.
        kv_cache_config: Shape of the KV cache.
    """
    holders = (getattr(config, "cache_config", None), kv_cache_config)
    sizes = (getattr(holder, "block_size", None) for holder in holders)
    return int(next(filter(None, sizes), DEFAULT_BLOCK_SIZE))


def blocks_per_chunk(extra: Mapping[str, Any], block_size: int) -> int:
    """Return how many blocks of the cache are kept as one.

    Args:
        extra: Options; ``block_size`` is tokens per block that is kept.
        block_size: Tokens per block of the cache.

    Raises:
        OffloadingOptionError: A kept block would not consist of whole blocks of the cache.
    """
    tokens_per_chunk = int(extra.get("block_size", block_size))
    blocks, rest = divmod(tokens_per_chunk, block_size)
    if rest or blocks < 1:
        raise OffloadingOptionError(
            f"block_size={tokens_per_chunk}: blocks that are kept must consist of whole blocks of "
            f"the cache, which have {block_size} tokens each"
        )
    return blocks
