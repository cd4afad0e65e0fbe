"""MultiConnector: the first hit loads, all save, and no sub-connector disturbs another."""

from __future__ import annotations

import copy
import logging
import sys
from dataclasses import dataclass
from types import ModuleType

import pytest

from wtransfer import (
    KVCacheConfig,
    KVConnectorFactory,
    KVConnectorRole,
    KVTransferConfig,
    ServingConfig,
)
from wtransfer.connectors.interface import (
    SCHEDULER_METHODS,
    WORKER_METHODS,
    KVBlocks,
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorWorkerMetadata,
    KVEvent,
)
from wtransfer.errors import ConnectorOptionError, UnknownBackendError
from wtransfer.specs.interface import Medium
from wtransfer.testing.mini_engine.contract import KVCacheBlocks as Blocks
from wtransfer.testing.mini_engine.contract import Request, SchedulerOutput

SCHEDULER, WORKER = KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER
PROMPT = list(range(30))
REQUEST = Request("r", PROMPT, 1)


@dataclass
class Metadata(KVConnectorMetadata):
    name: str


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    names: list

    def aggregate(self, other):
        return WorkerMetadata(self.names + other.names)


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    name: str


ANSWERS = {
    "get_num_new_matched_tokens": (0, False),
    "request_finished": (False, None),
    "has_pending_block_frees": False,
    "has_pending_push_work": False,
    "take_events": (),
    "get_finished": (None, None),
    "get_block_ids_with_load_errors": (),
    "get_stats": {"calls_total": 1},
}
"""What a method returns where a test does not say it; None: all others."""
OWN = {"bind_connector_metadata", "clear_connector_metadata", "has_connector_metadata"}
SCRIPTED = (SCHEDULER_METHODS | WORKER_METHODS | {"get_stats", "shutdown"}) - OWN


def _scripted(method):
    def call(self, *args, **kwargs):
        self.calls.append((method, *copy.deepcopy(args), *([kwargs] if kwargs else [])))
        default = Metadata(self.name) if method == "build_connector_meta" else ANSWERS.get(method)
        answered = self.answers.get(method, default)
        if isinstance(answered, str) and answered.startswith("raise"):
            raise RuntimeError(f"{self.name} {answered}")
        if method == "update_connector_output":
            for each in vars(args[0]).values():
                if isinstance(each, set):
                    each.clear()
        return answered

    return call


class Scripted(KVConnectorBase_V1):
    """A third party's: its options say what each method returns, or that it raises."""

    vars().update({method: _scripted(method) for method in SCRIPTED})

    def __init__(self, vllm_config, role, kv_cache_config=None):
        super().__init__(vllm_config, role, kv_cache_config)
        self.answers = dict(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self.name = self.answers["name"]
        self.names_weights = self.answers.get("names_weights", True)
        self.requires_kv_delivery = self.answers.get("delivers", False)
        self.calls = []

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config):
        return vllm_config.kv_transfer_config.kv_connector_extra_config.get("layout")

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config):
        return extra_config.get("piecewise", False)

    def heard(self, method):
        """Return with what a method was called, each time."""
        return [args for name, *args in self.calls if name == method]


@pytest.fixture(autouse=True)
def module(monkeypatch):
    """The class above under a path that a configuration can name."""
    made = ModuleType("third_party_connectors")
    made.Scripted = Scripted
    monkeypatch.setitem(sys.modules, made.__name__, made)


def transfer_config(role="kv_both", **options):
    return KVTransferConfig("MultiConnector", "engine", role, kv_connector_extra_config=options)


def scripted(name, **answers):
    return {
        "kv_connector": "Scripted",
        "kv_connector_module_path": "third_party_connectors",
        "kv_connector_extra_config": {"name": name, **answers},
    }


def multi(*described):
    return {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": described},
    }


def scripted_with(method, *answers):
    """Describe sub-connectors ``a``, ``b``, ... that answer a method each in its way."""
    return [scripted(name, **{method: each}) for name, each in zip("abc", answers, strict=False)]


def serving(*described, **more):
    transfer = transfer_config(connectors=list(described), **more)
    return ServingConfig(kv_transfer_config=transfer, cache_config=KVCacheConfig(block_size=4))


def make(role, *described):
    """Return one side of a MultiConnector, and its sub-connectors."""
    made = KVConnectorFactory.create_connector(serving(*described), role, "cache config")
    return made, *made.side.sub_connectors


def storage(path):
    extra = {"shared_storage_path": str(path)}
    return {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": extra}


def test_tier_in_memory_keeps_no_block_that_storage_failed_to_load(host, tmp_path):
    tier = {"spec_name": "CPUOffloadingSpec", "cpu_bytes_to_use": 1 << 22}
    offloading = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": tier}
    host("SharedStorageConnector", shared_storage_path=str(tmp_path)).serve(PROMPT)
    for each in tmp_path.glob("*/blocks/*"):
        each.write_bytes(b"")
    second = host("MultiConnector", connectors=[storage(tmp_path), offloading])
    served = second.serve(PROMPT + PROMPT, 2)
    assert (served.matched, served.loaded, served.failures) == (7, 0, 1)
    # From the tier alone.
    for each in tmp_path.glob("*/blocks/*"):
        each.unlink()
    assert second.serve(PROMPT + PROMPT, 2).loaded == 14


# -- configuration


def test_sub_connector_inherits_configuration_except_module_and_options():
    own = {**scripted("b"), "engine_id": "other", "kv_role": "kv_consumer"}
    config = serving(scripted("a"), own, role="kv_producer")
    made = KVConnectorFactory.create_connector(config, WORKER, "cache config")
    first, second = made.side.sub_connectors
    fields = [
        (each.kv_connector, each.engine_id, each.kv_role, each.kv_connector_module_path)
        for each in (first.config.kv_transfer_config, second.config.kv_transfer_config)
    ]
    assert fields == [
        ("Scripted", "engine", "kv_producer", "third_party_connectors"),
        ("Scripted", "other", "kv_consumer", "third_party_connectors"),
    ]
    assert first.config.kv_transfer_config.kv_connector_extra_config == {"name": "a"}
    assert (first.role, first.kv_cache_config) == (WORKER, "cache config")
    assert first.config.cache_config is config.cache_config


def test_configuration_of_a_foreign_class_is_copied_and_left_as_it_is():
    class Theirs:
        kv_transfer_config = transfer_config(connectors=[scripted("a")])
        something = "else"

    config = Theirs()
    made = KVConnectorFactory.create_connector(config, WORKER)
    (sub_connector,) = made.side.sub_connectors
    assert sub_connector.config.kv_transfer_config.kv_connector == "Scripted"
    assert (sub_connector.config.something, type(sub_connector.config)) == ("else", Theirs)
    assert config.kv_transfer_config.kv_connector == "MultiConnector"


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({}, "missing required field `connectors`; the options are connectors"),
        ({"connectors": []}, r"length >= 1 - at `\$.connectors`"),
        ({"connectors": {"kv_connector": "x"}}, "Expected `array`"),
        ({"connectors": ["x"]}, r"Expected `object`, got `str` - at `\$.connectors\[0\]`"),
        ({"connectors": [{}]}, r"required field `kv_connector` - at `\$.connectors\[0\]`"),
        ({"connectors": [{"kv_connector": ""}]}, r"length >= 1 - at .*\[0\].kv_connector"),
        ({"connectors": [{"kv_connector": "x", "kv_rol": 1}]}, r"\[0\] \(x\): .*'kv_rol'.*; the"),
        ({"connectors": [{"kv_connector": "x"}], "max": 1}, "unknown field `max`; the options are"),
    ],
)
def test_malformed_options_are_refused(extra, text):
    config = ServingConfig(kv_transfer_config=transfer_config(**extra))
    with pytest.raises(ConnectorOptionError, match=text):
        KVConnectorFactory.create_connector(config, WORKER)


def test_sub_connectors_are_shut_down_if_a_later_one_cannot_be_made(
    tmp_path, weights, leaves_nothing
):
    config = serving(storage(tmp_path), {"kv_connector": "NoSuchConnector"})
    with pytest.raises(UnknownBackendError, match="NoSuchConnector"):
        KVConnectorFactory.create_connector(config, WORKER)


def test_sub_connector_that_does_not_name_weights_is_fenced():
    made, first, second = make(SCHEDULER, scripted("a"), scripted("b", names_weights=False))
    assert made.names_weights is first.names_weights is second.names_weights is True
    plain, fenced = made.build_connector_meta(SchedulerOutput()).metadata
    assert (plain, fenced.inner) == (Metadata("a"), Metadata("b"))


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([{}, {}], (False, None, False)),
        ([{}, {"piecewise": True, "layout": "HND", "delivers": True}], (True, "HND", True)),
        ([{"layout": "HND"}, {"layout": "HND"}], (False, "HND", False)),
    ],
)
def test_requirement_of_any_sub_connector_is_required_of_the_host(answers, expected):
    described = [scripted(name, **each) for name, each in zip("ab", answers, strict=True)]
    # The same through a nested one.
    for config in (serving(*described), serving(multi(*described))):
        transfer = config.kv_transfer_config
        cls = KVConnectorFactory.get_connector_class(transfer)
        made = KVConnectorFactory.create_connector(config, SCHEDULER)
        assert expected == (
            cls.requires_piecewise_for_cudagraph(transfer.kv_connector_extra_config),
            cls.get_required_kvcache_layout(config),
            made.requires_kv_delivery,
        )


def test_different_cache_layouts_are_refused():
    config = serving(scripted("a", layout="HND"), scripted("b", layout="NHD"))
    cls = KVConnectorFactory.get_connector_class(config.kv_transfer_config)
    with pytest.raises(ConnectorOptionError, match=r"\['HND', 'NHD'\]; they must agree"):
        cls.get_required_kvcache_layout(config)


# -- look-ups


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([(0, False), (8, True)], (8, True)),
        ([(4, False), (8, True)], (4, False)),
        ([(4, False), (None, False)], (4, False)),
        ([(None, False), (8, False)], (None, False)),
        ([(0, False), (None, True)], (None, False)),
        ([(0, True), (0, False)], (0, False)),
        (["raise", (8, False)], (8, False)),
        ([(8, False), "raise"], (8, False)),
        ([(1,), (8, False)], (8, False)),
        ([("x", False), (8, False)], (8, False)),
        (["raise", "raise"], (0, False)),
    ],
)
def test_first_hit_is_the_answer_and_all_are_asked(answers, expected):
    made, *subs = make(SCHEDULER, *scripted_with("get_num_new_matched_tokens", *answers))
    assert made.get_num_new_matched_tokens(REQUEST, 4) == expected
    assert [len(each.heard("get_num_new_matched_tokens")) for each in subs] == [1, 1]


def test_only_the_last_hit_loads():
    hit, miss = (8, False), (0, False)
    made, *subs = make(SCHEDULER, *scripted_with("get_num_new_matched_tokens", hit, hit, hit))
    made.get_num_new_matched_tokens(REQUEST, 0)
    subs[0].answers["get_num_new_matched_tokens"] = miss
    made.get_num_new_matched_tokens(REQUEST, 0)
    made.update_state_after_alloc(REQUEST, Blocks(([1, 2],)), 8)
    # The host has found the blocks elsewhere, or gives the others to a request that is loaded.
    made.update_state_after_alloc(REQUEST, Blocks(([1, 2],)), 0)
    heard = [[args[-1] for args in each.heard("update_state_after_alloc")] for each in subs]
    assert heard == [[0, 0], [8, 0], [0, 0]]


def test_failed_query_is_logged_once_and_counted(caplog):
    made, *_ = make(SCHEDULER, *scripted_with("get_num_new_matched_tokens", "raise"))
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert made.get_num_new_matched_tokens(REQUEST, 0) == (0, False)
    assert len(caplog.records) == 1
    assert "0_Scripted has failed; taken as an empty answer" in caplog.text
    assert made.get_stats() == {"0_Scripted_unanswered_total": 3, "0_Scripted_calls_total": 1}


def test_failed_statistics_do_not_hide_those_of_others():
    made, _, second = make(SCHEDULER, *scripted_with("get_stats", "raise", {"calls_total": 2}))
    expected = {"0_Scripted_unanswered_total": 1, "1_Scripted_calls_total": 2}
    assert made.get_stats() == expected
    assert second.heard("get_stats") == [[]]


# -- calls to all

TO_ALL = {
    SCHEDULER: {
        "on_new_request": (REQUEST,),
        "update_state_after_alloc": (REQUEST, Blocks(([1],)), 0),
        "build_connector_meta": (SchedulerOutput(),),
        "update_connector_output": (KVConnectorOutput(),),
        "request_finished": (REQUEST, [1]),
        "reset_cache": (),
        "shutdown": (),
    },
    WORKER: {
        "register_kv_caches": ({},),
        "start_load_kv": ("context",),
        "wait_for_layer_load": ("layer",),
        "save_kv_layer": ("layer", "cache", "attention"),
        "wait_for_save": (),
        "get_finished": ({"r"},),
        "get_block_ids_with_load_errors": (),
        "get_handshake_metadata": (),
        "shutdown": (),
    },
}


def bind(worker, *described):
    """Begin a step with the metadata of a scheduler's side, and return them."""
    metadata = make(SCHEDULER, *described)[0].build_connector_meta(SchedulerOutput())
    worker.handle_preemptions(metadata)
    worker.bind_connector_metadata(metadata)
    return metadata


@pytest.mark.parametrize(
    ("role", "method"), [(role, name) for role, names in TO_ALL.items() for name in names]
)
def test_error_is_raised_after_all_were_called(role, method):
    made, *subs = make(role, *scripted_with(method, "raise first", "raise second"), scripted("c"))
    if role is WORKER:
        bind(made, *(scripted(name) for name in "abc"))
    with pytest.raises(RuntimeError, match="a raise first"):
        getattr(made, method)(*TO_ALL[role][method])
    assert [len(each.heard(method)) for each in subs] == [1, 1, 1]


def test_each_sub_connector_gets_its_own_metadata():
    described = [scripted(name) for name in "abc"]
    made, *subs = make(WORKER, *described)
    bind(made, *described)
    made.start_load_kv("context", key=1)
    made.save_kv_layer("layer", "cache", "attention", key=2)
    for each in subs:
        assert each.heard("handle_preemptions") == [[Metadata(each.name)]]
        assert each.metadata == Metadata(each.name)
        assert each.heard("start_load_kv") == [["context", {"key": 1}]]
        assert each.heard("save_kv_layer") == [["layer", "cache", "attention", {"key": 2}]]
    made.clear_connector_metadata()
    assert not any(each.has_connector_metadata() for each in (made, *subs))


def test_metadata_for_other_sub_connectors_are_refused():
    worker, _ = make(WORKER, scripted("a"))
    with pytest.raises(ConnectorOptionError, match="has 2 sub-connectors, and this worker's has 1"):
        bind(worker, scripted("a"), scripted("b"))


def test_each_sub_connector_gets_its_own_worker_metadata_and_output():
    method = "build_connector_worker_meta"
    workers = [
        make(WORKER, *scripted_with(method, WorkerMetadata([f"a{rank}"]), None, last))[0]
        for rank, last in enumerate([None, WorkerMetadata(["c1"])])
    ]
    first, second = (each.build_connector_worker_meta() for each in workers)
    output = KVConnectorOutput({"s"}, {"r"}, first.aggregate(second), {1}, {"f"})
    made, *subs = make(SCHEDULER, *(scripted(name) for name in "abc"))
    made.update_connector_output(output)
    # Each clears the sets that it gets.
    expected = [WorkerMetadata(["a0", "a1"]), None, WorkerMetadata(["c1"])]
    for each, metadata in zip(subs, expected, strict=True):
        heard = KVConnectorOutput({"s"}, {"r"}, metadata, {1}, {"f"})
        assert each.heard("update_connector_output") == [[heard]]
    assert (output.finished_sending, output.finished_recving) == ({"s"}, {"r"})
    assert output.kv_connector_worker_meta.metadata[0] == expected[0]


def test_failed_worker_metadata_do_not_hide_those_of_others():
    described = scripted_with("build_connector_worker_meta", "raise", WorkerMetadata(["b"]))
    worker, *_ = make(WORKER, *described)
    assert worker.build_connector_worker_meta().metadata == [None, WorkerMetadata(["b"])]


def test_each_sub_connector_gets_its_own_handshakes():
    handshakes = {
        rank: make(WORKER, *scripted_with("get_handshake_metadata", Handshake(f"a{rank}"), None))[
            0
        ].get_handshake_metadata()
        for rank in range(2)
    }
    made, first, second = make(SCHEDULER, scripted("a"), scripted("b"))
    made.set_xfer_handshake_metadata(handshakes)
    expected = {0: Handshake("a0"), 1: Handshake("a1")}
    assert first.heard("set_xfer_handshake_metadata") == [[expected]]
    assert second.heard("set_xfer_handshake_metadata") == []


def test_nothing_is_reported_where_no_sub_connector_reports():
    worker, *_ = make(WORKER, scripted("a"), scripted("b"))
    assert worker.build_connector_worker_meta() is None
    assert worker.get_handshake_metadata() is None
    assert worker.get_finished(set()) == (None, None)


# -- reports of requests

HOLDS = {"request_finished": (True, None)}
LOADS = {"get_num_new_matched_tokens": (8, True)}
LOADS_IN_STEP = {"get_num_new_matched_tokens": (8, False)}
REPORTS = {"": (None, None), "s": ({"r"}, None), "r": (None, {"r"}), "sr": ({"r"}, {"r"})}


UPDATE = "update_connector_output"


class Pair:
    """Both sides over sub-connectors of the given behaviours; every step has one request, ``r``."""

    def __init__(self, *behaviours):
        described = [scripted(n, **each) for n, each in zip("abc", behaviours, strict=False)]
        self.scheduler, *_ = make(SCHEDULER, *described)
        self.worker, *self.subs = make(WORKER, *described)

    def new(self):
        self.scheduler.on_new_request(REQUEST)

    def load(self):
        num_tokens, _ = self.scheduler.get_num_new_matched_tokens(REQUEST, 0)
        self.scheduler.update_state_after_alloc(REQUEST, Blocks(([1, 2],)), num_tokens)

    def received(self):
        self.scheduler.update_connector_output(KVConnectorOutput(finished_recving={"r"}))

    def finish(self):
        return self.scheduler.request_finished(REQUEST, [1, 2])

    def step(self, events, *reports):
        """Return the report of a step, after events and with reports of the sub-connectors."""
        for event in events.split():
            getattr(self, event)()
        metadata = self.scheduler.build_connector_meta(SchedulerOutput())
        self.worker.bind_connector_metadata(metadata)
        for each, report in zip(self.subs, reports, strict=True):
            each.answers["get_finished"] = REPORTS.get(report, report)
        found = self.worker.get_finished(set())
        self.worker.clear_connector_metadata()
        # Of a load that ends before its request, `received` tells: other ranks may be late.
        sent, got = found
        ended = got if "r" in self.scheduler.side._finished_loading else None
        self.scheduler.update_connector_output(
            KVConnectorOutput(finished_sending=sent, finished_recving=ended)
        )
        return next(name for name, each in REPORTS.items() if each == found)

    def leftovers(self):
        """Return state that is left of requests."""
        return {
            name: each
            for side in (self.scheduler.side, self.worker.side)
            for name, each in vars(side).items()
            if isinstance(each, dict | set) and each
        }


@pytest.mark.parametrize("holders", [[], [0], [2], [0, 2], [0, 1, 2]])
def test_request_is_sent_when_the_last_holder_has_reported_it(holders):
    pair = Pair(*(HOLDS if number in holders else {} for number in range(3)))
    assert pair.step("new", "", "", "") == ""
    assert pair.finish() == (bool(holders), None)
    for number in range(3):
        reports = ["s" if each <= number else "" for each in range(3)]
        expected = "s" if holders and number == holders[-1] else ""
        assert pair.step("", *reports) == expected, number
    assert pair.leftovers() == {}


@pytest.mark.parametrize("holds", [False, True])
def test_request_finished_before_the_report_of_its_load_waits_for_the_other_holder(holds):
    """A host may end a request between a step and the output of that step."""
    pair = Pair(HOLDS if holds else {}, {**LOADS, **HOLDS})
    assert pair.step("new load", "", "r") == "r"
    pair.finish()
    output = KVConnectorOutput(finished_recving={"r"})
    pair.scheduler.update_connector_output(output)
    # The host frees the blocks of what it sees as received: not those that another one holds.
    assert output.finished_recving == (set() if holds else {"r"})
    assert pair.step("", "", "") == ""
    assert pair.step("", "s" if holds else "", "") == ("s" if holds else "")
    assert pair.leftovers() == {}


def test_loader_learns_of_an_end_that_is_reported_as_sent():
    pair = Pair(HOLDS, LOADS)
    steps = ("new load", "", ""), ("finish", "", "r"), ("", "s", "")
    assert [pair.step(*step) for step in steps] == ["", "", "s"]
    heard = [
        [(each.finished_sending, each.finished_recving) for [each] in sub.heard(UPDATE)][-1]
        for sub in pair.scheduler.side.sub_connectors
    ]
    assert heard == [({"r"}, None), ({"r"}, {"r"})]
    assert pair.leftovers() == {}


# Behaviours of two sub-connectors; then steps: events, a report of each, the report that is due.
STORIES = {
    "load is received when its loader reports it": (
        [{}, LOADS],
        [
            ("new load", "r", "", ""),
            ("", "", "r", "r"),
            ("", "", "r", ""),
            ("received finish", "", "", ""),
        ],
    ),
    "report before the end is known counts": (
        [HOLDS, HOLDS],
        [("new", "s", "", ""), ("finish", "", "", ""), ("", "", "s", "s")],
    ),
    "report by one that holds nothing does not count": (
        [HOLDS, {}],
        [("new", "", "s", ""), ("finish", "", "s", ""), ("", "s", "s", "s")],
    ),
    "request given up while it loads is received": (
        [LOADS, {}],
        [("new load finish", "r", "", "r")],
    ),
    "end of a load that is given up may be reported as sent": (
        [{}, LOADS],
        [("new load", "", "", ""), ("finish", "", "s", "r"), ("", "", "sr", "")],
    ),
    "request that ends while it loads is reported once": (
        [{}, {**LOADS, **HOLDS}],
        [
            ("new load", "", "", ""),
            ("finish", "", "", ""),
            ("", "", "r", "r"),
            ("", "", "sr", ""),
        ],
    ),
    "request that ends while it loads waits for the other holder": (
        [HOLDS, LOADS],
        [("new load", "", "", ""), ("finish", "", "r", ""), ("", "s", "", "s")],
    ),
    "request that ends while it loads waits for its loader": (
        [HOLDS, LOADS],
        [("new load", "", "", ""), ("finish", "s", "", ""), ("", "", "r", "s")],
    ),
    "other holder is waited for where this rank has reported the load, but others have not": (
        [HOLDS, {**LOADS, **HOLDS}],
        [("new load", "", "r", "r"), ("finish", "", "", ""), ("", "s", "", "s")],
    ),
    "load that this rank has reported is not reported again": (
        [{}, {**LOADS, **HOLDS}],
        [
            ("new load", "", "r", "r"),
            ("finish", "", "", ""),
            ("received", "", "s", ""),
        ],
    ),
    "request that ends after its load is sent": (
        [HOLDS, LOADS],
        [("new load", "", "r", "r"), ("received finish", "", "", ""), ("", "s", "", "s")],
    ),
    "request that ends after a load within a step is sent": (
        [HOLDS, LOADS_IN_STEP],
        [("new load", "", "", ""), ("finish", "", "", ""), ("", "s", "", "s")],
    ),
    "duplicate report does not end a reused request id": (
        [HOLDS, {}],
        [
            ("new", "", "", ""),
            ("finish", "s", "", "s"),
            ("", "s", "", ""),
            ("new", "", "", ""),
            ("finish", "", "", ""),
            ("", "s", "", "s"),
        ],
    ),
    "early report does not end a reused request id": (
        [{}, HOLDS],
        [
            ("new", "", "s", ""),
            ("new", "", "", ""),
            ("finish", "", "", ""),
            ("", "", "s", "s"),
        ],
    ),
    "early report of a reused request id counts": (
        [HOLDS, {}],
        [
            ("new", "", "", ""),
            ("finish", "s", "", "s"),
            ("new", "s", "", ""),
            ("finish", "", "", "s"),
        ],
    ),
    "early report counts where the request id is reused at once": (
        [HOLDS, {}],
        [
            ("new", "s", "", ""),
            ("finish new", "", "", "s"),
            ("finish", "", "", ""),
            ("", "s", "", "s"),
        ],
    ),
    "request id that is held still may load": (
        [HOLDS, {**LOADS, **HOLDS}],
        [
            ("new", "", "", ""),
            ("finish", "s", "", ""),
            ("new load", "", "", ""),
            ("", "", "s", "s"),
            ("", "", "r", "r"),
            ("received finish", "s", "s", "s"),
        ],
    ),
    "request that ends in the step in which it arrives leaves nothing": (
        [{}, {}],
        [("new finish", "s", "s", ""), ("", "s", "s", "")],
    ),
    "report of an unknown request is dropped": ([{}, {}], [("", "sr", "sr", "")]),
}


@pytest.mark.parametrize("story", STORIES)
def test_reports(story):
    behaviours, steps = STORIES[story]
    pair = Pair(*behaviours)
    for number, (events, *reports, expected) in enumerate(steps):
        assert pair.step(events, *reports) == expected, number
    assert pair.leftovers() == {}


@pytest.mark.parametrize(("events", "report"), [("finish", "s"), ("load", "r")])
def test_report_is_returned_by_the_next_call_if_another_sub_connector_raises(events, report):
    pair = Pair({**HOLDS, **LOADS}, {})
    pair.step("new", "", "")
    with pytest.raises(RuntimeError, match="b raise"):
        pair.step(events, report, "raise")
    assert pair.step("", "", "") == report


def test_load_errors_of_all_are_returned_once_also_after_an_error():
    method = "get_block_ids_with_load_errors"
    worker, *subs = make(WORKER, *scripted_with(method, (1, 2), (2, 3), "raise"))
    with pytest.raises(RuntimeError):
        worker.get_block_ids_with_load_errors()
    for each in subs:
        each.answers[method] = ()
    assert worker.get_block_ids_with_load_errors() == {1, 2, 3}
    assert worker.get_block_ids_with_load_errors() == set()


def test_saves_are_passed_on_although_loads_have_failed():
    """The host calls ``wait_for_save`` after steps that count; loads may fail beside them."""
    worker, *subs = make(WORKER, *scripted_with("get_block_ids_with_load_errors", (1,), ()))
    worker.wait_for_save()
    assert [each.heard("wait_for_save") for each in subs] == [[[]], [[]]]
    assert worker.get_block_ids_with_load_errors() == {1}


# -- merged answers


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([None, None], None),
        ([{"a": 1}, None], {"a": 1}),
        ([None, {"b": 2}], {"b": 2}),
        ([{"a": 1}, {"b": 2}], {"a": 1, "b": 2}),
    ],
)
def test_parameters_for_the_next_instance_are_merged(given, expected):
    made, *_ = make(SCHEDULER, *scripted_with("request_finished", *((False, p) for p in given)))
    assert made.request_finished(REQUEST, []) == (False, expected)


def test_fenced_sub_connectors_return_the_same_weights(weights, caplog):
    described = [
        scripted(name, names_weights=False, request_finished=(False, {name: 1})) for name in "ab"
    ]
    (made, *_), (worker, *_) = (make(role, *described) for role in (SCHEDULER, WORKER))
    made.set_xfer_handshake_metadata({0: worker.get_handshake_metadata()})
    made.get_num_new_matched_tokens(REQUEST, 0)
    expected = {"a": 1, "b": 1, "remote_weights": "A"}
    assert made.request_finished(REQUEST, []) == (False, expected)
    assert caplog.text == ""


def test_first_of_two_that_hand_over_a_request_wins_and_a_warning_says_so_once(caplog):
    given = [{"do_remote_prefill": True, "at": at} for at in ("first", "second")]
    made, *_ = make(SCHEDULER, *scripted_with("request_finished", *((True, p) for p in given)))
    for _ in range(2):
        assert made.request_finished(REQUEST, []) == (True, given[0])
    assert caplog.text.count("1_Scripted and a connector before it both return ['at', 'do_re") == 1


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([None, None], None),
        ([True, None], True),
        ([True, True], True),
        ([True, False], False),
        ([None, False], False),
    ],
)
def test_cache_is_reset_if_every_one_that_keeps_something_has_reset_it(answers, expected):
    assert make(SCHEDULER, *scripted_with("reset_cache", *answers))[0].reset_cache() is expected


@pytest.mark.parametrize(
    ("counts", "expected"), [([None, 1], 1), ([2, 2], 2), ([None, None], None)]
)
def test_finished_count_is_agreed(counts, expected):
    made, *_ = make(SCHEDULER, *scripted_with("get_finished_count", *counts))
    assert made.get_finished_count() == expected


@pytest.mark.parametrize("first", [1, None])
def test_different_finished_counts_are_refused(first):
    made, *_ = make(SCHEDULER, *scripted_with("get_finished_count", first, 2))
    with pytest.raises(ConnectorOptionError, match="must agree"):
        made.get_finished_count()


def test_events_of_all_are_returned():
    made, *_ = make(SCHEDULER, *scripted_with("take_events", [1], "raise", [2, 3]))
    assert made.take_events() == [1, 2, 3]


def told(numbers, medium=Medium.CPU, group=0, *, removed=False):
    """Return the event of blocks of one token each, of which each follows the one before."""
    hashes = [b"%d" % number for number in numbers]
    parent = b"%d" % (numbers[0] - 1) if numbers[0] else None
    keys = [(number,) for number in numbers]
    return KVEvent(KVBlocks(group, hashes, parent, list(numbers), 1, keys), medium, removed)


@pytest.mark.parametrize(
    ("before", "answers", "expected"),
    [
        ([], [[told([0, 1])], [told([0, 1])]], [told([0, 1])]),
        # Of an event, the parts that are news.
        ([told([1])], [[told([0, 1, 2, 3])], []], [told([0]), told([2, 3])]),
        ([told([0, 1])], [[told([1, 2])], []], [told([2])]),
        ([told([0])], [[told([0])], [told([0], removed=True)]], []),
        (
            [told([0, 1]), told([1])],
            [[told([0, 1], removed=True)], [told([1], removed=True)]],
            [told([0], removed=True), told([1], removed=True)],
        ),
        # Another medium, or another group, is another place.
        (
            [told([0])],
            [[told([0], Medium.STORAGE)], [told([0], group=1)]],
            [told([0], Medium.STORAGE), told([0], group=1)],
        ),
        ([told([0])], [[told([0], Medium.STORAGE, removed=True)], []], []),
        # What was removed by all may come back.
        ([told([0]), told([0], removed=True)], [[], [told([0])]], [told([0])]),
    ],
)
def test_block_is_told_by_the_first_that_stores_and_the_last_that_removes_it(
    before, answers, expected
):
    made, *parts = make(SCHEDULER, *scripted_with("take_events", before, ()))
    made.take_events()
    for part, answer in zip(parts, answers, strict=True):
        part.answers["take_events"] = answer
    assert made.take_events() == expected


@pytest.mark.parametrize("name", ["has_pending_push_work", "has_pending_block_frees"])
@pytest.mark.parametrize(
    ("answers", "expected"), [([False, False], False), (["raise", True], True)]
)
def test_what_is_pending_of_any_is_pending(name, answers, expected):
    made, *_ = make(SCHEDULER, *scripted_with(name, *answers))
    assert getattr(made, name)() is expected
