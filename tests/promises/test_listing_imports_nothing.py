"""README, promise 6, and "Plug-ins".

Listing imports nothing. `wtransfer plugins list` loads neither torch nor any plug-in.

Two distributions with one name are never resolved silently: the error shows the pin to write
(`WTRANSFER_PIN="engines:mine=acme-wt"`). `WTRANSFER_PLUGINS` allows only what it lists,
`WTRANSFER_PLUGINS_BLOCK` excludes, both before anything is imported.
"""

import json
import os
import re
import subprocess

import pytest

# Says which modules a command has imported when it has ended.
RUN = """
import atexit, json, sys
atexit.register(lambda: print("modules", json.dumps(list(sys.modules)), file=sys.stderr))
from wtransfer.cli import main
sys.argv = ["wtransfer", *sys.argv[1:]]
main()
"""
BUILT_IN = {
    *("file", "gloo", "shm", "MultiConnector", "OffloadingConnector", "ProcessGroupConnector"),
    *("SharedMemoryConnector", "SharedStorageConnector", "CPUOffloadingSpec"),
    "TieringOffloadingSpec",
}


@pytest.fixture
def site(tmp_path):
    """A folder of distributions, each with an engine whose module does harm as it is imported."""
    folder = tmp_path / "site"
    harm = {
        "acme-raises": "raise SystemExit(3)",
        "acme-hangs": "import time\nwhile True: time.sleep(1)",
        "acme-dies": "import os\nos.kill(os.getpid(), 9)",
        "acme-syntax": "this is no Python",
        "acme-torch": "import torch",
    }
    for name, source in harm.items():
        add(folder, name, f"{name} = {name.replace('-', '_')}:Engine", source)
    return folder


def add(folder, distribution, entry_point, source, metadata=None):
    module = distribution.replace("-", "_")
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        metadata or f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text(f"[wtransfer.engines]\n{entry_point}\n")
    (folder / f"{module}.py").write_text(
        f"import pathlib\npathlib.Path(__file__).with_suffix('.imported').touch()\n{source}\n"
    )


@pytest.fixture
def run(venv, site, tmp_path):
    def run_command(*arguments, **env):
        done = subprocess.run(
            [venv / "bin/python", "-c", RUN, *arguments],
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(site)} | env,
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
        text, _, modules = done.stderr.rpartition("modules ")
        return done.returncode, done.stdout, text, set(json.loads(modules))

    return run_command


def imported(site):
    return {each.stem for each in site.glob("*.imported")}


def test_listing_and_asking_why_import_neither_torch_nor_a_plugin(run, site):
    add(site, "acme-garbled", "]] no = entry point\n\0\xff", "", metadata="\xff\0 none at all")
    (site / "acme_bytes-1.0.dist-info").mkdir()
    (site / "acme_bytes-1.0.dist-info/entry_points.txt").write_bytes(b"\xff\xfe[wtransfer.engines]")
    code, out, err, modules = run("plugins", "list", "--json")
    assert code == 0, err
    assert all(f'"{name}"' in out for name in BUILT_IN)
    ours = {"acme-raises", "acme-hangs", "acme-dies", "acme-syntax", "acme-torch"}
    assert all(f'"{name}"' in out for name in ours)
    for name in ("acme-hangs", "acme-dies", "shm"):
        code, out, err, more = run("plugins", "why", name)
        assert code == 0, err
        assert name in out
        modules |= more
    assert imported(site) == set()
    assert not {each.split(".")[0] for each in modules} & {"torch", "numpy", "acme_torch"}


@pytest.mark.slow
def test_check_survives_each_that_does_harm_and_names_it(run, site):
    (site / "acme_hangs.py").write_text("raise ImportError('no libacme.so')")
    code, out, err, _ = run("plugins", "check", "--kind", "engines")
    assert code == 1
    for name in ("acme-raises", "acme-hangs", "acme-dies", "acme-syntax", "acme-torch"):
        assert name in out + err
    assert "no libacme.so" in out + err
    for name in ("shm", "file", "gloo"):
        assert re.search(rf"(?m)^.*\b{name}\b.*\b(ok|usable|works)", out), out


def test_one_name_of_two_distributions_is_an_error_that_shows_the_pin(run, site, tmp_path):
    for name in ("acme-one", "acme-two"):
        add(site, name, f"mine = {name.replace('-', '_')}:Engine", "class Engine: pass")
    code, out, err, _ = run("plugins", "why", "mine")
    assert imported(site) == set()
    assert "acme-one" in out + err
    assert "acme-two" in out + err
    code, out, err, _ = run("plugins", "show", "mine")
    assert code == 1
    pins = set(re.findall(r"WTRANSFER_PIN=\"?'?(engines:mine=acme-(?:one|two))", out + err))
    assert pins, out + err
    assert imported(site) == set()
    for pin in pins:
        _, out, err, _ = run("plugins", "why", "mine", WTRANSFER_PIN=pin)
        assert pin.rpartition("=")[2] in out
        run("plugins", "show", "mine", WTRANSFER_PIN=pin)
        assert imported(site) == {pin.rpartition("=")[2].replace("-", "_")}
        for each in site.glob("*.imported"):
            each.unlink()


def test_lists_of_plugins_hold_before_anything_is_imported(run, site):
    for env in ({"WTRANSFER_PLUGINS_BLOCK": "acme-torch"}, {"WTRANSFER_PLUGINS": "acme-dies"}):
        code, out, err, _ = run("plugins", "show", "acme-torch", **env)
        assert code == 1
        assert imported(site) == set(), (env, out, err)
        assert next(iter(env)) in out + err
