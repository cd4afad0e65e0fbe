"""The handshake: both sides prove the token, neither sends it."""

from __future__ import annotations

import hmac
import os
import socket

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from wtransfer.deadline import Deadline
from wtransfer.errors import AuthenticationError, LimitError, PeerError, ProtocolError
from wtransfer.transport.framing import HEADER_NBYTES, FrameReader, pack_frame
from wtransfer.transport.handshake import (
    HANDSHAKE,
    MAX_HANDSHAKE_NBYTES,
    PROTOCOL,
    Auth,
    Challenge,
    Reject,
    TrainerHandshake,
    Welcome,
    WorkerHandshake,
    new_token,
    resolve_token,
    shake_hands,
)

TOKEN = "a token that is not random"


def trainer(token=TOKEN, **options):
    return TrainerHandshake(token, heartbeat_s=5, deadline_s=30, **options)


def test_both_sides_prove_the_token():
    here, there = trainer(), WorkerHandshake(TOKEN)
    there.receive(here.receive(there.receive(here.start())))
    assert here.complete
    assert there.complete
    assert (there.heartbeat_s, there.deadline_s) == (5, 30)


def test_the_token_is_in_no_message():
    here, there = trainer(), WorkerHandshake(TOKEN)
    challenge = here.start()
    auth = there.receive(challenge)
    sent = [challenge, auth, here.receive(auth)]
    assert all(TOKEN.encode() not in HANDSHAKE.encode(message) for message in sent)


@pytest.mark.parametrize("token", ["", "another", TOKEN[:-1], TOKEN + "x"])
def test_a_worker_with_another_token_is_refused(token):
    here = trainer()
    auth = WorkerHandshake(token).receive(here.start())
    with pytest.raises(AuthenticationError, match="could not prove"):
        here.receive(auth)
    assert not here.complete


def test_a_trainer_with_another_token_is_refused():
    here, there = trainer("another"), WorkerHandshake(TOKEN)
    there.receive(here.start())
    for proof in (b"", b"x" * 32):
        with pytest.raises(AuthenticationError, match="the trainer could not prove"):
            there.receive(Welcome(proof, 5, 30))
    assert not there.complete


def test_a_worker_cannot_be_used_as_its_own_trainer():
    there = WorkerHandshake(TOKEN)
    auth = there.receive(Challenge(PROTOCOL, b"n" * 32))
    with pytest.raises(AuthenticationError):
        there.receive(Welcome(auth.proof, 5, 30))


def test_a_recorded_answer_does_not_open_another_connection():
    recorded = WorkerHandshake(TOKEN).receive(trainer().start())
    with pytest.raises(AuthenticationError):
        trainer().receive(recorded)


def test_a_recorded_welcome_does_not_convince_another_worker():
    here, there = trainer(), WorkerHandshake(TOKEN)
    challenge = here.start()
    recorded = here.receive(there.receive(challenge))
    again = WorkerHandshake(TOKEN)
    again.receive(challenge)
    with pytest.raises(AuthenticationError):
        again.receive(recorded)


def test_versions_are_compared_before_any_token_work():
    here, there = trainer(protocol=2), WorkerHandshake("another", protocol=1)
    with pytest.raises(
        ProtocolError, match=r"trainer speaks protocol 2, this worker .* 1;"
    ) as seen:
        there.receive(here.start())
    told = there.refusal(seen.value)
    assert told.protocol == 1
    with pytest.raises(ProtocolError, match=r"worker speaks protocol 1, this trainer .* 2;"):
        here.receive(told)


def test_a_worker_of_another_version_that_answers_all_the_same_is_refused_by_version():
    here = trainer(protocol=2)
    with pytest.raises(ProtocolError, match=r"worker speaks protocol 1, this trainer .* 2;"):
        here.receive(Auth(1))


def test_a_trainer_of_another_version_that_rejects_is_named_by_version():
    with pytest.raises(ProtocolError, match=r"trainer speaks protocol 2, this worker .* 1;"):
        WorkerHandshake(TOKEN, protocol=1).receive(Reject(2, "AuthenticationError", "whatever"))


def challenged():
    there = WorkerHandshake(TOKEN)
    there.receive(Challenge(PROTOCOL, b"n" * 32))
    return there


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (trainer, Welcome(b"", 5, 30)),
        (trainer, Challenge(PROTOCOL, b"n" * 32)),
        (lambda: WorkerHandshake(TOKEN), Welcome(b"", 5, 30)),
        (lambda: WorkerHandshake(TOKEN), Auth(PROTOCOL, b"n" * 32)),
        (challenged, Challenge(PROTOCOL, b"m" * 32)),
    ],
)
def test_messages_out_of_order_are_refused(make, message):
    with pytest.raises(ProtocolError, match="wrong point"):
        make().receive(message)


@pytest.mark.parametrize("nbytes", [0, 31, 33])
def test_short_or_long_nonces_are_refused(nbytes):
    with pytest.raises(ProtocolError, match="32 bytes"):
        trainer().receive(Auth(PROTOCOL, b"n" * nbytes, b""))
    with pytest.raises(ProtocolError, match="32 bytes"):
        WorkerHandshake(TOKEN).receive(Challenge(PROTOCOL, b"n" * nbytes))


def test_a_full_trainer_says_so_only_to_a_peer_that_proved_the_token():
    def full():
        raise LimitError("no room")

    here, there = trainer(admit=full), WorkerHandshake(TOKEN)
    auth = there.receive(here.start())
    with pytest.raises(AuthenticationError):
        trainer("another", admit=full).receive(auth)
    with pytest.raises(LimitError, match="no room") as seen:
        here.receive(auth)
    with pytest.raises(LimitError, match="no room"):
        there.receive(here.refusal(seen.value))


def test_a_reject_is_not_answered():
    there = WorkerHandshake(TOKEN)
    with pytest.raises(AuthenticationError) as seen:
        there.receive(Reject(PROTOCOL, "AuthenticationError", "no"))
    assert there.refusal(seen.value) is None


@pytest.mark.parametrize("name", ["SystemExit", "StallError", "__class__", "x" * 500])
def test_a_reject_cannot_choose_an_error_that_is_no_peer_error(name):
    with pytest.raises(AuthenticationError, match="no"):
        WorkerHandshake(TOKEN).receive(Reject(PROTOCOL, name, "no"))


def test_a_long_reason_still_fits_the_limit():
    told = trainer().refusal(ProtocolError("\N{SNOWMAN}" * 5000))
    assert len(HANDSHAKE.encode(told)) <= MAX_HANDSHAKE_NBYTES


def encoded(message):
    return HANDSHAKE.encode(message)


nonces = st.binary(max_size=40) | st.just(b"n" * 32)
some_frames = (
    st.builds(pack_frame, st.integers(0xFF00, 0xFF03), st.just(0), st.binary(max_size=60))
    | st.builds(Challenge, st.sampled_from([PROTOCOL, 0]), nonces).map(encoded)
    | st.builds(Auth, st.sampled_from([PROTOCOL, 0]), nonces, st.binary(max_size=40)).map(encoded)
    | st.builds(Welcome, st.binary(max_size=40), st.just(5), st.just(30)).map(encoded)
    | st.builds(Reject, st.just(PROTOCOL), st.text(max_size=5), st.text(max_size=5)).map(encoded)
)
CHALLENGE = encoded(Challenge(PROTOCOL, b"n" * 32))


@settings(deadline=None, max_examples=300)
@given(st.lists(some_frames, max_size=4))
@example([CHALLENGE])
@example([CHALLENGE, CHALLENGE])
@example([CHALLENGE, encoded(Welcome(b"p" * 32, 5, 30))])
@example([encoded(Auth(PROTOCOL, b"n" * 32, b"p" * 32))])
def test_arbitrary_messages_raise_peer_errors_only(frames):
    # A worker answers a challenge, once. Nothing else is taken without the token.
    num_taken = int(is_challenge(frames))
    for side, expected in ((trainer(), 0), (WorkerHandshake(TOKEN), num_taken)):
        taken = []

        def receive(side=side, taken=taken):
            for message in FrameReader(HANDSHAKE).feed(b"".join(frames)):
                taken.append(side.receive(message))

        if len(frames) == expected:
            receive()
        else:
            with pytest.raises(PeerError):
                receive()
        assert [type(each) for each in taken] == [Auth] * expected
        assert not side.complete


def is_challenge(frames):
    """Return whether the first frame is a challenge of this protocol, by its body."""
    head, body = (frames or [b""])[0][:6], (frames or [b""])[0][HEADER_NBYTES:]
    try:
        found = msgspec.msgpack.decode(body, type=Challenge)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return head[4:] == b"\xff\x00" and found.protocol == PROTOCOL and len(found.nonce) == 32


@settings(deadline=None, max_examples=50)
@given(st.binary(max_size=100))
def test_arbitrary_bytes_of_a_listener_are_peer_errors(data):
    listener, dialer = socket.socketpair()
    with listener, dialer:
        listener.sendall(data)
        listener.shutdown(socket.SHUT_WR)
        with pytest.raises(PeerError):
            shake_hands(dialer, WorkerHandshake(TOKEN), Deadline(5.0), "the listener")


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 1e9])
def test_silly_times_are_refused(seconds):
    body = msgspec.msgpack.encode({"proof": b"", "heartbeat_s": seconds, "deadline_s": 1})
    with pytest.raises(ProtocolError, match="Welcome"):
        list(FrameReader(HANDSHAKE).feed(pack_frame(0xFF02, 0, body)))


def test_new_tokens_are_long_and_different():
    assert new_token() != new_token()
    assert len(new_token()) == 43


def owner_only(tmp_path, text):
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_the_argument_wins_then_the_variable_then_the_file(tmp_path):
    environ = {"WTRANSFER_TOKEN_FILE": str(owner_only(tmp_path, "from the file\n"))}
    assert resolve_token(None, environ) == "from the file"
    environ["WTRANSFER_TOKEN"] = "from the variable"
    assert resolve_token(None, environ) == "from the variable"
    assert resolve_token("given", environ) == "given"
    assert resolve_token(None, {}) is None


def give_away(path):
    if os.geteuid():
        pytest.skip("only root can give a file away")
    os.chown(path, 65534, 65534)


def make_link(path):
    path.symlink_to(owner_only(path.parent, "x").rename(path.with_name("target")))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda path: owner_only(path.parent, "x").chmod(0o640), "chmod 600"),
        (lambda path: owner_only(path.parent, "x").chmod(0o602), "chmod 600"),
        (
            lambda path: give_away(owner_only(path.parent, "x")),
            "belongs to user 65534.*as that user",
        ),
        (make_link, "symbolic link"),
        (lambda path: os.mkfifo(path, 0o600), "not a regular file"),
        (lambda path: path.mkdir(), "not a regular file"),
        (lambda path: owner_only(path.parent, ""), "1 to 4096 bytes"),
        (lambda path: owner_only(path.parent, " \n"), "1 to 4096 bytes"),
        (lambda path: owner_only(path.parent, "x" * 5000), "1 to 4096 bytes"),
        (lambda path: None, r"token.*No such file"),
    ],
)
def test_a_token_file_that_cannot_be_trusted_is_refused(tmp_path, make, text):
    make(tmp_path / "token")
    with pytest.raises(AuthenticationError, match=text):
        resolve_token(None, {"WTRANSFER_TOKEN_FILE": str(tmp_path / "token")})


def test_proofs_are_compared_in_constant_time(monkeypatch):
    compared = []
    compare_digest = hmac.compare_digest

    def spy(one, other):
        compared.append(True)
        return compare_digest(one, other)

    monkeypatch.setattr(hmac, "compare_digest", spy)
    here, there = trainer(), WorkerHandshake(TOKEN)
    there.receive(here.receive(there.receive(here.start())))
    assert compared == [True, True], "each side compares the other's proof"
