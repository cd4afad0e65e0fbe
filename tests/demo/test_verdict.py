import re

import msgspec
import pytest

from wtransfer.demo.messages import Applied, Proof
from wtransfer.demo.story import Story
from wtransfer.demo.verdict import judge

RECEIPTS = "no success without proof of receipt"
DIGESTS = "the models that serve are bit for bit"
WAITS = "a commit waits for no more than one"
GOES_ON = "serving goes on"
ALL_OR_NOTHING = "all or nothing"
COMES_BACK = "the killed worker comes back"
EQUAL = "in the end everybody"
CLEAN = "every process ends"
ALL = {RECEIPTS, DIGESTS, WAITS, GOES_ON, ALL_OR_NOTHING, COMES_BACK, EQUAL, CLEAN}


def failed(story):
    broken = [check.promise for check in judge(story) if not check.kept]
    return {name for name in ALL for promise in broken if re.match(re.escape(name), promise)}


def change_round(story, index, **changes):
    story.rounds[index] = msgspec.structs.replace(story.rounds[index], **changes)


def change_receipt(story, index, **changes):
    first, *others = story.rounds[index].receipts
    change_round(story, index, receipts=(msgspec.structs.replace(first, **changes), *others))


def test_a_story_as_promised_is_accepted(story):
    assert failed(story) == set()
    assert len(judge(story)) == len(ALL)


def test_an_empty_story_keeps_no_promise():
    assert failed(Story()) == ALL


@pytest.mark.parametrize(
    "changes",
    [{"digests_equal": False}, {"fingerprint": "other"}, {"outcome": "pending"}],
    ids=str,
)
def test_a_wrong_receipt_is_seen(story, changes):
    change_receipt(story, 0, **changes)
    assert failed(story) == {RECEIPTS}


def test_a_mixed_round_is_seen(story):
    change_round(story, 2, outcome="mixed")
    assert RECEIPTS in failed(story)


def test_a_round_without_receipts_is_seen(story):
    change_round(story, 0, receipts=())
    assert RECEIPTS in failed(story)


@pytest.mark.parametrize(
    "changes", [{"digest": "other"}, {"trained_steps": 11}, {"tied": False}], ids=str
)
def test_a_live_model_with_other_weights_is_seen(story, changes):
    proofs = story.lives["worker-0"][0].proofs
    proofs[0] = msgspec.structs.replace(proofs[0], **changes)
    assert failed(story) == {DIGESTS}


def test_a_model_that_was_never_digested_is_seen(story):
    life = story.lives["worker-1"][1]
    life.proofs = []
    assert failed(story) == {DIGESTS}


def test_a_proof_of_a_version_nobody_published_is_seen(story):
    story.add(Proof("worker-0", "round-9", "sha-9", 90, True))
    assert failed(story) == {DIGESTS}


def test_a_commit_that_waited_for_two_tokens_is_seen(story):
    change_receipt(story, 2, waited_s=0.021)
    assert failed(story) == {WAITS}


def test_a_commit_that_waited_for_one_token_is_accepted(story):
    change_receipt(story, 2, waited_s=0.011)
    assert failed(story) == set()


def test_a_worker_that_stood_still_in_the_transfer_is_seen(story):
    life = story.lives["worker-1"][0]
    life._times = [at for at in life._times if at <= story.held.at]
    life._versions = life._versions[: len(life._times)]
    assert failed(story) == {GOES_ON}


def test_a_worker_that_served_the_new_version_too_early_is_seen(story):
    life = story.lives["worker-0"][0]
    life._versions[life._versions.index("round-3") - 3] = "round-2"
    assert failed(story) == {GOES_ON}


@pytest.mark.parametrize(
    "changes",
    [{"outcome": "committed"}, {"blamed": "worker-0"}, {"blamed": None}, {"failed_in": "plan"}],
    ids=str,
)
def test_a_round_that_did_not_fail_as_it_should_is_seen(story, changes):
    change_round(story, 1, **changes)
    assert ALL_OR_NOTHING in failed(story)


def test_a_worker_that_applied_the_aborted_round_is_seen(story):
    life = story.lives["worker-0"][0]
    life.applied.insert(1, Applied("worker-0", "round-2", "f2", 100.0, 100.1))
    assert ALL_OR_NOTHING in failed(story)


def test_a_survivor_that_was_not_proven_whole_is_seen(story):
    life = story.lives["worker-0"][0]
    first = next(i for i, proof in enumerate(life.proofs) if proof.version == "round-1")
    del life.proofs[first]
    assert failed(story) == {ALL_OR_NOTHING}


def test_a_worker_that_does_not_come_back_is_seen(story):
    story.lives["worker-1"].pop()
    assert {COMES_BACK, EQUAL} <= failed(story)


def test_a_worker_that_claims_what_it_cannot_have_is_seen(story):
    life = story.lives["worker-1"][1]
    life.ready = msgspec.structs.replace(life.ready, version="round-1", fingerprint="f")
    assert failed(story) == {COMES_BACK}


def test_a_worker_that_does_not_catch_up_is_seen(story):
    life = story.lives["worker-1"][1]
    life.applied[-1] = msgspec.structs.replace(life.applied[-1], fingerprint="old")
    assert failed(story) == {COMES_BACK, EQUAL}


def test_a_process_that_has_to_be_killed_at_the_end_is_seen(story):
    story.exits["worker-0"] = -9
    assert failed(story) == {CLEAN}
