"""Whole rounds of engine ``gloo`` over three hosts, whose cables can be pulled."""

from __future__ import annotations

import time

import pytest

DEADLINE_S = 3.5  # a busy machine stands still for seconds
ON_TIME_S = 10.0  # before any time-out of gloo's, and before the deadline that a publisher has
BUCKET_NBYTES = 1 << 20

pytestmark = pytest.mark.slow


@pytest.fixture
def hosts(namespaces):
    """The hosts; whatever a test pulls is plugged in again, so that processes can end."""
    yield namespaces
    for host in namespaces:
        host.link(up=True)


@pytest.fixture
def serving(flow, hosts):
    """A trainer and two workers, each on a host of its own, after their first rounds."""
    flow.size = {"num_tensors": 12, "numel": 1 << 18}  # 12 MiB
    home, *others = hosts
    trainer = flow.trainer(
        host=home,
        engine="gloo",
        listen=f"tcp:{home.address}:0",
        options={"host": home.address, "packed_buffer_size_bytes": BUCKET_NBYTES},
        deadline_s=DEADLINE_S,
    )
    workers = [flow.worker(host=host) for host in others]
    for number in (1, 1, 1):
        flow.publish(trainer, number, workers)
    return trainer, workers


def test_rounds_go_over_hosts_and_each_listens_at_its_own_address_only(flow, serving):
    trainer, workers = serving
    for number in range(2, 8):
        flow.publish(trainer, number, workers)
    # The kernel writes 10.77.0.1 as one number, as it stands in memory.
    assert trainer.listeners() == ["01004D0A"] * 3, "channel, meeting and group"
    assert [worker.listeners() for worker in workers] == [["02004D0A"], ["03004D0A"]]


@pytest.fixture
def cut_off(flow, failing, serving):
    """Cut a process off in the midst of a round; return how that ended, once all serve on."""
    trainer, workers = serving

    def cut(puppet, host):
        flow.held_in(trainer, puppet, "midst")
        host.link(up=False)
        cut_at = time.monotonic()
        puppet.go_on()
        with failing("WTransferError") as failed:
            trainer.ask("result")
        assert {"PeerLostError", "StallError"} & set(failed.classes)
        assert failed.ended - cut_at < ON_TIME_S
        assert failed.worker in failed.error.text
        flow.serve(workers, 1, cut_at, ON_TIME_S)
        return failed

    return cut


def publish_anew(flow, trainer, number, workers):
    """Publish; a first round may meet the connection that was cut, and give that up."""
    try:
        flow.publish(trainer, number, workers)
    except Exception as error:
        assert "has been silent" in str(error)  # noqa: PT017
        trainer.ask("wait", n=len(workers))
        flow.publish(trainer, number, workers)


@pytest.fixture
def leaves_nothing(flow, serving):
    """Check that every process has afterwards what it had before."""
    trainer, workers = serving
    holdings = [each.holdings() for each in (trainer, *workers)]
    yield
    left_over = flow.left_over(holdings, lambda: [p.holdings() for p in (trainer, *workers)])
    assert not any(left_over), left_over


@pytest.mark.usefixtures("leaves_nothing")
def test_a_worker_cut_off_in_mid_round_is_named_and_the_others_serve_on(
    flow, hosts, serving, cut_off
):
    trainer, workers = serving
    for lost, host in zip(workers, hosts[1:], strict=True):
        assert cut_off(lost, host).worker == lost.name
        host.link(up=True)
        publish_anew(flow, trainer, 1, workers)
    flow.publish(trainer, 2, workers)


@pytest.mark.usefixtures("leaves_nothing")
def test_a_trainer_cut_off_in_mid_round_is_given_up_and_found_again(flow, hosts, serving, cut_off):
    trainer, workers = serving
    assert cut_off(trainer, hosts[0]).worker in {worker.name for worker in workers}
    hosts[0].link(up=True)
    for number in (2, 3):
        publish_anew(flow, trainer, number, workers)


def test_worker_that_cannot_reach_where_the_group_meets_holds_up_none(flow, failing, hosts):
    home, *others = hosts
    trainer = flow.trainer(
        host=home,
        engine="gloo",
        listen=f"tcp:{home.address}:0",
        options={"host": home.address},
        deadline_s=DEADLINE_S,
    )
    workers = [flow.worker(host=host) for host in others]
    trainer.ask("wait", n=2)
    flow.held_in(trainer, workers[0], "init", number=1)
    others[0].link(up=False)
    cut_at = time.monotonic()
    workers[0].go_on()
    with failing("WTransferError") as failed:
        trainer.ask("result")
    assert failed.ended - cut_at < ON_TIME_S
    assert failed.worker == workers[0].name
    flow.serve(workers, 0, cut_at, ON_TIME_S)
    others[0].link(up=True)
    publish_anew(flow, trainer, 1, workers)
