"""Name the blocks of vLLM's own lower tiers by the weights: these are part of their hashes.

vLLM's OffloadingConnector files blocks in its lower tiers under the hashes of a request's blocks,
and other engines read them there. Such a hash follows from tokens alone. Here the hash of the first
block follows from the weights as well, and so does each that is chained to it: other weights find
nothing, in any engine, and weights that come back find theirs again. vLLM's own prefix cache has
the same hashes. The name is that of our connectors (`wtransfer.weight_version`), asked of every
worker.

| event                                  | effect                                                  |
| a request arrives, on the thread that  | its hashes have the present name                        |
|   reads sockets, maybe before a commit |                                                         |
| it is looked up, with no computed      | hashes of another name are made anew, in the list that  |
|   token: new, preempted, begun anew    | others hold; it begins under the present weights        |
| blocks of it are to be stored          | none is, unless it began under the present weights,     |
|                                        | other processes can know their name, and it has no LoRA |
|                                        | adapter                                                 |
| a commit                               | another name; every request is looked up again; stores  |
|                                        | under way keep their keys, and end before a block of    |
|                                        | theirs is written again                                 |

Where no other process can know the name (a checkpoint that is still being read, `reload_weights`,
an empty model, ranks of which one has no version), one is drawn, and nothing is stored.

Such a connector is not reset at a commit: its first tier has the same names, and vLLM would give a
slot of it to the next block while a worker still writes there for a store under way.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from wtransfer.weight_version import instance_fingerprint, known_versions, process_weights

from wtransfer_vllm.places import LOWER_TIERS, rows_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from wtransfer.weight_version import WeightVersions

logger = logging.getLogger(f"vllm.{__name__}")  # a child of vLLM's, so that its log has it

NAMED = "wtransfer_hashes_name"
"""Attribute of vLLM's request: the name that its hashes have."""
BEGAN = "wtransfer_began"
"""Attribute of vLLM's request: the `Present` under which it was looked up last."""
ASK_AGAIN_S = 1.0
"""Least time between two questions to workers that do not know their name yet, in seconds."""
KNOWN_TO_OTHERS = re.compile("[0-9a-f]{32}")
"""Form of a fingerprint that does not belong to one process."""


class Present(NamedTuple):
    """What requests begin under."""

    versions: WeightVersions | None
    """Weight version of each rank; None: not all are known."""
    name: str
    """Part of the hash of every first block."""
    is_shared: bool
    """Whether other processes can know the name."""
    hash_blocks: Callable[[Any], list[bytes]]
    """Return the hashes of the whole blocks of a request that has none for them yet."""


def names_blocks(vllm_config: Any) -> bool:
    """Return whether a configuration has lower tiers, whose blocks are named by these hashes."""
    return any((row.at_commit, row.why) == LOWER_TIERS for row in rows_of(vllm_config))


class BlockHashes:
    """Names the blocks of one engine core.

    Args:
        core: vLLM's ``EngineCore``, with its scheduler, before that has its first request.
        call: Calls a function in every worker; returns what it returns, by rank.

    Raises:
        AttributeError: This vLLM does not have all that is changed here.
    """

    _present: Present

    def __init__(self, core: Any, call: Callable[..., list[Any]]) -> None:
        self._scheduler, self._call = core.scheduler, call
        self._algorithm = core.vllm_config.cache_config.prefix_caching_hash_algo
        connector = core.scheduler.connector
        parts = getattr(connector, "sub_connectors", None) or [connector]
        self.parts = [part for part in parts if _has_lower_tiers(part)]
        """The connectors that are named by these hashes, and must not be reset."""
        look_up = core.scheduler._get_local_prefix_cache_hit  # noqa: SLF001
        is_known = hasattr(core.scheduler, "reset_preempted_req_ids")
        if not (self.parts and core.request_block_hasher and is_known):
            raise AttributeError(
                "this vLLM has lower tiers, hashes or preemptions at another place"
            )
        self.forget()
        for part in self.parts:
            self._guard(part.connector_scheduler)
        core.request_block_hasher = self._hash_blocks

        def begin_and_look_up(request: Any) -> Any:
            self._begin(request)
            return look_up(request)

        core.scheduler._get_local_prefix_cache_hit = begin_and_look_up  # noqa: SLF001

    def renew(self) -> None:
        """Ask the workers for their weights; those that have changed get another name."""
        versions = self._ask()
        if versions != self._present.versions:
            self._present = self._named(versions)

    def forget(self) -> None:
        """Have every request begin anew, right after the weights have changed.

        To be called before any request gives its blocks back; all must be looked up afterwards.
        """
        self._present = self._named(self._ask())
        for part in self.parts:
            side = part.connector_scheduler
            side._current_batch_jobs_to_flush.update(side._jobs)  # noqa: SLF001
            for status in side._req_status.values():  # noqa: SLF001
                _begin_anew(status)

    def _ask(self) -> WeightVersions | None:
        self._asked_at = time.monotonic()
        try:
            return known_versions(self._call(held_version))
        except Exception:
            logger.exception("no worker tells its weights; no KV goes to the lower tiers")
            return None

    def _named(self, versions: WeightVersions | None) -> Present:
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core import kv_cache_utils

        is_shared = versions is not None and all(
            KNOWN_TO_OTHERS.fullmatch(version.fingerprint) for version in versions
        )
        name = instance_fingerprint(versions) if is_shared and versions else secrets.token_hex(16)
        hash_fn: Callable[[Any], bytes] = get_hash_fn_by_name(self._algorithm)
        root = hash_fn((name, "wtransfer"))

        def hash_block(block: tuple[Any, ...]) -> bytes:
            parent, *rest = block
            # Looked up here, for another engine of this process may have set another one.
            return hash_fn((root if parent == kv_cache_utils.NONE_HASH else parent, *rest))

        size = self._scheduler.hash_block_size
        hash_blocks = kv_cache_utils.get_request_block_hasher(size, hash_block)
        return Present(versions, name, is_shared, hash_blocks)

    def _hash_blocks(self, request: Any) -> list[bytes]:
        """Return the hashes of a request's new blocks; on the thread for sockets as well."""
        present = self._present
        if not request.block_hashes:
            setattr(request, NAMED, present.name)
        return present.hash_blocks(request)

    def _begin(self, request: Any) -> None:
        present = self._present
        if present.versions is None and time.monotonic() > self._asked_at + ASK_AGAIN_S:
            self.renew()
            present = self._present
        if vars(request).get(NAMED) != present.name:
            # It may have arrived before this began, with vLLM's own hashes.
            request._block_hasher = self._hash_blocks  # noqa: SLF001
            request.block_hashes.clear()
            request.update_block_hashes()
            begin_anew(self._scheduler, request)
        setattr(request, BEGAN, present)

    def _guard(self, side: Any) -> None:
        """Store what is named right alone, and load nothing in the step after a preemption.

        And let vLLM reset it between a commit and the next step, with jobs that are to be flushed.

        Args:
            side: The scheduler's side of a connector.
        """
        prepare, find = side.manager.prepare_store, side.get_num_new_matched_tokens
        reset = side.reset_cache

        def prepare_store(keys: Collection[bytes], req_context: Any) -> Any:
            present = self._present
            request = side._req_status[req_context.req_id].req  # noqa: SLF001
            is_named = vars(request).get(BEGAN) is present and present.is_shared
            # Other processes may have loaded something else under an adapter's name.
            is_named = is_named and request.lora_request is None
            return prepare(keys if is_named else [], req_context)

        def find_later(request: Any, *args: Any, **kwargs: Any) -> Any:
            # In the step that tells it of a preemption vLLM's connector takes all jobs of the
            # request for stores, and ends the engine otherwise.
            if request.request_id in self._scheduler.reset_preempted_req_ids:
                return None, False
            return find(request, *args, **kwargs)

        def reset_cache() -> None:
            due = set(side._current_batch_jobs_to_flush)  # noqa: SLF001
            side._current_batch_jobs_to_flush.clear()  # noqa: SLF001
            reset()
            side._current_batch_jobs_to_flush.update(due)  # noqa: SLF001

        side.manager.prepare_store = prepare_store
        side.reset_cache = reset_cache
        side.get_num_new_matched_tokens = find_later


def _has_lower_tiers(connector: Any) -> bool:
    manager = getattr(getattr(connector, "connector_scheduler", None), "manager", None)
    return bool(getattr(manager, "secondary_tiers", ()))


def begin_anew(scheduler: Any, request: Any) -> None:
    """Have vLLM's connectors take the hashes of a request that has got others."""
    connector = getattr(scheduler, "connector", None)
    for part in getattr(connector, "sub_connectors", None) or [connector]:
        side = getattr(part, "connector_scheduler", None)
        status = getattr(side, "_req_status", {}).get(request.request_id)
        if status is not None:
            _begin_anew(status)


def _begin_anew(status: Any) -> None:
    """Drop what vLLM's connector knows of a request: it would only ever add to it."""
    for state in status.group_states:
        state.offload_keys.clear()
        state.block_ids.clear()
        state.next_stored_chunk_idx = 0


def held_version(worker: Any) -> Any:  # noqa: ARG001
    """Return the version of a worker's weights, called in it; None: not known at this moment."""
    return process_weights.version()
