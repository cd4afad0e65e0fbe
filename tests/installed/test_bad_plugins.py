"""Every bad plug-in of FAULTS 38-41, really installed: its own name fails, all else works."""

from __future__ import annotations

import json
import os
import sys

import pytest

from wtransfer.registry.discovery import DISCOVERED

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 11),
    reason="the pip and importlib-metadata of Python 3.10 refuse some of these distributions",
)

PROBE = """
import json, sys, time
from wtransfer.registry.resolve import host, registry

def attempt(name):
    started = time.monotonic()
    try:
        cls = registry("engines").get(name)
    except BaseException as error:
        facts = ("distribution", "distribution_version", "plugin")
        return {
            "error": type(error).__name__,
            "text": str(error),
            "cause": type(error.__cause__).__name__,
            "seconds": time.monotonic() - started,
            **{fact: getattr(error, fact, None) for fact in facts},
        }
    return {"class": f"{cls.__module__}:{cls.__qualname__}"}

before = [name for name in sys.modules if name.endswith("_plugin")]
names = registry("engines").names()
diagnostics = [d.distribution for d in host.catalog.diagnostics]
results = {name: attempt(name) for name in sys.argv[1:]}
print(json.dumps({
    "imported_by_listing": before, "names": names, "diagnostics": diagnostics, "results": results,
}))
"""

BAD = {
    # name: (error, cause, part of the text)
    "raising": ("PluginBrokenError", "ZeroDivisionError", "ZeroDivisionError: division by zero"),
    "exiting": ("PluginBrokenError", "SystemExit", "SystemExit: 5"),
    "syntax": ("PluginBrokenError", "SyntaxError", "SyntaxError"),
    "needy": (
        "PluginBrokenError",
        "ModuleNotFoundError",
        "No module named 'a_driver_that_is_not_installed'",
    ),
    "no-attribute": ("PluginBrokenError", "AttributeError", "has no attribute 'Engine'"),
    "wrong-type": ("PluginTypeError", "NoneType", "is an object of type function"),
    "no-methods": (
        "PluginTypeError",
        "NoneType",
        "the class Engine without init_transfer_engine, receive_weights",
    ),
    "abstract": ("PluginTypeError", "NoneType", "with abstract methods left: shutdown"),
    "bad-value": ("PluginBrokenError", "NoneType", "its place 'no place at all' is not of the"),
    "no-class": ("PluginBrokenError", "NoneType", "its place 'no_class_wt_plugin' is not of"),
    "newer": ("PluginIncompatibleError", "NoneType", "needs wtransfer>=999, and wtransfer "),
    "older": ("PluginIncompatibleError", "NoneType", "needs wtransfer<0.0.1, and wtransfer "),
    "thief": ("PluginTypeError", "PluginTypeError", "implements wtransfer_load"),
}

FINE = {
    "good": "good_wt_plugin:Engine",
    "GOOD": "good_wt_plugin:Engine",
    "first-wt:two-homes": "first_wt_plugin:Engine",
    "second-wt:two-homes": "second_wt_plugin:Engine",
    "shadow-wt:shm": "shadow_wt_plugin:Engine",
    "lonely": "lonely_wt_plugin:Engine",
}

BUILT_IN = "wtransfer.engines.shm:ShmWeightTransferEngine"


@pytest.fixture(scope="module")
def probed(python):
    """One process in which everything was tried, the bad ones first."""
    names = [*BAD, "two-homes", "nccl", *FINE, "shm"]
    return json.loads(python("-c", PROBE, *names))


def test_listing_shows_all_and_imports_none(probed):
    assert probed["imported_by_listing"] == []
    expected = {*BAD, "good", "shm", "hanging", "lonely", "crashing"}
    expected |= {"first-wt:two_homes", "second-wt:Two-Homes", "shadow-wt:SHM"}
    assert expected <= set(probed["names"])
    assert not {"not-utf8", "malformed", "two_homes", "SHM"} & set(probed["names"])


@pytest.mark.parametrize("name", BAD)
def test_a_bad_plugin_fails_by_name_with_its_cause(probed, name):
    result = probed["results"][name]
    error, cause, text = BAD[name]
    assert (result["error"], result["cause"]) == (error, cause)
    assert text in result["text"]
    assert f"'{name}' ({name}-wt 1.0)" in result["text"]
    assert (result["distribution"], result["distribution_version"]) == (f"{name}-wt", "1.0")
    assert result["plugin"] == f"engines:{name}"


@pytest.mark.parametrize("name", FINE)
def test_the_others_work_beside_them(probed, name):
    assert probed["results"][name] == {"class": FINE[name]}


def test_the_built_in_works_beside_them(probed):
    assert probed["results"]["shm"] == {"class": BUILT_IN}


def test_malformed_distributions_are_diagnosed_and_nothing_more(probed):
    assert {"malformed-wt", "not-utf8-wt", "stray-wt"} <= set(probed["diagnostics"])


def test_two_homes_are_never_chosen_from(probed):
    result = probed["results"]["two-homes"]
    assert result["error"] == "PluginAmbiguousError"
    assert 'WTRANSFER_PIN="engines:two_homes=first-wt"' in result["text"]
    assert 'WTRANSFER_PIN="engines:Two-Homes=second-wt"' in result["text"]
    assert "(first-wt 1.0)" in result["text"]
    assert "(second-wt 2.0)" in result["text"]


def test_an_import_that_hangs_ends_within_its_deadline_and_is_not_tried_again(python):
    names = ["hanging", "HANGING", "Hanging", "good"]
    results = json.loads(python("-c", PROBE, *names, WTRANSFER_LOAD_TIMEOUT_S="1"))["results"]
    first, *others, good = (results[name] for name in names)
    assert (first["error"], first["cause"]) == ("PluginBrokenError", "StallError")
    assert "hanging_wt_plugin.py:2" in first["text"]
    assert 1 <= first["seconds"] < 20
    assert {each["text"] for each in others} == {first["text"]}
    # A busy machine may stand still in one of them.
    assert min(each["seconds"] for each in others) < 0.5
    assert good == {"class": FINE["good"]}


def test_a_pin_chooses_even_against_a_built_in(python):
    pins = "engines:two-homes=second-wt, engines:shm=Shadow_WT"
    results = json.loads(python("-c", PROBE, "two_homes", "shm", WTRANSFER_PIN=pins))["results"]
    assert results["two_homes"] == {"class": "second_wt_plugin:Engine"}
    assert results["shm"] == {"class": "shadow_wt_plugin:Engine"}


def test_blocked_plugins_are_not_imported(python):
    probed = json.loads(
        python("-c", PROBE, "good", "exiting", "two-homes", WTRANSFER_PLUGINS="good-wt,first-wt")
    )
    results = probed["results"]
    assert results["good"] == {"class": FINE["good"]}
    assert results["exiting"]["error"] == "PluginBlockedError"
    assert results["two-homes"] == {"class": FINE["first-wt:two-homes"]}
    assert probed["names"] == [
        name for name in probed["names"] if name in {"good", "two_homes", "shm", "file", "gloo"}
    ]


TWIN = """
from wtransfer import WeightTransferTrainerFactory
try:
    WeightTransferTrainerFactory.trainer_class("lonely")
except ImportError as error:
    print(type(error).__name__, error)
"""


def test_a_twin_that_is_not_there_names_the_workers_distribution(python):
    text = python("-c", TWIN)
    assert text.startswith("PluginBrokenError The weight transfer trainer engine 'lonely' (lonely-")
    assert "No module named 'nowhere'" in text


CHECK = """
import sys
from wtransfer.cli import main
try:
    main(["plugins", "check", *sys.argv[1:]], standalone_mode=False)
except SystemExit as ended:
    print(ended.code)
"""


@pytest.mark.slow
def test_check_says_of_each_what_is_wrong_with_it(python):
    names = {*BAD, "good", "noisy", "crashing", "hanging", "lonely", "no-info", "shm", "file"}
    # What hangs takes all of this time; what imports torch must not, on a busy machine either.
    said = python("-c", CHECK, "--kind", "engines", "--json", WTRANSFER_LOAD_TIMEOUT_S="20")
    document, _, code = said.rstrip().rpartition("\n")
    assert code == "1"
    checked = json.loads(document)
    cards = {card["name"]: card for card in checked["plugins"]}
    assert names <= cards.keys()
    for name in ("good", "noisy", "shm", "file"):
        assert cards[name]["usable"] is True, cards[name]
    for name, (error, _, text) in BAD.items():
        assert (cards[name]["usable"], cards[name]["error"]["class"]) == (False, error)
        assert text in cards[name]["error"]["message"]
    errors = {
        "crashing": "its process ended with 3 while it was loaded",
        "hanging": "did not finish importing",
        "lonely": "No module named 'nowhere'",
        "no-info": "Engine.update_info_cls is no class",
    }
    for name, text in errors.items():
        assert text in cards[name]["error"]["message"]
    problems = {each["distribution"]: each["problem"] for each in checked["diagnostics"]}
    assert problems["stray-wt"] == (
        "'stray' is in the group 'wtransfer.engine', which is not read: "
        "did you mean wtransfer.engines?"
    )
    assert {"malformed-wt", "not-utf8-wt"} <= problems.keys()


@pytest.mark.slow
def test_check_of_one_name_looks_at_nothing_else(python):
    fine = python("-c", CHECK, "good")
    assert fine.splitlines()[1].split()[:4] == ["engines", "good", "good-wt", "1.0"]
    assert (len(fine.splitlines()), fine.splitlines()[-1]) == (3, "0")
    assert python("-c", CHECK, "raising").splitlines()[-1] == "1"


# -- every kind

OF_ANY_KIND = {
    # name: (source, value, requirement, error, part of the text)
    "raising": ("1 / 0", None, "", "PluginBrokenError", "ZeroDivisionError"),
    "exiting": ("raise SystemExit(5)", None, "", "PluginBrokenError", "SystemExit: 5"),
    "interrupted": ("raise KeyboardInterrupt", None, "", "PluginBrokenError", "KeyboardInterrupt"),
    "syntax": ("class Backend(:", None, "", "PluginBrokenError", "SyntaxError"),
    "bytes": ("\0", None, "", "PluginBrokenError", "null bytes"),
    "needy": ("import not_installed", None, "", "PluginBrokenError", "No module named 'not_insta"),
    "absent": ("", "no_such_module:Backend", "", "PluginBrokenError", "No module named 'no_such_"),
    "attribute": ("Backen = 3", None, "", "PluginBrokenError", "has no attribute 'Backend'"),
    "function": ("def Backend(config): ...", None, "", "PluginTypeError", "type function"),
    "none": ("Backend = None", None, "", "PluginTypeError", "NoneType"),
    "instance": ("Backend = object()", None, "", "PluginTypeError", "an object of type object"),
    "module": ("import json as Backend", None, "", "PluginTypeError", "type module"),
    "other": ("class Backend: ...", None, "", "PluginTypeError", "the class Backend"),
    "value": ("", "no place at all", "", "PluginBrokenError", "'no place at all' is not of the"),
    "no-class": ("", "json", "", "PluginBrokenError", "its place 'json' is not of the"),
    "empty": ("", ":Backend", "", "PluginBrokenError", "its place ':Backend'"),
    "newer": ("", None, "wtransfer>=999", "PluginIncompatibleError", "needs wtransfer>=999"),
    "older": ("", None, "wtransfer<0.0.1", "PluginIncompatibleError", "needs wtransfer<0.0.1"),
    "recursing": ("def f(): f()\nf()", None, "", "PluginBrokenError", "RecursionError"),
    "failing": ("assert False, 'no GPU'", None, "", "PluginBrokenError", "AssertionError: no GPU"),
}
WORDS = [kind.word for kind in DISCOVERED]
SHOW = """
import json, sys
from click.testing import CliRunner
from wtransfer.cli import main
names = json.loads(sys.argv[1])
listed = CliRunner().invoke(main, ["plugins", "list", "--json"])
before = sorted(name for name in sys.modules if name.startswith("bad_"))
shown = {}
for name in names:
    kind, _, plain = name.partition(":")
    done = CliRunner().invoke(main, ["plugins", "show", plain, "--kind", kind, "--json"])
    shown[name] = [done.exit_code, json.loads(done.stdout)]
print(json.dumps({"listed": [listed.exit_code, json.loads(listed.stdout)], "imported": before,
                  "shown": shown}))
"""


@pytest.fixture(scope="module")
def of_any_kind(tmp_path_factory):
    site = tmp_path_factory.mktemp("any-kind")
    for word in WORDS:
        for name, (source, value, requirement, *_) in OF_ANY_KIND.items():
            module = f"bad_{word}_{name.replace('-', '_')}"
            info = site / f"{module}-1.0.dist-info"
            info.mkdir()
            header = f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n"
            header += f"Requires-Dist: {requirement}\n" if requirement else ""
            (info / "METADATA").write_text(header)
            place = f"{module}:Backend" if value is None else value
            (info / "entry_points.txt").write_text(f"[wtransfer.{word}]\nbad-{name} = {place}\n")
            (site / f"{module}.py").write_text(source)
    return site


def check_card(card, word, name):
    *_, error, text = OF_ANY_KIND[name]
    assert (card["usable"], card["error"]["class"]) == (False, error)
    assert text in card["error"]["message"]
    distribution = f"bad_{word}_{name.replace('-', '_')}"
    assert f"'bad-{name}' ({distribution} 1.0)" in card["error"]["message"]


def test_twenty_faults_of_each_kind_are_listed_and_shown(python, of_any_kind):
    names = [f"{word}:bad-{name}" for word in WORDS for name in OF_ANY_KIND]
    paths = [str(of_any_kind), os.environ.get("PYTHONPATH", "")]
    fine = ["engines:shm", "connectors:SharedStorageConnector", "specs:file"]
    said = python(
        "-c", SHOW, json.dumps([*names, *fine]), PYTHONPATH=os.pathsep.join(filter(None, paths))
    )
    found = json.loads(said)
    assert found["imported"] == []
    code, listed = found["listed"]
    rows = {f"{row['kind']}:{row['name']}": row["status"] for row in listed["plugins"]}
    assert code == 0
    assert {name: rows[name] for name in names} == dict.fromkeys(names, "found")
    for name in names:
        code, (card,) = found["shown"][name]
        word, _, plain = name.partition(":bad-")
        assert code == 1
        check_card(card, word, plain)
    for name in fine:
        code, (card,) = found["shown"][name]
        assert (code, card["usable"]) == (0, True)


@pytest.mark.slow
@pytest.mark.parametrize("word", WORDS)
def test_check_finds_twenty_faults_of_each_kind(python, of_any_kind, word):
    paths = [str(of_any_kind), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, paths))
    said = python("-c", CHECK, "--kind", word, "--json", PYTHONPATH=path)
    document, _, code = said.rstrip().rpartition("\n")
    assert code == "1"
    cards = {card["name"]: card for card in json.loads(document)["plugins"]}
    assert {f"bad-{name}" for name in OF_ANY_KIND} <= cards.keys()
    for name in OF_ANY_KIND:
        check_card(cards[f"bad-{name}"], word, name)
    assert any(card["usable"] for card in cards.values())
