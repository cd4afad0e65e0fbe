"""What the plug-in costs each process of a starting vLLM."""

import collections
import json
import os
import re
from pathlib import Path

import pytest
from engines import Engine
from server import Server

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

LIVE = Path(__file__).parent / "live"
SAID = re.compile(
    r"^(?P<pid>\d+) (?P<process>\S+) vllm\.wtransfer_vllm\.plugin wtransfer: "
    r"(?P<kind>weight transfer backends|KV connectors|offloading specs) .*\((?P<ms>[\d.]+) ms\)$",
    re.MULTILINE,
)
LOADED = re.compile(
    r"^(?P<pid>\d+) \S+ vllm\.plugins Available plugins for group vllm\.general_plugins:",
    re.MULTILINE,
)
"""vLLM's own line, when a process is about to load its plug-ins."""


@pytest.fixture
def startup(tmp_path):
    """Where every process of a vLLM notes how it starts, and the environment that lets it.

    A file, for vLLM keeps to itself what some of its processes write to their standard error.
    """
    log = tmp_path / "startup.log"
    noted = {"handlers": ["file"], "level": "DEBUG", "propagate": False}
    config = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"format": "%(process)d %(processName)s %(name)s %(message)s"}},
        "handlers": {
            "file": {"class": "logging.FileHandler", "filename": str(log), "formatter": "line"}
        },
        "loggers": {"vllm.plugins": noted, "vllm.wtransfer_vllm.plugin": noted},
    }
    settings = tmp_path / "logging.json"
    settings.write_text(json.dumps(config))
    path = os.pathsep.join([str(LIVE), str(LIVE / "startup")])
    return log, {"VLLM_LOGGING_CONFIG_PATH": str(settings), "PYTHONPATH": path}


def check_costs(log, num_processes, record_property):
    text = log.read_text()
    loaded = collections.Counter(found["pid"] for found in LOADED.finditer(text))
    said = [found.groupdict() for found in SAID.finditer(text)]
    # Every process that loads plug-ins has loaded ours, and has entered each kind once: engines at
    # once, the others where vLLM imports their factories.
    assert {each["pid"] for each in said if each["kind"].startswith("weight")} == loaded.keys()
    assert len({(each["pid"], each["kind"]) for each in said}) == len(said)
    assert set(loaded.values()) == {1}
    assert len(loaded) >= num_processes, text
    costs = [(each["process"], float(each["ms"])) for each in said]
    record_property("registered_in_ms", costs)
    print("registered in", ", ".join(f"{name}: {ms} ms" for name, ms in costs))  # noqa: T201


def test_each_of_an_engines_processes_registers_once(models, startup, tmp_path, record_property):
    log, env = startup
    engine = Engine(
        tmp_path,
        processes=3,
        env=env,
        model=str(models / "A"),
        weight_transfer_config={"backend": "shm"},
    )
    engine.wait_started()
    engine.close()
    check_costs(log, 3, record_property)


@pytest.mark.nightly
def test_each_of_a_servers_processes_registers_once(models, startup, tmp_path, record_property):
    log, env = startup
    Server(tmp_path, models / "A", "shm", env).close()
    check_costs(log, 3, record_property)
