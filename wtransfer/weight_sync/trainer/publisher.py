"""The trainer's end: workers join a publisher, which publishes the trainer's weights to them."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import operator
import os
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

from wtransfer.calls import (
    INTERRUPT_GRACE_S,
    Call,
    call_apart,
    check_process,
    close_at_exit,
    on_callers_stream,
    start_call,
)
from wtransfer.checkpoint.base_checkpoint import BaseCheckpoint
from wtransfer.deadline import checked_timeout
from wtransfer.errors import (
    ClosedError,
    HostsError,
    NoWorkersError,
    ProtocolError,
    RoundAbortedError,
    RoundBusyError,
    StallError,
    VersionNotKeptError,
    WTransferError,
)
from wtransfer.manifest import check_label
from wtransfer.transport.channel import Listener
from wtransfer.transport.handshake import new_token, resolve_token
from wtransfer.weight_sync.messages import (
    CODEC,
    MAX_OBSERVED,
    MAX_OBSERVED_NBYTES,
    FleetStatus,
    Observe,
    clipped,
)
from wtransfer.weight_sync.report import commit_error
from wtransfer.weight_sync.trainer.catch_up import CatchUp
from wtransfer.weight_sync.trainer.coordinator import (
    JOINER_PATIENCE_S,
    Coordinator,
    LostPolicy,
    NonfinitePolicy,
    ProvenUpdate,
    Rules,
)
from wtransfer.weight_sync.trainer.endpoints import Endpoints
from wtransfer.weight_sync.trainer.engine_runner import EngineRunner, Origin
from wtransfer.weight_sync.trainer.membership import Membership
from wtransfer.weight_sync.trainer.progress_display import watch
from wtransfer.weight_sync.trainer.quantised import QuantisedSource
from wtransfer.weight_sync.trainer.round_handle import Round
from wtransfer.weight_sync.trainer.sharded import FLUSH_S, ShardedSource
from wtransfer.weight_sync.trainer.source import as_source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import msgspec
    import torch
    from torch import nn
    from typing_extensions import Self

    from wtransfer.engines.interface import KeptVersion, WeightSyncClient
    from wtransfer.transport.channel import Connection
    from wtransfer.weight_sync.checkpoint_form import Form
    from wtransfer.weight_sync.report import Report, WorkerInfo
    from wtransfer.weight_sync.trainer.fleet_state import NamedHost
    from wtransfer.weight_sync.trainer.workers import Worker
    from wtransfer.weights import ParamMeta, WeightSource

    Hosts = Iterable[str | WeightSyncClient]

logger = logging.getLogger(__name__)

UNTOLD_HINT = (
    "; no token was given, so this publisher made its own, which workers must be told: read it "
    "from its `token`, or set WTRANSFER_TOKEN to one secret on both sides"
)
NUM_NAMED = 4
"""Failed workers that an error names."""
CLOSE_GRACE_S = 5.0
"""Seconds that a publisher which closes waits for the end of the round that it aborted."""


class Attempt:
    """A round that a caller wants, on its way to begin on a thread of its own.

    Args:
        method: Name of the method that was called, for errors.
    """

    def __init__(self, method: str) -> None:
        self.method = method
        self.cancelled: str | None = None
        self.round: Coordinator | None = None

    @property
    def is_over(self) -> bool:
        """True if no round of this attempt is under way."""
        return self.round is None or self.round.done

    def begun(self, round_: Coordinator) -> Coordinator:
        """Note the round."""
        # In this order, and the other way round in `cancel`: one of the two sees the other.
        self.round = round_
        if self.cancelled is not None:
            round_.abort(self.cancelled)
        return round_

    def cancel(self, error: BaseException) -> None:
        """Let no round begin, and abort one that has begun."""
        self.cancelled = f"interrupted by {type(error).__name__}"
        if self.round is not None:
            self.round.abort(self.cancelled)


class Publisher:
    """Publishes weights to every worker that has joined, all or nothing.

    Args:
        model_or_source: A torch module, a mapping of names to tensors, or a `WeightSource`, read
            anew in every round. If the weights are sharded over several ranks of the trainer, one
            rank publishes and each other rank has a `TrainerRank`.
        form: Returns the names and views that travel, of a module's names and tensors or a
            mapping's: ``form(tensors)``. Default: of a module the form of its checkpoint (for a
            model of transformers what ``save_pretrained`` writes), of a mapping its own.
            ``form=dict`` sends a module's own names and shapes.
        base: Folder of the checkpoint that the workers were started with. Its tensors that the
            model does not have (a frozen vision tower, layers that predict further tokens) stay as
            they are: nothing of them travels, and every worker proves that it has them. Where it is
            quantised (compressed-tensors of 8 bits, or fp8), each weight that it has quantised is
            sent in its form, computed as it is read: scales by the largest magnitude, and never a
            second copy of the model. The scheme is read from its ``config.json``.
        engine: Engine name in the group ``wtransfer.engines``.
        trainer: The engine's trainer class. Default: the ``trainer_cls`` of the worker class.
        options: Fields of the engine's trainer init info.
        listen: Address to listen at. Default: an abstract Unix socket with a random name, which
            only this user can reach, in this network namespace. ``unix:/path`` for containers of
            this host that share that folder. ``tcp:host:port`` for other hosts: both sides prove
            that they know the token, but nothing is encrypted.
        token: Shared secret. Default: ``WTRANSFER_TOKEN`` or the file that
            ``WTRANSFER_TOKEN_FILE`` names, else a new one, to be read from `token`.
        hosts: The hosts that every update is for: URLs of ``wtransfer worker`` or of serving
            engines (see `HttpClient`), or clients. They have joined when the constructor returns;
            one that is lost is asked again until it joins, and each round waits for it
            (`return_s`). `close` tells them to leave. A function that returns them is called
            before each round, for fleets that change: new hosts are asked to join, hosts that are
            not named any more to leave.
        host_token: Secret of the hosts whose URL carries none. Default: `token`, as given or found
            in the environment. Hosts that have another secret are sent the publisher's.
        return_s: Longest time that a round waits for a host that is absent, in seconds. Default:
            `deadline_s`; with ``on_lost_worker="drop"`` 1 s. A round that may drop hosts does not
            wait for one that was absent in the round before as well.
        min_workers: Fewest workers of a round; the ranks of one instance count as one. It guards
            against the loss of workers that joined by themselves: those may leave, and no round
            waits for them.
        on_lost_worker: ``"abort"``: the loss of a worker before the commit ends the round, and all
            stay on the old version; so does a host that is absent for longer than `return_s`,
            before any byte moves. ``"drop"``: the rest commit, the report names the hosts and
            workers that were left out, and is not `ok`; at least one host must join at first. A
            worker that refuses the plan is left out as well. Engines that form a group of all
            workers end the round all the same until every byte has arrived; the next round goes on
            without the lost workers. In either case a worker that joined by itself, and that has
            never held a version of this publisher, is left out where it fails or is late
            (`min_workers`).
        nonfinite: Effect of NaN or infinity in the weights: ``"allow"`` does not look for them,
            ``"warn"`` logs them and counts them in the report, ``"reject"`` ends the round. Looking
            costs about a third of the trainer's pass.
        deadline_s: Longest time without progress, in seconds, before a peer or step counts as
            stalled.
        progress: Show on standard error how far a round of `publish` or `rollback` is that takes
            more than a second: True: bars on a terminal, else lines, the first after 10 s. False:
            nothing.
            None: bars on a terminal, else nothing.

    Raises:
        PluginError: No such engine, or the engine cannot be loaded.
        AddressInUseError: The address is in use.
        SourceError: `base` is no checkpoint, or quantised in a way that cannot be made of weights
            alone (4 bits, packed, zero points, static scales of activations or of KV cache).
        WTransferError: A host cannot be reached, or refuses; `HostsError` where several do. With
            ``on_lost_worker="drop"``: every host.
    """

    def __init__(
        self,
        model_or_source: nn.Module | Mapping[str, torch.Tensor] | WeightSource,
        *,
        form: Form | None = None,
        base: str | os.PathLike[str] | None = None,
        engine: str = "shm",
        trainer: type | None = None,
        options: dict[str, Any] | None = None,
        listen: str | None = None,
        token: str | None = None,
        hosts: Hosts | Callable[[], Hosts] = (),
        return_s: float | None = None,
        host_token: str | None = None,
        min_workers: int = 1,
        on_lost_worker: LostPolicy = "abort",
        nonfinite: NonfinitePolicy = "allow",
        deadline_s: float = 30.0,
        progress: bool | None = None,
    ) -> None:
        self._rules = Rules(min_workers, on_lost_worker, nonfinite, deadline_s, return_s)
        known_token = resolve_token(token, os.environ)
        self.token = known_token or new_token()
        self._token_hint = "" if known_token else UNTOLD_HINT
        self._progress = progress
        self._pid = os.getpid()
        self._closed = False
        self._closing = threading.Lock()
        self._is_shut = False
        self._origin = Origin.of(engine, trainer)
        kept = None if base is None else BaseCheckpoint(base)
        self._source = as_source(model_or_source, form, base)
        self._sharded: ShardedSource | None = None
        """Gathers the source's tensors; made once one of them is spread over ranks."""
        if isinstance(model_or_source, ShardedSource):
            self._sharded = model_or_source
            self._sharded.take_deadline(deadline_s)
        self._may_gather = True
        """False once `close` has closed the gathering source: no other is made."""
        self._knows_ranks = False
        """True once metadata of the source was read, which names the ranks that gather."""
        self._first_look: Call | None = None
        screen = nonfinite != "allow"
        self._make_runner = functools.partial(
            EngineRunner,
            engine,
            trainer,
            dict(options or {}),
            self._source,
            screen,
            base=kept,
            address=listen,
        )
        self._runner = self._make_runner()
        self._current: ProvenUpdate | None = None
        self._current_runner: EngineRunner | None = None
        self._active: Coordinator | None = None
        self._active_since = 0.0
        self._refusal: Exception | None = None
        self._last_error: str | None = None
        self._membership = Membership(on_join=self._on_join)
        self._lock = self._changed = self._membership.changed
        # A token that was made up here is no host's, and must not be tried on hosts.
        self._endpoints = Endpoints(host_token or known_token, deadline_s, self._membership)
        self._current_hosts = hosts if callable(hosts) else None
        self._naming: Call | None = None
        """The last call of `_current_hosts`."""
        self._catch_up = CatchUp(
            self._membership, min_workers, self._resendable, self._begin_resend
        )
        self._listener = self._listen(listen)
        close_at_exit(self)
        try:
            self._catch_up.start()
            self._endpoints.start(self.address, self.token)
            self.invite(*(self._named_hosts() if callable(hosts) else _listed(hosts)))
        except BaseException:
            self.close()
            raise

    def _listen(self, address: str | None) -> Listener:
        return Listener(
            CODEC,
            address=address,
            # A remote address is the user's choice; only this user reaches the default address.
            allow_remote=True,
            token=self.token,
            on_open=lambda _connection: None,
            on_message=self._on_message,
            on_close=self._membership.on_close,
            on_refused=self._on_refused,
            deadline_s=self._rules.deadline_s,
        )

    @property
    def address(self) -> str:
        """Address of this publisher: the ``join=`` of its workers."""
        return self._listener.address

    @property
    def version(self) -> str | None:
        """Label of the last committed update."""
        return self._current.version if self._current else None

    @property
    def fingerprint(self) -> str | None:
        """Identity of the last committed update."""
        return self._current.fingerprint if self._current else None

    @property
    def num_dropped(self) -> int:
        """Late or repeated messages of workers that were dropped."""
        return self._membership.num_dropped

    @property
    def refusal(self) -> Exception | None:
        """Why a peer was last refused (token, protocol, place taken); None if none has been."""
        return self._refusal

    def workers(self) -> list[WorkerInfo]:
        """Return every worker that has joined, and the version it holds."""
        check_process(self._pid, "Publisher")
        return [worker.info for worker in self._membership.workers()]

    def status(self) -> FleetStatus:
        """Return the fleet at one moment, as ``wtransfer status --join`` shows it.

        Texts are cut to `MAX_OBSERVED_NBYTES`, so that what the workers say always fits a message.
        """
        check_process(self._pid, "Publisher")
        # Under the one lock: no worker joins and no round moves in between.
        with self._lock:
            active = self._active
            staged = {} if active is None else active.progress()
            infos = [replace(w, nbytes=staged.get(w.worker)) for w in self.workers()]
            lost, current = self._membership.lost(), self._current
            return FleetStatus(
                version=current.version if current else None,
                fingerprint=current.fingerprint if current else None,
                workers=[_clipped(each) for each in infos],
                lost=[_clipped(each) for each in lost],
                absent={
                    clipped(host.name, MAX_OBSERVED_NBYTES): clipped(
                        self._endpoints.why_absent(host), MAX_OBSERVED_NBYTES
                    )
                    for host in self._endpoints.look()[: MAX_OBSERVED // 2]
                },
                round=None if active is None or active.done else active.status(),
                last_error=self._last_error,
            )

    def wait_for_workers(self, n: int, timeout_s: float = 30.0) -> None:
        """Wait until `n` workers have joined; the ranks of one instance count as one.

        A worker that failed before it has ever held a version does not count.

        Raises:
            NoWorkersError: Fewer have joined within `timeout_s` seconds.
            ValueError: `timeout_s` is not a number, or less than 0.
        """
        timeout_s = checked_timeout(timeout_s)
        self._check_usable()

        def are_there() -> bool:
            return self._num_counted(self._membership.instances()) >= n

        if not self._changed.wait_for(are_there, timeout_s):
            raise self._too_few(n) from self._refusal

    @property
    def hosts(self) -> dict[str, str | None]:
        """Worker by host that is there; None where the host does not name its worker."""
        with self._lock:
            absent = self._endpoints.look()
            hosts = self._endpoints.state.hosts.values()
            return {h.name: h.worker for h in hosts if not h.is_drained and h not in absent}

    def invite(self, *hosts: str | WeightSyncClient) -> None:
        """Ask worker hosts to join: these, and again all on the list, drained ones too.

        Idempotent for hosts that have joined. It is not needed for a host that was restarted: the
        publisher asks absent hosts by itself. A host that fails stays on the list.

        Args:
            *hosts: As in the constructor.

        Raises:
            ValueError: A host is on the list already, or its URL cannot be read.
            NoWorkersError: A host says that it has joined, and its worker does not come.
            WTransferError: A host cannot be reached, or refuses; `HostsError` where several do.
                With ``on_lost_worker="drop"`` either error is logged and reported, as long as one
                host has joined.
        """
        self._check_usable()

        def invite() -> None:
            self._endpoints.invite(hosts, may_drop=self._may_drop)
            self._await_invited()

        call_apart(invite, "wtransfer-invite")

    def remove(self, host: str | WeightSyncClient) -> None:
        """Take a host off the list: no later update is for it, and it is told to leave.

        Waits for the end of the round under way, which the host may still take part in.

        Args:
            host: As it was named.

        Raises:
            LookupError: The host is not on the list.
        """
        self._check_usable()

        def removed() -> list[dict[str, Any]]:
            # In one step: no round that begins now has the host.
            is_free = self._active is None or self._active.done
            return [self._endpoints.remove(host)] if is_free else []

        def remove() -> None:
            (gone,) = self._changed.wait_for(removed)
            self._endpoints.leave(gone)

        call_apart(remove, "wtransfer-remove")

    @overload
    def publish(
        self, version: str, *, wait: Literal[True] = True, dry_run: bool = False
    ) -> Report: ...

    @overload
    def publish(self, version: str, *, wait: Literal[False], dry_run: bool = False) -> Round: ...

    def publish(self, version: str, *, wait: bool = True, dry_run: bool = False) -> Report | Round:
        """Send the weights as they are now to every joined worker.

        Args:
            version: Label, for people; the fingerprint identifies the weights that were sent.
            wait: True to wait for the end.
            dry_run: True to end when every worker has received and verified everything,
                without a commit: all workers keep the weights they have.

        Returns:
            The `Report`, of an update that at least one worker holds: `Report.raise_unless_ok`
            raises where another does not. With ``wait=False`` the `Round`, whose ``packed()``
            returns when the trainer may change its weights and whose ``result()`` returns the
            report.

        Raises:
            HostsError: Named hosts are absent, and did not come back within ``return_s``.
            NoWorkersError: Fewer than ``min_workers`` have joined.
            RoundBusyError: A round of this publisher is under way.
            WTransferError: The round was aborted; every worker is on its old version.
            CommitError: No worker holds the version after the commit; the error's `report` says
                why, worker by worker. Or the publisher itself failed then, and there is no report.
        """
        self._check_usable()
        check_label(version)
        return self._run("publish", version, wait=wait, dry_run=dry_run)

    async def publish_async(self, version: str, *, dry_run: bool = False) -> Report:
        """Send the weights as they are now, without blocking the event loop.

        The round runs on threads of its own. The weights must not change before this returns;
        where that is too long, use ``publish(wait=False)`` and `Round.packed` on a thread.

        A task that is cancelled meanwhile aborts the round and waits at most a second for its end;
        a round whose commit was sent goes through. The next round may begin then.

        Args:
            version: As in `publish`.
            dry_run: As in `publish`.

        Raises:
            WTransferError: As `publish`.
        """
        self._check_usable()
        check_label(version)
        attempt = Attempt("publish_async")
        # With the caller's context: a round is a part of the trace in which it was begun.
        run = contextvars.copy_context().run
        call = Call(functools.partial(run, self._beginning(attempt, version, dry_run)))
        try:
            call.start("wtransfer-publish")
            await call.done.wait_async()
            round_: Coordinator = call.outcome()
            await self._changed.wait_for_async(lambda: round_.done)
            return Round(round_).result()
        except BaseException as error:
            attempt.cancel(error)
            is_off = call.call_off()
            await self._changed.wait_for_async(
                lambda: (is_off or call.done.is_set()) and attempt.is_over, INTERRUPT_GRACE_S
            )
            raise

    def kept(self) -> Sequence[KeptVersion]:
        """Return the versions that `rollback` can go back to, oldest first.

        Raises:
            VersionNotKeptError: The engine keeps none.
        """
        self._check_usable()
        return call_apart(self._runner.kept, "wtransfer-kept")

    @overload
    def rollback(
        self, version: str, *, wait: Literal[True] = True, dry_run: bool = False
    ) -> Report: ...

    @overload
    def rollback(self, version: str, *, wait: Literal[False], dry_run: bool = False) -> Round: ...

    def rollback(self, version: str, *, wait: bool = True, dry_run: bool = False) -> Report | Round:
        """Bring every joined worker back to a version that the engine keeps, in a round like any.

        The weights sent must have the digests that were proven when the version was committed.

        Args:
            version: Its label; the last version with that label, if there are several.
            wait: As in `publish`.
            dry_run: As in `publish`.

        Raises:
            VersionNotKeptError: The engine keeps none, or no such version.
            WTransferError: As `publish`.
        """
        self._check_usable()
        return self._run("rollback", version, wait=wait, dry_run=dry_run)

    def close(self) -> None:
        """Abort the round under way and let the workers go; they keep the weights they have."""
        if self._is_shut or os.getpid() != self._pid:
            return
        caller = threading.current_thread()
        call_apart(lambda: self._close(caller), "wtransfer-close")

    def _close(self, caller: threading.Thread) -> None:
        with self._closing:
            if self._is_shut:
                return
            with self._lock:
                self._closed = True
                # In one step: no catch-up begins that would not be aborted below.
                self._catch_up.stop()
                self._endpoints.stop()
                active = self._active
            if active is not None:
                active.abort("the publisher was closed")
                # Before the workers are let go: the round would count them as lost.
                active.end_if_called_off()
            self._catch_up.join(caller, CLOSE_GRACE_S)
            self._endpoints.deregister()
            self._listener.close()
            # An observer that closes the publisher, on the round's thread, would wait for itself.
            if active is not None and not active.runs_on(caller):
                try:
                    Round(active).result(CLOSE_GRACE_S)
                except WTransferError as error:
                    logger.info("round %s ended with its publisher: %s", active.round_id, error)
            with self._lock:
                self._may_gather, sharded = False, self._sharded
            if sharded is not None:
                sharded.close()
            self._runner.shutdown()
            self._is_shut = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _may_drop(self) -> bool:
        return self._rules.on_lost_worker == "drop"

    def _await_invited(self) -> None:
        def missing() -> list[str]:
            return [h.name + h.ranks for h in self._endpoints.look() if h.has_joined]

        if not self._changed.wait_for(lambda: not missing(), self._rules.deadline_s):
            refusal = self._refusal
            with self._lock:
                names = ", ".join(missing())
            text = (
                f"{names} did not join within {self._rules.deadline_s:g} s, though asked to; look "
                "at the workers' logs" + (f"; the last peer refused: {refusal}" if refusal else "")
            )
            if not (self._may_drop and self.hosts):
                raise NoWorkersError(text) from refusal
            logger.warning("%s", text)

    def _is_gating(self, ranks: Sequence[Worker]) -> bool:
        """Return whether rounds wait for an instance: it was named, or it has held a version."""
        hosts = self._endpoints.state.hosts
        return any(each.host in hosts for each in ranks) or all(each.has_held for each in ranks)

    def _num_counted(self, instances: Mapping[str, list[Worker]]) -> int:
        """Return how many instances count for `min_workers`; called under the lock.

        One that has failed before it has held a version would be left out again, except where no
        other gates.
        """
        gating = list(map(self._is_gating, instances.values()))
        fit = [not any(each.last_error for each in ranks) for ranks in instances.values()]
        return sum(map(operator.or_, gating, fit)) if any(gating) else len(gating)

    def _apply_what_is_left(self) -> None:
        """Have serving engines apply their pending updates: they accept no plan before."""
        with self._lock:
            current = self._current
            if current is None or self._active is not None:
                return
            pending = {w.host for w in self._membership.workers() if w.state == "pending"}
        failed = self._endpoints.apply(current.version, filter(None, pending))
        for error in failed.values():
            # The round will report the consequence for that host.
            logger.warning("an engine could not apply what it was ordered to: %s", error)

    # -- rounds

    def _run(self, method: str, version: str, *, wait: bool, dry_run: bool) -> Report | Round:
        attempt = Attempt(method)
        begin = self._beginning(attempt, version, dry_run)
        try:
            round_ = call_apart(begin, "wtransfer-publish", attempt.cancel)
            if not wait:
                return Round(round_)
            watch(Round(round_), self._progress)
        except BaseException as error:
            # An interrupt may come when the round is under way and no caller has the object yet.
            attempt.cancel(error)
            self._changed.wait_for(lambda: attempt.is_over, INTERRUPT_GRACE_S)
            raise
        return Round(round_).result()

    def _beginning(
        self, attempt: Attempt, version: str, dry_run: bool
    ) -> Callable[[], Coordinator]:
        """Return the function that begins a round; to be called on another thread."""

        def begin() -> Coordinator:
            _settle_device()
            source = None
            try:
                if attempt.method == "rollback":
                    source = self._kept_source(version)
                return attempt.begun(self._begin(attempt, version, source, dry_run=dry_run))
            except BaseException as error:
                if attempt.method != "rollback":
                    # A round that is under way reads the source itself.
                    if (active := self._active) is None or not active.is_own:
                        self._learn_ranks()
                    self._refuse(version, error)
                raise

        return on_callers_stream(begin)

    def _kept_source(self, version: str) -> WeightSource:
        kept = self._runner.kept()
        found = [each for each in kept if each.version == version]
        if not found:
            there = ", ".join(repr(each.version) for each in kept) or "none"
            raise VersionNotKeptError(
                f"there is no version {version!r} to go back to; kept are: {there}", version=version
            )
        return self._runner.kept_source(found[-1])

    def _begin(
        self, attempt: Attempt, version: str, instead: WeightSource | None, *, dry_run: bool
    ) -> Coordinator:
        self._name_current_hosts()
        self._apply_what_is_left()
        called_at = time.monotonic()
        # Weights that the engine keeps are sent without the trainer's other ranks.
        have_ranks_begun = instead is not None

        def keep_ranks_waiting() -> None:
            """Begin the round for the other ranks: they would give up within their deadline."""
            nonlocal have_ranks_begun
            have_ranks_begun = True
            self._learn_ranks()
            if self._sharded is not None:
                self._sharded.begin(version)

        def begun() -> Coordinator | Callable[[], None] | None:
            self._check_usable()
            instances = self._turn(attempt, time.monotonic() - called_at)
            if instances is None:
                return None if have_ranks_begun else keep_ranks_waiting
            members = frozenset(w for ranks in instances.values() for w in ranks)
            if self._is_stale(members):
                return self._drop_runner
            return self._new_round(version, instances, instead=instead, dry_run=dry_run)

        while not isinstance(step := self._changed.wait_for(begun), Coordinator):
            # Without the lock: an engine may take its time to shut down, a source to be read.
            assert step is not None
            step()
        return step

    def _turn(self, attempt: Attempt, waited_s: float) -> dict[str, list[Worker]] | None:
        """Return the instances of a round that may begin; None: not yet. Called under the lock."""
        rules = self._rules
        if attempt.cancelled is not None:
            raise RoundAbortedError(f"{attempt.method} was cancelled before its round began")
        self._check_free()
        if (active := self._active) is not None:
            patience_s = min(JOINER_PATIENCE_S, rules.deadline_s)
            if not self._may_drop and active.host_by_worker:
                # A named host that is brought up to date is as good as absent until it is.
                patience_s = self._return_s()
            if not self._catch_up.gives_way(active, is_patient=waited_s < patience_s):
                if waited_s > (limit_s := max(rules.deadline_s, patience_s)):
                    raise StallError(
                        f"no progress on a joiner's catch-up within {limit_s:g} s",
                        seconds=limit_s,
                        round_id=active.round_id,
                    )
                return None
            self._active = None
        if absent := self._endpoints.look():
            if waited_s < self._return_s():
                return None
            if not self._may_drop:
                raise self._hosts_absent(absent)
        instances = self._catch_up.taking_part()
        if self._num_counted(instances) < rules.min_workers:
            raise self._too_few(rules.min_workers) from self._refusal
        self._endpoints.state.begin_round()
        return instances

    def _check_free(self) -> None:
        """Raise if a round of a caller is under way; called under the lock."""
        active = self._active
        if active is not None and not active.is_resend:
            age = time.monotonic() - self._active_since
            raise RoundBusyError(
                f"round {active.round_id} ({active.version!r}) is under way since "
                f"{age:.1f} s; wait for its result() first",
                round_id=active.round_id,
            )

    def _too_few(self, wanted: int) -> NoWorkersError:
        with self._lock:
            workers, instances = self._membership.workers(), self._membership.instances()
            counted = self._num_counted(instances)
            is_behind = [not self._is_gating(ranks) for ranks in instances.values()]
        failed = [each for each in workers if each.last_error is not None]
        whole = {worker for ranks in instances.values() for worker in ranks}
        incomplete = {each.hello.instance for each in workers if each not in whole}
        num_failed = len(instances) - counted
        details = {
            "of them failed, and not counted": num_failed,
            "of them behind": 0 if all(is_behind) else sum(is_behind) - num_failed,
            "more without all of their ranks": len(incomplete),
        }
        said = "".join(f", {number} {what}" for what, number in details.items() if number)
        why = "".join(f"\n  {w.name} has failed: {w.last_error}" for w in failed[:NUM_NAMED])
        refused = f"\n  the last peer that was refused: {self._refusal}" if self._refusal else ""
        return NoWorkersError(
            f"{len(instances)} workers have joined{said}, {wanted} are needed (ranks of one "
            "instance count as one); start them with join= the publisher's address, name their "
            f"hosts (invite()), or wait with wait_for_workers(){self._token_hint}{why}{refused}"
        )

    def _return_s(self) -> float:
        """Return how long a round waits for the hosts that are absent, in seconds."""
        rules, state = self._rules, self._endpoints.state
        return state.longest_wait_s(rules.deadline_s, rules.return_s, may_drop=self._may_drop)

    def _hosts_absent(self, absent: Sequence[NamedHost]) -> HostsError:
        lines = "".join(f"\n  {self._endpoints.why_absent(host)}" for host in absent)
        return HostsError(
            f"{len(absent)} of {len(self._endpoints.state.hosts)} hosts are absent, and no byte "
            "was sent; start what is named, allow more time (return_s), take it off the list "
            f"(remove()), or let rounds go on without it (on_lost_worker='drop'):{lines}",
            errors=self._endpoints.absent_errors(),
        )

    def _named_hosts(self) -> list[str | WeightSyncClient]:
        """Return the hosts that the user's function names now; within the deadline."""
        assert self._current_hosts is not None
        with self._lock:
            if (named := self._naming) is None:
                named = self._naming = start_call(self._current_hosts, "wtransfer-hosts")
        if not named.done.wait(self._rules.deadline_s):
            # Waited for again by the next round, and not called a second time.
            raise StallError(
                f"hosts= did not return within {self._rules.deadline_s:g} s",
                seconds=self._rules.deadline_s,
            )
        self._naming = None
        if named.error is not None:
            raise named.error
        return _listed(named.result)

    def _name_current_hosts(self) -> None:
        """Bring the list up to date, where a function names the hosts, and ask absent ones now."""
        gone: dict[str, Any] = {}
        if self._current_hosts is not None:
            with self._lock:
                self._check_free()
            hosts = self._named_hosts()
            with self._lock:
                # A round that has begun meanwhile keeps its hosts.
                self._check_free()
                gone = self._endpoints.replace(hosts)
        with self._lock:
            self._endpoints.look()
            self._endpoints.state.hurry(time.monotonic())
        self._changed.notify_all()
        if gone:
            # Not waited for: they may be down.
            start_call(functools.partial(self._endpoints.leave, gone), "wtransfer-leave")

    def _new_round(
        self,
        version: str,
        instances: dict[str, list[Worker]],
        *,
        proven: ProvenUpdate | None = None,
        instead: WeightSource | None = None,
        dry_run: bool = False,
    ) -> Coordinator:
        round_ = Coordinator(
            version,
            runner=self._runner,
            membership=self._membership,
            instances=instances,
            rules=self._rules if proven is None else Rules(deadline_s=self._rules.deadline_s),
            origin=self._origin,
            proven=proven,
            instead=instead,
            dry_run=dry_run,
            is_gating=self._is_gating,
            absent=self._endpoints.absent_errors,
            apply=self._endpoints.apply,
            on_planned=self._on_planned,
            on_packed=self._on_packed,
            on_done=self._on_done,
        )
        try:
            self._active, self._active_since = round_, time.monotonic()
            if round_.is_own and self._sharded is not None:
                self._sharded.begin(version)
            round_.start()
        except BaseException as error:
            # Still under the lock, which the round's thread needs first: the round has not begun,
            # and will not.
            self._give_up(round_)
            if round_.is_own and self._sharded is not None:
                self._sharded.end(error)
            if isinstance(error, RuntimeError) and not isinstance(error, WTransferError):
                raise RoundAbortedError(
                    f"the round could not begin: {error}", round_id=round_.round_id, version=version
                ) from error
            raise
        return round_

    def _resendable(self) -> ProvenUpdate | None:
        """Return the current update; None while it cannot be sent again. Called under the lock."""
        runner = self._runner
        if self._active is not None or runner is not self._current_runner or not runner.can_resend:
            return None
        return self._current

    def _begin_resend(
        self, proven: ProvenUpdate, instances: dict[str, list[Worker]]
    ) -> Coordinator:
        return self._new_round(proven.version, instances, proven=proven)

    def _give_up(self, round_: Coordinator) -> None:
        """Forget a round that has not begun; called under the lock."""
        round_.give_up()
        if self._active is round_:
            self._active = None

    def _is_stale(self, members: frozenset[Worker]) -> bool:
        """Return whether a round of these workers needs another engine, or another group."""
        others = self._origin.needs_generation and self._runner.members != members
        return self._runner.abandoned or (others and self._runner.started)

    def _on_done(self, round_: Coordinator) -> None:
        # Before another round can begin.
        try:
            sharded = self._sharded
            if round_.is_own and round_.failure is not None:
                self._learn_ranks()
            if sharded is not None and round_.is_own:
                proven = round_.proven
                sharded.end(round_.failure, proven.fingerprint if proven else "")
            elif round_.failure is not None and round_.is_own:
                self._refuse(round_.version, round_.failure)
            if self._origin.needs_generation and not round_.went_through:
                self._drop_runner()
        finally:
            with self._lock:
                if self._active is round_:
                    self._active = None
                report, error = round_.report, round_.failure
                if error is None and report is not None and not report.ok:
                    error = commit_error(report)
                # A resend proves what was published before, and says nothing of a later publish.
                if not round_.is_resend:
                    said = None if error is None else clipped(str(error), MAX_OBSERVED_NBYTES)
                    self._last_error = said
                if not round_.failed and not round_.dry_run:
                    if round_.is_resend:
                        self._catch_up.ended(round_)
                    else:
                        self._current, self._current_runner = round_.proven, self._runner
            self._changed.notify_all()

    def _drop_runner(self) -> None:
        """Let go of the engine, and of its group, if any; the next round makes another."""
        # Replace the runner first: its shutdown may fail, and no round may use it again.
        runner, self._runner = self._runner, self._make_runner()
        if not runner.abandoned:
            runner.shutdown()

    # -- other ranks of the trainer, which hold parts of the weights

    def _sharded_if(self, metadata: Sequence[ParamMeta]) -> ShardedSource | None:
        """Return the source that gathers; None while no tensor was ever spread over ranks."""
        with self._lock:
            self._knows_ranks = True
            is_spread = any(meta.owners or meta.placements for meta in metadata)
            if self._sharded is None and is_spread and self._may_gather:
                # Gathered first: a quantised weight is made of the whole one.
                own = self._source
                own = own.source if isinstance(own, QuantisedSource) else own
                self._sharded = ShardedSource(own, deadline_s=self._rules.deadline_s)
                self._sharded.known = metadata
            return self._sharded

    def _on_planned(self, round_: Coordinator) -> None:
        """Let the engine read whole tensors if some are spread; ranks may join the first time.

        On the round's thread, which calls `_on_done` later: no round is begun for the other ranks
        after its end. The engine, which reads from the source, is called after this.
        """
        source = self._runner.source
        if round_.is_own and (sharded := self._sharded_if(source.metadata)) is not None:
            sharded.begin(round_.version)
            own = self._source
            source.read_from(own.reading(sharded) if isinstance(own, QuantisedSource) else sharded)

    def _on_packed(self) -> None:
        if self._sharded is not None:
            self._sharded.packed()

    def _refuse(self, version: str, error: BaseException) -> None:
        """Tell the other ranks, which may be waiting, of a round that did not come to its plan."""
        # Ranks that cannot be told wait until their deadline; the round has an error of its own.
        with contextlib.suppress(Exception):
            if (sharded := self._sharded) is not None:
                active = self._active
                sharded.refuse(version, error, is_busy=active is not None and active.is_own)

    def _learn_ranks(self) -> None:
        """Read which ranks must be told of a failure, where no round has come to read it.

        Within a bound, on a thread apart: the failure may be that this read hangs. Such a read is
        waited for again by the next failure, and not begun a second time.
        """
        # A source that cannot be read tells of no ranks; the round has an error of its own.
        with contextlib.suppress(Exception):
            with self._lock:
                if self._knows_ranks:
                    return
                if (look := self._first_look) is None:
                    read = on_callers_stream(lambda: self._source.metadata)
                    look = self._first_look = start_call(read, "wtransfer-metadata")
            if look.done.wait(FLUSH_S):
                with self._lock:
                    # Its outcome is for one of those that wait; an error is not kept.
                    if self._first_look is look:
                        self._first_look = None
                        self._sharded_if(look.outcome())

    # -- on the channel's thread

    def _on_refused(self, error: Exception) -> None:
        self._refusal = error

    def _on_message(self, connection: Connection, message: msgspec.Struct) -> None:
        if isinstance(message, Observe):
            # One answer for each connection: an observer that asks and does not read costs one.
            connection.send(self.status())
            connection.close()
            return
        try:
            self._membership.on_message(connection, message)
        except ProtocolError as error:
            # Noted for a caller that waits for this worker: a rank that is taken never joins.
            self._on_refused(error)
            raise

    def _on_join(self, worker: Worker) -> None:
        with self._lock:
            info = self._runner.worker_init_info
            if self._runner.started and info is not None and not self._origin.needs_generation:
                self._origin.send_init(worker, info, *self._membership.place_of(worker))

    def _check_usable(self) -> None:
        check_process(self._pid, "Publisher")
        if self._closed:
            raise ClosedError("this Publisher is closed")


def _listed(hosts: Any) -> list[str | WeightSyncClient]:
    """Return hosts as a list.

    Raises:
        TypeError: They are a text, whose letters are no hosts, or nothing to go through.
    """
    if isinstance(hosts, str) or not hasattr(hosts, "__iter__"):
        raise TypeError(f"hosts are {hosts!r:.200}, expected a list of URLs and clients")
    return list(hosts)


def _clipped(info: WorkerInfo) -> WorkerInfo:
    texts = {
        name: clipped(value, MAX_OBSERVED_NBYTES)
        for name, value in vars(info).items()
        if isinstance(value, str)
    }
    return replace(info, **texts)  # type: ignore[arg-type]


def _settle_device() -> None:
    """Wait for the caller's device work: the weights are read on another thread's stream."""
    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().synchronize()
