import pytest

from wtransfer.demo.life import Life
from wtransfer.demo.messages import Applied, Ready, Tokens


@pytest.fixture
def life():
    """Tokens at 1, 2, 3, 7 and 8 s; a commit from 3.5 to 4 s."""
    life = Life(Ready("w", 1, None, "local:1", "fresh"))
    life.add_tokens(Tokens("w", None, (1.0, 2.0, 3.0)))
    life.applied.append(Applied("w", "v1", "f1", 3.5, 4.0))
    life.add_tokens(Tokens("w", "v1", (7.0, 8.0)))
    return life


def test_gaps_are_taken_over_reports(life):
    assert life.gap_around(life.applied[0]) == 4.0
    assert life.median_gap() == 1.0


def test_a_gap_with_a_commit_counts_as_nothing_else(life):
    assert life.longest_gap(0.0, 10.0) == 1.0
    assert life.longest_gap(3.1, 6.9) is None


def test_a_gap_counts_wherever_it_has_a_part():
    life = Life(Ready("w", 1, None, "local:1", "fresh"))
    life.add_tokens(Tokens("w", None, (1.0, 6.0, 7.0)))
    assert life.longest_gap(2.0, 3.0) == 5.0
    assert life.longest_gap(6.0, 9.0) == 1.0


def test_only_tokens_begun_and_finished_in_the_time_are_whole(life):
    assert life.whole_tokens(0.5, 3.0) == 2
    assert life.whole_tokens(1.5, 2.5) == 0
    assert life.whole_tokens(1.5, 3.0) == 1


def test_versions_are_those_that_tokens_were_generated_with(life):
    assert life.versions_between(1.5, 7.5) == [None, None, "v1"]
    assert (life.version, life.fingerprint) == ("v1", "f1")
    assert life.num_tokens == 5


def test_a_process_that_did_nothing_has_no_gaps():
    life = Life(Ready("w", 1, "v0", "f0", "serving"))
    assert life.median_gap() is None
    assert life.longest_gap(0.0, 9.0) is None
    assert (life.version, life.fingerprint) == ("v0", "f0")
