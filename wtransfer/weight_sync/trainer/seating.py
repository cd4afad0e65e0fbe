"""Who takes part in a round, instance by instance: all ranks of one commit, or none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from wtransfer.weight_sync.messages import CODEC, Abort, Commit, Finish, Plan, Rollback
from wtransfer.weight_sync.report import WorkerReport

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from wtransfer.weight_sync.trainer.roster import Exchange


@dataclass
class Seat:
    """One instance of a round."""

    exchanges: list[Exchange]
    """Its ranks."""
    settled: bool = False
    """Whether its ranks agree, after the commit, on what they hold."""
    reverting: bool = False
    """Whether ranks that had committed were told to go back."""
    dropped: bool = False
    """Whether it was left out before the commit."""


class Seating:
    """The instances of one round. Every method is called under the roster's lock.

    Args:
        round_id: The round.
        instances: The ranks of each instance.
    """

    def __init__(self, round_id: str, instances: Iterable[list[Exchange]]) -> None:
        self._round_id = round_id
        self._seats = [Seat(exchanges) for exchanges in instances]

    def live(self) -> list[Seat]:
        """Return the instances that are still in the round."""
        return [seat for seat in self._seats if not seat.dropped]

    def exchanges(self) -> Iterator[Exchange]:
        """Yield the ranks that are still in the round."""
        return (exchange for seat in self.live() for exchange in seat.exchanges)

    def send(self, message: msgspec.Struct) -> None:
        """Send to every rank that is still in the round.

        Raises:
            LimitError: The message is larger than its type may be.
        """
        _send(self.exchanges(), message)

    def plan(self, plan: Plan, identity: str) -> None:
        """Send a plan to every rank: whole, or naming the manifest where that is there already.

        Args:
            plan: The whole plan.
            identity: Its manifest's.

        Raises:
            LimitError: The plan is larger than it may be.
        """
        ranks = list(self.exchanges())
        known = [exchange for exchange in ranks if exchange.worker.planned == identity]
        _send(known, msgspec.structs.replace(plan, manifest=identity))
        _send((exchange for exchange in ranks if exchange.worker.planned != identity), plan)
        for exchange in ranks:
            exchange.worker.planned = identity

    def commit(self) -> None:
        """Tell every rank to commit."""
        for exchange in self.exchanges():
            exchange.committing = True
        self.send(Commit(self._round_id))

    def drop(self, seat: Seat, reason: str) -> None:
        """Leave an instance out; its other ranks are told."""
        seat.dropped = True
        _send(seat.exchanges, Abort(self._round_id, reason))

    def settle(self) -> bool:
        """Finish or roll back whatever can be settled; return whether all instances are."""
        for seat in self.live():
            if not seat.settled:
                self._settle(seat)
        return all(seat.settled for seat in self.live())

    def _settle(self, seat: Seat) -> None:
        ranks = seat.exchanges
        for each in ranks:
            if each.lost and len(ranks) > 1:
                # Never released, so it goes back by itself, whatever it said before.
                each.ack = None
        if not all(each.ack is not None or each.lost for each in ranks):
            return
        committed = [each for each in ranks if _outcome(each) == "committed"]
        if len(committed) == len(ranks):
            seat.settled = True
            _send(committed, Finish(self._round_id))
        elif not committed or all(each.lost for each in committed):
            seat.settled = True
        elif not seat.reverting:
            # Each of them answers with another ack, which settles the instance.
            seat.reverting = True
            failed = next(each for each in ranks if _outcome(each) != "committed")
            reason = f"rank {failed.worker.hello.rank} of the instance: {_outcome(failed)}"
            _send(committed, Rollback(self._round_id, reason))

    def give_up(self, reason: str) -> None:
        """Send the ranks of instances that do not agree back to what they had.

        A rank that has committed goes back; one that has not drops what it was told to apply.
        """
        for seat in self.live():
            if not seat.settled and not seat.reverting and len(seat.exchanges) > 1:
                seat.reverting = True
                _send(seat.exchanges, Rollback(self._round_id, reason))

    def note_pending(self) -> None:
        """Note who has not answered the commit; an ack, whenever it comes, says otherwise."""
        for exchange in self.exchanges():
            if exchange.ack is None and not exchange.lost:
                exchange.worker.state = "pending"

    def reports(self, fingerprint: str, *, dry_run: bool) -> list[WorkerReport]:
        """Return what the round came to for every rank, also for those that were dropped."""
        return [
            _report(exchange, fingerprint, _final_outcome(seat, exchange, dry_run=dry_run))
            for seat in self._seats
            for exchange in seat.exchanges
        ]


def _send(exchanges: Iterable[Exchange], message: msgspec.Struct) -> None:
    frame: bytes | None = None
    for exchange in exchanges:
        # Encoded once: a plan of many pieces is the same for all.
        frame = frame or CODEC.encode(message)
        exchange.worker.send_frame(frame)


def _outcome(exchange: Exchange) -> str:
    if exchange.ack is not None:
        return exchange.ack.outcome
    return "lost" if exchange.lost else "pending"


def _final_outcome(seat: Seat, exchange: Exchange, *, dry_run: bool) -> str:
    if seat.dropped:
        return "dropped"
    if dry_run:
        return "verified"
    outcome = _outcome(exchange)
    # Committed, and lost since: it must not count as updated.
    return "empty" if outcome == "committed" and exchange.worker.state == "empty" else outcome


def _report(exchange: Exchange, fingerprint: str, outcome: str) -> WorkerReport:
    worker, vote, ack = exchange.worker, exchange.vote, exchange.ack
    error = exchange.error
    if ack is not None and ack.error is not None:
        error = ack.error.rebuild(worker=worker.name)
    return WorkerReport(
        worker=worker.name,
        instance=worker.hello.instance,
        rank=worker.hello.rank,
        outcome=outcome,
        version=worker.version,
        fingerprint=worker.fingerprint,
        digests_equal=vote is not None and vote.fingerprint == fingerprint,
        nbytes=vote.nbytes if vote else 0,
        seconds={**(vote.seconds if vote else {}), **(ack.seconds if ack else {})},
        notes=exchange.accept.notes if exchange.accept else [],
        error=error,
    )
