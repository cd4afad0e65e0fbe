import bench_cases
import pytest
from bench_cases import Prepared

from wtransfer.bench import weights
from wtransfer.bench.harness import MIB, Outcome, Spread
from wtransfer.bench.weights import Gaps, Rounds, Settings, TensorSet
from wtransfer.errors import PeerLostError

SMALL = {"tensors": TensorSet("equal", 4096, 20), "num_rounds": 2}


def publish(runner, trainer=weights.publish):
    return runner.run("a test", trainer, weights.join, 1, **SMALL, engine="shm")


def test_every_value_differs_from_the_round_before():
    tensors = weights.make(TensorSet("equal", 64, 3))
    weights.renew(tensors, 1)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    weights.renew(tensors, 2)
    assert all((tensors[name] != before[name]).all() for name in tensors)
    assert weights.are_of(tensors, 2)
    assert not weights.are_of(before, 2)
    tensors["tensor.1"][-1] = 1
    assert not weights.are_of(tensors, 2)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["gloo-buckets", "checkpoint"])
def test_other_way_brings_every_tensor_to_every_worker(runner, way):
    settings = Settings(workers=(2,))
    seconds = weights.run_other_way(runner, settings, weights.OTHER_WAYS[way], **SMALL)
    assert len(seconds) == 2
    assert min(seconds) > 0


def test_broadcast_that_loses_a_tensor_is_no_measurement(runner):
    broken = bench_cases.broadcast_all_but_the_last
    with pytest.raises(PeerLostError, match="did not bring every tensor"):
        runner.run("a test", broken, broken, 1, **SMALL)


def test_rounds_that_count_are_measured(runner):
    rounds = Rounds(publish(runner))
    assert (rounds.nbytes, len(rounds.seconds)) == (20 * 4096, 2)
    assert min(*rounds.seconds, *rounds.packed_s, *rounds.workers_cpu_s, rounds.copy_s) > 0


def test_rounds_that_bring_the_same_weights_are_no_measurement(runner):
    with pytest.raises(PeerLostError, match="two rounds of the bench have one fingerprint"):
        publish(runner, bench_cases.publish_the_same)


def outcome_of(*seconds):
    rounds = [
        {
            "nbytes": 8,
            "packed_s": each / 2,
            "seconds": {"total": each},
            "workers": [{"commit": 0.1}],
            "cpu_s": 3.0,
        }
        for each in seconds
    ]
    # Two rounds before did not count; a worker's clock began long before them.
    clocks = [[0.0, *(10.0 + 2 * at * at for at in range(len(rounds) + 2))] for _ in range(2)]
    return {"rounds": rounds, "copy_s": 0.1}, *clocks


def test_cpu_seconds_are_those_of_the_rounds_that_count():
    rounds = Rounds(Prepared(*outcome_of(0.4, 0.8)).run())
    assert rounds.workers_cpu_s == [2 * 6.0, 2 * 10.0]
    assert rounds.packed_s == [0.2, 0.4]
    assert rounds.stages() == {"total_s": pytest.approx(0.6), "worker_commit_s": 0.1}


def test_a_push_is_that_of_a_new_publisher_and_again_that_of_one_with_touched_segments(runner):
    sides = (weights.push, weights.take_pushes)
    found = runner.run("a test", *sides, 1, **SMALL).trainer
    assert {name: len(seconds) for name, seconds in found.items()} == {
        "push": 2,
        "push-again": 2,
        "copy_s": 2,
    }
    assert min(min(seconds) for seconds in found.values()) > 0
    prepared = Prepared({"push": [4.0, 8.0], "push-again": [3.0, 2.0], "copy_s": [2.0, 2.0]})
    result = weights.measure_push(Settings(), "push", prepared)
    assert result.spread == Spread(3.0, 2.0, 4.0)


def test_played_worker_is_sent_as_much_with_few_tensors_as_with_many(runner):
    few, many = (weights.run_control(runner, Settings(num_rounds=1), each) for each in (2, 3000))
    assert few.nbytes == many.nbytes > 0
    assert min(few.one_worker_cpu_s, many.one_worker_cpu_s) > 0


@pytest.mark.parametrize(("nbytes", "ratio"), [(400, 3.0), (2000, 5.0)])
def test_control_is_the_ratio_of_cpu_or_bytes_of_one_more_worker(nbytes, ratio):
    class PreparedBySize:
        def run(self, name, *_, tensors, num_rounds, num_played):
            each_s, size = {200: (0.001, 400), 20_000: (0.003, nbytes)}[tensors.number]
            cpu_s = 0.1 + (num_played - 1) * each_s
            # The first round brings the manifest.
            sizes = [10**6, *[size] * num_rounds]
            return Outcome([cpu_s + 1, cpu_s], [[sizes] * num_played])

    result = weights.measure_control(Settings(), PreparedBySize())
    assert result.spread == pytest.approx((ratio, ratio, ratio))
    assert result.beside["many_cpu_us"] == pytest.approx(3000)
    assert result.reached is False


def test_share_is_the_time_of_two_copies_by_that_of_a_round():
    prepared = Prepared(*outcome_of(0.4, 0.8, 0.2))
    result = weights.measure_adopt_and_copy(Settings(), "adopt", prepared)
    assert result.spread == Spread(0.5, 0.25, 1.0)
    assert result.goal == (">=", 1.4)
    assert weights.measure_adopt_and_copy(Settings(engine="file"), "copy", prepared).goal is None


def test_gaps_are_those_of_the_quiet_time_the_transfer_and_the_commit():
    tokens = [0, 1, 3, 10, 14, 15, 22, 23]
    round_ = {"version": "v", "quiet_from": 0.5, "began": 10.5}
    served = {"tokens": tokens, "commits": {"v": [16.0, 21.0]}}
    (gaps,), usual_s = weights.run_serving(Prepared([round_], served), Settings())
    assert gaps == Gaps(quiet_s=7, transfer_s=4, around_commit_s=7, commit_s=5.0)
    assert usual_s == 2


def test_every_commit_lies_between_two_tokens_of_the_worker(runner):
    sides = (weights.publish_between_pauses, weights.serve)
    tensors = TensorSet("equal", 64, 3)
    outcome = runner.run("a test", *sides, 1, tensors=tensors, num_rounds=1)
    (served,) = outcome.workers
    assert [each["version"] for each in outcome.trainer] == ["round-2"]
    assert served["commits"].keys() == {"round-0", "round-1", "round-2"}
    for began, ended in served["commits"].values():
        assert served["tokens"][0] <= began < ended < served["tokens"][-1]
    assert served["tokens"] == sorted(served["tokens"])


@pytest.mark.parametrize("nbytes", [1, 64 * MIB, 2 << 30])
def test_llama_has_the_bytes_asked_for_and_at_most_a_layer_more(nbytes):
    shapes = TensorSet("llama", nbytes).shapes()
    last = {name for name in shapes if name.split(".")[:2] == list(shapes)[-1].split(".")[:2]}
    smaller = {name: shape for name, shape in shapes.items() if name not in last}
    total = weights._nbytes_of(shapes)
    assert total == TensorSet("llama", nbytes).total_nbytes() >= nbytes
    assert weights._nbytes_of(smaller) < nbytes


def test_more_workers_need_more_memory_where_each_has_its_own():
    few, many = Settings(workers=(1,)), Settings(workers=(4,))
    watched = weights.MAX_WATCHED_NBYTES
    assert Settings(workers=(1, 64)).needed_nbytes > few.needed_nbytes + watched
    assert many.needed_nbytes - few.needed_nbytes == 6 * few.nbytes


@pytest.mark.parametrize("engine", ["shm", "gloo"])
def test_rows_of_an_engine_are_those_whose_goals_are_its_own(engine):
    names = [row.name for row in weights.rows(Settings(engine=engine))]
    of_shm = ["packed", "memory", "gap", "pause", "death"]
    assert (names[-5:] == of_shm) == (engine == "shm")
    assert "small" in names
    assert "packed" not in [row.name for row in weights.rows(Settings(workers=(4,)))]
