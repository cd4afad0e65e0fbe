"""Numbers of specs, as Prometheus reads them."""

from __future__ import annotations

import logging
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from wtransfer.kv.keys import make_offload_key
from wtransfer.metrics import OffloadingCollector
from wtransfer.specs.arena_manager import CPUOffloadingManager
from wtransfer.specs.interface import ReqContext

KEYS = [make_offload_key(bytes([number]) * 8) for number in range(4)]


def source(**numbers):
    return SimpleNamespace(get_stats=lambda: numbers)


def read(collector):
    """Return what a server of Prometheus would read: (name, labels) -> number."""
    registry = CollectorRegistry(auto_describe=True)
    registry.register(collector)
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    return {
        (sample.name, *sorted(sample.labels.items())): (sample.value, family.type)
        for family in families
        for sample in family.samples
    }


def test_a_managers_numbers_are_read_as_they_are_now():
    manager, ctx = CPUOffloadingManager(2), ReqContext("one")
    collector = OffloadingCollector()
    collector.watch(manager, "manager", engine_id="e")
    prefix, label = "wtransfer_offloading_manager", ("engine_id", "e")
    assert read(collector)[f"{prefix}_stores_total", label] == (0, "counter")
    for keys in (KEYS[:2], KEYS[2:]):
        manager.prepare_store(keys, ctx)
        manager.complete_store(keys, ctx)
    found = read(collector)
    assert found[f"{prefix}_stores_total", label] == (4, "counter")
    assert found[f"{prefix}_evictions_total", label] == (2, "counter")
    assert found[f"{prefix}_blocks_idle", label] == (2, "gauge")
    assert len(found) == len(manager.get_stats())


def test_several_ranks_stand_under_one_name():
    collector = OffloadingCollector()
    collector.watch(source(bytes_total=7), "worker", rank="0")
    collector.watch(source(bytes_total=8), "worker", rank="1", host="h")
    assert read(collector) == {
        ("wtransfer_offloading_worker_bytes_total", ("host", ""), ("rank", "0")): (7, "counter"),
        ("wtransfer_offloading_worker_bytes_total", ("host", "h"), ("rank", "1")): (8, "counter"),
    }


def test_values_that_are_no_numbers_are_left_out_and_names_are_made_valid():
    collector = OffloadingCollector()
    numbers = {"a.b-c": 1, "open": True, "name": "x", "nothing": None, "nan": float("nan")}
    collector.watch(source(**numbers), "worker")
    assert read(collector) == {
        ("wtransfer_offloading_worker_a_b_c",): (1, "gauge"),
        ("wtransfer_offloading_worker_open",): (1, "gauge"),
    }


def test_one_that_fails_does_not_take_the_others_with_it(caplog):
    def fail():
        raise RuntimeError("closed")

    collector = OffloadingCollector()
    collector.watch(SimpleNamespace(get_stats=fail), "manager")
    collector.watch(source(jobs=1), "worker")
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            assert read(collector) == {("wtransfer_offloading_worker_jobs",): (1, "gauge")}
    assert len(caplog.records) == 1


def test_a_name_that_is_no_text_does_not_take_the_others_with_it(caplog):
    collector = OffloadingCollector()
    collector.watch(SimpleNamespace(get_stats=lambda: {1: 2}), "manager")
    collector.watch(source(jobs=1), "worker")
    with caplog.at_level(logging.ERROR):
        assert read(collector) == {("wtransfer_offloading_worker_jobs",): (1, "gauge")}
    assert len(caplog.records) == 1


def test_numbers_of_numpy_are_numbers():
    collector = OffloadingCollector()
    collector.watch(source(n=np.int64(3), f=np.float32(1.5), nan=np.float32("nan")), "worker")
    assert read(collector) == {
        ("wtransfer_offloading_worker_n",): (3, "gauge"),
        ("wtransfer_offloading_worker_f",): (1.5, "gauge"),
    }


def test_forgotten_source_is_collected_no_more():
    collector = OffloadingCollector()
    kept, gone = source(a=1), source(b=2)
    collector.watch(kept, "worker")
    collector.watch(gone, "worker")
    collector.forget(gone)
    collector.forget(gone)
    assert list(read(collector)) == [("wtransfer_offloading_worker_a",)]


def test_without_prometheus_client_it_says_what_to_install():
    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "from wtransfer.errors import PluginNotInstalledError\n"
        "from wtransfer.metrics import OffloadingCollector\n"
        "try:\n    OffloadingCollector()\n"
        "except PluginNotInstalledError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == (
        'metrics need prometheus-client, which is not installed: pip install "wtransfer[metrics]"'
    )
