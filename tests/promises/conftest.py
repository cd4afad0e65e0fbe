"""The product as its users have it: a wheel, installed into a virtual environment.

Every process of these tests is forked by `nursery.py` in that environment, so that torch is
imported once. A process runs a command, or it is a `Prompt`.
"""

import contextlib
import fcntl
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
# The longest wait for an event that a test knows will come.
SOON_S = 30.0


class RemoteError(RuntimeError):
    """A snippet raised: the names of the error's classes, its text and its worker."""

    def __init__(self, answer: dict) -> None:
        super().__init__(f"{answer['kinds'][0]}: {answer['error']}")
        self.kinds, self.text, self.worker = answer["kinds"], answer["error"], answer["worker"]


class Process:
    """A process of the virtual environment."""

    def __init__(self, nursery, argv, env, cwd, log: Path) -> None:
        self._nursery, self.log = nursery, log
        theirs_in, self._stdin = os.pipe()
        self._stdout, theirs_out = os.pipe()
        with log.open("wb") as stderr:
            theirs = [theirs_in, theirs_out, stderr.fileno()]
            self.pid = nursery.ask({"argv": argv, "env": env, "cwd": str(cwd)}, theirs)
        os.close(theirs_in)
        os.close(theirs_out)
        self._pidfd = os.pidfd_open(self.pid)
        self._unread, self.code = b"", None

    def signal(self, number: int) -> None:
        signal.pidfd_send_signal(self._pidfd, number)

    def stop(self) -> None:
        """Send SIGSTOP, and return when the process is stopped."""
        self.signal(signal.SIGSTOP)
        while "T (stopped)" not in Path(f"/proc/{self.pid}/status").read_text():
            time.sleep(0.001)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL

    def wait(self, timeout_s: float = SOON_S) -> int:
        """Return the exit code."""
        if self.code is None:
            ended, _, _ = select.select([self._pidfd], [], [], timeout_s)
            assert ended, f"the process has not ended:\n{self.log.read_text()}"
            self.code = self._nursery.ask({"wait": self.pid})
        return self.code

    def line(self, timeout_s: float = SOON_S) -> str:
        """Return the next line of its output."""
        until = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            left = max(0.0, until - time.monotonic())
            ready, _, _ = select.select([self._stdout], [], [], left)
            data = os.read(self._stdout, 1 << 16) if ready else b""
            assert data, f"{'no more' if ready else 'no'} output:\n{self.log.read_text()}"
            self._unread += data
        line, self._unread = self._unread.split(b"\n", 1)
        return line.decode()

    def output(self, timeout_s: float = SOON_S) -> str:
        """Return all that it has yet to print, once it has ended."""
        os.set_blocking(self._stdout, True)
        until, data = time.monotonic() + timeout_s, self._unread
        while True:
            left = max(0.0, until - time.monotonic())
            ready, _, _ = select.select([self._stdout], [], [], left)
            assert ready, f"the process has not ended:\n{self.log.read_text()}"
            part = os.read(self._stdout, 1 << 16)
            if not part:
                self._unread = b""
                return data.decode()
            data += part

    def close(self) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGKILL)
            self.wait()
        for each in (self._stdin, self._stdout, self._pidfd):
            os.close(each)


class Prompt(Process):
    """A Python prompt that has imported torch and wtransfer."""

    def start(self, snippet: str) -> None:
        """Execute statements; `answer` returns the value of an expression that ends them."""
        os.write(self._stdin, json.dumps(textwrap.dedent(snippet)).encode() + b"\n")

    def answer(self, timeout_s: float = SOON_S):
        """Return the value of the last snippet; raise a `RemoteError` if it raised."""
        answer = json.loads(self.line(timeout_s))
        if "error" in answer:
            raise RemoteError(answer)
        return answer["value"]

    def do(self, snippet: str, timeout_s: float = SOON_S):
        self.start(snippet)
        return self.answer(timeout_s)


class Nursery:
    def __init__(self, venv: Path) -> None:
        self._socket, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [venv / "bin/python", Path(__file__).with_name("nursery.py")],
            stdin=theirs,
            env=environment(),
            cwd=venv,
        )
        theirs.close()

    def ask(self, request: dict, fds: "list[int] | tuple" = ()) -> int:
        socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
        answer = self._socket.recv(64)
        assert answer, "the nursery has ended"
        return json.loads(answer)

    def close(self) -> None:
        self._socket.close()
        assert self._process.wait(SOON_S) == 0


def environment(**more: str) -> dict[str, str]:
    """Return an environment without what this run has set for itself."""
    ours = ("WTRANSFER_", "PYTHON", "PYTEST", "COV_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return clean | {"OMP_NUM_THREADS": "1"} | more


@pytest.fixture(scope="session")
def venv(tmp_path_factory) -> Path:
    """Return the virtual environment with the wheel: one for all processes of pytest-xdist."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    made = folder / "venv-of-the-wheel"
    with (folder / "venv-of-the-wheel.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (made / "complete").exists():
            _install(made)
            (made / "complete").touch()
    return made


def _install(made: Path) -> None:
    def run(*command: "str | Path") -> str:
        done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=made.parent)
        return done.stdout.strip()

    pip = [sys.executable, "-m", "pip"]
    run(sys.executable, "-m", "venv", "--without-pip", made)
    run(*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", made / "wheel", PROJECT)
    (wheel,) = (made / "wheel").glob("*.whl")
    run(*pip, "--python", made / "bin/python", "install", "-q", "--no-deps", wheel)
    # torch and the other requirements are those of this run, behind the wheel. What this run has
    # installed as editable is not found there: no .pth file of it is read.
    here = run(made / "bin/python", "-c", "import site; print(site.getsitepackages()[0])")
    folders = [each for each in sys.path if each.endswith("-packages")]
    Path(here, "requirements.pth").write_text("\n".join(folders))
    found = run(made / "bin/python", "-c", "import wtransfer; print(wtransfer.__file__)")
    assert Path(found).is_relative_to(made), found
    assert importlib.util.find_spec("torch") is not None


@pytest.fixture(scope="session")
def nursery(venv):
    nursery = Nursery(venv)
    yield nursery
    nursery.close()


@pytest.fixture
def processes():
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def token() -> str:
    """Return the secret that the processes of a test share."""
    return os.urandom(32).hex()


@pytest.fixture
def prompt(nursery, processes, tmp_path, token):
    """Return a function that opens a Python prompt; its name is that of its log."""

    def open_prompt(name: str, **env: str) -> Prompt:
        env = environment(WTRANSFER_TOKEN=token) | env
        made = Prompt(nursery, [], env, tmp_path, tmp_path / f"{name}.log")
        processes.callback(made.close)
        return made

    return open_prompt


@pytest.fixture
def program(nursery, processes, tmp_path, token):
    """Return a function that starts a script with arguments."""
    number = iter(range(99))

    def start(*argv: object, **env: "str | None") -> Process:
        env = environment(WTRANSFER_TOKEN=token) | env
        env = {name: value for name, value in env.items() if value is not None}
        log = tmp_path / f"program-{next(number)}.log"
        made = Process(nursery, [*map(str, argv)], env, tmp_path, log)
        processes.callback(made.close)
        return made

    return start


@pytest.fixture
def command(venv, program):
    """Return a function that starts ``wtransfer`` with arguments."""

    def start(*arguments: object, **env: str) -> Process:
        return program(venv / "bin/wtransfer", *arguments, **env)

    return start


@pytest.fixture
def address() -> str:
    """Return a free address of this host for a publisher."""
    return f"unix:@promises-{os.urandom(8).hex()}"


@pytest.fixture
def worker(prompt, address):
    """Return a function that starts a worker, which serves weights of the value 1."""

    def start(name: str, **options: object) -> Prompt:
        made = prompt(name)
        made.do(f"""
            from actors import *
            tensors = weights(1)
            session = wtransfer.WorkerSession(
                tensors, join={address!r}, name={name!r}, **{options!r}
            )
            serving = Serving(session, tensors)
        """)
        return made

    start.error = RemoteError
    return start


@pytest.fixture
def trainer(prompt, address):
    """Return a function that starts a trainer of weights of the value 2, behind a gate."""
    number = iter(range(99))

    def start(num_workers: int, **options: object) -> Prompt:
        options = {"options": {"bucket_nbytes": 1}, "deadline_s": 20} | options
        made = prompt(f"trainer-{next(number)}")
        made.do(f"""
            from actors import *
            source = Gated(weights(2))
            publisher = wtransfer.Publisher(source, listen={address!r}, **{options!r})
            publisher.wait_for_workers({num_workers})
        """)
        return made

    return start
