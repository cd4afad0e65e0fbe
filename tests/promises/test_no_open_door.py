"""README, promise 5.

No pickle, no open door. Nothing that a peer sends is unpickled, evaluated or imported. Listeners
are Unix sockets or loopback, and authenticated in both directions.
"""

import os
import pickle
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest


class Trap:
    """Where a pickle of it is loaded, a file appears."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def save(prompt, tmp_path):
    """Write the checkpoints ``step-1`` and ``step-2``."""
    prompt("saver").do("""
        from actors import *
        from safetensors.torch import save_file
        for value in (1, 2):
            os.mkdir(f"step-{value}")
            save_file(weights(value), f"step-{value}/model.safetensors")
    """)
    return tmp_path


@pytest.fixture
def served(save, command):
    """Return a worker that listens where it does by default, and its address."""
    made = command("worker", "--checkpoint", save / "step-1", "--name", "served")
    while not (found := re.search(r"127\.0\.0\.1:(\d+)", made.line())):
        pass
    return made, int(found[1])


def listening(pid: int) -> list[str]:
    """Return the addresses of a process's listening sockets of TCP and UDP, from the kernel."""
    inodes = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        found = re.fullmatch(r"socket:\[(\d+)\]", str(each.readlink()))
        inodes |= {found[1]} if found else set()
    rows = [
        (kind, row.split())
        for kind in ("tcp", "tcp6", "udp", "udp6")
        for row in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]
    ]
    return [
        row[1].split(":")[0]
        for kind, row in rows
        if row[9] in inodes and (row[3] == "0A" or kind.startswith("udp"))
    ]


LOOPBACK = {"0100007F", "00000000000000000000000001000000"}


def test_everything_that_listens_by_default_is_on_loopback(worker, trainer, served, tmp_path):
    host, _ = served
    assert listening(host.pid)
    first = worker("first")
    processes = [host, first]
    for engine in ("shm", "gloo"):
        publisher = trainer(1, engine=engine, options={})
        publisher.do("source.gate.set(); publisher.publish('v').ok")
        publisher.do("source.gate.clear(); source.reached.clear()")
        publisher.do("round = publisher.publish('w', wait=False); until(source.reached.is_set)")
        for each in (*processes, publisher):
            assert set(listening(each.pid)) <= LOOPBACK
        publisher.do("source.gate.set(); round.result(); publisher.close()")


def test_stranger_without_the_token_gets_in_on_neither_side(worker, prompt, trainer, address):
    first = worker("first")
    stranger = prompt("stranger", WTRANSFER_TOKEN="b" * 64)
    stranger.do(f"""
        from actors import *
        tensors = weights(1)
        session = wtransfer.WorkerSession(tensors, join={address!r}, name="stranger")
    """)
    publisher = trainer(1)
    assert stranger.do("until(lambda: session.status().refusal is not None)")
    assert publisher.do("until(lambda: publisher.refusal is not None)")
    publisher.do("source.gate.set(); report = publisher.publish('v2')")
    assert publisher.do("[each.worker for each in report.workers]") == ["first"]
    assert stranger.do("float(tensors['layer.0'].max()), session.version") == [1, None]
    publisher.do("publisher.close()")
    # The other direction: a trainer of another token at the same address.
    stranger.do("session.close()")
    stranger.do(f"publisher = wtransfer.Publisher(weights(9), listen={address!r}, deadline_s=2)")
    assert first.do("until(lambda: 'oken' in str(session.status().refusal))")
    with pytest.raises(worker.error) as caught:
        stranger.do("publisher.publish('v9')")
    assert "NoWorkersError" in caught.value.kinds
    assert first.do("serving.state()") == [[1, 2], [], "v2"]


def test_pickles_and_code_do_nothing_wherever_a_peer_may_send_them(
    served, save, command, prompt, token
):
    mark = save / "unpickled"
    load = pickle.dumps(Trap(mark))
    _, port = served
    first = prompt("first")
    first.do("""
        from actors import *
        source = Gated(weights(2))
        source.gate.set()
        publisher = wtransfer.Publisher(source, listen="tcp:127.0.0.1:0")
    """)
    trainer_port = int(first.do("publisher.address").rsplit(":", 1)[1])
    code = f"__import__('os').mkdir({str(mark)!r})".encode()
    routes = ("/init_weight_transfer_engine", "/update_weights", "/weight_info", "/pause")
    for body in (load, code, b'{"update_info": {"pickled": "%s"}}' % load.hex().encode()):
        for each in (port, trainer_port):
            with socket.create_connection(("127.0.0.1", each)) as peer:
                peer.sendall(len(body).to_bytes(4, "little") + body)
                peer.shutdown(socket.SHUT_WR)
                peer.settimeout(20)
                while peer.recv(4096):
                    pass
        for route in routes:
            for authorization in ("", f"Authorization: Bearer {token}\r\n"):
                with socket.create_connection(("127.0.0.1", port)) as peer:
                    peer.sendall(
                        f"POST {route} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{authorization}"
                        f"Content-Type: application/python-pickle\r\n"
                        f"Content-Length: {len(body)}\r\n\r\n".encode()
                        + body
                    )
                    peer.settimeout(20)
                    answer = b""
                    while part := peer.recv(4096):
                        answer += part
                    assert not answer.startswith(b"HTTP/1.1 2"), answer
    assert not mark.exists()
    # A checkpoint may be anybody's: the file that is pushed, and its manifest, is a pickle.
    for name in ("model.safetensors", "wtransfer.json"):
        other = save / name.replace(".", "-")
        other.mkdir()
        (other / "model.safetensors").write_bytes((save / "step-2/model.safetensors").read_bytes())
        (other / name).write_bytes(load)
        push = command("push", other, "--to", f"tcp:127.0.0.1:{port}")
        assert push.wait() == 1, push.log.read_text()
    assert not mark.exists()
    push = command("push", save / "step-2", "--to", f"tcp:127.0.0.1:{port}")
    assert push.wait() == 0, push.log.read_text()


ANOTHER_USERS_SERVER = """
import os, socket

os.setuid(65534)
server = socket.socket(socket.AF_UNIX)
server.bind("\\0wtransfer-promises-" + str(os.getpid()))
server.listen()
print(server.getsockname()[1:].decode(), flush=True)
while True:
    peer, _ = server.accept()
    while data := peer.recv(65536):
        print("heard", data, flush=True)
        peer.sendall(b"HTTP/1.1 200 OK\\r\\nConnection: close\\r\\nContent-Length: 2\\r\\n\\r\\n{}")
        peer.shutdown(socket.SHUT_WR)
    peer.close()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="makes a process of another user")
def test_push_tells_its_token_to_no_other_user_behind_a_unix_socket(save, command, token):
    with subprocess.Popen(
        [sys.executable, "-I", "-c", ANOTHER_USERS_SERVER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd="/",
    ) as server:
        try:
            place = f"unix:@{server.stdout.readline().strip()}"
            push = command("push", save / "step-2", "--to", place, "--deadline", "1")
            assert push.wait() == 1, push.output()
            assert "another user" in push.log.read_text()
        finally:
            server.kill()
        heard = server.stdout.read()
    assert token not in heard


def test_push_with_another_token_is_refused_and_changes_nothing(save, command, served):
    _, port = served
    place = f"tcp:127.0.0.1:{port}"
    push = command("push", save / "step-2", "--to", place, WTRANSFER_TOKEN="c" * 64)
    assert push.wait() == 1
    assert "token" in push.log.read_text()
    status = command("status", "--to", place)
    assert status.wait() == 0
    assert "step-2" not in status.output()
