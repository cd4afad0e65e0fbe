"""README, promise 1.

All or nothing. Until every worker has verified everything, any failure leaves every worker on
its old version, whole, and serving (with `on_lost_worker="drop"` a worker that is lost is left
out, and the others commit). Afterwards the round only goes forward: a worker that cannot apply
the update restores its old version, says so, and is brought up to date; until then the report
says `mixed`, or `publish` raises if no worker has applied it. The ranks of one instance commit
all or none.
"""

import pytest

HALFWAY = """
    round = publisher.publish({version!r}, wait=False)
    until(lambda: source.reached.is_set() and all(round.progress().values()))
"""
OUTCOME = """
    source.gate.set()
    report = round.result(30)
    report.outcome, report.ok, {each.worker: each.outcome for each in report.workers}
"""
AGAIN = "source.tensors = weights({value}); source.reached.clear(); source.gate.clear()"
STATE = "serving.state()"
# A target of a user's own, whose first attempt to apply an update fails.
STUMBLING = """
    from actors import *
    class Target:
        tensors, calls, fails = weights(1), 0, True
        def schema(self):
            return {name: wtransfer.TensorSpec(each.dtype, tuple(each.shape))
                    for name, each in self.tensors.items()}
        def capture(self):
            return {name: each.clone() for name, each in self.tensors.items()}
        def apply(self, tensors):
            self.calls += 1
            for number, (name, each) in enumerate(tensors.items()):
                if self.fails and self.calls == 1 and number == 5:
                    raise RuntimeError("a bank of memory is worn out")
                self.tensors[name].copy_(each)
"""


def test_worker_killed_halfway_leaves_the_other_on_its_old_version(worker, trainer):
    first, second = worker("first"), worker("second")
    publisher = trainer(2)
    assert publisher.do(HALFWAY.format(version="v2"))
    assert publisher.do(OUTCOME) == [
        "committed",
        True,
        dict.fromkeys(("first", "second"), "committed"),
    ]
    publisher.do(AGAIN.format(value=3))
    assert publisher.do(HALFWAY.format(version="v3"))
    second.kill()
    with pytest.raises(worker.error) as caught:
        publisher.do(OUTCOME)
    assert "WTransferError" in caught.value.kinds
    assert "second" in caught.value.text
    assert first.do(STATE) == [[1, 2], [], "v2"]
    assert publisher.do("publisher.publish('v3').ok")
    assert first.do(STATE) == [[1, 2, 3], [], "v3"]


def test_trainer_killed_halfway_leaves_all_on_their_old_version_until_the_next(worker, trainer):
    workers = worker("first"), worker("second")
    publisher = trainer(2)
    assert publisher.do(HALFWAY.format(version="v2"))
    publisher.kill()
    for each in workers:
        assert each.do(STATE) == [[1], [], None]
    # The next one listens at the same address.
    publisher = trainer(2)
    assert publisher.do(HALFWAY.format(version="v2"))
    assert publisher.do(OUTCOME)[:2] == ["committed", True]
    for each in workers:
        assert each.do(STATE) == [[1, 2], [], "v2"]


def test_lost_worker_is_dropped_if_so_told_and_the_report_is_not_ok(worker, trainer):
    first, second = worker("first"), worker("second")
    publisher = trainer(2, on_lost_worker="drop")
    publisher.do("source.gate.set(), publisher.publish('v1')")
    publisher.do(AGAIN.format(value=3))
    assert publisher.do(HALFWAY.format(version="v3"))
    second.kill()
    outcome, ok, by_worker = publisher.do(OUTCOME)
    assert (outcome, ok, by_worker["first"]) == ("mixed", False, "committed")
    assert by_worker["second"] != "committed"
    assert first.do(STATE) == [[1, 2, 3], [], "v3"]


def test_worker_that_cannot_apply_restores_says_so_and_is_brought_up_to_date(
    worker, trainer, prompt, address
):
    first, second = worker("first"), prompt("second")
    second.do(f"""{STUMBLING}
    target = Target()
    session = wtransfer.WorkerSession(target, join={address!r}, name="second")
    """)
    publisher = trainer(2)
    publisher.do("source.gate.set()")
    publisher.start("""
        report = publisher.publish("v2")
        report.outcome, report.ok, {each.worker: str(each.error) for each in report.workers}
    """)
    with pytest.raises(worker.error, match="a bank of memory is worn out") as caught:
        second.do("session.commit_pending(20)")
    assert "CommitError" in caught.value.kinds
    # What is half written is the old version again.
    assert second.do(
        "{float(x) for each in target.tensors.values() for x in each.aminmax()} == {1}"
    )
    outcome, ok, errors = publisher.answer()
    assert (outcome, ok) == ("mixed", False)
    assert "a bank of memory is worn out" in errors["second"]
    assert first.do(STATE) == [[1, 2], [], "v2"]
    # Nobody publishes again.
    assert second.do("session.wait_for('v2', 20), session.version") == [None, "v2"]
    assert second.do(
        "{float(x) for each in target.tensors.values() for x in each.aminmax()} == {2}"
    )


def test_worker_killed_between_its_vote_and_its_commit_is_in_no_report_that_is_ok(
    worker, trainer, prompt, address
):
    first, second = worker("first"), prompt("second")
    second.do(f"""
        from actors import *
        tensors = weights(1)
        session = wtransfer.WorkerSession(tensors, join={address!r}, name="second")
    """)
    publisher = trainer(2)
    publisher.do("source.gate.set(); round = publisher.publish('v2', wait=False)")
    second.do("until(lambda: session.state == 'pending')")
    publisher.do("until(lambda: round.committing)")
    second.kill()
    outcome, ok, by_worker = publisher.do(OUTCOME)
    assert (outcome, ok, by_worker["first"]) == ("mixed", False, "committed")
    assert by_worker["second"] != "committed"
    assert first.do(STATE) == [[1, 2], [], "v2"]


def test_update_that_no_worker_applies_raises(worker, trainer, prompt, address):
    only = prompt("only")
    only.do(f"""{STUMBLING}
    target = Target()
    session = wtransfer.WorkerSession(target, join={address!r}, name="only")
    """)
    publisher = trainer(1)
    publisher.do("source.gate.set()")
    publisher.start("publisher.publish('v2').outcome")
    with pytest.raises(worker.error, match="worn out"):
        only.do("session.commit_pending(20)")
    with pytest.raises(worker.error, match="worn out") as caught:
        publisher.answer()
    assert "CommitError" in caught.value.kinds
    assert "only" in caught.value.text


def test_ranks_of_an_instance_commit_all_or_none(worker, trainer, prompt, address):
    """One rank fails as it applies, so the other, which had, has the old version again."""
    ranks = [prompt(f"rank-{n}") for n in range(2)]
    for n, each in enumerate(ranks):
        each.do(f"""{STUMBLING}
    Target.fails = {n == 1}
    target = Target()
    session = wtransfer.WorkerSession(
        target, join={address!r}, name="rank-{n}", instance="one", rank={n}, num_ranks=2
    )
    """)
    publisher = trainer(1)
    publisher.do("source.gate.set()")
    publisher.start("publisher.publish('v2').outcome")
    for each in ranks:
        each.start("session.commit_pending(20)")
    for each in ranks:
        with pytest.raises(worker.error) as caught:
            each.answer()
        assert "CommitError" in caught.value.kinds
        values = "sorted({float(x) for each in target.tensors.values() for x in each.aminmax()})"
        assert each.do(values) == [1], "a rank holds what the other does not"
    with pytest.raises(worker.error, match="worn out"):
        publisher.answer()
    for each in ranks:
        each.start("session.wait_for('v2', 20)")
    for each in ranks:
        each.answer()
        assert each.do(values) == [2]
