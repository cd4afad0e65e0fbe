"""The pictures of the guides are those that the code draws now."""

import re
from xml.etree import ElementTree as ET

import pytest
from draw_all import PICTURES, ROOT

GUIDES = [ROOT / "README.md", *ROOT.glob("wtransfer/**/README.md")]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.usefixtures("leaves_nothing")
def test_picture_is_what_the_code_draws(name):
    drawn = str(PICTURES[name]())
    assert (ROOT / name).read_text("utf-8") == drawn, "python tests/pictures/draw_all.py"


@pytest.mark.parametrize("name", PICTURES)
def test_picture_stands_alone_and_can_be_read_aloud(name):
    text = (ROOT / name).read_text("utf-8")
    assert not re.findall(r"<script|href|@import|url\((?!#)|font-face", text)
    svg = ET.fromstring(text)
    for tag in ("title", "desc"):
        (element,) = svg.findall(SVG + tag)
        assert element.text
        assert element.get("id") in svg.get("aria-labelledby")


def test_guides_show_every_picture_and_no_other():
    shown = [
        (guide.parent / path).resolve().relative_to(ROOT).as_posix()
        for guide in GUIDES
        for path in re.findall(r"!\[\w[^\]]*\]\(([^)]+)\)", guide.read_text("utf-8"))
    ]
    assert set(shown) == set(PICTURES)
