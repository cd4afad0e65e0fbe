"""What a request's blocks go through from prefill to decode, whichever way the bytes travel."""

from __future__ import annotations

import json
import threading

import pytest
import torch

from wtransfer.blocks import HEADER_NBYTES
from wtransfer.connectors.relay import grouped
from wtransfer.connectors.relay.layout import GENERATION, HEAD
from wtransfer.connectors.relay.link import Link
from wtransfer.connectors.relay.messages import Ask, Done, Over
from wtransfer.connectors.relay.saving import request_holder
from wtransfer.connectors.relay.taking import Taker
from wtransfer.errors import ConnectorOptionError, PeerLostError

PROMPT = list(range(100, 142))
BLOCKS = 10
SHM, GROUP = "SharedMemoryConnector", "ProcessGroupConnector"


def leases(one):
    return [worker.get_stats()["leases"] for worker in one.workers]


def count(one, what):
    return sum(worker.get_stats().get(what, 0) for worker in one.workers)


def travelled(params):
    """Return parameters as a router hands them on."""
    return json.loads(json.dumps(params))


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_one_instance_computes_another_has(make, until, ranks, chunk):
    one, other = make("p", ranks=ranks), make("d", ranks=ranks)
    params = travelled(one.prefill("r", PROMPT, chunk=chunk))
    assert leases(one) == [1] * ranks
    assert params["remote_num_tokens"] == BLOCKS * 4
    outcome = other.decode("r2", PROMPT, params)
    assert (outcome["matched"], outcome["loaded"], outcome["wrong"]) == (BLOCKS, BLOCKS, 0)
    until(lambda: leases(one) == [0] * ranks)
    assert count(one, "blocks_saved") == count(other, "blocks_loaded") == BLOCKS * ranks


def test_parameters_have_the_fields_names(make):
    params = make("p").prefill("r", PROMPT)
    assert params["do_remote_prefill"] is True
    assert (params["remote_engine_id"], params["remote_request_id"]) == ("p", "r")
    assert "do_remote_decode" not in params


def test_a_token_is_left_to_compute(make):
    one, other = make("p"), make("d")
    prompt = PROMPT[:40]
    outcome = other.decode("r2", prompt, one.prefill("r", prompt))
    assert outcome["matched"] == 9


def test_nothing_is_put_on_the_shelf_for_a_request_that_stays(make):
    one = make("p")
    assert one.prefill("r", PROMPT, decode=False) is None
    assert count(one, "blocks_saved") == 0


def test_a_block_that_is_there_is_not_copied_again(make):
    one, other = make("p"), make("d")
    first, second = one.prefill("r", PROMPT), one.prefill("r'", PROMPT[:20] + PROMPT)
    assert count(one, "blocks_saved") == BLOCKS + 10
    for number, (params, prompt) in enumerate([(second, PROMPT[:20] + PROMPT), (first, PROMPT)]):
        outcome = other.decode(f"d{number}", prompt, params)
        assert (outcome["loaded"], outcome["wrong"]) == (outcome["matched"], 0)


def test_only_what_is_not_there_yet_is_loaded(make):
    one, other = make("p"), make("d")
    params = one.prefill("r", PROMPT)
    request, number = other.begin("r2", PROMPT, params, num_computed=12)
    assert number == 40 - 12
    other.until_received("r2")
    blocks = other.requests["r2"]
    assert other.wrong(PROMPT, blocks, BLOCKS) == [(n, 0, k) for n in range(3) for k in range(3)]
    other.finish(request)


def test_a_full_shelf_gives_up_what_nobody_waits_for(make, until):
    room = make("x").workers[0].get_stats()["slots"]
    assert room > 3 * BLOCKS
    one, other = make("p", options={"shelf_bytes": 12 * 4096}), make("d")
    old = one.prefill("r", PROMPT)
    assert other.decode("r2", PROMPT, old)["loaded"] == BLOCKS
    until(lambda: leases(one) == [0])
    new = one.prefill("s", PROMPT[::-1])
    assert count(one, "blocks_evicted") == 8
    assert other.decode("s2", PROMPT[::-1], new)["loaded"] == BLOCKS
    # The longest unused went first, and behind a missing block there is nothing to be had.
    outcome = other.decode("r3", PROMPT, old)
    assert (outcome["matched"], outcome["loaded"], outcome["wrong"]) == (BLOCKS, 0, 0)
    assert count(other, "blocks_missed_absent") == BLOCKS


def test_what_is_leased_makes_no_room(make):
    one, other = make("p", options={"shelf_bytes": 12 * 4096}), make("d")
    old, new = one.prefill("r", PROMPT), one.prefill("s", PROMPT[::-1])
    assert count(one, "saves_without_room") == 8
    assert other.decode("r2", PROMPT, old)["loaded"] == BLOCKS
    assert other.decode("s2", PROMPT[::-1], new)["loaded"] == 2


def test_what_a_prompt_has_there_already_does_not_make_room_for_its_rest(make):
    one, other = make("p", options={"shelf_bytes": 12 * 4096, "lease_s": 0.001}), make("d")
    one.prefill("r", PROMPT)
    longer = [*PROMPT[:40], *range(20)]
    params = one.prefill("s", longer)
    assert count(one, "saves_without_room") == 3
    assert other.decode("s2", longer, params)["loaded"] == 12


@pytest.mark.parametrize("kind", [SHM])
def test_slots_that_no_shelf_has_are_a_miss(make, monkeypatch):
    one, other = make("p"), make("d")
    params = one.prefill("r", PROMPT)
    monkeypatch.setattr(one.workers[0]._shelf, "lease", lambda *_: [10**9] * BLOCKS)
    assert other.decode("r2", PROMPT, params)["loaded"] == 0
    assert count(other, "blocks_missed_protocol") == BLOCKS


def test_a_lease_runs_out(make, until):
    one, other = make("p", options={"shelf_bytes": 12 * 4096, "lease_s": 0.05}), make("d")
    one.prefill("r", PROMPT)
    until(lambda: leases(one) == [0])
    assert count(one, "leases_expired") == 1
    new = one.prefill("s", PROMPT[::-1])
    assert other.decode("s2", PROMPT[::-1], new)["loaded"] == BLOCKS


def test_who_needs_nothing_ends_the_lease(make, until):
    one, other = make("p"), make("d")
    params = one.prefill("r", PROMPT)
    _, number = other.begin("r2", PROMPT, params, num_computed=40)
    assert number == 0
    until(lambda: leases(one) == [0])


def test_a_request_that_ends_before_it_has_blocks_ends_the_lease(make, until, instance):
    one, other = make("p"), make("d")
    request = instance.Request("r2", PROMPT, one.prefill("r", PROMPT))
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
        {"something": object()},
        [1, 2],
    ],
)
def test_parameters_that_say_nothing_useful_are_a_miss(make, params):
    other = make("d")
    assert other.decode("r", PROMPT, params)["matched"] == 0


def test_a_request_that_cannot_be_named_there_is_not_in_the_way_of_others(make):
    one, other = make("p"), make("d")
    params = one.prefill("r", PROMPT)
    for name, matched in (("\ud800", 0), ("\u2028" * 1024, BLOCKS)):
        bad = {**params, "remote_request_id": name}
        assert other.decode(f"bad{matched}", PROMPT, bad)["matched"] == matched
    link = next(iter(other.workers[0]._links._links.values()))
    assert other.decode("r2", PROMPT, params)["loaded"] == BLOCKS
    assert link.is_alive


def test_an_address_of_another_kind_is_not_dialed(make, kind):
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
def test_a_peer_that_is_not_allowed_is_counted_logged_once_and_never_dialed(make, caplog):
    one, other = make("p"), make("d", options={"allowed_peers": ["10.0.0.0/8"]})
    params = one.prefill("r", PROMPT)
    for number in range(3):
        assert other.decode(f"r{number}", PROMPT, params)["matched"] == 0
    elsewhere = {**params, "remote_addresses": ["tcp:192.0.2.1:7000"]}
    assert other.decode("elsewhere", PROMPT, elsewhere)["matched"] == 0
    assert other.scheduler.get_stats()["peers_refused"] == 4
    warnings = [each.getMessage() for each in caplog.records]
    assert [text.count("allowed_peers in kv_connector_extra_config") for text in warnings] == [1, 1]
    assert params["remote_addresses"][0] in warnings[0]
    assert "tcp:192.0.2.1:7000" in warnings[1]
    assert not other.workers[0]._links._links
    assert leases(one) == [1]
    allowed = make("d2", options={"allowed_peers": ["127.0.0.1"]})
    assert allowed.decode("r2", PROMPT, params)["loaded"] == BLOCKS


def test_a_wrong_token_is_a_miss(make):
    one, other = make("p", options={"token": "one"}), make("d", options={"token": "another"})
    outcome = other.decode("r2", PROMPT, one.prefill("r", PROMPT))
    assert (outcome["matched"], outcome["loaded"]) == (BLOCKS, 0)
    assert count(other, "blocks_missed_refused") == BLOCKS
    assert count(one, "asked") == 0


@pytest.mark.parametrize("kind", [SHM])
def test_a_wrong_token_in_a_request_is_not_in_the_way_of_others(make, monkeypatch):
    real, late = Link.lose, threading.Event()

    def lose(self, error):
        late.wait(0.3)  # long enough for others to come
        real(self, error)

    monkeypatch.setattr(Link, "lose", lose)
    one, other = make("p"), make("d")
    params = one.prefill("r", PROMPT)
    other.begin("r2", PROMPT, {**params, "remote_tokens": ["wrong"]})
    assert other.decode("r3", PROMPT, params)["loaded"] == BLOCKS
    other.until_received("r2")
    assert count(other, "blocks_missed_refused") == BLOCKS


def test_a_token_that_both_were_given_does_not_travel(make):
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
def test_what_does_not_fit_is_refused_before_the_first_block(make, caplog, field, theirs):
    one, other = make("p", **theirs), make("d")
    outcome = other.decode("r2", PROMPT, one.prefill("r", PROMPT))
    assert outcome["matched"] > 0
    assert outcome["loaded"] == 0
    assert count(other, "blocks_missed_layout") == outcome["matched"]
    assert f"{field} is " in caplog.text
    assert count(one, "asked") == 0
    # Nor the other way round.
    assert one.decode("r4", PROMPT, other.prefill("r", PROMPT))["loaded"] == 0
    # The next one that fits is not held up by it.
    third = make("q")
    assert other.decode("r3", PROMPT, third.prefill("r", PROMPT))["loaded"] == BLOCKS


# -- FAULTS 31 and 47


def test_blocks_of_other_weights_are_not_asked_for(make):
    one, other = make("p"), make("d")
    params = one.prefill("r", PROMPT)
    make.weights.settle("w2")
    other.step()
    assert other.decode("r2", PROMPT, params)["matched"] == 0


def test_a_prompt_that_lives_through_a_commit_is_not_handed_on(make):
    one = make("p")
    request = one.prefill("r", PROMPT, chunk=20, upto=20, finish=False)
    make.weights.settle("w2")
    # The scheduler's side does not know of it yet; the worker's does.
    metadata = one.step(rows=[(request, [], 20, 20)])
    assert len(metadata.saves) == 1
    assert count(one, "blocks_saved") == 5
    assert one.step(rows=[(request, [], 40, 2)]).saves == []
    assert one.finish(request) is None
    assert leases(one) == [0]


@pytest.mark.parametrize("when", ["planned", "loaded", "partly loaded"])
def test_a_load_that_lives_through_a_commit_is_a_miss(make, monkeypatch, instance, when):
    one, other = make("p"), make("d")
    params = one.prefill("r", PROMPT)
    worker = other.workers[0]
    if when == "partly loaded":
        shelf = one.workers[0]._shelf
        shelf.withdraw([list(shelf._kept)[6]])
    if when != "planned":
        real = worker._loads.end

        def end(loading, reason):
            make.weights.settle("w2")
            real(loading, reason)

        monkeypatch.setattr(worker._loads, "end", end)
        request, number = other.begin("r2", PROMPT, params)
    else:
        request = instance.Request("r2", PROMPT, params)
        number, _ = other.scheduler.get_num_new_matched_tokens(request, 0)
        blocks = other.requests["r2"] = other.take(11)
        other.scheduler.update_state_after_alloc(request, instance.Blocks(blocks), number)
        make.weights.settle("w2")
        other.step()
    assert number == 40
    other.until_received("r2")
    assert set(other.requests["r2"][:BLOCKS]) <= other.invalid
    assert count(other, "blocks_missed_weights") == BLOCKS
    assert count(one, "asked") == (0 if when == "planned" else 1)
    other.finish(request)


# -- FAULTS 26, 28, 30


def test_a_block_under_anothers_name_is_a_miss(make):
    one, other = make("p"), make("d")
    params = one.prefill("r", PROMPT)
    shelf = one.workers[0]._shelf
    # As if a table pointed to the wrong slot; names with one hash differ as these do.
    names = list(shelf._kept)
    shelf._kept[names[4]] = shelf._kept[names[7]]
    outcome = other.decode("r2", PROMPT, params)
    assert (outcome["loaded"], outcome["wrong"]) == (4, 0)
    assert count(other, "blocks_missed_key") == BLOCKS - 4


def test_colliding_hashes_are_told_apart(make, monkeypatch, instance):
    one, other = make("p"), make("d")
    for each in (one, other):
        monkeypatch.setattr(each.scheduler._naming, "_hash", lambda text: b"\0" * 16)
    params = one.prefill("r", PROMPT)
    assert other.decode("r2", PROMPT, params)["loaded"] == BLOCKS
    outcome = other.decode("r3", PROMPT[::-1], params)
    assert (outcome["matched"], outcome["loaded"], outcome["wrong"]) == (BLOCKS, 0, 0)


@pytest.mark.parametrize("where", ["header", "checksum", "first page", "last page"])
def test_a_flipped_bit_is_a_miss(make, where):
    one, other = make("p"), make("d")
    params = one.prefill("r", PROMPT)
    shelf = one.workers[0]._shelf
    layout = shelf.layout
    at = {
        "header": 24,
        "checksum": 44,
        "first page": layout.pages[0].start,
        "last page": layout.pages[-1].stop - 1,
    }[where]
    shelf.slot(shelf._kept[list(shelf._kept)[6]])[at] ^= 4
    outcome = other.decode("r2", PROMPT, params)
    assert (outcome["loaded"], outcome["wrong"]) == (6, 0)


@pytest.mark.parametrize("how", ["torn", "another", "again"])
def test_a_slot_that_is_given_away_while_it_is_read_is_a_miss(make, monkeypatch, kind, how):
    one, other = make("p"), make("d")
    params = one.prefill("r", PROMPT)
    shelf, link_layout = one.workers[0]._shelf, other.workers[0]._links._here.taker.layout
    victim = shelf.slot(shelf._kept[list(shelf._kept)[3]])
    real = type(link_layout).look

    def look(layout, head, name, rank):
        wanted = real(layout, head, name, rank)
        if head == victim[HEAD].tobytes():
            # Its header has been read and is right; now its pages become another's.
            if how == "torn":
                victim[layout.pages[1]] = 7
            # Or those that are copied are right, but it is gone afterwards, or here once more.
            elif how == "another":
                victim[:HEADER_NBYTES] = 0
            else:
                victim[GENERATION] += 1
        return wanted

    monkeypatch.setattr(type(link_layout), "look", look)
    outcome = other.decode("r2", PROMPT, params)
    assert (outcome["wrong"], outcome["matched"]) == (0, BLOCKS)
    if kind == SHM:
        assert outcome["loaded"] == 3


def test_the_ranks_have_blocks_of_their_own(make):
    one, other = make("p", ranks=2), make("d", ranks=2)
    params = one.prefill("r", PROMPT)
    params["remote_addresses"].reverse()
    params.get("remote_tokens", []).reverse()
    outcome = other.decode("r2", PROMPT, params)
    assert (outcome["loaded"], outcome["wrong"]) == (0, 0)
    assert count(other, "blocks_missed_layout") == 2 * BLOCKS


def test_what_a_load_left_wrong_is_taken_back(make, instance):
    one, other = make("p"), make("d")
    request = one.prefill("r", PROMPT, finish=False)
    broken = one.requests["r"][4]
    output = instance.KVConnectorOutput(invalid_block_ids={broken})
    one.scheduler.update_connector_output(output)
    one.step()
    assert count(one, "blocks_withdrawn") == BLOCKS - 4
    params = one.finish(request)
    outcome = other.decode("r2", PROMPT, params)
    assert (outcome["matched"], outcome["loaded"], outcome["wrong"]) == (4, 4, 0)


@pytest.mark.parametrize("why", ["invalid blocks", "a step that does not count", "other weights"])
def test_a_request_whose_saves_were_all_taken_back_ends_its_lease(make, instance, why):
    one = make("p")
    one.prefill("kept", PROMPT)
    one.workers[0]._shelf.release(request_holder("kept"))
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


def test_notices_that_are_late_doubled_or_unknown_change_nothing(make, instance, until):
    one, other = make("p"), make("d")
    params = one.prefill("r", PROMPT)
    assert other.decode("r2", PROMPT, params)["loaded"] == BLOCKS
    until(lambda: leases(one) == [0])
    link = next(iter(other.workers[0]._links._links.values()))
    for word in (Done(0), Done(77), Over("r"), Over("nobody"), Ask(0, "r", [b"x"])):
        link._dialer.send(word)
    until(lambda: one.workers[0].get_stats().get("asked_again"))
    stats = one.workers[0].get_stats()
    assert (stats["done_unknown"], stats["over_unknown"], stats["asked_again"]) == (2, 2, 1)
    assert stats["leases"] == 0
    output = instance.KVConnectorOutput(finished_recving={"r2", "nobody"})
    other.scheduler.update_connector_output(output)
    assert other.scheduler.get_stats()["received_unknown"] == 2
    params = one.prefill("s", PROMPT[::-1])
    assert other.decode("s2", PROMPT[::-1], params)["loaded"] == BLOCKS


# -- endings


def test_a_request_that_ends_while_it_loads_keeps_its_blocks_until_nothing_is_written(
    make, monkeypatch, until
):
    one, other = make("p"), make("d")
    params = one.prefill("r", PROMPT)
    reached, go_on = threading.Event(), threading.Event()
    real, seen = Taker._take, []

    def take(self, *rest):
        seen.append(rest)
        if len(seen) == 6:
            reached.set()
            assert go_on.wait(10)
        return real(self, *rest)

    monkeypatch.setattr(Taker, "_take", take)
    request, _ = other.begin("r2", PROMPT, params)
    assert reached.wait(10)
    blocks = other.requests["r2"]
    assert other.scheduler.request_finished(request, blocks) == (True, None)
    other.step(finished=["r2"])
    assert "r2" not in other.received
    go_on.set()
    other.until_received("r2")
    assert other.invalid == set()
    assert count(other, "loads_unwanted") == 1
    until(lambda: leases(one) == [0])
    # The sixth was under way; nothing came after it.
    assert all(other.wrong(PROMPT, blocks, n + 1) for n in range(6, BLOCKS))


def test_shutting_down_while_it_loads_is_a_miss(make, monkeypatch):
    one, other = make("p"), make("d")
    params = one.prefill("r", PROMPT)
    reached, go_on = threading.Event(), threading.Event()
    real = Link._wait_for

    def wait_for(self, *rest):
        reached.set()
        assert go_on.wait(10)
        return real(self, *rest)

    monkeypatch.setattr(Link, "_wait_for", wait_for)
    other.begin("r2", PROMPT, params)
    assert reached.wait(10)
    threading.Timer(0.1, go_on.set).start()
    other.workers[0].shutdown()
    assert other.workers[0].get_finished(set()) == (None, {"r2"})
    assert other.workers[0].get_block_ids_with_load_errors() == set(other.requests["r2"][:BLOCKS])


@pytest.mark.parametrize("kind", [GROUP])
def test_shutting_down_ends_a_wait_for_bytes_that_do_not_come(make, monkeypatch, until):
    one, other = make("p"), make("d")
    params = one.prefill("r", PROMPT)
    go_on = threading.Event()
    monkeypatch.setattr(grouped._Sender, "_send", lambda *_: go_on.wait(10))
    other.begin("r2", PROMPT, params)
    until(lambda: count(one, "asked") == 1)
    other.workers[0].shutdown()
    assert other.workers[0].get_finished(set()) == (None, {"r2"})
    assert other.workers[0].get_block_ids_with_load_errors() == set(other.requests["r2"][:BLOCKS])
    go_on.set()


@pytest.mark.parametrize("kind", [GROUP])
def test_what_has_arrived_before_the_other_side_is_lost_counts(make, monkeypatch, until):
    one, other = make("p"), make("d")
    params = one.prefill("r", PROMPT)
    go_on, real = threading.Event(), grouped._Sender._send

    def send(self, group, slots):
        real(self, group, slots[:3])
        go_on.wait(10)

    monkeypatch.setattr(grouped._Sender, "_send", send)
    other.begin("r2", PROMPT, params)
    blocks = other.requests["r2"]
    until(lambda: not other.wrong(PROMPT, blocks, 3))
    threading.Timer(0.2, go_on.set).start()
    one.workers[0].shutdown()
    other.until_received("r2", patience_s=1.0)
    assert other.invalid == set(blocks[3:BLOCKS])
    assert count(other, "blocks_missed_lost") == BLOCKS - 3


@pytest.mark.parametrize("kind", [GROUP])
def test_who_is_gone_while_the_two_meet_is_not_waited_for(make, monkeypatch):
    one, other = make("p"), make("d")
    params = one.prefill("r", PROMPT)
    reached, go_on = threading.Event(), threading.Event()

    def join(*_):
        reached.set()
        go_on.wait(10)
        raise PeerLostError("as torch says after some seconds")

    monkeypatch.setattr(grouped, "join_rendezvous", join)
    other.begin("r2", PROMPT, params)
    assert reached.wait(10)
    one.workers[0].shutdown()
    other.until_received("r2", patience_s=1.0)
    assert count(other, "blocks_missed_lost") == BLOCKS
    go_on.set()


def test_an_instance_that_is_gone_is_a_miss_and_its_successor_works(make):
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
    for cache in (
        torch.zeros(8, 4, 6)[:, :, ::2],
        torch.zeros(8, 6, 4).expand(3, 8, 6, 4)[0][:, :0],
    ):
        with pytest.raises(ConnectorOptionError, match="cannot be copied by block"):
            worker.register_kv_caches({"layer0": cache})
    with pytest.raises(ConnectorOptionError, match="no KV cache"):
        worker.register_kv_caches({})
    with pytest.raises(ConnectorOptionError, match="is on meta"):
        worker.register_kv_caches({"layer0": torch.zeros(8, 4, device="meta")})


@pytest.mark.slow
def test_slots_that_are_reused_while_they_are_read_never_give_other_bytes(make):
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
    assert count(one, "blocks_evicted") > 100
