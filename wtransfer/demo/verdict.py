"""The verdict: what the demo promised to show, and whether it was seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wtransfer.demo.life import Life
    from wtransfer.demo.messages import Receipt, RoundOver
    from wtransfer.demo.story import Kill, Story

WITNESS_TOKENS = 3
"""Tokens that every worker must generate while a transfer stands still."""


@dataclass(frozen=True)
class Check:
    """One promise."""

    promise: str
    """In words."""
    kept: bool
    """Whether it was."""
    seen: str
    """What was seen."""


def judge(story: Story) -> list[Check]:
    """Return one check per promise; all of them must be kept."""
    return [
        _receipts(story),
        _live_digests(story),
        _commit_waits(story),
        _serving_goes_on(story),
        _all_or_nothing(story),
        _comes_back(story),
        _ends_equal(story),
        _ends_clean(story),
    ]


def _receipts(story: Story) -> Check:
    receipts = [(each, over) for over in story.rounds for each in over.receipts]
    wrong = [f"{got.worker} in {over.version}" for got, over in receipts if not _right(got, over)]
    rounds = {over.version for _, over in receipts}
    expected = len(story.rounds) - (1 if story.kill else 0)
    return Check(
        "no success without proof of receipt: every digest and fingerprint equal",
        not wrong and len(rounds) == expected > 0,
        f"{len(receipts)} receipts in {len(rounds)} of {expected} rounds"
        + (f", wrong: {', '.join(wrong)}" if wrong else ", all right"),
    )


def _right(got: Receipt, over: RoundOver) -> bool:
    return (
        got.outcome == over.outcome == "committed"
        and got.digests_equal
        and got.fingerprint == over.fingerprint
    )


def _live_digests(story: Story) -> Check:
    """Compare what the live models hold with what the trainer held, by an independent digest."""
    published = {over.version: over for over in story.rounds}
    proofs = [proof for lives in story.lives.values() for life in lives for proof in life.proofs]
    wrong = [
        f"{proof.worker} with {proof.version}"
        for proof in proofs
        if proof.version not in published
        or proof.digest != published[proof.version].digest
        or proof.trained_steps != published[proof.version].step
        or not proof.tied
    ]
    unproven = [over.version for over in story.rounds if not story.is_proven(over)]
    return Check(
        "the models that serve are bit for bit the published one (digest taken independently)",
        bool(proofs) and not wrong and not unproven,
        f"{len(proofs)} live digests"
        + (f", wrong: {', '.join(wrong)}" if wrong else ", all equal")
        + (f", missing for {', '.join(unproven)}" if unproven else ""),
    )


def _commit_waits(story: Story) -> Check:
    waits = [
        whole_tokens_waited(life, over, receipt)
        for over in story.rounds
        for receipt in over.receipts
        for life in story.lives.get(receipt.worker, [])
    ]
    counted = [wait for wait in waits if wait is not None]
    return Check(
        "a commit waits for no more than one generated token",
        bool(counted) and max(counted) <= 1,
        f"{len(counted)} commits, at most {max(counted, default=0)} whole tokens waited for",
    )


def whole_tokens_waited(life: Life, over: RoundOver, receipt: Receipt) -> int | None:
    """Return how many tokens were begun and finished while a verified update waited."""
    applied = life.applied_version(over.version)
    if applied is None:
        return None
    return life.whole_tokens(applied.started_at - receipt.waited_s, applied.started_at)


def _serving_goes_on(story: Story) -> Check:
    promise = "serving goes on in the middle of a transfer, with the old version"
    if story.held is None or story.kill is None or story.resumed_at is None:
        return Check(promise, kept=False, seen="no transfer was held")
    old = _version_before(story, story.kill)
    seen = {
        worker: lives[0].versions_between(story.held.at, story.resumed_at)
        for worker, lives in story.lives.items()
    }
    return Check(
        promise,
        all(len(got) >= WITNESS_TOKENS and set(got) == {old} for got in seen.values()),
        f"after {story.held.num_sent} of {story.held.num_tensors} tensors: "
        + ", ".join(f"{worker} {len(got)} tokens" for worker, got in seen.items())
        + f" with {old}",
    )


def _version_before(story: Story, kill: Kill) -> str | None:
    committed = [o for o in story.rounds if o.number < kill.number and o.outcome == "committed"]
    return committed[-1].version if committed else None


def _all_or_nothing(story: Story) -> Check:
    promise = "all or nothing: a worker killed in mid-round leaves the others on the old version"
    over = story.round(story.kill.number) if story.kill else None
    if over is None or story.kill is None:
        return Check(promise, kept=False, seen="nobody was killed")
    old = _version_before(story, story.kill)
    others = [worker for worker in story.lives if worker != story.kill.worker]
    # The digest after the abort is the second one of the same version.
    whole = all(
        [proof.version for proof in story.lives[worker][0].proofs].count(old) > 1
        for worker in others
    )
    never = all(
        each.version != over.version
        for lives in story.lives.values()
        for life in lives
        for each in life.applied
    )
    named = over.blamed == story.kill.worker and over.failed_in == "transfer"
    return Check(
        promise,
        over.outcome == "aborted" and named and whole and never,
        f"{over.version} {over.outcome}, error names {over.blamed} in phase {over.failed_in}, "
        f"{', '.join(others)} still {'whole' if whole else 'NOT PROVEN'} on {old}",
    )


def _comes_back(story: Story) -> Check:
    promise = "the killed worker comes back, says what it has, catches up"
    lives = story.lives.get(story.kill.worker, []) if story.kill else []
    if len(lives) != 2:  # noqa: PLR2004  # before the kill, and after it
        return Check(promise, kept=False, seen=f"{len(lives)} processes, expected 2")
    said, last = lives[1].ready, story.last_committed()
    fresh = said.version is None and said.fingerprint.startswith("local:")
    caught_up = last is not None and lives[1].fingerprint == last.fingerprint
    return Check(
        promise,
        fresh and caught_up and said.pid != lives[0].ready.pid,
        f"came back with {said.version or 'no version'} ({said.fingerprint[:14]}), "
        f"has {lives[1].version} now",
    )


def _ends_equal(story: Story) -> Check:
    last = story.last_committed()
    held = {worker: lives[-1].fingerprint for worker, lives in story.lives.items()}
    equal = last is not None and set(held.values()) == {last.fingerprint}
    return Check(
        "in the end everybody has the trainer's last version",
        equal and last is story.rounds[-1],
        ", ".join(f"{worker} {fingerprint[:8]}" for worker, fingerprint in held.items())
        + f", trainer {str(last.fingerprint)[:8] if last else 'nothing'}",
    )


def _ends_clean(story: Story) -> Check:
    return Check(
        "every process ends when asked",
        bool(story.exits) and not any(story.exits.values()),
        ", ".join(f"{child} exit {status}" for child, status in story.exits.items()),
    )
