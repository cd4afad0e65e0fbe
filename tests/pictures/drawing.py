"""Plain SVG: boxes, arrows and text, on a ground of its own in light or dark.

A picture is read through an ``<img>`` of a page whose colours it cannot know. So it has a ground,
and its colours follow the scheme of the reader's system.
"""

from __future__ import annotations

from xml.etree import ElementTree as ET

WIDTH = 830
"""Width of a picture: that of a README on GitHub."""
CODE_WIDTH = 7.9
"""Width of a character of code; a fallback font may be that wide."""
LINE_HEIGHT = 18

# Serialized as XML, which escapes > and &: neither may stand here.
_STYLE = """
svg { --text: #1f2328; --faint: #59636e; --page: #ffffff; --edge: #d1d9e0; --plain: #f6f8fa;
  --old: #ddf4ff; --old-edge: #54aeff; --new: #dafbe1; --new-edge: #4ac26b; --work: #fff8c5;
  --work-edge: #d4a72c; --bad: #ffebe9; --bad-edge: #ff8182; --line: #57606a; }
@media (prefers-color-scheme: dark) { svg { --text: #e6edf3; --faint: #9198a1; --page: #0d1117;
  --edge: #3d444d; --plain: #151b23; --old: #0c2d6b; --old-edge: #1f6feb; --new: #04260f;
  --new-edge: #238636; --work: #341a00; --work-edge: #9e6a03; --bad: #490202;
  --bad-edge: #b62324; --line: #9198a1; } }
text { fill: var(--text); font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; }
.code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 12.5px; }
.faint { fill: var(--faint); }
.ground { fill: var(--page); stroke: var(--edge); }
.plain { fill: var(--plain); stroke: var(--edge); }
.old { fill: var(--old); stroke: var(--old-edge); }
.new { fill: var(--new); stroke: var(--new-edge); }
.work { fill: var(--work); stroke: var(--work-edge); }
.bad { fill: var(--bad); stroke: var(--bad-edge); }
.line { fill: none; stroke: var(--line); stroke-width: 1.4; }
.rule { fill: none; stroke: var(--edge); stroke-dasharray: 3 4; }
.head { fill: var(--line); }
"""


class Picture:
    """A picture that is being drawn.

    Args:
        height: In pixels; all are `WIDTH` wide.
        title: What it shows, in a line.
        desc: The same for a reader who does not see it.
    """

    def __init__(self, height: int, title: str, desc: str) -> None:
        self._svg = ET.Element(
            "svg",
            {
                "xmlns": "http://www.w3.org/2000/svg",
                "viewBox": f"0 0 {WIDTH} {height}",
                "width": str(WIDTH),
                "height": str(height),
                "role": "img",
                "aria-labelledby": "title desc",
            },
        )
        for tag, text in (("title", title), ("desc", desc)):
            self._add(tag, id=tag).text = text.replace("`", "")
        self._add("style").text = _STYLE
        marker = self._add("defs")
        marker = ET.SubElement(
            marker,
            "marker",
            {
                "id": "head",
                "viewBox": "0 0 8 8",
                "refX": "7",
                "refY": "4",
                "markerWidth": "7",
                "markerHeight": "7",
                "orient": "auto",
            },
        )
        ET.SubElement(marker, "path", {"d": "M0 0L8 4L0 8z", "class": "head"})
        ground = self._add("rect", x=0.5, y=0.5, width=WIDTH - 1, height=height - 1, rx=8)
        ground.set("class", "ground")

    def box(
        self, x: float, y: float, width: float, height: float, *lines: str, kind: str = "plain"
    ) -> None:
        """Draw a box with lines of text in its middle; `code` in backquotes."""
        self._add("rect", x=x, y=y, width=width, height=height, rx=5).set("class", kind)
        top = y + height / 2 - LINE_HEIGHT * (len(lines) - 1) / 2 + 4.5
        for number, line in enumerate(lines):
            self.text(x + width / 2, top + number * LINE_HEIGHT, line, anchor="middle")

    def text(self, x: float, y: float, text: str, *, anchor: str = "start") -> None:
        """Write a line: a part in backquotes as code, one that begins with ~ faintly."""
        is_faint = text.startswith("~")
        element = self._add("text", x=x, y=y, text_anchor=anchor)
        if is_faint:
            element.set("class", "faint")
        for number, part in enumerate(text.removeprefix("~").split("`")):
            if part:
                span = ET.SubElement(element, "tspan")
                span.text = part
                if number % 2:
                    span.set("class", "code faint" if is_faint else "code")

    def arrow(self, *points: tuple[float, float]) -> None:
        """Draw a line through the points, with a head at its end."""
        line = self._add("polyline", points=" ".join(f"{_n(x)},{_n(y)}" for x, y in points))
        line.set("class", "line")
        line.set("marker-end", "url(#head)")

    def rule(self, x: float, top: float, bottom: float) -> None:
        """Draw a dashed upright line."""
        self._add("line", x1=x, y1=top, x2=x, y2=bottom).set("class", "rule")

    def __str__(self) -> str:
        # A line each: white space within a text would be seen.
        for child in [self._svg, *self._svg]:
            child.tail = "\n"
        self._svg.text = "\n"
        return ET.tostring(self._svg, encoding="unicode")

    def _add(self, tag: str, **attributes: float | str) -> ET.Element:
        named = {
            key.replace("_", "-"): value if isinstance(value, str) else _n(value)
            for key, value in attributes.items()
        }
        return ET.SubElement(self._svg, tag, named)


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
