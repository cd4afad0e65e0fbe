"""What one worker process did, and how long it let its readers wait for a token.

The times are those at which the worker finished tokens; everything here is computed from them and
not from what anybody says about himself.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wtransfer.demo.messages import Applied, Proof, Ready, Tokens


class Life:
    """One process of one worker, from its start to its end.

    Args:
        ready: What it said when it began.
    """

    def __init__(self, ready: Ready) -> None:
        self.ready = ready
        self.applied: list[Applied] = []
        """Commits, in order."""
        self.proofs: list[Proof] = []
        """Digests of its live model, in order."""
        # Times and versions of the tokens, side by side; a process writes them in order.
        self._times: list[float] = []
        self._versions: list[str | None] = []

    def add_tokens(self, tokens: Tokens) -> None:
        """Take note of generated tokens."""
        self._times += tokens.ended_at
        self._versions += [tokens.version] * len(tokens.ended_at)

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return len(self._times)

    @property
    def version(self) -> str | None:
        """Label of what it serves."""
        return self.applied[-1].version if self.applied else self.ready.version

    @property
    def fingerprint(self) -> str:
        """Identity of what it serves."""
        return self.applied[-1].fingerprint if self.applied else self.ready.fingerprint

    def proof_of(self, version: str) -> Proof | None:
        """Return the first proof for a version."""
        return next((proof for proof in self.proofs if proof.version == version), None)

    def applied_version(self, version: str) -> Applied | None:
        """Return the commit that brought a version."""
        return next((each for each in self.applied if each.version == version), None)

    def versions_between(self, since: float, until: float) -> list[str | None]:
        """Return the version of every token that was finished in this time, in order."""
        return self._versions[bisect_right(self._times, since) : bisect_left(self._times, until)]

    def longest_gap(self, since: float, until: float) -> float | None:
        """Return the longest gap between two tokens that has a part in this time, in seconds.

        Gaps in which a commit happened do not count: see `gap_around`.
        """
        return max(
            (
                after - before
                for before, after in self._gaps(since, until)
                if not self._has_commit(before, after)
            ),
            default=None,
        )

    def gap_around(self, applied: Applied) -> float | None:
        """Return the gap between the last token before a commit and the first one after it."""
        return next(
            (
                after - before
                for before, after in self._gaps(applied.started_at, applied.ended_at)
                if before <= applied.started_at and applied.ended_at <= after
            ),
            None,
        )

    def median_gap(self) -> float | None:
        """Return the usual gap between two tokens, in seconds."""
        gaps = [after - before for before, after in pairwise(self._times)]
        return median(gaps) if gaps else None

    def whole_tokens(self, since: float, until: float) -> int:
        """Return how many tokens were both begun and finished in this time.

        A token begins when the one before it is finished.
        """
        return sum(since <= before and after <= until for before, after in self._gaps(since, until))

    def _has_commit(self, before: float, after: float) -> bool:
        return any(before <= each.started_at < after for each in self.applied)

    def _gaps(self, since: float, until: float) -> Iterator[tuple[float, float]]:
        """Yield the times of neighbouring tokens whose gap has a part in this time."""
        first = max(0, bisect_right(self._times, since) - 1)
        last = bisect_left(self._times, until)
        return pairwise(self._times[first : last + 1])
