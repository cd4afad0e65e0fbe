"""A live SGLang takes updates of a publisher: what its requests compute, and what is undone."""

import contextlib
import http.client
import shutil
import socket

import pytest
import sglang_models
import wtransfer
from publishers import publishing, pushed, pushed_by_command
from server import PROMPT, TOKEN, Server
from sglang_models import wrong_tokens
from wtransfer.errors import CommitError, WTransferError

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]


def test_pushed_weights_are_those_that_compute(server, folders, tmp_path):
    pushed(folders["A"], server, "first")
    first = server.ask(PROMPT)
    assert wrong_tokens({"first": folders["A"]}, first) == []
    through_files = ("--engine", "file", "-o", f"path={tmp_path}")
    for label, push, *options in (
        ("B", pushed_by_command),
        ("A", pushed),
        ("B", pushed_by_command, *through_files),
    ):
        push(folders[label], server, label, *options)
        answer = server.ask(PROMPT)
        assert answer.versions == [(label, 0, 8)]
        assert answer.num_cached == 0
        assert wrong_tokens(folders, answer) == []
        assert (answer.tokens == first.tokens) == (label == "A")


def test_requests_that_run_keep_their_tokens_and_go_on_with_the_new_weights(server, folders):
    pushed(folders["A"], server, "A")
    with publishing(server, folders["B"]) as (publisher, _):
        begun = [server.begin([*PROMPT, number], 60) for number in range(3)]
        server.hold(running=3)
        publisher.publish("B")
        answers = [each.result() for each in begun]
    for answer in answers:
        (old, zero, at), (new, begin, end) = answer.versions
        assert (old, zero, new, begin, end) == ("A", 0, "B", at, 60)
        assert answer.num_retractions == 1
        assert wrong_tokens(folders, answer) == []


def test_wrong_token_is_refused(server, folders):
    with (
        pytest.raises(WTransferError, match="token"),
        wtransfer.Publisher({}, hosts=[server.address], token="another", deadline_s=10),
    ):
        pass


@pytest.mark.parametrize("route", ["/pause", "/resume"])
def test_pause_at_the_address_of_updates_is_refused_and_sglangs_own_is_named(server, route):
    asked = http.client.HTTPConnection("sglang", timeout=30)
    asked.sock = socket.socket(socket.AF_UNIX)
    asked.sock.connect(server.address.replace("unix:@", "\0"))
    with contextlib.closing(asked):
        asked.request("POST", route, headers={"authorization": f"Bearer {TOKEN}"})
        answer = asked.getresponse()
        assert (answer.status, b"/pause_generation" in answer.read()) == (403, True)


def test_load_that_fails_at_any_tensor_leaves_the_weights_before(server, folders, kind):
    pushed(folders["A"], server, "A")
    before = server.ask(PROMPT).tokens
    with publishing(server, folders["B"]) as (publisher, held):
        last = len(held) - 1
        for number in range(len(held)) if kind == "llama" else (0, last // 2, last):
            server.tell("fail_at", str(number))
            with pytest.raises(CommitError, match=f"fails at tensor {number}"):
                publisher.publish(f"B-{number}")
            answer = server.ask([*PROMPT, number], 2)
            assert answer.versions == [("A", 0, 2)]
            assert wrong_tokens(folders, answer) == []
        again = server.ask(PROMPT)
        assert again.tokens == before
        server.forget("fail_at")
        publisher.publish("B")
    assert server.ask(PROMPT).versions == [("B", 0, 8)]


def test_update_of_another_dtype_is_rounded_to_a_tied_checkpoints(models, tmp_path):
    """The files have the head and the embedding, the publisher's model has one tensor for both."""
    for name in "AB":
        shutil.copytree(models / f"llama-{name}", tmp_path / name)
        sglang_models.tie(tmp_path / name)
    trained = sglang_models.loaded(tmp_path / "B").float()
    server = Server(tmp_path / "server", tmp_path / "A", env={"WTRANSFER_SGLANG_CAST": "1"})
    with contextlib.closing(server.ready()):
        hosts = [server.address]
        with wtransfer.Publisher(trained, hosts=hosts, token=TOKEN, deadline_s=30) as publisher:
            assert publisher.publish("B").ok
        answer = server.ask(PROMPT)
    assert answer.versions == [("B", 0, 8)]
    sglang_models.loaded.cache_clear()
    assert wrong_tokens({"B": tmp_path / "B"}, answer) == []
