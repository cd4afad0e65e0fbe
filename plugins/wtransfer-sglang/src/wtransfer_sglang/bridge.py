"""One scheduler of SGLang and its model: orders between two steps, and KV cache named by weights.

SGLang's scheduler takes its requests at one place in its loop, between two steps, also while it is
idle or paused. There every rank carries out the first rank's orders, before the requests that came
with them (`wtransfer_sglang.orders`). A commit is one call there:

1. The ranks agree that each has the update. Until then they serve on, and a later order asks again.
2. SGLang retracts what runs, and ends what it cannot retract, beam search. The result of a batch in
   flight is processed first, and the requests that it ends file their KV cache under the name of
   the weights that computed it.
3. The session applies the update, or restores the set before.
4. The ranks compare what they hold, and name it.
5. Every request that waits gets the new name; KV cache of the old weights is flushed.
6. SGLang goes on: retracted requests keep their tokens, and their KV cache is computed anew.

The name says which weights, and what computes with them (`wtransfer_sglang.names`). It stands in
``extra_key``, which separates blocks in every level of SGLang's cache. So a flush that SGLang
refuses, for copies to a lower level are under way, costs memory and no more: a block is found by
the name of its weights only.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import time
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from wtransfer import WorkerSession
from wtransfer.errors import NotInitializedError, WTransferError
from wtransfer.transport.handshake import resolve_token
from wtransfer.weight_sync.http.server import WorkerServer
from wtransfer.weight_sync.worker.session import ServingHost, is_set
from wtransfer.weight_version import EMPTY_LABEL, process_weights

from wtransfer_sglang.names import computing_with
from wtransfer_sglang.orders import Commit, Join, Leave, Name, Order, OrderBook
from wtransfer_sglang.places import refusal_of
from wtransfer_sglang.target import SglangTarget, vouch

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
BEAM_ENDED = "beam search was ended by an update of the weights: it cannot go on with others"
"""What the clients of those requests are told."""
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
    "check_weights",
)
"""SGLang's own verbs within which the model may get other weights than those of a commit."""
OUTPUT_LOGPROBS = tuple(
    f"output_{kind}_logprobs_{part}"
    for kind in ("token", "top", "token_ids")
    for part in ("val", "idx")
)
"""Log probabilities that SGLang gathers for the tokens of a request."""
_WEIGHTS = "weights"
_GATHERED_NBYTES = 64

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


def name_weights(call: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """Have a caller's label name no weights that have the label of a publisher."""
    held = None if _bridge is None else _bridge.label
    if held is not None and recv_req.new_version != held:
        logger.warning("the weights stay %r and are not named %r", held, recv_req.new_version)
        recv_req.new_version = held
    return call(scheduler, recv_req)


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
        ValueError: A variable of the environment is not valid, or its address cannot be used.
    """

    def __init__(self, scheduler: Any) -> None:
        from sglang.srt.arg_groups.overrides import resolved_view
        from sglang.srt.model_executor.model_runner_components import weight_updater
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        self._scheduler = scheduler
        self._rank, self._num_ranks = int(parallel.tp_rank), int(parallel.tp_size)
        self._is_first = self._rank == parallel.pp_rank == 0
        """True in the rank that gives the orders; each pipeline stage has a rank 0."""
        self._group = scheduler.tp_cpu_group
        self._orders = OrderBook()
        self._secret = self._shared_secret()
        self._num_names = 0
        self._is_base = True
        """True until the weights are others than those that were loaded."""
        self.fingerprint = self._own_name()
        """Name of KV cache that is computed now; the same in all ranks."""
        self.session: RankSession | None = None
        """None where the environment asks for none."""
        self._server: WorkerServer | None = None
        listen, join = (os.environ.get(each) for each in (LISTEN_VARIABLE, JOIN_VARIABLE))
        runner = scheduler.tp_worker.model_runner
        self._computing = computing_with(runner, parallel)
        if listen or join or scheduler.enable_hicache_storage:
            derived = weight_updater._unsupported_derived_weight_cache_error(runner.model)  # noqa: SLF001
            options = resolved_view(scheduler.server_args)
            target = SglangTarget(runner, refusal_of(scheduler, parallel, options, derived))
            # Before the session: it keeps a name that was vouched for until its first commit.
            is_proven = self._all_ranks(target.refusal is None)
            if self._is_first and parallel.pp_size == 1:
                vouch(runner, target, is_proven=is_proven)
            # The first stage tells publishers that pipeline stages take no update.
            if (listen or join) and parallel.pp_rank == 0:
                self._open_session(target, listen, join)

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

    def _all_ranks(self, here: bool) -> bool:
        """Return whether something holds in all ranks; each of them calls it."""
        num_others = torch.tensor([int(not here)])
        if self._num_ranks > 1:
            torch.distributed.all_reduce(num_others, group=self._group)
        return not num_others.item()

    def _open_session(self, target: SglangTarget, listen: str | None, join: str | None) -> None:
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        if listen and resolve_token(None) is None:
            raise ValueError(
                f"{LISTEN_VARIABLE} is set, and no publisher knows a secret of this server: set "
                "WTRANSFER_TOKEN or WTRANSFER_TOKEN_FILE"
            )
        if listen and parallel.dp_size > 1 and not parallel.attn_dp_enabled:
            raise ValueError(
                f"{LISTEN_VARIABLE} names one address, and this server has "
                f"{parallel.dp_size} data-parallel replicas, each of which is an instance "
                f"of its own: set {JOIN_VARIABLE}, or run the replicas as servers of their own"
            )
        self.session = session = RankSession(
            target,
            None if self._rank else self._orders,
            cast=is_set(CAST_VARIABLE),
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
        with _told_of(JOIN_VARIABLE):
            if join:
                session.join(join)
        with _told_of(LISTEN_VARIABLE):
            if listen:
                self._server = WorkerServer(
                    session, listen=listen, on_pause=_refuse_pause, on_resume=_refuse_pause
                )
                logger.info("publishers invite this server at %s", self._server.url)

    # -- names

    def name(self, req: Any) -> None:
        """Put the name of the KV cache in front of a request's ``extra_key``.

        Where weights change by SGLang alone, and KV cache leaves this instance by none of its
        storages, the key stays as it is.
        """
        if self.session is not None or self._scheduler.enable_hicache_storage:
            name = f"{self.fingerprint} {self._computing}"
            req.extra_key = f"{MARK}{name}{END}{req.extra_key or ''}"

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
        if not self._is_first:
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
            and not self._is_in_sglangs_hands
            and not self._orders.has(Commit)
        ):
            self._orders.give(Commit)
        return self._orders.waiting()

    @property
    def _is_in_sglangs_hands(self) -> bool:
        """True while SGLang has released the weights, or is amid an update of its own."""
        updater = self._scheduler.weight_updater
        return _WEIGHTS in updater.offload_tags or updater._session is not None  # noqa: SLF001

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
            try:
                self.session.follow(order)
            except (WTransferError, ValueError) as error:
                logger.error("rank %d cannot follow %s: %s", self._rank, order, error)  # noqa: TRY400

    # -- commits

    def _commit(self) -> None:
        session, scheduler = self.session, self._scheduler
        assert session is not None
        # Before anything is paused: a rank whose publisher has stopped between two ranks would
        # keep the others here. Every rank carries out the order, so all of them gather.
        if not all(self._gathered("pending" if session.status().pending else "")):
            return
        begun, num_running = time.monotonic(), len(scheduler.running_batch.reqs)
        with self._nothing_runs():
            applied = False
            try:
                applied = session.commit_pending()
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
        # As the next step would. SGLang forgets the abort of a prefill that it has retracted.
        scheduler.process_pending_chunked_abort()
        self._end_beams()
        scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        self._forget_dropped()
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

    def _end_beams(self) -> None:
        """End the beam searches that run: SGLang cannot retract them.

        Their members have KV cache of their own behind the prompt's. SGLang ends them, too, where
        it retracts requests for want of memory; as there, a result in flight finds them finished.
        Those that only wait go on to wait.
        """
        from sglang.srt.beam_search.fork import free_member_rows
        from sglang.srt.managers.io_struct import AbortReq
        from sglang.srt.managers.schedule_batch import FINISH_ABORT, retract_all

        scheduler = self._scheduler
        pools = (scheduler.req_to_token_pool, scheduler.token_to_kv_pool_allocator)
        # In one order in all ranks.
        for req in sorted(self._in_flight(), key=lambda req: req.rid):
            if req.beam_group is None or req.beam_group.retired or req.finished():
                continue
            reason = FINISH_ABORT(BEAM_ENDED, status_code=HTTPStatus.SERVICE_UNAVAILABLE)
            scheduler.send_abort_output(
                AbortReq(rid=req.rid, finished_reason=reason.to_json()), req
            )
            # In this order: the members' KV cache is found by the leader's.
            free_member_rows(req.beam_group, *pools)
            retract_all(
                reqs=[req],
                req_to_token_pool=pools[0],
                token_to_kv_pool_allocator=pools[1],
                tree_cache=scheduler.tree_cache,
                hisparse_coordinator=scheduler.hisparse_coordinator,
                offload_kv=False,
            )
            req.finished_reason = reason
            scheduler.beam_coordinator.retire_group(req)
        # Rows of members hang on the batch until the next step, those of finished searches as well.
        scheduler.running_batch.filter_batch()

    def _forget_dropped(self) -> None:
        """Drop what was gathered for tokens that SGLang has dropped.

        It begins a retracted request by embeddings anew, and keeps what belongs to its tokens.
        """
        for req in self._waiting():
            if req.input_embeds is not None:
                gathered, req.customized_info = req.logprob, None
                req.logprob = type(gathered)(
                    top_logprobs_num=gathered.top_logprobs_num,
                    token_ids_logprob=gathered.token_ids_logprob,
                )
                if req.return_logprob:
                    for name in OUTPUT_LOGPROBS:
                        setattr(req.logprob, name, [])
                if req.sampling_mask_rows is not None:
                    req.sampling_mask_rows = type(req.sampling_mask_rows)()

    def _in_flight(self) -> set[Any]:
        """Return the requests that hold KV cache."""
        running: set[Any] = self._scheduler.collect_inflight_reqs()
        return running | ({self._scheduler.chunked_req} - {None})

    def _end_prefetches(self) -> None:
        """End the loads of blocks from storage that were begun under the name before."""
        if self._scheduler.enable_hicache_storage:
            for req in self._waiting():
                self._scheduler.tree_cache.release_aborted_request(req.cache_request_handle)

    def _name_weights(self, session: WorkerSession, *, applied: bool) -> None:
        """Name the weights by what all ranks hold, and label them.

        A block that a rank computes rests on the weights of all ranks.
        """
        own = "empty" if session.state == "empty" else ""
        # Not the session's fingerprint: a set may have been cast as it was applied.
        if applied and (known := process_weights.version()) is not None:
            own = known.fingerprint
        held = set(self._gathered(own))
        if held == {""}:
            return
        if len(held) > 1:
            # A publisher knows ranks one by one: each of them is to bring the version again.
            session.weights_lost(f"the ranks differ after a commit: {sorted(held)}")
        self._is_base = False
        whole = session.state != "empty"
        self.fingerprint = own if whole else self._own_name()
        label = session.version if whole else EMPTY_LABEL
        self._scheduler.record_weight_version_change(new_version=label)

    def _gathered(self, own: str) -> list[str]:
        """Return a short text of each rank; every rank calls it at the same place."""
        if self._num_ranks == 1:
            return [own]
        # Fixed lengths of bytes: nothing is unpickled.
        sent = torch.tensor(list(own.encode().ljust(_GATHERED_NBYTES)), dtype=torch.uint8)
        received = [torch.empty_like(sent) for _ in range(self._num_ranks)]
        torch.distributed.all_gather(received, sent, group=self._group)
        return [bytes(each.tolist()).decode().rstrip() for each in received]

    @property
    def label(self) -> str | None:
        """Label of the version that this rank holds; None: the weights are of no version."""
        session = self.session
        return None if session is None or session.state == "empty" else session.version

    # -- weights that come by other ways

    @contextlib.contextmanager
    def replacing(self, verb: str, recv_req: Any) -> Iterator[None]:
        """Give the weights names of their own while, and after, SGLang's verb changes them.

        SGLang decides itself what becomes of requests that run. Their KV cache is of several sets
        of weights from here on, and is not filed.
        """
        tags = getattr(recv_req, "tags", None)
        if (verb.endswith("memory_occupation") and tags and _WEIGHTS not in tags) or (
            verb == "check_weights" and recv_req.action != "reset_tensors"
        ):
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
        running = self._in_flight()
        for req in running:
            req.skip_radix_cache_insert = True
        self._end_prefetches()
        # Those that run as well: SGLang may retract them, and looks for their KV cache then.
        for req in [*self._waiting(), *running]:
            self._rename(req)
        model = scheduler.tp_worker.model_runner.model
        if self.session is not None:
            if self.session.state != "empty":
                # Once, and before the call: SGLang's own label, if it is given one, comes after.
                scheduler.record_weight_version_change(new_version=EMPTY_LABEL)
            self.session.weights_lost(f"SGLang's {verb} was called")
        process_weights.weights_replaced(model)


@contextlib.contextmanager
def _told_of(variable: str) -> Iterator[None]:
    """Name the variable of the environment that has an address which cannot be used."""
    try:
        yield
    except WTransferError as error:
        raise ValueError(f"{variable}={os.environ.get(variable)!r}: {error}") from error


class RankSession(WorkerSession):
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

    def follow(self, order: Order) -> None:
        """Join or leave a publisher, as the first rank did.

        Args:
            order: The first rank's.

        Raises:
            WTransferError: As `join`.
            ValueError: As `join` and `leave`.
        """
        if isinstance(order, Leave):
            self.leave(order.address)
        elif isinstance(order, Join):
            # The first rank has left its publisher, or has seen it end; this one may be later.
            if (current := self.status().publisher) is not None:
                self.leave(current)
            self.join(order.address, token=order.token, host=order.host)
