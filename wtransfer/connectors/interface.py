"""The contract of a KV connector: methods that an author writes, and the order of their calls.

A connector brings KV cache from another instance before the model computes it, and hands on what
the model has computed. A connector has two sides: the *scheduler's* decides what comes from
elsewhere, the *worker's* moves bytes. The sides are two objects, usually in two processes. An
author writes both, and a class that names them::

    class MyConnector(KVConnectorBase_V1):
        scheduler_cls = "my_package.scheduler:MyScheduler"
        worker_cls = "my_package.worker:MyWorker"

    [project.entry-points."wtransfer.connectors"]
    MyConnector = "my_package.connector:MyConnector"

Before anything else, the process of each W states the weights that it computes with: a
`WorkerSession` does so by itself, else `wtransfer.process_weights.vouch(model)` digests what was
loaded. Our connectors name blocks by these weights; under a name that only one process knows, no
other finds a block.

The life of a request, S beside the scheduler, W beside every worker's model:

1.  W ``register_kv_caches(kv_caches)``, once, before any request.
2.  S ``on_new_request(request)``.
3.  S ``get_num_new_matched_tokens(request, num_computed_tokens)``: how many more tokens can be
    loaded, and whether that takes longer than a step.
4.  S ``update_state_after_alloc(request, blocks, num_external_tokens)``: the blocks to load into.
    Once more, with 0, when a request whose blocks have come gets the others.
5.  S ``build_connector_meta(scheduler_output)``, once a step; the answer travels to every W.
6.  W ``handle_preemptions(metadata)``, then ``bind_connector_metadata(metadata)``.
7.  W ``start_load_kv(forward_context)``: before the forward pass if this step's own tokens depend
    on it, otherwise after it.
8.  W for each layer, within the forward pass: ``wait_for_layer_load(name)``, attention, then
    ``save_kv_layer(name, kv_layer, attn_metadata)``. Where loads have begun before a forward pass
    that is then not carried out, as the weights have changed or a load is known to have failed,
    ``wait_for_layer_load(name)`` comes for each layer all the same, and nothing else: once the step
    is over, its blocks may be others', and none of its loads may write into them any more.
9.  W ``wait_for_save()``: the step counts, and from here on its blocks may be overwritten. Only
    after a forward pass all of whose loads have come.
10. W ``get_finished(finished_req_ids)``, ``get_failed_recving()``,
    ``get_block_ids_with_load_errors()``, ``build_connector_worker_meta()``,
    ``clear_connector_metadata()``.
11. S ``request_finished(request, block_ids)``, once, if the step or a user has ended it: whether
    the blocks must stay until ``get_finished`` of every W has named the request, as sent; that may
    have been in this very step. The blocks of a request that ends while they are loaded stay in any
    case, until it is named: as received or as sent, once, when neither happens any more.
12. S ``update_connector_output(output)``: the workers' reports, aggregated over all of them.

A load that fails is a miss: the worker names the blocks, and the host computes them.

A model whose layers attend to different parts of a prefix has several KV cache groups
(``KVCacheConfig.groups``): a request has blocks of each, and a group with a window keeps only the
last ones that the window reaches. A connector that says `KVConnectorBase_V1.supports_hma` may be
given such a cache, others see one group without a window. ``get_block_ids()`` and the steps have a
list for each group, `request_finished` all blocks in one list. The blocks that a window has passed
are released while their request runs, and may be others' as soon as the next step is planned: a
connector that still reads them holds them by the block pool (`bind_gpu_block_pool`, which the host
calls). A prefix is found where `wtransfer.kv.groups.longest_prefix` says so, and loads outlast
their step: a request of which one has failed begins anew.

A connector that does not name weights itself (``names_weights``) is made with a fence around each
side, which needs no line by its author: it keys its store by the token ids or block hashes that it
sees, and these are encoded with the weights. Call 2 then comes just before the first call 3. The
rules stand in `wtransfer.connectors.fenced`.

Arguments are the serving engine's own objects. Our connectors read the following of them, under the
names that vLLM gives them, and nothing else:

*   a request: ``request_id``, ``prompt_token_ids``, ``all_token_ids``, ``num_tokens``,
    ``kv_transfer_params``; and where it has them ``cache_salt``, ``lora_request``,
    ``mm_features``, ``prompt_embeds``;
*   its blocks: ``get_block_ids()``;
*   a step (``scheduler_output``): ``scheduled_new_reqs`` with ``req_id``, ``block_ids``,
    ``num_computed_tokens``; ``scheduled_cached_reqs`` with ``req_ids``, ``resumed_req_ids``,
    ``new_block_ids``, ``num_computed_tokens``; ``num_scheduled_tokens``; ``preempted_req_ids``;
    and where a host guesses tokens ``scheduled_spec_decode_tokens``; with groups that have states,
    ``kv_connector_block_state`` with ``boundary_state_offloads``: by request, group, block and
    number of tokens of each state that is there after the step;
*   the configuration: what `wtransfer.connectors.serving_config.Instance` names.

Source: names and signatures are those of vLLM's connectors, of both generations.
"""

from __future__ import annotations

import functools
import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from wtransfer.config import backend_options
from wtransfer.errors import ConnectorOptionError, ConnectorRoleError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch

    from wtransfer.specs.interface import Medium

TMetadata = TypeVar("TMetadata", bound="KVConnectorWorkerMetadata")

# -- what travels -----------------------------------------------------------------------------


class KVConnectorRole(Enum):
    """Side of a connector."""

    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata(ABC):  # noqa: B024  # a marker base, as in the field
    """Message of the scheduler's side to every worker's side for one step. Plain data."""


class KVConnectorWorkerMetadata(ABC):
    """Message of one worker's side to the scheduler's side after a step. Plain data."""

    @abstractmethod
    def aggregate(self: TMetadata, other: TMetadata) -> TMetadata:
        """Return the metadata of two workers, merged into one."""


class KVConnectorHandshakeMetadata(ABC):  # noqa: B024  # a marker base, as in the field
    """Facts that workers of another instance need before the first block. Plain data."""


@dataclass
class KVConnectorOutput:
    """Reports of the workers after a step, aggregated over all of them."""

    finished_sending: set[str] | None = None
    """Requests that every worker has sent: their blocks may be freed."""
    finished_recving: set[str] | None = None
    """Requests that every worker has received."""
    kv_connector_worker_meta: KVConnectorWorkerMetadata | None = None
    """Metadata of the workers' sides for the scheduler's."""
    invalid_block_ids: set[int] = field(default_factory=set)
    """Blocks that any worker could not load: every request that uses them must compute them."""
    failed_recving: set[str] = field(default_factory=set)
    """Received requests of which any worker could not load a part, or which begin anew."""

    def is_empty(self) -> bool:
        """Return whether nothing was reported."""
        return not any(vars(self).values())


@dataclass(frozen=True, slots=True)
class KVBlocks:
    """Consecutive blocks of one prefix, as the host's own events name them."""

    group: int
    """Number of the KV cache group."""
    block_hashes: Sequence[bytes]
    """The host's hash of each block."""
    parent_block_hash: bytes | None
    """Its hash of the block before; None: the prefix begins here."""
    token_ids: Sequence[int]
    """Tokens of all of them."""
    block_size: int
    """Tokens per block."""
    extra_keys: Sequence[tuple[Any, ...] | None]
    """What each hash is over besides tokens: in the first block the salt."""


@dataclass(frozen=True, slots=True)
class KVEvent:
    """Blocks of the present weights that were added to a medium, or removed from it."""

    blocks: KVBlocks
    """The blocks."""
    medium: Medium
    """The medium."""
    removed: bool
    """True if they were removed, or a look-up would not find them any more."""


class ConnectorSide(ABC):
    """Base of both sides of a connector.

    Args:
        config: The serving engine's configuration, with ``kv_transfer_config``.
        kv_cache_config: Shape of the KV cache; None where the host does not say.
    """

    options: Any
    """The options, there before the constructor: an object of `KVConnectorBase_V1.options_cls`, or
    a mapping where there is none."""

    def __init__(self, config: Any, kv_cache_config: Any = None) -> None:
        self.config = config
        """The serving engine's configuration."""
        self.kv_cache_config = kv_cache_config
        """Shape of the KV cache."""

    def get_stats(self) -> Mapping[str, float]:
        """Return what was done so far, as plain numbers by name."""
        return {}

    def shutdown(self) -> None:
        """Release everything. A second call does nothing."""


# -- the scheduler's side ---------------------------------------------------------------------


class ConnectorScheduler(ConnectorSide):
    """Decides what comes from elsewhere. Called on the scheduler's thread; nothing may block."""

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens of a prompt can be loaded beyond the computed ones.

        May be called again for the same request, and must not change anything.

        Args:
            request: The request: ``request_id``, ``prompt_token_ids``.
            num_computed_tokens: Tokens whose KV is in the cache already.

        Returns:
            Number of tokens, None for "ask again in the next step", and whether the load outlasts
            the step. The number must leave at least one token to compute.
        """

    @abstractmethod
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Take the blocks that a request has got.

        Args:
            request: The request.
            blocks: Every block of it; ``get_block_ids()`` gives their numbers by group.
            num_external_tokens: Number of tokens to load; 0: none, whatever the blocks.
        """

    @abstractmethod
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return the workers' tasks in this step, and forget them. Called once for each step.

        Args:
            scheduler_output: The step.
        """

    def on_new_request(self, request: Any) -> None:
        """Take a request before any other call about it."""

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take the workers' reports after a step.

        The same report may come twice, late, or about a request that is long gone.
        """

    def request_finished(
        self,
        request: Any,  # noqa: ARG002
        block_ids: list[int],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a request, whatever the reason; called once, before its blocks are freed.

        Returns:
            Whether its blocks must stay until every worker has reported them as sent, and the
            parameters that the user gets for the instance that takes over.
        """
        return False, None

    def set_xfer_handshake_metadata(
        self, metadata: Mapping[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Take the handshake metadata of the workers' sides, by rank. Called once."""

    def get_finished_count(self) -> int | None:
        """Return the number of workers that report a request before it counts; None: all."""
        return None

    def take_events(self) -> Iterable[Any]:
        """Return each `KVEvent` since the last call, in order; called in every step.

        Blocks of other weights have the same hashes: from the first step after a change none of
        them may be told as stored, and those told before are told as removed first, over several
        steps where there are many. A block that may be gone is told as removed once that is known.
        """
        return ()

    def reset_cache(self) -> bool | None:
        """Drop all stored blocks; return whether that was done.

        None: unknown, as where this method is left out. A change of weights is no reason to call
        it.
        """
        return None

    def has_pending_push_work(self) -> bool:
        """Return whether steps are needed without a request, to end work that is under way."""
        return False

    def has_pending_block_frees(self) -> bool:
        """Return whether blocks that the connector holds will be released soon.

        A host without a free block then waits for these, and preempts no request.
        """
        return False

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Take the host's block pool, once, before the first request.

        With its ``blocks`` by number, ``touch(blocks)`` and ``free_blocks(blocks)`` a connector
        keeps blocks from being given to others, also after their request has released them. A host
        that calls this asks the worker's side for `ConnectorWorker.get_failed_recving`.
        """


# -- the worker's side ------------------------------------------------------------------------


class ConnectorWorker(ConnectorSide):
    """Moves bytes into and out of a worker's cache. Called on the model's thread."""

    def __init__(self, config: Any, kv_cache_config: Any = None) -> None:
        super().__init__(config, kv_cache_config)
        self._metadata: KVConnectorMetadata | None = None

    @property
    def metadata(self) -> Any:
        """Connector metadata of this step.

        Raises:
            ConnectorRoleError: There is no step.
        """
        if self._metadata is None:
            raise ConnectorRoleError(
                f"{type(self).__name__} has no metadata outside a step; read it between "
                "bind_connector_metadata and clear_connector_metadata"
            )
        return self._metadata

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take the scheduler's metadata for the step that begins."""
        self._metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        """Drop the metadata: the step is over."""
        self._metadata = None

    def has_connector_metadata(self) -> bool:
        """Return whether there is a step."""
        return self._metadata is not None

    @abstractmethod
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the loads that this step's metadata names; may return before they are done."""

    @abstractmethod
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return once the loads of a layer that this step needs are done, or have failed."""

    @abstractmethod
    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Begin to hand on the KV of a layer that this step has computed.

        Args:
            layer_name: The layer.
            kv_layer: Its whole cache; dim 0 counts blocks.
            attn_metadata: The step's attention metadata.
            **kwargs: Further arguments of a host.
        """

    @abstractmethod
    def wait_for_save(self) -> None:
        """Return once this step's blocks are not read any more, but those that the connector keeps.

        The call makes the step count. Where the forward pass was not carried out, or built on
        blocks that could not be loaded, there is no call, and the input of `save_kv_layer` must not
        be kept.
        """

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take the caches, by layer; dim 0 counts blocks. Called once."""

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Release blocks that this step takes away from requests, before they are overwritten."""

    def get_finished(
        self,
        finished_req_ids: set[str],  # noqa: ARG002
    ) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests that are sent, and those that are received, each once.

        Args:
            finished_req_ids: Requests that have ended since the last step.
        """
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that could not be loaded, each once, before or with its request."""
        return set()

    def get_failed_recving(self) -> set[str]:
        """Return received requests that begin anew in other blocks, each once, with `get_finished`.

        Bytes may still arrive in the blocks that they have; the scheduler's side holds these.
        """
        return set()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Return metadata for the scheduler's side; None: nothing."""
        return None

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return facts that workers of other instances need of this one; None: none."""
        return None


# -- both sides under one name ----------------------------------------------------------------


class Connector(ABC):  # noqa: B024  # a marker base
    """Base of every connector, of either generation."""


def _methods(side: type[ConnectorSide]) -> frozenset[str]:
    """Return the names of the methods that only one side has."""
    own = vars(side).items()
    return frozenset(name for name, each in own if callable(each) and not name.startswith("_"))


SCHEDULER_METHODS = _methods(ConnectorScheduler)
"""Methods that only the scheduler's side has."""
WORKER_METHODS = _methods(ConnectorWorker)
"""Methods that only the worker's side has."""


class KVConnectorBase_V1(ConnectorScheduler, ConnectorWorker, Connector):  # noqa: N801  # field's
    """One side of a connector, chosen by role.

    A subclass names `scheduler_cls` and `worker_cls`, and has nothing else to do. Or it has the
    methods of both sides itself, in the style of the seed. Either way a method of the other side
    raises: state that one process changed and another reads would not be there.

    Args:
        vllm_config: The serving engine's configuration, with ``kv_transfer_config``.
        role: Side of this object.
        kv_cache_config: Shape of the KV cache; None where the host does not say.

    Raises:
        ValueError: ``kv_transfer_config`` is missing.
        ConnectorOptionError: The role is another engine's: it took the class by its module.
    """

    scheduler_cls: ClassVar[type[ConnectorScheduler] | str | None] = None
    """The scheduler's side: a class, or ``"package.module:Class"``, imported where it is needed."""
    worker_cls: ClassVar[type[ConnectorWorker] | str | None] = None
    """The worker's side, likewise."""
    names_weights: ClassVar[bool] = False
    """True if the connector itself names blocks with the weights that computed them, as by
    `wtransfer.connectors.naming`. If not, the factory puts a fence around each side that it makes,
    and this is True of that side: the connector sees token ids and block hashes that are encoded
    with the weights. The rules stand in `wtransfer.connectors.fenced`."""

    supports_hma: ClassVar[bool] = False
    """True if both sides take a cache of several groups, or with a window: vLLM then keeps its
    hybrid memory allocator for such a model."""
    requires_kv_delivery: ClassVar[bool] = False
    """True if a request must hand on the KV that it has computed: a host then computes a request
    that is preempted meanwhile once more. If not, a loss costs only a later miss."""

    example_options: ClassVar[Mapping[str, Any]] = {}
    """Options that a configuration needs at least, with values to replace; ``wtransfer plugins
    show`` prints them within a configuration to copy."""
    options_cls: ClassVar[type | str | tuple[type | str, ...]] = ()
    """Class of the options, or ``"package.module:Class"``: a dataclass or `msgspec.Struct` with
    typed fields, which ``wtransfer plugins show`` prints with types, defaults and docstrings. An
    option that is unknown, missing or of another type is refused by name. With a tuple of classes,
    each of which reads its own options, and without any, `options` is the mapping; the latter is
    warned of when options are given. A class, also of a side, with an attribute or property
    `options` of its own keeps it."""

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:  # noqa: ARG003
        """Return the layout that the KV cache must have, as vLLM names it; None: any."""
        return None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: Mapping[str, Any]) -> bool:  # noqa: ARG003
        """Return whether `wait_for_layer_load` or `save_kv_layer` does something.

        A host that captures a whole forward pass as one graph then leaves gaps for these calls.

        Args:
            extra_config: The options.
        """
        return True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        named = (cls.scheduler_cls, cls.worker_cls)
        if None not in named:
            for name in (*SCHEDULER_METHODS, *WORKER_METHODS, "get_stats", "shutdown"):
                if _is_ours(_owner(cls, name)):
                    setattr(cls, name, _delegating(name))
        elif any(named):
            raise TypeError(
                f"{cls.__qualname__} names one side only; name both scheduler_cls and worker_cls, "
                "or write the methods of both sides"
            )
        # Methods of its own, and of classes beside this one. Others have their guard already.
        for role, names in _METHODS.items():
            for name in names:
                owner = _owner(cls, name)
                if owner is cls or not issubclass(owner, KVConnectorBase_V1):
                    setattr(cls, name, _guarded(role, name, getattr(cls, name)))

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None
    ) -> None:
        if vllm_config.kv_transfer_config is None:
            raise ValueError(f"{type(self).__name__} needs kv_transfer_config, and it is None")
        if not isinstance(role, KVConnectorRole):
            raise ConnectorOptionError(
                f"{type(self).__name__} was made with a role of {type(role).__module__}, by an "
                "engine that calls connectors of its own kind. With wtransfer's plug-in for that "
                'engine, write only its name there as "kv_connector", without '
                '"kv_connector_module_path"; `wtransfer plugins show` prints it'
            )
        super().__init__(vllm_config, kv_cache_config)
        self._role = role
        # The field's names, which connectors in the style of the seed read.
        self._vllm_config = vllm_config
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._kv_cache_config = kv_cache_config
        named = self.scheduler_cls if role is KVConnectorRole.SCHEDULER else self.worker_cls
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
        options = backend_options(type(self), extra, ConnectorOptionError)
        if not hasattr(type(self), "options"):
            self.options = options
        self.side: Any = None
        """The object of this role; None where the connector has the methods itself."""
        if named is not None:
            side_cls = _load(named)
            # Set before the constructor, which uses them; its arguments are those of vLLM.
            self.side = side_cls.__new__(side_cls, vllm_config, kv_cache_config)
            if not hasattr(side_cls, "options"):
                self.side.options = options
            self.side.__init__(vllm_config, kv_cache_config)

    @property
    def metadata(self) -> Any:
        """Connector metadata of this step; see `ConnectorWorker.metadata`."""
        return super().metadata if self.side is None else self.side.metadata

    @property
    def role(self) -> KVConnectorRole:
        """Side of this object."""
        return self._role

    def _get_connector_metadata(self) -> Any:
        """Return `metadata`, under the field's name."""
        return self.metadata


_METHODS = {
    KVConnectorRole.SCHEDULER: SCHEDULER_METHODS,
    KVConnectorRole.WORKER: WORKER_METHODS,
}


def _owner(cls: type, name: str) -> type:
    """Return the class from which another one has a method."""
    return next(each for each in cls.__mro__ if name in vars(each))


def _is_ours(owner: type) -> bool:
    return owner.__module__ == __name__


def _delegating(name: str) -> Callable[..., Any]:
    def call(self: KVConnectorBase_V1, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.side, name)(*args, **kwargs)

    call.__name__ = name
    return call


def _guarded(role: KVConnectorRole, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    # An abstract method stays one: the author has not written it.
    if getattr(method, "__isabstractmethod__", False) or hasattr(method, "_wtransfer_guard"):
        return method

    @functools.wraps(method)
    def call(self: KVConnectorBase_V1, *args: Any, **kwargs: Any) -> Any:
        if self.role is not role:
            raise ConnectorRoleError(
                f"{type(self).__name__}.{name} is for the {role.name.lower()}'s side, and this "
                f"object was made for the {self.role.name.lower()}'s; they share no state"
            )
        return method(self, *args, **kwargs)

    call._wtransfer_guard = True  # type: ignore[attr-defined]  # noqa: SLF001
    return call


# Methods that an author leaves out are guarded as well.
for _role, _names in _METHODS.items():
    for _name in _names:
        setattr(
            KVConnectorBase_V1, _name, _guarded(_role, _name, getattr(KVConnectorBase_V1, _name))
        )


def _load(named: type | str) -> Any:
    if isinstance(named, type):
        return named
    module, _, qualname = named.partition(":")
    return functools.reduce(getattr, qualname.split("."), importlib.import_module(module))


# -- the first generation ---------------------------------------------------------------------


class KVConnectorBase(Connector):
    """A connector of vLLM's first generation: one object that sends and receives.

    Args:
        rank: Rank of this worker.
        local_rank: Its rank on this host, which is its device.
        config: The serving engine's configuration, with ``kv_transfer_config``.
    """

    @abstractmethod
    def __init__(self, rank: int, local_rank: int, config: Any) -> None: ...

    @abstractmethod
    def send_kv_caches_and_hidden_states(
        self,
        model_executable: Any,
        model_input: Any,
        kv_caches: list[torch.Tensor],
        hidden_or_intermediate_states: Any,
    ) -> None:
        """Hand on the results of a prefill.

        Args:
            model_executable: The model.
            model_input: Its input, with the requests' block tables.
            kv_caches: The cache of each layer.
            hidden_or_intermediate_states: Output of the last layer.
        """

    @abstractmethod
    def recv_kv_caches_and_hidden_states(
        self, model_executable: Any, model_input: Any, kv_caches: list[torch.Tensor]
    ) -> tuple[Any, bool, Any]:
        """Fill caches with KV that another instance has computed.

        Args:
            model_executable: The model.
            model_input: Its input, with the requests' block tables.
            kv_caches: The cache of each layer.

        Returns:
            The hidden states, whether the forward pass can be left out, and the input for it.
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything. A second call does nothing."""
