"""The pictures of the guides are those that the code draws now."""

import re
from importlib.metadata import PackageNotFoundError
from xml.etree import ElementTree as ET

import engines_picture
import pytest
import round_picture
import states_picture
from draw_all import PICTURES, ROOT

from wtransfer import process_weights
from wtransfer.weight_sync.trainer.round_handle import Round

GUIDES = [ROOT / "README.md", *ROOT.glob("wtransfer/**/README.md")]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", PICTURES)
@pytest.mark.usefixtures("leaves_nothing")
def test_picture_is_what_the_code_draws(name):
    try:
        drawn = str(PICTURES[name]())
    except PackageNotFoundError as error:
        pytest.skip(str(error))
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


def test_engines_of_a_distribution_that_is_not_installed_are_refused_by_its_name(monkeypatch):
    monkeypatch.setattr(engines_picture, "OURS", ("wtransfer", "wtransfer-absent"))
    with pytest.raises(PackageNotFoundError, match="wtransfer-absent"):
        engines_picture.draw()


@pytest.mark.usefixtures("leaves_nothing")
def test_a_round_that_is_not_as_drawn_leaves_nothing(monkeypatch):
    monkeypatch.setattr(Round, "phase", "another")
    with pytest.raises(AssertionError):
        round_picture.draw()


def test_states_leave_no_model_in_the_process():
    # The collection of an earlier test's model would change the name.
    process_weights.begin_anew()
    before = process_weights.version()
    states_picture.draw()
    assert process_weights.version().fingerprint == before.fingerprint


def test_guides_show_every_picture_and_no_other():
    shown = [
        (guide.parent / path).resolve().relative_to(ROOT).as_posix()
        for guide in GUIDES
        for path in re.findall(r"!\[\w[^\]]*\]\(([^)]+)\)", guide.read_text("utf-8"))
    ]
    assert set(shown) == set(PICTURES)
