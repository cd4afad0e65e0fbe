"""The group in memory does what a real one does, and says what a real one would hang on."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from wtransfer.errors import GroupError
from wtransfer.testing.communicator import memory_group

LATE_S = 0.05


def filled(value, nbytes=8):
    return torch.full((nbytes,), value, dtype=torch.uint8)


def together(*jobs):
    """Run one function per rank at the same time; return what they return or raise."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        futures = [pool.submit(job) for job in jobs]
        return [future.exception() or future.result() for future in futures]


@pytest.mark.parametrize("nbytes", [0, 1, 7, 4096])
def test_a_broadcast_reaches_every_rank(nbytes):
    ranks = memory_group(3)
    content = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
    tensors = [content.clone() if rank.rank == 1 else filled(0, nbytes) for rank in ranks]

    def take_part(rank):
        rank.broadcast(tensors[rank.rank], 1).wait()
        rank.close()

    assert together(*(lambda rank=rank: take_part(rank) for rank in ranks)) == [None] * 3
    assert all(tensor.equal(content) for tensor in tensors)


def test_messages_arrive_in_the_order_in_which_they_were_sent():
    one, two = memory_group(2)
    received = [filled(0), filled(0)]
    sending = [one.send(filled(value), 1) for value in (1, 2)]
    for pending in [two.recv(tensor, 0) for tensor in received] + sending:
        pending.wait()
    assert [tensor.tolist() for tensor in received] == [[1] * 8, [2] * 8]


def test_many_may_be_under_way_and_be_waited_for_in_any_order():
    one, two = memory_group(2)
    received = [filled(0) for _ in range(5)]
    pendings = [one.broadcast(filled(value), 0) for value in range(5)]
    pendings += [two.broadcast(tensor, 0) for tensor in received]
    for pending in reversed(pendings):
        pending.wait()
    assert list(range(5)) == [int(tensor[0]) for tensor in received]


def test_read_before_the_wait_returns_filler_bytes():
    one, two = memory_group(2)
    received = filled(0)
    pending = two.broadcast(received, 0)
    one.broadcast(filled(3), 0).wait()
    assert {0xA5} == set(received.tolist())
    pending.wait()
    assert {3} == set(received.tolist())


def test_two_sends_may_share_memory():
    one, two, three = memory_group(3)
    content = filled(4)
    pendings = [one.send(content, 1), one.send(content, 2)]
    pendings += [two.recv(filled(0), 0), three.recv(filled(0), 0)]
    for pending in pendings:
        pending.wait()


# -- what a real group would hang on


def another_size(one, two):
    one.broadcast(filled(1, 8), 0)
    two.broadcast(filled(0, 4), 0)


def another_root(one, two):
    one.broadcast(filled(1), 0)
    two.broadcast(filled(0), 1)


def another_size_of_message(one, two):
    one.send(filled(1, 8), 1)
    two.recv(filled(0, 9), 0)


MISMATCHES = {
    another_size: "rank 1 of 2: began broadcast 1 of 4 bytes from rank 0, "
    "ranks [0] broadcast 1 of 8 bytes from rank 0",
    another_root: "rank 1 of 2: began broadcast 1 of 8 bytes from rank 1, "
    "ranks [0] broadcast 1 of 8 bytes from rank 0",
    another_size_of_message: "rank 1 of 2: began message 1 of 9 bytes from rank 0 to "
    "rank 1, ranks [0] message 1 of 8 bytes from rank 0 to rank 1",
}


@pytest.mark.parametrize("mistake", MISMATCHES, ids=lambda each: each.__name__)
def test_ranks_that_disagree_are_named_with_their_operations(mistake):
    one, two = memory_group(2)
    with pytest.raises(GroupError) as caught:
        mistake(one, two)
    assert MISMATCHES[mistake] == str(caught.value)


@pytest.mark.parametrize(("first", "here", "there"), [("send", 0, 1), ("recv", 1, 0)])
def test_ranks_that_wait_for_each_other_are_named_when_the_time_is_over(first, here, there):
    one, two = memory_group(2, LATE_S)
    pending = getattr(one, first)(filled(1), 1)
    getattr(two, first)(filled(2), 0)
    with pytest.raises(GroupError) as caught:
        pending.wait()
    assert str(caught.value) == (
        f"rank 0 of 2: no progress on message 1 of 8 bytes from rank {here} to rank {there} within "
        f"0.05 s: rank 1 is at message 1 of 8 bytes from rank {there} to rank {here}"
    )


def test_operations_complete_once_it_is_their_turn_on_every_rank():
    one, two, three = memory_group(3)
    pendings = [one.broadcast(filled(1), 0), two.send(filled(2), 2)]
    pendings += [three.recv(filled(0), 1), two.broadcast(filled(0), 0)]
    pendings += [three.broadcast(filled(0), 0)]
    for pending in pendings:
        pending.wait()


def test_a_missing_rank_is_named_when_the_time_is_over():
    one, two, three = memory_group(3, LATE_S)
    pending = one.broadcast(filled(1), 0)
    three.broadcast(filled(0), 0)
    with pytest.raises(GroupError) as caught:
        pending.wait()
    assert str(caught.value) == (
        "rank 0 of 3: no progress on broadcast 1 of 8 bytes from rank 0 within 0.05 s: "
        "rank 1 has nothing under way"
    )
    with pytest.raises(GroupError, match="the group is broken: rank 0 of 3: no progress"):
        two.broadcast(filled(0), 0)


def test_a_rank_that_closes_while_others_wait_for_it_is_named_on_both_sides():
    one, two = memory_group(2)
    pending = one.broadcast(filled(1), 0)
    with pytest.raises(GroupError, match="rank 1 of 2: closed while others wait for it in broadc"):
        two.close()
    with pytest.raises(GroupError, match="rank 0 of 2: the group is broken: rank 1 of 2: closed"):
        pending.wait()


def test_broadcast_that_needs_a_closed_rank_fails_and_names_it():
    one, two = memory_group(2)
    two.close()
    with pytest.raises(GroupError, match=r"rank 0 of 2: began a broadcast .*; rank 1 has closed"):
        one.broadcast(filled(1), 0)


def test_closing_without_having_waited_names_the_operations():
    one, two = memory_group(2)
    one.broadcast(filled(1), 0)
    two.broadcast(filled(1), 0).wait()
    with pytest.raises(GroupError, match=r"rank 0 of 2: closed without .* broadcast 1 of 8 bytes"):
        one.close()


def close_twice(one, two):
    one.close()
    one.close()


def begin_after_close(one, two):
    one.close()
    one.broadcast(filled(1), 0)


def write_while_sending(one, two):
    content = filled(1)
    pending = one.broadcast(content, 0)
    content[3] = 9
    two.broadcast(filled(0), 0)
    pending.wait()


def write_while_receiving(one, two):
    content = filled(1)
    pending = two.broadcast(content, 0)
    content[3] = 9
    one.broadcast(filled(1), 0)
    pending.wait()


def send_what_is_being_received(one, two):
    content = filled(1, 64)
    one.recv(content[:32], 1)
    one.send(content[31:], 1)


def receive_twice_at_one_place(one, two):
    content = filled(1, 64)
    one.recv(content[:32], 1)
    one.recv(content[16:], 1)


def receive_into_what_is_being_sent(one, two):
    content = filled(1, 64)
    one.send(content, 1)
    one.recv(content[60:], 1)


def send_floats(one, two):
    one.send(torch.zeros(4), 1)


def send_a_matrix(one, two):
    one.broadcast(filled(0).view(2, 4), 0)


def send_every_other_byte(one, two):
    one.broadcast(filled(0)[::2], 0)


def send_to_itself(one, two):
    one.send(filled(0), 0)


def send_to_nobody(one, two):
    one.send(filled(0), 2)


def broadcast_from_nobody(one, two):
    one.broadcast(filled(0), -1)


WRONG_USES = {
    close_twice: "rank 0 of 2: closed twice",
    begin_after_close: "rank 0 of 2: began a broadcast from rank 0 .* after it had closed",
    write_while_sending: "rank 0 of 2: changed its memory while broadcast 1 of 8 bytes",
    write_while_receiving: "rank 1 of 2: changed its memory while broadcast 1 of 8 bytes",
    send_what_is_being_received: "rank 0 of 2: began a message from rank 0 .* in memory of "
    "message 1 of 32 bytes from rank 1 to rank 0, which was not waited for",
    receive_twice_at_one_place: "in memory of message 1 of 32 bytes from rank 1",
    receive_into_what_is_being_sent: "in memory of message 1 of 64 bytes from rank 0",
    send_floats: "a message from rank 0 among ranks .* dtype torch.float32, shape .4., ",
    send_a_matrix: r"shape \[2, 4\], .* expected torch.uint8, one dimension, contiguous",
    send_every_other_byte: "contiguous False; expected",
    send_to_itself: "a message to itself",
    send_to_nobody: "there is no rank 2",
    broadcast_from_nobody: "there is no rank -1",
}


@pytest.mark.parametrize("mistake", WRONG_USES, ids=lambda each: each.__name__)
def test_wrong_use_is_named_and_breaks_the_group_for_all(mistake):
    one, two = memory_group(2)
    with pytest.raises(GroupError, match=WRONG_USES[mistake]):
        mistake(one, two)
    with pytest.raises(GroupError, match="the group is broken"):
        two.broadcast(filled(0), 0)
    one.close()
    two.close()


def test_an_abort_from_any_thread_ends_every_wait():
    ranks = memory_group(3, timeout_s=60.0)
    waiting = threading.Barrier(3)

    def wait(rank):
        # Rank 2 never begins, so these cannot end by themselves.
        pending = rank.broadcast(filled(0), 0)
        waiting.wait()
        pending.wait()

    def abort():
        waiting.wait()
        ranks[0].abort()

    errors = together(lambda: wait(ranks[0]), lambda: wait(ranks[1]), abort)
    assert [str(error) for error in errors] == [
        "rank 0 of 3: the group is broken: rank 0 aborted the group",
        "rank 1 of 3: the group is broken: rank 0 aborted the group",
        "None",
    ]
    for rank in ranks:
        rank.abort()
        rank.close()


def test_complete_broadcast_is_delivered_after_an_abort():
    one, two = memory_group(2)
    received = filled(0)
    pendings = [one.broadcast(filled(6), 0), two.broadcast(received, 0)]
    one.abort()
    for pending in pendings:
        pending.wait()
    assert {6} == set(received.tolist())


def test_a_wait_whose_rank_closes_as_its_bytes_come_ends_with_the_fault():
    first, second = memory_group(2)
    ended = []

    def wait():
        try:
            second.broadcast(filled(0), 0).wait()
        except BaseException as error:
            ended.append(error)

    waiting = threading.Thread(target=wait)
    with second._group.lock:
        waiting.start()
    while not second._group._under_way[1]:
        pass
    with second._group.lock:
        # All before the other thread gets the lock back.
        first.broadcast(filled(1), 0)
        with pytest.raises(GroupError, match="without having waited"):
            second.close()
    waiting.join(10)
    (error,) = ended
    assert isinstance(error, GroupError)
