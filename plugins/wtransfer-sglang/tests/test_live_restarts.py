"""A live SGLang is killed and restarted at its address, under load, beside a plain worker.

No report is ok while the server holds other weights, and it is brought up to date by itself.
"""

import contextlib
import http.client
import itertools
import threading
import time

import pytest
import torch
import wtransfer
from safetensors.torch import load_file
from server import PROMPT, TOKEN, Server
from sglang_models import wrong_tokens
from wtransfer.errors import HostsError
from wtransfer.testing.fleet import committing

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

WAIT_S = 60.0
"""What a busy machine may take for 5 s and a catch-up."""


def until(condition):
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextlib.contextmanager
def asking(server):
    """Ask a server one thing after the other within the block; gives the answers."""
    answers, over, failures = [], threading.Event(), []

    def ask():
        for number in itertools.count():
            try:
                answers.append(server.ask([*PROMPT, number % 251], 20))
            except (OSError, http.client.HTTPException):
                over.wait(0.05)  # it is down
            except Exception as error:  # a thread's own would be lost
                failures.append(error)
            if over.is_set():
                return

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield answers
    finally:
        over.set()
        thread.join()
    assert failures == []


@pytest.mark.parametrize(
    ("kind", "policy", "num_kills"),
    [
        ("llama", "abort", 1),
        pytest.param("moe", "drop", 3, marks=pytest.mark.nightly),
    ],
)
def test_restarted_server_is_missed_in_each_round_until_it_is_brought_up_to_date(
    kind, policy, num_kills, folders, tmp_path
):
    held_by = {name: load_file(folders[name] / "model.safetensors") for name in "AB"}
    held = dict(held_by["A"])
    plain = {name: torch.zeros_like(tensor) for name, tensor in held.items()}
    numbers = itertools.count()
    with contextlib.ExitStack() as stack:
        server = Server(tmp_path / "server", folders["A"])
        stack.enter_context(contextlib.closing(server))
        session = stack.enter_context(wtransfer.WorkerSession(plain, commit="copy"))
        worker = stack.enter_context(wtransfer.WorkerServer(session, token=TOKEN))
        stack.enter_context(committing(session))
        server.ready()
        publisher = stack.enter_context(
            wtransfer.Publisher(
                held,
                hosts=[server.address, worker.url],
                token=TOKEN,
                deadline_s=30,
                return_s=2,
                on_lost_worker=policy,
            )
        )
        answers = stack.enter_context(asking(server))

        def publish():
            number = next(numbers)
            name = "BA"[number % 2]
            held.update(held_by[name])
            label = f"{name}-{number}"
            folders[label] = folders[name]
            return publisher.publish(label)

        def check(report):
            """Assert that the server holds what a report says, and serves it."""
            assert report.raise_unless_ok()
            assert len(report.holders) == 2
            assert server.weight_info()["fingerprint"] == report.fingerprint
            answer = server.ask(PROMPT)
            assert answer.versions == [(report.version, 0, 8)]
            assert wrong_tokens(folders, answer) == []

        for _ in range(num_kills):
            check(publish())
            server.kill()
            until(lambda: server.address not in publisher.hosts)
            if policy == "drop":
                report = publish()
                (missed,) = (each for each in report.workers if each not in report.holders)
                assert (missed.worker, missed.outcome) == (server.address, "dropped")
                assert not report.ok
                assert report.raise_unless_ok(left_out=True)
            else:
                with pytest.raises(HostsError, match=f"{server.address} is absent for "):
                    publish()
            assert session.version == publisher.version
            num_before = len(answers)
            server.start_again()
            begun = time.monotonic()
            # No round is there to bring it up to date.
            until(lambda: server.weight_info()["fingerprint"] == publisher.fingerprint)
            until(lambda: {each.version for each in publisher.workers()} == {publisher.version})
            print(f"current {time.monotonic() - begun:.2f} s after its start")  # noqa: T201
            until(lambda num=num_before: len(answers) > num)
        check(publish())
    assert [wrong_tokens(folders, answer) for answer in answers] == [[]] * len(answers)
