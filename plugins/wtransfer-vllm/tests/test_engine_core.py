"""The watch over an engine core, where a live one cannot be brought into the case."""

import functools
import sys
import types
from collections import deque
from concurrent.futures import Future

import pytest
from wtransfer.errors import AuthenticationError
from wtransfer.weight_sync.messages import DRAINED

from wtransfer_vllm.engine_core import FINISH, UPDATE, watch
from wtransfer_vllm.messages import Outcome
from wtransfer_vllm.names import remember

bag = types.SimpleNamespace


class Model:
    """What stands for a worker's weights."""


class Worker:
    """A worker with an engine whose outcomes the test sets."""

    def __init__(self):
        self.called, self.lost = [], []
        self.proven_before = []
        member = bag(outcome=Outcome(), lose_weights=self._lose, pending=False, commit=self._commit)
        member.prove_reload = lambda: self.proven_before.append(list(self.lost))
        self.weight_transfer_engine = bag(member=member)
        self.vllm_config = bag(model_config=Model())

    def _lose(self, why):
        self.lost.append(why)
        self.weight_transfer_engine.member.outcome = Outcome(touched=True, state="empty")

    def _commit(self):
        self.called.append(("commit", None))

    def will(self, **outcome):
        self.weight_transfer_engine.member.outcome = Outcome(**outcome)


class Executor:
    def get_kv_connector_handshake_metadata(self):
        return [{(0, rank): list(worker.called)} for rank, worker in enumerate(self.workers)]

    def __init__(self, workers):
        self.workers = workers
        self.sleeping_tags = set()
        self.fails_in = None

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        if method == self.fails_in:
            raise OSError("half way")
        if callable(method):
            return [method(worker, *args) for worker in self.workers]
        for worker in self.workers:
            worker.called.append((method, kwargs))
        return [None] * len(self.workers)


class Connector:
    """A KV connector that finds something for every request, and forgets as it is told to."""

    def __init__(self, forgets):
        self.forgets = forgets
        self.told, self.deaf = [], False

    def get_num_new_matched_tokens(self, request, num_computed):
        return (16, True)

    def request_finished(self, request, blocks):
        is_handed_over = request.kv_transfer_params["do_remote_decode"]
        return is_handed_over, {"do_remote_prefill": is_handed_over}

    def set_xfer_handshake_metadata_pp_aware(self, metadata):
        if self.deaf:
            raise OSError("cannot hear")
        self.told.append(metadata)

    def reset_cache(self):
        if isinstance(self.forgets, Exception):
            raise self.forgets
        return self.forgets


class Core:
    """vLLM's engine core, as far as it matters here."""

    def __init__(self, backend="shm", num_workers=2):
        self.model_executor = Executor([Worker() for _ in range(num_workers)])
        self.vllm_config = bag(
            weight_transfer_config=bag(backend=backend),
            model_config=bag(is_multimodal_model=True),
        )
        self.scheduler = bag(kv_cache_manager=bag(enable_caching=True), schedule=lambda: None)
        self.resets = []
        self.label = "default"
        self.batch_queue = None
        self.prefix_reset = lambda: True

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        return self.model_executor.collective_rpc(method, timeout, args, kwargs)

    def sleep(self, level=1, mode="abort"):
        self.resets.append(f"sleep {level} {mode}")
        tags = self.model_executor.sleeping_tags
        if mode == "wait":
            self.asleep = Future()
            self.asleep.add_done_callback(lambda _: tags.update({"weights", "kv_cache"}))
            return self.asleep
        return tags.update({"weights", "kv_cache"})

    def wake_up(self, tags=None):
        self.model_executor.sleeping_tags -= set(tags or ("weights", "kv_cache"))
        return not self.model_executor.sleeping_tags

    def reset_prefix_cache(self, running, connector):
        self.resets.append(("prefix", running, connector))
        return self.prefix_reset()

    def reset_encoder_cache(self):
        self.resets.append("encoder")

    def set_weight_version(self, label):
        self.label = label

    def get_weight_version(self):
        return self.label

    def _attach_weight_version(self, outputs):
        for each in outputs.values():
            each.weight_version = self.label

    def process(self):
        """Process the oldest batch in flight, if any, or one that was computed just now."""
        if self.batch_queue:
            self.batch_queue.pop()
        outputs = {client: bag(weight_version=None) for client in range(2)}
        self._attach_weight_version(outputs)
        (tag,) = {each.weight_version for each in outputs.values()}
        return tag


def finish(core):
    core.collective_rpc("start_weight_update")
    core.collective_rpc("finish_weight_update")


def commit(core, workers):
    for worker in workers:
        worker.will(applied=True, touched=True, state="serving", version="b")
    finish(core)


def commit_set(core, workers, version, digit):
    for worker in workers:
        worker.will(
            applied=True, touched=True, state="serving", version=version, fingerprint=digit * 32
        )
    finish(core)


def names_of(worker):
    return [name for name, _ in worker.called]


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setenv("WTRANSFER_TOKEN", "t")
    remember("engines", "shm", "shm")
    remember("connectors", "ours", "ours")

    def make_core(commits_in=FINISH, **options):
        core_class = type("Core", (Core,), {})
        watch(core_class, commits_in)
        watch(core_class, commits_in)
        core = core_class(**options)
        return core, core.model_executor.workers

    return make_core


def test_commit_of_all_ranks_resets_every_cache_and_sets_the_label(make):
    core, workers = make()
    commit(core, workers)
    assert core.resets == [("prefix", True, False), "encoder"]
    assert core.label == "b"
    for worker in workers:
        assert names_of(worker) == ["start_weight_update", "finish_weight_update"]


class Rows:
    """What a pooling request has gathered."""

    def __init__(self):
        self.hidden_states_cache = ["a chunk"]

    def clean(self):
        self.hidden_states_cache.clear()


@pytest.mark.parametrize("lost", [False, True], ids=["commit", "reload_weights"])
def test_rows_that_pooling_requests_have_gathered_go_with_the_weights(make, lost):
    core, workers = make()
    core.vllm_config.model_config.runner_type = "pooling"
    rows = [Rows() for _ in workers]
    for worker, gathered in zip(workers, rows, strict=True):
        # In a pooling engine no request is without; the other stands for one of another release.
        requests = {"a": bag(pooling_states=gathered), "b": bag()}
        worker.model_runner = bag(requests=requests)
    if lost:
        core.collective_rpc("reload_weights")
    else:
        commit(core, workers)
    assert [each.hidden_states_cache for each in rows] == [[], []]


def test_ranks_that_hold_different_versions_have_no_label(make):
    core, workers = make()
    workers[0].will(applied=True, touched=True, state="serving", version="b")
    workers[1].will(touched=True, state="empty", error="could not be restored")
    with pytest.raises(RuntimeError, match="could not be restored"):
        finish(core)
    assert core.label == "empty"
    assert core.resets == [("prefix", True, False), "encoder"]


def test_nothing_committed_is_an_error_and_leaves_caches_and_label(make):
    core, workers = make()
    for worker in workers:
        worker.will(error="no verified update was there to commit", version="a")
    with pytest.raises(RuntimeError, match="nothing was committed: no verified update"):
        finish(core)
    assert (core.label, core.resets) == ("default", [])


@pytest.mark.parametrize("refused", [False, RuntimeError("blocks are in use")], ids=str)
def test_cache_that_cannot_be_reset_is_not_read_until_it_can(make, refused):
    core, workers = make()

    def refuse():
        if refused is False:
            return False
        raise refused

    core.prefix_reset = refuse
    commit(core, workers)
    assert core.scheduler.kv_cache_manager.enable_caching is False
    assert core.label == "b"
    core.prefix_reset = lambda: True
    finish(core)
    assert core.scheduler.kv_cache_manager.enable_caching is True


@pytest.mark.parametrize("silent", [None, False, OSError("the store is gone")], ids=repr)
def test_silent_connector_is_suspended_until_it_confirms_a_reset(make, silent):
    core, workers = make()
    connector = core.scheduler.connector = Connector(silent)
    for forgets, found in ((silent, (0, False)), (True, (16, True))):
        connector.forgets = forgets
        for worker in workers:
            worker.will(applied=True, touched=True, state="serving", version="b")
        finish(core)
        assert connector.get_num_new_matched_tokens(object(), 0) == found
        assert core.label == "b"


def test_kv_of_one_request_is_handed_over_until_the_first_commit_and_no_longer(make):
    core, workers = make()
    connector = core.scheduler.connector = Connector(None)

    def prefill():
        request = bag(kv_transfer_params={"do_remote_decode": True})
        found = connector.get_num_new_matched_tokens(request, 0)
        return found, connector.request_finished(request, [1])

    assert prefill() == ((16, True), (True, {"do_remote_prefill": True}))
    for _ in range(2):
        commit(core, workers)
        # The blocks go at once: nobody is told of them.
        assert prefill() == ((0, False), (False, None))
        # One that was looked up before, and waits for its last token.
        begun = bag(kv_transfer_params={"do_remote_decode": True})
        assert connector.request_finished(begun, [1]) == (True, None)


def test_disabled_prefix_cache_stays_disabled(make):
    core, workers = make()
    core.scheduler.kv_cache_manager.enable_caching = False
    commit(core, workers)
    assert core.scheduler.kv_cache_manager.enable_caching is False


def test_weights_without_memory_are_not_written_to(make):
    core, workers = make()
    core.model_executor.sleeping_tags = {"weights", "kv_cache"}
    with pytest.raises(RuntimeError, match="asleep"):
        core.collective_rpc("start_weight_update")
    assert [names_of(worker) for worker in workers] == [[], []]
    core.model_executor.sleeping_tags = {"kv_cache"}
    core.collective_rpc("start_weight_update")
    core.model_executor.sleeping_tags = {"weights"}
    with pytest.raises(RuntimeError, match="asleep"):
        core.collective_rpc("finish_weight_update")
    assert [names_of(worker) for worker in workers] == [["start_weight_update"]] * 2


def test_engine_that_was_told_to_leave_joins_again_by_an_invitation_by_hand_alone(make):
    core, workers = make()
    invite(core)
    invite(core, again=True)
    core.collective_rpc("shutdown_weight_transfer_engine")
    for worker in workers:
        worker.called.clear()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=DRAINED):
            invite(core, again=True)
        # As the publisher does at its end: no invitation.
        invite(core, leave=True)
    asked_to = [kwargs["init_info"]["wtransfer"] for _, kwargs in workers[0].called]
    assert [each.get("leave") for each in asked_to] == [True, True]
    invite(core)
    invite(core, again=True)
    assert names_of(workers[0]) == ["init_weight_transfer_engine"] * 4


def test_join_in_sleep_commits_no_orphaned_update(make):
    core, workers = make()
    core.model_executor.sleeping_tags = {"weights"}
    invitation = {"wtransfer": {"address": "unix:@x"}}
    core.collective_rpc("init_weight_transfer_engine", None, (), {"init_info": invitation})
    assert workers[0].called[0][1]["init_info"]["wtransfer"]["may_commit"] is False


def test_next_start_ends_an_abandoned_update(make):
    core, workers = make()
    core.collective_rpc("start_weight_update")
    for worker in workers:
        worker.will(applied=True, touched=True, state="serving", version="b")
    core.collective_rpc("start_weight_update")
    for worker in workers:
        assert names_of(worker) == [
            "start_weight_update",
            "finish_weight_update",
            "start_weight_update",
        ]
    assert (core.label, core.resets) == ("b", [("prefix", True, False), "encoder"])


@pytest.mark.parametrize("outcome", ["nothing left", "failed commit", "not carried out"])
def test_finish_whose_order_the_start_before_it_has_carried_out_is_no_error(make, outcome):
    core, workers = make()
    # Its trainer ends here; the next one's workers have its order when its start comes.
    core.collective_rpc("start_weight_update")
    nothing = {"state": "serving", "version": "b", "error": "no verified update was there"}
    for worker in workers:
        done = {"applied": True, "touched": True, "state": "serving", "version": "b"}
        worker.will(**nothing if outcome == "not carried out" else done)
    core.collective_rpc("start_weight_update")
    for worker in workers:
        worker.will(**nothing | {"touched": outcome == "failed commit"})
    if outcome == "nothing left":
        core.collective_rpc("finish_weight_update")
        assert core.label == "b"
        # Of that finish only.
        core.collective_rpc("start_weight_update")
    with pytest.raises(RuntimeError, match="nothing was committed: no verified update was there"):
        core.collective_rpc("finish_weight_update")


def test_shutdown_ends_a_started_update(make):
    core, workers = make()
    core.collective_rpc("start_weight_update")
    core.collective_rpc("shutdown_weight_transfer_engine")
    assert names_of(workers[0]) == [
        "start_weight_update",
        "finish_weight_update",
        "shutdown_weight_transfer_engine",
    ]


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("finish_weight_update", "without start_weight_update"),
        ("start_draft_weight_update", "does not update draft models"),
    ],
)
def test_invalid_call_is_refused_before_any_worker_is_called(make, method, words):
    core, workers = make()
    with pytest.raises(RuntimeError, match=words):
        core.collective_rpc(method)
    assert [names_of(worker) for worker in workers] == [[], []]


def test_ranks_share_an_instance_and_replicas_do_not(make):
    invitation = {"wtransfer": {"address": "unix:@x", "token": "t"}}
    expected = {"address": "unix:@x", "token": "t", "may_commit": True}
    named = []
    for _ in range(2):
        core, workers = make()
        core.collective_rpc("init_weight_transfer_engine", None, (), {"init_info": invitation})
        told = [worker.called[0][1]["init_info"]["wtransfer"] for worker in workers]
        assert told[0] == told[1]
        named.append(told[0].pop("instance"))
        assert told[0] == expected
    assert len(set(named)) == 2


def test_token_is_the_one_that_the_environment_had_at_the_start(make, monkeypatch):
    core, workers = make()
    core.collective_rpc("init_device")
    # As a client of vLLM's other routes can have a worker of this process do.
    monkeypatch.setenv("WTRANSFER_TOKEN", "another")
    invitation = {"wtransfer": {"address": "unix:@x", "token": "another"}}
    with pytest.raises(AuthenticationError, match="must be the same in both"):
        core.collective_rpc("init_weight_transfer_engine", None, (), {"init_info": invitation})
    assert [names_of(worker) for worker in workers] == [["init_device"]] * 2


def test_foreign_init_and_update_reach_no_worker(make):
    core, workers = make()
    with pytest.raises(ValueError, match="names no publisher"):
        core.collective_rpc("init_weight_transfer_engine", None, ({"master_port": 1},))
    with pytest.raises(ValueError, match="of another trainer"):
        core.collective_rpc("update_weights", None, (), {"update_info": [{"names": []}]})
    assert [names_of(worker) for worker in workers] == [[], []]
    core.collective_rpc("update_weights", None, (), {"update_info": {}})
    assert [worker.called for worker in workers] == [[("update_weights", {"update_info": {}})]] * 2


def test_sleep_at_level_2_empties_the_label_and_level_1_keeps_it(make):
    core, workers = make()
    core.sleep(1, mode="wait")
    assert (core.label, core.resets) == ("default", ["sleep 1 wait"])
    core.sleep(level=2)
    assert core.label == "empty"
    assert core.resets[-1] == "sleep 2 abort"
    # While it was known what the model consisted of; level 1 keeps that.
    assert [worker.proven_before for worker in workers] == [[[]]] * 2


def test_update_ordered_in_sleep_is_committed_on_wake_up(make):
    core, workers = make()
    core.sleep(2)
    for worker in workers:
        worker.weight_transfer_engine.member.pending = True
    assert core.wake_up(["kv_cache"]) is False
    assert (core.label, [names_of(worker) for worker in workers]) == ("empty", [[], []])
    for worker in workers:
        worker.will(applied=True, touched=True, state="serving", version="b")
    assert core.wake_up(tags=["weights"]) is True
    assert (core.label, [names_of(worker) for worker in workers]) == ("b", [["commit"]] * 2)


@pytest.mark.parametrize("has_adapters", [True, False])
def test_commit_in_any_call_resets_adapters_as_the_finish_of_vllm_does(make, has_adapters):
    core, workers = make()
    core.vllm_config.lora_config = bag() if has_adapters else None
    for worker in workers:
        resets = functools.partial(worker.called.append, ("reset of adapters", None))
        worker.model_runner = bag(reset_lora_state=resets)
    core.sleep(2)
    for worker in workers:
        worker.weight_transfer_engine.member.pending = True
        worker.will(applied=True, touched=True, state="serving", version="b")
    core.wake_up()
    reset = ["reset of adapters"] * has_adapters
    assert names_of(workers[1]) == ["commit", *reset]
    # The order of a publisher that was lost is carried out as the next one invites.
    invitation = {"wtransfer": {"address": "unix:@x"}}
    core.collective_rpc("init_weight_transfer_engine", None, (), {"init_info": invitation})
    assert names_of(workers[1]) == ["commit", *reset, "init_weight_transfer_engine", *reset]


def test_wake_up_without_a_pending_update_commits_nothing(make):
    core, workers = make()
    core.sleep(2)
    core.wake_up()
    assert core.label == "empty"
    # Publishers hear of it again: now they can be of help.
    assert workers[0].lost == ["asleep at level 2", "awake without weights"]
    workers[0].weight_transfer_engine.member.pending = True
    core.wake_up()
    assert [names_of(worker) for worker in workers] == [[], []]
    assert len(workers[0].lost) == 2


def test_nothing_is_committed_between_the_order_to_sleep_and_the_sleep(make):
    core, workers = make()
    core.sleep(2, mode="wait")
    with pytest.raises(RuntimeError, match="asleep"):
        core.collective_rpc("start_weight_update")
    core.asleep.set_result(None)
    with pytest.raises(RuntimeError, match="asleep"):
        core.collective_rpc("start_weight_update")
    core.wake_up()
    core.collective_rpc("start_weight_update")
    assert [names_of(worker) for worker in workers] == [["start_weight_update"]] * 2


def test_seed_era_commits_in_update_weights(make):
    core, workers = make(UPDATE)
    for worker in workers:
        worker.will(applied=True, touched=True, state="serving", version="b")
    core.collective_rpc("update_weights", None, (), {"update_info": {"is_checkpoint_format": True}})
    assert (core.label, core.resets) == ("b", [("prefix", True, False), "encoder"])


def test_seed_era_commits_in_no_other_call(make):
    core, workers = make(UPDATE)
    invitation = {"wtransfer": {"address": "unix:@x"}}
    core.collective_rpc("init_weight_transfer_engine", None, (), {"init_info": invitation})
    assert workers[0].called[0][1]["init_info"]["wtransfer"]["may_commit"] is False
    workers[0].weight_transfer_engine.member.pending = True
    core.sleep(2)
    core.wake_up()
    assert names_of(workers[0]) == ["init_weight_transfer_engine"]


def test_label_of_a_caller_does_not_rename_committed_weights(make):
    core, workers = make()
    core.set_weight_version("as it was started")
    assert core.label == "as it was started"
    commit(core, workers)
    core.set_weight_version("theirs")
    assert core.label == "b"


@pytest.mark.parametrize("method", ["reload_weights", "reset_weights"])
def test_replaced_weights_are_lost_before_the_call_can_fail(make, method):
    core, workers = make()
    core.model_executor.fails_in = method
    with pytest.raises(OSError, match="half way"):
        core.collective_rpc(method)
    assert core.label == "empty"
    assert [worker.lost for worker in workers] == [[f"{method} was called"]] * 2
    assert [worker.proven_before for worker in workers] == [[[]]] * 2


def test_other_backends_are_not_watched(make):
    core, workers = make(backend="nccl")
    core.collective_rpc("update_weights", None, (), {"update_info": {"names": ["x"]}})
    finish(core)
    core.sleep(2)
    assert names_of(workers[0]) == [
        "update_weights",
        "start_weight_update",
        "finish_weight_update",
    ]
    assert core.resets == ["sleep 2 abort"]


# -- with a connector of ours ----------------------------------------------------------------------


@pytest.fixture
def serve(make, monkeypatch):
    """Maker of a core with a connector of ours; renaming is written down beside the other calls."""

    def renamed(worker, why):
        worker.called.append(("renamed", why))
        return {"touched": True, "state": "empty", "version": None, "error": None}

    monkeypatch.setattr("wtransfer_vllm.engine_core.replaced_weights", renamed)

    def make_core(**options):
        core, workers = make(**options)
        core.vllm_config.kv_transfer_config = bag(kv_connector="ours")
        core.scheduler.connector = Connector(forgets=None)
        core.scheduler.requests = {}
        core.scheduler.failed_recving_kv_req_ids = set()
        return core, workers

    return make_core


def test_connector_is_told_of_new_weights_before_vllm_resets_its_cache(serve):
    core, workers = serve()
    known_at_reset = []
    core.prefix_reset = lambda: known_at_reset.append(len(core.scheduler.connector.told)) or True
    commit(core, workers)
    assert known_at_reset == [1]
    (told,) = core.scheduler.connector.told
    assert told == {(0, rank): worker.called for rank, worker in enumerate(workers)}
    assert core.scheduler.connector.get_num_new_matched_tokens(object(), 0) == (16, True)


def test_connector_that_cannot_be_told_is_suspended_until_it_can(serve):
    core, workers = serve()
    connector = core.scheduler.connector
    connector.deaf = True
    commit(core, workers)
    assert connector.get_num_new_matched_tokens(object(), 0) == (0, False)
    connector.deaf = False
    commit(core, workers)
    assert connector.get_num_new_matched_tokens(object(), 0) == (16, True)


def test_connector_by_module_path_is_foreign_whatever_its_name(serve):
    core, workers = serve()
    core.vllm_config.kv_transfer_config.kv_connector_module_path = "somebody.elses"
    commit(core, workers)
    assert core.scheduler.connector.told == []
    assert core.scheduler.connector.get_num_new_matched_tokens(object(), 0) == (0, False)


def test_sub_connectors_of_vllms_multi_connector_are_reset_one_by_one(make):
    core, workers = make()
    core.scheduler.connector = multi = Connector(forgets=True)
    multi.sub_connectors = [Connector(forgets=True), Connector(forgets=None)]
    commit(core, workers)
    assert multi.get_num_new_matched_tokens(object(), 0) == (0, False)
    multi.sub_connectors[1].forgets = True
    commit(core, workers)
    assert multi.get_num_new_matched_tokens(object(), 0) == (16, True)


def test_connector_is_told_of_the_weights_after_a_join(serve):
    core, _ = serve()
    invitation = {"wtransfer": {"address": "unix:@x"}}
    core.collective_rpc("init_weight_transfer_engine", None, (), {"init_info": invitation})
    assert len(core.scheduler.connector.told) == 1
    assert core.resets == []


@pytest.mark.parametrize("deferred", [True, False], ids=["0.32", "seed era"])
def test_requests_that_wait_with_kv_start_over(serve, deferred):
    core, workers = serve()
    holding = ("WAITING", "PREEMPTED", "WAITING_FOR_STREAMING_REQ")
    statuses = ("WAITING_FOR_REMOTE_KVS", "RUNNING", "FINISHED_STOPPED", *holding)
    core.scheduler.requests = {
        name: bag(request_id=name, status=bag(name=name), num_computed_tokens=64)
        for name in statuses
    }
    core.scheduler.requests["empty"] = bag(status=bag(name="WAITING"), num_computed_tokens=0)
    freed = []
    core.scheduler.kv_cache_manager.free = freed.append
    if deferred:
        core.scheduler._free_request_blocks = freed.append
        core.scheduler.kv_cache_manager.free = None
    commit(core, workers)
    assert core.scheduler.failed_recving_kv_req_ids == {"WAITING_FOR_REMOTE_KVS"}
    assert [each.request_id for each in freed] == list(holding)
    left = {name for name, each in core.scheduler.requests.items() if each.num_computed_tokens}
    assert left == {"RUNNING", "FINISHED_STOPPED"}


def test_session_is_computed_anew_from_its_next_input_on(serve):
    class Scheduler(bag):
        def _update_request_as_session(self, session, update):
            del session.tokens[session.num_computed_tokens :]
            session.tokens += update

    core, workers = serve()
    core.scheduler = Scheduler(**vars(core.scheduler))
    core.scheduler.kv_cache_manager.free = lambda _: None
    waiting = bag(name="WAITING_FOR_STREAMING_REQ")
    session = bag(request_id="a", status=waiting, num_computed_tokens=3, tokens=[1, 2, 3, 4])
    core.scheduler.requests = {"a": session}
    for _ in range(2):
        commit(core, workers)
        # Nothing of it is there that its end could store.
        assert session.num_computed_tokens == 0
    core.scheduler._update_request_as_session(session, [5])
    assert (session.tokens, session.num_computed_tokens) == ([1, 2, 3, 5], 0)
    session.num_computed_tokens = 4
    core.scheduler._update_request_as_session(session, [6])
    assert (session.tokens, session.num_computed_tokens) == ([1, 2, 3, 5, 6], 4)


def test_load_that_fails_as_the_weights_have_changed_ends_no_request(serve):
    """Of several KV cache groups workers report the request, and vLLM's policy would end it."""

    class Scheduler(bag):
        def _handle_failed_recving(self, names):
            return names

    core, workers = serve()
    core.scheduler = Scheduler(**vars(core.scheduler))
    waiting = bag(name="WAITING_FOR_REMOTE_KVS")
    core.scheduler.requests = {"a": bag(request_id="a", status=waiting, num_computed_tokens=4)}
    commit(core, workers)
    assert core.scheduler._handle_failed_recving({"a", "b"}) == {"b"}
    # It has started over: from now on its loads are its own.
    core.scheduler.failed_recving_kv_req_ids.clear()
    assert core.scheduler._handle_failed_recving({"a"}) == {"a"}


def test_held_blocks_lose_their_hashes_and_prefix_caching_stays_on(serve):
    core, workers = serve()
    evicted = []
    manager = core.scheduler.kv_cache_manager
    manager.block_pool, manager.evict_blocks = bag(num_gpu_blocks=3), evicted.append

    def refuse():
        raise RuntimeError("blocks are in use")

    core.prefix_reset = refuse
    commit(core, workers)
    assert (evicted, manager.enable_caching) == ([{0, 1, 2}], True)


@pytest.mark.parametrize("config", [None, bag(backend="nccl")], ids=["no backend", "another"])
def test_update_of_another_backend_renames_kv_before_and_after(serve, config):
    core, workers = serve()
    core.vllm_config.weight_transfer_config = config
    for method in ("start_weight_update", "update_weights"):
        core.collective_rpc(method)
    assert core.resets == []
    core.collective_rpc("finish_weight_update")
    for worker in workers:
        assert names_of(worker) == [
            "renamed",
            "start_weight_update",
            "renamed",
            "update_weights",
            "renamed",
            "finish_weight_update",
            "renamed",
        ]
    assert core.resets == [("prefix", True, False), "encoder"]
    assert len(core.scheduler.connector.told) == 4
    assert core.label == "default"
    core.set_weight_version("theirs")
    assert core.label == "theirs"


def test_failed_reload_renames_kv(serve):
    core, workers = serve()
    core.vllm_config.weight_transfer_config = None
    core.model_executor.fails_in = "reload_weights"
    with pytest.raises(OSError, match="half way"):
        core.collective_rpc("reload_weights")
    assert names_of(workers[0]) == ["renamed", "renamed"]
    assert core.resets == [("prefix", True, False), "encoder"]


# -- tags of outputs -------------------------------------------------------------------------------


def test_batches_in_flight_at_a_commit_have_the_tag_of_the_weights_that_computed_them(make):
    core, workers = make()
    core.batch_queue = deque(maxlen=3)
    core.batch_queue.extendleft(["loaded", "loaded"])
    commit_set(core, workers, "a", "a")
    assert core.process() == "default"
    core.batch_queue.appendleft("a")
    commit_set(core, workers, "b", "b")
    core.batch_queue.appendleft("b")
    found = [core.process() for _ in range(3)]
    assert found == ["default", "a@" + "a" * 32, "b@" + "b" * 32]
    assert core.process() == "b@" + "b" * 32
    assert core.label == "b"


def test_batches_in_flight_when_weights_are_lost_keep_their_tag(make):
    core, workers = make()
    core.batch_queue = deque()
    commit_set(core, workers, "a", "a")
    core.batch_queue.appendleft("a")
    core.collective_rpc("reload_weights")
    assert [core.process(), core.process()] == ["a@" + "a" * 32, "empty"]


def test_two_sets_under_one_label_have_two_tags(make):
    core, workers = make()
    tags = []
    for digit in "ab":
        commit_set(core, workers, "step", digit)
        tags.append(core.process())
    assert tags == ["step@" + "a" * 32, "step@" + "b" * 32]


def test_ranks_with_two_sets_under_one_label_have_no_label(make):
    core, workers = make()
    for worker, digit in zip(workers, "ab", strict=True):
        worker.will(
            applied=True, touched=True, state="serving", version="b", fingerprint=digit * 32
        )
    finish(core)
    assert (core.label, core.process()) == ("empty", "empty")


def test_commit_that_leaves_the_weights_as_loaded_leaves_the_tag(make):
    core, workers = make()
    for worker in workers:
        worker.will(touched=True, state="behind", error="broken", fingerprint="c" * 32)
    with pytest.raises(RuntimeError, match="broken"):
        finish(core)
    assert core.process() == "default"


def test_tags_of_another_backend_are_vllms(make):
    core, _ = make(backend="nccl")
    core.set_weight_version("theirs")
    assert core.process() == "theirs"


# -- requests that keep their KV -------------------------------------------------------------------


class Pool:
    """vLLM's block pool: names of the requests whose blocks have got a hash."""

    num_gpu_blocks = 3

    def __init__(self):
        self.hashed = []

    def cache_full_blocks(self, request, blocks):
        self.hashed.append((request.request_id, blocks))

    def cache_partial_block(self, request, block):
        self.hashed.append((request.request_id, block))
        return "hash"


class Scheduler(bag):
    """vLLM's scheduler; `running` requests are in the next batch."""

    def __init__(self):
        self.evicted = []
        self.pool = pool = Pool()
        managers = [bag(block_pool=pool), bag(block_pool=pool)]
        manager = bag(block_pool=pool, coordinator=bag(single_type_managers=managers))
        manager.enable_caching, manager.evict_blocks = True, self.evicted.append
        super().__init__(kv_cache_manager=manager, running=[], requests={})
        self.failed_recving_kv_req_ids = set()

    def begin(self, name, num_computed_tokens=64, status="RUNNING"):
        request = bag(request_id=name, num_preemptions=0, status=bag(name=status))
        request.num_computed_tokens = num_computed_tokens
        self.requests[name] = request
        if status == "RUNNING":
            self.running.append(request)
        return request

    def preempt(self, request):
        self.running.remove(request)
        request.num_preemptions += 1
        request.num_computed_tokens = 0

    def schedule(self, throttle=False):
        return bag(num_scheduled_tokens={each.request_id: 1 for each in self.running})


def invite(core, **more):
    info = {"wtransfer": {"address": "unix:@x", **more}}
    core.collective_rpc("init_weight_transfer_engine", None, (), {"init_info": info})


@pytest.fixture
def asked_to_keep(make, monkeypatch):
    """Maker of a core whose environment says that running requests keep their KV at a commit."""
    monkeypatch.setenv("WTRANSFER_VLLM_IN_FLIGHT", "keep")

    def make_core(**options):
        core, workers = make(**options)
        core.scheduler = Scheduler()
        return core, workers

    return make_core


@pytest.fixture
def keep(asked_to_keep):
    """Maker of a core that was invited so."""

    def make_core(**options):
        core, workers = asked_to_keep(**options)
        invite(core)
        return core, workers

    return make_core


def test_running_requests_keep_their_kv_and_no_block_is_found_by_its_hash(keep):
    core, workers = keep()
    kept = core.scheduler.begin("kept")
    commit_set(core, workers, "a", "a")
    assert (core.resets, core.scheduler.evicted) == (["encoder"], [{0, 1, 2}])
    assert (kept.num_computed_tokens, core.scheduler.running) == (64, [kept])
    assert core.scheduler.kv_cache_manager.enable_caching


def test_no_block_of_a_kept_request_gets_a_hash_until_it_is_preempted(keep):
    core, workers = keep()
    kept = core.scheduler.begin("kept")
    commit_set(core, workers, "a", "a")
    commit_set(core, workers, "b", "b")  # the pool is guarded once
    new, pool = core.scheduler.begin("new"), core.scheduler.pool
    for each in (kept, new):
        pool.cache_full_blocks(request=each, blocks=1)
        pool.cache_partial_block(request=each, block=2)
    assert pool.hashed == [("new", 1), ("new", 2)]
    core.scheduler.preempt(kept)
    pool.cache_full_blocks(request=kept, blocks=3)
    assert pool.hashed[2:] == [("kept", 3)]


def test_request_that_has_computed_nothing_or_gives_its_blocks_back_is_not_marked(keep):
    core, workers = keep()
    scheduler = core.scheduler
    failed, session = scheduler.begin("failed", 0), scheduler.begin("session")
    commit_set(core, workers, "a", "a")
    # Between two of its inputs it holds blocks without running.
    session.status.name = "WAITING_FOR_STREAMING_REQ"
    scheduler.running.remove(session)
    scheduler.kv_cache_manager.free = lambda _: None
    for each in (failed, session):
        scheduler.pool.cache_full_blocks(each, each.num_computed_tokens)
    assert scheduler.pool.hashed == [("failed", 0)]
    commit_set(core, workers, "b", "b")
    scheduler.pool.cache_full_blocks(session, session.num_computed_tokens)
    assert scheduler.pool.hashed[1:] == [("session", 0)]


@pytest.mark.parametrize("loses", ["sleep", "reload_weights", "reset_weights"])
def test_weights_that_are_lost_leave_no_request_its_kv(keep, loses):
    core, _ = keep()
    core.scheduler.begin("running")
    core.sleep(2, mode="keep") if loses == "sleep" else core.collective_rpc(loses)
    assert core.resets[:2] == [("prefix", True, False), "encoder"]


def test_kept_requests_are_named_in_the_tags_of_their_batches_only(keep):
    core, workers = keep()
    core.batch_queue = deque(["before"])
    scheduler = core.scheduler
    kept, other = scheduler.begin("kept"), scheduler.begin("other")
    commit_set(core, workers, "a", "a")

    def schedule():
        scheduler.schedule()
        core.batch_queue.appendleft("batch")

    scheduler.begin("new")
    schedule()
    scheduler.preempt(kept)  # the token in flight is of its older KV all the same
    schedule()
    scheduler.running.append(kept)
    scheduler.running.remove(other)
    schedule()
    a = "a@" + "a" * 32
    older = [f'{a}+older-kv["kept", "other"]', f'{a}+older-kv["other"]']
    assert [core.process() for _ in range(4)] == ["default", *older, a]


def test_batches_that_were_tagged_keep_their_tags_over_the_next_commit(keep):
    core, workers = keep()
    core.batch_queue = deque()
    commit_set(core, workers, "a", "a")
    core.scheduler.schedule()
    core.batch_queue.appendleft("a")
    core.scheduler.begin("kept")
    commit_set(core, workers, "b", "b")
    core.scheduler.schedule()
    core.batch_queue.appendleft("b")
    b = "b@" + "b" * 32
    assert [core.process(), core.process()] == ["a@" + "a" * 32, f'{b}+older-kv["kept"]']


def test_batches_in_flight_when_the_first_commit_fails_are_counted(keep):
    core, workers = keep()
    core.batch_queue = deque(["before"])
    for worker in workers:
        worker.will(touched=True, state="behind", error="broken", fingerprint="c" * 32)
    with pytest.raises(RuntimeError, match="broken"):
        finish(core)
    commit_set(core, workers, "a", "a")
    core.scheduler.schedule()
    core.batch_queue.appendleft("a")
    assert [core.process(), core.process()] == ["default", "a@" + "a" * 32]


def test_tags_of_batches_that_vllm_drops_are_dropped(keep):
    core, workers = keep()
    core.batch_queue = deque()
    commit_set(core, workers, "a", "a")
    core.scheduler.begin("kept")
    for _ in range(2):
        core.scheduler.schedule()
        core.batch_queue.appendleft("a")
    core.batch_queue.clear()  # as its fault tolerance does
    commit_set(core, workers, "b", "b")
    core.scheduler.schedule()
    core.batch_queue.appendleft("b")
    assert core.process() == "b@" + "b" * 32 + '+older-kv["kept"]'


def no_spans(core, monkeypatch):
    for each in type(core).mro()[:2]:
        monkeypatch.delattr(each, "_attach_weight_version")


def foreign_connector(core, _):
    core.vllm_config.kv_transfer_config = bag(kv_connector="NixlConnector")


def rust_front_end(_, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm.envs", bag(VLLM_USE_RUST_FRONTEND=True))


def pooling(core, _):
    core.vllm_config.model_config = bag(runner_type="pooling")


def second_pool(core, _):
    core.scheduler.kv_cache_manager.coordinator.single_type_managers.append(bag(block_pool=Pool()))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (no_spans, "use vLLM 0.32; or set it to 'recompute'"),
        (
            foreign_connector,
            "connector 'NixlConnector' is not .* use wtransfer-OffloadingConnector",
        ),
        (rust_front_end, "start vLLM without VLLM_USE_RUST_FRONTEND; or set it to 'recompute'"),
        (pooling, "embeds or classifies, .* two sets of weights; or set it to 'recompute'"),
        (second_pool, "start vLLM without it; or set it to 'recompute'"),
    ],
)
def test_keep_is_refused_with_the_invitation_where_it_cannot_be_done(
    asked_to_keep, change, words, monkeypatch
):
    core, workers = asked_to_keep()
    change(core, monkeypatch)
    with pytest.raises(ValueError, match=words):
        invite(core)
    assert not any(worker.called for worker in workers)


def test_keep_is_taken_beside_a_connector_of_ours(asked_to_keep, monkeypatch):
    core, workers = asked_to_keep()
    monkeypatch.setitem(sys.modules, "vllm.envs", bag(VLLM_USE_RUST_FRONTEND=False))
    core.vllm_config.kv_transfer_config = bag(kv_connector="ours")
    core.scheduler.connector = Connector(forgets=None)
    invite(core)
    assert names_of(workers[0]) == ["init_weight_transfer_engine"]


def test_treatment_that_is_unknown_is_refused_with_the_invitation(asked_to_keep, monkeypatch):
    core, workers = asked_to_keep()
    monkeypatch.setenv("WTRANSFER_VLLM_IN_FLIGHT", "kept")
    with pytest.raises(ValueError, match="is 'kept', expected 'recompute' or 'keep'"):
        invite(core)
    assert not any(worker.called for worker in workers)


def test_treatment_is_that_of_the_last_invitation_whatever_changes_before_a_commit(
    keep, monkeypatch
):
    core, workers = keep()
    for asked in ("kept", "recompute"):
        core.resets.clear()
        monkeypatch.setenv("WTRANSFER_VLLM_IN_FLIGHT", asked)
        commit_set(core, workers, "a", "a")
        assert core.resets == ["encoder"]
    invite(core)
    core.resets.clear()
    commit_set(core, workers, "b", "b")
    assert core.resets == [("prefix", True, False), "encoder"]


def test_pause_of_a_commit_is_logged_with_the_next_tokens(make, caplog):
    core, workers = make()
    core.scheduler.running = [object(), object()]
    results = iter([({}, True), ({0: "tokens"}, True), ({0: "more"}, True)])
    core.step_fn = step = lambda: next(results)
    caplog.set_level("INFO")
    commit(core, workers)
    core.step_fn()
    assert "running requests" not in caplog.text
    core.step_fn()
    assert "kept 2 running requests from their next token for" in caplog.text
    assert core.step_fn is step
