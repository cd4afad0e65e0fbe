"""A server of SGLang in processes of its own, on loopback, with the plug-in and the witness."""

import contextlib
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parents[2]
START_S = 240.0
ANSWER_S = 120.0
PROMPT = [5, 9, 33, 70, 12, 101, 44, 8, 200, 17, 90, 61]
TOKEN = secrets.token_hex(16)
READY = "The server is fired up and ready to roll!"
OPTIONS = {
    "device": "cpu",
    "dtype": "bfloat16",
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "mem-fraction-static": "0.1",
    "max-total-tokens": "4096",
    "cuda-graph-backend-decode": "disabled",
    "cuda-graph-backend-prefill": "disabled",
    "watchdog-timeout": "600",
    # Else each idle server keeps a processor busy.
    "sleep-on-idle": True,
}


class Server:
    """One server. Its start is awaited by `ready`, so that several may start at once.

    Args:
        folder: Folder of its log and of the witness.
        model: Folder of the checkpoint.
        options: Further options of SGLang, by name without dashes.
        env: Further environment.
        python: Python of its environment.
    """

    def __init__(self, folder, model, options=None, env=None, python=sys.executable):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.address = f"unix:@wtransfer-sglang-{secrets.token_hex(6)}"
        self.url = f"http://127.0.0.1:{free_port()}"
        self.log = folder / "log"
        given = {**OPTIONS, **(options or {}), "model-path": str(model), "host": "127.0.0.1"}
        given["port"] = self.url.rpartition(":")[2]
        command = [python, "-m", "sglang.launch_server", "--skip-server-warmup"]
        command += ["--skip-tokenizer-init"]
        for name, value in given.items():
            command += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        path = [TESTS / "stand_ins", TESTS / "live" / "witness", os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
            "WTRANSFER_TOKEN": TOKEN,
            "WTRANSFER_LISTEN": self.address,
            "WTRANSFER_CACHE": str(folder / "cache"),
            "WITNESS": str(folder),
            **(env or {}),
        }
        self._begin(command, environment)

    def _begin(self, command, environment):
        self._begun_by = command, environment
        self._start()
        self._pool = ThreadPoolExecutor(64)

    def _start(self):
        command, environment = self._begun_by
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def ready(self):
        """Wait for the start; return the server."""
        end = time.monotonic() + START_S
        while READY not in self.log.read_text():
            assert self._process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < end, self.log.read_text()[-4000:]
            time.sleep(0.1)
        return self

    def ended(self):
        """Return whether SGLang has ended."""
        return self._process.poll() is not None

    def signal_rank(self, rank, number):
        """Send a signal to the process of a rank."""
        os.kill(int((self.folder / f"pid-{rank}").read_text()), number)

    def kill(self):
        """Kill its processes, those that SGLang has started as well."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def start_again(self):
        """Start it as it was started before, and wait for that."""
        self._start()
        self.ready()

    def close(self):
        """End it."""
        self.kill()
        self._pool.shutdown()

    def post(self, path, body, wait_s=ANSWER_S):
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=wait_s) as answer:
            return json.loads(answer.read() or b"null")

    def weight_info(self):
        """Return what the server says of its weights at `WTRANSFER_LISTEN`."""
        from wtransfer.weight_sync.http.client import HttpClient

        return HttpClient(self.address, TOKEN).weight_info()

    def ask(self, prompt, num_tokens=8, wait_s=ANSWER_S, **more):
        """Return the answer to a prompt of token ids: tokens, versions and cached tokens."""
        sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, **more}
        found = self.post("/generate", body, wait_s)
        return Answer(prompt, found)

    def begin(self, *args, **kwargs):
        """Ask on a thread; returns a future."""
        return self.call(self.ask, *args, **kwargs)

    def call(self, *args, **kwargs):
        """Call a function on a thread; returns a future."""
        return self._pool.submit(*args, **kwargs)

    # -- the witness

    def tell(self, name, text=""):
        """Write one of the witness's files, whole."""
        made = self.folder / f".{name}"
        made.write_text(text)
        made.rename(self.folder / name)

    def forget(self, name):
        """Remove one of the witness's files."""
        (self.folder / name).unlink(missing_ok=True)

    def hold(self, **wanted):
        """Have the scheduler stand still once it has as many requests, until the next commit."""
        self.forget("holding")
        self.tell("hold", json.dumps(wanted))
        self.wait_for("holding")

    def begin_held(self, *args, **kwargs):
        """Ask while the scheduler stands still; return when it could take the request."""
        return self.call_held(self.ask, *args, **kwargs)

    def post_held(self, path, body):
        """Post while the scheduler stands still, and let it go on with that; return the answer."""
        begun = self.call_held(self.post, path, body)
        self.forget("hold")
        return begun.result()

    def call_held(self, call, *args, **kwargs):
        """Call while the scheduler stands still; return when what it sends has arrived."""
        self.forget("arrived")
        begun = self._pool.submit(call, *args, **kwargs)
        self.wait_for("arrived")
        return begun

    def wait_for(self, name):
        """Wait until the witness has written a file."""
        end = time.monotonic() + ANSWER_S
        while not (self.folder / name).exists():
            assert time.monotonic() < end
            time.sleep(0.005)

    def last_pause(self):
        """Return what the last pause has met."""
        return json.loads((self.folder / "paused").read_text().splitlines()[-1])


class ServerOfWords(Server):
    """A server that a line of the guide starts, by its words and a few more.

    Args:
        folder: Folder of its log.
        model: Folder of the checkpoint.
        words: The line.
    """

    def __init__(self, folder, model, words):
        self.folder, self.log = folder, folder / "log"
        self.address = f"unix:@wtransfer-sglang-{secrets.token_hex(6)}"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        words = words.replace("unix:@sgl-0", self.address).replace("MODEL", str(model))
        # What the model's size, its missing tokenizer and other tests ask for.
        more = f"--port {port} --skip-server-warmup --skip-tokenizer-init --grammar-backend none"
        more += " --mem-fraction-static 0.1 --max-total-tokens 4096 --sleep-on-idle"
        self._begin(
            ["bash", "-c", f"cd {ROOT} && {words} {more}"],
            {
                **words_environment(),
                "HF_HUB_OFFLINE": "1",
                "WTRANSFER_CACHE": str(folder / "cache"),
            },
        )


def words_environment():
    """Return an environment in which a guide's commands are found."""
    found = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": found, "WTRANSFER_TOKEN": TOKEN}


def free_port():
    """Return a free port that is given to no process that asks for any: SGLang binds it late."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(10000, lowest)
        with socket.socket() as found, contextlib.suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port


class Answer:
    """The answer to one request."""

    def __init__(self, prompt, found):
        meta = found["meta_info"]
        self.prompt = list(prompt)
        self.tokens = found["output_ids"]
        self.num_cached = meta["cached_tokens"]
        self.num_retractions = meta["num_retractions"]
        self.versions = [
            (each["version"], each["start"], each["end"]) for each in meta["weight_versions"]
        ]


def cpu_threads():
    """Return SGLang's setting for two ranks: each rank computes on a processor of its own."""
    return {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
