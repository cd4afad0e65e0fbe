"""FAULTS 12 to 16 and 19: a process is killed, stopped, ended or told to stop, in any phase.

One table per kind of outcome: engine, phase, victim, what happens to it. Each case holds a process
where it enters the phase (`witness`), so the fault falls there; afterwards every survivor serves a
whole version, the next round works, and nothing is left over.
"""

from __future__ import annotations

import signal
import time

import pytest

from wtransfer.transport.address import random_address

DEADLINE_S = 3.5  # a busy machine stands still for seconds
ON_TIME_S = 3 * DEADLINE_S  # far from the deadline that a publisher has by itself
SOON_S = {"shm": 10.0, "gloo": 3.5}  # before that deadline, and before gloo's time-out
NUM_WORKERS = {"shm": 2, "gloo": 3}


def case(*values, marks=()):
    """Return a row of a table; its name is what stands in it."""
    return pytest.param(values, marks=marks, id="-".join(map(str, filter(None, values))))


def slow(*values):
    return case(*values, marks=pytest.mark.slow)


class Fleet:
    """A trainer and workers that have its first version."""

    def __init__(self, flow, engine, *, is_new=False, **options):
        self.flow = flow
        if engine == "gloo":
            # Larger than any socket buffer: a broadcast waits for the rank that does not read.
            flow.size = {"num_tensors": 12, "numel": 1 << 18}
        self.home = {"engine": engine, "options": {}, "listen": random_address()}
        self.home |= {"token": "a token of these tests", **options}
        self.soon_s = ON_TIME_S if "deadline_s" in options else SOON_S[engine]
        if engine == "gloo":
            # What breaks in the middle of a bucket is kept until gloo's time-out.
            timeout_s = 6.0 if "deadline_s" in options else 4.0
            self.home["options"] = {"packed_buffer_size_bytes": 1 << 20, "timeout_s": timeout_s}
        self.trainer = flow.trainer(**self.home)
        self.workers = flow.workers(NUM_WORKERS[engine])
        self.trainer.ask("wait", n=len(self.workers))
        self.number = 0 if is_new else 1
        # Twice: from then on two pieces of memory take turns.
        for _ in range(0 if is_new else 2):
            flow.publish(self.trainer, 1, self.workers)
        self.before = {puppet: puppet.holdings() for puppet in (self.trainer, *self.workers)}

    def hold(self, puppet, phase, order="begin"):
        """Bring the next round to where one process enters a phase."""
        puppet.witness.hold(phase)
        self.trainer.order(order, number=2)
        if order == "begin":
            self.round_id = self.trainer.answer()
        puppet.until_held()
        assert puppet.phase == phase

    def strike(self, puppet, how):
        """Let a fault happen to a process; return when that was."""
        if how == "kill":
            return puppet.kill()
        if how == "leave":
            begun = time.monotonic()
            # Before it goes on, or its round may be over by the time that it leaves.
            puppet.order("end")
            self.flow.until(self.trainer.has_answered)
            puppet.go_on()
            puppet.answer()
            assert puppet.ended - begun < self.soon_s
            return begun
        number = {"stop": signal.SIGSTOP, "term": signal.SIGTERM}[how]
        puppet.alive = how == "stop"
        return puppet.signal(number)

    def resume(self, puppet):
        puppet.go_on()
        puppet.signal(signal.SIGCONT)

    def holds_new_version(self, rest, victim, how):
        """The rest have committed; a victim that was stopped does so, too, once it goes on."""
        for worker in rest:
            self.flow.holds(worker, 2)
        if how == "stop":
            self.resume(victim)
            self.flow.holds(victim, 2)
        else:
            self.next_rounds_work(rest)

    def serve_on(self, workers, since):
        """Check that workers are soon free, and have the version of before, whole."""
        self.flow.serve(workers, self.number, since, self.soon_s)

    def next_rounds_work(self, workers, trainer=None):
        """Publish twice more, also to a late joiner, and check that nothing is left over."""
        trainer = trainer or self.trainer
        joined = [*workers, self.flow.worker()]
        for number in (3, 4):
            self.flow.publish(trainer, number, joined)
        joined.pop().end()
        stayed = [each for each in (self.trainer, *workers) if each.alive and self.number]
        left_over = self.flow.left_over(
            [self.before[each] for each in stayed], lambda: [each.holdings() for each in stayed]
        )
        assert not any(left_over), left_over


# -- a worker, before the commit: all stay, and it is named


@pytest.mark.parametrize(
    "fault",
    [
        *(case("shm", phase, 1, "kill", "abort") for phase in ("init", "plan", "transfer")),
        case("shm", "prepare", 1, "kill", "abort"),
        case("shm", "transfer", 1, "term", "abort"),
        case("shm", "transfer", 1, "stop", "abort"),
        slow("shm", "prepare", 1, "stop", "abort"),
        case("gloo", "init", 2, "kill", "abort"),
        case("gloo", "midst", 0, "kill", "abort"),
        case("gloo", "midst", 2, "kill", "drop"),  # the rest of its group is lost with it
        slow("gloo", "prepare", 0, "kill", "abort"),
        case("gloo", "midst", 1, "leave", "abort"),
        case("gloo", "init", 1, "stop", "abort"),
        slow("gloo", "midst", 0, "stop", "abort"),
    ],
)
def test_worker_lost_before_the_commit_is_named_and_all_stay(flow, failing, fault):
    engine, phase, place, how, policy = fault
    deadline = {"deadline_s": DEADLINE_S} if how == "stop" else {}
    fleet = Fleet(flow, engine, is_new=phase == "init", on_lost_worker=policy, **deadline)
    victim, trainer = fleet.workers[place], fleet.trainer
    rest = [worker for worker in fleet.workers if worker is not victim]
    fleet.hold(victim, phase)
    trainer.order("result")
    struck_at = fleet.strike(victim, how)
    with failing("StallError" if how == "stop" else "PeerLostError") as lost:
        trainer.answer()
    assert lost.ended - struck_at < fleet.soon_s
    assert how != "stop" or lost.ended - struck_at > DEADLINE_S * 0.5
    assert (lost.worker, lost.round_id, lost.version) == (victim.name, fleet.round_id, "v2")
    assert victim.name in lost.error.text
    fleet.serve_on(rest, lost.ended)
    fleet.next_rounds_work(rest)
    if how == "stop":
        fleet.resume(victim)
        flow.publish(trainer, 5, fleet.workers)
    # What it has seen was whole; in its first round it may not have looked yet.
    assert victim.looks() or phase == "init"


@pytest.mark.parametrize(
    "fault",
    [
        *(case("shm", phase, "kill") for phase in ("plan", "transfer", "prepare")),
        case("shm", "transfer", "stop"),
        slow("gloo", "prepare", "kill"),
    ],
)
def test_lost_worker_is_left_out_where_that_is_allowed(flow, fault):
    engine, phase, how = fault
    deadline = {"deadline_s": DEADLINE_S} if how == "stop" else {}
    fleet = Fleet(flow, engine, on_lost_worker="drop", **deadline)
    *rest, victim = fleet.workers
    fleet.hold(victim, phase)
    if engine == "gloo":
        # Its bytes have arrived: only its vote is missing.
        flow.until(lambda: fleet.trainer.phase == "prepare")
    fleet.trainer.order("result")
    struck_at = fleet.strike(victim, how)
    report = fleet.trainer.answer()
    assert fleet.trainer.ended - struck_at < fleet.soon_s
    outcome = report["workers"][victim.name]["outcome"]
    assert (report["ok"], report["outcome"], outcome) == (False, "mixed", "dropped")
    assert victim.name in report["text"]
    fleet.holds_new_version(rest, victim, how)


@pytest.mark.parametrize(
    "fault",
    [
        case("shm", "vote", "kill"),
        case("shm", "commit", "kill"),
        case("shm", "commit", "stop"),
        case("gloo", "commit", "kill"),
    ],
)
def test_worker_lost_at_its_commit_leaves_the_group_mixed(flow, fault):
    engine, phase, how = fault
    fleet = Fleet(flow, engine, **({"deadline_s": DEADLINE_S} if how == "stop" else {}))
    *rest, victim = fleet.workers
    fleet.hold(victim, phase)
    fleet.trainer.order("result")
    struck_at = fleet.strike(victim, how)
    report = fleet.trainer.answer()
    assert fleet.trainer.ended - struck_at < fleet.soon_s
    assert (report["outcome"], report["ok"]) == ("mixed", False)
    outcomes = {name: each["outcome"] for name, each in report["workers"].items()}
    assert outcomes.pop(victim.name) in (("pending", "lost") if how == "stop" else ("lost",))
    assert set(outcomes.values()) == {"committed"}
    fleet.holds_new_version(rest, victim, how)


# -- the trainer: its workers serve on, and find the next one


@pytest.mark.parametrize(
    "fault",
    [
        *(case("shm", phase, "trainer", "kill") for phase in ("init", "transfer", "commit")),
        slow("shm", "prepare", "trainer", "kill"),
        case("shm", "transfer", "worker", "kill"),
        slow("shm", "plan", "worker", "kill"),
        case("shm", "transfer", "worker", "term"),
        case("shm", "transfer", "worker", "leave"),
        case("shm", "transfer", "trainer", "stop"),
        case("gloo", "midst", "trainer", "kill"),
        slow("gloo", "prepare", "trainer", "kill"),
        slow("gloo", "midst", "worker", "leave"),
        slow("gloo", "midst", "trainer", "stop"),
    ],
)
def test_workers_of_a_lost_trainer_serve_on_and_find_the_next_one(flow, failing, fault):
    engine, phase, held, how = fault
    deadline = {"deadline_s": DEADLINE_S} if how == "stop" else {}
    fleet = Fleet(flow, engine, is_new=phase == "init", **deadline)
    trainer, workers = fleet.trainer, fleet.workers
    holding = trainer if held == "trainer" else workers[1]
    before = [worker.look()["fingerprint"] for worker in workers]
    fleet.hold(holding, phase)
    if how == "leave":
        trainer.ask("end")
        struck_at = time.monotonic()
        assert trainer.child.wait(10.0) == 0
        # An interpreter that is torn down says nothing.
        assert trainer.last_words() == ""
        trainer.alive = False
    else:
        struck_at = fleet.strike(trainer, how)
    fleet.serve_on(workers, struck_at)
    assert [worker.look()["fingerprint"] for worker in workers] == before
    holding.go_on()
    if how == "stop":
        fleet.resume(trainer)
        with failing("WTransferError") as lost:
            trainer.ask("result")
        assert {"PeerLostError", "StallError"} & set(lost.classes)
        fleet.next_rounds_work(workers)
    else:
        fleet.next_rounds_work(workers, flow.trainer(**fleet.home))


def test_new_trainer_takes_over_the_dead_round_of_the_old_one(flow):
    fleet = Fleet(flow, "shm")
    worker = fleet.workers[0]
    fleet.hold(worker, "transfer")
    assert worker.look()["staging"] == fleet.round_id
    fleet.trainer.kill()
    # The worker's engine is still at work on the dead round when the new trainer comes.
    successor = flow.trainer(**fleet.home)
    successor.ask("wait", n=2)
    successor.ask("begin", number=3)
    worker.go_on()
    report = successor.ask("result")
    assert report["ok"], report["text"]
    for each in fleet.workers:
        flow.holds(each, 3)


def test_another_trainer_takes_over_from_a_stopped_one(flow):
    fleet = Fleet(flow, "shm", deadline_s=DEADLINE_S)
    successor = flow.trainer(listen=random_address(), token=fleet.home["token"])
    fleet.hold(fleet.trainer, "transfer")
    fleet.trainer.signal(signal.SIGSTOP)
    for worker in fleet.workers:
        worker.ask("until_free", within_s=10)
        # Lost to the worker, which dials it again and again: the successor takes its place.
        worker.ask("join", address=successor.ask("where")["address"])
    flow.publish(successor, 2, fleet.workers)


# -- the caller


@pytest.mark.parametrize(
    "fault",
    [
        *(case("shm", phase, "abort") for phase in ("plan", "transfer", "prepare")),
        *(case("shm", phase, "Ctrl-C") for phase in ("plan", "transfer", "prepare")),
        case("gloo", "midst", "abort"),
        case("gloo", "midst", "Ctrl-C"),
    ],
)
def test_round_that_is_called_off_ends_soon(flow, failing, fault):
    engine, phase, how = fault
    fleet = Fleet(flow, engine)
    trainer, workers = fleet.trainer, fleet.workers
    fleet.hold(workers[1], phase, "begin" if how == "abort" else "publish")
    if how == "abort":
        begun = time.monotonic()
        trainer.ask("abort", times=2)
        with failing("RoundAbortedError") as ended:
            trainer.ask("result")
        assert (ended.version, ended.phase) == ("v2", "transfer" if phase == "midst" else phase)
        # Of a round that is over there is nothing left to abort.
        trainer.ask("abort")
    else:
        begun = trainer.signal(signal.SIGINT)
        with failing("KeyboardInterrupt") as ended:
            trainer.answer()
    # An interruption is let through once the round has wound down, or after its grace.
    assert ended.ended - begun < fleet.soon_s
    fleet.serve_on(workers, begun)
    workers[1].go_on()
    fleet.next_rounds_work(workers)


def test_ctrl_c_while_a_worker_applies_restores_the_old_version(flow, failing):
    fleet = Fleet(flow, "shm")
    worker = fleet.workers[1]
    worker.ask("set", auto=False)
    worker.witness.hold("commit")
    fleet.trainer.ask("begin", number=2)
    worker.order("commit", within_s=10)
    worker.until_held()
    # Half of the tensors are new. The handler runs in the main thread, which is in the target.
    worker.signal(signal.SIGINT)
    worker.go_on()
    with failing("KeyboardInterrupt"):
        worker.answer()
    look = worker.look()
    assert ("v1", {1}) == (look["version"], set(look["numbers"]))
    report = fleet.trainer.ask("result")
    assert report["workers"][worker.name]["outcome"] == "restored"
    worker.ask("set", auto=True)
    flow.holds(worker, 2)  # it catches up by itself


# -- what is kept, and who is waited for


def test_restarted_worker_says_what_it_has_and_is_brought_up_to_date(flow):
    fleet = Fleet(flow, "shm")
    fleet.workers[1].kill()
    restarted = flow.worker(auto=False)
    fleet.trainer.ask("wait", n=2)
    workers = {each["worker"]: each for each in fleet.trainer.ask("workers")}
    info = workers[restarted.name]
    assert (info["version"], info["state"] in ("fresh", "pending")) == (None, True)
    assert info["fingerprint"].startswith("local:")
    restarted.ask("set", auto=True)
    flow.holds(restarted, 1)


def test_rounds_that_die_while_engines_are_made_leave_nothing_in_the_trainer(flow, failing):
    trainer = flow.trainer()
    holdings = []
    for number in range(1, 6):
        victim = flow.worker()
        trainer.ask("wait", n=1)
        flow.killed_in(trainer, victim, "init", number)
        with failing("PeerLostError"):
            trainer.answer()
        flow.until(lambda: not trainer.ask("workers"))
        holdings.append(trainer.holdings())
    flow.until(lambda: trainer.holdings() <= holdings[0])


@pytest.mark.slow
def test_worker_that_lives_through_many_trainers_keeps_nothing_of_them(flow):
    fleet = Fleet(flow, "shm")
    worker, trainer = fleet.workers[0], fleet.trainer
    seen = []
    for number in range(1, 7):
        trainer.kill()
        trainer = flow.trainer(**fleet.home)
        trainer.ask("wait", n=2)
        trainer.ask("publish", number=number)
        flow.held_in(trainer, trainer, "prepare", number=100)
        seen.append(worker.holdings())
    trainer.kill()
    # The second trainer's first round is what a worker holds in daily life.
    flow.until(lambda: worker.holdings() <= seen[1])


@pytest.mark.slow
def test_one_slow_worker_costs_the_trainer_no_memory_and_the_others_no_deadline(flow, failing):
    flow.size = {"num_tensors": 48, "numel": 1 << 18}  # 48 MiB
    nbytes = 48 << 20
    trainer = flow.trainer(deadline_s=DEADLINE_S, options={"bucket_nbytes": 1 << 20})
    fast, slow = flow.workers(2)
    trainer.ask("wait", n=2)
    for number in (1, 2):
        assert trainer.ask("publish", number=number)["ok"]
    peak_nbytes = trainer.ask("peak_nbytes")
    slow.witness.hold("transfer")
    begun = time.monotonic()
    trainer.ask("begin", number=3)
    with failing("StallError") as stalled:
        trainer.ask("result")
    assert stalled.ended - begun < ON_TIME_S
    assert slow.name == stalled.worker
    assert fast.ask("until_free", within_s=10)
    # What waits for the slow one are announcements, not weights.
    assert trainer.ask("peak_nbytes") - peak_nbytes < nbytes // 4
    slow.go_on()
    flow.publish(trainer, 4, [fast, slow])


@pytest.mark.slow
def test_worker_that_is_slow_but_moves_is_waited_for(flow):
    flow.size |= {"num_tensors": 8}
    trainer = flow.trainer(deadline_s=DEADLINE_S, options={"bucket_nbytes": 1 << 14})
    slow = flow.worker(pace_s=0.6)
    trainer.ask("wait", n=1)
    begun = time.monotonic()
    flow.publish(trainer, 1, [slow])
    assert time.monotonic() - begun > DEADLINE_S
