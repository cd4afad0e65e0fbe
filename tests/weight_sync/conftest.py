"""The check that nothing is left, and what many tests wait or are run with."""

from __future__ import annotations

import queue
from types import SimpleNamespace

import msgspec
import pytest
import torch
from torch.distributed.tensor import Shard

from wtransfer.engines.interface import ParamMeta
from wtransfer.errors import CommitError
from wtransfer.testing.contents import contents
from wtransfer.testing.fleet import GatedSource
from wtransfer.transport.channel import Listener
from wtransfer.transport.framing import FrameReader, pack_frame
from wtransfer.weight_sync.messages import CODEC, Hello, Init, Progress
from wtransfer.weight_sync.trainer.membership import Worker
from wtransfer.weight_sync.worker.session import WorkerSession
from wtransfer.weight_sync.worker.target import StateDictTarget

PATIENCE_S = 5.0


@pytest.fixture(autouse=True)
def leaves_nothing(leaves_nothing):
    """Look at every test of this folder so."""


@pytest.fixture(scope="session")
def report_of():
    """Report of a call whose round was committed, and has left no worker with its version."""

    def catch(call, *arguments):
        with pytest.raises(CommitError, match="no worker holds") as caught:
            call(*arguments)
        return caught.value.report

    return catch


@pytest.fixture(scope="session")
def unapplied(judged, report_of):
    """Report of a round that its only worker has verified, and does not apply in time."""

    def publish(fleet):
        fleet.join()
        with judged(fleet.publisher, 0.3):
            return report_of(fleet.publisher.publish, "v1")

    return publish


@pytest.fixture(params=["adopt", "copy"])
def commit(request):
    """Way in which workers take an update; a test that asks for it runs once with each."""
    return request.param


class ModelThatRefuses(StateDictTarget):
    """A model whose own loading raises at one tensor, after it has taken those before."""

    def __init__(self, tensors, commit, *, captures=True):
        super().__init__(tensors, commit)
        self.tensors = tensors
        self.fails_at = None
        self.error = RuntimeError("the model says no")
        self.captures = captures
        self.keeps_failing = False
        self.takes = None

    def capture(self):
        return super().capture() if self.captures else None

    def apply(self, tensors):
        fails_at = self.fails_at if contents(tensors) != self.takes else None
        for number, (name, tensor) in enumerate(tensors.items()):
            if number == fails_at:
                self.fails_at = fails_at if self.keeps_failing else None
                raise self.error
            super().apply({name: tensor})


@pytest.fixture(scope="session")
def join():
    """Add a worker whose model may refuse to a fleet: a member with `target`."""

    def join(fleet, commit="adopt", captures=True, **options):
        tensors = {name: torch.full_like(tensor, -1) for name, tensor in fleet.source.items()}
        target = ModelThatRefuses(tensors, commit, captures=captures)
        member = fleet.join(target, **options)
        member.model, member.target = tensors, target
        return member

    return join


@pytest.fixture
def gated(weights):
    source = GatedSource(weights)
    yield source
    source.gate.set()


@pytest.fixture
def torn(weights):
    """A target of the weights' form that cannot apply any update."""

    class Torn(StateDictTarget):
        def apply(self, tensors):
            raise RuntimeError("the model says no")

    return Torn({name: torch.zeros_like(tensor) for name, tensor in weights.items()})


class Mail:
    """What came in, in order."""

    def __init__(self):
        self.connections = queue.Queue()
        self.messages = queue.Queue()
        self.closed = queue.Queue()

    def callbacks(self):
        return {
            "on_open": self.connections.put,
            "on_message": lambda _connection, message: self.messages.put(message),
            "on_close": lambda _connection, error: self.closed.put(error),
        }

    def expect(self, cls, *, past=()):
        """Return the next message that wants an answer, or is one; it must be of this class.

        Messages of the classes `past` may come before it.
        """
        while isinstance(message := self.messages.get(timeout=PATIENCE_S), (Progress, *past)):
            pass
        assert type(message) is cls, message
        return message

    def nothing(self, within_s=0.1):
        with pytest.raises(queue.Empty):
            self.messages.get(timeout=within_s)


class RoguePublisher:
    """The trainer's end of a channel, saying whatever a test wants."""

    def __init__(self, engine):
        self.mail = Mail()
        self.listener = Listener(CODEC, **self.mail.callbacks())
        self.engine = engine
        self.epoch = 0

    def meet(self, model, **options):
        """Let a worker dial in; return its session."""
        at = {"join": self.listener.address, "token": self.listener.token}
        session = WorkerSession(model, **at, **options)
        self.accept()
        return session

    def accept(self):
        """Take the worker's next connection, and return its hello."""
        self.connection = self.mail.connections.get(timeout=PATIENCE_S)
        return self.mail.expect(Hello)

    def say(self, *messages):
        for message in messages:
            self.connection.send(message)

    def init(self, info, engine=None):
        self.epoch += 1
        name = self.engine if engine is None else engine
        self.say(Init(self.epoch, name, None, None, 0, 1, info))

    def say_raw(self, code, fields, entries=0):
        self.connection.send_frame(pack_frame(code, entries, msgspec.msgpack.encode(fields)))


@pytest.fixture
def play_publisher():
    """Maker of publishers that say whatever a test wants."""
    made = []

    def make(engine):
        made.append(RoguePublisher(engine))
        return made[-1]

    yield make
    for each in made:
        each.listener.close()


@pytest.fixture
def sent(monkeypatch):
    """What publishers send, in order: (worker, message, bytes of its frame)."""
    found, send_frame = [], Worker.send_frame

    def record(worker, frame):
        (message,) = FrameReader(CODEC).feed(frame)
        found.append((worker.name, message, len(frame)))
        send_frame(worker, frame)

    monkeypatch.setattr(Worker, "send_frame", record)
    return found


@pytest.fixture(scope="session")
def mail():
    """Class of what a peer that is played has received."""
    return Mail


class Spread:
    """A source with one tensor, of which rank 1 holds a part as well."""

    metadata = (
        ParamMeta(
            "w",
            torch.float32,
            (2,),
            owners=(0, 1),
            mesh=SimpleNamespace(mesh=torch.tensor([0, 1]), get_coordinate=lambda: (0,)),
            placements=(Shard(0),),
        ),
    )

    def iter_local(self):
        yield "w", torch.ones(1)

    def iter_full(self):
        raise AssertionError("what has placements is gathered from its parts")


@pytest.fixture
def spread():
    return Spread()
