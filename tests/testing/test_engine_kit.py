"""The kit catches engines that are wrong in one way each."""

from __future__ import annotations

from pathlib import Path

import pytest

from wtransfer.testing.engine import EngineConformance
from wtransfer.testing.fakes import MemoryEngine

BROKEN = Path(__file__).with_name("broken_engines.py")
CAUGHT_BY = {
    "TestLosesEmptyTensors": "test_empty_and_scalar_tensors_arrive",
    "TestGivesScalarsADimension": "test_empty_and_scalar_tensors_arrive",
    "TestWidensHalfFloats": "test_every_dtype_arrives[torch.bfloat16]",
    "TestStripsNames": "test_names_of_any_characters_arrive",
    "TestCutsBigTensors": "test_one_big_tensor_arrives",
    "TestCountsToAThousand": "test_many_small_tensors_arrive",
    "TestMistakesStrides": "test_tensors_of_any_strides_arrive",
    "TestSendsOldWeights": "test_one_round_after_another_arrives",
    "TestServesOneWorkerOnly": "test_two_workers_get_the_same",
    "TestKeepsJoinersWaiting": "test_a_late_joiner_gets_the_current_version",
    "TestPromisesTooMuch": "test_tensors_keep_their_bytes_for_as_long_as_declared",
    "TestWritesToTensorsInUse": "test_tensors_keep_their_bytes_for_as_long_as_declared",
    "TestNeverWorksAgainAfterAFault": "test_a_round_that_fails_on_one_worker_changes_none[1]",
    "TestNeverSendsAgainAfterAnAbort": "test_an_aborted_round_changes_nothing",
    "TestLeavesAThread": "test_shutdown_leaves_nothing",
    "TestLeavesAFile": "test_shutdown_leaves_nothing",
    "TestDeclaresNonsense": "test_declared_attributes_are_valid",
    "TestTalksInSets": "test_infos_are_plain_data",
    "TestParsesInItsOwnWords": "test_infos_that_do_not_fit_are_refused[update_info]",
    "TestReceivesFromNobody": "test_receiving_before_init_raises",
}
# What the same engines are good at: a kit that fails everything proves nothing.
PASSED_BY = {
    "TestLosesEmptyTensors": "test_two_workers_get_the_same",
    "TestWidensHalfFloats": "test_every_dtype_arrives[torch.float16]",
    "TestServesOneWorkerOnly": "test_an_aborted_round_changes_nothing",
    "TestNeverWorksAgainAfterAFault": "test_one_round_after_another_arrives",
    "TestLeavesAThread": "test_two_workers_get_the_same",
    "TestExcuses": "test_two_workers_get_the_same",
}
EXCUSED = ("TestExcuses", "test_empty_and_scalar_tensors_arrive")
WANTED = [*CAUGHT_BY.items(), *PASSED_BY.items(), EXCUSED]


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "test"), CAUGHT_BY.items())
def test_a_broken_engine_is_caught(outcomes, engine, test):
    assert outcomes[engine, test] == "failed"


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "test"), PASSED_BY.items())
def test_what_a_broken_engine_does_well_passes(outcomes, engine, test):
    assert outcomes[engine, test] == "passed"


@pytest.mark.slow
def test_a_test_may_be_excused_with_a_reason(outcomes):
    assert outcomes[EXCUSED] == "excused"


def test_every_test_of_the_kit_catches_something():
    tests = {name for name in vars(EngineConformance) if name.startswith("test_")}
    assert {name.partition("[")[0] for name in CAUGHT_BY.values()} == tests


def test_a_test_cannot_be_overridden_without_a_reason():
    with pytest.raises(TypeError, match="overrides test_two_workers_get_the_same of the conf"):

        class TestMine(EngineConformance):
            engine_cls = MemoryEngine

            def test_two_workers_get_the_same(self, fleet):
                """It surely would pass."""


def test_an_excuse_needs_words():
    with pytest.raises(TypeError, match="reason="):

        class TestMine(EngineConformance):
            engine_cls = MemoryEngine

            @pytest.mark.xfail
            def test_two_workers_get_the_same(self, fleet):
                super().test_two_workers_get_the_same(fleet)


def test_tests_of_ones_own_are_welcome():
    class TestMine(EngineConformance):
        engine_cls = MemoryEngine

        def test_something_else(self):
            """Not the kit's business."""

    assert TestMine.engine_cls is MemoryEngine
