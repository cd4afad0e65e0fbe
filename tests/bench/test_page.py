"""The page of a run: a plot for each row, whatever rows and backends are called."""

from xml.etree import ElementTree as ET

import pytest

from wtransfer.bench.harness import Goal, Result, Row, Spread
from wtransfer.bench.page import page

NAME = "load <script>alert('&')</script>"


def row(name):
    return Row(name, f"a round of {name}", lambda _runner: None)


def drawn(results):
    """Return the page, parsed: it is well-formed."""
    return ET.fromstring(page("wtransfer bench <weights>", results, "2 cores & more"))


def article(result):
    (found,) = drawn({row("one"): result}).iter("article")
    return found


def texts(element):
    return " ".join(" ".join(element.itertext()).split())


def shapes(element, class_):
    return [
        {key: float(value) for key, value in each.attrib.items() if key != "class"}
        for each in element.iter()
        if each.get("class") == class_
    ]


def test_every_row_is_there_in_order_and_one_that_failed_says_why():
    good = Result(Spread(0.72, 0.7, 0.8), "ms", Goal("<=", 5.0), {"round_s": 0.5}, note="a note")
    html = drawn(
        {row("well"): good, row("failed"): "nobody died", row(NAME): Result(Spread(1, 1, 1))}
    )
    articles = list(html.iter("article"))
    assert [each.find("h2").text for each in articles] == ["well", "failed", NAME]
    well, failed, named = map(texts, articles)
    for said in ("a round of well", "0.72 ms, goal <= 5 ms: reached", "0.7 to 0.8", "a note"):
        assert said in well
    assert "beside: round_s 0.5" in well
    assert "failed a round of failed nobody died" in failed
    assert list(articles[1].iter("svg")) == []
    assert f"a round of {NAME}" in named
    assert html.find("head/title").text == "wtransfer bench <weights>"
    assert "2 cores & more" in texts(html)


def test_nothing_is_run_or_fetched():
    results = {row(NAME): Result(Spread(1, 1, 1), NAME, Goal(">=", 2.0), {NAME: 1}, {NAME: 1})}
    text = page(NAME, results, NAME)
    assert not [
        each for each in ("<script", "http", "src=", "href=", "url(", "@import") if each in text
    ]


def test_shapes_are_as_long_as_the_numbers():
    found = article(Result(Spread(2, 1, 3), goal=Goal("<=", 4.0), limit=5.0))
    (bar,), (spread, low, high) = shapes(found, "bar"), shapes(found, "spread")
    (goal,), (limit,) = shapes(found, "goal"), shapes(found, "limit")
    unit = bar["width"] / 2
    assert bar["x"] == 0
    assert (spread["x1"], spread["x2"]) == pytest.approx((unit, 3 * unit), abs=0.1)
    assert (low["x1"], high["x1"]) == (spread["x1"], spread["x2"])
    assert (goal["x1"], limit["x1"]) == pytest.approx((4 * unit, 5 * unit), abs=0.3)
    # All within the plot.
    assert limit["x1"] < shapes(found, "track")[0]["width"]


@pytest.mark.parametrize(
    ("goal", "class_"), [(Goal(">=", 1.0), "good"), (Goal("<=", 1.0), "bad"), (None, None)]
)
def test_colour_says_if_the_goal_is_reached(goal, class_):
    (svg,) = article(Result(Spread(2, 1, 3), goal=goal)).iter("svg")
    assert svg.get("class").split()[1:] == ([] if class_ is None else [class_])


def test_stages_stand_one_after_the_other_with_their_names():
    stages = {
        "send_s": 1.0,
        "verify_s": 3.0,
        "total_s": 4.0,
        "worker_send_s": 2.0,
        "worker_wait_s": 1.0,
    }
    found = article(Result(Spread(2, 1, 3), stages=stages))
    _, trainer, worker = found.findall("svg")
    (send,), (verify,) = shapes(trainer, "c0"), shapes(trainer, "c1")
    (track,) = shapes(trainer, "track")
    assert (send["x"], verify["x"]) == (0, send["width"])
    assert verify["width"] == 3 * send["width"]
    assert verify["x"] + verify["width"] == track["width"]
    # On one scale and in the colours of the trainer's, where a stage has the same name.
    (send_of_worker,), (wait,) = shapes(worker, "c0"), shapes(worker, "c2")
    assert (send_of_worker["x"], send_of_worker["width"]) == (0, 2 * send["width"])
    assert (wait["x"], wait["width"]) == (2 * send["width"], send["width"])
    legends = found.findall("p")[-2:]
    assert list(map(texts, legends)) == [
        "trainer, in seconds: send 1 verify 3",
        "worker, in seconds: send 2 wait 1",
    ]
    colours = [[each.get("class") for each in legend.iter("i")] for legend in legends]
    assert colours == [["c0", "c1"], ["c0", "c2"]]


@pytest.mark.parametrize("spread", [Spread(0, 0, 0), Spread(1e9, 0, 1e9), Spread(1, 0, 1e9)])
def test_any_number_is_drawn(spread):
    found = article(Result(spread, stages={"send": 0.0}))
    assert len(list(found.iter("svg"))) == 1
    (track,) = shapes(found, "track")
    assert shapes(found, "bar")[0]["width"] <= track["width"]
    assert max(each["x2"] for each in shapes(found, "spread")) <= track["width"]


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("spread", "num_bars", "num_lines"),
    [
        (Spread(NAN, NAN, NAN), 0, 0),
        (Spread(INF, 1, INF), 0, 1),
        (Spread(2, 1, INF), 1, 1),
        (Spread(2, NAN, 3), 1, 1),
    ],
)
def test_a_number_that_is_none_is_not_drawn(spread, num_bars, num_lines):
    found = article(Result(spread, goal=Goal(">=", 2.0), stages={"a_s": spread.high, "b_s": 1.0}))
    assert len(shapes(found, "bar")) == num_bars
    assert len(shapes(found, "spread")) == num_lines
    # And the goal is where it was.
    ((goal,), (track, *_)) = shapes(found, "goal"), shapes(found, "track")
    assert 0 < goal["x1"] < track["width"]
    numbers = [
        value for each in found.iter() for key, value in each.items() if key in {"x", "width"}
    ]
    assert not {"nan", "inf"} & set(numbers)


def test_control_characters_leave_the_page_well_formed():
    bad = "\x1b[2J\x00\ufffe\ud800"
    result = Result(Spread(1, 1, 1), bad, None, {bad: 1}, {bad: 1}, note=bad)
    text = page(bad, {row(bad): result, row("failed"): bad}, bad)
    shown = r"\x1b[2J\x00\ufffe\ud800"
    assert shown in texts(ET.fromstring(text))
    assert text.encode().count(shown.encode()) > 9
