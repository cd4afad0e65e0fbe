"""How each process of a vLLM starts: which plug-ins it loads, and what ours costs there."""

from __future__ import annotations

import collections
import json
import os
import re
from pathlib import Path

from engines import python_path

STARTUP = Path(__file__).with_name("startup")
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


def noted(folder):
    """Return where every process of a vLLM notes how it starts, and the environment for that.

    A file, for vLLM keeps to itself what some of its processes write to their standard error.
    """
    log = folder / "startup.log"
    level = {"handlers": ["file"], "level": "DEBUG", "propagate": False}
    config = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"format": "%(process)d %(processName)s %(name)s %(message)s"}},
        "handlers": {
            "file": {"class": "logging.FileHandler", "filename": str(log), "formatter": "line"}
        },
        "loggers": {"vllm.plugins": level, "vllm.wtransfer_vllm.plugin": level},
    }
    settings = folder / "logging.json"
    settings.write_text(json.dumps(config))
    path = os.pathsep.join([str(STARTUP), python_path()])
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
