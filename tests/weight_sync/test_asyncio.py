"""Publisher and worker in an event loop: it ticks on, and a cancelled task ends its round."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

import pytest

from wtransfer.errors import ClosedError, NoWorkersError, RoundAbortedError
from wtransfer.testing.contents import contents
from wtransfer.weight_sync.trainer.round_handle import Round
from wtransfer.weight_sync.worker.target import StateDictTarget

TICK_S = 0.01
PATIENCE_S = 10.0


@contextlib.asynccontextmanager
async def ticking():
    """Tick beside what is run; the ticks are the times at which the loop was free."""
    ticks = []

    async def tick():
        while True:
            ticks.append(time.monotonic())
            await asyncio.sleep(TICK_S)

    task = asyncio.create_task(tick())
    yield ticks
    task.cancel()


async def serve(member):
    """Be the model's thread: apply what comes, on the loop's thread."""
    with contextlib.suppress(ClosedError):
        while True:
            await member.session.commit_pending_async(10)


def test_a_round_is_awaited_on_both_sides_while_the_loop_ticks(fleet, gated):
    made = fleet(gated)
    tensors = {name: tensor.clone().zero_() for name, tensor in gated.tensors.items()}
    applied_on = []

    class Target(StateDictTarget):
        def apply(self, tensors):
            applied_on.append(threading.get_ident())
            super().apply(tensors)

    member = made.join(Target(tensors))

    async def main():
        worker = asyncio.create_task(serve(member))
        async with ticking() as ticks:
            gated.gate.clear()
            publishing = asyncio.create_task(made.publisher.publish_async("v1"))
            assert await asyncio.to_thread(gated.reached.wait, PATIENCE_S)
            # The round stands still until the gate opens: a loop that waits for it does so, too.
            before = len(ticks)
            await asyncio.sleep(20 * TICK_S)
            assert len(ticks) > before
            assert not publishing.done()
            gated.gate.set()
            report = await publishing
        worker.cancel()
        return report

    report = asyncio.run(main())
    assert report.ok
    assert member.session.version == "v1"
    assert contents(tensors) == contents(gated.tensors)
    assert applied_on == [threading.get_ident()]


def test_a_cancelled_task_aborts_its_round_and_the_next_one_goes_through(fleet, gated):
    made = fleet(gated)
    member = made.join({name: tensor.clone().zero_() for name, tensor in gated.tensors.items()})

    async def main():
        worker = asyncio.create_task(serve(member))
        gated.gate.clear()
        publishing = asyncio.create_task(made.publisher.publish_async("off"))
        assert await asyncio.to_thread(gated.reached.wait, PATIENCE_S)
        active = made.publisher._active
        publishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publishing
        with pytest.raises(RoundAbortedError, match="interrupted by CancelledError"):
            Round(active).result(5)
        gated.gate.set()
        assert member.session.version is None
        report = await made.publisher.publish_async("v1")
        worker.cancel()
        return report

    assert asyncio.run(main()).ok
    assert member.contents == contents(gated.tensors)


def test_a_task_that_is_cancelled_before_its_round_began_leaves_none(fleet, weights):
    made = fleet(weights)
    member = made.join()

    async def main():
        publishing = asyncio.create_task(made.publisher.publish_async("off"))
        await asyncio.sleep(0)
        publishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publishing
        assert made.publisher._active is None

    asyncio.run(main())
    assert member.session.version is None
    assert made.publish("v1").ok


def test_a_task_that_is_cancelled_while_it_waits_for_its_turn_begins_no_round(
    fleet, weights, until, monkeypatch
):
    made = fleet(weights, deadline_s=60.0)
    first = made.join()
    assert made.publish("v1").ok
    made.leave(first)
    # Without it there are too few: a round waits until it has committed.
    slow = made.join()
    until(lambda: slow.session.status().pending)
    publisher, waits, errors = made.publisher, threading.Event(), []
    turn = publisher._turn

    def noted(*args):
        waits.set()
        try:
            return turn(*args)
        except Exception as error:
            errors.append(error)
            raise

    monkeypatch.setattr(publisher, "_turn", noted)

    async def main():
        publishing = asyncio.create_task(publisher.publish_async("off"))
        assert await asyncio.to_thread(waits.wait, PATIENCE_S)
        with publisher._lock:
            # It was held from the call on, and is free as it waits now.
            publishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publishing
        await asyncio.to_thread(until, lambda: errors)
        worker = asyncio.create_task(serve(slow))
        report = await publisher.publish_async("v2")
        worker.cancel()
        return report

    assert asyncio.run(main()).ok
    assert [str(each) for each in errors] == ["publish_async was cancelled before its round began"]
    assert slow.session.version == "v2"


def test_errors_come_out_as_of_publish(fleet, weights):
    made = fleet(weights)
    with pytest.raises(NoWorkersError):
        asyncio.run(made.publisher.publish_async("v1"))
    with pytest.raises(ValueError, match="expected a label"):
        asyncio.run(made.publisher.publish_async(""))
    made.publisher.close()
    with pytest.raises(ClosedError):
        asyncio.run(made.publisher.publish_async("v1"))


def test_a_wait_without_an_update_ends_in_time_when_cancelled_and_when_closed(fleet, weights):
    made = fleet(weights)
    session = made.join().session

    async def main():
        assert await session.commit_pending_async() is False
        assert await session.commit_pending_async(0.05) is False
        waiting = asyncio.create_task(session.commit_pending_async(60))
        await asyncio.sleep(TICK_S)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert session._committer.weight_state.changed._watchers == []
        waiting = asyncio.create_task(session.commit_pending_async(60))
        await asyncio.sleep(TICK_S)
        closing = asyncio.get_running_loop().run_in_executor(None, session.close)
        assert await asyncio.wait_for(waiting, 5) is False
        await closing

    asyncio.run(main())


@pytest.mark.parametrize("num_turns", range(4))
def test_a_task_that_is_cancelled_as_an_update_comes_applies_nothing(fleet, weights, num_turns):
    made = fleet(weights)
    session = made.join().session

    async def main():
        waiting = asyncio.create_task(session.commit_pending_async(60))
        await asyncio.sleep(TICK_S)
        round_ = made.publisher.publish("v1", wait=False)
        # Blocks the loop, as a step of the model would: all that follows is ready at once.
        end = time.monotonic() + PATIENCE_S
        while not session.status().pending:
            assert time.monotonic() < end
        for _ in range(num_turns):
            await asyncio.sleep(0)
        if waiting.done():
            assert await waiting is True
        else:
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert (session.version, session.status().pending) == (None, True)
        return round_

    assert made.finish(asyncio.run(main())).ok
    assert session.version == "v1"
