"""FAULTS 43: a worker that is past its deadline and still reads shared memory."""

from __future__ import annotations

import signal

import pytest

DEADLINE_S = 3.5  # a busy machine stands still for seconds
MIB = 1 << 20


@pytest.fixture
def late(flow):
    """A trainer, a worker that is on time, and one that has stopped in the midst of a round."""

    def make(**options):
        flow.size = {"num_tensors": 8, "numel": 1 << 16}
        trainer = flow.trainer(deadline_s=DEADLINE_S, options={"bucket_nbytes": 1 << 18}, **options)
        prompt, late = flow.workers(2)
        trainer.ask("wait", n=2)
        for number in (1, 2):
            assert trainer.ask("publish", number=number)["ok"]
        return trainer, prompt, late

    return make


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["vote", pytest.param("prepare", marks=pytest.mark.slow)])
def test_segments_that_a_late_reader_has_mapped_are_never_rewritten(flow, late, phase):
    trainer, prompt, late_one = late(on_lost_worker="drop")
    two_segments = trainer.holdings()
    late_one.witness.hold(phase)
    trainer.ask("begin", number=3)
    late_one.until_held()
    late_one.signal(signal.SIGSTOP)
    trainer.ask("result")
    inodes = segment_inodes(late_one)
    before = {inode: seen_bytes(late_one, inode) for inode in inodes}
    assert before
    for number in range(4, 8):
        trainer.ask("wait", n=1)
        assert trainer.ask("publish", number=number)["ok"]
        flow.holds(prompt, number)
    assert before == {inode: seen_bytes(late_one, inode) for inode in inodes}
    late_one.signal(signal.SIGCONT)
    late_one.go_on()
    flow.holds(late_one, 7)
    assert late_one.looks()
    # What the late one kept is given back, so memory does not grow with every late reader.
    for number in (8, 9, 10):
        assert trainer.ask("publish", number=number)["ok"]
    flow.until(lambda: trainer.holdings() <= two_segments)


@pytest.mark.slow
def test_a_reader_that_wakes_up_in_a_later_round_never_holds_a_mix(flow, late):
    trainer, prompt, late_one = late(on_lost_worker="drop")
    for number in range(3, 11, 2):
        late_one.witness.hold("transfer")
        trainer.ask("begin", number=number)
        late_one.until_held()
        late_one.signal(signal.SIGSTOP)
        late_one.go_on()
        trainer.ask("result")
        flow.holds(prompt, number)
        # It wakes up with the data of the dead round in its ears, while the next round is written.
        trainer.ask("wait", n=1)
        trainer.ask("begin", number=number + 1)
        late_one.signal(signal.SIGCONT)
        trainer.ask("result")
        flow.holds(late_one, number + 1)
        assert late_one.looks()


def segment_inodes(puppet):
    """Return the shared segments that a process has mapped, as inode -> address range."""
    found = {}
    with open(f"/proc/{puppet.pid}/maps") as lines:  # noqa: PTH123
        for line in lines:
            if "/memfd:wtransfer" in line:
                where, _, _, _, inode, *_ = line.split()
                found.setdefault(inode, where)
    return found


def seen_bytes(puppet, inode):
    """Return a segment's bytes as a process sees them that has it mapped."""
    start, end = (int(each, 16) for each in segment_inodes(puppet)[inode].split("-"))
    with open(f"/proc/{puppet.pid}/mem", "rb", buffering=0) as memory:  # noqa: PTH123
        memory.seek(start)
        return memory.read(min(end - start, MIB))
