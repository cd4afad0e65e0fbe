"""Endpoints that a publisher registers with: asked at once, waited for, and left."""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading
import time

import pytest
import torch

pytest.importorskip("uvicorn")

from wtransfer import Publisher, WorkerServer, WorkerSession
from wtransfer.errors import (
    AddressError,
    AuthenticationError,
    CommitError,
    HostsError,
    NoWorkersError,
    PeerLostError,
    RemoteError,
    RoundBusyError,
    StallError,
)
from wtransfer.testing.contents import contents
from wtransfer.weight_sync.http.client import HttpClient
from wtransfer.weight_sync.messages import Hello
from wtransfer.weight_sync.trainer import coordinator
from wtransfer.weight_sync.trainer.endpoints import Endpoints
from wtransfer.weight_sync.trainer.fleet_state import FleetState
from wtransfer.weight_sync.trainer.membership import Membership
from wtransfer.weight_sync.trainer.round_handle import Round
from wtransfer.weight_sync.worker.session import ServingHost
from wtransfer.weight_sync.worker.target import StateDictTarget

TOKEN = "the-secret"
PATIENCE_S = 20.0


@pytest.fixture(autouse=True)
def token_around(monkeypatch):
    monkeypatch.setenv("WTRANSFER_TOKEN", TOKEN)


@pytest.fixture
def absent():
    """URL without a listener."""
    return "unix:@wt-test-absent"


def test_two_workers_of_one_name_are_numbered(start_worker, weights, until):
    workers = [start_worker(name="same") for _ in range(2)]
    hosts = [each.address for each in workers]
    with Publisher(weights, hosts=hosts, return_s=0) as publisher:
        report = publisher.publish("v1")
        assert report.ok
        assert {each.worker for each in report.workers} == {"same", "same#2"}
        assert {each.host for each in report.workers} == {each.address for each in workers}
        # The proof of one does not count for the other.
        workers[0].close()
        until(lambda: [*publisher.hosts] == hosts[1:])
        with pytest.raises(HostsError, match=f"{workers[0].address} is absent"):
            publisher.publish("v2")
    assert [contents(each.tensors) for each in workers] == [contents(weights)] * 2


def test_all_workers_have_joined_when_the_publisher_is_made(start_worker, weights):
    workers = [start_worker() for _ in range(3)]
    with Publisher(weights, hosts=[each.address for each in workers]) as publisher:
        assert publisher.hosts == {each.address: each.session.status().worker for each in workers}
        report = publisher.publish("v1")
    assert sorted(each.worker for each in report.workers) == ["w0", "w1", "w2"]
    assert report.ok
    assert [contents(each.tensors) for each in workers] == [contents(weights)] * 3


class Recorder(HttpClient):
    """An HTTP client that notes what it sends."""

    def init_weight_transfer_engine(self, init_info):
        self.sent = init_info["wtransfer"]
        return super().init_weight_transfer_engine(init_info)


@pytest.mark.parametrize("token", [TOKEN, "hosts-own"])
def test_publisher_sends_its_token_only_where_another_is_known(start_worker, weights, token):
    client = Recorder(start_worker(token=token).address, token)
    with Publisher(weights, token=TOKEN, hosts=[client]) as it:
        place = {"address": it.address, "host": client.name}
        assert client.sent == place | ({} if token == TOKEN else {"token": TOKEN})
        assert it.publish("v1").ok


def test_generated_token_is_not_sent_to_endpoints(start_worker, weights, monkeypatch):
    worker = start_worker()
    monkeypatch.delenv("WTRANSFER_TOKEN")
    with pytest.raises(AuthenticationError, match="wants a token, and none was given"):
        Publisher(weights, hosts=[worker.address])


def test_closed_publisher_deregisters(start_worker, weights):
    worker = start_worker()
    with Publisher(weights, hosts=[worker.address]) as publisher:
        assert publisher.publish("v1").ok
        assert worker.session.status().connected
    assert worker.num_left == 1
    assert not worker.session.status().connected
    assert (worker.session.version, contents(worker.tensors)) == ("v1", contents(weights))


def test_every_failed_endpoint_is_named(start_worker, weights, absent):
    good, stranger = start_worker(), start_worker(token="another")
    with pytest.raises(HostsError) as caught:
        Publisher(weights, hosts=[good.address, stranger.address, absent])
    assert {name: type(error) for name, error in caught.value.errors.items()} == {
        stranger.address: AuthenticationError,
        absent: PeerLostError,
    }
    with pytest.raises(PeerLostError, match=f"cannot reach {absent}"):
        Publisher(weights, hosts=[good.address, absent])
    # What has joined is left.
    assert (good.num_joined, good.num_left, good.session.state) == (2, 2, "fresh")


def test_missing_hosts_are_left_out_and_reported_where_the_rules_say_so(
    start_worker, weights, absent, caplog
):
    good, stranger = start_worker(), start_worker(token="another")
    hosts = [good.address, stranger.address, absent]
    with Publisher(weights, hosts=hosts, on_lost_worker="drop") as publisher:
        assert publisher.hosts == {good.address: "w0"}
        assert f"{absent} is absent, and asked again until it joins: cannot reach" in caplog.text
        round_ = publisher.publish("v1", wait=False)
        for report in (round_.result(PATIENCE_S), publisher.publish("dry", dry_run=True)):
            assert not report.ok
            assert report.raise_unless_ok(left_out=True) is report
            _, *left_out = report.workers
            assert {each.worker: type(each.error) for each in left_out} == {
                stranger.address: AuthenticationError,
                absent: PeerLostError,
            }
            assert {each.outcome for each in left_out} == {"dropped"}
        # Nothing in the round was dropped: an engine with a group of all workers may keep it.
        assert round_._coordinator.went_through
    assert contents(good.tensors) == contents(weights)


def test_a_publisher_needs_one_host_whatever_the_rules_say(weights, absent, start_worker):
    stranger = start_worker(token="another")
    with pytest.raises(HostsError, match="2 of 2 hosts failed"):
        Publisher(weights, hosts=[absent, stranger.address], on_lost_worker="drop")


def test_missing_host_is_an_ordinary_worker_once_it_has_joined(start_worker, weights, until):
    good = start_worker()
    address = "unix:@wt-test-comes-later"
    hosts = [good.address, address]
    with Publisher(weights, hosts=hosts, on_lost_worker="drop") as publisher:
        assert [each.worker for each in publisher.publish("v1").workers] == ["w0", address]
        late = start_worker(address=address)
        publisher.invite()
        assert publisher.hosts == {good.address: "w0", address: "w1"}
        until(lambda: late.session.version == "v1")
        report = publisher.publish("v2")
        assert {each.worker: each.outcome for each in report.workers} == {
            "w0": "committed",
            "w1": "committed",
        }
        late.close()
        until(lambda: len(publisher.workers()) == 1)
        publisher.invite()
        assert publisher.hosts == {good.address: "w0"}
        assert [each.worker for each in publisher.publish("v3").workers] == ["w0", address]


def test_stopped_endpoint_is_given_up_in_time(weights):
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind("\0wt-test-silent")
        silent.listen()
        begun = time.monotonic()
        with pytest.raises(StallError, match="unix:@wt-test-silent did not answer"):
            Publisher(weights, hosts=["unix:@wt-test-silent"], deadline_s=0.5)
        assert time.monotonic() - begun < 10


def test_token_in_the_url_of_a_serving_engine_is_warned_of(caplog):
    class Engine(HttpClient):
        def init_weight_transfer_engine(self, init_info):
            """Name no worker."""

        def get_world_size(self):
            return 1

    endpoints = Endpoints("shared", 1.0, Membership(on_join=None))
    endpoints.start("unix:@p", "shared")
    urls = ["http://wtransfer:s3cret@127.0.0.1:9", "http://127.0.0.1:10"]
    endpoints.invite([Engine(url, "shared") for url in urls], may_drop=False)
    endpoints.stop()
    (record,) = caplog.records
    assert "the token in the URL of http://127.0.0.1:9 is of no use" in record.getMessage()
    assert "WTRANSFER_TOKEN of its own environment" in record.getMessage()


def test_endpoint_named_twice_is_refused(weights, absent):
    with pytest.raises(ValueError, match="named twice"):
        Publisher(weights, hosts=[absent, absent])


def test_worker_that_claims_to_have_joined_is_missed(weights):
    class Liar:
        name = "liar"

        def __init__(self, worker):
            self.worker = worker

        def init_weight_transfer_engine(self, init_info):
            return {"worker": self.worker}

    for worker in ("elsewhere", None):
        with pytest.raises(NoWorkersError, match=r"liar did not join within 0\.2 s"):
            Publisher(weights, hosts=[Liar(worker)], deadline_s=0.2)


class Engine:
    """A serving engine: it names no worker, and its workers commit when it is called.

    Args:
        name: What it is registered by.
        weights: What its models have, as zeros.
        num_replicas: How many it has, each an instance of its own.
        says: World size that it tells; None: it cannot.
        late: Replicas that do not join when they are asked.
    """

    def __init__(self, name, weights, num_replicas=1, says=None, late=0):
        self.name = name
        self.replicas = [
            {key: torch.zeros_like(tensor) for key, tensor in weights.items()}
            for _ in range(num_replicas)
        ]
        if says is not None:
            self.get_world_size = lambda: says
        self.late, self.late_s, self.host_ranks = late, None, None
        self.sessions, self.invited, self.calls = [], [], []
        self.error, self.is_down = None, False

    def init_weight_transfer_engine(self, init_info):
        self.invited.append(init_info)
        if self.is_down:
            raise PeerLostError(f"{self.name} is down")
        for number in range(len(self.sessions), len(self.replicas) - self.late):
            self.bring(number)
        late_s, self.late_s = self.late_s, None
        if late_s is not None:
            threading.Timer(late_s, self.bring, [len(self.sessions)]).start()

    def bring(self, number):
        """Let a replica join."""
        session = WorkerSession(
            self.replicas[number],
            name=f"{self.name}-{number}",
            commit="copy",
            serving_host=ServingHost(num_ranks=self.host_ranks),
        )
        where = self.invited[-1]["wtransfer"]
        session.join(where["address"], token=where.get("token"), host=where["host"])
        self.sessions.append(session)

    def start_weight_update(self):
        self.calls.append("start")

    def finish_weight_update(self, weight_version=None):
        self.calls.append(weight_version)
        if self.error is not None:
            raise self.error
        for session in self.sessions:
            session.commit_pending(5)


@pytest.fixture
def serve(weights):
    made = []

    def make(*args, **options):
        made.append(Engine(f"engine-{len(made)}", weights, *args, **options))
        return made[-1]

    yield make
    for each in made:
        for session in each.sessions:
            session.close()


@pytest.fixture
def engines(serve):
    return [serve(), serve()]


def test_serving_engine_applies_when_it_is_called(engines, weights):
    with Publisher(weights, hosts=engines, token="t") as publisher:
        assert publisher.publish("v1", dry_run=True).ok
        assert [each.calls for each in engines] == [[], []]
        place = {"address": publisher.address, "token": "t", "host": "engine-0"}
        assert engines[0].invited == [{"wtransfer": place}]
        assert publisher.hosts == {"engine-0": None, "engine-1": None}
        assert publisher.publish("v1").ok
    for each in engines:
        assert each.calls == ["start", "v1"]
        assert contents(each.replicas[0]) == contents(weights)


class LateEngine(Engine):
    """A serving engine with work left after its workers have committed, as vLLM's caches are."""

    def __init__(self, name, weights):
        super().__init__(name, weights)
        self.may_return = threading.Event()
        self.has_returned = False

    def finish_weight_update(self, weight_version=None):
        super().finish_weight_update(weight_version)
        assert self.may_return.wait(PATIENCE_S)
        self.has_returned = True


@pytest.fixture
def late(weights):
    engine = LateEngine("late", weights)
    yield engine
    engine.may_return.set()
    for session in engine.sessions:
        session.close()


def _has_committed(publisher, version="v1"):
    return all(each.version == version for each in publisher.workers())


@pytest.mark.parametrize("how", ["publish", "catch-up"])
def test_round_ends_when_the_call_in_which_its_workers_commit_has_returned(
    late, weights, until, how
):
    with Publisher(weights, hosts=[late], deadline_s=600) as publisher:
        if how == "catch-up":
            late.may_return.set()
            assert publisher.publish("v1").ok
            late.may_return.clear()
            late.has_returned = False
            late.sessions.pop().close()
            until(lambda: not publisher.workers())
            late.bring(0)
            until(lambda: publisher.workers() and _has_committed(publisher))
            resend = publisher._active
            assert resend.is_resend
            round_ = Round(resend)
        else:
            round_ = publisher.publish("v1", wait=False)
            until(lambda: _has_committed(publisher))
        # The worker holds it, and its engine may still compute with KV cache of the weights before.
        assert not late.may_return.wait(0.3)
        assert not round_.done
        late.may_return.set()
        assert round_.result(PATIENCE_S).ok
        assert late.has_returned


def test_call_that_does_not_return_is_reported_though_its_worker_has_committed(
    late, serve, weights, judged
):
    with Publisher(weights, hosts=[late, serve()]) as publisher:
        with judged(publisher, 0.5):
            report = publisher.publish("v1")
        other, left = sorted(report.workers, key=lambda each: each.worker)
        assert (report.outcome, other.outcome, left.outcome) == ("mixed", "committed", "pending")
        assert (left.version, left.fingerprint) == ("v1", report.fingerprint)
        assert isinstance(left.error, StallError)
        with pytest.raises(
            CommitError, match=r"late \(late-0\) pending: late did not return within 0\.5 s"
        ):
            report.raise_unless_ok()
        # It has nothing left to apply, so it takes the next update.
        late.may_return.set()
        assert publisher.publish("v2").ok


def test_no_publish_returns_of_an_engine_that_does_not_return(late, weights, judged, report_of):
    with Publisher(weights, hosts=[late]) as publisher, judged(publisher, 0.5):
        report = report_of(publisher.publish, "v1")
    assert [each.outcome for each in report.workers] == ["pending"]


@pytest.mark.parametrize("times", [1, 2])
def test_failed_call_of_an_engine_blocks_no_later_round(engines, weights, judged, times):
    with Publisher(weights, hosts=engines) as publisher:
        assert publisher.publish("v1").ok
        engines[1].error = RuntimeError("the engine is asleep")
        with judged(publisher, 0.5):
            report = publisher.publish("v2")
        applied, left = sorted(report.workers, key=lambda each: each.worker)
        assert (report.outcome, applied.outcome, left.outcome) == ("mixed", "committed", "pending")
        assert "the engine is asleep" in str(left.error)
        if times > 1:
            # Asked again, it fails again: it still holds v2, and can take nothing new.
            with pytest.raises(RoundBusyError, match="engine-1-0"):
                publisher.publish("refused")
        engines[1].error = None
        weights["layer.0"] += 1
        report = publisher.publish("v3")
    assert report.ok, str(report)
    for each in engines:
        assert each.sessions[0].version == "v3"
        assert contents(each.replicas[0]) == contents(weights)


@pytest.fixture
def dead_url():
    """Maker of URLs of a server that is gone: nothing listens there, or it resets connections."""
    with contextlib.ExitStack() as stack:

        def make(how):
            server = stack.enter_context(socket.socket())
            server.bind(("127.0.0.1", 0))
            if how == "resets":
                server.listen()
                threading.Thread(target=_reset, args=(server,), daemon=True).start()
            return f"http://127.0.0.1:{server.getsockname()[1]}"

        yield make


def _reset(server):
    connection, _ = server.accept()
    connection.recv(1)
    # Closed with bytes unread and without lingering: the peer gets a reset.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("how", ["refuses", "resets"])
def test_round_ends_at_once_when_the_server_that_lets_its_workers_commit_is_gone(
    engines, weights, dead_url, how
):
    gone = HttpClient(dead_url(how))
    engines[1].finish_weight_update = gone.finish_weight_update
    with Publisher(weights, hosts=engines, deadline_s=600) as publisher:
        report = publisher.publish("v1", wait=False).result(PATIENCE_S)
        applied, left = sorted(report.workers, key=lambda each: each.worker)
        assert (applied.outcome, left.outcome) == ("committed", "pending")
        assert f"cannot reach {gone.name} for POST /finish_weight_update" in str(left.error)
        # It holds the update, verified, and may be let commit it yet.
        assert engines[1].sessions[0].commit_pending(5)


def test_round_of_a_host_that_is_gone_raises_its_error(engines, weights, dead_url, report_of):
    gone = HttpClient(dead_url("refuses"))
    engines[0].start_weight_update = gone.start_weight_update
    with Publisher(weights, hosts=engines[:1], deadline_s=600) as publisher:
        report = report_of(publisher.publish("v1", wait=False).result, PATIENCE_S)
    assert [each.outcome for each in report.workers] == ["pending"]
    with pytest.raises(
        CommitError, match=rf"engine-0 \(engine-0-0\) pending: cannot reach {gone.name}"
    ):
        report.raise_unless_ok()


def test_ack_that_comes_after_the_hosts_error_counts(engines, weights, monkeypatch, until):
    monkeypatch.setattr(coordinator, "ROLLBACK_GRACE_S", PATIENCE_S)
    engine = engines[0]
    engine.error = RemoteError("nothing was committed: it came too late")
    with Publisher(weights, hosts=[engine], deadline_s=600) as publisher:
        round_ = publisher.publish("v1", wait=False)
        until(lambda: round_._coordinator._apply_errors)
        time.sleep(0.1)
        assert engine.sessions[0].commit_pending(5)
        assert round_.result(PATIENCE_S).ok


@pytest.mark.parametrize("waits_for", ["the host", "another host", "a worker without a host"])
def test_round_goes_on_while_a_worker_may_still_be_let_commit(
    engines, weights, monkeypatch, until, waits_for
):
    monkeypatch.setattr(coordinator, "ROLLBACK_GRACE_S", 0.01)
    slow, failing = engines
    failing.error = RemoteError("nothing was committed")
    go_on = threading.Event()
    hosts = [slow, failing]
    if waits_for == "the host":
        hosts, slow.error = [slow], StallError("no answer within 1 s; it applies it still")
    elif waits_for == "another host":
        slow.error = StallError("no answer within 1 s; it applies it still")
    with Publisher(weights, hosts=hosts[-1:] if "without" in waits_for else hosts) as publisher:
        if "without" in waits_for:
            slow.sessions.append(WorkerSession(slow.replicas[0], name="alone"))
            slow.sessions[0].join(publisher.address, token=publisher.token)
            publisher.wait_for_workers(2)
        round_ = publisher.publish("v1", wait=False)
        until(lambda: round_._coordinator._apply_errors)
        assert not go_on.wait(0.3)
        assert not round_.done
        assert slow.sessions[0].commit_pending(5)
        try:
            report = round_.result(PATIENCE_S)
        except CommitError as error:
            report = error.report
        name = slow.sessions[0].status().worker
        held = next(each for each in report.workers if each.worker == name)
        assert (held.version, held.fingerprint) == ("v1", report.fingerprint)
    outcomes = {each.outcome for each in report.workers}
    # Of a host that has not answered it is not known that it computes with the version.
    assert outcomes == ({"committed", "pending"} if "without" in waits_for else {"pending"})


def test_rank_that_rolls_back_is_waited_for_though_its_host_has_failed(
    weights, fleet, monkeypatch, until, report_of
):
    monkeypatch.setattr(coordinator, "ROLLBACK_GRACE_S", 0.01)
    may_restore = threading.Event()

    class Slow(StateDictTarget):
        """Restores slowly what its first call has replaced."""

        num_applied = 0

        def apply(self, tensors):
            self.num_applied += 1
            if self.num_applied == 2:
                assert may_restore.wait(PATIENCE_S)
            super().apply(tensors)

    class Refusing(StateDictTarget):
        def apply(self, tensors):
            raise RuntimeError("the model says no")

        def capture(self):
            return None

    class Ranks(Engine):
        def bring(self, number):
            target = (Slow, Refusing)[number](self.replicas[number], "copy")
            rank = {"instance": "both", "rank": number, "num_ranks": 2}
            self.sessions.append(WorkerSession(target, name=f"rank-{number}", **rank))
            self.sessions[-1].join(**self.invited[-1]["wtransfer"])

        def finish_weight_update(self, weight_version=None):
            threads = [
                threading.Thread(target=_commit, args=(session,)) for session in self.sessions
            ]
            for each in threads:
                each.start()
            until(lambda: round_._coordinator.state.instances[0].rolling_back)
            raise RemoteError("nothing was committed")

    ranks = Ranks("ranks", weights, 2, says=2)
    with Publisher(weights, hosts=[ranks], deadline_s=600) as publisher:
        round_ = publisher.publish("v1", wait=False)
        until(lambda: round_._coordinator._apply_errors)
        time.sleep(0.3)
        assert not round_.done
        may_restore.set()
        report = report_of(round_.result, PATIENCE_S)
    for session in ranks.sessions:
        session.close()
    assert [each.outcome for each in report.workers] == ["reverted", "empty"]


def _commit(session):
    with contextlib.suppress(CommitError):
        session.commit_pending(5)


def test_engine_that_is_gone_when_it_is_invited_again_is_not_waited_for(engines, weights, until):
    stays, goes = engines
    with Publisher(weights, hosts=engines, on_lost_worker="drop", deadline_s=600) as publisher:
        assert publisher.publish("v1").ok
        goes.sessions.pop().close()
        until(lambda: len(publisher.workers()) == 1)

        def refuse(_init_info):
            raise PeerLostError("it is gone")

        goes.init_weight_transfer_engine = refuse
        publisher.invite()
        report = publisher.publish("v2")
    assert [each.worker for each in report.workers] == ["engine-0-0", goes.name]
    assert contents(stays.replicas[0]) == contents(weights)


def test_engine_that_joins_after_its_answer_was_given_up_is_let_commit(engines, weights):
    late = engines[1]
    join = late.init_weight_transfer_engine

    def join_late(init_info):
        join(init_info)
        raise StallError("no answer in time")

    late.init_weight_transfer_engine = join_late
    with Publisher(weights, hosts=engines, on_lost_worker="drop") as publisher:
        publisher.wait_for_workers(2)
        report = publisher.publish("v1")
    assert {each.worker: each.outcome for each in report.workers} == {
        "engine-0-0": "committed",
        "engine-1-0": "committed",
    }


def test_only_the_engine_that_is_behind_is_called(engines, weights, until):
    with Publisher(weights, hosts=engines) as publisher:
        assert publisher.publish("v1").ok
        engines[1].sessions.pop().close()
        until(lambda: len(publisher.workers()) == 1)
        engines[1].bring(0)
        until(lambda: engines[1].sessions[0].version == "v1")
    assert [each.calls for each in engines] == [["start", "v1"], ["start", "v1"] * 2]


def test_restarted_endpoint_is_found_by_invite(start_worker, weights, until):
    stays, restarted = start_worker(), start_worker()
    with Publisher(weights, hosts=[stays.address, restarted.address]) as publisher:
        assert publisher.publish("v1").ok
        restarted.close()
        until(lambda: len(publisher.workers()) == 1)
        again = start_worker(address=restarted.address, name="again")
        publisher.invite()
        until(lambda: again.session.version == "v1")
        assert publisher.publish("v2").ok
        assert len(publisher.workers()) == 2
    assert contents(again.tensors) == contents(stays.tensors) == contents(weights)


def test_endpoint_can_be_added(start_worker, weights, absent):
    first, second = start_worker(), start_worker()
    with Publisher(weights, hosts=[first.address], return_s=0.1) as publisher:
        publisher.invite(second.address)
        assert len(publisher.publish("v1").workers) == 2
        with pytest.raises(PeerLostError):
            publisher.invite(absent)
        # It is on the list, so it counts until it is taken off.
        with pytest.raises(HostsError, match=f"1 of 3 hosts are absent.*\n  {absent} is absent"):
            publisher.publish("v2")
        publisher.remove(absent)
        assert publisher.publish("v2").ok


def test_remote_endpoint_may_dial_an_address_of_this_host():
    class Remote:
        name, is_local = "far", False

        def init_weight_transfer_engine(self, init_info):
            return {}

    endpoints = Endpoints(None, 1.0, Membership(on_join=None))
    endpoints.start("tcp:192.0.2.7:4000", "t")
    endpoints.invite([Remote()], may_drop=False)
    endpoints.stop()
    assert endpoints.state.hosts["far"].has_joined


@pytest.mark.parametrize("listen", [None, "tcp:127.0.0.1:0", "tcp:0.0.0.0:0"])
def test_remote_endpoint_needs_an_address_that_it_can_dial(weights, listen):
    with pytest.raises(AddressError, match=r"--listen tcp:HOST:PORT.*--engine file"):
        Publisher(weights, listen=listen, hosts=["http://192.0.2.1:8000"])


# -- several replicas behind one address: all of them take part in a round, or it does not begin


def test_every_replica_behind_an_address_is_waited_for_and_updated(serve, weights):
    server = serve(2, 2, late=1)
    server.late_s = 0.3
    with Publisher(weights, hosts=[server], deadline_s=10) as publisher:
        report = publisher.publish("v1")
    assert {each.worker: each.outcome for each in report.workers} == {
        "engine-0-0": "committed",
        "engine-0-1": "committed",
    }
    assert [contents(each) for each in server.replicas] == [contents(weights)] * 2


@pytest.fixture
def ranks(weights):
    """Sessions of two ranks of one instance, each with a thread that owns its model."""
    sessions = [
        WorkerSession(
            {name: torch.zeros_like(tensor) for name, tensor in weights.items()},
            name=f"rank-{rank}",
            instance="i",
            rank=rank,
            num_ranks=2,
            serving_host=ServingHost(num_ranks=2),
        )
        for rank in range(2)
    ]
    stopping = threading.Event()

    def step(session):
        while not stopping.is_set():
            session.commit_pending(0.01)

    threads = [threading.Thread(target=step, args=(session,)) for session in sessions]
    for thread in threads:
        thread.start()
    yield sessions
    stopping.set()
    for thread, session in zip(threads, sessions, strict=True):
        thread.join()
        session.close()


def test_every_rank_behind_a_worker_that_answers_for_all_is_waited_for(
    ranks, weights, until, monkeypatch
):
    made, judged = [], []

    def noted(state, joined, whole, now):
        judge(state, joined, whole, now)
        judged.append((joined, state.absent()))

    judge = FleetState.look
    monkeypatch.setattr(FleetState, "look", noted)
    with WorkerServer(ranks[0], listen=f"unix:@wt-test-{secrets.token_hex(8)}") as server:
        inviting = threading.Thread(
            target=lambda: made.append(Publisher(weights, hosts=[server.url], deadline_s=10))
        )
        inviting.start()
        until(lambda: judged and judged[-1][0])
        assert judged[-1][1], "the first rank has been counted, and the instance is not complete"
        ranks[1].join(ranks[0].status().publisher, host=server.url)
        inviting.join(PATIENCE_S)
        with made[0] as publisher:
            report = publisher.publish("v1")
    assert {each.worker: each.outcome for each in report.workers} == {
        "rank-0": "committed",
        "rank-1": "committed",
    }


def hello(instance, rank, host_ranks, num_ranks=2):
    return Hello(
        worker=f"{instance}-{rank}",
        instance=instance,
        rank=rank,
        num_ranks=num_ranks,
        version=None,
        fingerprint="",
        state="fresh",
        host="h",
        host_ranks=host_ranks,
    )


def missing(joined, whole):
    state = FleetState(set())
    state.add(["h"], 0.0)
    state.look(joined, whole, 1.0)
    return [f"{host.name}{host.ranks}" for host in state.absent()]


@pytest.mark.parametrize("order", [1, -1])
def test_endpoint_has_the_most_ranks_that_a_worker_behind_it_has_told_of(order):
    joined = [hello("i", 0, 4), hello("i", 1, 2)][::order]
    assert missing(joined, joined) == ["h (2 of 4 ranks)"]


def test_ranks_of_an_instance_that_is_not_complete_are_not_counted():
    joined = [hello("i", 0, 2), hello("j", 0, 2, num_ranks=3)]
    assert missing(joined, joined[:1]) == ["h (1 of 2 ranks)"]
    assert missing(joined, joined) == []


def test_every_engine_is_waited_for_behind_a_client_that_does_not_tell_how_many_there_are():
    state = FleetState(set())
    state.add(["h"], 0.0)
    host = state.hosts["h"]

    def absent(*names):
        joined = [hello(name, 0, None, num_ranks=1) for name in names]
        state.look(joined, joined, 1.0)
        return [each.name + each.ranks for each in state.absent()]

    state.said_yes(host, 1.0)
    assert absent("one", "two") == []
    assert absent("one") == ["h (1 of 2 ranks)"]
    state.said_yes(host, 1.0)
    assert absent("one") == ["h (1 of 2 ranks)"], "it was asked just now, and is on its way"
    # The connection of the old one ends late.
    assert absent("one", "two", "two again") == []
    assert absent("one", "two again") == ["h (2 of 3 ranks)"]
    for _ in range(2):
        state.said_yes(host, 1.0)
    assert absent("one", "two again") == []


@pytest.mark.usefixtures("patient_connections")
def test_a_replica_that_does_not_come_is_missed_by_address_and_number(serve, weights):
    server = serve(2, 2, late=1)
    with pytest.raises(NoWorkersError) as caught:
        Publisher(weights, hosts=[server], deadline_s=0.3)
    assert f"{server.name} (1 of 2 ranks) did not join within 0.3 s" in caught.value.message


def test_no_round_begins_without_a_replica_that_was_lost(serve, weights, until):
    server = serve(2, 2)
    with Publisher(weights, hosts=[server], return_s=0.1) as publisher:
        assert publisher.publish("v1").ok
        server.is_down = True
        server.sessions.pop().close()
        until(lambda: len(publisher.workers()) == 1)
        before = [contents(each) for each in server.replicas]
        weights["layer.0"] += 1
        lost = r"engine-0 is absent for [0-9.]+ s \(1 of 2 ranks\): engine-0 is down"
        with pytest.raises(HostsError, match=lost):
            publisher.publish("v2")
        # Both go on with the same, and the one that comes back is part of the next round.
        assert [contents(each) for each in server.replicas] == before
        server.is_down = False
        until(lambda: [each.version for each in publisher.workers()] == ["v1", "v1"])
        assert publisher.publish("v3").ok
    assert [contents(each) for each in server.replicas] == [contents(weights)] * 2


def test_rounds_go_on_without_a_lost_replica_where_the_rules_say_so(serve, weights, until):
    server = serve(2, 2)
    with Publisher(weights, hosts=[server], on_lost_worker="drop") as publisher:
        assert publisher.publish("v1").ok
        server.is_down = True
        server.sessions.pop().close()
        until(lambda: len(publisher.workers()) == 1)
        report = publisher.publish("v2")
    assert {each.worker: each.outcome for each in report.workers} == {
        "engine-0-0": "committed",
        "engine-0": "dropped",
    }
    assert not report.ok


def test_a_server_that_is_gone_as_a_whole_ends_the_round_until_it_is_removed(serve, weights, until):
    stays, goes = serve(2, 2), serve(2, 2)
    with Publisher(weights, hosts=[stays, goes], return_s=0.1) as publisher:
        assert len(publisher.publish("v1").workers) == 4
        goes.is_down = True
        while goes.sessions:
            goes.sessions.pop().close()
        until(lambda: len(publisher.workers()) == 2)
        with pytest.raises(HostsError, match=r"engine-1 is absent for .* \(0 of 2 ranks\)"):
            publisher.publish("v2")
        assert {each.version for each in publisher.workers()} == {"v1"}
        publisher.remove(goes)
        report = publisher.publish("v2")
        assert (report.ok, len(report.workers)) == (True, 2)


@pytest.mark.parametrize("says", [None, 2])
def test_a_server_of_a_group_of_servers_is_not_asked_for_the_ranks_of_the_others(
    serve, weights, says
):
    # Each says the size of the whole group; its workers know that it leads to one of them only.
    servers = [serve(1, says) for _ in range(2)]
    for each in servers:
        each.host_ranks = 1
    with Publisher(weights, hosts=servers, deadline_s=5) as publisher:
        assert len(publisher.publish("v1").workers) == 2
