"""A request's blocks on their way from prefill to decode, by either connector."""

from __future__ import annotations

import json
import threading

import pytest
import torch

from wtransfer.connectors import process_group
from wtransfer.connectors.p2p import client as client_module
from wtransfer.connectors.p2p.client import P2PClient
from wtransfer.connectors.p2p.protocol import MAX_TEXT, Hello, Lookup, LookupReply, ReleaseRequest
from wtransfer.errors import ClosedError, ConnectorOptionError, GroupError
from wtransfer.kv import cache_view, copier
from wtransfer.kv.copier import Copier

PROMPT = list(range(100, 142))
BLOCKS = 10
SHM, GROUP = "SharedMemoryConnector", "ProcessGroupConnector"


def leases(one):
    return [worker.get_stats()["leases"] for worker in one.workers]


def count(one, what):
    return sum(worker.get_stats().get(what, 0) for worker in one.workers)


def client_of(other):
    """Return the only client of an instance with one rank."""
    (client,) = other.workers[0]._loads._clients.values()
    return client


def travelled(params):
    """Return parameters as a router hands them on."""
    return json.loads(json.dumps(params))


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("ranks", [1, 2])
def test_staged_blocks_arrive_whole(make, until, ranks, chunk):
    one, other = make("p", ranks=ranks), make("d", ranks=ranks)
    params = travelled(one.prefill("r", PROMPT, chunk=chunk))
    assert leases(one) == [1] * ranks
    assert params["remote_num_tokens"] == BLOCKS * 4
    outcome = other.decode("r2", PROMPT, params)
    assert (outcome["matched"], outcome["loaded"], outcome["wrong"]) == (BLOCKS, BLOCKS, 0)
    until(lambda: leases(one) == [0] * ranks)
    assert count(one, "blocks_saved_total") == count(other, "blocks_loaded_total") == BLOCKS * ranks


def test_parameters_have_the_fields_names(make):
    params = make("p").prefill("r", PROMPT)
    assert params["do_remote_prefill"] is True
    assert (params["remote_engine_id"], params["remote_request_id"]) == ("p", "r")
    assert "do_remote_decode" not in params


def test_prompt_is_not_handed_over_while_a_rank_is_unknown(make):
    one = make("p", ranks=2)
    known = {0: one.workers[0].get_handshake_metadata()}
    one.scheduler.set_xfer_handshake_metadata(known)
    assert one.prefill("r", PROMPT) is None
    assert leases(one) == [0, 0]


def test_one_token_is_left_to_compute(make):
    one, other = make("p"), make("d")
    prompt = PROMPT[:40]
    outcome = other.decode("r2", prompt, one.prefill("r", prompt))
    assert outcome["matched"] == 9


def test_request_that_stays_is_not_staged(make):
    one = make("p")
    assert one.prefill("r", PROMPT, decode=False) is None
    assert count(one, "blocks_saved_total") == 0


def test_staged_block_is_not_copied_again(make):
    one, other = make("p"), make("d")
    first, second = one.prefill("r", PROMPT), one.prefill("r'", PROMPT[:20] + PROMPT)
    assert count(one, "blocks_saved_total") == BLOCKS + 10
    for number, (params, prompt) in enumerate([(second, PROMPT[:20] + PROMPT), (first, PROMPT)]):
        outcome = other.decode(f"d{number}", prompt, params)
        assert (outcome["loaded"], outcome["wrong"]) == (outcome["matched"], 0)


def test_only_missing_blocks_are_loaded(make):
    one, other = make("p"), make("d")
    params = one.prefill("r", PROMPT)
    request, number = other.begin("r2", PROMPT, params, num_computed=12)
    assert number == 40 - 12
    other.until_received("r2")
    blocks = other.requests["r2"]
    assert other.wrong(PROMPT, blocks, BLOCKS) == [(n, 0, k) for n in range(3) for k in range(3)]
    other.finish(request)


def test_full_buffer_evicts_blocks_without_a_lease(make, until):
    room = make("x").workers[0].get_stats()["slots"]
    assert room > 3 * BLOCKS
    one, other = make("p", options={"shelf_bytes": 12 * 4096}), make("d")
    old = one.prefill("r", PROMPT)
    assert other.decode("r2", PROMPT, old)["loaded"] == BLOCKS
    until(lambda: leases(one) == [0])
    new = one.prefill("s", PROMPT[::-1])
    assert count(one, "blocks_evicted_total") == 8
    assert other.decode("s2", PROMPT[::-1], new)["loaded"] == BLOCKS
    # The longest unused went first, and behind a missing block there is nothing to be had.
    outcome = other.decode("r3", PROMPT, old)
    assert (outcome["matched"], outcome["loaded"], outcome["wrong"]) == (BLOCKS, 0, 0)
    assert count(other, "blocks_missed_absent_total") == BLOCKS


@pytest.mark.parametrize("chunk", [None, 7])
def test_leased_blocks_are_not_evicted(make, chunk):
    one, other = make("p", options={"shelf_bytes": 12 * 4096}), make("d")
    old, new = one.prefill("r", PROMPT), one.prefill("s", PROMPT[::-1], chunk=chunk)
    # A step plans nothing again that found no room.
    assert one.scheduler.get_stats()["blocks_to_save_total"] == 12
    assert other.decode("r2", PROMPT, old)["loaded"] == BLOCKS
    # What found no room is not advertised: D computes it, and has no failed load.
    outcome = other.decode("s2", PROMPT[::-1], new)
    assert (outcome["matched"], outcome["loaded"]) == (2, 2)
    assert count(other, "blocks_missed_total") == 0


@pytest.mark.parametrize("together", [True, False])
def test_request_that_ends_in_its_first_step_advertises_no_block_without_room(
    make, instance, monkeypatch, together
):
    """Hosts end a request before they hand on what the workers report of the step."""
    one, other = make("p", options={"shelf_bytes": 12 * 4096}), make("d")
    scheduler, prompts, params = one.scheduler, {"r": PROMPT, "s": PROMPT[::-1]}, {}
    real = scheduler.update_connector_output
    if not together:
        params["r"] = one.prefill("r", prompts.pop("r"))
        prompts["t"] = PROMPT[1:] + PROMPT[:1]
    rows = []
    for name, prompt in prompts.items():
        request = instance.Request(name, prompt, 1, {"do_remote_decode": True})
        scheduler.on_new_request(request)
        while scheduler.get_num_new_matched_tokens(request, 0)[0] is None:
            one.step()
        blocks = one.requests[name] = one.take(BLOCKS + 1)
        scheduler.update_state_after_alloc(request, instance.Blocks(blocks), 0)
        rows.append((request, blocks, 0, len(prompt)))

    def end_first(output):
        for request, blocks, *_ in rows:
            params[request.request_id] = scheduler.request_finished(request, blocks)[1]
        real(output)

    with monkeypatch.context() as patched:
        patched.setattr(scheduler, "update_connector_output", end_first)
        one.step(new=rows)
    outcomes = [
        other.decode(f"d{name}", {"r": PROMPT, **prompts}[name], given)
        for name, given in params.items()
    ]
    assert [each["matched"] for each in outcomes] == [10, 2, 0][: len(outcomes)]
    assert [each["loaded"] for each in outcomes] == [10, 2, 0][: len(outcomes)]


def test_room_that_was_released_since_the_last_step_is_found(make, until):
    """An idle host makes no steps, so a request that finds no room waits for one report."""
    one, other = make("p", options={"shelf_bytes": 12 * 4096}), make("d")
    assert other.decode("r2", PROMPT, one.prefill("r", PROMPT))["loaded"] == BLOCKS
    until(lambda: leases(one) == [0])
    assert other.decode("s2", PROMPT[::-1], one.prefill("s", PROMPT[::-1]))["loaded"] == BLOCKS
    until(lambda: leases(one) == [0])
    one.prefill("kept", PROMPT)
    # One report only: a buffer that stays full holds up no request.
    assert one.prefill("t", PROMPT[1:])["remote_num_tokens"] == 2 * 4


def test_staged_blocks_of_a_prompt_are_not_evicted_for_its_rest(make, until):
    one, other = make("p", options={"shelf_bytes": 12 * 4096, "lease_s": 0.001}), make("d")
    one.prefill("r", PROMPT)
    until(lambda: leases(one) == [0])
    longer = [*PROMPT[:40], *range(20)]
    params = one.prefill("s", longer)
    # Nor is planned to be staged what can find no room.
    assert count(one, "saves_without_room_total") == 0
    assert one.scheduler.get_stats()["blocks_to_save_total"] == BLOCKS + 12
    outcome = other.decode("s2", longer, params)
    assert (outcome["matched"], outcome["loaded"]) == (12, 12)


def test_blocks_that_cannot_be_staged_are_logged_once_and_counted(make, monkeypatch, caplog):
    one, other = make("p"), make("d")

    def gather(*_):
        raise OSError("no copy")

    with monkeypatch.context() as patched:
        patched.setattr(Copier, "gather", gather)
        for number in range(3):
            assert one.prefill(f"r{number}", PROMPT) is None
    assert count(one, "staging_errors_total") == 3
    assert count(one, "slots_leased") == count(one, "slots_kept") == 0
    assert caplog.text.count("KV blocks could not be staged") == 1
    assert caplog.text.count("OSError: no copy") == 1
    assert other.decode("s2", PROMPT, one.prefill("s", PROMPT))["loaded"] == BLOCKS


def test_failed_save_waits_for_copies_under_way(make, monkeypatch):
    """Its slots may be filled again as soon as it has ended."""
    one = make("p")
    monkeypatch.setattr(copier, "SHARE_NBYTES", 1)
    go_on, real, calls, ended = threading.Event(), Copier.gather, [], []

    def gather(self, *rest):
        calls.append(rest)
        if len(calls) == 1:
            raise OSError("no copy")
        assert go_on.wait(10)
        ended.append(real(self, *rest))
        return ended[0]

    monkeypatch.setattr(Copier, "gather", gather)
    threading.Timer(0.2, go_on.set).start()
    assert one.prefill("r", PROMPT) is None
    assert (len(calls), len(ended)) == (2, 1)


@pytest.mark.parametrize("kind", [SHM])
def test_slots_out_of_range_are_a_miss(make, monkeypatch):
    one, other = make("p"), make("d")
    params = one.prefill("r", PROMPT)
    monkeypatch.setattr(one.workers[0]._buffer, "lease", lambda *_: [10**9] * BLOCKS)
    assert other.decode("r2", PROMPT, params)["loaded"] == 0
    assert count(other, "blocks_missed_protocol_total") == BLOCKS


def test_lease_of_a_request_expires(make, until):
    one, other = make("p", options={"shelf_bytes": 12 * 4096, "lease_s": 0.05}), make("d")
    one.prefill("r", PROMPT)
    until(lambda: leases(one) == [0])
    assert count(one, "leases_expired_total") == 1
    new = one.prefill("s", PROMPT[::-1])
    assert other.decode("s2", PROMPT[::-1], new)["loaded"] == BLOCKS


def test_request_that_needs_no_block_is_released(make, until):
    one, other = make("p"), make("d")
    params = one.prefill("r", PROMPT)
    _, number = other.begin("r2", PROMPT, params, num_computed=40)
    assert number == 0
    until(lambda: leases(one) == [0])


def test_request_that_ends_before_it_has_blocks_is_released(make, until, instance):
    one, other = make("p"), make("d")
    request = instance.Request("r2", PROMPT, 1, one.prefill("r", PROMPT))
    other.scheduler.on_new_request(request)
    assert other.scheduler.request_finished(request, []) == (False, None)
    other.step()
    until(lambda: leases(one) == [0])


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": True},
        {"do_remote_prefill": "x"},
        {"do_remote_prefill": True, "remote_addresses": ["unix:/tmp/x"], "remote_num_tokens": 40},
        {"do_remote_prefill": True, "remote_addresses": [1], "remote_num_tokens": 40},
        {"do_remote_prefill": True, "remote_addresses": "unix:@x", "remote_num_tokens": -1},
        {"do_remote_prefill": True, "remote_addresses": ["unix:@" + "x" * 5000]},
        {"do_remote_prefill": True, "remote_request_id": "\ud800", "remote_num_tokens": 40},
        {"do_remote_prefill": True, "remote_addresses": "unix:@x", "remote_num_tokens": 1 << 64},
        {"something": object()},
        [1, 2],
    ],
)
def test_parameters_that_cannot_be_used_are_a_miss(make, params):
    other = make("d")
    assert other.decode("r", PROMPT, params)["matched"] == 0


def test_request_id_that_cannot_be_encoded_fails_no_other_request(make):
    one, other = make("p"), make("d")
    params = one.prefill("r", PROMPT)
    for name, matched in (("\ud800", 0), ("\u2028" * 1024, BLOCKS)):
        bad = {**params, "remote_request_id": name}
        assert other.decode(f"bad{matched}", PROMPT, bad)["matched"] == matched
    client = client_of(other)
    assert other.decode("r2", PROMPT, params)["loaded"] == BLOCKS
    assert client.is_alive


def test_address_of_another_kind_is_not_dialed(make, kind):
    one, other = make("p"), make("d")
    params = one.prefill("r", PROMPT)
    others = {
        SHM: ["tcp:127.0.0.1:1", "unix:/tmp/x", "unix:@/tmp/.X11-unix/X0"],
        GROUP: ["unix:@x", "tcp:a.host:1"],
    }[kind]
    for number, address in enumerate(others):
        params["remote_addresses"] = [address]
        assert other.decode(f"r{number}", PROMPT, params)["matched"] == 0


@pytest.mark.parametrize("kind", [GROUP])
def test_refused_peer_is_counted_logged_once_and_never_dialed(make, caplog):
    one, other = make("p"), make("d", options={"allowed_peers": ["10.0.0.0/8"]})
    params = one.prefill("r", PROMPT)
    for number in range(3):
        assert other.decode(f"r{number}", PROMPT, params)["matched"] == 0
    elsewhere = {**params, "remote_addresses": ["tcp:192.0.2.1:7000"]}
    assert other.decode("elsewhere", PROMPT, elsewhere)["matched"] == 0
    assert other.scheduler.get_stats()["peers_refused_total"] == 4
    warnings = [each.getMessage() for each in caplog.records]
    assert [text.count("allowed_peers in kv_connector_extra_config") for text in warnings] == [1]
    assert params["remote_addresses"][0] in warnings[0]
    assert not other.workers[0]._loads._clients
    assert leases(one) == [1]
    allowed = make("d2", options={"allowed_peers": ["127.0.0.1"]})
    assert allowed.decode("r2", PROMPT, params)["loaded"] == BLOCKS


def test_wrong_token_is_a_miss(make):
    one, other = make("p", options={"token": "one"}), make("d", options={"token": "another"})
    outcome = other.decode("r2", PROMPT, one.prefill("r", PROMPT))
    assert (outcome["matched"], outcome["loaded"]) == (BLOCKS, 0)
    assert count(other, "blocks_missed_refused_total") == BLOCKS
    assert count(one, "lookups_total") == 0


@pytest.mark.parametrize("kind", [GROUP])
def test_tokens_of_requests_make_no_clients_where_the_options_have_one(make):
    one, other = make("p"), make("d")
    params = one.prefill("r", PROMPT)
    for number in range(4):
        invented = {**params, "remote_tokens": [f"invented {number}"]}
        assert other.decode(f"r{number}", PROMPT, invented)["loaded"] == BLOCKS
    assert len(other.workers[0]._loads._clients) == 1


@pytest.mark.parametrize("kind", [SHM])
def test_wrong_token_in_a_request_fails_no_other_request(make, monkeypatch):
    real, late = P2PClient.fail, threading.Event()

    def fail(self, error):
        late.wait(0.3)  # long enough for others to come
        real(self, error)

    monkeypatch.setattr(P2PClient, "fail", fail)
    one, other = make("p"), make("d")
    params = one.prefill("r", PROMPT)
    other.begin("r2", PROMPT, {**params, "remote_tokens": ["wrong"]})
    assert other.decode("r3", PROMPT, params)["loaded"] == BLOCKS
    other.until_received("r2")
    assert count(other, "blocks_missed_refused_total") == BLOCKS


def test_configured_token_does_not_travel(make):
    one, other = make("p", options={"token": "secret"}), make("d", options={"token": "secret"})
    params = one.prefill("r", PROMPT)
    assert "secret" not in json.dumps(params)
    assert other.decode("r2", PROMPT, params)["loaded"] == BLOCKS


# -- FAULTS 29


@pytest.mark.parametrize(
    ("field", "theirs"),
    [
        ("block_size", {"block_size": 2}),
        ("pages", {"page_nbytes": 1024}),
        ("pages", {"layers": 4}),
        ("pages", {"dtype": "float16"}),
        ("model", {"model": "another"}),
        ("num_ranks", {"ranks": 2}),
    ],
)
def test_other_layout_is_refused_before_the_first_lookup(make, caplog, field, theirs):
    one, other = make("p", **theirs), make("d")
    outcome = other.decode("r2", PROMPT, one.prefill("r", PROMPT))
    assert outcome["matched"] > 0
    assert outcome["loaded"] == 0
    assert count(other, "blocks_missed_layout_total") == outcome["matched"]
    assert f"{field} is " in caplog.text
    assert count(one, "lookups_total") == 0
    # Nor the other way round.
    assert one.decode("r4", PROMPT, other.prefill("r", PROMPT))["loaded"] == 0
    # The next one that fits is not held up by it.
    third = make("q")
    assert other.decode("r3", PROMPT, third.prefill("r", PROMPT))["loaded"] == BLOCKS


# -- FAULTS 31 and 47


def test_blocks_of_other_weights_are_not_looked_up(make):
    one, other = make("p"), make("d")
    params = one.prefill("r", PROMPT)
    make.weights.settle("w2")
    other.step()
    assert other.decode("r2", PROMPT, params)["matched"] == 0


def test_prompt_that_lives_through_a_commit_is_not_handed_over(make):
    one = make("p")
    request = one.prefill("r", PROMPT, chunk=20, upto=20, finish=False)
    make.weights.settle("w2")
    # The scheduler's side does not know of it yet; the worker's does.
    metadata = one.step(rows=[(request, [], 20, 20)])
    assert len(metadata.saves) == 1
    assert count(one, "blocks_saved_total") == 5
    assert one.step(rows=[(request, [], 40, 2)]).saves == []
    assert one.finish(request) is None
    assert leases(one) == [0]


@pytest.mark.parametrize("when", ["planned", "loaded", "partly loaded", "ended"])
def test_load_that_lives_through_a_commit_is_a_miss(make, monkeypatch, instance, when):
    one, other = make("p"), make("d")
    params = one.prefill("r", PROMPT)
    worker = other.workers[0]
    if when == "partly loaded":
        buffer = one.workers[0]._buffer
        buffer.invalidate([list(buffer._committed)[6]])
    if when != "planned":
        real = worker._loads.end

        def end(pending, reason):
            if when != "ended":
                make.weights.settle("w2")
            real(pending, reason)
            if when == "ended":
                # After the load, and before the step that reports it.
                make.weights.settle("w2")

        monkeypatch.setattr(worker._loads, "end", end)
        request, number = other.begin("r2", PROMPT, params)
    else:
        request = instance.Request("r2", PROMPT, 1, params)
        number, _ = other.scheduler.get_num_new_matched_tokens(request, 0)
        assert other.scheduler.get_stats()["requests"] == 0
        blocks = other.requests["r2"] = other.take(11)
        other.scheduler.update_state_after_alloc(request, instance.Blocks(blocks), number)
        make.weights.settle("w2")
        other.step()
    assert number == 40
    other.until_received("r2")
    assert set(other.requests["r2"][:BLOCKS]) <= other.invalid
    assert count(other, "blocks_missed_weights_total") == BLOCKS
    assert count(one, "lookups_total") == (0 if when == "planned" else 1)
    other.finish(request)


# -- FAULTS 26, 28, 30


def test_block_under_another_key_is_a_miss(make):
    one, other = make("p"), make("d")
    params = one.prefill("r", PROMPT)
    buffer = one.workers[0]._buffer
    # As if a table pointed to the wrong slot; names with one hash differ as these do.
    names = list(buffer._committed)
    buffer._committed[names[4]] = buffer._committed[names[7]]
    outcome = other.decode("r2", PROMPT, params)
    assert (outcome["loaded"], outcome["wrong"]) == (4, 0)
    assert count(other, "blocks_missed_key_total") == BLOCKS - 4


def test_colliding_hashes_are_told_apart(make, monkeypatch, instance):
    one, other = make("p"), make("d")
    for each in (one, other):
        monkeypatch.setattr(each.scheduler._naming, "_hash", lambda text: b"\0" * 16)
    params = one.prefill("r", PROMPT)
    assert other.decode("r2", PROMPT, params)["loaded"] == BLOCKS
    outcome = other.decode("r3", PROMPT[::-1], params)
    assert (outcome["matched"], outcome["loaded"], outcome["wrong"]) == (BLOCKS, 0, 0)


@pytest.mark.parametrize("where", ["header", "checksum", "first page", "last page"])
def test_flipped_bit_is_a_miss(make, where):
    one, other = make("p"), make("d")
    params = one.prefill("r", PROMPT)
    buffer = one.workers[0]._buffer
    at = {"header": 24, "checksum": 44, "first page": 192, "last page": -1}[where]
    buffer.memory.used[buffer._committed[list(buffer._committed)[6]], at] ^= 4
    outcome = other.decode("r2", PROMPT, params)
    assert (outcome["loaded"], outcome["wrong"]) == (6, 0)


@pytest.mark.parametrize("how", ["torn", "another", "again"])
def test_slot_evicted_while_it_is_read_is_a_miss(make, monkeypatch, kind, how):
    one, other = make("p"), make("d")
    params = one.prefill("r", PROMPT)
    buffer = one.workers[0]._buffer
    memory, victim = buffer.memory, buffer._committed[list(buffer._committed)[3]]
    real = copier.differ

    def differ(found, expected):
        # Its header has been read and is right; now its pages become another's.
        if how == "torn":
            memory.slots[victim, 600] = 7
        # Or those that are copied are right, but it is gone afterwards, or here once more.
        elif how == "another":
            memory.headers[victim] = 0
        else:
            memory.versions[victim] += 1
        return real(found, expected)

    monkeypatch.setattr(copier, "differ", differ)
    outcome = other.decode("r2", PROMPT, params)
    assert (outcome["wrong"], outcome["matched"]) == (0, BLOCKS)
    if kind == SHM:
        assert outcome["loaded"] == 3


def test_each_rank_has_its_own_blocks(make):
    one, other = make("p", ranks=2), make("d", ranks=2)
    params = one.prefill("r", PROMPT)
    params["remote_addresses"].reverse()
    params.get("remote_tokens", []).reverse()
    outcome = other.decode("r2", PROMPT, params)
    assert (outcome["loaded"], outcome["wrong"]) == (0, 0)
    assert count(other, "blocks_missed_layout_total") == 2 * BLOCKS


def test_blocks_of_a_failed_load_are_invalidated(make, instance):
    one, other = make("p"), make("d")
    request = one.prefill("r", PROMPT, finish=False)
    broken = one.requests["r"][4]
    output = instance.KVConnectorOutput(invalid_block_ids={broken})
    one.scheduler.update_connector_output(output)
    one.step()
    assert count(one, "blocks_invalidated_total") == BLOCKS - 4
    params = one.finish(request)
    outcome = other.decode("r2", PROMPT, params)
    assert (outcome["matched"], outcome["loaded"], outcome["wrong"]) == (4, 4, 0)


@pytest.mark.parametrize("why", ["invalid blocks", "a step that does not count", "other weights"])
def test_request_whose_saves_were_all_taken_back_is_released(make, instance, why):
    one = make("p")
    one.prefill("kept", PROMPT)
    one.workers[0]._buffer.release("kept")
    if why == "a step that does not count":
        worker, one.workers[0].wait_for_save = one.workers[0], lambda: None
        request = one.prefill("r", PROMPT, finish=False)
        del worker.wait_for_save
    else:
        request = one.prefill("r", PROMPT, chunk=20, upto=20, finish=False)
        assert leases(one) == [1]
    if why == "invalid blocks":
        output = instance.KVConnectorOutput(invalid_block_ids={one.requests["r"][0]})
        one.scheduler.update_connector_output(output)
    elif why == "other weights":
        make.weights.settle("w2")
        one.step()
        one.scheduler.get_num_new_matched_tokens(request, 0)  # after a preemption
    assert one.finish(request) is None
    assert leases(one) == [0]
    assert count(one, "slots_leased") == 0


def test_late_repeated_or_unknown_messages_change_nothing(make, instance, until):
    one, other = make("p"), make("d")
    params = one.prefill("r", PROMPT)
    assert other.decode("r2", PROMPT, params)["loaded"] == BLOCKS
    until(lambda: leases(one) == [0])
    hello = Hello("d", 0, one.workers[0]._buffer.geometry, {})
    for message in (
        hello,
        LookupReply([7]),
        ReleaseRequest("r"),
        Lookup("r", [b"x"]),
        ReleaseRequest("unknown"),
    ):
        client_of(other)._dialer.send(message)
    until(lambda: count(one, "releases_unknown_total") == 2)
    assert count(one, "lookups_total") == 2
    assert leases(one) == [0]
    output = instance.KVConnectorOutput(finished_recving={"r2", "nobody"})
    other.scheduler.update_connector_output(output)
    assert other.scheduler.get_stats()["received_unknown_total"] == 2
    params = one.prefill("s", PROMPT[::-1])
    assert other.decode("s2", PROMPT[::-1], params)["loaded"] == BLOCKS


@pytest.mark.parametrize("kind", [SHM])
def test_client_that_only_looks_up_has_one_lease_at_most(make, until):
    """It has proven that it knows the token, and may be out of order all the same."""
    one, other = make("p"), make("d")
    params = one.prefill("r", PROMPT)
    assert other.decode("r2", PROMPT, params)["loaded"] == BLOCKS
    until(lambda: leases(one) == [0])
    client, keys = client_of(other), list(one.workers[0]._buffer._committed)[:1]
    for number in range(1, 51):
        client._dialer.send(Lookup(f"r{number}", keys))
    until(lambda: count(one, "lookups_total") == 51)
    assert (leases(one), count(one, "slots_leased")) == ([1], 1)
    client._dialer.send(Lookup("another", [b"x"]))
    until(lambda: leases(one) == [0])
    again = one.prefill("s", PROMPT)
    assert other.decode("s2", PROMPT, again)["loaded"] == BLOCKS


@pytest.mark.parametrize("kind", [GROUP])
def test_client_that_looks_up_and_receives_nothing_is_closed(make, until, caplog):
    one, other = make("p"), make("d")
    assert other.decode("r2", PROMPT, one.prefill("r", PROMPT))["loaded"] == BLOCKS
    client, keys = client_of(other), list(one.workers[0]._buffer._committed)
    for _ in range(process_group.MAX_LOOKUPS + 3):
        client._dialer.send(Lookup("r", keys))
    until(lambda: not client.is_alive)
    until(lambda: count(one, "clients") == 0)
    assert leases(one) == [0]
    assert f"more than {process_group.MAX_LOOKUPS} open lookups" in caplog.text
    assert other.decode("s2", PROMPT, one.prefill("s", PROMPT))["loaded"] == BLOCKS


def test_client_with_an_endless_request_id_is_closed(make, until):
    one, other = make("p"), make("d")
    assert other.decode("r2", PROMPT, one.prefill("r", PROMPT))["loaded"] == BLOCKS
    client = client_of(other)
    client._dialer.send(Lookup("x" * (MAX_TEXT + 1), [b"x"]))
    until(lambda: not client.is_alive)
    assert count(one, "lookups_total") == 1


# -- endings


def test_aborted_request_keeps_its_blocks_until_nothing_is_written(make, monkeypatch, until):
    one, other = make("p"), make("d", options={"num_threads": 1})
    params = one.prefill("r", PROMPT)
    reached, go_on = threading.Event(), threading.Event()
    real, seen = Copier.load, []

    def load(self, *rest):
        seen.append(rest)
        if len(seen) == 6:
            reached.set()
            assert go_on.wait(10)
        return real(self, *rest)

    monkeypatch.setattr(Copier, "load", load)
    monkeypatch.setattr(client_module, "SHARE_NBYTES", 1)
    request, _ = other.begin("r2", PROMPT, params)
    assert reached.wait(10)
    blocks = other.requests["r2"]
    assert other.scheduler.request_finished(request, blocks) == (True, None)
    other.step(finished=["r2"])
    assert "r2" not in other.received
    go_on.set()
    other.until_received("r2")
    assert other.invalid == set()
    assert count(other, "loads_aborted_total") == 1
    until(lambda: leases(one) == [0])
    # The sixth was under way; nothing came after it.
    assert all(other.wrong(PROMPT, blocks, n + 1) for n in range(6, BLOCKS))


@pytest.fixture
def no_more_threads(monkeypatch):
    """Let no thread start whose name ends in a way."""
    real = threading.Thread.start

    def begin(*ends):
        def start(self):
            if self.name.startswith("wtransfer-") and self.name.endswith(ends):
                raise RuntimeError("can't start new thread")
            real(self)

        monkeypatch.setattr(threading.Thread, "start", start)

    return begin


def test_threads_that_copy_run_before_the_first_request(make, monkeypatch, no_more_threads):
    """Else a copy that is queued for a thread that cannot start is made after its load's end."""
    monkeypatch.setattr(client_module, "SHARE_NBYTES", 1)
    one, other = make("p"), make("d")
    no_more_threads("_0", "_1")
    outcome = other.decode("r2", PROMPT, one.prefill("r", PROMPT))
    assert (outcome["loaded"], outcome["wrong"]) == (BLOCKS, 0)


@pytest.mark.parametrize("ends", ["save_0", "save_1", "copy_1"])
def test_caches_are_refused_where_a_thread_that_copies_cannot_start(make, no_more_threads, ends):
    no_more_threads(ends)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        make("p")


@pytest.mark.parametrize("kind", [SHM])
def test_load_ends_after_its_copies_where_a_later_one_cannot_begin(make, monkeypatch):
    one, other = make("p"), make("d", options={"num_threads": 1})
    monkeypatch.setattr(client_module, "SHARE_NBYTES", 1)
    threads = other.workers[0]._loads.threads
    refused, go_on, real, copies = threading.Event(), threading.Event(), threads.submit, []

    def submit(*task):
        if len(copies) == 1:
            refused.set()
            raise RuntimeError("no more")
        copies.append(real(lambda: go_on.wait(10) and task[0](*task[1:])))
        return copies[0]

    monkeypatch.setattr(threads, "submit", submit)
    request, _ = other.begin("r2", PROMPT, one.prefill("r", PROMPT))
    assert refused.wait(10)
    assert not go_on.wait(0.05)  # long enough for a load that does not wait
    other.step()
    assert not other.received
    go_on.set()
    other.until_received("r2")
    other.finish(request)


def test_shutdown_while_loading_is_a_miss(make, monkeypatch):
    one, other = make("p"), make("d")
    params = one.prefill("r", PROMPT)
    reached, go_on = threading.Event(), threading.Event()
    real = P2PClient._load

    def load(self, *rest):
        reached.set()
        assert go_on.wait(10)
        return real(self, *rest)

    monkeypatch.setattr(P2PClient, "_load", load)
    other.begin("r2", PROMPT, params)
    assert reached.wait(10)
    threading.Timer(0.1, go_on.set).start()
    other.workers[0].shutdown()
    assert other.workers[0].get_finished(set()) == (None, {"r2"})
    assert other.workers[0].get_block_ids_with_load_errors() == set(other.requests["r2"][:BLOCKS])


@pytest.mark.parametrize("kind", [GROUP])
def test_shutdown_ends_a_wait_for_bytes(make, monkeypatch, until):
    one, other = make("p"), make("d")
    params = one.prefill("r", PROMPT)
    go_on = threading.Event()
    monkeypatch.setattr(process_group._Sender, "_send", lambda *_: go_on.wait(10))
    other.begin("r2", PROMPT, params)
    until(lambda: count(one, "lookups_total") == 1)
    other.workers[0].shutdown()
    assert other.workers[0].get_finished(set()) == (None, {"r2"})
    assert other.workers[0].get_block_ids_with_load_errors() == set(other.requests["r2"][:BLOCKS])
    go_on.set()


@pytest.mark.parametrize("kind", [GROUP])
@pytest.mark.parametrize("where", ["meet", "send", "later send"])
def test_load_fails_at_once_where_the_other_side_cannot_send(make, monkeypatch, until, where):
    one, other = make("p"), make("d")
    if where == "later send":
        assert other.decode("r0", PROMPT, one.prefill("r", PROMPT))["loaded"] == BLOCKS
    params = one.prefill("s", PROMPT[::-1])
    real = process_group._Pair.meet

    def fail(*_):
        raise GroupError("no socket")

    def meet(pair):
        return fail() if pair._rank == process_group._SENDER else real(pair)

    if where == "meet":
        monkeypatch.setattr(process_group._Pair, "meet", meet)
    else:
        monkeypatch.setattr(process_group._Sender, "_send", fail)
    # The deadline is later.
    outcome = other.decode("s2", PROMPT[::-1], params, patience_s=10.0)
    assert (outcome["matched"], outcome["loaded"]) == (BLOCKS, 0)
    assert count(other, "blocks_missed_lost_total") == BLOCKS
    until(lambda: count(one, "clients") == 0)


@pytest.mark.parametrize("kind", [GROUP])
def test_blocks_that_arrived_before_the_peer_was_lost_count(make, monkeypatch, until):
    one, other = make("p"), make("d")
    params = one.prefill("r", PROMPT)
    go_on, real = threading.Event(), process_group._Sender._send

    def send(self, slots):
        real(self, slots[:4])
        go_on.wait(10)

    monkeypatch.setattr(process_group._Sender, "_send", send)
    other.begin("r2", PROMPT, params)
    blocks = other.requests["r2"]
    until(lambda: not other.wrong(PROMPT, blocks, 4))
    threading.Timer(0.2, go_on.set).start()
    one.workers[0].shutdown()
    other.until_received("r2", patience_s=1.0)
    assert other.invalid == set(blocks[4:BLOCKS])
    assert count(other, "blocks_missed_lost_total") == BLOCKS - 4


@pytest.mark.parametrize("kind", [GROUP])
def test_peer_lost_while_the_group_forms_is_a_miss_at_once(make, monkeypatch):
    one, other = make("p"), make("d")
    params = one.prefill("r", PROMPT)
    reached, go_on = threading.Event(), threading.Event()

    class Mute(process_group.Rendezvous):
        def join(self, timeout_s=None):
            reached.set()
            self.call(lambda: go_on.wait(10), "a host that does not answer", timeout_s)

    monkeypatch.setattr(process_group, "Rendezvous", Mute)
    other.begin("r2", PROMPT, params)
    assert reached.wait(10)
    one.workers[0].shutdown()
    other.until_received("r2", patience_s=process_group.JOIN_S / 2)
    assert count(other, "blocks_missed_lost_total") == BLOCKS
    go_on.set()


def test_lost_instance_is_a_miss_and_its_successor_works(make):
    one, other = make("p"), make("d")
    params = one.prefill("r", PROMPT)
    assert other.decode("r2", PROMPT, params)["loaded"] == BLOCKS
    one.close()
    make.weights.settle("w1")
    outcome = other.decode("r3", PROMPT, params)
    assert (outcome["loaded"], outcome["wrong"]) == (0, 0)
    assert outcome["seconds"] < 1.0
    again = make("p")
    assert other.decode("r4", PROMPT, again.prefill("r", PROMPT))["loaded"] == BLOCKS


def test_lost_client_releases_its_leases(make, monkeypatch, until):
    one, other = make("p"), make("d")
    params = one.prefill("r", PROMPT)
    reached, go_on = threading.Event(), threading.Event()

    def load(self, *_):
        reached.set()
        assert go_on.wait(10)
        raise ClosedError("as when the process was killed")

    monkeypatch.setattr(P2PClient, "load", load)
    other.begin("r2", PROMPT, params)
    assert reached.wait(10)
    assert leases(one) == [2]  # of the request, and of the lookup
    go_on.set()
    until(lambda: leases(one) == [0])
    assert (count(one, "slots_leased"), count(one, "clients")) == (0, 0)


def test_step_that_does_not_count_stages_nothing(make):
    one, other = make("p"), make("d")
    worker, one.workers[0].wait_for_save = one.workers[0], lambda: None
    request = one.prefill("r", PROMPT, chunk=20, upto=20, finish=False)
    del worker.wait_for_save
    assert count(one, "blocks_saved_total") == 0
    # The host computes it once more.
    one.step(rows=[(request, [], 0, 42)])
    outcome = other.decode("r2", PROMPT, one.finish(request))
    assert (outcome["matched"], outcome["loaded"], outcome["wrong"]) == (BLOCKS, BLOCKS, 0)


def test_numbers_that_only_grow_are_counters(make, until):
    """By their names: vLLM's and our Prometheus collectors take all others for gauges."""
    gauges = {"clients", "leases", "loads_under_way", "requests"}
    gauges |= {"slots", "slots_kept", "slots_leased"}
    one, other = make("p", options={"shelf_bytes": 12 * 4096}), make("d")
    for number in range(2):
        prompt = [number, *PROMPT]
        assert other.decode(f"d{number}", prompt, one.prefill("r", prompt))["loaded"] == BLOCKS
        until(lambda: leases(one) == [0])
    for each in (one, other):
        for numbers in (each.scheduler.get_stats(), *(w.get_stats() for w in each.workers)):
            assert {name for name in numbers if not name.endswith("_total")} <= gauges


def test_each_role_has_what_it_needs_and_no_more(make):
    one, other = make("p", role="kv_producer"), make("d", role="kv_consumer")
    params = one.prefill("r", PROMPT)
    assert other.decode("r2", PROMPT, params)["loaded"] == BLOCKS
    assert other.workers[0].get_handshake_metadata().address == ""
    assert "slots" not in other.workers[0].get_stats()
    assert other.prefill("s", PROMPT) is None
    assert one.decode("r3", PROMPT, params)["matched"] == 0


def test_caches_that_cannot_be_copied_by_block_are_refused(make):
    one = make("p")
    worker = type(one.workers[0])(one.workers[0].config)
    with pytest.raises(ConnectorOptionError, match=r"layer 'layer0' .* cannot be copied by block"):
        worker.register_kv_caches({"layer0": torch.zeros(8, 4, 6)[:, :, ::2]})
    with pytest.raises(ConnectorOptionError, match="the KV cache has no layers"):
        worker.register_kv_caches({})


def test_cache_on_a_device_is_saved_and_loaded(make, monkeypatch):
    """On torch's ``cpu`` device, which there is everywhere."""
    monkeypatch.setattr(cache_view, "HostPages", cache_view.DevicePages)
    one, other = make("p"), make("d")
    outcome = other.decode("r2", PROMPT, one.prefill("r", PROMPT))
    assert (outcome["loaded"], outcome["wrong"]) == (BLOCKS, 0)


def test_full_pool_closes_the_client_that_was_needed_longest_ago(make, monkeypatch, until):
    monkeypatch.setattr(client_module, "MAX_CLIENTS", 2)
    other, served = make("d"), [make(f"p{n}") for n in range(3)]
    for number, one in enumerate((*served, served[2], served[0])):
        prompt = [number, *PROMPT]
        outcome = other.decode(f"d{number}", prompt, one.prefill("r", prompt))
        assert (outcome["loaded"], outcome["wrong"]) == (BLOCKS, 0)
        until(lambda one=one: leases(one) == [0])
    until(lambda: [count(one, "clients") for one in served] == [1, 0, 1])


def test_warnings_that_requests_cause_are_logged_once_each(make, kind, caplog):
    one, other = make("p"), make("d")
    params = one.prefill("r", PROMPT)
    caplog.clear()
    for number in range(5):
        nowhere = {SHM: f"unix:@wtransfer-{number:032x}", GROUP: f"tcp:127.0.0.1:{number + 1}"}
        made_up = {**params, "remote_addresses": [nowhere[kind]], "remote_tokens": ["x"]}
        assert other.decode(f"a{number}", PROMPT, made_up)["loaded"] == 0
        ranks = {**params, "remote_addresses": params["remote_addresses"] * (number + 2)}
        assert other.decode(f"b{number}", PROMPT, ranks)["loaded"] == 0
    assert len([each for each in caplog.records if each.levelname == "WARNING"]) == 2
    assert count(other, "warnings_total") == 10
    assert other.decode("r2", PROMPT, params)["loaded"] == BLOCKS


@pytest.mark.slow
def test_slots_reused_while_they_are_read_never_give_other_bytes(make):
    size = {"layers": 4, "page_nbytes": 32 * 1024}
    room = {"shelf_bytes": 12 * (4 * 32 * 1024 + 4096), "lease_s": 1e-6}
    one, other = make("p", options=room, **size), make("d", **size)
    loaded = set()
    for number in range(25):
        prompt = [number * 100 + each for each in range(42)]
        params = one.prefill(f"r{number}", prompt)
        request, _ = other.begin(f"d{number}", prompt, params)
        for more in range(2):
            one.prefill(f"o{number}-{more}", [number * 100 + 50 + more, *prompt])
        other.until_received(f"d{number}")
        blocks = other.requests[f"d{number}"]
        good = [blocks[n] in other.invalid for n in range(BLOCKS)] + [True]
        loaded.add(good.index(True))
        assert other.wrong(prompt, blocks, good.index(True)) == []
        other.invalid.clear()
        other.finish(request)
    assert count(one, "blocks_evicted_total") > 100
