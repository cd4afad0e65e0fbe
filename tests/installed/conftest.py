"""Plug-ins, good and bad, as real distributions: written, built, pip-installed, put on a path.

Everything goes into a folder of its own; only the processes that the tests start see it.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "{version}"
dependencies = {dependencies}

[project.entry-points."{group}"]
{entry} = "{value}"

[tool.hatch.build.targets.wheel]
only-include = ["{module}.py"]
"""

ENGINE = """
from wtransfer.engines.interface import WeightTransferEngine

class Engine(WeightTransferEngine):
    def init_transfer_engine(self, init_info): ...
    def receive_weights(self, update_info, load_weights): ...
    def shutdown(self): ...
"""

WHOLE = """
import dataclasses
from wtransfer.engines.interface import TrainerWeightTransferEngine, WeightTransferEngine

@dataclasses.dataclass
class Info: ...

class Trainer(TrainerWeightTransferEngine):
    init_info_cls = Info
    def trainer_init(init_info, *, client, source=None): ...
    def send_weights(self): ...
    def shutdown(self): ...

class Engine(WeightTransferEngine):
    init_info_cls = update_info_cls = Info
    trainer_cls = Trainer
    def init_transfer_engine(self, init_info): ...
    def receive_weights(self, update_info, load_weights): ...
    def shutdown(self): ...
"""

BUILD = """
import os, sys
from hatchling.build import build_wheel
for folder in sys.argv[2:]:
    os.chdir(folder)
    build_wheel(sys.argv[1])
"""


@dataclass(frozen=True)
class Project:
    """One distribution that offers one engine."""

    name: str
    entry: str
    source: str = ENGINE
    version: str = "1.0"
    value: str | None = None
    dependencies: tuple[str, ...] = ()
    group: str = "wtransfer.engines"

    def write(self, root: Path) -> str:
        module = self.name.replace("-", "_") + "_plugin"
        folder = root / self.name
        folder.mkdir()
        (folder / f"{module}.py").write_text(textwrap.dedent(self.source))
        text = PYPROJECT.format(
            name=self.name,
            version=self.version,
            entry=self.entry,
            value=f"{module}:Engine" if self.value is None else self.value,
            module=module,
            group=self.group,
            dependencies=json.dumps(self.dependencies),
        )
        (folder / "pyproject.toml").write_text(text)
        return str(folder)


PROJECTS = [
    Project("good-wt", "good", WHOLE, dependencies=("wtransfer>=0.1",)),
    Project("noisy-wt", "noisy", f"print('[\\n{{')\n{WHOLE}"),
    Project("crashing-wt", "crashing", "import os\nos._exit(3)"),
    Project("no-info-wt", "no-info", WHOLE.replace("update_info_cls", "update_infos_cls")),
    Project("stray-wt", "stray", group="wtransfer.engine"),
    Project("raising-wt", "raising", "1 / 0"),
    Project("exiting-wt", "exiting", "raise SystemExit(5)"),
    Project("hanging-wt", "hanging", "import time\ntime.sleep(3600)"),
    Project("syntax-wt", "syntax", "class Engine(:"),
    Project("needy-wt", "needy", "import a_driver_that_is_not_installed"),
    Project("no-attribute-wt", "no-attribute", "Engin = 3"),
    Project("wrong-type-wt", "wrong-type", "def Engine(config, parallel_config): ..."),
    Project("no-methods-wt", "no-methods", "class Engine:\n    def shutdown(self): ..."),
    Project("abstract-wt", "abstract", ENGINE.replace("shutdown", "shut_down")),
    Project("bad-value-wt", "bad-value", value="no place at all"),
    Project("no-class-wt", "no-class", value="no_class_wt_plugin"),
    Project("newer-wt", "newer", dependencies=("wtransfer>=999",)),
    Project("older-wt", "older", dependencies=("wtransfer<0.0.1",)),
    Project(
        "thief-wt",
        "thief",
        f"{ENGINE}\nimport wtransfer\n@wtransfer.hookimpl\ndef wtransfer_load(kind): ...",
    ),
    Project("first-wt", "two_homes"),
    Project("second-wt", "Two-Homes", version="2.0"),
    Project("shadow-wt", "SHM"),
    Project("not-utf8-wt", "not-utf8"),
    Project("malformed-wt", "malformed"),
    Project("lonely-wt", "lonely", f"{ENGINE}    trainer_cls = 'nowhere.trainer:Twin'\n"),
]


def _run(*command: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=90, env=env, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="session")
def installed(tmp_path_factory) -> Path:
    """Return the folder into which all projects are installed."""
    projects, wheels, site = (tmp_path_factory.mktemp(name) for name in ("src", "wheels", "site"))
    _run("-c", BUILD, str(wheels), *(project.write(projects) for project in PROJECTS))
    pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    options = ["--disable-pip-version-check", "--no-cache-dir", "--target", str(site)]
    _run(*pip, *options, *map(str, sorted(wheels.glob("*.whl"))))
    entries = site / "not_utf8_wt-1.0.dist-info" / "entry_points.txt"
    entries.write_bytes(b"[wtransfer.engines]\nnot-utf8\xff = not_utf8_wt_plugin:Engine\n")
    entries = site / "malformed_wt-1.0.dist-info" / "entry_points.txt"
    entries.write_text("[wtransfer.engines]\nmalformed : malformed_wt_plugin:Engine\n")
    return site


@pytest.fixture(scope="session")
def python(installed):
    """Return a function that runs Python beside the plug-ins and returns its standard output."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("WTRANSFER_")}
    # torch reads all entry points in one go when it is imported, and fails on the malformed ones.
    clean["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    path = os.pathsep.join(filter(None, [str(installed), clean.get("PYTHONPATH")]))

    def run(*arguments: str, **environ: str) -> str:
        env = {**clean, "PYTHONPATH": path, "WTRANSFER_LOAD_TIMEOUT_S": "30", **environ}
        return _run(*arguments, env=env).stdout

    return run


@pytest.fixture(scope="session")
def pip_install(tmp_path_factory):
    """Lets pip install a project, of this folder or elsewhere, once; returns where to.

    Of another version or name than its ``pyproject.toml`` says, if `changes` say so; the class of
    its backend states a `contract_version`, if one is given.
    """

    @functools.cache
    def install(name, /, contract_version=None, **changes):
        folder = tmp_path_factory.mktemp("third-party")
        project = shutil.copytree(HERE / name, folder / "project")
        if contract_version is not None:
            (place,) = re.findall(r'= "([\w.]+:\w+)"', (project / "pyproject.toml").read_text())
            module, cls = place.split(":")
            file = project / "src" / f"{module.replace('.', '/')}.py"
            stated = rf'\g<0>\n    contract_version = "{contract_version}"'
            source, num = re.subn(rf"(?m)^class {cls}\b.*:$", stated, file.read_text())
            assert num == 1
            file.write_text(source)
        text = (project / "pyproject.toml").read_text()
        for field, value in changes.items():
            text, num = re.subn(rf'(?m)^{field} = ".*"$', f'{field} = "{value}"', text)
            assert num == 1, field
        (project / "pyproject.toml").write_text(text)
        site = folder / "site"
        pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
        options = ["--disable-pip-version-check", "--no-cache-dir", "--target", str(site)]
        _run(*pip, *options, str(project))
        return site

    return install


@pytest.fixture
def run_beside(tmp_path):
    """Runs Python where a project is installed, in a folder of its own; returns what it printed."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("WTRANSFER_")}

    def run(site, *arguments, cwd=tmp_path, **environ):
        path = os.pathsep.join(filter(None, [str(site), clean.get("PYTHONPATH")]))
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            env={**clean, "PYTHONPATH": path, **environ},
            cwd=cwd,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.fixture
def serve_beside(zygote, tmp_path_factory):
    """Serve requests in a process that sees what is installed in a folder."""
    folder = tmp_path_factory.mktemp("serving")
    out, err = folder / "out", folder / "err"

    def run(site, connector, options, seed, *requests):
        out.write_text("")
        main = "third_party_serving_process:main"
        arguments = (str(site), connector, options, seed, *requests)
        child = zygote.spawn(main, *arguments, stdout=out, stderr=err)
        assert child.wait(60) == 0, err.read_text()
        return json.loads(out.read_text())

    return run
