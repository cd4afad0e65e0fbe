"""One scheduler of SGLang and its model: orders between two steps, and KV cache named by weights.

SGLang's scheduler takes its requests at one place in its loop, between two steps, also while it is
idle or paused. There every rank carries out the first rank's orders, before the requests that came
with them (`wtransfer_sglang.orders`). A commit is one call there:

1. SGLang retracts what runs. The result of a batch in flight is processed first, and the requests
   that it ends file their KV cache under the name of the weights that computed it.
2. The session applies the update, or restores the set before.
3. The ranks compare what they hold, and name it.
4. Every request that waits gets the new name; KV cache of the old weights is flushed.
5. SGLang goes on: retracted requests keep their tokens, and their KV cache is computed anew.

The name stands in ``extra_key``, which separates blocks in every level of SGLang's cache. So a
flush that SGLang refuses, for copies to a lower level are under way, costs memory and no more: a
block is found by the name of its weights only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import time
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from wtransfer import WorkerSession
from wtransfer.errors import NotInitializedError, WTransferError
from wtransfer.transport.handshake import resolve_token
from wtransfer.weight_sync.http.server import WorkerServer
from wtransfer.weight_sync.worker.session import ServingHost, is_cast_allowed
from wtransfer.weight_sync.worker.vouching import vouch_for_checkpoint
from wtransfer.weight_version import process_weights

from wtransfer_sglang.orders import Commit, Join, Leave, Name, Order, OrderBook
from wtransfer_sglang.refusals import refusal_of
from wtransfer_sglang.target import SglangTarget, checkpoint_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from wtransfer_sglang.storage import TierStorage

logger = logging.getLogger(__name__)

LISTEN_VARIABLE = "WTRANSFER_LISTEN"
"""Environment variable of SGLang's processes: address at which publishers invite this server."""
JOIN_VARIABLE = "WTRANSFER_JOIN"
"""Environment variable of SGLang's processes: address of the publisher to join."""
CAST_VARIABLE = "WTRANSFER_SGLANG_CAST"
"""Environment variable of SGLang's processes: whether an update may have another floating dtype
than the checkpoint."""
COMMIT_WAIT_S = 2.0
"""Longest wait of a rank for its own order to commit, once the first rank has been given one."""
EMPTY_LABEL = "empty"
"""Label of the weights while the model has no version."""
MARK = "wt="
END = "|"
"""The name of the weights stands between the two, in front of a request's own ``extra_key``: SGLang
reads the end of it to tell adapters apart."""
REPLACING = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "begin_weight_update",
    "end_weight_update",
    "release_memory_occupation",
    "resume_memory_occupation",
)
"""SGLang's own verbs within which the model gets other weights than those of a commit."""
_WEIGHTS = "weights"
_HELD_NBYTES = 64

_bridge: Bridge | None = None
"""The bridge of this process; a process has one scheduler."""


# -- hooks, in the form of SGLang's registry


def open_bridge(_result: None, scheduler: Any, *_args: object, **_options: object) -> None:
    """Open the bridge of a scheduler that has been made."""
    global _bridge  # noqa: PLW0603  # hooks are functions, and a process has one scheduler
    _bridge = Bridge(scheduler)


def add_orders(
    receiver: Any, local_reqs: list[Any] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Send the first rank's orders along with its requests."""
    orders = [] if _bridge is None else _bridge.orders_to_send()
    return (receiver,), {"local_reqs": [*(local_reqs or ()), *orders]}


def carry_out_orders(
    scheduler: Any, recv_reqs: list[Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Carry out the orders among the requests; hand on the others."""
    if _bridge is not None:
        for order in recv_reqs:
            if isinstance(order, Order):
                _bridge.carry_out(order)
    return (scheduler, [req for req in recv_reqs if not isinstance(req, Order)]), {}


def name_request(_result: None, _scheduler: Any, req: Any) -> None:
    """Name a request's KV cache by the weights, where SGLang names it by its own reasons."""
    if _bridge is not None:
        _bridge.name(req)


def replace_weights(verb: str, call: Callable[..., Any], updater: Any, recv_req: Any) -> Any:
    """Have one of SGLang's own verbs change the weights, and give them names of their own."""
    if _bridge is None:
        return call(updater, recv_req)
    with _bridge.replacing(verb, recv_req):
        return call(updater, recv_req)


def heed_storage_end(_result: None, controller: Any, *_args: object, **_options: object) -> None:
    """Let calls of a tier's storage end soon when SGLang ends the threads that make them."""
    if (storage := _storage_of(controller)) is not None:
        storage.heed(controller.storage_stop_event)


def begin_step(scheduler: Any, batch: Any, *_args: object, **_options: object) -> None:
    """Note that the model is given a step, for loads from a tier have to pay beside it."""
    if (storage := _storage_of(_controller_of(scheduler))) is not None:
        storage.begin_step(batch)


def end_step(_result: None, scheduler: Any, *_args: object, **_options: object) -> None:
    """Note that the result of a step is there."""
    if (storage := _storage_of(_controller_of(scheduler))) is not None:
        storage.end_step()


def _controller_of(scheduler: Any) -> Any:
    return getattr(scheduler.tree_cache, "cache_controller", None)


def _storage_of(controller: Any) -> TierStorage | None:
    storage = getattr(controller, "storage_backend", None)
    # Another storage needs none of this.
    return storage if hasattr(storage, "heed") else None


def _refuse_pause(*_: object) -> None:
    raise NotInitializedError(
        "this address takes updates alone, also while SGLang generates; pause it by its own "
        "/pause_generation"
    )


class Bridge:
    """A scheduler's session, the name of its weights, and the commit.

    Args:
        scheduler: SGLang's, complete.

    Raises:
        WTransferError: The environment asks for an address that cannot be used.
        ValueError: A variable of the environment is not valid.
    """

    def __init__(self, scheduler: Any) -> None:
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        self._scheduler = scheduler
        self._rank, self._num_ranks = int(parallel.tp_rank), int(parallel.tp_size)
        self._group = scheduler.tp_cpu_group
        self._orders = OrderBook()
        self._secret = self._shared_secret()
        self._num_names = 0
        self._is_base = True
        """True until the weights are others than those that were loaded."""
        self.fingerprint = self._own_name()
        """Name of KV cache that is computed now; the same in all ranks."""
        self.session: WorkerSession | None = None
        """None where the environment asks for none."""
        self._server: WorkerServer | None = None
        listen, join = (os.environ.get(each) for each in (LISTEN_VARIABLE, JOIN_VARIABLE))
        runner = scheduler.tp_worker.model_runner
        if self._rank == 0 and (listen or join or scheduler.enable_hicache_storage):
            # Before the session: it keeps a name that was vouched for until its first commit.
            vouch_for_checkpoint(runner.model, lambda: checkpoint_folder(runner))
        if listen or join:
            self._open_session(listen, join)

    def _shared_secret(self) -> str:
        """Return a text that all ranks of this instance have, and no other."""
        drawn = torch.tensor(list(secrets.token_bytes(16)), dtype=torch.uint8)
        if self._num_ranks > 1:
            first = torch.distributed.get_process_group_ranks(self._group)[0]
            torch.distributed.broadcast(drawn, src=first, group=self._group)
        return bytes(drawn.tolist()).hex()

    def _own_name(self) -> str:
        """Return a new name that the ranks of this instance have, and no other instance.

        Each rank calls it at the same places among the orders and requests.
        """
        self._num_names += 1
        return "local:" + xxhash.xxh3_128_hexdigest(f"{self._secret} {self._num_names}".encode())

    def _open_session(self, listen: str | None, join: str | None) -> None:
        from sglang.srt.model_executor.model_runner_components import weight_updater
        from sglang.srt.runtime_context import get_exec, get_parallel

        parallel, scheduler = get_parallel(), self._scheduler
        if listen and resolve_token(None) is None:
            raise ValueError(
                f"{LISTEN_VARIABLE} is set, and no publisher knows a secret of this server: set "
                "WTRANSFER_TOKEN or WTRANSFER_TOKEN_FILE"
            )
        if listen and parallel.dp_size > 1:
            raise ValueError(
                f"{LISTEN_VARIABLE} names one address, and this server has "
                f"{parallel.dp_size} data-parallel replicas, each of which is an instance "
                f"of its own: set {JOIN_VARIABLE}, or run the replicas as servers of their own"
            )
        runner = scheduler.tp_worker.model_runner
        derived = weight_updater._unsupported_derived_weight_cache_error(runner.model)  # noqa: SLF001
        target = SglangTarget(runner, refusal_of(scheduler, parallel, get_exec().moe, derived))
        self.session = session = _RankSession(
            target,
            None if self._rank else self._orders,
            cast=is_cast_allowed(CAST_VARIABLE),
            instance=f"{socket.gethostname()}:{self._secret}",
            rank=self._rank,
            num_ranks=self._num_ranks,
            serving_host=ServingHost(
                cast_hint=f"{CAST_VARIABLE}=1 in the environment of SGLang",
                num_ranks=self._num_ranks,
            ),
        )
        if self._rank:
            return
        if join:
            session.join(join)
        if listen:
            self._server = WorkerServer(
                session, listen=listen, on_pause=_refuse_pause, on_resume=_refuse_pause
            )
            logger.info("publishers invite this server at %s", self._server.url)

    # -- names

    def name(self, req: Any) -> None:
        """Put the name of the weights in front of a request's ``extra_key``."""
        req.extra_key = f"{MARK}{self.fingerprint}{END}{req.extra_key or ''}"

    def _rename(self, req: Any) -> None:
        if req.extra_key is not None and req.extra_key.startswith(MARK):
            req.extra_key = req.extra_key.partition(END)[2] or None
            self.name(req)

    def _waiting(self) -> list[Any]:
        """Return the requests that wait and hold no KV cache, those that were retracted as well."""
        scheduler = self._scheduler
        return [*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue]

    # -- orders

    def orders_to_send(self) -> list[Order]:
        """Return the orders that go along with the next broadcast; none in ranks but the first."""
        if self._rank:
            return []
        session, known = self.session, process_weights.version()
        if (
            self._is_base
            and known is not None
            and not known.fingerprint.startswith(("local:", "several:"))
            and known.fingerprint != self.fingerprint
            and not self._orders.has(Name)
        ):
            self._orders.give(Name, known.fingerprint)
        if (
            session is not None
            and session.status().pending
            and not self._is_asleep
            and not self._orders.has(Commit)
        ):
            self._orders.give(Commit)
        return self._orders.waiting()

    @property
    def _is_asleep(self) -> bool:
        return _WEIGHTS in self._scheduler.weight_updater.offload_tags

    def carry_out(self, order: Order) -> None:
        """Do what the first rank has ordered; in every rank between the same two steps."""
        if not self._orders.take(order):
            return
        if isinstance(order, Commit):
            self._commit()
        elif isinstance(order, Name):
            # Given before a commit that has been carried out since, it names other weights.
            if self._is_base:
                self.fingerprint = order.fingerprint
        elif self._rank and self.session is not None:
            self._follow(self.session, order)

    def _follow(self, session: WorkerSession, order: Order) -> None:
        """Join or leave a publisher, as the first rank did."""
        try:
            if isinstance(order, Leave):
                session.leave(order.address)
            elif isinstance(order, Join):
                session.join(order.address, token=order.token, host=order.host)
        except (WTransferError, ValueError) as error:
            logger.error("rank %d cannot follow %s: %s", self._rank, order, error)  # noqa: TRY400

    # -- commits

    def _commit(self) -> None:
        session, scheduler = self.session, self._scheduler
        assert session is not None
        begun, num_running = time.monotonic(), len(scheduler.running_batch.reqs)
        with self._nothing_runs():
            applied = False
            try:
                applied = session.commit_pending(COMMIT_WAIT_S)
            except WTransferError as error:
                logger.error("%s", error)  # noqa: TRY400  # the session has logged the rest
            self._name_weights(session, applied=applied)
        logger.info(
            "a commit of %r kept %d running requests for %.3f s, before their KV cache is computed "
            "anew",
            session.version,
            num_running,
            time.monotonic() - begun,
        )

    @contextlib.contextmanager
    def _nothing_runs(self) -> Iterator[None]:
        """Retract what runs; afterwards rename what waits, flush, and go on."""
        from sglang.srt.managers.io_struct import (
            ContinueGenerationReqInput,
            PauseGenerationReqInput,
        )

        scheduler = self._scheduler
        was_paused = scheduler._engine_paused  # noqa: SLF001  # SGLang has no public name for it
        scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        self._end_prefetches()
        torch.get_device_module().synchronize()
        yield
        torch.get_device_module().synchronize()
        for req in self._waiting():
            self._rename(req)
        if not scheduler.flush_cache(empty_cache=False):
            logger.info("KV cache of the weights before is not flushed; it is under their name")
        if scheduler.enable_hicache_storage:
            for req in scheduler.waiting_queue:
                scheduler._prefetch_kvcache(req)  # noqa: SLF001  # as SGLang queues a request
        if not was_paused:
            scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))

    def _end_prefetches(self) -> None:
        """End the loads of blocks from storage that were begun under the name before."""
        if self._scheduler.enable_hicache_storage:
            for req in self._waiting():
                self._scheduler.tree_cache.release_aborted_request(req.cache_request_handle)

    def _name_weights(self, session: WorkerSession, *, applied: bool) -> None:
        """Name the weights by what all ranks hold, and label them.

        A block that a rank computes rests on the weights of all ranks.
        """
        held = self._gathered(session, applied=applied)
        if all(state == "unchanged" for state, _ in held):
            return
        self._is_base = False
        whole = len(set(held)) == 1 and held[0][0] == "applied"
        self.fingerprint = held[0][1] if whole else self._own_name()
        label = session.version if whole else EMPTY_LABEL
        self._scheduler.record_weight_version_change(new_version=label)

    def _gathered(self, session: WorkerSession, *, applied: bool) -> list[tuple[str, str]]:
        """Return what each rank holds: its state after a commit, and its fingerprint."""
        state = "applied" if applied else "empty" if session.state == "empty" else "unchanged"
        own = (state, session.fingerprint if applied else "")
        if self._num_ranks == 1:
            return [own]
        # Fixed lengths of bytes: nothing is unpickled.
        sent = torch.tensor(list(" ".join(own).encode().ljust(_HELD_NBYTES)), dtype=torch.uint8)
        received = [torch.empty_like(sent) for _ in range(self._num_ranks)]
        torch.distributed.all_gather(received, sent, group=self._group)
        texts = [bytes(each.tolist()).decode().rstrip().partition(" ") for each in received]
        return [(state, fingerprint) for state, _, fingerprint in texts]

    # -- weights that come by other ways

    @contextlib.contextmanager
    def replacing(self, verb: str, recv_req: Any) -> Iterator[None]:
        """Give the weights names of their own while, and after, SGLang's verb changes them.

        SGLang decides itself what becomes of requests that run. Their KV cache is of several sets
        of weights from here on, and is not filed.
        """
        tags = getattr(recv_req, "tags", None)
        if verb.endswith("memory_occupation") and tags and _WEIGHTS not in tags:
            yield
            return
        self._lose_weights(verb)
        try:
            yield
        finally:
            # Once more: KV cache that was computed in between is of no set of weights.
            self._lose_weights(verb)

    def _lose_weights(self, verb: str) -> None:
        scheduler = self._scheduler
        self._is_base = False
        self.fingerprint = self._own_name()
        running = scheduler.collect_inflight_reqs()
        for req in running if scheduler.chunked_req is None else {*running, scheduler.chunked_req}:
            req.skip_radix_cache_insert = True
        self._end_prefetches()
        for req in self._waiting():
            self._rename(req)
        model = scheduler.tp_worker.model_runner.model
        if self.session is not None:
            self.session.weights_lost(f"SGLang's {verb} was called")
        process_weights.weights_replaced(model)


class _RankSession(WorkerSession):
    """The session of a rank; the first rank's orders the others to join and leave with it.

    Args:
        target: The rank's model.
        orders: The instance's orders; None in ranks but the first.
        options: Those of `WorkerSession`.
    """

    def __init__(self, target: SglangTarget, orders: OrderBook | None, **options: Any) -> None:
        super().__init__(target, **options)
        self._orders = orders

    def join(self, address: str, *, token: str | None = None, host: str | None = None) -> None:
        """Join a publisher; as `WorkerSession.join`."""
        super().join(address, token=token, host=host)
        if self._orders is not None:
            self._orders.give(Join, address, token, host)

    def leave(self, address: str) -> None:
        """Leave a publisher; as `WorkerSession.leave`."""
        super().leave(address)
        if self._orders is not None:
            self._orders.give(Leave, address)
