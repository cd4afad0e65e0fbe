"""A live vLLM is killed and restarted at its URL, under load, beside a plain worker.

No report is ok while the server holds other weights, and it is brought up to date by itself.
"""

import collections
import contextlib
import itertools
import random
import secrets
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import tiny_models
import wtransfer
from engines import PROMPTS, Engine, ask_each, until
from safetensors.torch import load_file
from server import Server, plain_worker
from wtransfer.errors import HostsError, WTransferError
from wtransfer.weight_sync.http.client import HttpClient
from wtransfer.weight_sync.trainer.fleet_state import DROP_PATIENCE_S

pytestmark = [pytest.mark.live, pytest.mark.nightly, pytest.mark.timeout(900)]

TOKEN = secrets.token_hex(32)
RETURN_S = 2.0
"""Wait of a round for the server while it is down, under ``"abort"``."""
CURRENT_S = 60.0
"""Time in which a server that is up again must be up to date: 5 s and a catch-up, of a busy
machine."""
NUM_ROUNDS = 10
"""Rounds of which a median is taken."""


class Fleet:
    """A server and a plain worker with model A, and a publisher that names both.

    Args:
        folder: Where logs go.
        models: Folder of the models A and B.
        weights: Model's name -> its weights.
        tokens: Model's name -> the tokens of a fresh vLLM, prompt by prompt.
        options: Further arguments of the publisher.
    """

    def __init__(self, folder, models, weights, tokens, **options):
        self.weights, self.tokens = weights, tokens
        self.held = dict(weights["A"])
        self._numbers = itertools.count(1)
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            self.server = stack.enter_context(
                contextlib.closing(
                    Server(folder, models / "A", "shm", env={"WTRANSFER_TOKEN": TOKEN})
                )
            )
            self.worker = stack.enter_context(plain_worker(folder, models / "A", TOKEN))
            self.publisher = stack.enter_context(
                wtransfer.Publisher(
                    self.held,
                    hosts=[self.server.url, self.worker],
                    token=TOKEN,
                    deadline_s=20,
                    **options,
                )
            )
            self.load = stack.enter_context(contextlib.closing(Load(self)))
            self._stack = stack.pop_all()

    def close(self):
        self._stack.close()

    def tokens_of(self, label):
        """Return the tokens of the model that a label names."""
        return self.tokens["A" if label == "default" else label.partition("-")[0]]

    def publish(self):
        """Publish the model whose turn it is under a label of its own; return label and report.

        Raises:
            WTransferError: As the publisher does.
        """
        number = next(self._numbers)
        name = "BA"[number % 2]
        self.held.update(self.weights[name])
        label = f"{name}-{number}"
        return label, self.publisher.publish(label)

    def holds(self, label, report):
        """Return whether the server holds a version, of which the worker's proof is checked.

        None: the server is gone.
        """
        told = HttpClient(self.worker, TOKEN).weight_info()
        assert (told["weight_version"], told["fingerprint"]) == (label, report.fingerprint)
        try:
            return (self.server.label(), self.server.tokens(PROMPTS)) == (
                label,
                self.tokens_of(label),
            )
        except (httpx.HTTPError, WTransferError):
            return None

    def kill(self):
        """Kill the server, and return when its publisher knows."""
        self.server.kill()
        until(lambda: self.server.url not in self.publisher.hosts)

    def await_current(self, label):
        """Wait until the server, which is up again, holds a version without any publish.

        Returns:
            Seconds till it has joined, and from there on.
        """
        begun = time.monotonic()
        until(lambda: self.server.url in self.publisher.hosts, CURRENT_S)
        joined = time.monotonic()
        until(lambda: self.server.label() == label, CURRENT_S)
        ended = time.monotonic()
        # Else a round might come while the server still answers the call of its catch-up.
        until(lambda: (self.server.url, label) in held_by_hosts(self.publisher), CURRENT_S)
        assert self.server.tokens(PROMPTS) == self.tokens_of(label)
        return joined - begun, ended - joined


def held_by_hosts(publisher):
    """Return host and version of each worker of a publisher."""
    return [(each.host, each.version) for each in publisher.workers()]


class Load:
    """Requests to a server, one after the other; the label around each says what it must answer.

    Args:
        fleet: The server's.
    """

    def __init__(self, fleet):
        self.num_judged, self.wrong = 0, []
        self._fleet = fleet
        self._over = threading.Event()
        self._failure = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self):
        """End them.

        Raises:
            Exception: What a request ended with while the server was up.
        """
        self._over.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def await_more(self):
        """Wait until a further request has been judged."""
        before = self.num_judged
        until(lambda: self.num_judged > before)

    def _run(self):
        try:
            for number in itertools.count():
                if self._over.is_set():
                    return
                try:
                    self._ask(number % len(PROMPTS))
                except (httpx.HTTPError, WTransferError):
                    self._over.wait(0.05)  # it is down
        except Exception as error:  # a thread's own would be lost
            self._failure = error

    def _ask(self, number):
        before = self._fleet.server.label()
        (tokens,) = self._fleet.server.tokens([PROMPTS[number]])
        if self._fleet.server.label() == before:
            if tokens != self._fleet.tokens_of(before)[number]:
                self.wrong.append((before, number, tokens))
            self.num_judged += 1


def test_restarted_server_is_missed_in_each_round_until_it_is_brought_up_to_date(
    models, weights, fresh, tmp_path, record_property
):
    fleet = Fleet(tmp_path, models, weights, fresh, return_s=RETURN_S)
    with contextlib.closing(fleet):
        label, report = fleet.publish()
        assert fleet.holds(label, report.raise_unless_ok())
        fleet.load.await_more()
        fleet.kill()
        with pytest.raises(HostsError, match=f"{fleet.server.url} is absent for "):
            fleet.publish()
        # No byte has moved.
        assert fleet.holds(label, report) is None
        fleet.server.start_again()
        record_property("current_s", fleet.await_current(label))
        fleet.load.await_more()
        label, report = fleet.publish()
        assert fleet.holds(label, report.raise_unless_ok())
        assert fleet.load.wrong == []


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """Folder with models of experts, A and B; their weights and a fresh vLLM's tokens, by name."""
    folder = tmp_path_factory.mktemp("experts")
    for seed, name in enumerate("AB", start=1):
        made = tiny_models.make_twin(folder / f"make-{name}", tiny_models.EXPERTS, seed)
        made.rename(folder / name)
    weights = {name: load_file(folder / name / "model.safetensors") for name in "AB"}
    engines = {name: Engine(folder, model=str(folder / name)) for name in "AB"}
    tokens = ask_each(engines, lambda engine: engine.tokens(PROMPTS))
    assert tokens["A"] != tokens["B"]
    return folder, weights, tokens


@pytest.mark.parametrize("policy", ["abort", "drop"])
def test_no_report_is_ok_while_a_server_that_is_killed_at_any_time_holds_other_weights(
    experts, policy, tmp_path
):
    return_s = RETURN_S if policy == "abort" else None
    fleet = Fleet(tmp_path, *experts, on_lost_worker=policy, return_s=return_s)
    counts, times, seed = collections.Counter(), [], random.Random(policy)

    def publish():
        """Publish, and ask the server whether it holds what the report says."""
        try:
            label, report = fleet.publish()
        except WTransferError as error:
            if policy == "drop" or fleet.server.url not in str(error):
                raise
            counts[type(error).__name__] += 1
            return
        if report.ok:
            assert fleet.holds(label, report) in (True, None)
            counts["ok"] += 1
            return
        (missed,) = (each for each in report.workers if each not in report.holders)
        assert fleet.server.url in (missed.host, missed.worker)
        if missed.outcome == "dropped":
            report.raise_unless_ok(left_out=True)
        counts[missed.outcome] += 1

    def kill(number):
        time.sleep(seed.random())
        fleet.server.kill()
        if number % 2:
            fleet.server.start_again()

    with contextlib.closing(fleet), ThreadPoolExecutor(1) as pool:
        for number in range(6):
            publish()
            fleet.load.await_more()
            killed = pool.submit(kill, number)
            while not killed.done():
                publish()
            killed.result()
            if number % 2 == 0:
                # No round is there to bring it up to date.
                fleet.server.start_again()
            times.append(fleet.await_current(fleet.publisher.version))
            label, report = fleet.publish()
            assert fleet.holds(label, report.raise_unless_ok())
            fleet.load.await_more()
        assert fleet.load.wrong == []
        print(f"{dict(counts)}, {fleet.load.num_judged} answers judged")  # noqa: T201
        print(f"seconds to join, and to catch up: {times}")  # noqa: T201


def test_server_that_stays_down_costs_rounds_that_may_drop_it_nothing(
    models, weights, fresh, tmp_path
):
    def seconds(publish):
        begun = time.perf_counter()
        publish()
        return time.perf_counter() - begun

    fleet = Fleet(tmp_path, models, weights, fresh, on_lost_worker="drop")
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(fleet))
        fleet.load.close()
        fleet.publish()
        folder = tmp_path / "alone"
        folder.mkdir()
        worker = stack.enter_context(plain_worker(folder, models / "A", TOKEN))
        alone = stack.enter_context(wtransfer.Publisher(fleet.held, hosts=[worker], token=TOKEN))
        alone.publish("first")
        fleet.kill()
        # This one waits.
        fleet.publish()
        down, never = [], []
        for number in range(NUM_ROUNDS):
            down.append(seconds(fleet.publish))
            never.append(seconds(lambda number=number: alone.publish(f"{number}")))
    first, second = statistics.median(down), statistics.median(never)
    print(f"{first:.4f} s while it is down, {second:.4f} s of a fleet that never had it")  # noqa: T201
    assert first < DROP_PATIENCE_S
