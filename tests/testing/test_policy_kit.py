"""The kit catches policies that are wrong in one way each."""

from __future__ import annotations

from pathlib import Path

import pytest

from wtransfer.specs.policies import LRUCachePolicy
from wtransfer.testing.policy import PolicyConformance

BROKEN = Path(__file__).with_name("broken_policies.py")
CAUGHT_BY = {
    "TestForgetsTheLast": "test_every_candidate_is_evicted_once",
    "TestNamesTheSameTwice": "test_evict_returns_the_count_asked_for[5]",
    "TestGivesWhatItHas": "test_every_candidate_is_evicted_once",
    "TestReleasesAtOnce": "test_inserted_blocks_are_evicted_only_after_release",
    "TestReordersByPinning": "test_reorder_keeps_candidates",
    "TestPinsNothing": "test_pinned_blocks_are_evicted_only_after_release",
    "TestPinsForEver": "test_pinned_blocks_are_evicted_only_after_release",
    "TestProtectsNobody": "test_protected_blocks_are_not_evicted",
    "TestProtectsTheFirstOnly": "test_protected_blocks_are_not_evicted",
    "TestTouchesTwice": "test_touch_keeps_candidates",
    "TestRemovesCandidatesOnly": "test_removed_blocks_are_not_evicted",
    "TestNeverTakesBack": "test_evicted_and_removed_blocks_may_return",
    "TestEvictsBeforeItCounts": "test_refused_eviction_changes_nothing",
    "TestLearnsFromRefusals": "test_refused_eviction_changes_nothing",
    "TestSorts": "test_lookups_do_not_grow_with_capacity",
    "TestRemembersEverything": "test_memory_is_bounded",
    "TestForgetsUnderLoad": "test_random_calls[0]",
}
PASSED_BY = [
    ("TestSorts", "test_random_calls[0]"),
    ("TestRemembersEverything", "test_random_calls[1]"),
    ("TestProtectsNobody", "test_every_candidate_is_evicted_once"),
    ("TestFifo", "test_random_calls[0]"),
    ("TestFifo", "test_refused_eviction_changes_nothing"),
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
    with pytest.raises(TypeError, match="overrides test_random_calls of the conformance kit"):

        class TestMine(PolicyConformance):
            policy_cls = LRUCachePolicy

            def test_random_calls(self, make, seed):
                """It surely would pass."""
