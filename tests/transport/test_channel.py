"""The control channel between two ends of one process: delivery, order, ends, refusals."""

from __future__ import annotations

import errno
import logging
import pickle
import socket
import threading
import time
import tracemalloc

import pytest

from wtransfer.deadline import Deadline
from wtransfer.errors import (
    AddressError,
    AddressInUseError,
    AuthenticationError,
    ChecksumError,
    LimitError,
    PeerLostError,
    ProtocolError,
    StallError,
    TruncatedError,
)
from wtransfer.transport import channel as channel_module
from wtransfer.transport.channel import MAX_UNPROVEN, Dialer, random_address
from wtransfer.transport.framing import MIB, FrameReader, pack_frame
from wtransfer.transport.handshake import (
    HANDSHAKE,
    PROTOCOL,
    Auth,
    Challenge,
    Reject,
    Welcome,
    WorkerHandshake,
    shake_hands,
)


def wait_for(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


def send_many(connection, frame):
    for _ in range(10):
        connection.send_frame(frame)


def has_ipv6():
    with socket.socket(socket.AF_INET6) as sock:
        return sock.connect_ex(("::1", 9)) == errno.ECONNREFUSED


@pytest.mark.parametrize(
    "address", [None, "unix:{}/x.sock", "tcp:127.0.0.1:0", "tcp:[::1]:0"], ids=str
)
def test_messages_travel_both_ways_in_order(channel, messages, tmp_path, address):
    if address == "tcp:[::1]:0" and not has_ipv6():
        pytest.skip("no IPv6 loopback here")
    both = channel.pair(address=address and address.format(tmp_path))
    for number in range(200):
        both.to_worker.send(messages.Note(f"down {number}"))
        both.to_trainer.send(messages.Word(f"up {number}"))
    assert [messages.Note(f"down {n}") for n in range(200)] == [
        both.worker.message() for _ in range(200)
    ]
    assert [messages.Word(f"up {n}") for n in range(200)] == [
        both.trainer.message() for _ in range(200)
    ]
    assert both.dialer.connected


def test_the_largest_message_arrives(channel, messages):
    both = channel.pair()
    sent = messages.Note("large", [bytes([n]) * MIB for n in range(63)])
    both.to_worker.send(sent)
    both.to_worker.send(messages.Note("behind it"))
    assert sent == both.worker.message()
    assert messages.Note("behind it") == both.worker.message()


def test_many_threads_may_send(channel, messages):
    both = channel.pair()

    def send(name):
        for number in range(100):
            both.to_worker.send(messages.Note(f"{name} {number}", [b"x" * 5000]))

    threads = [threading.Thread(target=send, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    got = [both.worker.message().text for _ in range(400)]
    for thread in threads:
        thread.join()
    for name in "abcd":
        mine = [text for text in got if text.startswith(name)]
        assert [f"{name} {number}" for number in range(100)] == mine


def test_messages_sent_while_opening_arrive_first(channel, messages):
    listener, _ = channel.listen(on_open=lambda connection: connection.send(messages.Word("first")))
    _, worker = channel.dial(listener)
    assert messages.Word("first") == worker.message()


def test_close_sends_what_is_queued(channel, messages, monkeypatch):
    monkeypatch.setattr(channel_module, "_FLUSH_S", 10.0)
    both = channel.pair()
    for number in range(20):
        both.to_worker.send(messages.Note(str(number), [b"x" * MIB]))
    both.to_worker.close()
    assert [str(number) for number in range(20)] == [both.worker.message().text for _ in range(20)]
    assert isinstance(both.worker.close_error(), PeerLostError)
    assert both.trainer.close_error() is None


def test_close_does_not_wait_for_a_peer_that_does_not_read(channel, messages, raw_peer):
    listener, trainer = channel.listen()
    raw_peer(listener.address).shake_hands(listener.token)
    connection = trainer.connection()
    connection.send(messages.Note("", [b"x" * MIB] * 8))
    listener.close()
    assert trainer.closed.get_nowait() == (connection, None)


def test_a_reason_reaches_on_close_and_later_senders(channel, messages):
    both = channel.pair()
    reason = StallError("too slow")
    both.to_worker.close(reason)
    with pytest.raises(PeerLostError):
        both.to_worker.send(messages.Word())
    assert reason is both.trainer.close_error()
    with pytest.raises(PeerLostError) as seen:
        both.to_worker.send(messages.Word())
    assert reason is seen.value.__cause__
    assert both.to_worker.closed


def test_on_close_comes_once(channel):
    both = channel.pair()
    for _ in range(3):
        both.to_worker.close()
    both.listener.close()
    both.listener.close()
    both.dialer.close()
    assert both.trainer.closed.qsize() == 1
    assert both.worker.closed.qsize() == 1


def test_ends_may_be_closed_from_their_callbacks(channel, messages):
    listener, trainer = channel.listen()
    dialer, worker = channel.dial(listener, on_message=lambda _c, _m: dialer.close())
    trainer.connection().send(messages.Word())
    assert worker.close_error() is None
    assert isinstance(trainer.close_error(), PeerLostError)


def test_redialing_can_be_switched_off(channel):
    address = random_address()
    first, _ = channel.listen(address=address, token="t")
    _, worker = channel.dial(address=address, token="t", redial=False)
    worker.connection()
    first.close()
    worker.close_error()
    _, trainer = channel.listen(address=address, token="t")
    time.sleep(0.5)
    assert trainer.opened.empty()


def test_a_dialer_may_come_before_its_listener(channel):
    address = random_address()
    dialer, worker = channel.dial(address=address, token="t")
    wait_for(lambda: dialer.last_error is not None)
    assert "is the trainer running?" in str(dialer.last_error)
    with pytest.raises(PeerLostError, match="not connected") as seen:
        dialer.send(None)
    assert isinstance(seen.value.__cause__, PeerLostError)
    channel.listen(address=address, token="t")
    worker.connection()
    assert dialer.last_error is None


def test_being_dropped_at_once_is_not_answered_by_a_tight_loop(channel):
    listener, trainer = channel.listen(on_open=lambda connection: connection.close())
    channel.dial(listener)
    time.sleep(1)
    assert trainer.closed.qsize() <= 10


@pytest.mark.parametrize("raised", [ZeroDivisionError("oops"), PeerLostError("oops")], ids=repr)
def test_a_callback_that_raises_costs_its_own_connection_only(channel, messages, caplog, raised):
    def explode(_connection, message):
        if message.text == "bad":
            raise raised
        trainer.received.put((_connection, message))

    listener, trainer = channel.listen(on_message=explode)
    _, good = channel.dial(listener)
    _, bad = channel.dial(listener, redial=False)
    good_connection = good.connection()
    with caplog.at_level(logging.ERROR):
        bad.connection().send(messages.Word("bad"))
        error = trainer.close_error()
    assert isinstance(error, PeerLostError)
    assert raised in (error, error.__cause__)
    assert "a handler failed" in caplog.text
    assert type(raised).__name__ in caplog.text
    assert isinstance(bad.close_error(), PeerLostError)
    good_connection.send(messages.Word("good"))
    assert messages.Word("good") == trainer.message()


def test_on_close_that_raises_ends_nothing(channel, caplog):
    def explode(_connection, _error):
        raise ZeroDivisionError

    listener, trainer = channel.listen(on_close=explode)
    _, first = channel.dial(listener, redial=False)
    first.connection().close()
    trainer.connection()
    _, second = channel.dial(listener)
    second.connection()
    wait_for(lambda: "on_close failed" in caplog.text)


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_a_busy_address_leaves_nothing_half_open(channel, kind):
    listener, _ = channel.listen(address="tcp:127.0.0.1:0" if kind == "tcp" else None)
    num_threads = threading.active_count()
    with pytest.raises(AddressInUseError, match=listener.address):
        channel.listen(address=listener.address)
    assert num_threads == threading.active_count()


def test_dialers_need_an_address_and_a_token(messages, recorder, leaves_nothing):
    callbacks = recorder().callbacks()
    for token in (None, ""):
        with pytest.raises(AuthenticationError, match="WTRANSFER_TOKEN_FILE"):
            Dialer(messages.CODEC, address="unix:@x", token=token, **callbacks)
    with pytest.raises(AddressError):
        Dialer(messages.CODEC, address="x", token="t", **callbacks)


def test_a_wrong_token_is_refused_on_both_sides_and_tried_again_slowly(channel):
    listener, trainer = channel.listen()
    dialer, worker = channel.dial(listener, token="wrong")
    assert isinstance(worker.refusal(), AuthenticationError)
    assert isinstance(trainer.refusal(), AuthenticationError)
    time.sleep(0.5)
    assert worker.refused.empty()
    assert not dialer.connected
    assert trainer.opened.empty()
    assert worker.opened.empty()


def test_a_full_listener_says_so(channel, messages):
    listener, trainer = channel.listen(max_connections=1)
    _, first = channel.dial(listener)
    first_connection = first.connection()
    _, second = channel.dial(listener)
    assert isinstance(second.refusal(), LimitError)
    assert isinstance(trainer.refusal(), LimitError)
    first_connection.send(messages.Word("still here"))
    assert messages.Word("still here") == trainer.message()


def test_a_false_trainer_is_refused_by_the_worker(channel):
    address = random_address()
    with socket.socket(socket.AF_UNIX) as impostor:
        impostor.bind("\0" + address.removeprefix("unix:@"))
        impostor.listen()
        _, worker = channel.dial(address=address, token="t")
        with impostor.accept()[0] as accepted:
            accepted.sendall(HANDSHAKE.encode(Challenge(PROTOCOL, b"n" * 32)))
            reader = FrameReader(HANDSHAKE)
            (auth,) = reader.feed(accepted.recv(1024))
            accepted.sendall(HANDSHAKE.encode(Welcome(auth.proof, 5, 30)))
            assert isinstance(worker.refusal(), AuthenticationError)
            (reject,) = reader.feed(accepted.recv(1024))
            assert isinstance(reject, Reject)
    assert worker.opened.empty()


def test_a_dialer_waits_for_a_busy_listener_until_its_deadline(channel, monkeypatch):
    """A listener whose interpreter is busy greets late: that is no reason to turn away."""
    monkeypatch.setattr(channel_module, "_CONNECT_S", 0.2)
    address = random_address()
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind("\0" + address.removeprefix("unix:@"))
        busy.listen()
        channel.dial(address=address, token="t")
        with busy.accept()[0] as accepted:
            accepted.settimeout(0.5)
            with pytest.raises(TimeoutError):
                accepted.recv(1)
        dialer, _ = channel.dial(address=address, token="t", deadline_s=0.2)
        with busy.accept()[0]:
            wait_for(lambda: isinstance(dialer.last_error, StallError))
        assert dialer.last_error.seconds == 0.2


def test_closing_interrupts_a_handshake(channel):
    address = random_address()
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind("\0" + address.removeprefix("unix:@"))
        silent.listen()
        dialer, _ = channel.dial(address=address, token="t")
        with silent.accept()[0]:
            dialer.close()
            wait_for(lambda: "wtransfer-dial" not in {each.name for each in threading.enumerate()})


def test_a_slow_name_lookup_holds_up_no_other_connection(channel, messages, monkeypatch):
    both = channel.pair()
    asked, answered = threading.Event(), threading.Event()
    look_up = socket.getaddrinfo

    def slow(host, *args, **options):
        if host != "slow.invalid":
            return look_up(host, *args, **options)
        if threading.current_thread() is threading.main_thread():
            return look_up("127.0.0.1", *args, **options)  # the constructor checks the address
        asked.set()
        answered.wait(10)
        raise socket.gaierror("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    dialer, _ = channel.dial(address="tcp:slow.invalid:1", token="t")
    assert asked.wait(10)
    both.to_worker.send(messages.Word("quick"))
    assert both.worker.message() == messages.Word("quick")
    answered.set()
    wait_for(lambda: dialer.last_error is not None)
    assert "no such host" in str(dialer.last_error)


def test_a_flood_of_strangers_is_no_flood_of_warnings(channel, raw_peer, caplog):
    listener, trainer = channel.listen()
    begin = time.monotonic()
    for _ in range(20):
        raw_peer(listener.address).send(b"GET / HTTP/1.1")
    for _ in range(20):
        trainer.refusal()
    warnings = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert 1 <= len(warnings) <= 1 + (time.monotonic() - begin)


HOSTILE = {
    "pickle": pickle.dumps({"a": [1, 2, 3]}, protocol=5),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros": bytes(4096),
    "message before proof": pack_frame(1, 0, b"\x80"),
    "long before proof": pack_frame(0xFF01, 0, bytes(1025)),
    "not typed": pack_frame(0xFF01, 0, b"\x80"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_bytes_without_a_proof_are_refused(channel, raw_peer, name):
    listener, trainer = channel.listen()
    peer = raw_peer(listener.address)
    peer.send(HOSTILE[name])
    peer.until_closed()
    assert isinstance(trainer.refusal(), LimitError if "long" in name else ProtocolError)
    assert trainer.opened.empty()


def test_a_stranger_costs_little_memory(channel, raw_peer):
    listener, trainer = channel.listen()
    raw_peer(listener.address).socket.close()  # whatever is made once is made now
    trainer.refusal()
    tracemalloc.start()
    peer = raw_peer(listener.address)
    peer.send(pack_frame(0xFF01, 0, bytes(1000))[:-1])
    wait_for(lambda: listener._unproven)
    time.sleep(0.05)
    peer.socket.close()
    trainer.refusal()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 * 1024


def test_the_oldest_stranger_makes_way_but_not_at_once(channel, raw_peer):
    listener, trainer = channel.listen()
    begin = time.monotonic()
    strangers = [raw_peer(listener.address) for _ in range(MAX_UNPROVEN)]
    _, newcomer = channel.dial(listener)
    error = trainer.refusal()
    assert time.monotonic() - begin > 0.09
    assert isinstance(error, LimitError)
    assert "made way" in str(error)
    newcomer.connection()
    strangers[0].until_closed()


@pytest.mark.parametrize(
    "sent", [b"", pack_frame(0xFF01, 0, bytes(1000))], ids=["nothing", "bytes"]
)
def test_a_stranger_is_gone_within_its_time_whatever_it_sends(channel, raw_peer, sent):
    listener, trainer = channel.listen()
    peer = raw_peer(listener.address)
    for byte in sent:
        if not trainer.refused.empty():
            break
        peer.send(bytes([byte]))
        time.sleep(0.01)
    error = trainer.refusal()
    assert isinstance(error, StallError)
    assert error.seconds < 1
    peer.until_closed()


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (pickle.dumps([1]), ProtocolError),
        (pack_frame(9, 0, b""), ProtocolError),
        (pack_frame(1, 1001, b""), LimitError),
        (pack_frame(2, 0, bytes(MIB + 1)), LimitError),
        (HANDSHAKE.encode(Auth(1)), ProtocolError),
        (pack_frame(2, 0, b"\x80")[:-1] + b"\x81", ChecksumError),
        (pack_frame(2, 0, b"\x80")[:-1], TruncatedError),
    ],
    ids=["pickle", "code", "entries", "length", "handshake again", "flipped", "cut off"],
)
def test_a_worker_that_breaks_the_protocol_is_dropped(channel, messages, raw_peer, data, error):
    listener, trainer = channel.listen()
    _, bystander = channel.dial(listener)
    to_trainer = bystander.connection()
    trainer.connection()
    peer = raw_peer(listener.address).shake_hands(listener.token)
    bad = trainer.connection()
    peer.send(data)
    peer.socket.shutdown(socket.SHUT_WR)
    connection, got = trainer.closed.get(timeout=10)
    assert connection is bad
    assert isinstance(got, error)
    assert bad.peer in str(got)
    to_trainer.send(messages.Word("still here"))
    assert messages.Word("still here") == trainer.message()


def test_a_silent_peer_is_given_up_at_the_deadline(channel, raw_peer):
    listener, trainer = channel.listen(deadline_s=0.5)
    peer = raw_peer(listener.address).shake_hands(listener.token)
    trainer.connection()
    begin = time.monotonic()
    error = trainer.close_error()
    assert isinstance(error, StallError)
    assert error.seconds == 0.5
    assert "process" in str(error)
    assert time.monotonic() - begin > 0.45
    peer.until_closed()


@pytest.fixture
def pass_by(later):
    """Let seconds pass at once, also for the timers of a listener's loop."""

    def pass_by(listener, seconds):
        later(seconds)
        listener._loop.call_soon(lambda: None)

    return pass_by


def test_a_peer_has_any_time_to_prove_itself_where_none_is_set(
    channel, messages, raw_peer, pass_by
):
    listener, trainer = channel.listen(handshake_s=None)
    peer = raw_peer(listener.address)
    wait_for(lambda: listener._unproven)
    pass_by(listener, 3600)
    peer.shake_hands(listener.token).send(messages.CODEC.encode(messages.Word("late")))
    assert trainer.message() == messages.Word("late")


@pytest.mark.parametrize("address", [None, "tcp:127.0.0.1:0"])
@pytest.mark.parametrize("is_late", [True, False], ids=["late", "too many"])
def test_a_peer_that_is_cut_off_is_sent_the_reason(channel, raw_peer, pass_by, address, is_late):
    listener, trainer = channel.listen(address=address, handshake_s=0.9 if is_late else None)
    peer = raw_peer(listener.address)
    wait_for(lambda: listener._unproven)
    for _ in range(0 if is_late else MAX_UNPROVEN):
        raw_peer(listener.address)
    pass_by(listener, 1)
    reason = "did not finish the handshake within 0.9 s" if is_late else "made way: too many peers"
    assert reason in str(trainer.refusal())
    with pytest.raises(PeerLostError, match=reason):
        shake_hands(peer.socket, WorkerHandshake(listener.token), Deadline(10), listener.address)


def test_a_worker_that_is_cut_off_dials_again(channel, raw_peer, pass_by, monkeypatch):
    listener, trainer = channel.listen()

    def late(*args):
        monkeypatch.setattr(channel_module, "shake_hands", shake_hands)
        wait_for(lambda: listener._unproven)
        pass_by(listener, 1)
        trainer.refusal()
        return shake_hands(*args)

    monkeypatch.setattr(channel_module, "shake_hands", late)
    _, worker = channel.dial(listener)
    worker.connection()
    assert worker.refused.empty()


def test_newcomers_take_the_place_of_those_that_have_proven_themselves(channel, raw_peer, later):
    listener, trainer = channel.listen()
    waiting = [raw_peer(listener.address) for _ in range(MAX_UNPROVEN)]
    wait_for(lambda: len(listener._unproven) == MAX_UNPROVEN)
    newcomer = raw_peer(listener.address)
    # The clock stands still: there is no other way into the room.
    later(-1e6)
    waiting[-1].shake_hands(listener.token)
    newcomer.shake_hands(listener.token)
    assert [trainer.connection().peer for _ in range(2)]


def test_idle_peers_hear_each_other(channel, pass_by):
    both = channel.pair(deadline_s=40.0)
    for _ in range(60):
        pass_by(both.listener, 2)
        wait_for(lambda: max(both.to_worker.last_heard_s, both.to_trainer.last_heard_s) < 10)
        time.sleep(0.01)
    assert not both.to_worker.closed
    assert not both.to_trainer.closed
    assert both.trainer.received.empty()


def test_a_slow_large_message_is_a_sign_of_life(channel, messages, raw_peer, pass_by):
    listener, trainer = channel.listen(deadline_s=40.0)
    peer = raw_peer(listener.address).shake_hands(listener.token)
    connection = trainer.connection()
    sent = messages.Note("slow", [b"x" * 1000])
    frame = messages.CODEC.encode(sent)
    for start in range(0, len(frame), 100):
        pass_by(listener, 10)
        peer.send(frame[start : start + 100])
        wait_for(lambda: connection.last_heard_s < 10)
    assert sent == trainer.message()
    pass_by(listener, 40)
    assert isinstance(trainer.close_error(), StallError)


def test_a_peer_that_does_not_read_costs_bounded_memory(channel, messages, raw_peer, monkeypatch):
    monkeypatch.setattr(channel_module, "MAX_OUTBOX_NBYTES", 4 * MIB)
    listener, trainer = channel.listen()
    raw_peer(listener.address).shake_hands(listener.token)
    connection = trainer.connection()
    frame = messages.CODEC.encode(messages.Note("", [b"x" * MIB]))
    for _ in range(4 - 1):
        connection.send_frame(frame)
    with pytest.raises(LimitError, match="does not take its messages"):
        send_many(connection, frame)
    assert isinstance(trainer.close_error(), LimitError)
    with pytest.raises(PeerLostError):
        connection.send_frame(frame)


def test_the_last_words_of_a_peer_are_read(channel, messages, raw_peer):
    listener, trainer = channel.listen()
    peer = raw_peer(listener.address).shake_hands(listener.token)
    connection = trainer.connection()
    words = b"".join(messages.CODEC.encode(messages.Word(str(n))) for n in range(100))
    busy = threading.Event()
    listener._loop.call_soon(lambda: busy.wait(0.3))
    connection.send(messages.Word("nobody reads this"))
    peer.send(words)
    peer.socket.close()
    busy.set()
    assert [str(n) for n in range(100)] == [trainer.message().text for _ in range(100)]
    assert isinstance(trainer.close_error(), PeerLostError)


def test_peers_may_be_given_names(channel):
    both = channel.pair()
    both.to_worker.peer = "worker 3"
    both.dialer.close()
    assert "worker 3 is gone" in str(both.trainer.close_error())
