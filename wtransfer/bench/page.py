"""A run of a bench as one page of HTML: a plot for each row, nothing from the network."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from wtransfer.bench.harness import format_number, format_numbers
from wtransfer.weight_sync.report import printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from wtransfer.bench.harness import Result, Row

_WIDTH = 1000
"""Width of a plot in its own units; the page scales it."""
_COLOURS = (
    *("#4493f8", "#d29922", "#3fb950", "#ab7df8", "#f85149"),
    *("#8b949e", "#39c5cf", "#f778ba", "#9e6a03"),
)
"""Of stages; each can be told from white and from black."""
# Serialized as XML, which escapes > and &: neither may stand here.
_STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --faint: #59636e; --page: #ffffff;
  --track: #eaeef2; --bar: #0969da; --good: #1a7f37; --bad: #bc4c00; --line: #1f2328; }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --faint: #9198a1; --page: #0d1117;
  --track: #262c36; --bar: #4493f8; --good: #3fb950; --bad: #f0883e; --line: #e6edf3; } }
body { background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif;
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
article { border-top: 1px solid var(--track); padding: .9rem 0; }
h1 { font-size: 1.4rem; } h2 { font: 600 1rem ui-monospace, monospace; display: inline; }
p { margin: .2rem 0; } .faint { color: var(--faint); overflow-wrap: anywhere; }
.good { color: var(--good); } .bad { color: var(--bad); }
.number { float: right; text-align: right; }
svg { display: block; width: 100%; height: auto; margin: .3rem 0; }
.track { fill: var(--track); } .bar { fill: var(--bar); } .bad .bar { fill: var(--bad); }
line { stroke: var(--line); stroke-width: 3; } .limit { stroke-dasharray: 6 5; }
i { display: inline-block; width: .8em; height: .8em; border-radius: .2em;
  vertical-align: -.1em; }
.stage { white-space: nowrap; margin-right: .4em; }
"""


def page(title: str, results: Mapping[Row, Result | str], machine: str) -> str:
    """Return the page.

    Args:
        title: Its title.
        results: Each row, and what was measured, or why it was not.
        machine: The machine in words.
    """
    html = ET.Element("html", lang="en")
    head = ET.SubElement(html, "head")
    ET.SubElement(head, "meta", charset="utf-8")
    ET.SubElement(head, "meta", name="viewport", content="width=device-width")
    _add(head, "title", title)
    colours = (f".c{n} {{ fill: {c}; background: {c}; }}\n" for n, c in enumerate(_COLOURS))
    _add(head, "style", _STYLE + "".join(colours))
    body = ET.SubElement(html, "body")
    _add(body, "h1", title)
    _add(body, "p", machine, "faint")
    _add(
        body,
        "p",
        "A bar is the median, the line over it goes from the least to the greatest measurement. "
        "The upright line is the goal, a dashed one the bound of every single measurement. Each "
        "row has a scale of its own.",
        "faint",
    )
    for row, result in results.items():
        article = ET.SubElement(body, "article", id=row.name)
        _add(article, "h2", row.name)
        if isinstance(result, str):
            _add(article, "span", "failed", "number bad")
            _add(article, "p", row.what)
            _add(article, "p", result, "faint")
            continue
        _add(article, "span", _number(result), f"number {_verdict(result)[1]}".rstrip())
        _add(article, "p", row.what)
        article.append(_plot(row.name, result))
        for line in _below(result):
            _add(article, "p", line, "faint")
        _add_stages(article, _stages(result))
    lines = ET.tostring(html, encoding="unicode").split("\n")
    # Texts of backends and errors may hold what no page may: control characters.
    return "\n".join(["<!DOCTYPE html>", *map(printable, lines), ""])


def _add(parent: ET.Element, tag: str, text: str, class_: str = "") -> ET.Element:
    added = ET.SubElement(parent, tag, {"class": class_} if class_ else {})
    added.text = text
    return added


def _verdict(result: Result) -> tuple[str, str]:
    """Return the words for the goal, and the class of what shows it."""
    return {True: ("reached", "good"), False: ("not reached", "bad"), None: ("", "")}[
        result.reached
    ]


def _number(result: Result) -> str:
    words, _ = _verdict(result)
    unit = f" {result.unit}" if result.unit else ""
    number = f"{format_number(result.spread.median)}{unit}"
    if result.goal is None:
        return number
    return f"{number}, goal {result.goal.relation} {result.goal.value:g}{unit}: {words}"


def _below(result: Result) -> Iterator[str]:
    _, low, high = map(format_number, result.spread)
    limit = "" if result.limit is None else f", all to be <= {format_number(result.limit)}"
    yield f"{low} to {high}{limit}"
    if result.note:
        yield result.note
    if result.beside:
        yield f"beside: {format_numbers(result.beside)}"


def _plot(name: str, result: Result) -> ET.Element:
    """Return the numbers of a row as a bar, with lines for its spread, goal and limit."""
    median, low, high = result.spread
    lines = {"limit": result.limit, "goal": result.goal.value if result.goal else None}
    shown = {kind: value for kind, value in lines.items() if value is not None}
    finite = filter(math.isfinite, (*result.spread, *shown.values(), 1e-12))
    unit = _WIDTH / (1.1 * max(finite))
    svg = _svg(f"{name}: {_number(result)}", 30, _verdict(result)[1])
    _draw(svg, "rect", "bar", x=0, width=median * unit, y=8, height=14)
    _draw(svg, "line", "spread", x1=low * unit, x2=high * unit, y1=15, y2=15)
    for end in (low, high):
        _draw(svg, "line", "spread", x1=end * unit, x2=end * unit, y1=11, y2=19)
    for kind, value in shown.items():
        _draw(svg, "line", kind, x1=value * unit, x2=value * unit, y1=1, y2=29)
    return svg


def _stages(result: Result) -> dict[str, dict[str, float]]:
    """Return the stages of the trainer and those of a worker, without their sum."""
    sides: dict[str, dict[str, float]] = {"trainer": {}, "worker": {}}
    for name, seconds in result.stages.items():
        if name != "total_s":
            side = "worker" if name.startswith("worker_") else "trainer"
            sides[side][name.removeprefix("worker_").removesuffix("_s")] = seconds
    return sides


def _add_stages(article: ET.Element, sides: Mapping[str, Mapping[str, float]]) -> None:
    """Add the stages of each side, one after the other, with their names; on one scale."""
    longest = max(sum(stages.values()) for stages in sides.values())
    names = list(dict.fromkeys(name for stages in sides.values() for name in stages))
    for side, stages in sides.items() if longest else ():
        legend = _add(article, "p", f"{side}, in seconds: ", "faint")
        svg, at = _svg(f"stages of the {side}", 12), 0.0
        for stage, seconds in stages.items():
            colour = f"c{names.index(stage) % len(_COLOURS)}"
            width = _WIDTH * seconds / longest
            _draw(svg, "rect", colour, x=at, width=width, y=0, height=12)
            at += width
            named = ET.SubElement(legend, "span", {"class": "stage"})
            ET.SubElement(named, "i", {"class": colour}).text = " "
            named[0].tail = f" {stage} {format_number(seconds)}"
            named.tail = "  "
        article.append(svg)


def _svg(says: str, height: int, class_: str = "") -> ET.Element:
    view = {"viewBox": f"0 0 {_WIDTH} {height}", "role": "img", "class": f"plot {class_}".rstrip()}
    svg = ET.Element("svg", view)
    ET.SubElement(svg, "title").text = says
    _draw(svg, "rect", "track", x=0, width=_WIDTH, y=0, height=height)
    return svg


def _draw(svg: ET.Element, tag: str, class_: str, **numbers: float) -> None:
    """Draw a shape; none where a number is NaN or infinity."""
    if all(map(math.isfinite, numbers.values())):
        places = {name: f"{value:.1f}" for name, value in numbers.items()}
        ET.SubElement(svg, tag, {"class": class_, **places})
