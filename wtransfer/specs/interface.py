"""The contract of an offloading spec: what an author writes, and when it is called.

A spec keeps blocks of KV cache in a cheaper tier and brings them back. Its two sides may live in
two processes: the *manager* beside the scheduler decides what is kept and where, the *worker*
beside the model moves bytes. One spec object is made on each side::

    [project.entry-points."wtransfer.specs"]
    MySpec = "my_package.spec:MySpec"

The life of a block, S in the scheduler's process, W in every worker's:

1. S ``on_new_request(ctx)``, once for each request.
2. S ``lookup(key, ctx)``, block after block from the first one on, until one is no hit.
3. S ``prepare_load(keys, ctx)``: the blocks are pinned; the spec travels to W with the step.
4. W ``submit_load(job_id, source, destination)``; a copy in the background.
5. W ``get_finished()`` after every step; its results travel back. Where one rank of several
   has failed, the load has failed, and the host computes the blocks instead.
6. S ``complete_load(keys, ctx)``: unpinned, whatever the outcome was; after a failure
   ``load_failed(keys, ctx, suspect)`` comes first.
7. S ``prepare_store(keys, ctx)`` for blocks that the model has filled: room is made for all that
   are new, or for none. W ``submit_store(job_id, source, destination)``.
8. S ``complete_store(keys, ctx, success)`` when all ranks have finished. Then the blocks are hits.
9. S ``on_request_finished(ctx)``: no more prepare calls for this request; completions may follow.

A spec knows nothing of weights. `OffloadingConnector`, which drives any spec, puts the fingerprint
of the weights into the keys and compares each job with the weights that the worker holds
(`wtransfer.kv.fence`). A serving loop that drives a spec itself does the same.

Source: names and signatures are those of vLLM's ``v1.kv_offload``, of the current release and of
the seed (``get_handlers``).
"""

from __future__ import annotations

import contextlib
import os
import secrets
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from wtransfer.config import backend_options, tokens_per_block
from wtransfer.errors import OffloadingOptionError

# The cache that a spec copies; exported here as well, where authors look.
from wtransfer.kv.canonical import CanonicalKVCacheRef as CanonicalKVCacheRef
from wtransfer.kv.canonical import CanonicalKVCaches as CanonicalKVCaches
from wtransfer.kv.canonical import CanonicalKVCacheTensor as CanonicalKVCacheTensor

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from wtransfer.kv.keys import OffloadKey

T = TypeVar("T")

# -- plain data -------------------------------------------------------------------------------


class LookupResult(Enum):
    """State of one block in a tier."""

    MISS = auto()
    """Not kept."""
    HIT = auto()
    """Kept, and may be loaded."""
    HIT_PENDING = auto()
    """Its store is still under way."""
    RETRY = auto()
    """Not known yet: ask again in the next step."""


class Medium(Enum):
    """Kind of storage that holds blocks."""

    CPU = "CPU"
    STORAGE = "STORAGE"


class OffloadPolicy(Enum):
    """Choice of the blocks of a request that the host offers."""

    CHUNK_LEVEL = "chunk_level"
    """Blocks that the request has computed."""
    REQUEST_LEVEL = "request_level"
    """All blocks, also those that were kept before."""


@dataclass
class RequestOffloadingContext:
    """Policy for offering the blocks of one request."""

    policy: OffloadPolicy = OffloadPolicy.CHUNK_LEVEL
    """Blocks that are offered."""


@dataclass(eq=False)
class ReqContext:
    """One request, the same object in every call about it."""

    req_id: str
    """Identity."""
    kv_transfer_params: Mapping[str, Any] | None = None
    """The user's parameters for its KV cache."""
    _state: dict[type, Any] = field(default_factory=dict, repr=False, init=False)

    def set_state(self, value: object) -> None:
        """Keep one value of each type with the request."""
        self._state[type(value)] = value

    def get_state(self, cls: type[T]) -> T | None:
        """Return the value of that type; None if there is none."""
        return self._state.get(cls)


@dataclass(frozen=True)
class ScheduleEndContext:
    """Facts of one step of the scheduler."""

    new_req_ids: Collection[str] = ()
    """Requests that were scheduled for the first time."""
    preempted_req_ids: Collection[str] = ()
    """Requests whose blocks were taken away."""
    seconds_per_token: float | None = None
    """Recent time to compute one token of a prompt, in seconds; None: not known yet."""


class LoadStoreSpec:
    """Places of blocks, on one side of a copy. Plain data: it travels between processes."""


class BlockIDsLoadStoreSpec(LoadStoreSpec):
    """Blocks by number.

    Args:
        block_ids: Numbers of the blocks, in the order of the keys.
    """

    def __init__(self, block_ids: Sequence[int]) -> None:
        self.block_ids = list(block_ids)
        """Numbers of the blocks."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.block_ids})"

    @staticmethod
    def medium() -> str:
        """Return the medium of these blocks: handlers of the seed are looked up by its name."""
        raise NotImplementedError


class GPULoadStoreSpec(BlockIDsLoadStoreSpec):
    """Blocks of the cache that the model works on, on whatever device that is.

    Args:
        block_ids: Numbers of the blocks, ordered by group.
        group_sizes: Number of blocks of each group; by default all belong to the first.
        block_indices: For each group, the position of its first block in the sequence. A kept chunk
            of several blocks may begin before it.
    """

    def __init__(
        self,
        block_ids: Sequence[int],
        group_sizes: Sequence[int] | None = None,
        block_indices: Sequence[int] | None = None,
    ) -> None:
        super().__init__(block_ids)
        self.group_sizes = list(group_sizes) if group_sizes is not None else [len(block_ids)]
        """Number of blocks of each group."""
        self.block_indices = (
            list(block_indices) if block_indices is not None else [0] * len(self.group_sizes)
        )
        """Position of each group's first block in its sequence."""
        if sum(self.group_sizes) != len(self.block_ids):
            raise ValueError(
                f"group sizes {self.group_sizes} do not add up to {len(self.block_ids)} blocks"
            )
        if len(self.block_indices) != len(self.group_sizes):
            raise ValueError(
                f"{len(self.block_indices)} block indices for {len(self.group_sizes)} groups"
            )

    @staticmethod
    def medium() -> str:
        """Return ``"GPU"``, whatever the device is."""
        return "GPU"


@dataclass
class PrepareStoreOutput:
    """Room that was made for blocks."""

    keys_to_store: list[OffloadKey]
    """Blocks that are not kept yet, in the order in which they were given."""
    store_spec: LoadStoreSpec
    """Places of these blocks, in this order."""
    evicted_keys: list[OffloadKey]
    """Blocks that were evicted."""


@dataclass
class OffloadingEvent:
    """Blocks that were added to a medium, or removed from it."""

    keys: list[OffloadKey]
    """Keys of the blocks."""
    medium: Medium
    """The medium."""
    removed: bool
    """True if the blocks were removed."""


@dataclass
class TransferResult:
    """Outcome of a job of a worker."""

    job_id: int
    """The host's number of the job."""
    success: bool
    """True if every block was moved and, on the way back, found to be the one asked for."""
    transfer_size: int | None = None
    """Bytes."""
    transfer_time: float | None = None
    """Seconds."""


# -- the scheduler's side ---------------------------------------------------------------------


class OffloadingManager(ABC):
    """Decides what is kept, and where. One thread calls it; nothing in it may block.

    A manager of the seed's API looks up many blocks at once, ``lookup(block_hashes)``, and is told
    of no requests; `wtransfer.specs.seed_adapter` adapts it to current hosts.
    """

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:  # noqa: ARG002
        """Record a new request, before any other call about it.

        Returns:
            Policy for offering its blocks. By default, the blocks that the request computes.
        """
        return RequestOffloadingContext()

    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return the state of one block, and change nothing."""

    @abstractmethod
    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Pin blocks that were hits, until `complete_load`, and return their places.

        Raises:
            BlockNotKeptError: A block is no hit; nothing is pinned then.
        """

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Note that blocks are in use, also those that were found in the model's own cache."""

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Unpin the blocks of one `prepare_load`; called once for each, after any outcome."""

    @abstractmethod
    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput | None:
        """Make room for those of these blocks that are not kept, all of them or none.

        Returns:
            Places of the new blocks, which are pinned until `complete_store`. None if there is no
            room: then nothing has changed, and nothing was evicted.
        """

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """Make stored blocks hits, or forget them if they could not be stored.

        Args:
            keys: The ``keys_to_store`` of one `prepare_store`.
            req_context: The request.
            success: True if every rank has stored every one of them.
        """

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Note that no prepare call follows for a request. Completions may still follow."""

    def weights_changed(self) -> None:
        """Evict present blocks first from now on: the weights have changed.

        Pinned blocks stay until their completion. By default nothing happens: keys of other weights
        are other keys, so old blocks are merely in the way.
        """

    def load_failed(
        self,
        keys: Collection[OffloadKey],  # noqa: ARG002
        req_context: ReqContext,  # noqa: ARG002
        suspect: bool,  # noqa: ARG002
    ) -> bool:
        """Note that a load has failed on a rank, before its `complete_load`.

        Args:
            keys: Keys of its `prepare_load`.
            req_context: The request.
            suspect: True if its blocks may be damaged. False: the weights have changed meanwhile,
                which fails loads of any blocks.

        Returns:
            True if `lookup` takes the failure into account from now on. By default False: the
            connector then replaces the keys (`wtransfer.kv.fence.InvalidatedKeys`).
        """
        return False

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the events since the last call: of one `prepare_store`, removals first.

        A stored block is told with the first call after its `complete_store`, `complete_load` or
        `lookup`: by then the connector knows how the host names it, and later not.
        """
        return ()

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Note the end of a step of the scheduler."""

    def has_pending_work(self) -> bool:
        """Return whether steps are needed though no request needs one."""
        return False

    def reset_cache(self) -> bool | None:
        """Forget every block that is not pinned, and the pinned ones when they are completed.

        Returns:
            False where this tier cannot; anything else: done.
        """

    def get_stats(self) -> Mapping[str, float]:
        """Return statistics: counters only rise, other numbers may rise and fall."""
        return {}

    def shutdown(self) -> None:
        """Release everything. A second call does nothing."""


def options_of_spec(extra_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are a spec's or a tier's own; ``8e9``, as people write bytes, as int.

    Args:
        extra_config: ``kv_connector_extra_config``, which also names the spec.
    """
    return {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in extra_config.items()
        if name not in {"spec_name", "spec_module_path", "block_size"}
    }


# -- a tier: a store of bytes by key --------------------------------------------------------------


class Tier(ABC):
    """A store of bytes by key: all that an author writes to keep KV cache somewhere else.

    Registered in the group ``wtransfer.specs`` like an offloading spec, and named like one:
    ``spec_name`` of `OffloadingConnector`. `wtransfer.specs.tier_spec` does the rest: keys (tokens,
    model, weights, layout, rank), header, checksum, threads, deadlines and statistics. So a store
    that loses, truncates, mixes up or flips bytes costs hits, and never makes an answer wrong.

    Methods may block. Threads of the spec call them, several at a time; never the scheduler or the
    model. An exception is a failure of that call alone: a miss, or a block that is not kept. Every
    process has an object of its own, the scheduler's too; objects with equal options reach the same
    store, also at the same time. Capacity and eviction are up to the store.

    Args:
        options: ``kv_connector_extra_config``, without those of `wtransfer.specs.tier.TierOptions`:
            an object of `options_cls`, or a mapping where there is none.
    """

    example_options: ClassVar[Mapping[str, Any]] = {}
    """Options with which ``wtransfer plugins show`` writes an example."""
    options_cls: ClassVar[type | str | tuple[type | str, ...]] = ()
    """Class of the options, as of `OffloadingSpec.options_cls`."""
    writes_after_get: ClassVar[bool] = True
    """True if anything may still write to `into` once `get` has returned, as a client's thread or
    device does whose call was given up. False saves a copy of every block that is loaded."""

    @abstractmethod
    def __init__(self, options: Any) -> None: ...

    @abstractmethod
    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether `get` would find it. Keys have up to 66 bytes."""

    @abstractmethod
    def put(self, key: bytes, data: memoryview) -> None:
        """Keep bytes under a key, in place of its former value; `data` is reused afterwards.

        A file is written by `write_whole`.
        """

    @abstractmethod
    def get(self, key: bytes, into: memoryview) -> bool:
        """Fill `into` with the value of a key; `fill` does so with bytes.

        Returns:
            True if `into` was filled. False: there is no value, or it has another length.
        """

    @abstractmethod
    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove keys; absent keys are ignored."""

    def put_many(self, items: Sequence[tuple[bytes, memoryview]]) -> None:
        """Keep several, as `put`. Only a tier that overrides it is given more than one at a time.

        An exception is a failure of every item.
        """
        for key, data in items:
            self.put(key, data)

    def get_many(self, items: Sequence[tuple[bytes, memoryview]]) -> list[bool]:
        """Fill several, as `get`; otherwise as `put_many`."""
        return [self.get(key, into) for key, into in items]

    def register_memory(self, memory: memoryview) -> None:
        """Register the memory in which every `data` and `into` of this object will lie.

        Called at most once, before the first `put` or `get`; for stores that register memory, as
        those over RDMA do. The memory outlives `close`.
        """

    def get_stats(self) -> Mapping[str, float]:
        """Return statistics; names of counters end in ``_total``."""
        return {}

    def close(self) -> None:
        """Release everything. A second call does nothing."""

    # -- for authors

    @staticmethod
    def fill(into: memoryview, data: bytes | None) -> bool:
        """Copy a value to `into`; return False if it is None or has another length."""
        if data is None or len(data) != len(into):
            return False
        into[:] = data
        return True

    @staticmethod
    def write_whole(path: str | os.PathLike[str], data: memoryview) -> None:
        """Write a file that readers see whole or not at all, also where its writer is killed.

        The file is not synced: a file torn by a loss of power is found by checksum. A killed writer
        leaves a file behind whose name is this one's and 17 more characters.
        """
        part = Path(f"{os.fspath(path)}.{secrets.token_hex(8)}")
        try:
            part.write_bytes(data)
            part.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise


# -- the worker's side ------------------------------------------------------------------------


class OffloadingWorker(ABC):
    """Moves blocks between a worker's cache and one tier.

    Jobs run in the background; a block of the cache belongs to its job until that is finished. A
    job that fails is a result, never an exception: the host serves on.
    """

    @abstractmethod
    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Begin to copy blocks of the cache into the tier.

        Returns:
            True if the copy was begun. No result follows a False: the host takes the job for
            failed.
        """

    @abstractmethod
    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Begin to copy blocks of the tier into the cache.

        A block that turns out to be another one, or damaged, fails the job and is not written.

        Returns:
            As `submit_store`.
        """

    @abstractmethod
    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that have ended since the last call, each once.

        No request waits longer than ``deadline_s``, an option of `OffloadingConnector`, for a job
        that is not reported: see there.
        """

    def get_released(self) -> set[int]:
        """Return jobs that have not ended, but no longer use blocks of the cache.

        A store that has copied its blocks elsewhere names its job here: the blocks are free.
        """
        return set()

    @abstractmethod
    def wait(self, job_ids: set[int]) -> None:
        """Wait until these jobs have ended or are released; unknown ones count as ended.

        The model's thread waits here, so the wait is bounded by the worker itself.

        Raises:
            StallError: The jobs made no progress within the worker's deadline. They have failed
                then, whatever they report later.
        """

    def get_stats(self) -> Mapping[str, float]:
        """Return statistics: counters only rise, other numbers may rise and fall."""
        return {}

    def shutdown(self) -> None:
        """End running jobs, and release everything. A second call does nothing."""


class OffloadingHandler(ABC):
    """Copies in one direction: the worker's side in the shape of the seed."""

    @abstractmethod
    def transfer_async(self, job_id: int, spec: tuple[LoadStoreSpec, LoadStoreSpec]) -> bool:
        """Begin a job from the first to the second; return whether that was begun."""

    @abstractmethod
    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that have ended since the last call."""

    @abstractmethod
    def wait(self, job_ids: set[int]) -> None:
        """Wait until these jobs have ended."""


# -- the spec ---------------------------------------------------------------------------------


class OffloadingSpec(ABC):
    """Names both sides of a tier.

    The constructor takes one argument, an `wtransfer.config.OffloadingConfig`, as in the current
    vLLM, or two, ``(config, kv_cache_config)``, as in the seed: its signature decides. The
    constructor must be cheap: memory is taken by `get_worker`.

    A spec of the seed's API defines ``get_handlers(kv_caches, attn_backends)`` instead of
    `get_worker`, and a manager that looks up many blocks at once; `wtransfer.specs.seed_adapter`
    adapts it to current hosts.

    Args:
        config: As above.
        kv_cache_config: Shape of the KV cache, in the seed's API.
    """

    config: Any
    """Config with which the spec was made."""
    kv_cache_config: Any = None
    """Shape of the KV cache, in the seed's API."""
    extra_config: Mapping[str, Any]
    """Options: ``kv_connector_extra_config``, also those of the host."""
    options: Any
    """The spec's own options: an object of `options_cls`, or a mapping where there is none."""
    options_cls: ClassVar[type | str | tuple[type | str, ...]] = ()
    """Class of the options, or ``"package.module:Class"``: a dataclass or `msgspec.Struct` with
    typed fields, which ``wtransfer plugins show`` prints with types, defaults and docstrings. An
    option that is unknown, missing or of another type is refused by name. With a tuple of classes,
    each of which reads its own options, and without any, `options` is the mapping; the latter is
    warned of when options are given. A class with an attribute or property `options` of its own
    keeps it."""

    def __init__(self, config: Any, kv_cache_config: Any = None) -> None:
        self.config = config
        self.kv_cache_config = kv_cache_config
        transfer_config = getattr(config, "kv_transfer_config", None)
        if transfer_config is None:
            self.extra_config = config.extra_config
            self.tokens_per_block = tuple(group.tokens_per_block for group in config.groups)
            """Tokens per block of each group; in the current API only, as the next two."""
            self.tokens_per_hash: int = config.cache.tokens_per_hash
            """Tokens per block hash."""
            self.blocks_per_chunk: int = config.cache.blocks_per_chunk
            """Blocks that are kept as one."""
        else:
            self.extra_config = transfer_config.kv_connector_extra_config or {}
            self.vllm_config = config
            """The same as `config`; in the seed's API only, as the next two."""
            self.gpu_block_size = tokens_per_block(config, kv_cache_config)
            """Tokens per block of the model's own cache."""
            self.offloaded_block_size = int(
                self.extra_config.get("block_size", self.gpu_block_size)
            )
            """Tokens per block that is kept."""
        # An adapter has those of the spec that it adapts, and a class may have a property.
        if "options" not in vars(self) and not hasattr(type(self), "options"):
            self.options = backend_options(
                type(self),
                options_of_spec(self.extra_config),
                OffloadingOptionError,
                shared=("deadline_s",),  # OffloadingConnector's, too
            )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Accept ``get_handlers`` in the place of `get_worker`."""
        super().__init_subclass__(**kwargs)
        # `__init_subclass__` runs before ABCMeta looks for abstract methods that are left.
        missing = getattr(cls.get_worker, "__isabstractmethod__", False)
        if missing and hasattr(cls, "get_handlers"):
            cls.get_worker = _only_handlers  # type: ignore[method-assign]

    @abstractmethod
    def get_manager(self) -> OffloadingManager:
        """Return the scheduler's side; the same object in every call."""

    @abstractmethod
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return the side of one worker; the same object in every call.

        Args:
            kv_caches: The cache that the worker copies from and into.
        """


def _only_handlers(self: OffloadingSpec, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
    """Raise: this spec has handlers."""
    raise NotImplementedError(
        f"{type(self).__qualname__} is a spec in the seed's style, with get_handlers and without "
        "get_worker: wrap it with wtransfer.specs.seed_adapter.adapt_spec(spec)"
    )
