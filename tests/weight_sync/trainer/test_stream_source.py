"""Weights that can be read once in a round: read to the end, whatever becomes of the round."""

from __future__ import annotations

import threading

import pytest
import torch

from wtransfer import StreamSource
from wtransfer.errors import NoWorkersError, RoundBusyError, SourceError, WTransferError
from wtransfer.testing.contents import contents
from wtransfer.testing.fleet import committing
from wtransfer.weight_sync.trainer.publisher import Publisher
from wtransfer.weight_sync.worker.session import WorkerSession
from wtransfer.weights import ParamMeta


class Export:
    """A framework's export: one buffer for all tensors, and a state that is put back at the end."""

    def __init__(self, weights):
        self.weights = weights
        self.metadata = [ParamMeta(n, each.dtype, tuple(each.shape)) for n, each in weights.items()]
        self.buffer = torch.empty(max(each.nbytes for each in weights.values()), dtype=torch.uint8)
        self.num_read = 0
        self.put_back = 0
        self.fails_at = None

    def __iter__(self):
        for name, each in self.weights.items():
            if name == self.fails_at:
                raise OSError("the export failed")
            self.num_read += 1
            place = self.buffer[: each.nbytes].view(each.dtype).view(each.shape)
            yield name, place.copy_(each)
        self.put_back += 1


@pytest.fixture
def export(weights):
    return Export(weights)


@pytest.fixture
def pair(weights):
    """A publisher of a stream source, and a worker that commits whenever it can."""
    held = {name: torch.zeros_like(each) for name, each in weights.items()}
    source = StreamSource(deadline_s=2.0)
    with Publisher(source, deadline_s=5.0) as publisher:
        session = WorkerSession(held, join=publisher.address, token=publisher.token)
        with session, committing(session):
            publisher.wait_for_workers(1)
            yield publisher, source, held


def test_stream_is_published_round_after_round_though_its_buffer_is_one(pair, export, weights):
    publisher, source, held = pair
    for number in range(3):
        for each in weights.values():
            each.add_(1)
        with source.round(export.metadata, export):
            publisher.publish(f"v{number}").raise_unless_ok()
        assert contents(held) == contents(weights)
        assert export.put_back == number + 1
    assert export.num_read == 3 * len(weights)


def test_round_that_never_came_to_its_weights_reads_them_all_the_same(export):
    source = StreamSource()
    with (
        Publisher(source) as publisher,
        pytest.raises(NoWorkersError),
        source.round(export.metadata, export),
    ):
        publisher.publish("v1")
    assert export.put_back == 1


def test_round_that_ends_in_the_midst_reads_the_rest(pair, export):
    publisher, source, held = pair
    before = contents(held)
    wrong = [*export.metadata]
    wrong[1] = ParamMeta("another", wrong[1].dtype, wrong[1].shape)
    with pytest.raises(WTransferError), source.round(wrong, export):
        publisher.publish("v1")
    assert export.put_back == 1
    assert contents(held) == before
    with source.round(export.metadata, export):
        publisher.publish("v2").raise_unless_ok()


def test_stream_without_metadata_is_copied_once_and_then_announced_as_it_was(pair, export, weights):
    publisher, source, held = pair
    for number in range(3):
        for each in weights.values():
            each.add_(1)
        with source.round(None, export):
            # The first round has read it all before; the others leave it to the engine.
            assert export.put_back == number + (number == 0)
            publisher.publish(f"v{number}").raise_unless_ok()
        assert contents(held) == contents(weights)
        assert export.put_back == number + 1


@pytest.mark.parametrize("change", ["shape", "dtype", "name", "more", "less"])
def test_stream_that_has_changed_fails_one_round_and_is_announced_in_the_next(weights, change):
    name = list(weights)[-1]
    last = weights[name]
    changed = dict(weights)
    if change in ("less", "name"):
        del changed[name]
    if change in ("more", "name"):
        changed["another"] = last.clone()
    if change == "shape":
        changed[name] = torch.cat([last.flatten(), last.flatten()])
    if change == "dtype":
        changed[name] = last.view(torch.uint8)
    source = StreamSource()
    with source.round(None, weights.items()):
        pass
    with Publisher(source, deadline_s=5.0) as publisher:
        held = {key: torch.zeros_like(each) for key, each in changed.items()}
        with (
            WorkerSession(held, join=publisher.address, token=publisher.token) as session,
            committing(session),
        ):
            publisher.wait_for_workers(1)
            with pytest.raises(WTransferError), source.round(None, changed.items()):
                publisher.publish("v1")
            with source.round(None, changed.items()):
                publisher.publish("v2").raise_unless_ok()
            assert contents(held) == contents(changed)


def test_stream_that_cannot_be_read_to_its_end_is_not_remembered(export):
    source = StreamSource()
    export.fails_at = list(export.weights)[-1]
    with pytest.raises(OSError, match="the export failed"), source.round(None, export):
        pytest.fail("its block was entered")
    export.fails_at = None
    with source.round(None, export):
        assert [*source.metadata] == export.metadata


def test_error_of_the_caller_is_the_one_that_is_raised(export, caplog):
    source = StreamSource()
    export.fails_at = list(export.weights)[-1]
    with pytest.raises(KeyError, match="mine"), source.round(export.metadata, export):
        raise KeyError("mine")
    assert "the export failed" in caplog.text


@pytest.mark.parametrize("drained", [False, True])
def test_stream_has_the_callers_mode_of_gradients_and_keeps_its_own(pair, drained):
    _, source, _ = pair
    leaf = torch.nn.Parameter(torch.zeros(3))
    metadata = [ParamMeta(name, torch.float32, (3,)) for name in "ab"]

    def merge():
        leaf.add_(1)  # of the caller's mode
        yield "a", leaf.detach().clone()
        leaf.add_(1)
        yield "b", leaf.detach().clone()

    def merge_by_itself():
        with torch.no_grad():
            yield from merge()

    def read():
        if not drained:
            for _ in source.iter_full():
                pass

    for stream, grad in ((merge, False), (merge_by_itself, True)):
        with torch.set_grad_enabled(grad):
            with source.round(metadata, stream()):
                reader = threading.Thread(target=read)
                reader.start()
                reader.join()
            assert torch.is_grad_enabled() is grad
    assert leaf.tolist() == [4.0] * 3


def test_error_of_the_stream_ends_the_round_and_is_named(pair, export):
    publisher, source, held = pair
    before = contents(held)
    export.fails_at = list(export.weights)[-1]
    with (
        pytest.raises(SourceError, match="the export failed"),
        source.round(export.metadata, export),
    ):
        publisher.publish("v1")
    assert contents(held) == before


def test_stream_is_read_once_and_within_its_round_only(export):
    source = StreamSource()
    with pytest.raises(SourceError, match="within"):
        source.iter_full()
    with pytest.raises(SourceError, match="within"):
        len(source.metadata)
    with source.round(export.metadata, export):
        late = source.iter_full()
        next(late)
        with pytest.raises(SourceError, match="second time"):
            source.iter_local()
        with pytest.raises(RoundBusyError, match="under way"), source.round([], []):
            pass
    with pytest.raises(SourceError, match="was left"):
        next(late)


def test_stream_that_hangs_does_not_hang_the_end_of_its_round(caplog):
    source = StreamSource(deadline_s=0.1)
    goes_on, is_in = threading.Event(), threading.Event()

    def stream():
        is_in.set()
        goes_on.wait(10)
        yield "a", torch.zeros(1)

    reader = threading.Thread(target=lambda: next(source.iter_full()))

    def hang():
        with source.round([ParamMeta("a", torch.float32, (1,))], stream()):
            reader.start()
            assert is_in.wait(10)

    with source.round(None, [("b", torch.zeros(2))]):
        pass
    hang()
    assert "more than 0.1 s for one tensor" in caplog.text
    goes_on.set()
    reader.join(10)
    # Nothing is remembered of a stream that was not read to its end, nor of the one before it.
    with source.round(None, [("c", torch.zeros(3))]):
        assert [each.name for each in source.metadata] == ["c"]
    with source.round([], []):
        assert list(source.iter_full()) == []
