"""The agreement of a trainer's ranks before a gather: two state machines without store or threads.

`GatherLeader` is the side of the publishing rank, P; `GatherFollower` is that of any other rank, R.
Each is changed by the events of its own rank and by the states that it reads of the others, and
posts its own state. `gather_group.py` describes the states, and how they travel.

Why no rank waits in a gather that another does not enter. P writes `go` for a bucket only while
every R is ready for that bucket, of that pass and attempt, and enters only when `go` is written. An
R that is ready has checked its part, and looks for nothing else: it enters, unless P has ended the
attempt, after which P writes no `go`. An R that fails while it is ready may cross with `go`; it is
ready no longer in the state that it leaves, so P, in the gather, reads that this R will not come,
and gives the gather up, as for a rank that is lost or that fails inside. Then P writes `torn`, and
every other R gives it up as well. A rank that fails between two gathers has gathered as many
buckets as `go` says: its gathers have ended, and no other gives one up.

Why no part of one version is gathered with parts of another. A gather that was given up may still
run on its rank, and would meet the next gather of the others. So a rank in an earlier gather
becomes neither ready nor writes `go`, and the next attempt fails on every rank before it gathers.

A `GatherLeader` is changed under the lock of its `GatherGroup`, a `GatherFollower` by one thread.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from wtransfer.errors import (
    EngineError,
    PeerLostError,
    RoundAbortedError,
    WTransferError,
)
from wtransfer.weight_sync.messages import ErrorInfo
from wtransfer.weight_sync.trainer.gather_group import (
    LAYOUT,
    PUBLISHER,
    Ended,
    GatherRound,
    LayoutState,
    RankState,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from wtransfer.weight_sync.trainer.gather_group import GatherGroup

NUM_ENDED = 8
"""Ends of attempts that ranks can still be told."""


class GatherLeader:
    """The publishing rank's side.

    ==================  ====================================  ====================================
    event               before a gather                       inside a gather
    ==================  ====================================  ====================================
    rank is ready       once all are: `go`, all gather        (the next bucket)
    rank arrives        waits on: it is not ready             waits on
    rank fails          raises its error, names the rank      `broken`: its error, names the rank
    rank is lost        raises that it was lost               `broken`: it was lost
    hang in an earlier  raises; no `go`                       (not entered)
    gather
    stop                raises; no `go`                       the gather goes on to its end
    own gather fails    (outside)                             `torn`: the others leave theirs
    packed              `packed`                              (all were gathered)
    end                 `over`, the end for the others; a     as before a gather; the gather goes
                        pass that waits raises                on to its end
    refuse              an end of an attempt of its own; the  as before a gather
                        round goes on
    begin: a new        `open`; a pass of the last attempt    a pass of the last attempt raises
    attempt             raises                                before its next gather
    ==================  ====================================  ====================================

    Args:
        epoch: Tells one publisher from the next under the same name.
        group: Where states are written and read.
        check_in_step: Raises if this rank hangs in an earlier gather.
    """

    def __init__(self, epoch: str, group: GatherGroup, check_in_step: Callable[[], None]) -> None:
        self.state = GatherRound(epoch, 0)
        """What the other ranks read."""
        self.others: tuple[int, ...] = ()
        """The other ranks of the last pass."""
        self._group = group
        self._check_in_step = check_in_step
        self._num_attempts = 0
        self._stopped = False

    # -- events

    def meet(self, own: int, others: Collection[int]) -> None:
        """Write for these ranks from now on, also the states that they have missed."""
        self.others = tuple(sorted(others))
        self._post(rank=own)

    def begin(self, version: str) -> None:
        """Begin an attempt, which the other ranks may join."""
        self._num_attempts += 1
        self._stopped = False
        number = self._num_attempts
        self._post(attempt=number, version=version, phase="open", layout="", number=0, go=0)

    def begin_pass(self, layout: str) -> GatherRound:
        """Begin a pass over tensors that lie so; return the state that tells it from others."""
        self._post(layout=layout, number=self.state.number + 1, go=0)
        return self.state

    def may_gather(self, begun: GatherRound, count: int) -> bool:
        """Let all gather the bucket of this number once every rank is ready; False: not yet.

        Raises:
            RoundAbortedError: The round of this pass is over, or was stopped.
            StallError: This rank hangs in an earlier gather.
            WTransferError: Another rank has failed, or was lost.
        """
        self._check_in_step()
        now = self.state
        is_same = (now.attempt, now.number) == (begun.attempt, begun.number)
        if self._stopped or not self.in_round or not is_same:
            raise RoundAbortedError("the round is over; its weights are not gathered further")
        if error := self.lost() or self.failed():
            raise error
        if self._missing(begun, count):
            return False
        self._post(go=count)
        return True

    def stop(self) -> None:
        """Let no further gather begin in this attempt."""
        self._stopped = True

    def tear(self, begun: GatherRound) -> None:
        """Tell the others that this rank has left a gather of this pass on an error."""
        self._post(torn=begun.attempt)

    def packed(self) -> None:
        """Let the other ranks change their weights again."""
        if self.in_round:
            self._post(phase="packed")

    def end(self, error: ErrorInfo | None, fingerprint: str = "") -> None:
        """End the attempt under way, and tell the other ranks."""
        end = Ended(self.state.attempt, self.state.version, error, fingerprint)
        self._post(ended=(*self.state.ended, end)[-NUM_ENDED:], phase="over")

    def refuse(self, version: str, error: ErrorInfo) -> None:
        """Tell the other ranks of an attempt that did not begin."""
        self._num_attempts += 1
        end = Ended(self._num_attempts, version, error)
        self._post(ended=(*self.state.ended, end)[-NUM_ENDED:])

    # -- asked

    @property
    def in_round(self) -> bool:
        """True while an attempt is under way."""
        return self.state.phase != "over"

    def broken(self) -> WTransferError | None:
        """Return why a gather that this rank is in may never end, if a rank was lost or failed."""
        # The gathers of a rank that has left have ended, unless it took back that it was ready.
        return self.lost() or self.failed(gathered=self.state.go)

    def lost(self) -> PeerLostError | None:
        """Return an error that names a rank that took part and was lost."""
        lost = (self._group.lost(str(r), f"trainer rank {r}") for r in self._taking_part())
        return next(filter(None, lost), None)

    def failed(self, gathered: float = math.inf) -> WTransferError | None:
        """Return the error of a failed rank, but of none that left after so many gathers."""
        for rank in self.others:
            state: RankState | None = self._group.heard(str(rank))
            if state is None or state.error is None or not _is_in(state, self.state):
                continue
            if not state.left or state.ready < gathered:
                return state.error.rebuild(worker=f"trainer rank {rank}")
        return None

    def awaited(self, begun: GatherRound, count: int, what: str) -> str:
        """Describe the wait for the ranks that are not ready.

        Args:
            begun: The pass.
            count: Number of the bucket.
            what: Name of the bucket.
        """
        missing = self._missing(begun, count)
        absent = {rank: s for rank, s in missing.items() if not _takes_part(s, begun)}
        if not absent:
            return f"trainer ranks {[*missing]} on the way to gather {what}"
        before = "".join(
            f"; rank {rank} was last here for {state.version!r}"
            for rank, state in absent.items()
            if state is not None
        )
        return (
            f"the arrival of trainer ranks {[*absent]}, which hold parts of the weights: each "
            f"must call TrainerRank.publish({begun.version!r}) when rank {begun.rank} "
            f"publishes{before};"
        )

    def staying(self) -> list[str]:
        """Return the keys of the ranks that take part in the last attempt."""
        return [str(rank) for rank in self._taking_part()]

    def have_left(self, keys: Collection[str]) -> bool:
        """Return True if each of these was heard of, and takes part no longer."""
        states = [self._group.heard(key) for key in keys]
        return all(state and not _takes_part(state, self.state) for state in states)

    def _taking_part(self) -> list[int]:
        return [r for r in self.others if _takes_part(self._group.heard(str(r)), self.state)]

    def _missing(self, begun: GatherRound, count: int) -> dict[int, RankState | None]:
        """Return the ranks that are not ready for a bucket, and what was heard of them."""
        ranks = {rank: self._group.heard(str(rank)) for rank in self.others}
        return {
            rank: state
            for rank, state in ranks.items()
            if not _takes_part(state, begun) or (state.number, state.ready) != (begun.number, count)
        }

    def _post(self, **changes: Any) -> None:
        self.state = msgspec.structs.replace(self.state, **changes)
        # `meet` posts the states that others have missed; without other ranks there is no reader.
        if self.others:
            self._group.post(self.state, PUBLISHER)


class GatherFollower:
    """Any other rank's side.

    ====================  ==================================  ====================================
    event                 before a gather                     inside a gather
    ====================  ==================================  ====================================
    a round of this       joins, takes part                   (takes part)
    version
    a round of another    raises, takes no part               (takes part)
    P begins a pass       compares layouts, takes the first   (P waits for its own gather)
                          bucket in hand -> ready
    `go` for the bucket   gathers, takes the next bucket in   (the next bucket)
    in hand               hand -> ready
    `torn`                nothing: P ends the attempt         `broken`
    `packed`              leaves, or waits for the end        (P has gathered all)
    end of the attempt    returns it                          returns it after the gather
    P is lost, another    raises, `left`                      `broken`
    took over
    own failure           `left`, with the error; not ready   the error, P names this rank; `left`
                          any more
    hang in an earlier    raises in place of ready, `left`    (not entered)
    gather
    ====================  ==================================  ====================================

    The end of an attempt that this rank did not take part in is told once, and only its failure;
    or the success of one that it left on an error, which will not be repeated.

    Args:
        group: Where states are written and read.
        check_in_step: Raises if this rank hangs in an earlier gather.
    """

    def __init__(self, group: GatherGroup, check_in_step: Callable[[], None]) -> None:
        self.mine = RankState("", 0, "", left=True)
        """What the publishing rank reads; its attempt is the last that was joined or told."""
        self.round = GatherRound("", 0)
        """State of the publishing rank when this one last looked."""
        self._group = group
        self._check_in_step = check_in_step
        self._in_hand = False

    # -- events

    def turn(self, version: str) -> GatherRound | Ended | None:
        """Join a round and return it, or return the end that is told; None: neither yet.

        Raises:
            RoundAbortedError: The publishing rank publishes another version.
        """
        state: GatherRound = self._group.heard(PUBLISHER)
        if state.epoch != self.mine.epoch:
            if state.phase != "over" and not self._group.is_alive(PUBLISHER):
                # A publisher that was killed in a round may have left this state.
                return None
            # Another object of this rank may have taken part before.
            earlier: RankState | None = self._group.heard(self._group.key)
            is_known = earlier is not None and earlier.epoch == state.epoch
            seen = earlier.attempt if earlier is not None and is_known else 0
            self.mine = RankState(state.epoch, seen, version, left=True)
        seen = self.mine.attempt
        is_new = state.attempt > seen
        if is_new and state.version == version and state.phase != "over":
            self.mine, self._in_hand = RankState(state.epoch, state.attempt, version), False
            self._post()
            return state
        for end in reversed(state.ended):
            is_given_up = end.attempt == seen and self.mine.error is not None
            if end.version == version and (end.attempt > seen if end.error else is_given_up):
                self.mine = RankState(state.epoch, max(seen, end.attempt), version)
                self.leave()
                return end
        if is_new and state.phase == "open":
            raise RoundAbortedError(
                f"trainer rank {state.rank} publishes {state.version!r}, rank {self._group.key} "
                f"called publish({version!r}); all must call it for the same versions in turn"
            )
        return None

    def next(self, *, wait: bool) -> Ended | Literal["pass", "gather", "packed"] | None:
        """Return the next step of the round, or its end; None: neither yet.

        Args:
            wait: True to wait for the end of a round that is packed.

        Raises:
            PeerLostError: The publishing rank was lost.
        """
        if (end := self.end()) is not None:
            return end
        state = self.round = self._group.heard(PUBLISHER)
        if state.phase == "packed":
            return None if wait else "packed"
        if state.number > self.mine.number:
            return "pass"
        return "gather" if self._in_hand and state.go == self.mine.ready else None

    @property
    def is_to_begin(self) -> bool:
        """True if the publishing rank has begun no pass of the round yet."""
        state: GatherRound = self._group.heard(PUBLISHER)
        return state.phase == "open" and state.number == 0

    def begin_pass(self) -> None:
        """Begin the pass in which the publishing rank is."""
        self.mine = msgspec.structs.replace(self.mine, number=self.round.number, ready=0)

    def ready(self, *, in_hand: bool) -> None:
        """Note that the next bucket is in hand, or that there is none.

        Raises:
            StallError: This rank hangs in an earlier gather.
        """
        if in_hand:
            self._check_in_step()
        self._in_hand = in_hand
        self._post(ready=self.mine.ready + in_hand)

    def gathered(self) -> None:
        """Note that the gather of the bucket in hand has ended."""
        self._in_hand = False

    def fail(self, error: WTransferError, *, left: bool = True) -> None:
        """Tell the publishing rank that this one has failed; not left: inside a gather."""
        # Not ready any more for the bucket in hand: the others may be on their way to gather it.
        ready, self._in_hand = self.mine.ready - self._in_hand, False
        self._post(ready=ready, left=left, error=ErrorInfo.of(error))

    def leave(self) -> None:
        """Take part no longer: all is gathered, or the attempt has ended."""
        self._post(left=True)

    # -- asked

    def is_last_over(self) -> bool:
        """Return True if no round is under way that this rank has joined or was told the end of."""
        if not self.mine.attempt:
            return True
        state: GatherRound | None = self._group.heard(PUBLISHER)
        if state is None:
            return False
        is_over = not _is_in(self.mine, state) or state.phase == "over"
        return is_over or self._group.lost(PUBLISHER, "") is not None

    def end(self) -> Ended | None:
        """Return the end of the round, None if it goes on; raise if there will be no end."""
        state: GatherRound = self._group.heard(PUBLISHER)
        if state.epoch == self.mine.epoch:
            for end in state.ended:
                if end.attempt == self.mine.attempt:
                    return end
        if not _is_in(self.mine, state):
            raise PeerLostError("the publishing rank of this trainer was lost: another took over")
        if lost := self._group.lost(PUBLISHER, "the publishing rank of this trainer"):
            raise lost
        return None

    def over(self) -> WTransferError | None:
        """Return the error that has ended the round, if any."""
        try:
            end = self.end()
        except WTransferError as error:
            return error
        return None if end is None or end.error is None else end.error.rebuild()

    def broken(self) -> WTransferError | None:
        """Return why a gather that this rank is in may never end, if P was lost or has left it."""
        if isinstance(error := self.over(), PeerLostError):
            return error
        state: GatherRound = self._group.heard(PUBLISHER)
        if state.torn != self.mine.attempt:
            return None
        return EngineError(f"trainer rank {state.rank} has left the gather on an error")

    def layout(self) -> LayoutState | None:
        """Return the layout of the pass; None while it has not arrived."""
        found: LayoutState | None = self._group.heard(LAYOUT)
        return found if found is not None and found.digest == self.round.layout else None

    def awaited(self) -> str:
        """Describe the wait for a round to join."""
        if (state := self._group.heard(PUBLISHER)) is None:
            return (
                "the arrival of a rank that publishes: one must make a Publisher and call "
                "publish() when the others call theirs;"
            )
        return (
            f"the publishing rank, rank {state.rank}: it did not call publish() for this "
            "version, which every rank must,"
        )

    def _post(self, **changes: Any) -> None:
        self.mine = msgspec.structs.replace(self.mine, **changes)
        self._group.post(self.mine)


def _is_in(state: RankState, round_: GatherRound) -> bool:
    return (state.epoch, state.attempt) == (round_.epoch, round_.attempt)


def _takes_part(state: RankState | None, round_: GatherRound) -> bool:
    return state is not None and _is_in(state, round_) and not state.left
