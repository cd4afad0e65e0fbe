"""The engine through verl's registry, trainer ranks and rollouts in one process."""

import asyncio
import gc
import importlib
import re
import threading
import time
import weakref

import pytest
import torch
import verl
from stand_ins import NUM_TENSORS, HeldAdapter, weights_of
from verl.checkpoint_engine import CheckpointEngineRegistry
from wtransfer import WTransferError
from wtransfer.errors import (
    AuthenticationError,
    NoWorkersError,
    PeerLostError,
    SourceError,
    StallError,
    UnknownBackendError,
)

import wtransfer_verl

BUCKET_NBYTES = 1 << 20


class Counted:
    """A stream that knows how much of it was read."""

    def __init__(self, stream):
        self.num_read = 0
        self._stream = stream

    def __iter__(self):
        for item in self._stream:
            self.num_read += 1
            yield item


class Sides:
    """Two trainer ranks and some rollouts, called as verl's manager and workers call them."""

    def __init__(self, num_rollouts=2, timeout_s=20.0, **kwargs):
        kwargs = {"bucket_size": BUCKET_NBYTES, "timeout_s": timeout_s, **kwargs}

        def new(**role):
            return CheckpointEngineRegistry.new("wtransfer", **role, **kwargs)

        self.new = new
        self.trainers = [new(is_master=True), new(is_master=False)]
        self.rollouts = [new() for _ in range(num_rollouts)]
        self.adapters = [HeldAdapter() for _ in range(num_rollouts)]

    def build(self):
        engines = [*self.trainers, *self.rollouts]
        metadata = [each.prepare() for each in engines]
        groups = wtransfer_verl.WTransferCheckpointEngine.build_topology(
            len(self.trainers), len(self.rollouts), metadata
        )
        for group, kwargs in zip((self.trainers, self.rollouts), groups, strict=True):
            for number, each in enumerate(group):
                each.init_process_group(**{name: value[number] for name, value in kwargs.items()})

    async def receive(self, number, step):
        # On a thread of its own, as each rollout has a process: it blocks until the set is there.
        def receive():
            weights = self.rollouts[number].receive_weights(global_steps=step)
            asyncio.run(self.adapters[number].update_weights(weights, global_steps=step))

        await asyncio.to_thread(receive)

    def transfer(self, step, streams):
        """Return outcomes of trainer ranks and of rollouts."""

        async def run():
            return await asyncio.gather(
                *(
                    each.send_weights(stream, global_steps=step)
                    for each, stream in zip(self.trainers, streams, strict=True)
                ),
                *(self.receive(number, step) for number in range(len(self.rollouts))),
                return_exceptions=True,
            )

        outcomes = asyncio.run(run())
        return outcomes[:2], outcomes[2:]

    def finalize(self):
        for each in [*self.trainers, *self.rollouts]:
            each.finalize()

    def sync(self, step, stream=None):
        """Sync as verl does, without `finalize` after a failure; return outcomes."""
        self.build()
        outcomes = self.transfer(step, [stream or weights_of(step), weights_of(step)])
        if not any(isinstance(each, Exception) for group in outcomes for each in group):
            self.finalize()
        return outcomes

    def hold(self, step):
        wanted = dict(weights_of(step))
        return all(
            each.model.keys() == wanted.keys()
            and all(torch.equal(each.model[name], wanted[name]) for name in wanted)
            for each in self.adapters
        )

    @property
    def num_ordered(self):
        return [each.num_ordered for each in self.adapters]


@pytest.fixture
def sides():
    made = []

    def make(*args, **kwargs):
        made.append(Sides(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.finalize()


def failing(step, number):
    for seen, item in enumerate(weights_of(step)):
        if seen == number:
            raise RuntimeError(f"the trainer failed at {item[0]}")
        yield item


def of_wtransfer():
    return [each for each in threading.enumerate() if each.name.startswith("wtransfer")]


def await_no_threads():
    limit = time.monotonic() + 10
    while of_wtransfer() and time.monotonic() < limit:
        time.sleep(0.01)
    return of_wtransfer()


@pytest.mark.parametrize(
    "kwargs", [{}, {"engine": "gloo", "listen": "tcp:127.0.0.1:0"}], ids=["shm", "gloo by tcp"]
)
def test_rollouts_have_each_set_bit_for_bit_and_nothing_outlives_a_sync(sides, kwargs):
    two = sides(**kwargs)
    for step in (1, 2, 3):
        (master, other), received = two.sync(step)
        assert (master["wtransfer/bytes"], other, received) == (163840, {}, [None, None])
        assert master["wtransfer/seconds"] > 0
        assert two.hold(step)
        assert await_no_threads() == []


def test_set_is_released_at_the_end_of_a_sync_at_once(sides):
    class Witness(HeldAdapter):
        async def update_weights(self, weights, **_):
            self.seen = [weakref.ref(tensor) async for _, tensor in weights]

    two = sides()
    two.adapters = [Witness(), Witness()]
    gc.disable()
    try:
        for step in (1, 2):
            two.sync(step)
            seen = [each for adapter in two.adapters for each in adapter.seen]
            assert len(seen) == 2 * NUM_TENSORS
            assert [each() for each in seen if each() is not None] == []
    finally:
        gc.enable()


def test_tensors_that_the_trainer_overwrites_arrive_as_they_were_yielded(sides):
    def stream(step):
        buffer = torch.empty(64, 1 + NUM_TENSORS)
        for name, tensor in weights_of(step):
            part = buffer.view(-1)[: tensor.numel()].view(tensor.shape).to(tensor.dtype)
            yield name, part.copy_(tensor)
            buffer.fill_(-1)

    two = sides()
    for step in (1, 2):
        two.sync(step, stream(step))
        assert two.hold(step)


@pytest.mark.parametrize("at", [0, 20, NUM_TENSORS - 1])
@pytest.mark.parametrize("before", [0, 1], ids=["first set", "later set"])
def test_trainer_that_fails_leaves_every_rollout_on_the_old_set(sides, at, before):
    two = sides()
    for step in range(1, before + 1):
        two.sync(step)
    begun = time.monotonic()
    (failed, other), received = two.sync(7, failing(7, at))
    assert time.monotonic() - begun < 10
    assert f"the trainer failed at model.layers.{at}.weight" in str(failed)
    assert other == {}
    assert [type(each) for each in received] == [PeerLostError] * 2
    assert "the weights of step 7 will not come" in str(received[0])
    assert await_no_threads() == []
    # No serving engine was ordered to receive: it would wait for what does not come.
    assert two.num_ordered == [before] * 2
    two.sync(8)
    assert two.hold(8)


def test_every_rank_reads_its_generator_to_the_end_where_no_round_begins(sides):
    two = sides(deadline_s=0.5)
    for step in (1, 2):
        if step == 2:
            two.sync(1)
        streams = [Counted(weights_of(step)) for _ in range(2)]
        two.build()
        two.rollouts[1].finalize()
        (failed, _), received = two.transfer(step, streams)
        assert isinstance(failed, NoWorkersError)
        assert [each.num_read for each in streams] == [NUM_TENSORS] * 2
        assert isinstance(received[0], WTransferError)


def test_rollouts_that_come_and_go_between_two_syncs_make_no_difference(sides):
    two = sides()
    two.sync(1)
    gone = two.rollouts.pop()
    two.adapters.pop()
    two.sync(2)
    assert two.hold(2)
    for _ in range(2):
        two.rollouts.append(two.new())
        two.adapters.append(HeldAdapter())
    two.sync(3)
    assert two.hold(3)
    gone.finalize()


def test_set_of_other_names_fails_its_sync_and_the_next_one_takes_it(sides):
    two = sides()
    two.sync(1)

    def renamed():
        for name, tensor in weights_of(2):
            yield name.replace("layers.3.", "layers.three."), tensor

    (failed, _), _ = two.sync(2, renamed())
    assert isinstance(failed, SourceError)
    assert "model.layers.three.weight" in str(failed)
    assert two.hold(1)
    (sent, _), _ = two.sync(2, renamed())
    assert sent["wtransfer/bytes"] == 163840
    assert "model.layers.three.weight" in two.adapters[0].model


def test_sync_after_one_that_failed_in_a_serving_engine_begins_with_nothing_of_it(sides):
    class StrictAdapter(HeldAdapter):
        async def update_weights(self, weights, **_):
            async for name, _ in weights:
                raise KeyError(f"this model has no {name}")

    two = sides()
    two.adapters = [HeldAdapter(), StrictAdapter()]
    (sent, _), received = two.sync(1)
    # Behind the commit: the set is whole, and its fate the serving engines'.
    assert sent["wtransfer/bytes"] == 163840
    assert [str(each) for each in received] == ["None", "'this model has no model.layers.0.weight'"]
    two.adapters[1] = HeldAdapter()
    two.sync(2)
    assert two.hold(2)
    assert await_no_threads() == []


def test_rank_that_is_late_to_a_gather_of_a_failed_round_finds_the_others_there(sides):
    two = sides(deadline_s=0.2)
    two.sync(1)

    def late():
        for number, item in enumerate(weights_of(2)):
            if number == 20:
                # Beyond the deadline of the round, and then its length once more. All is read too
                # if a slow machine lets the round succeed.
                time.sleep(4)
            yield item

    two.build()
    streams = [Counted(late()), Counted(weights_of(2))]
    two.transfer(2, streams)
    assert [each.num_read for each in streams] == [NUM_TENSORS] * 2


def test_large_tensor_is_left_to_verls_second_hop(sides):
    two = sides()
    (sent, _), _ = two.sync(1, iter([("large", torch.zeros(BUCKET_NBYTES // 4 + 1))]))
    assert sent["wtransfer/bytes"] == BUCKET_NBYTES + 4
    assert list(two.adapters[0].model) == ["large"]


def test_rollout_waits_for_a_trainer_no_longer_than_it_was_told(sides):
    two = sides(timeout_s=0.2)
    two.build()
    with pytest.raises(StallError, match=r"step 1 have not come within 0\.2 s .*timeout_s"):
        two.rollouts[0].receive_weights(global_steps=1)


def test_rollout_with_another_token_is_refused(sides):
    two = sides()
    publisher = two.trainers[0].prepare()
    with pytest.raises(AuthenticationError, match="token"):
        two.rollouts[0].init_process_group(publisher | {"token": "another"}, 0, 1)


def test_trainer_that_cannot_be_reached_is_told_with_the_option_for_other_hosts(sides):
    two = sides(deadline_s=0.3)
    publisher = two.trainers[0].prepare()
    two.trainers[0].finalize()
    with pytest.raises(StallError, match=r"not reached within 0\.3 s; .*listen=tcp:HOST:PORT"):
        two.rollouts[0].init_process_group(publisher, 0, 1)


def test_unknown_engine_is_refused_with_those_there_are(sides):
    two = sides(engine="carrier-pigeon")
    with pytest.raises(UnknownBackendError, match=r"carrier-pigeon.*'shm'"):
        two.trainers[0].prepare()


def test_unknown_option_is_refused_by_name(sides):
    with pytest.raises(TypeError, match="bucket_colour"):
        sides(bucket_colour="red")


@pytest.mark.parametrize("version", ["0.9.0", "0.10.0"])
def test_verl_out_of_the_range_is_refused_with_the_range(version, monkeypatch):
    monkeypatch.setattr(verl, "__version__", version)
    said = f'not run with verl {version}; install one of its range: pip install "verl>=0.9.1,<0.10"'
    with pytest.raises(ImportError, match=re.escape(said)):
        importlib.reload(wtransfer_verl.checkpoint_engine)
