"""The kit catches policies that are wrong in one way each."""

from __future__ import annotations

from pathlib import Path

import pytest

from wtransfer.specs.policies import LRUCachePolicy
from wtransfer.testing.policy import PolicyConformance

BROKEN = Path(__file__).with_name("broken_policies.py")
CAUGHT_BY = {
    "TestForgetsTheLast": "test_every_candidate_gives_way_at_last",
    "TestNamesTheSameTwice": "test_as_many_give_way_as_are_asked_for[5]",
    "TestGivesWhatItHas": "test_every_candidate_gives_way_at_last",
    "TestReleasesAtOnce": "test_blocks_that_are_being_stored_stay",
    "TestReordersByPinning": "test_an_order_of_their_own_loses_no_candidate",
    "TestPinsNothing": "test_blocks_that_are_being_loaded_stay",
    "TestPinsForEver": "test_blocks_that_are_being_loaded_stay",
    "TestProtectsNobody": "test_protected_blocks_stay",
    "TestProtectsTheFirstOnly": "test_protected_blocks_stay",
    "TestTouchesTwice": "test_touching_leaves_candidates_candidates",
    "TestRemovesCandidatesOnly": "test_removed_blocks_are_never_named",
    "TestNeverTakesBack": "test_what_went_may_come_back",
    "TestEvictsBeforeItCounts": "test_a_refusal_changes_nothing",
    "TestLearnsFromRefusals": "test_a_refusal_changes_nothing",
    "TestSorts": "test_effort_does_not_grow_with_the_number_of_blocks",
    "TestRemembersEverything": "test_memory_does_not_grow_with_time",
    "TestForgetsUnderLoad": "test_a_long_day[0]",
}
PASSED_BY = [
    ("TestSorts", "test_a_long_day[0]"),
    ("TestRemembersEverything", "test_a_long_day[1]"),
    ("TestProtectsNobody", "test_every_candidate_gives_way_at_last"),
    ("TestFifo", "test_a_long_day[0]"),
    ("TestFifo", "test_a_refusal_changes_nothing"),
]
WANTED = [*CAUGHT_BY.items(), *PASSED_BY]


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "test"), CAUGHT_BY.items())
def test_a_broken_policy_is_caught(outcomes, policy, test):
    assert outcomes[policy, test] == "failed"


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "test"), PASSED_BY)
def test_what_a_policy_does_well_passes(outcomes, policy, test):
    assert outcomes[policy, test] == "passed"


def test_every_test_of_the_kit_catches_something():
    tests = {name for name in vars(PolicyConformance) if name.startswith("test_")}
    assert {name.partition("[")[0] for name in CAUGHT_BY.values()} == tests


def test_a_test_cannot_be_overridden_without_a_reason():
    with pytest.raises(TypeError, match="overrides test_a_long_day of the conformance kit"):

        class TestMine(PolicyConformance):
            policy_cls = LRUCachePolicy

            def test_a_long_day(self, make, seed):
                """It surely would pass."""
