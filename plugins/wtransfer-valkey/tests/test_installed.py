"""The plug-in is tested where it is installed."""

import importlib.util
import json
import subprocess
import sys

import pytest

if importlib.util.find_spec("wtransfer_valkey") is None:
    pytest.skip(
        'wtransfer-valkey is not installed: pip install "./plugins/wtransfer-valkey[test]"',
        allow_module_level=True,
    )


def run(*arguments):
    script = (
        "import sys, json\n"
        "from wtransfer.cli import main\n"
        "try:\n"
        f"    main({list(arguments)!r})\n"
        "except SystemExit:\n"
        "    pass\n"
        "print()\n"
        "print(json.dumps(sorted({'torch', 'valkey', 'wtransfer_valkey'} & set(sys.modules))))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    printed, _, imported = done.stdout.strip().rpartition("\n")
    return json.loads(printed), json.loads(imported)


def test_tier_is_listed_from_its_distribution_without_being_imported():
    listed, imported = run("plugins", "list", "--json")
    (row,) = [row for row in listed["plugins"] if row["name"] == "valkey"]
    assert (row["kind"], row["distribution"]) == ("specs", "wtransfer-valkey")
    assert imported == []


def test_tier_is_usable_without_a_server():
    (card,) = run("plugins", "show", "valkey", "--json")[0]
    assert (card["usable"], card["class"]) == (True, "wtransfer_valkey.tier:ValkeyTier")
