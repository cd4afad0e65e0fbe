"""The control channel between processes that are killed, stopped, forked or not ours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from wtransfer.errors import AuthenticationError, PeerError, PeerLostError
from wtransfer.transport.address import parse_address
from wtransfer.transport.channel import random_address


@pytest.mark.parametrize("address", [None, "tcp:127.0.0.1:0"])
@pytest.mark.parametrize("sends", [False, True])
def test_a_killed_worker_is_noticed(channel, messages, peer_process, address, sends):
    listener, trainer = channel.listen(address=address)
    worker = peer_process("dial", listener.address, token=listener.token)
    connection = trainer.connection()
    if sends:
        connection.send(messages.Note("", [bytes(messages.MIB)] * 60))
        time.sleep(0.02)
    worker.signal(signal.SIGKILL)
    assert isinstance(trainer.close_error(), PeerError if sends else PeerLostError)


def test_a_killed_trainer_is_noticed_and_found_again(channel, peer_process):
    address = random_address()
    _, worker = channel.dial(address=address, token="t")
    for _ in range(2):
        trainer = peer_process("listen", address, "30", token="t")
        connection = worker.connection()
        trainer.signal(signal.SIGKILL)
        assert isinstance(worker.close_error(), PeerLostError)
        assert connection.closed


def test_a_forked_child_keeps_nothing_open_and_the_parent_goes_on(channel, messages, peer_process):
    trainer = peer_process("listen", random_address(), "30", "fork", token="t")
    _, address = trainer.line()
    dialer, worker = channel.dial(address=address, token="t")
    connection = worker.connection()
    assert trainer.line() == ["open"]
    trainer.go_on()
    _, child, num_descriptors, refusal, closed = trainer.line()
    try:
        assert (num_descriptors, refusal, closed) == ("0", "ForkedError", "True")
        for number in range(50):
            connection.send(messages.Word(str(number)))
        assert [str(n) for n in range(50)] == [worker.message().text for _ in range(50)]
        trainer.signal(signal.SIGKILL)
        assert isinstance(worker.close_error(), PeerLostError)
        os.kill(int(child), 0)  # it lived through all this
    finally:
        os.kill(int(child), signal.SIGKILL)
    assert not dialer.connected


FORK_OFTEN = """
import os, sys, time
from importlib import util
spec = util.spec_from_file_location("channel_peer", sys.argv[1])
peer = util.module_from_spec(spec)
spec.loader.exec_module(peer)
quiet = dict(on_open=lambda c: None, on_message=lambda c, m: None, on_close=lambda c, e: None)
listener = peer.Listener(peer.CODEC, token="t", **quiet)
churn = [
    peer.Dialer(peer.CODEC, address=listener.address, token="t", **quiet | {
        "on_open": lambda c: c.close()})
    for _ in range(4)
]
leaks = 0
for _ in range(150):
    pid = os.fork()
    if pid == 0:
        names = []
        for fd in os.listdir("/proc/self/fd"):
            try:
                names.append(os.readlink(f"/proc/self/fd/{fd}"))
            except OSError:
                pass
        os._exit(any(n.startswith(("socket:", "anon_inode:[event")) for n in names))
    leaks += os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    time.sleep(0.001)
for end in churn:
    end.close()
listener.close()
print("leaks", leaks)
"""


def test_no_child_inherits_a_connection_however_the_fork_falls():
    script = Path(__file__).with_name("channel_peer.py")
    done = subprocess.run(
        [sys.executable, "-c", FORK_OFTEN, str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("leaks 0\n", 0), done.stderr


STRANGER = """
import socket, sys
with socket.socket(socket.AF_UNIX) as sock:
    sock.settimeout(10)
    if sys.argv[1] == "dial":
        sock.connect("\\0" + sys.argv[2])
        try:
            print(len(sock.recv(100)))
        except ConnectionResetError:
            print(0)
    else:
        sock.bind("\\0" + sys.argv[2])
        sock.listen()
        print("listening", flush=True)
        with sock.accept()[0] as accepted:
            accepted.settimeout(10)
            print(len(accepted.recv(100)))
"""


def stranger(*arguments):
    """Start a process of another user; the system's interpreter, which everybody may read."""
    return subprocess.Popen(
        ["/usr/bin/env", "-i", "python3", "-c", STRANGER, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        user=65534,
        cwd="/",
    )


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@needs_root
def test_workers_of_another_user_are_not_even_greeted(channel):
    listener, trainer = channel.listen()
    name = parse_address(listener.address).target[1:]
    with stranger("dial", name) as process:
        assert process.stdout.readline().strip() == "0"
    error = trainer.refusal()
    assert isinstance(error, AuthenticationError)
    assert "belongs to user 65534" in str(error)


@needs_root
def test_trainers_of_another_user_hear_nothing(channel):
    address = random_address()
    with stranger("listen", address.removeprefix("unix:@")) as process:
        assert process.stdout.readline().strip() == "listening"
        _, worker = channel.dial(address=address, token="t")
        assert process.stdout.readline().strip() == "0"
    error = worker.refusal()
    assert isinstance(error, AuthenticationError)
    assert "belongs to user 65534" in str(error)
