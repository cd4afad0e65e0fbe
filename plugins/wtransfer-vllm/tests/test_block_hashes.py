"""Hashes of blocks that follow from the weights, beside vLLM's own requests and hash functions."""

import types

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: tests/make_env.py ENV")

from wtransfer.weight_version import WeightVersion

from wtransfer_vllm import block_hashes, places

pytestmark = pytest.mark.filterwarnings("ignore")  # of what vLLM imports

bag = types.SimpleNamespace
SIZE = 4
"""Tokens of a block."""
A, B = "a" * 32, "b" * 32


class Core:
    """An engine core with one connector of lower tiers, whose workers the test sets.

    Args:
        *fingerprints: Each worker's; None: it has no version.
    """

    def __init__(self, *fingerprints, algorithm="sha256"):
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core import kv_cache_utils

        hash_fn = get_hash_fn_by_name(algorithm)
        kv_cache_utils.init_none_hash(hash_fn)
        self.epoch = 0
        self.hold(*fingerprints)
        self.stored, self.looked_up = [], []
        manager = bag(secondary_tiers=[object()], prepare_store=self._store)
        self.side = bag(
            manager=manager,
            get_num_new_matched_tokens=lambda *_: (SIZE, True),
            reset_cache=self._reset,
            _req_status={},
            _jobs={7: None},
            _current_batch_jobs_to_flush=set(),
        )
        self.scheduler = bag(
            connector=bag(connector_scheduler=self.side),
            hash_block_size=SIZE,
            reset_preempted_req_ids=set(),
            _get_local_prefix_cache_hit=lambda request: self.looked_up.append(
                list(request.block_hashes)
            ),
        )
        self.vllm_config = bag(cache_config=bag(prefix_caching_hash_algo=algorithm))
        self.request_block_hasher = kv_cache_utils.get_request_block_hasher(SIZE, hash_fn)
        self.plain = self.request_block_hasher
        self.hashes = block_hashes.BlockHashes(self, self._call)

    def hold(self, *fingerprints):
        self.epoch += 1
        self.versions = [each and WeightVersion(each, self.epoch) for each in fingerprints]

    def _call(self, _function):
        return self.versions

    def _reset(self):
        """Do as vLLM does."""
        assert not self.side._current_batch_jobs_to_flush
        self.side._current_batch_jobs_to_flush.add(8)

    def _store(self, keys, _context):
        self.stored.append(keys)

    def request(self, name="1", tokens=range(10), **more):
        """Return a request as it arrives; vLLM's connector knows it at once."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        made = Request(
            *(name, list(tokens), SamplingParams(), None),
            block_hasher=self.request_block_hasher,
            **more,
        )
        state = bag(offload_keys=[b"old"], block_ids=[5], next_stored_chunk_idx=1)
        self.side._req_status[name] = bag(req=made, group_states=[state])
        return made

    def look_up(self, request):
        self.scheduler._get_local_prefix_cache_hit(request)
        return self.looked_up[-1]

    def store(self, request):
        """Return what is stored of a request."""
        self.side.manager.prepare_store([b"key"], bag(req_id=request.request_id))
        return self.stored[-1]


def test_equal_weights_have_equal_hashes_in_every_engine_and_others_share_none():
    named = {each: Core(each).request().block_hashes for each in (A, B)}
    assert len(named[A]) == 2
    assert Core(A, A).request().block_hashes == named[A]
    ranks = Core(A, B).request().block_hashes
    plain = Core(A).plain(bag(**vars(Core(A).request()) | {"block_hashes": []}, num_tokens=10))
    salted = Core(A).request(cache_salt="salt").block_hashes
    all_of_them = [*named[A], *named[B], *ranks, *plain, *salted]
    assert len(set(all_of_them)) == len(all_of_them) == 10
    assert Core(B).request(cache_salt="salt").block_hashes != salted


def test_connector_can_be_reset_between_a_commit_and_the_next_step():
    core = Core(A)
    core.hold(B)
    core.hashes.forget()
    core.side.reset_cache()
    assert core.side._current_batch_jobs_to_flush == {7, 8}


def test_request_that_arrives_before_a_commit_is_named_anew_when_it_is_looked_up():
    core = Core(A)
    request = core.request()
    held = request.block_hashes
    core.hold(B)
    core.hashes.forget()
    (state,) = core.side._req_status["1"].group_states
    assert (state.offload_keys, state.block_ids, state.next_stored_chunk_idx) == ([], [], 0)
    assert core.side._current_batch_jobs_to_flush == {7}
    assert core.store(request) == []  # as it ends, say, without another look-up
    # What vLLM's connector learns of it until then.
    state.offload_keys.append(b"of A")
    assert core.look_up(request) == Core(B).request().block_hashes == held
    assert state.offload_keys == []
    assert core.store(request) == [b"key"]
    request.append_output_token_ids([1, 2, 3])
    assert held == Core(B).request(tokens=[*range(10), 1, 2, 3]).block_hashes


def test_request_that_arrived_before_blocks_were_named_is_named_when_it_is_looked_up():
    core = Core(A)
    named, core.request_block_hasher = core.request_block_hasher, core.plain
    request = core.request()
    core.request_block_hasher = named
    assert core.look_up(request) == core.request().block_hashes
    request.append_output_token_ids([1, 2, 3])
    assert request.block_hashes == core.request(tokens=[*range(10), 1, 2, 3]).block_hashes


def test_request_of_before_a_way_there_and_back_stores_nothing_until_it_is_looked_up():
    core = Core(A)
    request = core.request()
    core.look_up(request)
    for name in (B, A):
        core.hold(name)
        core.hashes.renew()
    assert core.store(request) == []
    core.look_up(request)
    assert core.store(request) == [b"key"]


@pytest.mark.parametrize("unknown", [(None,), ("local:" + A,), (A, None), (A, "local:" + B)])
def test_weights_that_no_other_process_can_name_share_nothing(unknown, monkeypatch):
    core = Core(*unknown)
    early = core.request("early")
    assert core.look_up(early) == core.request("same").block_hashes
    assert core.look_up(early) != Core(*unknown).request().block_hashes
    assert core.store(early) == []
    # Once they have a name, what began before stays without.
    monkeypatch.setattr(block_hashes, "ASK_AGAIN_S", -1)
    core.hold(*[A for _ in unknown])
    late = core.request("late")
    if None not in unknown:
        core.hashes.renew()
    assert core.look_up(late) == Core(A).request().block_hashes
    assert (core.store(late), core.store(early)) == ([b"key"], [])


def test_request_with_an_adapter_stores_nothing():
    from vllm.lora.request import LoRARequest

    core = Core(A)
    request = core.request(lora_request=LoRARequest("policy", 1, "/adapter"))
    core.look_up(request)
    assert core.store(request) == []


def test_request_that_is_preempted_is_loaded_a_step_later():
    core = Core(A)
    request = core.request()
    core.scheduler.reset_preempted_req_ids = {"1"}
    assert core.side.get_num_new_matched_tokens(request, 0) == (None, False)
    core.scheduler.reset_preempted_req_ids = set()
    assert core.side.get_num_new_matched_tokens(request, 0) == (SIZE, True)


def test_workers_that_do_not_answer_leave_the_weights_without_a_name(caplog):
    core = Core(A)
    request = core.request()

    def fails(_function):
        raise OSError("no answer")

    core.hashes._call = fails
    core.hashes.forget()
    assert core.look_up(request) != Core(A).request().block_hashes
    assert core.store(request) == []


def test_vllm_without_lower_tiers_where_they_are_known_is_told():
    core = Core(A)
    core.side.manager.secondary_tiers = []
    with pytest.raises(AttributeError, match="at another place"):
        block_hashes.BlockHashes(core, core._call)


def test_only_lower_tiers_need_names():
    def config(**options):
        transfer = bag(kv_connector="OffloadingConnector", kv_connector_extra_config=options)
        return bag(kv_transfer_config=transfer)

    tiers = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [{"type": "fs"}]}
    assert block_hashes.names_blocks(config(**tiers))
    assert not block_hashes.names_blocks(config(spec_name="TieringOffloadingSpec"))
    assert not block_hashes.names_blocks(bag())
    assert places.LOWER_TIERS[0] == "named"
