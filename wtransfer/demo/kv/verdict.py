"""The verdict: what the story promised to show, and whether it was seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wtransfer.demo.kv.conductor import NUM_AFTER, NUM_BEFORE
from wtransfer.demo.verdict import Check

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wtransfer.demo.kv.story import KvStory, Row


def judge(story: KvStory, num_shared: int) -> list[Check]:
    """Return one check per promise; all of them must be kept.

    Args:
        story: The run.
        num_shared: Tokens that all prompts have in common, in whole blocks.
    """
    last_dead = max((row.number for row in story.rows if row.prefill != "alive"), default=0)
    alive = [row for row in story.rows if row.prefill == "alive"]
    before = [row for row in alive if row.number < last_dead]
    after = [row for row in alive if row.number > last_dead]
    return [
        _same(story.rows),
        _loads("what one instance has computed, the other loads", before, NUM_BEFORE, num_shared),
        _survives([row for row in story.rows if row.prefill != "alive"]),
        _loads("an instance that comes back is used again", after, NUM_AFTER, num_shared),
        _ends_clean(story),
    ]


def _same(rows: Sequence[Row]) -> Check:
    wrong = [row.number for row in rows if not row.is_same]
    # A yardstick that had something in its cache would not be one.
    lazy = [row.number for row in rows if row.num_expected_computed != row.num_prompt]
    return Check(
        "every answer is, token for token, that of an instance that computes everything itself",
        bool(rows) and not wrong and not lazy,
        f"{len(rows)} answers"
        + (f", wrong: {wrong}" if wrong else ", all equal")
        + (f", not computed afresh: {lazy}" if lazy else ""),
    )


def _loads(promise: str, rows: Sequence[Row], num_expected: int, num_shared: int) -> Check:
    # Some connectors hand the end of a prompt on a moment later than the answer.
    whole = [row for row in rows if row.num_loaded >= num_shared]
    return Check(
        promise,
        len(whole) == len(rows) == num_expected,
        f"{sum(row.num_loaded for row in rows)} tokens loaded and "
        f"{sum(row.num_recomputed for row in rows)} computed of "
        f"{sum(row.num_prompt for row in rows)}, in {len(rows)} prompts",
    )


def _survives(rows: Sequence[Row]) -> Check:
    kinds = [row.prefill for row in rows]
    return Check(
        "a killed instance costs time, and nothing else",
        kinds == ["killed", "gone"] and all(row.is_same for row in rows),
        ", ".join(
            f"prompt {row.number} ({row.prefill}): {row.num_recomputed} of {row.num_prompt} tokens "
            "computed"
            for row in rows
        ),
    )


def _ends_clean(story: KvStory) -> Check:
    return Check(
        "every process ends when asked",
        bool(story.exits) and not any(any(statuses) for statuses in story.exits.values()),
        ", ".join(f"{name} exit {statuses}" for name, statuses in story.exits.items()),
    )
