"""Several connectors under one: the first that has something loads, all save, none disturbs."""

from __future__ import annotations

import dataclasses
import logging
import shutil
import sys
from dataclasses import dataclass
from types import ModuleType

import pytest
from driver import Blocks, Instance, Nothing, Request, SchedulerOutput, answer, transfer_config

from wtransfer import KVConnectorFactory, KVTransferConfig, ServingConfig
from wtransfer.config import KVCacheConfig
from wtransfer.connectors.fenced import FencedMetadata
from wtransfer.connectors.interface import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from wtransfer.connectors.several.messages import SeveralMetadata
from wtransfer.errors import ConnectorOptionError, UnknownBackendError

SCHEDULER, WORKER = KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER
PROMPT = list(range(30))
REQUEST = Request("r", PROMPT)


@dataclass
class Told(KVConnectorMetadata):
    name: str


@dataclass
class Said(KVConnectorWorkerMetadata):
    names: list

    def aggregate(self, other):
        return Said(self.names + other.names)


@dataclass
class Hand(KVConnectorHandshakeMetadata):
    name: str


class Scripted(KVConnectorBase_V1):
    """A third party's: its options say what each method returns, or that it raises."""

    def __init__(self, vllm_config, role, kv_cache_config=None):
        super().__init__(vllm_config, role, kv_cache_config)
        self.name = vllm_config.kv_transfer_config.kv_connector_extra_config["name"]
        self.answers = dict(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self.names_weights = self.answers.get("names_weights", True)
        self.calls = []

    def _called(self, name, default, *args):
        self.calls.append((name, *args))
        answered = self.answers.get(name, default)
        if isinstance(answered, str) and answered.startswith("raise"):
            raise RuntimeError(f"{self.name} {answered}")
        return answered

    def heard(self, name):
        """Return with what a method was called, each time."""
        return [call[1:] for call in self.calls if call[0] == name]

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return tuple(self._called("get_num_new_matched_tokens", (0, False), num_computed_tokens))

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self._called("update_state_after_alloc", None, num_external_tokens)

    def build_connector_meta(self, scheduler_output):
        return self._called("build_connector_meta", Told(self.name))

    def on_new_request(self, request):
        self._called("on_new_request", None, request.request_id)

    def update_connector_output(self, connector_output):
        self._called("update_connector_output", None, connector_output)

    def request_finished(self, request, block_ids):
        return tuple(self._called("request_finished", (False, None), list(block_ids)))

    def set_xfer_handshake_metadata(self, metadata):
        self._called("set_xfer_handshake_metadata", None, metadata)

    def get_finished_count(self):
        return self._called("get_finished_count", None)

    def has_pending_push_work(self):
        return self._called("has_pending_push_work", False)

    def take_events(self):
        return self._called("take_events", ())

    def reset_cache(self):
        return self._called("reset_cache", None)

    def register_kv_caches(self, kv_caches):
        self._called("register_kv_caches", None, kv_caches)

    def handle_preemptions(self, kv_connector_metadata):
        self._called("handle_preemptions", None, kv_connector_metadata)

    def start_load_kv(self, forward_context, **kwargs):
        self._called("start_load_kv", None, self.metadata, kwargs)

    def wait_for_layer_load(self, layer_name):
        self._called("wait_for_layer_load", None, layer_name)

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        self._called("save_kv_layer", None, layer_name, kv_layer, attn_metadata, kwargs)

    def wait_for_save(self):
        self._called("wait_for_save", None)

    def get_finished(self, finished_req_ids):
        return tuple(self._called("get_finished", (None, None), finished_req_ids))

    def get_block_ids_with_load_errors(self):
        return set(self._called("get_block_ids_with_load_errors", ()))

    def build_connector_worker_meta(self):
        return self._called("build_connector_worker_meta", None)

    def get_handshake_metadata(self):
        return self._called("get_handshake_metadata", None)

    def get_stats(self):
        return {"calls_total": len(self.calls)}

    def shutdown(self):
        self._called("shutdown", None)


@pytest.fixture(autouse=True)
def module(monkeypatch):
    """The class above under a path that a configuration can name."""
    made = ModuleType("somebodys_connectors")
    made.Scripted, made.Bare = Scripted, Nothing
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def scripted(name, **answers):
    return {
        "kv_connector": "Scripted",
        "kv_connector_module_path": "somebodys_connectors",
        "kv_connector_extra_config": {"name": name, **answers},
    }


def serving(*children, **more):
    transfer = transfer_config("MultiConnector", connectors=list(children), **more)
    return ServingConfig(kv_transfer_config=transfer, cache_config=KVCacheConfig(block_size=4))


def make(role, *children):
    """Make one side, and return it with its children."""
    multi = KVConnectorFactory.create_connector(serving(*children), role, "cache config")
    return multi, *multi.side.children


def storage(path):
    extra = {"shared_storage_path": str(path)}
    return {"kv_connector": "SharedStorageConnector", "kv_connector_extra_config": extra}


# -- with real ones


@pytest.fixture
def instance(tmp_path, weights):
    made = []

    def make(*folders):
        children = [storage(tmp_path / folder) for folder in folders]
        transfer = transfer_config("MultiConnector", connectors=children)
        made.append(Instance(transfer, num_ranks=2, keeps_saving=False))
        return made[-1]

    yield make
    for each in made:
        each.shutdown()


def test_all_save_and_the_first_that_has_it_loads(instance, tmp_path, leaves_nothing):
    expected = answer(PROMPT, 3, num_ranks=2)
    first = instance("a", "b")
    assert first.serve("a", PROMPT, 3).output_token_ids == expected
    shutil.rmtree(tmp_path / "a")
    second = instance("a", "b")
    request = second.serve("b", PROMPT, 3)
    assert (request.num_loaded, request.output_token_ids) == (28, expected)
    loaded = second.workers[0].get_stats()
    assert loaded["1_SharedStorageConnector_blocks_loaded_total"] == 7
    assert "0_SharedStorageConnector_blocks_loaded_total" not in loaded
    # The first one did not compute the beginning, and does not vouch for it.
    third = instance("a")
    assert third.serve("c", PROMPT, 3).num_loaded == 0
    for each in (first, second, third):
        each.shutdown()


def test_what_one_child_failed_to_load_none_of_them_stores(instance, tmp_path):
    """The other one could not know: it has loaded nothing."""
    instance("a").serve("a", PROMPT)
    blocks = sorted(tmp_path.glob("a/*/blocks-*/*.1"), key=lambda each: -each.stat().st_mtime_ns)
    blocks[4].write_bytes(b"")
    longer = PROMPT + PROMPT
    second = instance("a", "b")
    request = second.serve("b", longer, 2)
    expected = answer(longer, 2, num_ranks=2)
    assert (request.num_failures, request.output_token_ids) == (1, expected)
    for folder, num_loaded in (("a", 56), ("b", 0)):
        request = instance(folder).serve(f"from {folder}", longer, 2)
        assert (request.num_loaded, request.output_token_ids) == (num_loaded, expected)


def test_what_storage_failed_to_load_no_tier_in_memory_keeps(tmp_path, weights):
    """One that has no care of its own for what others loaded: it counts on ``wait_for_save``."""
    tier = {"spec_name": "CPUOffloadingSpec", "cpu_bytes_to_use": 1 << 22}
    offloading = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": tier}
    extra = {"connectors": [storage(tmp_path), offloading]}
    with Instance(
        transfer_config("SharedStorageConnector", shared_storage_path=str(tmp_path))
    ) as a:
        a.serve("a", PROMPT)
    for each in tmp_path.glob("*/blocks-*/*"):
        each.write_bytes(b"")
    longer = PROMPT + PROMPT
    with Instance(transfer_config("MultiConnector", **extra), keeps_saving=False) as second:
        request = second.serve("b", longer, 2)
        assert (request.num_failures, request.output_token_ids) == (1, answer(longer, 2))
        # From the tier alone.
        for each in tmp_path.glob("*/*/*.0"):
            each.unlink()
        request = second.serve("c", longer, 2)
        assert (request.num_loaded, request.output_token_ids) == (56, answer(longer, 2))


def test_a_child_that_does_not_name_weights_is_fenced_by_itself():
    multi, first, second = make(SCHEDULER, scripted("a"), scripted("b", names_weights=False))
    assert multi.names_weights is first.names_weights is second.names_weights is True
    told = multi.build_connector_meta(SchedulerOutput())
    assert told.children == [Told("a"), FencedMetadata(Told("b"))]


# -- what the children are


def test_a_child_has_the_parents_configuration_with_its_own_fields():
    own = {**scripted("b"), "engine_id": "other", "kv_role": "kv_consumer"}
    config = serving(scripted("a"), own, role="kv_producer")
    multi = KVConnectorFactory.create_connector(config, WORKER, "cache config")
    first, second = multi.side.children
    fields = [
        (each.kv_connector, each.engine_id, each.kv_role, each.kv_connector_module_path)
        for each in (first.config.kv_transfer_config, second.config.kv_transfer_config)
    ]
    assert fields == [
        ("Scripted", "engine", "kv_producer", "somebodys_connectors"),
        ("Scripted", "other", "kv_consumer", "somebodys_connectors"),
    ]
    assert first.config.kv_transfer_config.kv_connector_extra_config == {"name": "a"}
    assert (first.role, first.kv_cache_config) == (WORKER, "cache config")
    assert first.config.cache_config is config.cache_config


def test_children_have_nothing_in_common_that_one_of_them_could_change():
    bare = {**scripted("a"), "kv_connector": "Bare"}
    del bare["kv_connector_extra_config"]
    multi, first, second = make(SCHEDULER, bare, bare)
    first.config.kv_transfer_config.kv_connector_extra_config["mine"] = 1
    assert second.config.kv_transfer_config.kv_connector_extra_config == {}
    output = KVConnectorOutput({"s"}, {"r"}, None, {1}, {"f"})
    first.update_connector_output = lambda said: [
        each.clear() for each in vars(said).values() if isinstance(each, set)
    ]
    heard = []
    second.update_connector_output = heard.append
    multi.update_connector_output(output)
    assert heard == [output]


def test_a_host_with_configurations_of_its_own_is_served_as_well():
    class Theirs:
        """As vLLM's: no dataclass of ours, and copied as it is."""

        kv_transfer_config = transfer_config("MultiConnector", connectors=[scripted("a")])
        something = "else"

    config = Theirs()
    multi = KVConnectorFactory.create_connector(config, WORKER)
    (child,) = multi.side.children
    assert child.config.kv_transfer_config.kv_connector == "Scripted"
    assert (child.config.something, type(child.config)) == ("else", Theirs)
    assert config.kv_transfer_config.kv_connector == "MultiConnector"


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({}, "'connectors' is None; expected a list with one dictionary for each"),
        ({"connectors": []}, r"'connectors' is \[\]; expected a list"),
        ({"connectors": {"kv_connector": "x"}}, "expected a list"),
        ({"connectors": ["x"]}, r"connectors\[0\] is 'x'; expected a dictionary with 'kv_conn"),
        ({"connectors": [{}]}, r"connectors\[0\] is {}; expected a dictionary with"),
        ({"connectors": [{"kv_connector": "x", "kv_rol": 1}]}, r"\[0\] \(x\): .*'kv_rol'; the fi"),
        ({"connectors": [{"kv_connector": "x"}], "max": 1}, r"has no options \['max'\]; it has"),
    ],
)
def test_children_that_are_not_described_are_refused(extra, text):
    with pytest.raises(ConnectorOptionError, match=text):
        KVConnectorFactory.create_connector(
            ServingConfig(kv_transfer_config=transfer_config("MultiConnector", **extra)), WORKER
        )


def test_a_child_that_cannot_be_made_takes_the_others_down(tmp_path, weights, leaves_nothing):
    config = serving(storage(tmp_path), {"kv_connector": "NoSuchConnector"})
    with pytest.raises(UnknownBackendError, match="NoSuchConnector"):
        KVConnectorFactory.create_connector(config, WORKER)


# -- who loads


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
def test_the_first_that_has_something_is_chosen(answers, expected):
    children = [
        scripted(name, get_num_new_matched_tokens=each)
        for name, each in zip("ab", answers, strict=True)
    ]
    multi, *made = make(SCHEDULER, *children)
    assert multi.get_num_new_matched_tokens(REQUEST, 4) == expected
    assert [each.heard("get_num_new_matched_tokens") for each in made] == [[(4,)], [(4,)]]


def test_the_chosen_one_gets_the_tokens_and_the_others_none():
    some = {"get_num_new_matched_tokens": (8, False)}
    multi, *made = make(SCHEDULER, scripted("a"), scripted("b", **some), scripted("c", **some))
    multi.get_num_new_matched_tokens(REQUEST, 0)
    multi.update_state_after_alloc(REQUEST, Blocks([1, 2]), 8)
    heard = [each.heard("update_state_after_alloc") for each in made]
    assert heard == [[(0,)], [(8,)], [(0,)]]


def test_who_is_chosen_may_change_from_one_question_to_the_next():
    some = {"get_num_new_matched_tokens": (8, False)}
    multi, first, second = make(SCHEDULER, scripted("a", **some), scripted("b", **some))
    multi.get_num_new_matched_tokens(REQUEST, 0)
    first.answers["get_num_new_matched_tokens"] = (0, False)
    multi.get_num_new_matched_tokens(REQUEST, 0)
    second.answers["get_num_new_matched_tokens"] = (0, False)
    multi.update_state_after_alloc(REQUEST, Blocks([1, 2]), 8)
    assert (first.heard("update_state_after_alloc"), second.heard("update_state_after_alloc")) == (
        [(0,)],
        [(8,)],
    )
    multi.get_num_new_matched_tokens(REQUEST, 0)
    multi.update_state_after_alloc(REQUEST, Blocks([1, 2]), 0)
    assert second.heard("update_state_after_alloc")[-1] == (0,)


def test_a_child_that_cannot_be_asked_is_logged_once_and_counted(caplog):
    multi, _ = make(SCHEDULER, scripted("a", get_num_new_matched_tokens="raise", take_events="r"))
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert multi.get_num_new_matched_tokens(REQUEST, 0) == (0, False)
    assert len(caplog.records) == 1
    assert "0_Scripted has failed, and counts as one that has nothing" in caplog.text
    assert multi.get_stats() == {"0_Scripted_unanswered_total": 3, "0_Scripted_calls_total": 3}


def test_a_child_that_cannot_say_its_numbers_does_not_hide_those_of_the_others():
    multi, first, second = make(SCHEDULER, scripted("a"), scripted("b"))
    first.get_stats = lambda: 1 / 0
    assert multi.get_stats() == {"1_Scripted_calls_total": len(second.calls)}
    assert multi.get_stats()["0_Scripted_unanswered_total"] == 1


# -- what is passed on

TO_ALL = {
    SCHEDULER: {
        "on_new_request": (REQUEST,),
        "update_state_after_alloc": (REQUEST, Blocks([1]), 0),
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


def step(multi):
    """Bind what three children are told."""
    sides = make(SCHEDULER, *(scripted(name) for name in "abc"))
    told = sides[0].build_connector_meta(SchedulerOutput())
    multi.bind_connector_metadata(told)
    return told


@pytest.mark.parametrize(
    ("role", "method"), [(role, name) for role, names in TO_ALL.items() for name in names]
)
def test_every_child_hears_though_one_raises_and_the_first_error_is_raised(role, method):
    ways = ["raise first", "raise second", None]
    children = [scripted(n, **({method: w} if w else {})) for n, w in zip("abc", ways, strict=True)]
    multi, *made = make(role, *children)
    if role is WORKER:
        step(multi)
    with pytest.raises(RuntimeError, match="a raise first"):
        getattr(multi, method)(*TO_ALL[role][method])
    assert [len(each.heard(method)) for each in made] == [1, 1, 1]


def test_what_is_told_comes_to_each_child_as_its_own():
    multi, *made = make(WORKER, *(scripted(name) for name in "abc"))
    told = step(multi)
    multi.handle_preemptions(told)
    multi.start_load_kv("context", key=1)
    multi.save_kv_layer("layer", "cache", "attention", key=2)
    for each in made:
        assert each.heard("handle_preemptions") == [(Told(each.name),)]
        assert each.heard("start_load_kv") == [(Told(each.name), {"key": 1})]
        assert each.heard("save_kv_layer") == [("layer", "cache", "attention", {"key": 2})]
    multi.clear_connector_metadata()
    assert not any(each.has_connector_metadata() for each in (multi, *made))


def test_sides_with_different_children_find_out():
    multi, *_ = make(WORKER, scripted("a"))
    with pytest.raises(
        ConnectorOptionError, match="speaks for 3 connectors, and this worker has 1"
    ):
        step(multi)


def test_what_workers_say_comes_to_each_child_as_its_own():
    workers = [
        make(
            WORKER,
            scripted("a", build_connector_worker_meta=Said([f"a{rank}"])),
            scripted("b"),
            scripted("c", build_connector_worker_meta=Said([f"c{rank}"]) if rank else None),
        )[0]
        for rank in range(2)
    ]
    first, second = (each.build_connector_worker_meta() for each in workers)
    output = KVConnectorOutput({"s"}, {"r"}, first.aggregate(second), {1})
    multi, *made = make(SCHEDULER, *(scripted(name) for name in "abc"))
    multi.update_connector_output(output)
    heard = [each.heard("update_connector_output")[0][0] for each in made]
    assert [each.kv_connector_worker_meta for each in heard] == [
        Said(["a0", "a1"]),
        None,
        Said(["c1"]),
    ]
    assert all(
        dataclasses.replace(each, kv_connector_worker_meta=None)
        == KVConnectorOutput({"s"}, {"r"}, None, {1})
        for each in heard
    )
    assert output.kv_connector_worker_meta.children[0] == Said(["a0", "a1"])


def test_with_nothing_to_say_nothing_is_said():
    multi, *_ = make(WORKER, scripted("a"), scripted("b"))
    assert multi.build_connector_worker_meta() is None
    assert multi.get_handshake_metadata() is None
    assert multi.get_finished(set()) == (None, None)


def test_a_child_that_cannot_say_anything_does_not_silence_the_others():
    multi, *_ = make(
        WORKER,
        scripted("a", build_connector_worker_meta="raise"),
        scripted("b", build_connector_worker_meta=Said(["b"])),
    )
    assert multi.build_connector_worker_meta().children == [None, Said(["b"])]


def test_handshakes_come_to_each_child_as_its_own():
    said = {
        rank: make(WORKER, scripted("a", get_handshake_metadata=Hand(f"a{rank}")), scripted("b"))[
            0
        ].get_handshake_metadata()
        for rank in range(2)
    }
    multi, first, second = make(SCHEDULER, scripted("a"), scripted("b"))
    multi.set_xfer_handshake_metadata(said)
    assert first.heard("set_xfer_handshake_metadata") == [({0: Hand("a0"), 1: Hand("a1")},)]
    assert second.heard("set_xfer_handshake_metadata") == []


# -- blocks that stay


def finish(multi, request=REQUEST):
    return multi.request_finished(request, [1, 2])


@pytest.mark.parametrize("holders", [[], [0], [2], [0, 2], [0, 1, 2]])
def test_a_request_is_sent_when_all_that_held_it_have_said_so(holders):
    children = [
        scripted(name, request_finished=(number in holders, None))
        for number, name in enumerate("abc")
    ]
    scheduler, *_ = make(SCHEDULER, *children)
    worker, *made = make(WORKER, *children)
    assert finish(scheduler) == (bool(holders), None)
    worker.bind_connector_metadata(scheduler.build_connector_meta(SchedulerOutput()))
    for number, each in enumerate(made):
        each.answers["get_finished"] = ({"r"}, None)
        expected = {"r"} if holders and number == holders[-1] else None
        assert worker.get_finished(set())[0] == expected, number
        each.answers["get_finished"] = ({"r"} if number not in holders else None, None)
    assert worker.get_finished(set())[0] is None


def test_one_that_is_done_before_it_is_known_to_hold_is_not_forgotten():
    children = [scripted(name, request_finished=(True, None)) for name in "ab"]
    scheduler, *_ = make(SCHEDULER, *children)
    worker, first, second = make(WORKER, *children)
    first.answers["get_finished"] = ({"r"}, None)
    assert worker.get_finished(set()) == (None, None)
    del first.answers["get_finished"]
    finish(scheduler)
    worker.bind_connector_metadata(scheduler.build_connector_meta(SchedulerOutput()))
    second.answers["get_finished"] = ({"r"}, None)
    assert worker.get_finished(set()) == ({"r"}, None)


def test_what_a_mistaken_child_says_is_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr("wtransfer.connectors.several.worker.MAX_EARLY", 10)
    worker, child = make(WORKER, scripted("a"))
    for number in range(50):
        child.answers["get_finished"] = ({f"r{number}"}, None)
        assert worker.get_finished(set()) == (None, None)
    assert len(worker.side._named) == 10


def test_a_request_is_received_when_the_chosen_one_says_so():
    some = {"get_num_new_matched_tokens": (8, True)}
    children = [scripted("a"), scripted("b", **some)]
    scheduler, *_ = make(SCHEDULER, *children)
    worker, first, second = make(WORKER, *children)
    scheduler.get_num_new_matched_tokens(REQUEST, 0)
    scheduler.update_state_after_alloc(REQUEST, Blocks([1, 2]), 8)
    worker.bind_connector_metadata(scheduler.build_connector_meta(SchedulerOutput()))
    first.answers["get_finished"] = (None, {"r", "x"})
    assert worker.get_finished(set()) == (None, None)
    second.answers["get_finished"] = (None, {"r"})
    assert worker.get_finished(set()) == (None, {"r"})
    assert worker.get_finished(set()) == (None, None)


def test_a_request_that_is_given_up_while_it_loads_is_received_all_the_same():
    """The host waits for that before it gives its blocks to others."""
    children = [scripted("a", get_num_new_matched_tokens=(8, True))]
    scheduler, _ = make(SCHEDULER, *children)
    worker, child = make(WORKER, *children)
    scheduler.get_num_new_matched_tokens(REQUEST, 0)
    scheduler.update_state_after_alloc(REQUEST, Blocks([1, 2]), 8)
    finish(scheduler)
    worker.bind_connector_metadata(scheduler.build_connector_meta(SchedulerOutput()))
    child.answers["get_finished"] = (None, {"r"})
    assert worker.get_finished({"r"}) == (None, {"r"})


def step_of(multi, *children, a=(None, None), b=(None, None), **told):
    """Make a step of two children with what they say of requests; return what comes of it."""
    multi.bind_connector_metadata(SeveralMetadata([Told("a"), Told("b")], **told))
    for child, said in zip(children, (a, b), strict=True):
        child.answers["get_finished"] = said
    done = multi.get_finished(set())
    multi.clear_connector_metadata()
    return done


LOADS = {"get_num_new_matched_tokens": (8, True)}
STAYS = {"request_finished": (True, None)}


def load(scheduler, request=REQUEST):
    scheduler.on_new_request(request)
    scheduler.get_num_new_matched_tokens(request, 0)
    scheduler.update_state_after_alloc(request, Blocks([1, 2]), 8)


def test_a_request_that_ended_while_it_loaded_is_named_once_and_then_forgotten():
    """As received: the host frees its blocks on whichever word comes first."""
    children = [scripted("a"), scripted("b", **LOADS, **STAYS)]
    scheduler, *_ = make(SCHEDULER, *children)
    worker, _first, second = make(WORKER, *children)
    for number in range(20):
        request = Request(f"r{number}", PROMPT)
        load(scheduler, request)
        worker.bind_connector_metadata(scheduler.build_connector_meta(SchedulerOutput()))
        assert finish(scheduler, request) == (True, None)
        worker.bind_connector_metadata(scheduler.build_connector_meta(SchedulerOutput()))
        assert worker.get_finished(set()) == (None, None)
        second.answers["get_finished"] = (None, {f"r{number}"})
        assert worker.get_finished(set()) == (None, {f"r{number}"})
        # Whatever it says once more.
        second.answers["get_finished"] = ({f"r{number}"}, {f"r{number}"})
        assert worker.get_finished(set()) == (None, None)
        del second.answers["get_finished"]
    side = worker.side
    assert (side._holding, side._loading, side._ended_loading) == ({}, {}, set())
    assert scheduler.side._underway == set()


@pytest.mark.parametrize("loader_first", [True, False])
def test_a_request_that_ended_while_it_loaded_waits_for_all_that_hold_it(loader_first):
    children = [scripted("a", **STAYS), scripted("b", **LOADS)]
    scheduler, *_ = make(SCHEDULER, *children)
    worker, first, second = make(WORKER, *children)
    load(scheduler)
    finish(scheduler)
    worker.bind_connector_metadata(scheduler.build_connector_meta(SchedulerOutput()))
    said = [(first, ({"r"}, None)), (second, (None, {"r"}))]
    for child, answers in reversed(said) if loader_first else said:
        assert worker.get_finished(set()) == (None, None)
        child.answers["get_finished"] = answers
    assert worker.get_finished(set()) == (None, {"r"})
    assert worker.side._holding == {}


def test_a_load_that_had_ended_before_its_request_did_is_not_waited_for_again():
    """The host has heard it as received, and freed the blocks; the scheduler's side not yet."""
    children = [scripted("a"), scripted("b", **LOADS, **STAYS)]
    scheduler, *_ = make(SCHEDULER, *children)
    worker, _first, second = make(WORKER, *children)
    load(scheduler)
    worker.bind_connector_metadata(scheduler.build_connector_meta(SchedulerOutput()))
    second.answers["get_finished"] = (None, {"r"})
    assert worker.get_finished(set()) == (None, {"r"})
    finish(scheduler)
    worker.bind_connector_metadata(scheduler.build_connector_meta(SchedulerOutput()))
    assert worker.get_finished(set()) == (None, None)
    assert worker.side._holding == {}


def test_a_request_that_was_received_and_ended_later_is_named_as_sent():
    children = [scripted("a", **STAYS), scripted("b", **LOADS)]
    scheduler, *_ = make(SCHEDULER, *children)
    worker, first, second = make(WORKER, *children)
    load(scheduler)
    worker.bind_connector_metadata(scheduler.build_connector_meta(SchedulerOutput()))
    second.answers["get_finished"] = (None, {"r"})
    assert worker.get_finished(set()) == (None, {"r"})
    scheduler.update_connector_output(KVConnectorOutput(finished_recving={"r"}))
    finish(scheduler)
    worker.bind_connector_metadata(scheduler.build_connector_meta(SchedulerOutput()))
    assert worker.get_finished(set()) == (None, None)
    first.answers["get_finished"] = ({"r"}, None)
    assert worker.get_finished(set()) == ({"r"}, None)


def test_what_is_said_twice_does_not_end_a_later_request_of_the_same_name():
    worker, *children = make(WORKER, scripted("a"), scripted("b"))
    sent = ({"r"}, None)
    assert step_of(worker, *children, holding={"r": [0]}, a=sent) == sent
    assert step_of(worker, *children, a=sent) == (None, None)
    assert step_of(worker, *children, holding={"r": [0]}) == (None, None)
    assert step_of(worker, *children, a=sent) == sent
    # What was said early of the one before is none of the next one's either.
    assert step_of(worker, *children, b=sent) == (None, None)
    assert step_of(worker, *children, begun={"r"}) == (None, None)
    assert step_of(worker, *children, holding={"r": [1]}) == (None, None)
    assert step_of(worker, *children, b=sent) == sent


def test_one_that_is_done_early_counts_in_a_later_request_of_the_same_name_as_well():
    children = [scripted("a", **STAYS), scripted("b")]
    scheduler, *_ = make(SCHEDULER, *children)
    worker, *made = make(WORKER, *children)
    sent = ({"r"}, None)
    assert step_of(worker, *made, holding={"r": [0]}, a=sent) == sent
    scheduler.on_new_request(REQUEST)
    told = scheduler.build_connector_meta(SchedulerOutput())
    assert step_of(worker, *made, begun=told.begun, a=sent) == (None, None)
    finish(scheduler)
    told = scheduler.build_connector_meta(SchedulerOutput())
    assert step_of(worker, *made, begun=told.begun, holding=told.holding) == sent


def test_a_request_that_is_held_and_the_next_of_its_name_are_two():
    worker, *children = make(WORKER, scripted("a"), scripted("b"))
    sent, received = ({"r"}, None), (None, {"r"})
    assert step_of(worker, *children, holding={"r": [0, 1]}, a=sent) == (None, None)
    # The next one begins, and loads.
    assert step_of(worker, *children, begun={"r"}, loading={"r": 1}) == (None, None)
    assert step_of(worker, *children, b=sent) == sent
    assert step_of(worker, *children, b=received) == received


def test_who_was_named_is_not_remembered_for_ever(monkeypatch):
    monkeypatch.setattr("wtransfer.connectors.several.worker.MAX_DONE", 10)
    worker, *children = make(WORKER, scripted("a"), scripted("b"))
    for number in range(50):
        name = f"r{number}"
        assert step_of(worker, *children, holding={name: [0]}, a=({name}, None))[0] == {name}
    assert len(worker.side._done) == 10


def test_load_errors_are_those_of_all_and_each_is_said_once():
    worker, first, second = make(
        WORKER,
        scripted("a", get_block_ids_with_load_errors=(1, 2)),
        scripted("b", get_block_ids_with_load_errors=(2, 3)),
    )
    assert worker.get_block_ids_with_load_errors() == {1, 2, 3}
    first.answers, second.answers = {}, {}
    assert worker.get_block_ids_with_load_errors() == set()


def test_what_others_said_while_one_raised_is_said_the_next_time():
    worker, first, second = make(
        WORKER,
        scripted("a", get_block_ids_with_load_errors=(1,)),
        scripted("b", get_block_ids_with_load_errors="raise"),
    )
    with pytest.raises(RuntimeError):
        worker.get_block_ids_with_load_errors()
    first.answers, second.answers = {}, {}
    assert worker.get_block_ids_with_load_errors() == {1}


def test_what_was_sent_and_received_while_one_raised_is_said_the_next_time():
    """Else blocks would stay for ever."""
    some = {"get_num_new_matched_tokens": (8, True)}
    children = [scripted("a", request_finished=(True, None), **some), scripted("b")]
    scheduler, *_ = make(SCHEDULER, *children)
    worker, first, second = make(WORKER, *children)
    finish(scheduler)
    other = Request("s", PROMPT)
    scheduler.get_num_new_matched_tokens(other, 0)
    scheduler.update_state_after_alloc(other, Blocks([3, 4]), 8)
    worker.bind_connector_metadata(scheduler.build_connector_meta(SchedulerOutput()))
    first.answers["get_finished"] = ({"r"}, {"s"})
    second.answers["get_finished"] = "raise"
    with pytest.raises(RuntimeError, match="b raise"):
        worker.get_finished(set())
    first.answers, second.answers = {}, {}
    assert worker.get_finished(set()) == ({"r"}, {"s"})


# -- what comes together


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([None, None], None),
        ([{"a": 1}, None], {"a": 1}),
        ([None, {"b": 2}], {"b": 2}),
        ([{"a": 1}, {"b": 2}], {"a": 1, "b": 2}),
    ],
)
def test_params_for_the_next_instance_are_put_together(given, expected):
    children = [scripted(n, request_finished=(False, p)) for n, p in zip("ab", given, strict=True)]
    multi, *_ = make(SCHEDULER, *children)
    assert finish(multi) == (False, expected)


def test_children_behind_a_fence_say_the_same_weights(weights):
    children = [
        scripted(name, names_weights=False, request_finished=(False, {name: 1})) for name in "ab"
    ]
    (multi, *_), (worker, *_) = (make(role, *children) for role in (SCHEDULER, WORKER))
    multi.set_xfer_handshake_metadata({0: worker.get_handshake_metadata()})
    multi.get_num_new_matched_tokens(REQUEST, 0)
    assert finish(multi) == (False, {"a": 1, "b": 1, "remote_weights": "fingerprint-1"})


def test_of_two_that_hand_the_same_request_over_the_first_is_heard_and_the_log_says_so(caplog):
    given = [{"do_remote_prefill": True, "at": at} for at in ("first", "second")]
    children = [
        scripted(name, request_finished=(True, params))
        for name, params in zip("ab", given, strict=True)
    ]
    multi, *_ = make(SCHEDULER, *children)
    assert finish(multi) == (True, given[0])
    assert (
        "1_Scripted and a connector before it both say ['at', 'do_remote_prefill']" in caplog.text
    )
    assert multi.build_connector_meta(SchedulerOutput()).holding == {"r": [0, 1]}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ([None, None], None),
        ([True, None], True),
        ([True, True], True),
        ([True, False], False),
        ([None, False], False),
    ],
)
def test_the_cache_is_reset_if_all_that_keep_something_did_so(said, expected):
    children = [scripted(n, reset_cache=each) for n, each in zip("ab", said, strict=True)]
    assert make(SCHEDULER, *children)[0].reset_cache() is expected


@pytest.mark.parametrize(
    ("counts", "expected"), [([None, 1], 1), ([2, 2], 2), ([None, None], None)]
)
def test_how_many_workers_must_say_so_is_agreed(counts, expected):
    children = [scripted(n, get_finished_count=c) for n, c in zip("ab", counts, strict=True)]
    assert make(SCHEDULER, *children)[0].get_finished_count() == expected


@pytest.mark.parametrize("first", [1, None])
def test_children_that_do_not_agree_on_that_are_refused(first):
    children = [scripted("a", get_finished_count=first), scripted("b", get_finished_count=2)]
    with pytest.raises(ConnectorOptionError, match="must agree"):
        make(SCHEDULER, *children)[0].get_finished_count()


def test_events_are_those_of_all_that_can_say():
    children = [scripted("a", take_events=[1]), scripted("b", take_events="raise")]
    multi, *_ = make(SCHEDULER, *children, scripted("c", take_events=[2, 3]))
    assert multi.take_events() == [1, 2, 3]


def test_there_is_work_if_any_child_has_some():
    assert not make(SCHEDULER, scripted("a"), scripted("b"))[0].has_pending_push_work()
    children = (
        scripted("a", has_pending_push_work="raise"),
        scripted("b", has_pending_push_work=True),
    )
    assert make(SCHEDULER, *children)[0].has_pending_push_work()


def test_a_multi_connector_may_be_a_child():
    inner = {"kv_connector": "MultiConnector"}
    inner["kv_connector_extra_config"] = {"connectors": [scripted("a"), scripted("b")]}
    multi, outer, nested = make(SCHEDULER, scripted("c"), inner)
    multi.on_new_request(REQUEST)
    heard = [each.heard("on_new_request") for each in (outer, *nested.side.children)]
    assert heard == [[("r",)]] * 3
    assert isinstance(nested.config.kv_transfer_config, KVTransferConfig)
