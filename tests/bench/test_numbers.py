"""Numbers, goals and words: small parts, each by itself."""

import pytest

from wtransfer.bench.machine import Machine
from wtransfer.bench.nbytes import in_words, parse_many, parse_nbytes
from wtransfer.bench.rounds import Rounds
from wtransfer.bench.row import Failed, Goal, Row, Spread
from wtransfer.bench.rows.serving_gaps import Gaps, gaps_of, life_of
from wtransfer.bench.scene import Told
from wtransfer.bench.sets import TensorSet
from wtransfer.bench.table import neighbour, number, show


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4096", 4096), ("4KiB", 4096), ("1.5 gib", 3 << 29), ("2GB", 2 * 10**9), ("3 MiB", 3 << 20)],
)
def test_sizes_are_read(text, nbytes):
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "2 apples", "-1", "0", "0.5", "1e3", "2GiB x"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match=r"is no size; write a number and a unit"):
        parse_nbytes(text)


def test_many_small_tensors_are_read():
    assert parse_many("20000x4KiB") == (20_000, 4096)


@pytest.mark.parametrize("text", ["20000", "x4KiB", "0x4KiB", "1x1", "ax4KiB"])
def test_what_is_no_number_of_sizes_is_refused(text):
    with pytest.raises(ValueError, match="is no"):
        parse_many(text)


@pytest.mark.parametrize(
    ("nbytes", "words"), [(12, "12 B"), (4096, "4 KiB"), (3 << 29, "1.5 GiB"), (5 << 20, "5 MiB")]
)
def test_sizes_are_written_as_they_are_read(nbytes, words):
    assert in_words(nbytes) == words


@pytest.mark.parametrize("nbytes", [1, 64 << 20, 2 << 30])
def test_a_llama_has_at_least_the_bytes_asked_for_and_at_most_a_layer_more(nbytes):
    tensors = TensorSet("llama", nbytes)
    layers = {name.split(".")[1] for name in tensors.shapes() if name.startswith("layers.")}
    smaller = TensorSet("llama", max(1, nbytes - 1)).total_nbytes()
    assert tensors.total_nbytes() >= max(nbytes, smaller)
    assert tensors.total_nbytes() < nbytes * (1 + 2 / (1 + len(layers))) + (64 << 20)


def test_many_and_one_have_equally_many_bytes():
    many, one = TensorSet("many", 4096, 50), TensorSet("one", 4096, 50)
    assert many.total_nbytes() == one.total_nbytes() == 50 * 4096
    assert (len(many.shapes()), len(one.shapes())) == (50, 1)


def test_a_spread_keeps_its_order_under_a_falling_function():
    assert Spread.of([4.0, 1.0, 2.0]).map(lambda x: 4 / x) == Spread(2.0, 1.0, 4.0)


@pytest.mark.parametrize(
    ("goal", "limit", "reached"),
    [
        (None, None, None),
        (Goal("<=", 2.0), None, True),
        (Goal("<=", 1.9), None, False),
        (Goal(">=", 2.0), None, True),
        (Goal(">=", 2.1), None, False),
        (Goal("<=", 2.0), 5.0, True),
        (Goal("<=", 2.0), 4.9, False),
    ],
)
def test_a_goal_is_for_the_median_and_a_limit_for_every_measurement(goal, limit, reached):
    assert Row("r", "", "", Spread(2.0, 1.0, 5.0), goal, limit=limit).reached is reached


def test_a_share_is_the_time_of_two_copies_by_that_of_a_round():
    rounds = [
        {"nbytes": 8, "packed_s": s / 2, "seconds": {"total": s}, "workers": [{"commit": 0.1}]}
        for s in (0.4, 0.8, 0.2)
    ]
    found = Rounds(Told({"rounds": rounds}, ()), copy_s=0.1)
    assert found.share == Spread(0.5, 0.25, 1.0)
    assert found.packed_s == Spread(0.2, 0.1, 0.4)
    assert found.stages() == {"total_s": 0.4, "worker_commit_s": 0.1}


def test_cpu_seconds_are_those_of_the_rounds_that_count():
    rounds = [{"cpu_s": 3.0}, {"cpu_s": 4.0}]
    # Two rounds before did not count; the worker's clock began long before them.
    workers = ({"cpu_s": [10.0, 20.0, 20.5, 22.5]}, {"cpu_s": [0.0, 1.0, 2.0, 2.5]})
    found = Rounds(Told({"rounds": rounds}, workers), copy_s=0.1)
    assert (found.trainer_cpu_s, found.workers_cpu_s) == ([3.0, 4.0], [1.5, 2.5])


def test_gaps_are_those_of_the_quiet_time_the_transfer_and_the_commit():
    life = life_of({"tokens": [0, 1, 3, 10, 14, 15, 22, 23], "commits": [("v", 16.0, 21.0)]})
    told = {"version": "v", "quiet_from": 0.5, "began": 10.5}
    assert gaps_of(life, told) == Gaps(
        quiet_s=7, transfer_s=4, around_commit_s=7, commit_s=5.0, usual_s=2
    )


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("round_s", 0.0123, "round 12.3 ms"),
        ("round_gb_per_s", 3.456, "round 3.46 GB/s"),
        ("update_nbytes", 4096, "update 4 KiB"),
        ("gloo_each_us", 217.4, "gloo each 217 us"),
        ("usual_workers", 4, "usual workers 4"),
    ],
)
def test_neighbours_are_told_with_their_units(name, value, words):
    assert neighbour(name, value) == words


def test_people_get_a_table(capsys):
    machine = Machine("a processor", 2, 8 << 30, "Linux 7", "3.11", "2.13", "0.1", 0.5)
    spread = Spread(0.72, 0.7, 0.8)
    show(
        [
            Row("adopt", "a round", "", spread, Goal(">=", 0.9), {"round_s": 0.5}),
            Row("pause", "a commit", "ms", spread, Goal("<=", 5.0), limit=9.0, note="a note"),
            Row("gloo-buckets", "another way", "times", spread),
            Failed("death", "a kill", "nobody died"),
        ],
        machine,
    )
    told = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in told.splitlines()]
    assert lines[0].startswith("a processor, 2 cores, 8 GiB, Linux 7; Python 3.11, torch 2.13")
    assert "adopt 0.72 0.7 .. 0.8 >= 0.9 not reached" in lines
    assert "pause 0.72 ms 0.7 .. 0.8 <= 5 ms, all <= 9 ms reached" in lines
    assert "gloo-buckets 0.72 times 0.7 .. 0.8 -" in lines
    assert "death - - - failed" in lines
    after = lines[lines.index("adopt: a round") :]
    assert after == [
        *("adopt: a round", "beside: round 500 ms", "pause: a commit", "a note"),
        *("gloo-buckets: another way", "death: a kill", "nobody died"),
    ]


def test_numbers_have_the_digits_that_are_worth_reading():
    assert [number(x) for x in (0.12345, 9.876, 99.96, 1234.5)] == ["0.123", "9.88", "100", "1,234"]
