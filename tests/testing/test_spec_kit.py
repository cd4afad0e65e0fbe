"""The kit catches specs that are wrong in one way each."""

from __future__ import annotations

from pathlib import Path

import pytest

from wtransfer.testing.fakes import MemorySpec
from wtransfer.testing.spec import SpecConformance

BROKEN = Path(__file__).with_name("broken_specs.py")
CAUGHT_BY = {
    "TestLosesTheLastLayer": "test_blocks_come_back_as_they_were[many layers of small pages]",
    "TestSortsBlocks": "test_blocks_come_back_as_they_were[one token per block]",
    "TestWritesBesideTheBlock": "test_blocks_come_back_as_they_were[one layer]",
    "TestKeepsViews": "test_store_copies_the_block",
    "TestLoadsOnce": "test_one_block_may_be_loaded_many_times",
    "TestKnowsOneGroup": "test_groups_of_layers_are_kept_apart",
    "TestBeginsAtTheBeginning": "test_chunks_of_several_blocks",
    "TestBelievesBytes": "test_a_damaged_block_is_not_loaded",
    "TestBelievesNumbers": "test_load_from_reused_slot_gives_no_other_bytes",
    "TestFailsNowAndThen": "test_random_requests",
    "TestHasFourSlots": "test_evictions_leave_hits_intact",
    "TestReportsTwice": "test_every_job_is_reported_once",
    "TestForgetsToReport": "test_every_job_is_reported_once",
    "TestDoesNotWait": "test_every_job_is_reported_once",
    "TestWaitsForKnownJobsOnly": "test_wait_ignores_unknown_jobs",
    "TestCountsBackwards": "test_stats_are_numbers_and_counters_rise",
    "TestTalksInWords": "test_stats_are_numbers_and_counters_rise",
    "TestShutsDownOnce": "test_shutdown_is_idempotent",
    "TestLingers": "test_shutdown_ends_running_work",
    "TestLeavesAThread": "test_shutdown_leaves_nothing",
    "TestIsTooEarly": "test_a_block_is_a_hit_when_its_store_is_complete",
    "TestStoresDuplicates": "test_only_new_keys_are_stored",
    "TestKeepsFailedStores": "test_failed_store_is_a_miss",
    "TestPinsBeforeItLooks": "test_prepare_load_refuses_missing_blocks",
    "TestRaisesItsOwn": "test_prepare_load_refuses_missing_blocks",
    "TestPinsNothing": "test_pinned_blocks_are_not_evicted",
    "TestPinsOnce": "test_pinned_blocks_are_not_evicted",
    "TestBelievesCompletions": "test_duplicate_completions_are_ignored",
    "TestRaisesForLateCompletions": "test_unknown_completions_are_ignored",
    "TestStoresWhatFits": "test_eviction_is_all_or_none",
    "TestEvictsBeforeItRefuses": "test_eviction_is_all_or_none",
    "TestGivesPlacesAway": "test_blocks_being_stored_are_not_evicted",
    "TestTellsNoRemovals": "test_events_match_lookups",
    "TestTellsOfStoresFirst": "test_events_match_lookups",
    "TestRemembersAfterAReset": "test_reset_forgets_all_blocks",
    "TestKeepsOldWeights": "test_store_and_load_after_weights_change",
    "TestTakesAThread": "test_constructor_takes_no_resources",
    "TestMakesManagers": "test_each_side_is_made_once",
    "TestSaysNothing": "test_spec_keeps_its_config",
}
# What the same specs are good at: a kit that fails everything proves nothing.
PASSED_BY = {
    "TestKnowsOneGroup": "test_random_requests",
    "TestBelievesBytes": "test_random_requests",
    "TestForgetsToReport": "test_one_block_may_be_loaded_many_times",
    "TestTellsNoRemovals": "test_eviction_is_all_or_none",
    "TestPinsOnce": "test_blocks_being_stored_are_not_evicted",
    "TestExcuses": "test_random_requests",
}
EXCUSED = ("TestExcuses", "test_a_damaged_block_is_not_loaded")
WANTED = [*CAUGHT_BY.items(), *PASSED_BY.items(), EXCUSED]


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "test"), CAUGHT_BY.items())
def test_a_broken_spec_is_caught(outcomes, spec, test):
    assert outcomes[spec, test] == "failed"


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "test"), PASSED_BY.items())
def test_what_a_broken_spec_does_well_passes(outcomes, spec, test):
    assert outcomes[spec, test] == "passed"


@pytest.mark.slow
def test_a_test_may_be_excused_with_a_reason(outcomes):
    assert outcomes[EXCUSED] == "excused"


def test_every_test_of_the_kit_catches_something():
    tests = {name for name in vars(SpecConformance) if name.startswith("test_")}
    assert {name.partition("[")[0] for name in CAUGHT_BY.values()} == tests


def test_a_test_cannot_be_overridden_without_a_reason():
    with pytest.raises(TypeError, match="overrides test_random_requests of the conformance kit"):

        class TestMine(SpecConformance):
            spec_cls = MemorySpec

            def test_random_requests(self, small_host):
                """It surely would pass."""


def test_a_kit_without_a_spec_says_so():
    with pytest.raises(AssertionError, match="state the spec or the spec_cls"):
        SpecConformance().make_spec.__wrapped__(SpecConformance())
