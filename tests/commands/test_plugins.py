"""``wtransfer plugins``, as a user runs it, and what importing and listing may cost."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from importlib import metadata

import pytest
from packaging.requirements import Requirement

from wtransfer.commands.options import options_of
from wtransfer.registry.resolve import registry

ENGINE = """
class Info: ...
class Twin:
    init_info_cls = Info
    def trainer_init(init_info, client, source): ...
    def send_weights(self): ...
class Engine:
    init_info_cls = update_info_cls = Info
    devices = ("cpu", "cuda")
    multi_host = True
    trainer_cls = "acme_engine:Twin"
    def __init__(self, config, parallel_config): ...
    def init_transfer_engine(self, init_info): ...
    def receive_weights(self, update_info, load_weights): ...
    def shutdown(self): ...
"""


@pytest.fixture
def site(tmp_path):
    def add(name, entries):
        info = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[wtransfer.engines]\n{entries}\n")

    add("acme-wt", "acme = acme_engine:Engine\nbad = acme_bad:Engine\ntwice = acme_engine:Engine")
    add("other-wt", "twice = acme_engine:Engine")
    add("malformed-wt", "no equals sign")
    (tmp_path / "acme_engine.py").write_text(ENGINE)
    (tmp_path / "acme_bad.py").write_text("1 / 0")
    return tmp_path


@pytest.fixture
def light_torch(site):
    """Stand-in for torch that starts at once, for backends that import nothing of it."""
    (site / "torch.py").write_text("class Tensor: ...")


@pytest.fixture
def clean(site):
    """Variables of an environment in which the packages of `site` are installed."""
    found = {k: v for k, v in os.environ.items() if not k.startswith("WTRANSFER_")}
    path = os.pathsep.join(filter(None, [str(site), found.get("PYTHONPATH")]))
    # Torch reads all entry points when it is imported, and fails on those that are malformed.
    return {**found, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": path}


@pytest.fixture
def python(clean):
    def run(*arguments, **environ):
        return subprocess.run(
            [sys.executable, *arguments],
            env={**clean, **environ},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


@pytest.fixture
def cli(python):
    def run(*arguments, **environ):
        return python("-m", "wtransfer", *arguments, **environ)

    return run


def test_list_shows_backends_conflicts_and_diagnostics(cli):
    done = cli("plugins", "list")
    assert done.returncode == 0, done.stderr
    lines = [line.split(maxsplit=5) for line in done.stdout.splitlines()]
    assert lines[0] == ["kind", "name", "distribution", "version", "origin", "status"]
    assert ["engines", "acme", "acme-wt", "1.0", "discovered", "found"] in lines
    conflict = "conflict: address it as other-wt:twice"
    assert ["engines", "twice", "other-wt", "1.0", "discovered", conflict] in lines
    assert any(line[1:3] == ["shm", "wtransfer"] and line[4] == "built-in" for line in lines)
    assert "warning: malformed-wt: its entry points cannot be read" in done.stderr


def test_list_as_json(cli):
    done = cli("plugins", "list", "--json", WTRANSFER_PLUGINS_BLOCK="other-wt")
    listed = json.loads(done.stdout)
    rows = {(row["name"], row["distribution"]): row for row in listed["plugins"]}
    assert rows["acme", "acme-wt"] == {
        "kind": "engines",
        "name": "acme",
        "distribution": "acme-wt",
        "version": "1.0",
        "value": "acme_engine:Engine",
        "origin": "discovered",
        "status": "found",
    }
    assert rows["twice", "acme-wt"]["status"] == "found"
    assert rows["twice", "other-wt"]["status"] == (
        "blocked: WTRANSFER_PLUGINS_BLOCK names 'other-wt'; remove it there to use it"
    )
    assert [each["distribution"] for each in listed["diagnostics"]] == ["malformed-wt"]


def test_list_shows_pins(cli):
    done = cli("plugins", "list", "--json", WTRANSFER_PIN="engines:twice=other-wt")
    rows = {(r["name"], r["distribution"]): r["status"] for r in json.loads(done.stdout)["plugins"]}
    assert rows["twice", "other-wt"] == "found, pinned by WTRANSFER_PIN"
    assert rows["twice", "acme-wt"] == "conflict: address it as acme-wt:twice"


def test_unreadable_setting_is_one_line(cli):
    done = cli("plugins", "list", WTRANSFER_PIN="nonsense")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: WTRANSFER_PIN has the entry 'nonsense'")


@pytest.mark.usefixtures("light_torch")
def test_show_loads_and_prints_what_is_declared(cli):
    done = cli("plugins", "show", "ACME", "--json")
    assert done.returncode == 0, done.stderr
    (card,) = json.loads(done.stdout)
    assert (card["kind"], card["distribution"], card["version"]) == ("engines", "acme-wt", "1.0")
    assert (card["usable"], card["class"]) == (True, "acme_engine:Engine")
    assert card["declared"] == {
        "devices": ["cpu", "cuda"],
        "multi_host": True,
        "trainer_cls": "acme_engine:Twin",
    }
    text = cli("plugins", "show", "acme").stdout
    assert "distribution  acme-wt" in text
    assert "usable        yes" in text


@pytest.mark.usefixtures("light_torch")
@pytest.mark.parametrize("form", ["@staticmethod\n    def available()", "def available(self)"])
def test_show_and_check_say_why_a_backend_is_not_usable_on_this_machine(cli, site, form):
    says = f"    {form}: raise OSError('no such device here')\n"
    (site / "acme_engine.py").write_text(f"{ENGINE}{says}")
    told = "OSError: no such device here" if "static" in form else None
    done = cli("plugins", "show", "acme", "--json")
    (card,) = json.loads(done.stdout)
    # It is whole, and may serve on another machine.
    assert (done.returncode, card["usable"], card["missing"]) == (0, True, told)
    show = cli("plugins", "show", "acme").stdout
    check = cli("plugins", "check", "acme").stdout
    assert (f"usable        not on this machine: {told}" in show) == (told is not None)
    assert (f", not usable on this machine: {told}" in check) == (told is not None)


@pytest.mark.usefixtures("light_torch")
@pytest.mark.parametrize(
    ("more", "shown"),
    [
        ("    contract_version = '1.2'\n", "1.2"),
        ("    contract_version = '1.2.3'\n", "not stated"),
        ("    contract_version = '1.2'\nclass Engine(Engine): ...\n", "not stated"),
    ],
)
def test_show_tells_the_contract_that_a_backend_states_itself(cli, site, more, shown):
    (site / "acme_engine.py").write_text(ENGINE + more)
    (card,) = json.loads(cli("plugins", "show", "acme", "--json").stdout)
    assert card["declared"]["contract_version"] == shown


@pytest.mark.parametrize(
    "how",
    [
        "does not start",
        "is not installed",
        # Imports torch itself, by each command.
        pytest.param("meets a broken backend", marks=pytest.mark.slow),
    ],
)
def test_show_and_check_say_that_torch_is_broken(cli, site, how):
    environ = {}
    if how == "does not start":
        (site / "torch.py").write_text("raise OSError('libc10.so: cannot open shared object file')")
        told = "OSError: libc10.so: cannot open shared object file. Every backend"
    elif how == "is not installed":
        # As an import finds it where there is none.
        (site / "torch.py").write_text(
            "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')"
        )
        told = "ModuleNotFoundError: No module named 'torch'. Every backend"
    else:
        environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "1"
        told = "Concerned: malformed-wt. Every backend that needs torch is affected. Repair"
    done = cli("plugins", "show", "acme", "--json", **environ)
    (card,) = json.loads(done.stdout)
    assert (done.returncode, card["usable"]) == (1, False)
    text = "The weight transfer engine 'acme' (acme-wt 1.0) cannot be loaded: `import torch` itself"
    assert card["error"]["message"].startswith(text)
    assert told in card["error"]["message"]
    done = cli("plugins", "check", "acme", **environ)
    assert done.returncode == 1
    assert f"PluginBrokenError: {text}" in done.stdout
    assert told in done.stdout
    # Listing looks at nothing but metadata.
    listed = cli("plugins", "list", **environ)
    assert listed.returncode == 0
    assert ["acme", "acme-wt", "1.0", "discovered", "found"] in [
        line.split()[1:] for line in listed.stdout.splitlines()
    ]


@pytest.mark.parametrize("name", ["OffloadingConnector", "wtransfer:file"])
def test_show_says_of_every_kind_that_torch_is_broken(cli, site, name):
    (site / "torch.py").write_text("raise OSError('libc10.so')")
    done = cli("plugins", "show", name, "--json")
    assert done.returncode == 1
    for card in json.loads(done.stdout):
        assert "`import torch` itself fails: OSError: libc10.so." in card["error"]["message"]


def test_show_of_a_broken_backend_prints_the_whole_error(cli):
    done = cli("plugins", "show", "bad")
    assert done.returncode == 1
    assert "PluginBrokenError: The weight transfer engine 'bad' (acme-wt 1.0) cannot be" in (
        done.stdout
    )
    assert "ZeroDivisionError: division by zero" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert (
        'acme_bad.py", line 1, in <module>' in cli("plugins", "show", "bad", "--traceback").stdout
    )


@pytest.mark.parametrize(
    ("trainer_cls", "info", "error"),
    [
        ('"acme_engine:Twinn"', "Info", "has no attribute 'Twinn'"),
        ("None", "Info", "has no trainer side: set trainer_cls in Engine"),
        ('"acme_engine:Twin"', "None", "Engine.init_info_cls is no class"),
    ],
)
def test_engine_without_its_other_half_is_not_usable(cli, site, trainer_cls, info, error):
    module = site / "acme_engine.py"
    text = module.read_text().replace('"acme_engine:Twin"', trainer_cls)
    module.write_text(text.replace("update_info_cls = Info", f"update_info_cls = {info}"))
    done = cli("plugins", "show", "acme")
    assert done.returncode == 1
    assert error in done.stdout


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("twice", "PluginAmbiguousError"),
        pytest.param(
            "wtransfer-nccl:nccl",
            "PluginNotInstalledError",
            marks=pytest.mark.skipif(
                importlib.util.find_spec("wtransfer_nccl") is not None,
                reason="wtransfer-nccl is installed",
            ),
        ),
        ("nonsense", "UnknownBackendError"),
    ],
)
def test_show_of_a_name_that_cannot_be_resolved(cli, name, error):
    done = cli("plugins", "show", name, "--kind", "engines", "--json")
    assert done.returncode == 1
    (card,) = json.loads(done.stdout)
    assert (card["usable"], card["error"]["class"]) == (False, error)


def test_show_of_a_name_unknown_to_every_kind_prints_one_error(cli):
    done = cli("plugins", "show", "acmee", "--json")
    assert done.returncode == 1
    (card,) = json.loads(done.stdout)
    assert "No backend has the name 'acmee'. Did you mean 'acme'?" in card["error"]["message"]


@pytest.mark.slow  # imports torch ten times
def test_check_exits_with_what_it_found(cli, site):
    assert cli("plugins", "check", "acme").returncode == 0
    assert cli("plugins", "check", "acmee").returncode == 2
    assert cli("plugins", "check", WTRANSFER_PIN="nonsense").returncode == 2
    # Found, and not by that name alone.
    assert cli("plugins", "check", "acme-wt:twice").returncode == 1
    # All but two: each engine is loaded in a process of its own, and most import torch.
    block = "other-wt,acme-wt,wtransfer-nccl,wtransfer:gloo"
    done = cli("plugins", "check", "--kind", "engines", WTRANSFER_PLUGINS_BLOCK=block)
    lines = [line.split(maxsplit=4) for line in done.stdout.splitlines()]
    blocked = "blocked: WTRANSFER_PLUGINS_BLOCK names 'acme-wt'; remove it there to use it"
    assert ["engines", "bad", "acme-wt", "1.0", blocked] in lines
    assert "warning: malformed-wt: its entry points cannot be read" in done.stderr
    assert done.returncode == 1
    (site / "malformed_wt-1.0.dist-info" / "entry_points.txt").unlink()
    # A list that many hosts have may name what is installed on others.
    block += ",wtransfer:file,acme-wtt"
    done = cli("plugins", "check", "--kind", "engines", WTRANSFER_PLUGINS_BLOCK=block)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.startswith("warning: WTRANSFER_PLUGINS_BLOCK: 'acme-wtt' has no effect")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", [["list"], ["why", "acme"]])
def test_misspelt_settings_are_warned_of(cli, command):
    done = cli("plugins", *command, WTRANSFER_PLUGINS_BLOCK="acme-wtt,other-wt:twice")
    assert done.returncode == 0
    warnings = [line for line in done.stderr.splitlines() if "WTRANSFER_" in line]
    assert warnings == [
        (
            "warning: WTRANSFER_PLUGINS_BLOCK: 'acme-wtt' has no effect: that distribution has no "
            "backend here; did you mean 'acme-wt'?"
        )
    ]


@pytest.mark.usefixtures("light_torch")
def test_show_as_json_is_json_whatever_a_plugin_prints(site, cli):
    noisy = "import os\nprint('[1]')\nos.write(1, b'[2]')\n"
    (site / "acme_engine.py").write_text(noisy + ENGINE)
    done = cli("plugins", "show", "acme", "--json")
    assert json.loads(done.stdout)[0]["usable"] is True
    assert ("[1]" in done.stderr, "[2]" in done.stderr) == (True, True)


@pytest.mark.usefixtures("light_torch")
def test_check_prints_each_backend_as_soon_as_it_is_loaded(site, clean):
    go_on = site / "go on"
    os.mkfifo(go_on)
    (site / "acme_engine.py").write_text(f"open({str(go_on)!r}).read()\n{ENGINE}")
    command = [sys.executable, "-m", "wtransfer", "plugins", "check", "--kind", "engines"]
    clean["WTRANSFER_PLUGINS_BLOCK"] = "other-wt,acme-wt:twice"
    with subprocess.Popen(command, env=clean, stdout=subprocess.PIPE, text=True) as check:
        names = [check.stdout.readline().split()[1] for _ in range(4)]
        assert names == ["name", "file", "gloo", "shm"]
        go_on.write_text("")
        assert check.stdout.read().split()[1] == "acme"


@pytest.mark.usefixtures("light_torch")
def test_check_hears_a_backend_whatever_its_import_prints_or_starts(site, cli):
    left = site / "left"
    noisy = f"""
import subprocess, sys
sys.stdout.write("no end of line")
started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(left)!r}, "a").write(f"{{started.pid}} ")
"""
    (site / "acme_engine.py").write_text(noisy + ENGINE)
    try:
        done = cli("plugins", "check", "acme", "--kind", "engines", "--json")
        (card,) = json.loads(done.stdout)["plugins"]
        assert card["usable"] is True, card
    finally:
        for pid in left.read_text().split():
            os.kill(int(pid), signal.SIGKILL)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("shm", "two or more lower-case words"),
        ("path", "two or more lower-case words"),
        ("true", "two or more lower-case words"),
        ("acme-", "two or more lower-case words"),
        ("Acme-Box", "two or more lower-case words"),
        ("acme-engine", "there is a module acme_engine already"),
    ],
)
@pytest.mark.parametrize("kind", ["engine", "tier"])
def test_new_refuses_names_that_cannot_work(cli, tmp_path, kind, name, error):
    done = cli("plugins", "new", kind, name, "--folder", str(tmp_path / "new"))
    assert done.returncode == 2
    assert error in done.stderr
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("name", "environ", "last"),
    [
        ("ACME", {}, "used: 'acme' (acme-wt 1.0), acme_engine:Engine"),
        ("other-wt:twice", {}, "used: 'twice' (other-wt 1.0), acme_engine:Engine"),
        ("twice", {}, "PluginAmbiguousError: The weight transfer engine 'twice' is offered by"),
        ("twice", {"WTRANSFER_PIN": "engines:twice=other-wt"}, "used: 'twice' (other-wt 1.0)"),
        ("acme", {"WTRANSFER_PLUGINS": "other-wt"}, "PluginBlockedError: "),
        ("acmee", {}, "UnknownBackendError: "),
    ],
)
def test_why_explains_and_imports_nothing(cli, name, environ, last):
    done = cli("plugins", "why", name, "--kind", "engines", **environ)
    assert done.returncode == (name == "acmee"), done.stderr
    assert done.stdout.splitlines()[-1].strip().startswith(last)


CALL = "from wtransfer.cli import main; main({}, standalone_mode=False)"


@pytest.mark.parametrize(
    ("code", "unwanted"),
    [
        (CALL.format("['--help']"), {"wtransfer.commands", "torch", "pluggy"}),
        (CALL.format("['push', '--help']"), {"torch", "numpy", "rich", "httpx", "pluggy"}),
        (CALL.format("['plugins', 'list']"), {"torch", "numpy", "rich", "pluggy", "acme_engine"}),
        (CALL.format("['plugins', 'why', 'acme']"), {"torch", "numpy", "pluggy", "acme_engine"}),
        ("import wtransfer", {"torch", "pluggy", "click"}),
        ("from wtransfer import WeightTransferEngine, hookimpl", {"torch"}),
        ("from wtransfer import WeightTransferEngineFactory", {"torch", "pluggy"}),
    ],
)
def test_only_what_is_needed_is_imported(python, code, unwanted):
    shown = f"print(sorted({unwanted!r} & set(sys.modules)))"
    done = python("-c", f"import sys; {code}; {shown}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


LIST = """
import sys
# The event "import" is that of statements alone: the code of every module is executed.
run = []
sys.addaudithook(lambda event, args: run.append(args[0]) if event == "exec" else None)
from wtransfer.cli import main
try:
    main(["plugins", *sys.argv[1:], "--json"], standalone_mode=False)
except SystemExit:
    pass
names = [each.co_filename.rpartition("/")[2] for each in run]
print([each for each in names if each.endswith("_of_many.py")], file=sys.stderr)
"""


def test_listing_many_distributions_imports_none(python, site):
    words = ("engines", "connectors", "specs")
    for number in range(300):
        info = site / f"one_{number}-1.0.dist-info"
        info.mkdir()
        header = f"Metadata-Version: 2.1\nName: one-{number}\nVersion: 1.0\n"
        (info / "METADATA").write_text(header)
        if number < 50:
            entry = f"one-{number} = one_{number}_of_many:Backend"
            group = f"wtransfer.{words[number % 3]}"
            (info / "entry_points.txt").write_text(f"[{group}]\n{entry}\n")
            (site / f"one_{number}_of_many.py").write_text("class Backend: ...")
    done = python("-c", LIST, "list")
    listed = {row["name"] for row in json.loads(done.stdout)["plugins"]}
    assert {f"one-{number}" for number in range(50)} <= listed
    assert done.stderr.splitlines()[-1] == "[]"
    # The hook sees an import where there is one.
    seen = python("-c", LIST, "show", "one-0", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert seen.stderr.splitlines()[-1] == "['one_0_of_many.py']"


WITHOUT = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"pytest", "_pytest", "starlette", "uvicorn", "h11", "httpx"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Finder())
import click
import wtransfer
from wtransfer.cli import main
from wtransfer.errors import PluginNotInstalledError

for name in wtransfer.__all__:
    try:
        getattr(wtransfer, name)
    except PluginNotInstalledError as error:
        assert 'pip install "wtransfer[server]"' in str(error)
        print("needs the server:", name)

def visit(command, words):
    try:
        main([*words, "--help"], standalone_mode=False)
    except SystemExit as ended:
        assert not ended.code, words
    print("visited", *words)
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            visit(command.get_command(click.Context(command), name), [*words, name])

visit(main, [])
"""


def test_names_and_help_need_no_extra(python):
    done = python("-c", WITHOUT)
    assert done.returncode == 0, done.stderr
    needing = [line for line in done.stdout.splitlines() if line.startswith("needs")]
    assert needing == ["needs the server: WorkerServer"]
    visited = {line for line in done.stdout.splitlines() if line.startswith("visited")}
    assert {"visited push", "visited worker", "visited plugins check"} <= visited


def test_installing_pulls_no_web_server_and_no_pytest():
    required = {
        Requirement(line).name
        for line in metadata.requires("wtransfer")
        if Requirement(line).marker is None or Requirement(line).marker.evaluate({"extra": ""})
    }
    assert {"torch", "pluggy", "click"} <= required
    assert required & {"pytest", "starlette", "uvicorn", "h11", "httpx", "requests"} == set()


def test_version_is_the_distributions(python):
    done = python("-m", "wtransfer", "--version")
    code = "import wtransfer; print(wtransfer.__version__)"
    assert done.stdout.strip().endswith(python("-c", code).stdout.strip())
    assert done.returncode == 0


HOST = """
def describe(kind, name, options):
    return {"argument": f"--{kind} {name} {options}"}
"""


@pytest.mark.usefixtures("light_torch")
def test_show_prints_what_each_serving_engine_says_also_if_one_fails(cli, site):
    info = site / "some_host-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-host\nVersion: 2.0\n")
    entries = "some = some_host:describe\nbroken = some_host:nothing_of_the_kind"
    (info / "entry_points.txt").write_text(f"[wtransfer.hosts]\n{entries}\n")
    (site / "some_host.py").write_text(HOST)
    (card,) = json.loads(cli("plugins", "show", "SharedStorageConnector", "--json").stdout)
    options = "{'shared_storage_path': '/mnt/kv'}"
    told = {"argument": f"--connectors SharedStorageConnector {options}"}
    assert card["hosts"]["some"] == told
    assert card["hosts"]["broken"]["error"].startswith("AttributeError")
    shown = cli("plugins", "show", "SharedStorageConnector")
    assert shown.returncode == 0, shown.stderr
    lines = [line.split(maxsplit=2) for line in shown.stdout.splitlines()]
    assert ["some:", "argument", told["argument"]] in lines
    # Its group is one of ours.
    listed = cli("plugins", "list")
    assert "some-host" not in listed.stdout + listed.stderr
    # An engine without options of its own.
    assert "--engines acme {}" in cli("plugins", "show", "acme").stdout


@pytest.mark.slow
def test_show_lists_options(cli):
    def shown(name):
        done = cli("plugins", "show", name, "--json")
        (card,) = json.loads(done.stdout)
        return {each["name"]: each for each in card["options"]}

    def options(kind, name):
        # As `show` reads them, which imports torch anew each time.
        cls = registry(kind).get(name)
        return {each["name"]: each for each in options_of(cls.options_cls)}

    assert options("specs", "CPUOffloadingSpec")["cpu_bytes_to_use"] == {
        "name": "cpu_bytes_to_use",
        "type": "int",
        "default": None,
        "help": "Host memory for all ranks of the instance together, headers included.",
    }
    of_two = shown("SharedStorageConnector")
    assert of_two["shared_storage_path"]["default"] is None
    assert (of_two["write_back"]["type"], of_two["write_back"]["default"]) == ("bool", "False")
    assert shown("gloo")["packed_buffer_size_bytes"]["default"] == "16 << 20"
    assert shown("acme") == {}
    assert "lease_s" in options("connectors", "ProcessGroupConnector")
