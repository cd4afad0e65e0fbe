"""The kit catches specs that are wrong in one way each."""

from __future__ import annotations

from pathlib import Path

import pytest

from wtransfer.testing.memory_spec import MemorySpec
from wtransfer.testing.spec import SpecConformance

BROKEN = Path(__file__).with_name("broken_specs.py")
CAUGHT_BY = {
    "TestLosesTheLastLayer": "test_blocks_come_back_as_they_were[many layers of small pages]",
    "TestSortsBlocks": "test_blocks_come_back_as_they_were[one token per block]",
    "TestWritesBesideTheBlock": "test_blocks_come_back_as_they_were[one layer]",
    "TestKeepsViews": "test_what_is_stored_later_is_another_block",
    "TestLoadsOnce": "test_one_block_may_be_loaded_many_times",
    "TestKnowsOneGroup": "test_groups_of_layers_are_kept_apart",
    "TestBeginsAtTheBeginning": "test_several_blocks_may_be_kept_as_one",
    "TestBelievesBytes": "test_a_damaged_block_is_not_loaded",
    "TestBelievesNumbers": "test_a_load_from_a_place_that_was_given_away_gives_no_other_bytes",
    "TestFailsNowAndThen": "test_a_busy_day",
    "TestHasFourSlots": "test_room_is_made_and_what_is_left_is_right",
    "TestReportsTwice": "test_every_job_is_reported_once",
    "TestForgetsToReport": "test_every_job_is_reported_once",
    "TestDoesNotWait": "test_every_job_is_reported_once",
    "TestWaitsForKnownJobsOnly": "test_waiting_for_what_is_not_there_ends",
    "TestCountsBackwards": "test_numbers_are_plain_and_counters_rise",
    "TestTalksInWords": "test_numbers_are_plain_and_counters_rise",
    "TestShutsDownOnce": "test_shutting_down_twice_does_nothing",
    "TestLingers": "test_shutting_down_ends_what_runs",
    "TestLeavesAThread": "test_nothing_is_left",
    "TestIsTooEarly": "test_a_block_is_a_hit_when_its_store_is_complete",
    "TestStoresDuplicates": "test_only_what_is_new_is_stored",
    "TestKeepsFailedStores": "test_a_failed_store_is_forgotten",
    "TestPinsBeforeItLooks": "test_what_is_not_kept_cannot_be_loaded",
    "TestRaisesItsOwn": "test_what_is_not_kept_cannot_be_loaded",
    "TestPinsNothing": "test_what_is_being_loaded_stays",
    "TestPinsOnce": "test_what_is_being_loaded_stays",
    "TestBelievesCompletions": "test_completions_that_come_twice_do_nothing",
    "TestRaisesForLateCompletions": "test_completions_of_what_never_was_do_nothing",
    "TestStoresWhatFits": "test_room_is_made_for_all_or_for_none",
    "TestEvictsBeforeItRefuses": "test_room_is_made_for_all_or_for_none",
    "TestGivesPlacesAway": "test_what_is_being_stored_stays",
    "TestTellsNoRemovals": "test_events_say_what_is_kept",
    "TestTellsOfStoresFirst": "test_events_say_what_is_kept",
    "TestRemembersAfterAReset": "test_a_reset_forgets_everything",
    "TestKeepsOldWeights": "test_blocks_of_earlier_weights_are_not_in_the_way",
    "TestTakesAThread": "test_constructors_take_nothing",
    "TestMakesManagers": "test_each_side_is_made_once",
    "TestSaysNothing": "test_a_spec_says_what_it_was_made_with",
}
# What the same specs are good at: a kit that fails everything proves nothing.
PASSED_BY = {
    "TestKnowsOneGroup": "test_a_busy_day",
    "TestBelievesBytes": "test_a_busy_day",
    "TestForgetsToReport": "test_one_block_may_be_loaded_many_times",
    "TestTellsNoRemovals": "test_room_is_made_for_all_or_for_none",
    "TestPinsOnce": "test_what_is_being_stored_stays",
    "TestExcuses": "test_a_busy_day",
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
    with pytest.raises(TypeError, match="overrides test_a_busy_day of the conformance kit"):

        class TestMine(SpecConformance):
            spec_cls = MemorySpec

            def test_a_busy_day(self, small_host):
                """It surely would pass."""


def test_a_kit_without_a_spec_says_so():
    with pytest.raises(AssertionError, match="state the spec or the spec_cls"):
        SpecConformance().make_spec.__wrapped__(SpecConformance())
