"""A request's blocks on their way from prefill to decode, by either connector."""

from __future__ import annotations

import json
import socket
import threading

import pytest
import torch
from host import MODEL, travelled
from msgspec.structs import replace

from wtransfer.connectors import process_group
from wtransfer.connectors.interface import KVConnectorOutput
from wtransfer.connectors.p2p import client as client_module
from wtransfer.connectors.p2p.client import P2PClient
from wtransfer.connectors.p2p.protocol import MAX_TEXT, Hello, Lookup, LookupReply, ReleaseRequest
from wtransfer.errors import ClosedError, GroupError
from wtransfer.kv import cache_view, copier
from wtransfer.kv.copier import Copier
from wtransfer.testing.mini_engine.config import ModelShape

PROMPT = list(range(100, 142))
BLOCKS = 10
SHM, GROUP = "SharedMemoryConnector", "ProcessGroupConnector"
ROOM = {"staging_bytes": 12 * 4096}
"""Options of a staging buffer of twelve blocks."""


def worker_of(one, rank=0):
    return one.workers[rank].side.side


def scheduler_of(one):
    return one.scheduler_side.side.side


def leases(one):
    return [worker.side.get_stats()["leases"] for worker in one.workers]


def count(one, what):
    return sum(worker.side.get_stats().get(what, 0) for worker in one.workers)


def buffer_of(one):
    """Return the staging buffer of an instance with one rank, and its keys in order."""
    buffer = worker_of(one)._buffer
    return buffer, list(buffer._committed)


def client_of(other):
    """Return the only client of an instance with one rank."""
    (client,) = worker_of(other)._loads._clients.values()
    return client


def begin(other, params):
    """Let an instance begin to load; return the request."""
    other.clear_cache()
    request = other.add(PROMPT, 1, params)
    other.step()
    return request


@pytest.fixture
def hold(monkeypatch):
    """Let a method wait before its call, or after: events that it is reached, and may go on."""
    released = []

    def at(owner, name, *, after=False, error=None):
        reached, go_on, real = threading.Event(), threading.Event(), getattr(owner, name)
        released.append(go_on)

        def call(*args):
            found = real(*args) if after else None
            reached.set()
            assert go_on.wait(10)
            if error is not None:
                raise error
            return found if after else real(*args)

        monkeypatch.setattr(owner, name, call)
        return reached, go_on

    yield at
    for each in released:
        each.set()


@pytest.mark.parametrize("budget", [2048, 7])
def test_staged_blocks_arrive_whole_on_all_ranks(make, until, budget):
    one, other = make("p", budget=budget, num_ranks=2), make("d", num_ranks=2)
    params = one.prefill(PROMPT)
    assert leases(one) == [1, 1]
    assert params["remote_num_tokens"] == BLOCKS * 4
    served = other.serve(PROMPT, 1, params)
    assert (served.matched, served.loaded) == (BLOCKS, BLOCKS)
    until(lambda: leases(one) == [0, 0])
    assert count(one, "blocks_saved_total") == count(other, "blocks_loaded_total") == BLOCKS * 2


def test_prompt_is_not_handed_over_while_a_rank_is_unknown(make):
    one = make("p", num_ranks=2)
    known = {0: worker_of(one).get_handshake_metadata()}
    scheduler_of(one).set_xfer_handshake_metadata(known)
    assert one.prefill(PROMPT) is None
    assert leases(one) == [0, 0]


def test_parameters_have_the_fields_names(make):
    params = make("p").prefill(PROMPT)
    assert params["do_remote_prefill"] is True
    assert (params["remote_engine_id"], params["remote_request_id"]) == ("p", "request-0")
    assert "do_remote_decode" not in params


def test_request_that_stays_is_not_staged(make):
    one = make("p")
    assert one.serve(PROMPT).request.kv_transfer_params is None
    assert count(one, "blocks_saved_total") == 0


def test_staged_block_is_not_copied_again(make):
    one, other = make("p"), make("d")
    prompts = [PROMPT, PROMPT[:20] + PROMPT]
    params = [one.prefill(prompt) for prompt in prompts]
    assert count(one, "blocks_saved_total") == BLOCKS + 10
    for prompt, each in zip(prompts, params, strict=True):
        served = other.serve(prompt, 1, each)
        assert served.loaded == served.matched


# -- the room of the staging buffer


def test_full_buffer_evicts_blocks_without_a_lease(make, until):
    one, other = make("p", **ROOM), make("d")
    old = one.prefill(PROMPT)
    assert other.serve(PROMPT, 1, old).loaded == BLOCKS
    until(lambda: leases(one) == [0])
    new = one.prefill(PROMPT[::-1])
    assert count(one, "blocks_evicted_total") == 8
    assert other.serve(PROMPT[::-1], 1, new).loaded == BLOCKS
    # The longest unused went first, and behind a missing block there is nothing to be had.
    served = other.serve(PROMPT, 1, old)
    assert (served.matched, served.loaded) == (BLOCKS, 0)
    assert count(other, "blocks_missed_absent_total") == BLOCKS


@pytest.mark.parametrize("budget", [2048, 7])
def test_leased_blocks_are_not_evicted(make, budget):
    one, other = make("p", budget=budget, **ROOM), make("d")
    old, new = one.prefill(PROMPT), one.prefill(PROMPT[::-1])
    # A step plans nothing again that found no room.
    assert one.scheduler_side.side.get_stats()["blocks_to_save_total"] == 12
    assert other.serve(PROMPT, 1, old).loaded == BLOCKS
    # What found no room is not advertised: D computes it, and has no failed load.
    served = other.serve(PROMPT[::-1], 1, new)
    assert (served.matched, served.loaded) == (2, 2)
    assert count(other, "blocks_missed_total") == 0


@pytest.mark.parametrize("together", [True, False])
def test_request_that_ends_in_its_first_step_advertises_no_block_without_room(make, together):
    """Hosts end a request before they hand on what the workers report of the step."""
    one, other = make("p", **ROOM), make("d")
    first, *rest = [PROMPT, PROMPT[::-1], PROMPT[1:] + PROMPT[:1]]
    prompts = [first, rest[0]] if together else rest
    before = [] if together else [one.prefill(first)]
    requests = [one.add(prompt, 1, {"do_remote_decode": True}) for prompt in prompts]
    one.until(lambda: requests[-1].state == "finished")
    params = [*before, *map(travelled, requests)]
    served = [
        other.serve(prompt, 1, each) for prompt, each in zip([first, *rest], params, strict=False)
    ]
    expected = [(10, 10), (2, 2), (0, 0)][: len(params)]
    assert [(each.matched, each.loaded) for each in served] == expected


def test_room_that_was_released_since_the_last_step_is_found(make, until):
    """An idle host makes no steps, so a request that finds no room waits for one report."""
    one, other = make("p", **ROOM), make("d")
    for prompt in (PROMPT, PROMPT[::-1]):
        assert other.serve(prompt, 1, one.prefill(prompt)).loaded == BLOCKS
        until(lambda: leases(one) == [0])
    one.prefill(PROMPT)
    # One report only: a buffer that stays full holds up no request.
    assert one.prefill(PROMPT[1:])["remote_num_tokens"] == 2 * 4


def test_staged_blocks_of_a_prompt_are_not_evicted_for_its_rest(make, until):
    one, other = make("p", lease_s=0.001, **ROOM), make("d")
    one.prefill(PROMPT)
    until(lambda: leases(one) == [0])
    longer = [*PROMPT[:40], *range(20)]
    params = one.prefill(longer)
    # Nor is planned to be staged what can find no room.
    assert count(one, "saves_without_room_total") == 0
    assert one.scheduler_side.side.get_stats()["blocks_to_save_total"] == BLOCKS + 12
    served = other.serve(longer, 1, params)
    assert (served.matched, served.loaded) == (12, 12)


def test_blocks_that_cannot_be_staged_are_logged_once_and_counted(make, monkeypatch, caplog):
    one, other = make("p"), make("d")

    def gather(*_):
        raise OSError("no copy")

    with monkeypatch.context() as patched:
        patched.setattr(Copier, "gather", gather)
        for _ in range(3):
            assert other.serve(PROMPT, 1, one.prefill(PROMPT)).loaded == 0
    assert count(one, "staging_errors_total") == 3
    assert count(one, "slots_leased") == count(one, "slots_kept") == 0
    assert caplog.text.count("KV blocks could not be staged") == 1
    assert caplog.text.count("OSError: no copy") == 1
    assert other.serve(PROMPT, 1, one.prefill(PROMPT)).loaded == BLOCKS


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
    one.prefill(PROMPT)
    assert (len(calls), len(ended)) == (2, 1)


# -- leases


def test_lease_of_a_request_expires(make, until):
    one, other = make("p", lease_s=0.05, **ROOM), make("d")
    one.prefill(PROMPT)
    until(lambda: leases(one) == [0])
    assert count(one, "leases_expired_total") == 1
    assert other.serve(PROMPT[::-1], 1, one.prefill(PROMPT[::-1])).loaded == BLOCKS


def test_request_that_needs_no_block_is_released(make, until):
    one, other = make("p"), make("d")
    other.serve(PROMPT)
    request = other.add(PROMPT, 1, one.prefill(PROMPT))
    other.finish(request)
    assert other.num_matched(request) == 0
    until(lambda: leases(one) == [0])


def test_request_that_ends_before_it_has_blocks_is_released(make, until):
    one, other = make("p"), make("d")
    request = other.add(PROMPT, 1, one.prefill(PROMPT))
    other.scheduler.abort(request)
    other.step()
    until(lambda: leases(one) == [0])


def test_lost_client_releases_its_leases(make, hold, until):
    one, other = make("p"), make("d")
    params = one.prefill(PROMPT)
    killed = ClosedError("as when the process was killed")
    reached, go_on = hold(P2PClient, "load", after=True, error=killed)
    begin(other, params)
    assert reached.wait(10)
    assert leases(one) == [2]  # of the request, and of the lookup
    go_on.set()
    until(lambda: leases(one) == [0])
    assert (count(one, "slots_leased"), count(one, "clients")) == (0, 0)


# -- parameters, addresses and tokens


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
    assert make("d").serve(PROMPT, 1, params).matched == 0


def test_request_id_that_cannot_be_encoded_fails_no_other_request(make):
    one, other = make("p"), make("d")
    params = one.prefill(PROMPT)
    for name, matched in (("\ud800", 0), ("\u2028" * 1024, BLOCKS)):
        bad = {**params, "remote_request_id": name}
        assert other.serve(PROMPT, 1, bad).matched == matched
    client = client_of(other)
    assert other.serve(PROMPT, 1, params).loaded == BLOCKS
    assert client.is_alive


def test_address_of_another_kind_is_not_dialed(make, kind):
    one, other = make("p"), make("d")
    params = one.prefill(PROMPT)
    others = {
        SHM: ["tcp:127.0.0.1:1", "unix:/tmp/x", "unix:@/tmp/.X11-unix/X0"],
        GROUP: ["unix:@x", "tcp:a.host:1"],
    }[kind]
    for address in others:
        elsewhere = {**params, "remote_addresses": [address]}
        assert other.serve(PROMPT, 1, elsewhere).matched == 0


@pytest.mark.parametrize("kind", [GROUP])
def test_refused_peer_is_counted_logged_once_and_never_dialed(make, caplog):
    one, other = make("p"), make("d", allowed_peers=["10.0.0.0/8"])
    params = one.prefill(PROMPT)
    elsewhere = {**params, "remote_addresses": ["tcp:192.0.2.1:7000"]}
    for each in (params, params, elsewhere):
        assert other.serve(PROMPT, 1, each).matched == 0
    assert scheduler_of(other).get_stats()["peers_refused_total"] == 3
    (warning,) = [each.getMessage() for each in caplog.records]
    assert "allowed_peers in kv_connector_extra_config" in warning
    assert params["remote_addresses"][0] in warning
    assert not worker_of(other)._loads._clients
    assert leases(one) == [1]
    allowed = make("d2", allowed_peers=["127.0.0.1"])
    assert allowed.serve(PROMPT, 1, params).loaded == BLOCKS


def test_wrong_token_is_a_miss(make):
    one, other = make("p", token="one"), make("d", token="another")
    served = other.serve(PROMPT, 1, one.prefill(PROMPT))
    assert (served.matched, served.loaded) == (BLOCKS, 0)
    assert count(other, "blocks_missed_refused_total") == BLOCKS
    assert count(one, "lookups_total") == 0


@pytest.mark.parametrize("kind", [GROUP])
def test_tokens_of_requests_make_no_clients_where_the_options_have_one(make):
    one, other = make("p"), make("d")
    params = one.prefill(PROMPT)
    for number in range(3):
        invented = {**params, "remote_tokens": [f"invented {number}"]}
        assert other.serve(PROMPT, 1, invented).loaded == BLOCKS
    client_of(other)


@pytest.mark.parametrize("kind", [SHM])
def test_wrong_token_in_a_request_fails_no_other_request(make, monkeypatch):
    real, late = P2PClient.fail, threading.Event()

    def fail(self, error):
        late.wait(0.3)  # long enough for others to come
        real(self, error)

    monkeypatch.setattr(P2PClient, "fail", fail)
    one, other = make("p"), make("d")
    params = one.prefill(PROMPT)
    wrong = begin(other, {**params, "remote_tokens": ["wrong"]})
    assert other.serve(PROMPT, 1, params).loaded == BLOCKS
    assert wrong.state == "finished"
    assert count(other, "blocks_missed_refused_total") == BLOCKS


def test_configured_token_does_not_travel(make):
    one, other = make("p", token="secret"), make("d", token="secret")
    params = one.prefill(PROMPT)
    assert "secret" not in json.dumps(params)
    assert other.serve(PROMPT, 1, params).loaded == BLOCKS


# -- FAULTS 29


@pytest.mark.parametrize(
    ("field", "theirs"),
    [
        ("block_size", {"block_size": 2}),
        ("pages", {"model": replace(MODEL, num_layers=3)}),
        ("model", {"model": replace(MODEL, vocabulary=300)}),
        ("num_ranks", {"num_ranks": 2}),
    ],
)
def test_other_layout_is_refused_before_the_first_lookup(make, caplog, field, theirs):
    one, other = make("p", **theirs), make("d")
    served = other.serve(PROMPT, 1, one.prefill(PROMPT))
    assert served.matched > 0
    assert served.loaded == 0
    assert count(other, "blocks_missed_layout_total") == served.matched
    assert f"{field} is " in caplog.text
    assert count(one, "lookups_total") == 0
    # Nor the other way round.
    assert one.serve(PROMPT, 1, other.prefill(PROMPT)).loaded == 0
    # The next one that fits is not held up by it.
    assert other.serve(PROMPT, 1, make("q").prefill(PROMPT)).loaded == BLOCKS


def test_each_rank_has_its_own_blocks(make):
    one, other = make("p", num_ranks=2), make("d", num_ranks=2)
    params = one.prefill(PROMPT)
    params["remote_addresses"].reverse()
    params.get("remote_tokens", []).reverse()
    assert other.serve(PROMPT, 1, params).loaded == 0
    assert count(other, "blocks_missed_layout_total") == 2 * BLOCKS


# -- FAULTS 26, 28, 31


@pytest.mark.parametrize("when", ["loading", "loaded", "asked for errors"])
def test_load_that_lives_through_a_commit_is_a_miss(make, drawn, hold, until, when):
    """The second: after the load, and before the step that reports it.

    The third: it ends within a step, after the host has asked which loads have ended, and before it
    asks for blocks that could not be loaded.
    """
    one, other = make("p"), make("d")
    params = one.prefill(PROMPT)
    loads = worker_of(other)._loads
    reached, go_on = hold(loads, "end")
    request = begin(other, params)
    assert reached.wait(10)
    if when != "loading":
        go_on.set()
        until(lambda: loads._ended)
    if when == "asked for errors":
        assert worker_of(other).get_block_ids_with_load_errors() == set()
    drawn.change(1)
    go_on.set()
    other.finish(request)
    assert count(other, "blocks_missed_weights_total") == BLOCKS


def test_block_under_another_key_is_a_miss(make):
    one, other = make("p"), make("d")
    params = one.prefill(PROMPT)
    buffer, names = buffer_of(one)
    # As if a table pointed to the wrong slot; names with one hash differ as these do.
    buffer._committed[names[4]] = buffer._committed[names[7]]
    assert other.serve(PROMPT, 1, params).loaded == 4
    assert count(other, "blocks_missed_key_total") == BLOCKS - 4


@pytest.mark.parametrize("at", [24, 44, 192, -1], ids=["header", "checksum", "first", "last"])
def test_flipped_bit_is_a_miss(make, at):
    one, other = make("p"), make("d")
    params = one.prefill(PROMPT)
    buffer, names = buffer_of(one)
    buffer.memory.used[buffer._committed[names[6]], at] ^= 4
    assert other.serve(PROMPT, 1, params).loaded == 6


@pytest.mark.parametrize("kind", [SHM])
def test_slots_out_of_range_are_a_miss(make, monkeypatch):
    one, other = make("p"), make("d")
    params = one.prefill(PROMPT)
    monkeypatch.setattr(buffer_of(one)[0], "lease", lambda *_: [10**9] * BLOCKS)
    assert other.serve(PROMPT, 1, params).loaded == 0
    assert count(other, "blocks_missed_protocol_total") == BLOCKS


def test_late_repeated_or_unknown_messages_change_nothing(make, until):
    one, other = make("p"), make("d")
    params = one.prefill(PROMPT)
    served = other.serve(PROMPT, 1, params)
    until(lambda: leases(one) == [0])
    request_id = params["remote_request_id"]
    hello = Hello("d", 0, buffer_of(one)[0].geometry, {})
    for message in (
        hello,
        LookupReply([7]),
        ReleaseRequest(request_id),
        Lookup(request_id, [b"x"]),
        ReleaseRequest("unknown"),
    ):
        client_of(other)._dialer.send(message)
    until(lambda: count(one, "releases_unknown_total") == 2)
    assert count(one, "lookups_total") == 2
    assert leases(one) == [0]
    output = KVConnectorOutput(finished_recving={served.request.request_id, "unknown"})
    scheduler_of(other).update_connector_output(output)
    assert scheduler_of(other).get_stats()["received_unknown_total"] == 2
    assert other.serve(PROMPT[::-1], 1, one.prefill(PROMPT[::-1])).loaded == BLOCKS


@pytest.mark.parametrize("kind", [SHM])
def test_client_that_only_looks_up_has_one_lease_at_most(make, until):
    """It has proven that it knows the token, and may be out of order all the same."""
    one, other = make("p"), make("d")
    assert other.serve(PROMPT, 1, one.prefill(PROMPT)).loaded == BLOCKS
    until(lambda: leases(one) == [0])
    client, keys = client_of(other), buffer_of(one)[1][:1]
    for number in range(1, 51):
        client._dialer.send(Lookup(f"r{number}", keys))
    until(lambda: count(one, "lookups_total") == 51)
    assert (leases(one), count(one, "slots_leased")) == ([1], 1)
    client._dialer.send(Lookup("another", [b"x"]))
    until(lambda: leases(one) == [0])
    assert other.serve(PROMPT, 1, one.prefill(PROMPT)).loaded == BLOCKS


@pytest.mark.parametrize("kind", [GROUP])
def test_client_that_looks_up_and_receives_nothing_is_closed(make, until, caplog):
    one, other = make("p"), make("d")
    assert other.serve(PROMPT, 1, one.prefill(PROMPT)).loaded == BLOCKS
    client, (_, keys) = client_of(other), buffer_of(one)
    for _ in range(process_group.MAX_LOOKUPS + 3):
        client._dialer.send(Lookup("r", keys))
    until(lambda: not client.is_alive)
    until(lambda: count(one, "clients") == 0)
    assert leases(one) == [0]
    assert f"more than {process_group.MAX_LOOKUPS} open lookups" in caplog.text
    assert other.serve(PROMPT, 1, one.prefill(PROMPT)).loaded == BLOCKS


def test_client_with_an_endless_request_id_is_closed(make, until):
    one, other = make("p"), make("d")
    assert other.serve(PROMPT, 1, one.prefill(PROMPT)).loaded == BLOCKS
    client = client_of(other)
    client._dialer.send(Lookup("x" * (MAX_TEXT + 1), [b"x"]))
    until(lambda: not client.is_alive)
    assert count(one, "lookups_total") == 1


# -- endings


def test_aborted_request_keeps_its_blocks_until_nothing_is_written(make, monkeypatch, until):
    one, other = make("p"), make("d", num_threads=1)
    params = one.prefill(PROMPT)
    reached, go_on = threading.Event(), threading.Event()
    real, seen = Copier.load, []

    def load(self, *rest):
        seen.append(rest)
        if len(seen) == 6:
            reached.set()
            assert go_on.wait(10)
        return real(self, *rest)

    monkeypatch.setattr(Copier, "load", load)
    one_block_each(monkeypatch)
    request = begin(other, params)
    assert reached.wait(10)
    other.scheduler.abort(request)
    for _ in range(3):
        other.step()
    assert other.num_used == BLOCKS
    go_on.set()
    other.until(lambda: other.num_used == 0)
    assert count(other, "blocks_missed_total") == 0
    assert count(other, "loads_aborted_total") == 1
    until(lambda: leases(one) == [0])
    # The sixth was under way; nothing came after it.
    for layer in other.caches[0].layers:
        assert layer[request.block_ids[6:BLOCKS]].eq(7.0).all()


def one_block_each(monkeypatch):
    """Let every block be a task of its own, for whichever thread is free."""
    monkeypatch.setattr(copier, "SHARE_NBYTES", 1)
    monkeypatch.setattr(copier, "TASK_CHUNKS", 1)


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
    one_block_each(monkeypatch)
    one, other = make("p"), make("d")
    no_more_threads("_0", "_1")
    assert other.serve(PROMPT, 1, one.prefill(PROMPT)).loaded == BLOCKS


@pytest.mark.parametrize("ends", ["save_0", "save_1", "copy_1"])
def test_caches_are_refused_where_a_thread_that_copies_cannot_start(make, no_more_threads, ends):
    no_more_threads(ends)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        make("p")


@pytest.mark.parametrize("kind", [SHM])
def test_load_ends_after_its_copies_where_a_later_one_cannot_begin(make, monkeypatch):
    one, other = make("p"), make("d", num_threads=1)
    one_block_each(monkeypatch)
    threads = worker_of(other)._loads.threads
    refused, go_on, real, copies = threading.Event(), threading.Event(), threads.submit, []

    def submit(*task):
        if len(copies) == 1:
            refused.set()
            raise RuntimeError("no more")
        copies.append(real(lambda: go_on.wait(10) and task[0](*task[1:])))
        return copies[0]

    monkeypatch.setattr(threads, "submit", submit)
    request = begin(other, one.prefill(PROMPT))
    assert refused.wait(10)
    assert not go_on.wait(0.05)  # long enough for a load that does not wait
    other.step()
    assert request.state == "loading"
    go_on.set()
    other.finish(request)


@pytest.mark.parametrize(("kind", "where"), [(SHM, "reply"), (GROUP, "reply"), (GROUP, "bytes")])
def test_shutdown_while_loading_is_a_miss(make, hold, where):
    one, other = make("p"), make("d")
    params = one.prefill(PROMPT)
    owner, name = {
        "reply": (P2PClient, "_load"),
        "bytes": (process_group._Sender, "_send"),
    }[where]
    reached, go_on = hold(owner, name)
    request = begin(other, params)
    assert reached.wait(10)
    if where == "reply":
        threading.Timer(0.1, go_on.set).start()
    worker = worker_of(other)
    worker.shutdown()
    assert worker.get_finished(set()) == (None, {request.request_id})
    assert worker.get_block_ids_with_load_errors() == set(request.block_ids)


@pytest.mark.parametrize("kind", [GROUP])
@pytest.mark.parametrize("where", ["meet", "send", "later send"])
def test_load_fails_at_once_where_the_other_side_cannot_send(make, monkeypatch, until, where):
    """Not as stalled, at the deadline."""
    one, other = make("p"), make("d")
    if where == "later send":
        assert other.serve(PROMPT, 1, one.prefill(PROMPT)).loaded == BLOCKS
    params = one.prefill(PROMPT[::-1])
    real = process_group._Pair.meet

    def fail(*_):
        raise GroupError("no socket")

    def meet(pair):
        return fail() if pair._rank == process_group._SENDER else real(pair)

    if where == "meet":
        # torch's store goes on dialing a host that has gone for up to three times as long.
        monkeypatch.setattr(process_group, "JOIN_S", 1.0)
        monkeypatch.setattr(process_group._Pair, "meet", meet)
    else:
        monkeypatch.setattr(process_group._Sender, "_send", fail)
    served = other.serve(PROMPT[::-1], 1, params)
    assert (served.matched, served.loaded) == (BLOCKS, 0)
    assert count(other, "blocks_missed_lost_total") == BLOCKS
    until(lambda: count(one, "clients") == 0)


@pytest.mark.parametrize("kind", [GROUP])
def test_blocks_that_arrived_before_the_peer_was_lost_count(make, monkeypatch, until):
    one, other = make("p"), make("d")
    params = one.prefill(PROMPT)
    go_on, real = threading.Event(), process_group._Sender._send

    def send(self, slots):
        real(self, slots[:4])
        go_on.wait(10)

    monkeypatch.setattr(process_group._Sender, "_send", send)
    request = begin(other, params)
    last = request.block_ids[3]
    until(lambda: not any(layer[last].eq(7.0).all() for layer in other.caches[0].layers))
    threading.Timer(0.2, go_on.set).start()
    worker_of(one).shutdown()
    other.finish(request)
    assert other.counts["tokens_loaded"] == 4 * 4
    assert count(other, "blocks_missed_lost_total") == BLOCKS - 4


@pytest.mark.parametrize("kind", [GROUP])
def test_peer_lost_while_the_group_forms_is_a_miss_at_once(make, monkeypatch):
    one, other = make("p"), make("d")
    params = one.prefill(PROMPT)
    reached, go_on = threading.Event(), threading.Event()

    class Mute(process_group.Rendezvous):
        def join(self, timeout_s=None):
            reached.set()
            self.call(lambda: go_on.wait(10), "a host that does not answer", timeout_s)

    monkeypatch.setattr(process_group, "Rendezvous", Mute)
    request = begin(other, params)
    assert reached.wait(10)
    worker_of(one).shutdown()
    other.finish(request)
    assert count(other, "blocks_missed_lost_total") == BLOCKS
    go_on.set()


def slow_stores(monkeypatch):
    """Let torch be slow to make the first store, as where no resolver answers; return the gate."""
    gate, real, made = threading.Event(), torch.distributed.TCPStore, []

    def make_store(*args, **options):
        if options.get("is_master"):
            made.append(options)
            if len(made) == 1:
                assert gate.wait(30)
        return real(*args, **options)

    monkeypatch.setattr(torch.distributed, "TCPStore", make_store)
    return gate, made


@pytest.mark.parametrize("kind", [GROUP], indirect=True)
def test_client_whose_rendezvous_takes_long_keeps_no_other_from_the_blocks(
    make, monkeypatch, until
):
    one, slow, other = make("p"), make("slow"), make("d")
    params = [one.prefill(PROMPT) for _ in range(2)]
    gate, made = slow_stores(monkeypatch)
    waiting = begin(slow, params[0])
    until(lambda: made)
    assert other.serve(PROMPT, 1, params[1]).loaded == BLOCKS
    assert waiting.state == "loading"
    gate.set()
    slow.finish(waiting)
    assert slow.counts["tokens_loaded"] == BLOCKS * 4


@pytest.mark.parametrize("kind", [GROUP], indirect=True)
def test_rendezvous_that_is_not_opened_in_time_is_a_miss(make, monkeypatch, until):
    one, other = make("p", deadline_s=0.3), make("d")
    params = one.prefill(PROMPT)
    gate, _ = slow_stores(monkeypatch)
    try:
        assert other.serve(PROMPT, 1, params).loaded == 0
    finally:
        gate.set()
    assert other.serve(PROMPT, 1, one.prefill(PROMPT)).loaded == BLOCKS


@pytest.mark.parametrize("kind", [GROUP], indirect=True)
def test_instance_ends_while_a_rendezvous_is_opened(make, monkeypatch, until):
    one, other = make("p"), make("d")
    gate, made = slow_stores(monkeypatch)
    waiting = begin(other, one.prefill(PROMPT))
    until(lambda: made)
    one.close()
    gate.set()
    other.finish(waiting)
    assert other.counts["tokens_loaded"] == 0


def test_lost_instance_is_a_miss_and_its_successor_works(make):
    one, other = make("p"), make("d")
    params = one.prefill(PROMPT)
    assert other.serve(PROMPT, 1, params).loaded == BLOCKS
    one.close()
    assert other.serve(PROMPT, 1, params).loaded == 0
    assert count(other, "blocks_missed_lost_total") == BLOCKS
    assert other.serve(PROMPT, 1, make("p").prefill(PROMPT)).loaded == BLOCKS


# -- the rest


def test_numbers_that_only_grow_are_counters(make):
    """By their names: vLLM's and our Prometheus collectors take all others for gauges."""
    gauges = {"clients", "leases", "loads_under_way", "requests"}
    gauges |= {"slots", "slots_kept", "slots_leased"}
    one, other = make("p", **ROOM), make("d")
    assert other.serve(PROMPT, 1, one.prefill(PROMPT)).loaded == BLOCKS
    for each in (one, other):
        assert {name for name in each.stats if not name.endswith("_total")} <= gauges


def test_each_role_has_what_it_needs_and_no_more(make):
    one = make("p", role="kv_producer")
    other = make("d", role="kv_consumer")
    params = one.prefill(PROMPT)
    assert other.serve(PROMPT, 1, params).loaded == BLOCKS
    assert worker_of(other).get_handshake_metadata().address == ""
    assert "slots" not in worker_of(other).get_stats()
    assert other.prefill(PROMPT) is None
    assert one.serve(PROMPT, 1, params).matched == 0


def test_cache_on_a_device_is_saved_and_loaded(make, monkeypatch):
    """On torch's ``cpu`` device, which there is everywhere."""
    monkeypatch.setattr(cache_view, "HostPages", cache_view.DevicePages)
    one, other = make("p"), make("d")
    assert other.serve(PROMPT, 1, one.prefill(PROMPT)).loaded == BLOCKS


def test_full_pool_closes_the_client_that_was_needed_longest_ago(make, monkeypatch, until):
    monkeypatch.setattr(client_module, "MAX_CLIENTS", 2)
    other, served = make("d"), [make(f"p{n}") for n in range(3)]
    for number, one in enumerate((*served, served[2], served[0])):
        prompt = [number, *PROMPT]
        assert other.serve(prompt, 1, one.prefill(prompt)).loaded == BLOCKS
        until(lambda one=one: leases(one) == [0])
    until(lambda: [count(one, "clients") for one in served] == [1, 0, 1])


@pytest.fixture
def silent():
    """A local address at which something listens that never says a word."""
    with socket.socket(socket.AF_UNIX) as listener:
        name = f"wtransfer-{1:032x}"
        listener.bind(f"\0{name}")
        listener.listen(64)
        yield f"unix:@{name}"


@pytest.mark.parametrize("kind", [SHM])
def test_requests_with_many_tokens_for_one_silent_address_keep_no_other_out(
    make, monkeypatch, silent
):
    monkeypatch.setattr(client_module, "MAX_CLIENTS", 6)
    others, one = [make("p0"), make("p1")], make("d", deadline_s=5.0)
    for each in others:
        assert one.serve(PROMPT, 1, each.prefill(PROMPT)).loaded == BLOCKS
    params = others[0].prefill([7, *PROMPT])
    made_up = [
        {**params, "remote_addresses": [silent], "remote_tokens": [f"{number}"]}
        for number in range(20)
    ]
    one.clear_cache()
    for each in made_up:
        one.add([7, *PROMPT], 1, each)
    one.step()
    assert len(worker_of(one)._loads._clients) == 2 + client_module.MAX_UNPROVEN
    # Its client was not closed for them, and a new instance finds room.
    assert [count(each, "clients") for each in others] == [1, 1]
    new = make("p2")
    for each in (others[0], new):
        assert one.serve([8, *PROMPT], 1, each.prefill([8, *PROMPT])).loaded == BLOCKS
    assert [count(each, "clients") for each in (*others, new)] == [1, 1, 1]


@pytest.mark.parametrize("kind", [SHM])
def test_full_pool_does_not_end_a_load_under_way(make, monkeypatch, hold):
    """A request can name any address: it must not cost others their loads."""
    monkeypatch.setattr(client_module, "MAX_CLIENTS", 1)
    one, other = make("p"), make("d")
    params = one.prefill(PROMPT)
    made_up = {**params, "remote_addresses": [f"unix:@wtransfer-{0:032x}"]}
    reached, go_on = hold(P2PClient, "_load")
    request = begin(other, params)
    assert reached.wait(10)
    another = other.add([9, *PROMPT[1:]], 1, made_up)
    other.until(lambda: another.state == "finished")
    assert request.state == "loading"
    go_on.set()
    other.finish(request)
    assert count(other, "blocks_loaded_total") == BLOCKS


def test_warnings_that_requests_cause_are_logged_once_each(make, kind, caplog):
    one, other = make("p"), make("d")
    params = one.prefill(PROMPT)
    caplog.clear()
    for number in range(3):
        nowhere = {SHM: f"unix:@wtransfer-{number:032x}", GROUP: f"tcp:127.0.0.1:{number + 1}"}
        made_up = {**params, "remote_addresses": [nowhere[kind]], "remote_tokens": ["x"]}
        ranks = {**params, "remote_addresses": params["remote_addresses"] * (number + 2)}
        for each in (made_up, ranks):
            assert other.serve(PROMPT, 1, each).loaded == 0
    assert len([each for each in caplog.records if each.levelname == "WARNING"]) == 2
    assert count(other, "warnings_total") == 6
    assert other.serve(PROMPT, 1, params).loaded == BLOCKS


@pytest.mark.slow
def test_slots_reused_while_they_are_read_never_give_other_bytes(make):
    """FAULTS 26: the host compares what was loaded with a fresh model."""
    size = {
        "model": ModelShape(num_layers=4, width=256, num_heads=2, num_kv_heads=2),
        "block_size": 16,
    }
    room = {"staging_bytes": 12 * (4 * 32 * 1024 + 4096), "lease_s": 1e-6}
    one, other = make("p", **room, **size), make("d", **size)
    text = [*range(161)]
    for number in range(12):
        params = one.prefill([number, *text])
        other.clear_cache()
        request = other.add([number, *text], 1, params)
        other.step()
        for more in range(2):
            one.prefill([50 + more, number, *text])
        other.finish(request)
    assert count(one, "blocks_evicted_total") > 50
