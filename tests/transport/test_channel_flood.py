"""Ten thousand connections that prove nothing, while a live connection goes on working."""

from __future__ import annotations

import contextlib
import itertools
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from wtransfer.transport.address import parse_address
from wtransfer.transport.channel import MAX_UNPROVEN


@pytest.fixture
def many_descriptors():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


NUM_EXCHANGES = 100
"""Exchanges that go on within a flood."""


class Echo:
    """Exchange a message over a live connection again and again; remember what was slow."""

    def __init__(self, connection, recorder, message):
        self._connection, self._recorder, self._message = connection, recorder, message
        self._stop = threading.Event()
        self.num_done, self.num_slow, self.slowest_s = 0, 0, 0.0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def _run(self):
        while not self._stop.is_set():
            begin = time.monotonic()
            self._connection.send(self._message)
            self._recorder.message()
            seconds = time.monotonic() - begin
            self.slowest_s = max(self.slowest_s, seconds)
            self.num_slow += seconds > 1
            self.num_done += 1
            time.sleep(0.001)


def connect(family, target):
    sock = socket.socket(family)
    try:
        sock.connect(target)
    except BaseException:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def trickle(sockets, stop):
    """Send a byte on every socket now and then, whether or not anybody still listens."""
    while not stop.wait(0.05):
        for sock in list(sockets):
            with contextlib.suppress(OSError):
                sock.send(b"\xf7")


@pytest.mark.parametrize(
    ("address", "num_connections"),
    [
        pytest.param(None, 10_000, marks=pytest.mark.slow),
        ("tcp:127.0.0.1:0", 1500),
    ],
)
def test_a_flood_disturbs_neither_the_live_nor_the_newcomer(
    channel, messages, many_descriptors, address, num_connections
):
    listener, trainer = channel.listen(address=address, on_message=lambda c, m: c.send(m))
    _, worker = channel.dial(listener)
    live = worker.connection()
    where = parse_address(listener.address)
    most_unproven, joined_s, sockets, stop = 0, [], [], threading.Event()
    bytewise = threading.Thread(target=trickle, args=(sockets, stop))
    with Echo(live, worker, messages.Word("live")) as echo, contextlib.ExitStack() as stack:
        stack.callback(bytewise.join)
        stack.callback(stop.set)
        bytewise.start()
        for number in itertools.count():
            # A fast flood is over before there is much to compare with.
            if number >= num_connections and echo.num_done > NUM_EXCHANGES:
                break
            assert number < 10 * num_connections, f"{echo.num_done} exchanges"
            sock = connect(where.family, where.target)
            if (
                number % 4 == 0 and number < num_connections
            ):  # stays, half open or sending byte by byte
                sockets.append(stack.enter_context(sock))
            else:
                sock.close()
            most_unproven = max(most_unproven, len(listener._unproven))
            if number % 2000 == 1000:
                begin = time.monotonic()
                newcomer, seen = channel.dial(listener)
                seen.connection()
                joined_s.append(time.monotonic() - begin)
                newcomer.close()
    print(  # noqa: T201 (the numbers are a result)
        f"live: {echo.num_done} exchanges, slowest {echo.slowest_s * 1e3:.0f} ms; "
        f"newcomers joined within {max(joined_s) * 1e3:.0f} ms; at most {most_unproven} unproven"
    )
    assert not live.closed
    # A busy machine stands still for seconds, too, but not again and again.
    assert echo.slowest_s < 5
    assert echo.num_slow <= 2
    assert max(joined_s) < 8
    assert most_unproven <= MAX_UNPROVEN
    end = time.monotonic() + 5
    while listener._unproven and time.monotonic() < end:
        time.sleep(0.01)
    assert listener._unproven == {}
    assert trainer.refused.qsize() >= num_connections // 4  # all those that stayed


OUT_OF_DESCRIPTORS = """
import resource, socket, sys, time
from importlib import util
spec = util.spec_from_file_location("channel_peer", sys.argv[1])
peer = util.module_from_spec(spec)
spec.loader.exec_module(peer)
quiet = dict(on_open=lambda c: None, on_message=lambda c, m: None, on_close=lambda c, e: None)
listener = peer.Listener(peer.CODEC, token="t", **quiet)
target = "\\0" + listener.address.removeprefix("unix:@")
taken = [open("/dev/null") for _ in range(20)]
strangers = [socket.socket(socket.AF_UNIX) for _ in range(10)]
highest = max(one.fileno() for one in strangers)
resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, highest + 1))
for stranger in strangers:
    stranger.connect(target)
begin = time.process_time()
time.sleep(1)
busy_s = time.process_time() - begin
for one in taken:
    one.close()
dialer = peer.Dialer(peer.CODEC, address=listener.address, token="t", **quiet)
end = time.monotonic() + 20
while not dialer.connected and time.monotonic() < end:
    time.sleep(0.01)
print(dialer.connected, busy_s < 0.2, len(listener._unproven) + len(listener._open) > 0)
dialer.close()
listener.close()
for stranger in strangers:
    stranger.close()
"""


def test_running_out_of_descriptors_neither_spins_nor_ends_the_listener():
    script = Path(__file__).with_name("channel_peer.py")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", OUT_OF_DESCRIPTORS, str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("True True True\n", 0), done.stderr
    assert "cannot accept a connection: Too many open files" in done.stderr
