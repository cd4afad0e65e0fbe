"""Hosts that were named: none is left out in silence, whatever its server does."""

from __future__ import annotations

import contextlib
import functools
import http.server
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("uvicorn")

from wtransfer import Publisher, WorkerSession
from wtransfer.errors import (
    AddressError,
    AuthenticationError,
    CommitError,
    HostsError,
    PeerLostError,
    ProtocolError,
    RemoteError,
    RoundBusyError,
    SchemaError,
    StallError,
)
from wtransfer.metrics import RoundCollector
from wtransfer.testing.contents import contents
from wtransfer.testing.fleet import committing
from wtransfer.weight_sync.messages import Plan
from wtransfer.weight_sync.trainer import coordinator
from wtransfer.weight_sync.trainer.fleet_state import FleetState
from wtransfer.weight_sync.worker.target import StateDictTarget

PATIENCE_S = 20.0


class Host:
    """A server that a supervisor restarts: its worker joins when the server is asked.

    Args:
        name: What it is named by.
        weights: What its model has, as zeros, each time its worker starts.
    """

    def __init__(self, name, weights):
        self.name, self.weights = name, weights
        self.asked, self.num_left = [], 0
        self.error = None
        """What it raises when it is asked."""
        self.joins = True
        """False: it says that it has joined, and has not."""
        self.steps = True
        """False: its worker commits when a test calls it."""
        self.session, self.model = None, None
        self._life = contextlib.ExitStack()

    def init_weight_transfer_engine(self, init_info):
        self.asked.append(init_info["wtransfer"])
        if self.error is not None:
            raise self.error
        if self.session is None and self.joins:
            self.start(init_info["wtransfer"])
        return {"worker": f"worker of {self.name}", "instance": "another"}

    def start(self, where):
        self.model = {key: torch.zeros_like(each) for key, each in self.weights.items()}
        target = StateDictTarget(self.model, "copy")
        self.session = session = WorkerSession(target, name=f"worker of {self.name}")
        self._life.callback(session.close)
        if self.steps:
            self._life.enter_context(committing(session))
        session.join(where["address"], token=where.get("token"), host=where["host"])

    def leave(self, _address, *, timeout_s):
        assert timeout_s
        self.num_left += 1
        self.stop()

    def stop(self, error=None):
        """End its worker, as a kill does; from now on this is raised when it is asked."""
        self.error, self.session = error, None
        life, self._life = self._life, contextlib.ExitStack()
        life.close()


@pytest.fixture
def host(weights):
    """Maker of hosts by name."""
    made = []

    def make(name, **options):
        made.append(Host(name, options.get("weights", weights)))
        return made[-1]

    yield make
    for each in made:
        each.stop()


@pytest.fixture
def background():
    """Makes calls in the background."""
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


@pytest.fixture
def dropping(weights):
    """Makes publishers that wait for no host that is absent."""
    return functools.partial(Publisher, weights, on_lost_worker="drop", return_s=0)


@pytest.fixture
def absent(until):
    """Wait until a publisher misses just these hosts."""

    def wait(publisher, *names):
        until(lambda: set(publisher.status().absent) == set(names))

    return wait


@pytest.fixture
def waits(monkeypatch):
    """Seconds for which rounds wait for absent hosts, as they ask the state."""
    found, ask = set(), FleetState.longest_wait_s

    def noted(state, *args, **named):
        seconds = ask(state, *args, **named)
        found.add(seconds)
        return seconds

    monkeypatch.setattr(FleetState, "longest_wait_s", noted)
    return found


def outcomes(report):
    return {each.host or each.worker: each.outcome for each in report.workers}


# -- restarts


def test_host_that_restarts_between_two_rounds_is_caught_up_without_another_one(
    host, weights, until
):
    stays, restarted = host("a"), host("b")
    with Publisher(weights, hosts=[stays, restarted]) as publisher:
        assert publisher.publish("v1").ok
        restarted.stop()
        until(lambda: restarted.session is not None and restarted.session.version == "v1")
        assert contents(restarted.model) == contents(weights)
        assert ["again" in each for each in restarted.asked] == [False, True]
        assert len(stays.asked) == 1
        assert publisher.publish("v2").ok


def test_worker_behind_http_that_restarts_is_found_and_caught_up(start_worker, weights, until):
    stays, restarted = start_worker(), start_worker()
    with Publisher(weights, hosts=[stays.address, restarted.address]) as publisher:
        assert publisher.publish("v1").ok
        restarted.close()
        again = start_worker(address=restarted.address, name="again")
        until(lambda: again.session.version == "v1")
        assert publisher.publish("v2").ok
        assert publisher.hosts == {stays.address: "w0", restarted.address: "again"}


def test_round_waits_for_a_host_that_restarts_and_brings_it_along(
    host, weights, until, background, absent
):
    stays, restarted = host("a"), host("b")
    with Publisher(weights, hosts=[stays, restarted]) as publisher:
        assert publisher.publish("v1").ok
        restarted.stop(PeerLostError("it restarts"))
        absent(publisher, "b")
        publishing = background(publisher.publish, "v2")
        num_asked = len(restarted.asked)
        until(lambda: len(restarted.asked) > num_asked)
        assert not publishing.done()
        restarted.error = None
        report = publishing.result(PATIENCE_S)
        assert report.ok
        assert outcomes(report) == {"a": "committed", "b": "committed"}
        assert stays.session.version == restarted.session.version == "v2"


def test_host_that_is_lost_between_its_ack_and_the_report_is_not_ok(host, weights, until):
    made = []

    class Serving(Host):
        """A serving engine, whose worker commits when the server is called."""

        def init_weight_transfer_engine(self, init_info):
            super().init_weight_transfer_engine(init_info)

        def start_weight_update(self):
            pass

        def finish_weight_update(self, _version):
            assert self.session.commit_pending(5)
            self.stop(PeerLostError("it restarts"))
            until(lambda: len(made[0].workers()) == 1)

    stays, lost = host("a"), Serving("b", weights)
    lost.steps = False
    with Publisher(weights, hosts=[stays, lost]) as publisher:
        made.append(publisher)
        report = publisher.publish("v1")
        # It may be back by now, on the weights that it starts with.
        (row,) = [each for each in report.workers if each.host == "b"]
        assert (row.outcome, row.digests_equal, report.ok) == ("committed", True, False)
        assert isinstance(row.error, PeerLostError)
        with pytest.raises(CommitError, match=r"b \(worker of b\) committed: b: "):
            report.raise_unless_ok()
        assert "b (worker of b)  committed" in str(report)
        assert "it committed, and was lost afterwards" in str(report)


# -- how long a round waits


def test_absent_host_ends_each_round_after_return_s(host, weights, waits, absent):
    stays, gone = host("a"), host("b")
    with Publisher(weights, hosts=[stays, gone], return_s=0.05) as publisher:
        assert publisher.publish("v1").ok
        gone.stop(PeerLostError("it is gone"))
        absent(publisher, "b")
        for version in ("v2", "v3"):
            with pytest.raises(HostsError, match="1 of 2 hosts are absent, and no byte was sent"):
                publisher.publish(version)
        assert waits == {0.05}
        assert stays.session.version == "v1"


def test_absent_hosts_are_counted_for_who_scrapes(host, weights, absent):
    stays, gone = host("a"), host("b")
    with Publisher(weights, hosts=[stays, gone]) as publisher:

        def counted():
            families = {each.name: each.samples for each in RoundCollector(publisher).collect()}
            (sample,) = families["wtransfer_hosts_absent"]
            return sample.value

        assert counted() == 0
        gone.stop(PeerLostError("it is gone"))
        absent(publisher, "b")
        assert counted() == 1
        publisher.remove(gone)
        assert counted() == 0


def test_absent_host_costs_one_round_a_wait_where_it_may_be_dropped(host, weights, waits, absent):
    stays, gone = host("a"), host("b")
    options = {"on_lost_worker": "drop", "return_s": 0.05}
    with Publisher(weights, hosts=[stays, gone], **options) as publisher:
        assert publisher.publish("v1").ok
        for _ in range(2):
            gone.stop(PeerLostError("it is gone"))
            absent(publisher, "b")
            for allowed in (0.05, 0.0, 0.0):
                waits.clear()
                report = publisher.publish("v2")
                assert outcomes(report) == {"a": "committed", "b": "dropped"}
                assert not report.ok
                assert report.raise_unless_ok(left_out=True) is report
                assert waits >= {allowed}
                assert allowed or waits == {0.0}
            gone.error = None
            publisher.invite()
            assert publisher.publish("v3").ok


# -- what is said


def test_each_absent_host_is_named_with_its_cause_and_no_byte_moves(
    host, start_worker, weights, sent, absent
):
    stays, stranger, gone, claims = host("a"), start_worker(), start_worker(), host("claims")
    names = [stranger.address, gone.address, "claims"]
    hosts = [stays, *names[:2], claims]
    with Publisher(weights, hosts=hosts, return_s=0, token="the-secret") as publisher:
        assert publisher.publish("v1").ok
        for each in (stranger, gone):
            each.close()
        claims.joins = False
        claims.stop()
        start_worker(address=stranger.address, token="another")
        absent(publisher, *names)
        with pytest.raises(HostsError):
            publisher.invite()
        num_plans = len([each for _, each, _ in sent if isinstance(each, Plan)])
        with pytest.raises(HostsError) as caught:
            publisher.publish("v2")
        assert len([each for _, each, _ in sent if isinstance(each, Plan)]) == num_plans
        error = caught.value
        assert {name: type(each) for name, each in error.errors.items()} == {
            stranger.address: AuthenticationError,
            gone.address: PeerLostError,
            "claims": PeerLostError,
        }
        _, *lines = error.message.splitlines()
        assert len(lines) == len(names)
        reasons = ("refuses the token", "cannot reach", "worker of claims")
        for name, line, reason in zip(names, lines, reasons, strict=True):
            assert line.startswith(f"  {name} is absent for ")
            assert reason in line
        assert stays.session.version == "v1"
        assert publisher.status().absent.keys() == set(names)


@pytest.mark.parametrize(
    ("answer", "cls", "said"),
    [
        ((200, b"<html>welcome</html>"), ProtocolError, "is a worker of wtransfer there?"),
        ((404, b"not here"), RemoteError, "is a worker of wtransfer there"),
        ((200, b"{}"), PeerLostError, "it was asked to join, and its workers have not come"),
    ],
)
def test_url_that_answers_http_and_is_no_worker_is_absent_with_that_cause(
    host, dropping, answer, cls, said
):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"] or 0))
            self.send_response(answer[0])
            self.send_header("content-length", str(len(answer[1])))
            self.end_headers()
            self.wfile.write(answer[1])

        do_GET = do_POST  # noqa: N815 (the base class calls it)

        def log_message(self, *_):
            pass

    good = host("a")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            with dropping(hosts=[good, url], deadline_s=0.5) as publisher:
                report = publisher.publish("v1")
                assert outcomes(report) == {"a": "committed", url: "dropped"}
                assert type(report.workers[1].error) is cls
                assert said in str(report.workers[1].error)
        finally:
            server.shutdown()


def test_name_that_dns_does_not_know_keeps_no_other_host_out(host, dropping):
    good, unknown = host("a"), "http://wtransfer.invalid:8000"
    with dropping(hosts=[unknown, good]) as publisher:
        assert publisher.hosts == {"a": "worker of a"}
        report = publisher.publish("v1")
        assert outcomes(report) == {"a": "committed", unknown: "dropped"}
        assert isinstance(report.workers[1].error, (AddressError, PeerLostError))
        assert "wtransfer.invalid" in str(report.workers[1].error)


def test_rows_and_errors_name_hosts_as_the_user_wrote_them(start_worker, host, weights, absent):
    by_tcp = start_worker(address="tcp:127.0.0.1:0")
    port = by_tcp.server.address.rpartition(":")[2]
    by_path, client = start_worker(), host("the client's own name")
    urls = [f"tcp:localhost:{port}", by_path.address]
    with Publisher(weights, hosts=[*urls, client], return_s=0, deadline_s=5) as publisher:
        report = publisher.publish("v1")
        rows = str(report).splitlines()[2:]
        assert {each.host for each in report.workers} == {*urls, client.name}
        assert sorted(row.partition(" (")[0] for row in rows) == sorted(
            f"  {name}" for name in (*urls, client.name)
        )
        by_tcp.close()
        client.stop(PeerLostError("it is gone"))
        absent(publisher, urls[0], client.name)
        with pytest.raises(HostsError) as caught:
            publisher.publish("v2")
        assert list(caught.value.errors) == [urls[0], client.name]
        assert f"\n  {urls[0]} is absent for " in caught.value.message


# -- answers that come late


def test_worker_whose_answer_came_too_late_takes_part_and_commits_by_itself(
    start_worker, host, monkeypatch, until, judged, *, dropping
):
    monkeypatch.setattr(coordinator, "ROLLBACK_GRACE_S", 0.01)
    late, may_answer = start_worker(name="late", steps=False), threading.Event()
    join = late.session.join

    def join_and_wait(*args, **named):
        join(*args, **named)
        assert may_answer.wait(PATIENCE_S)

    late.session.join = join_and_wait
    hosts = [host("a"), late.address]
    try:
        with (
            dropping(hosts=hosts, deadline_s=0.5) as publisher,
            judged(publisher, 600.0),
        ):
            publisher.wait_for_workers(2)
            assert not publisher.status().absent
            round_ = publisher.publish("v1", wait=False)
            # It is no serving engine, and says so when it is called like one.
            until(lambda: late.session.status().pending and not round_._coordinator._unanswered)
            assert not round_.done
            with committing(late.session):
                report = round_.result(PATIENCE_S)
            assert report.ok, str(report)
            may_answer.set()
            # It is asked until it has said what it is.
            until(lambda: publisher.hosts[late.address] == "late")
    finally:
        may_answer.set()


# -- one server, several names; one name, several publishers


def test_second_name_of_one_server_is_refused_and_takes_it_from_nobody(
    start_worker, weights, dropping
):
    worker = start_worker(address="tcp:127.0.0.1:0")
    port = worker.server.address.rpartition(":")[2]
    urls = {f"http://127.0.0.1:{port}", f"http://localhost:{port}"}
    said = "w0 has joined this publisher as .*; name it once"
    with pytest.raises(RoundBusyError, match=said):
        Publisher(weights, hosts=urls)
    with dropping(hosts=urls) as publisher:
        num_joined = worker.num_joined
        (there,) = publisher.hosts
        for number in range(3):
            report = publisher.publish(f"v{number}")
            assert outcomes(report) == {there: "committed", (urls - {there}).pop(): "dropped"}
            with pytest.raises(CommitError, match=said):
                report.raise_unless_ok()
            publisher.invite()
        assert worker.num_joined == num_joined
    assert worker.session.version == "v2"


def test_host_of_another_publisher_is_absent_until_that_one_ends(
    start_worker, host, weights, until, *, dropping
):
    shared, own = start_worker(), host("own")
    with Publisher(weights, hosts=[shared.address]) as first:
        with pytest.raises(RoundBusyError, match=f"its publisher is {first.address}"):
            Publisher(weights, hosts=[shared.address])
        with dropping(hosts=[own, shared.address]) as second:
            report = second.publish("v1")
            assert outcomes(report) == {"own": "committed", shared.address: "dropped"}
            assert isinstance(report.workers[1].error, RoundBusyError)
            assert first.publish("of the first").ok
            weights["layer.0"] += 1
            assert not second.publish("v1").ok
            first.close()
            until(lambda: shared.session.version == "v1")
            assert second.publish("v2").ok


def test_worker_that_joined_by_itself_counts_for_the_host_that_it_was_named_by(
    start_worker, host, weights, absent
):
    address = f"unix:@wt-test-{secrets.token_hex(8)}"
    other_shape = StateDictTarget({"layer.0": torch.zeros(2)}, "copy")
    misfit, good = start_worker(name="misfit", target=other_shape), host("a")
    misfit.session.join(address)
    hosts = [good, misfit.address]
    with Publisher(weights, hosts=hosts, listen=address, token="the-secret", return_s=0) as made:
        assert made.hosts == {"a": "worker of a", misfit.address: "misfit"}
        # It counts, though it has never held a version.
        with pytest.raises(SchemaError):
            made.publish("v1")
        misfit.close()
        absent(made, misfit.address)
        with pytest.raises(HostsError, match=rf"{misfit.address} is absent .*misfit"):
            made.publish("v1")
        made.remove(misfit.address)
        assert made.publish("v1").ok


def test_worker_that_joined_by_itself_takes_part_when_its_host_is_no_longer_named(
    start_worker, host, weights
):
    address = f"unix:@wt-test-{secrets.token_hex(8)}"
    worker, good = start_worker(), host("a")
    worker.session.join(address)
    hosts = [good, worker.address]
    with Publisher(weights, hosts=hosts, listen=address, token="the-secret") as publisher:
        assert outcomes(publisher.publish("v1")) == {"a": "committed", worker.address: "committed"}
        publisher.remove(worker.address)
        assert outcomes(publisher.publish("v2")) == {"a": "committed", "w0": "committed"}


def test_worker_of_a_host_that_this_publisher_has_not_named_is_one_that_joined_by_itself(
    fleet, weights, until
):
    made = fleet(weights)
    made.join(name="plain")
    invited = made.join(name="invited")
    assert made.publish("v1").ok
    invited.session.leave(made.publisher.address)
    # As one does that a publisher at the same address had invited before it died.
    where = {"token": made.publisher.token, "host": "http://of-before"}
    invited.session.join(made.publisher.address, **where)
    until(lambda: len(made.publisher.workers()) == 2)
    assert made.publish("v2").ok
    made.leave(invited)
    until(lambda: len(made.publisher.workers()) == 1)
    report = made.publish("v3")
    assert report.ok
    assert {each.worker: each.outcome for each in report.workers} == {
        "plain": "committed",
        "invited": "gone",
    }


# -- the list


def test_list_as_a_host_is_refused_and_harms_no_later_invitation(host, weights):
    first, second, third = host("a"), host("b"), host("c")
    with Publisher(weights, hosts=[first]) as publisher:
        with pytest.raises(TypeError, match="several hosts are several arguments"):
            publisher.invite([second])
        # All or none: the first of these is not named, either.
        with pytest.raises(ValueError, match="host a is named twice"):
            publisher.invite(second, first)
        publisher.invite()
        assert publisher.hosts == {"a": "worker of a"}
        publisher.invite(second, third)
        assert len(publisher.publish("v1").workers) == 3


@pytest.mark.parametrize("hosts", ["http://127.0.0.1:8000", None, 7, lambda: None])
def test_hosts_that_are_no_list_are_refused(weights, hosts):
    with pytest.raises(TypeError, match="expected a list of URLs and clients"):
        Publisher(weights, hosts=hosts)


@pytest.mark.parametrize("by", ["name", "client"])
def test_removed_host_leaves_and_counts_no_longer(host, weights, by):
    stays, goes = host("a"), host("b")
    with Publisher(weights, hosts=[stays, goes]) as publisher:
        assert len(publisher.publish("v1").workers) == 2
        publisher.remove("b" if by == "name" else goes)
        assert goes.num_left == 1
        report = publisher.publish("v2")
        assert (report.ok, outcomes(report)) == (True, {"a": "committed"})
        with pytest.raises(LookupError, match="host b is not on the list; the list has a"):
            publisher.remove(goes)
        publisher.invite(goes)
        assert len(publisher.publish("v3").workers) == 2


def test_host_is_removed_by_its_url_and_an_absent_one_as_well(start_worker, weights, absent):
    stays, goes = start_worker(), start_worker()
    with Publisher(weights, hosts=[stays.address, goes.address], return_s=0) as publisher:
        assert publisher.publish("v1").ok
        goes.close()
        absent(publisher, goes.address)
        with pytest.raises(HostsError):
            publisher.publish("v2")
        publisher.remove(goes.address)
        assert publisher.publish("v2").ok
        with pytest.raises(LookupError, match="unix:@nobody is not on the list"):
            publisher.remove("unix:@nobody")


def test_host_is_removed_when_the_round_under_way_is_over(
    host, weights, gated, background, monkeypatch
):
    stays, goes = host("a"), host("b")
    asked = threading.Event()
    remove = Publisher.remove

    def noted(publisher, each):
        asked.set()
        remove(publisher, each)

    monkeypatch.setattr(Publisher, "remove", noted)
    with Publisher(gated, hosts=[stays, goes]) as publisher:
        gated.gate.clear()
        round_ = publisher.publish("v1", wait=False)
        removing = background(publisher.remove, goes)
        assert asked.wait(PATIENCE_S)
        gated.reached.wait(PATIENCE_S)
        assert goes.num_left == 0
        gated.gate.set()
        report = round_.result(PATIENCE_S)
        assert outcomes(report) == {"a": "committed", "b": "committed"}
        removing.result(PATIENCE_S)
        assert goes.num_left == 1
        assert outcomes(publisher.publish("v2")) == {"a": "committed"}


# -- hosts that a function names


def test_hosts_of_a_function_come_and_go(host, weights, until):
    first, second = host("a"), host("b")
    named = [first]
    with Publisher(weights, hosts=lambda: iter(named), return_s=0.05) as publisher:
        assert outcomes(publisher.publish("v1")) == {"a": "committed"}
        named.append(second)
        second.error = PeerLostError("it is not up yet")
        with pytest.raises(HostsError, match=r"b is absent for .*: it is not up yet"):
            publisher.publish("v2")
        assert first.session.version == "v1"
        second.error = None
        until(lambda: second.session is not None and second.session.version == "v1")
        assert outcomes(publisher.publish("v2")) == {"a": "committed", "b": "committed"}
        named.remove(first)
        assert outcomes(publisher.publish("v3")) == {"b": "committed"}
        until(lambda: first.num_left == 1)


def test_host_that_a_function_names_anew_is_waited_for(host, weights):
    first, second = host("a"), host("b")
    named = [first]
    with Publisher(weights, hosts=lambda: named) as publisher:
        assert publisher.publish("v1").ok
        named.append(second)
        report = publisher.publish("v2")
        assert (report.ok, outcomes(report)) == (True, {"a": "committed", "b": "committed"})


def test_client_that_a_function_makes_anew_takes_the_place_of_the_one_before(
    host, weights, until, absent
):
    hosts = [host("a")]
    with Publisher(weights, hosts=lambda: hosts, return_s=0) as publisher:
        assert publisher.publish("v1").ok
        hosts[0].stop(PeerLostError("this handle is stale"))
        absent(publisher, "a")
        hosts[0] = host("a")
        with pytest.raises(HostsError):
            publisher.publish("v2")
        until(lambda: hosts[0].session is not None and hosts[0].session.version == "v1")
        assert publisher.publish("v2").ok


def test_function_that_raises_ends_the_publish_and_no_later_one(host, weights):
    first, failures = host("a"), []

    def hosts():
        if failures:
            raise failures.pop()
        return [first]

    with Publisher(weights, hosts=hosts) as publisher:
        failures.append(OSError("the cluster does not answer"))
        with pytest.raises(OSError, match="the cluster does not answer"):
            publisher.publish("v1")
        assert first.session.version is None
        assert publisher.publish("v1").ok


@pytest.mark.parametrize("what", [None, "unix:@a", ["unix:@a", "unix:@a"], [7]])
def test_function_whose_answer_is_no_list_of_hosts_changes_nothing(host, weights, what):
    answers, first = [], host("a")
    with Publisher(
        weights, hosts=lambda: answers.pop() if answers else [first], return_s=0
    ) as publisher:
        for version in ("v1", "v2"):
            answers.append(what)
            with pytest.raises((TypeError, ValueError), match=r"expected a list|twice|neither"):
                publisher.publish(version)
        assert publisher.hosts == {"a": "worker of a"}
        assert outcomes(publisher.publish("v3")) == {"a": "committed"}


def test_function_that_hangs_ends_the_publish_and_is_not_called_beside_itself(
    host, weights, judged
):
    first, called, may_return = host("a"), [], threading.Event()

    def hosts():
        called.append(threading.current_thread().name)
        assert len(called) != 2 or may_return.wait(PATIENCE_S)
        return [first]

    with Publisher(weights, hosts=hosts) as publisher:
        with judged(publisher, 0.1):
            for _ in range(3):
                with pytest.raises(StallError, match=r"hosts= did not return within 0\.1 s"):
                    publisher.publish("v1")
        assert len(called) == 2
        may_return.set()
        assert publisher.publish("v1").ok


def test_function_is_not_asked_for_the_hosts_of_a_round_under_way(host, gated):
    first, second = host("a"), host("b")
    named = [first, second]
    with Publisher(gated, hosts=lambda: named) as publisher:
        gated.gate.clear()
        round_ = publisher.publish("v1", wait=False)
        assert gated.reached.wait(PATIENCE_S)
        named.remove(second)
        with pytest.raises(RoundBusyError):
            publisher.publish("v2")
        assert second.num_left == 0
        gated.gate.set()
        assert outcomes(round_.result(PATIENCE_S)) == {"a": "committed", "b": "committed"}
        assert outcomes(publisher.publish("v2")) == {"a": "committed"}


# -- drain


def test_host_that_its_operator_has_drained_counts_again_once_it_is_invited(
    start_worker, weights, until
):
    stays, drained = start_worker(), start_worker()
    with Publisher(weights, hosts=[stays.address, drained.address]) as publisher:
        assert publisher.publish("v1").ok
        drained.client._call("POST", "/shutdown_weight_transfer_engine")
        assert not drained.session.status().connected
        for version in ("v2", "v3"):
            report = publisher.publish(version)
            assert (report.ok, outcomes(report)) == (True, {stays.address: "committed"})
        assert publisher.status().absent == {}
        assert publisher.hosts == {stays.address: "w0"}
        assert (drained.num_joined, drained.session.version) == (1, "v1")
        publisher.invite()
        assert publisher.hosts == {stays.address: "w0", drained.address: "w1"}
        assert len(publisher.publish("v4").workers) == 2
        # Now it is one that counts: it is missed when it is gone.
        drained.close()
        until(lambda: drained.address in publisher.status().absent)


def test_function_that_names_a_drained_host_anew_does_not_drag_it_back(start_worker, host, weights):
    stays, drained = host("a"), start_worker()
    named = [stays, drained.address]
    with Publisher(weights, hosts=lambda: named) as publisher:
        assert publisher.publish("v1").ok
        drained.client._call("POST", "/shutdown_weight_transfer_engine")
        for names in ([stays], [stays, drained.address]):
            named[:] = names
            assert outcomes(publisher.publish("v2")) == {"a": "committed"}
        assert drained.num_joined == 1


# -- no thread


def test_publisher_whose_asking_gets_no_thread_says_so_and_leaves_nothing(
    host, weights, monkeypatch
):
    start = threading.Thread.start

    def fail(thread):
        if thread.name == "wtransfer-ask":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail)
    first = host("a")
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Publisher(weights, hosts=[first])
    with Publisher(weights) as publisher:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            publisher.invite(first)
        monkeypatch.undo()
        publisher.invite(first)
        assert publisher.publish("v1").ok
