"""Engines that are broken in one way each. `test_kits.py` runs this file as a test module."""

import contextlib
import contextvars
import io
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from wtransfer.engines.interface import TrainerInitInfo
from wtransfer.scaffold import stream_engine
from wtransfer.testing import fakes
from wtransfer.testing.engine import EngineConformance
from wtransfer.testing.fakes import MemoryEngine, MemoryTrainerEngine


class Kit(EngineConformance):
    engine_cls = MemoryEngine
    deadline_s = 10.0
    ends_within_s = 0.5


def broken(caught_by=None, **attributes):
    """Have the kit run with a class that overrides a part of a healthy engine."""

    def make(cls):
        side = "engine_cls" if issubclass(cls, MemoryEngine) else "trainer_cls"
        return type(cls.__name__, (Kit,), {"caught_by": caught_by, side: cls, **attributes})

    return make


def per_tensor(change):
    """Return an engine that delivers other tensors than it was sent."""

    class Changing(MemoryEngine):
        def receive_weights(self, update_info, load_weights):
            def load(pairs):
                return load_weights([new for name, old in pairs for new in change(name, old)])

            super().receive_weights(update_info, load)

    return Changing


def read_only(tensor):
    return torch.frombuffer(tensor.numpy().tobytes(), dtype=tensor.dtype).view(tensor.shape)


without_empty = per_tensor(lambda name, tensor: [(name, tensor)] if tensor.numel() else [])

TestDeliversNothing = broken(
    "test_one_round_is_committed",
    says="IncompleteUpdateError: 1 of 1 pieces never arrived: 'weight'",
)(per_tensor(lambda name, tensor: []))
TestDropsEmptyTensors = broken(
    "test_empty_and_scalar_tensors_arrive",
    says="3 of 5 pieces never arrived: 'empty', 'no rows', 'no columns'",
    passes=("test_two_workers_get_the_same",),
)(without_empty)
TestReshapesScalars = broken(
    "test_empty_and_scalar_tensors_arrive",
    says="the engine delivered 'scalar' as torch.float32 [1], the plan says torch.float32 []",
)(per_tensor(lambda name, tensor: [(name, tensor.reshape(tensor.shape or (1,)))]))
TestWidensHalfFloats = broken(
    "test_every_dtype_arrives[torch.bfloat16]",
    says="the engine delivered 'weight' as torch.float32 [3, 5], the plan says torch.bfloat16",
    passes=("test_every_dtype_arrives[torch.float16]",),
)(
    per_tensor(
        lambda name, tensor: [(name, tensor.float() if tensor.dtype == torch.bfloat16 else tensor)]
    )
)
TestStripsNames = broken(
    "test_names_of_any_characters_arrive",
    says="ManifestError: the engine delivered 'up', which the plan does not have",
)(per_tensor(lambda name, tensor: [(name.rpartition("/")[2], tensor)]))
TestMapsForReading = broken(
    "test_one_round_is_committed",
    says="buffer is not writable",
    hints="must be writable: map shared files with mmap.ACCESS_COPY or ACCESS_WRITE.",
)(per_tensor(lambda name, tensor: [(name, read_only(tensor))]))
TestZeroesBigTensors = broken(
    "test_one_big_tensor_arrives",
    says="DigestMismatchError: 1 of 3 pieces arrived with other bytes than the trainer sent: 'big'",
)(
    per_tensor(
        lambda name, tensor: [(name, tensor if tensor.nbytes < 2**24 else tensor.clone().zero_())]
    )
)


@broken(
    "test_one_round_is_committed",
    says="receive_weights() of TestHangsInReceiving (Receive tensors and pass them on by "
    "``load_weights([(name, tensor), ...])``.) has not returned",
    hints="a call waits without an end, for a lock, a peer or a server: give each a time-out",
    deadline_s=0.5,
)
class TestHangsInReceiving(MemoryEngine):
    def receive_weights(self, update_info, load_weights):
        threading.Event().wait()


@broken(
    "test_one_round_is_committed",
    says="send_weights() of TestHangsInSending (Send every tensor of the source. Called on the "
    "thread that made the engine.) has not returned",
    deadline_s=0.5,
)
class TestHangsInSending(MemoryTrainerEngine):
    def send_weights(self):
        threading.Event().wait()


@broken("test_many_small_tensors_arrive", says="1000 of 2000 pieces never arrived: 'layer.1000', ")
class TestDropsTensorsAfterAThousand(MemoryEngine):
    def receive_weights(self, update_info, load_weights):
        update_info.names = update_info.names[:1000]
        super().receive_weights(update_info, load_weights)


@broken(
    "test_tensors_of_any_strides_arrive",
    says="other bytes than the trainer sent: 'transposed', 'every other'",
)
class TestIgnoresStrides(MemoryTrainerEngine):
    def send_weights(self):
        self.source = Flat(self.source)
        super().send_weights()


class Flat:
    """Reads tensors as if they lay in C order."""

    def __init__(self, source):
        self.source = source

    def iter_full(self):
        for name, tensor in self.source.iter_full():
            offset = tensor.storage_offset()
            yield name, torch.as_strided(tensor, (tensor.numel(),), (1,), offset).view(tensor.shape)


@broken(
    "test_a_late_joiner_gets_the_current_version",
    says="`resend` brought nothing, or other tensors than those of v1, to a worker that joined",
    deadline_s=1.5,
)
class TestResendsNothing(MemoryTrainerEngine):
    """It says that it can resend."""

    def resend(self, client):
        client.update_weights({"names": []})


@broken(
    "test_a_late_joiner_gets_the_current_version",
    deadline_s=1.5,
    says="`resend` brought nothing, or other tensors than those of v2, to a worker that joined",
)
class TestResendsTheFirstVersion(MemoryTrainerEngine):
    first = None

    def send_weights(self):
        super().send_weights()
        self.first = self.first or dict(fakes._SENT[self._shelf])

    def resend(self, client):
        sent = fakes._SENT[self._shelf]
        fakes._SENT[self._shelf] = self.first
        try:
            client.update_weights({"names": list(self.first)})
        finally:
            fakes._SENT[self._shelf] = sent


@broken(
    "test_tensors_are_passed_on_as_they_arrive",
    says="then they came in one call, or its bucket is larger than 96 MiB: with a model whose "
    "transfer takes longer than the publisher's deadline, the round ends with StallError",
    hints="collects all tensors for one call of `load_weights`",
    deadline_s=4.0,
    passes=("test_many_small_tensors_arrive",),
)
class TestPassesAllOnAtTheEnd(MemoryEngine):
    def receive_weights(self, update_info, load_weights):
        kept = []
        super().receive_weights(
            update_info, lambda pairs: kept.extend((name, each.clone()) for name, each in pairs)
        )
        load_weights(kept)


@broken(passes=("test_tensors_are_passed_on_as_they_arrive",), deadline_s=4.0)
class TestHasABucketOfAHundredMegabytes(MemoryEngine):
    def receive_weights(self, update_info, load_weights):
        bucket = []

        def load(pairs):
            bucket.extend((name, each.clone()) for name, each in pairs)
            if sum(each.nbytes for _, each in bucket) >= 100e6:
                load_weights(bucket)
                bucket.clear()

        super().receive_weights(update_info, load)
        load_weights(bucket)


@broken(passes=("test_declared_attributes_are_valid",))
class TestDeclaresCuda(MemoryEngine):
    """It may well be true: a line says that it was not tested."""

    devices = ("cpu", "cuda")


@broken(
    "test_one_round_after_another_arrives",
    says="4 of 4 pieces never arrived: 'embedding', 'weight', 'bias', 'count'",
)
class TestSendsOldWeights(MemoryTrainerEngine):
    kept = None

    def send_weights(self):
        if self.kept is None:
            super().send_weights()
            self.kept = True
        else:
            list(self.source.iter_full())
            self.client.update_weights({"names": []})


@broken(
    "test_two_workers_get_the_same",
    says="4 of 4 pieces never arrived: 'embedding', 'weight', 'bias', 'count'",
    passes=("test_one_round_after_another_arrives",),
)
class TestDeliversToOneWorkerOnly(MemoryEngine):
    def receive_weights(self, update_info, load_weights):
        if self.parallel_config.data_parallel_index == 0:
            super().receive_weights(update_info, load_weights)


@broken(
    "test_tensors_keep_their_bytes_for_as_long_as_declared[commit]",
    says="8 of 8 pieces arrived with other bytes than the trainer sent",
)
class TestOverwritesReturnedTensors(MemoryEngine):
    """Its buffer is overwritten, which it denies."""

    tensors_valid_until = "round"


@broken(
    "test_tensors_keep_their_bytes_for_as_long_as_declared[commit]",
    says="which this worker serves: tensors_valid_until = 'round' means valid until the worker ",
    hints="as from two sets of buffers in turn",
)
class TestOverwritesTensorsNextRound(MemoryEngine):
    """Its buffer is overwritten by the next round, which it denies."""

    tensors_valid_until = "round"

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.buffers = {}

    def receive_weights(self, update_info, load_weights):
        def load(pairs):
            for name, tensor in pairs:
                if name not in self.buffers:
                    self.buffers[name] = tensor.clone()
                load_weights([(name, self.buffers[name].copy_(tensor))])

        super().receive_weights(update_info, load)


@broken(
    "test_a_round_that_fails_on_one_worker_changes_none[1]",
    says="EngineError: receive_weights raised RuntimeError: I gave up",
    passes=("test_one_round_after_another_arrives",),
)
class TestStaysBrokenAfterFault(MemoryEngine):
    broken = False

    def receive_weights(self, update_info, load_weights):
        if self.broken:
            raise RuntimeError("I gave up")
        try:
            super().receive_weights(update_info, load_weights)
        except BaseException:
            self.broken = True
            raise


@broken(
    "test_a_round_that_fails_on_one_worker_changes_none[0]",
    says="the round must end with that error, and it was committed",
)
class TestSwallowsErrors(MemoryEngine):
    def receive_weights(self, update_info, load_weights):
        def load(pairs):
            with contextlib.suppress(ValueError):
                load_weights(pairs)

        super().receive_weights(update_info, load)


@broken(
    "test_an_aborted_round_changes_nothing[first]",
    says="EngineError: send_weights raised RuntimeError: I am sending already",
)
class TestStaysBrokenAfterAbort(MemoryTrainerEngine):
    sending = False

    def send_weights(self):
        if self.sending:
            raise RuntimeError("I am sending already")
        self.sending = True
        super().send_weights()
        self.sending = False


@broken(
    "test_memory_is_not_written_after_it_was_delivered",
    says="tensor 'weight' changed after load_weights had returned: it wrote before the vote",
    passes=("test_one_round_is_committed",),
)
class TestWritesBeforeTheVote(MemoryEngine):
    """From its second round on, what was delivered changes once more, which it denies."""

    tensors_valid_until = "round"
    writes_after_return = False
    num_rounds = 0

    def receive_weights(self, update_info, load_weights):
        kept = []
        self.num_rounds += 1

        def load(pairs):
            kept.extend((name, tensor.clone()) for name, tensor in pairs)
            load_weights(kept[-len(pairs) :])

        super().receive_weights(update_info, load)
        if self.num_rounds > 1:
            kept[1][1].zero_()


@broken(
    "test_shutdown_leaves_nothing",
    says="of two fleets that were closed, after 0.5 s these are left:",
    passes=("test_two_workers_get_the_same",),
)
class TestLeaksThread(MemoryEngine):
    def init_transfer_engine(self, init_info):
        super().init_transfer_engine(init_info)
        threading.Thread(target=threading.Event().wait, daemon=True).start()


@dataclass
class InAFolder(TrainerInitInfo):
    folder: str = ""


@broken(
    "test_shutdown_leaves_nothing",
    says="3 files of 3 publishers are left: weights",
    passes=("test_two_publishers_do_not_meet",),
    options_in=lambda self, folder: {"folder": str(folder)},
)
class TestLeavesAFileInItsFolder(MemoryTrainerEngine):
    init_info_cls = InAFolder

    def send_weights(self):
        (Path(self.init_info.folder) / "weights").write_bytes(b"weights")
        super().send_weights()


KEPT_OPEN = []


@broken("test_shutdown_leaves_nothing", says="these are left: 2 x descriptor of /dev/null")
class TestLeaksFile(MemoryEngine):
    def init_transfer_engine(self, init_info):
        super().init_transfer_engine(init_info)
        KEPT_OPEN.append(open("/dev/null"))  # noqa: SIM115, PTH123


@broken("test_declared_attributes_are_valid", says="devices is a tuple of device types")
class TestDeclaresDevicesAsText(MemoryEngine):
    devices = "cpu"


@broken("test_declared_attributes_are_valid", says="contract_version is 'major.minor'")
class TestStatesItsReleaseAsItsContract(MemoryEngine):
    contract_version = "1.0.2"


class TagEngine(MemoryEngine):
    def parse_init_info(self, init_dict):
        init_dict.pop("tags", None)
        return super().parse_init_info(init_dict)


@broken(
    "test_infos_are_plain_data", says="an info is another one after msgpack", engine_cls=TagEngine
)
class TestSendsSets(MemoryTrainerEngine):
    def worker_init_info(self):
        return {**super().worker_init_info(), "shelf": self._shelf, "tags": {"a"}}


@broken("test_infos_that_do_not_fit_are_refused[update_info]", says="bad info")
class TestRewordsParseErrors(MemoryEngine):
    def parse_update_info(self, update_dict):
        try:
            return super().parse_update_info(update_dict)
        except ValueError:
            raise ValueError("bad info") from None


@broken(
    "test_receiving_before_init_raises",
    says="receive_weights returned, though it was never initialised",
)
class TestReceivesBeforeInit(MemoryEngine):
    def receive_weights(self, update_info, load_weights):
        if hasattr(self, "_shelf"):
            super().receive_weights(update_info, load_weights)


@broken(
    "test_nothing_is_unpickled",
    says="functions of the module pickle were called",
    passes=("test_one_round_after_another_arrives",),
)
class TestUnpickles(MemoryEngine):
    def receive_weights(self, update_info, load_weights):
        # Not by `pickle.loads`, which the record of what the tests unpickle would have.
        pickled = io.BytesIO(pickle.dumps(update_info.names))
        update_info.names = pickle.Unpickler(pickled).load()
        super().receive_weights(update_info, load_weights)


@broken(
    "test_a_late_joiner_gets_the_current_version",
    says="`resend` brought nothing, or other tensors than those of v1",
    deadline_s=1.5,
)
class TestResendsWhatItsTrainerHasNow(MemoryTrainerEngine):
    def send_weights(self):
        self.latest = dict(self.source.iter_full())
        fakes._SENT[self._shelf] = self.latest
        self.client.update_weights({"names": list(self.latest)})

    def resend(self, client):
        client.update_weights({"names": list(self.latest)})


@broken("test_one_round_is_committed", says="pieces never arrived: 'weight'")
class TestPassesPairsOn(MemoryEngine):
    """Passes tensors on two by two, without the last one of an odd number."""

    def receive_weights(self, update_info, load_weights):
        update_info.names = update_info.names[: len(update_info.names) // 2 * 2]
        super().receive_weights(update_info, load_weights)


@broken("test_one_round_is_committed", says="pieces never arrived: 'weight'")
class TestReturnsEarly(MemoryEngine):
    def receive_weights(self, update_info, load_weights):
        def later():
            time.sleep(0.2)
            with contextlib.suppress(Exception):
                receive(update_info, load_weights)

        receive = super().receive_weights
        threading.Thread(target=later).start()


@broken("test_one_round_is_committed", says="a worker has other tensors than the trainer")
class TestFreesTheTrainersTensors(MemoryTrainerEngine):
    def send_weights(self):
        super().send_weights()
        for _, tensor in self.source.iter_full():
            tensor.zero_()


LATEST = {}


class TrainerOfAll(MemoryTrainerEngine):
    def send_weights(self):
        for name, tensor in self.source.iter_full():
            LATEST[name] = tensor.clone()
        self.client.update_weights({"names": [each.name for each in self.source.metadata]})


@broken(
    "test_two_publishers_do_not_meet",
    says=" arrived with other bytes than the trainer sent: 'embedding'",
    trainer_cls=TrainerOfAll,
    passes=("test_one_round_after_another_arrives",),
)
class TestKeepsItsTensorsInItsModule(MemoryEngine):
    def receive_weights(self, update_info, load_weights):
        load_weights([(name, LATEST[name]) for name in update_info.names])


@broken(
    "test_shutdown_leaves_nothing", says="file /dev/shm/", passes=("test_two_workers_get_the_same",)
)
class TestLeavesASegment(MemoryTrainerEngine):
    def send_weights(self):
        super().send_weights()
        segment = shared_memory.SharedMemory(create=True, size=4096)
        resource_tracker.unregister(segment._name, "shared_memory")
        segment.close()


@broken(
    "test_tensors_of_earlier_rounds_are_let_go",
    says="three more rounds of 33 MiB leave ",
    passes=("test_two_workers_get_the_same", "test_shutdown_leaves_nothing"),
)
class TestKeepsTheTensorsOfAllRounds(MemoryTrainerEngine):
    rounds: ClassVar = []

    def send_weights(self):
        super().send_weights()
        self.rounds.append(fakes._SENT[self._shelf])


# -- streams: a healthy one is what ``wtransfer plugins new engine`` writes

Worker, Trainer = stream_engine.StreamEngine, stream_engine.StreamEngineTrainer


def broken_stream(caught_by=None, **attributes):
    """Have the kit run with a class that overrides a part of one side of a healthy stream."""

    def make(cls):
        sides = {"engine_cls": Worker, "trainer_cls": Trainer}
        sides["engine_cls" if issubclass(cls, Worker) else "trainer_cls"] = cls
        passes = ("test_two_workers_get_the_same", *attributes.pop("passes", ()))
        own = {"caught_by": caught_by, "passes": passes, **sides, **attributes}
        return type(cls.__name__, (Kit,), own)

    return make


@broken_stream(
    "test_blocked_receive_is_unblocked", says="receive_weights goes on after abort_weight_update"
)
class TestCannotBeAborted(Worker):
    def abort_weight_update(self):
        pass


@broken_stream(
    "test_blocked_receive_is_unblocked", says="receive_weights goes on after abort_weight_update"
)
class TestSetsAFlagThatNobodyReads(Worker):
    def abort_weight_update(self):
        self._aborted = True


def accept(trainer, stack, listener, is_worker=lambda peer: True):
    for _ in range(trainer.client.num_workers):
        peer = stack.enter_context(listener.accept()[0])
        if is_worker(peer):
            trainer._sockets += (peer,)
            yield peer


@broken_stream(
    "test_worker_that_fails_first_leaves_nothing_blocked",
    says="send_weights goes on though its round has ended",
)
class TestWaitsInAccept(Trainer):
    def _accept(self, listener, update, stack):
        return accept(self, stack, listener, lambda peer: peer.recv(stream_engine.TOKEN_NBYTES))

    def abort_weight_update(self):
        pass


@broken_stream(
    "test_worker_that_is_lost_ends_the_round",
    says="after 0.5 s these are left: 2 x descriptor of socket:[#]",
)
class TestKeepsStreamsOfFailedRounds(Trainer):
    kept = []  # noqa: RUF012

    def _send(self, listener, update):
        try:
            super()._send(listener, update)
        except BaseException:
            self.kept.append(socket.socket())
            raise


@broken_stream(
    "test_two_publishers_do_not_meet",
    says="Address already in use",
    passes=("test_one_round_after_another_arrives",),
)
class TestHasOneFixedPort(Trainer):
    def send_weights(self):
        with socket.create_server(("127.0.0.1", 47391)):
            super().send_weights()


def speak(self, peer, token):
    """Speak the protocol of the streams, as the kit's author does."""
    peer.sendall(bytes.fromhex(token))


@broken_stream("test_stranger_gets_nothing", says="EngineError: receive_weights raised ")
class TestSendsToAnyone(Trainer):
    def _accept(self, listener, update, stack):
        return accept(self, stack, listener, self.reads)

    def reads(self, peer):
        """Read what may be a token, and compare it with nothing."""
        peer.settimeout(0.5)
        with contextlib.suppress(TimeoutError):
            peer.recv(1024)
        return True


@broken_stream(
    "test_stranger_gets_nothing",
    says=" made no progress on reception of data for 2 s",
    deadline_s=2.0,
)
class TestWaitsForASilentStranger(Trainer):
    def _accept(self, listener, update, stack):
        return accept(self, stack, listener, self._knows_token)


@broken_stream(
    "test_stranger_gets_nothing",
    says="a stranger was sent weights",
    dial_as_stranger=speak,
)
class TestSendsToAnyoneWithAToken(Trainer):
    """Noise is no token, and neither is a silence."""

    def _accept(self, listener, update, stack):
        while len(self._sockets) <= self.client.num_workers:
            peer = stack.enter_context(listener.accept()[0])
            if self.is_worker(peer):
                self._sockets += (peer,)
                yield peer

    def is_worker(self, peer):
        peer.settimeout(0.5)
        token = b""
        with contextlib.suppress(TimeoutError):
            token = peer.recv(stream_engine.TOKEN_NBYTES)
        if len(token) == stream_engine.TOKEN_NBYTES and b"HTTP" not in token != self._token:
            for _, tensor in self.source.iter_full():
                peer.sendall(tensor.numpy().tobytes())
        return token == self._token


@broken_stream(
    "test_worker_on_another_host_gets_the_same",
    says="Connection refused",
    hints="announces an address of its own host alone, such as 127.0.0.1",
)
class TestAnnouncesLoopback(Trainer):
    def send_weights(self):
        self.init_info.host = "127.0.0.1"
        super().send_weights()


@broken_stream(passes=("test_tensors_are_passed_on_as_they_arrive",))
class TestPassesABucketOnAfterMoreThanASecond(Worker):
    def receive_weights(self, update_info, load_weights):
        bucket = []

        def load(pairs):
            bucket.extend(pairs)
            if len(bucket) == 11:
                time.sleep(1.5)
                load_weights(bucket)
                bucket.clear()

        super().receive_weights(update_info, load)
        load_weights(bucket)


def network():
    return Path("/proc/thread-self/ns/net").readlink()


away = []
"""Sides that were shut down on another host than they were on before."""


def check_hosts(self):
    away.clear()
    yield
    assert away == []


class TrainerOfOneHost(Trainer):
    def send_weights(self):
        self.network = network()
        super().send_weights()

    def shutdown(self):
        super().shutdown()
        if self.network != network():
            away.append(self)


@broken_stream(
    passes=("test_worker_on_another_host_gets_the_same",),
    trainer_cls=TrainerOfOneHost,
    check_hosts=pytest.fixture(check_hosts, autouse=True),
)
class TestIsShutDownOnItsHost(Worker):
    def init_transfer_engine(self, init_info):
        self.network = network()
        super().init_transfer_engine(init_info)

    def shutdown(self):
        super().shutdown()
        if self.network != network():
            away.append(self)


class Spilling(MemoryTrainerEngine):
    """Has a copy of what it sends in a file, and a Unix socket that greets whoever connects."""

    def __init__(self, *arguments, **others):
        super().__init__(*arguments, **others)
        self.file = tempfile.TemporaryFile()  # noqa: SIM115
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.place())
        self.listener.listen()
        self.listener.setblocking(False)

    def place(self):
        return f"\0wtransfer-broken-{self._shelf}"

    def iter_full(self):
        for name, tensor in self.spilled.iter_full():
            self.file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
            yield name, tensor

    def send_weights(self):
        self.spilled, self.source = self.source, self
        try:
            super().send_weights()
        finally:
            self.source = self.spilled
        self.file.flush()
        with contextlib.suppress(BlockingIOError):
            while True:
                with self.listener.accept()[0] as peer:
                    self.greet(peer)

    def shutdown(self):
        super().shutdown()
        self.listener.close()
        self.file.close()


@broken(
    "test_stranger_gets_nothing",
    says="a stranger was given a descriptor of weights",
    passes=("test_shutdown_leaves_nothing",),
)
class TestGivesDescriptorsToAnyone(Spilling):
    def greet(self, peer):
        socket.send_fds(peer, [b"welcome"], [self.file.fileno()])


@broken(
    "test_stranger_gets_nothing",
    says="a stranger was sent weights",
    passes=("test_shutdown_leaves_nothing",),
)
class TestSendsThroughAFilesSocket(Spilling):
    def place(self):
        self.folder = tempfile.TemporaryDirectory()
        return f"{self.folder.name}/socket of weights"

    def greet(self, peer):
        peer.sendall(Path(f"/proc/self/fd/{self.file.fileno()}").read_bytes())

    def shutdown(self):
        super().shutdown()
        self.folder.cleanup()


@broken(passes=("test_stranger_gets_nothing", "test_shutdown_leaves_nothing"))
class TestGreetsAnyone(Spilling):
    def greet(self, peer):
        peer.sendall(b"welcome")


RINGS = {}


class RingTrainer(MemoryTrainerEngine):
    """Writes big tensors to a few slots in turn, whether the workers have read them or not."""

    NUM_SLOTS = 8

    def send_weights(self):
        sent = RINGS[self._shelf] = []
        info = {"names": [each.name for each in self.source.metadata]}
        with ThreadPoolExecutor(1) as pool:
            run = contextvars.copy_context().run
            update = pool.submit(run, self.client.update_weights, info)
            for number, (_, tensor) in enumerate(self.source.iter_full()):
                sent.append(tensor.clone())
                if tensor.nbytes > 2**16 and number >= self.NUM_SLOTS:
                    sent[number - self.NUM_SLOTS].zero_()
            update.result()


@broken(
    "test_worker_that_begins_late_gets_the_same",
    says=" of 128 pieces arrived with other bytes than the trainer sent: ",
    trainer_cls=RingTrainer,
    passes=("test_many_small_tensors_arrive", "test_one_big_tensor_arrives"),
)
class TestOverwritesWhatIsNotRead(MemoryEngine):
    def receive_weights(self, update_info, load_weights):
        sent = RINGS[self._shelf]
        for number, name in enumerate(update_info.names):
            while len(sent) <= number:
                time.sleep(0.001)
            load_weights([(name, sent[number])])


@broken_stream(passes=("test_many_small_tensors_arrive",))
class TestIsSlowPerTensor(Worker):
    """It is no fault, but a line is printed."""

    def receive_weights(self, update_info, load_weights):
        def load(pairs):
            time.sleep(0.003)
            load_weights(pairs)

        super().receive_weights(update_info, load)


@broken(
    "test_tensors_keep_their_bytes_for_as_long_as_declared[commit]",
    says="7 of 8 pieces arrived with other bytes than the trainer sent",
    passes=("test_one_round_is_committed",),
)
class TestReusesOneBuffer(MemoryEngine):
    """Each tensor overwrites the one before, which it denies."""

    tensors_valid_until = "round"

    def receive_weights(self, update_info, load_weights):
        buffer = torch.empty(1 << 20, dtype=torch.uint8, device="cpu")

        def load(pairs):
            for name, tensor in pairs:
                view = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                load_weights([(name, view.copy_(tensor))])

        super().receive_weights(update_info, load)


@broken("test_shutdown_leaves_nothing", says=" are left", passes=("test_two_workers_get_the_same",))
class TestLeavesAProcess(MemoryEngine):
    def init_transfer_engine(self, init_info):
        super().init_transfer_engine(init_info)
        KEPT_OPEN.append(subprocess.Popen(["/bin/sleep", "60"]))


class TestExcused(Kit):
    passes = ("test_two_workers_get_the_same",)
    expected_failures: ClassVar = {"test_empty_and_scalar_tensors_arrive": "empty tensors are lost"}
    engine_cls = without_empty


# -- memory that is served while the next round is staged


class InTurn(MemoryEngine):
    """Receives into sets of buffers in turn, and says that they stay for the round."""

    tensors_valid_until = "round"
    NUM_SETS = 2

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.sets = [{} for _ in range(self.NUM_SETS)]
        self.turn = 0

    def receive_weights(self, update_info, load_weights):
        buffers = self.sets[self.turn % self.NUM_SETS]

        def load(pairs):
            for name, tensor in pairs:
                if name not in buffers:
                    buffers[name] = tensor.clone()
                load_weights([(name, buffers[name].copy_(tensor))])

        super().receive_weights(update_info, load)
        self.end()

    def end(self):
        self.turn += 1


KEEPS = "test_tensors_keep_their_bytes_for_as_long_as_declared"
HIT = (
    "which this worker serves: tensors_valid_until = 'round' means valid until the worker releases"
)


@broken(f"{KEEPS}[dry run]", says=HIT, hints="as from two sets of", passes=(f"{KEEPS}[commit]",))
class TestHasTwoSetsOfBuffers(InTurn):
    pass


@broken(f"{KEEPS}[dry run]", says=HIT, passes=(f"{KEEPS}[commit]",))
class TestHasSevenSetsOfBuffers(InTurn):
    NUM_SETS = 7


class Resender(MemoryTrainerEngine):
    def resend(self, client):
        client.update_weights({"names": list(fakes._SENT[self._shelf])})


@broken(f"{KEEPS}[catch-up]", says=HIT, trainer_cls=Resender, passes=(f"{KEEPS}[commit]",))
class TestReceivesWhatIsSentAgainIntoTheServedSet(InTurn):
    pass


@broken(f"{KEEPS}[lost worker]", says=HIT, passes=(f"{KEEPS}[commit]",))
class TestTakesTheNextSetAfterALoss(InTurn):
    pass


@broken(
    "test_an_aborted_round_changes_nothing[received]",
    says=HIT,
    passes=(f"{KEEPS}[commit]", "test_an_aborted_round_changes_nothing[first]"),
)
class TestTakesTheNextSetWhenItHasReceived(InTurn):
    pass


@broken(f"{KEEPS}[dry run]", says=HIT, passes=(f"{KEEPS}[commit]",))
class TestTakesTheNextSetAtTheVote(InTurn):
    def end(self):
        pass

    def finish_weight_update(self):
        self.turn += 1


@broken("test_an_aborted_round_changes_nothing[first]", says=HIT, passes=(f"{KEEPS}[commit]",))
class TestTakesTheNextSetAtEachPlan(InTurn):
    def end(self):
        pass

    def start_weight_update(self):
        self.turn += 1


SHARED_SETS = [{}, {}]


@broken(f"{KEEPS}[another publisher]", says=HIT)
class TestSharesItsBuffersWithOtherEngines(InTurn):
    """One of each, whatever publisher it is for."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.sets = SHARED_SETS


@broken(
    f"{KEEPS}[another publisher]",
    says="its publisher had closed, and another one was joined",
    passes=(f"{KEEPS}[commit]",),
)
class TestClearsItsBuffersAtShutdown(InTurn):
    NUM_SETS = 99

    def shutdown(self):
        super().shutdown()
        for buffers in self.sets:
            for tensor in buffers.values():
                tensor.zero_()


@broken(
    f"{KEEPS}[commit]",
    says="changed after load_weights had returned: the next round wrote to tensors in use",
    hints="a receive buffer is used again though `tensors_valid_until` is 'round'",
)
class TestUsesTheOldSetAsItsScratch(InTurn):
    """What it delivers lies elsewhere; on its way it passes through the set before."""

    NUM_SETS = 99

    def receive_weights(self, update_info, load_weights):
        def load(pairs):
            for name, tensor in pairs:
                if self.turn and name in self.sets[self.turn - 1]:
                    tensor = self.sets[self.turn - 1][name].copy_(tensor)  # noqa: PLW2901
                self.sets[self.turn][name] = tensor.clone()
                load_weights([(name, self.sets[self.turn][name])])

        MemoryEngine.receive_weights(self, update_info, load)
        self.end()


# -- buckets: a worker waits for the next one


class Pipe:
    """The buckets of one round, as they are filled."""

    def __init__(self):
        self.changed = threading.Condition()
        self.buckets = []
        self.is_over = False

    def put(self, bucket):
        with self.changed:
            self.buckets.append(bucket)
            self.changed.notify_all()

    def end(self):
        with self.changed:
            self.is_over = True
            self.changed.notify_all()


PIPES = {}
BUCKET_NBYTES = 8 << 20


class PackedTrainer(MemoryTrainerEngine):
    """Packs tensors into buckets of 8 MiB, and announces the first as it is full."""

    def begin(self):
        self.pipe = PIPES[self._shelf] = Pipe()
        self.bucket = []

    def send_weights(self):
        self.begin()
        run, update = contextvars.copy_context().run, None
        with ThreadPoolExecutor(1) as pool:
            try:
                for name, tensor in self.source.iter_full():
                    self.bucket.append((name, tensor.clone()))
                    if sum(each.nbytes for _, each in self.bucket) >= BUCKET_NBYTES:
                        self.flush()
                        update = update or pool.submit(run, self.client.update_weights, {})
                self.flush()
            finally:
                self.pipe.end()
            (update or pool.submit(run, self.client.update_weights, {})).result()

    def flush(self):
        self.pipe.put(self.bucket)
        self.bucket = []

    def shutdown(self):
        super().shutdown()
        PIPES.pop(self._shelf, None)


class PackedEngine(MemoryEngine):
    trainer_cls = PackedTrainer
    is_aborted = False

    def start_weight_update(self):
        self.is_aborted = False

    def receive_weights(self, update_info, load_weights):
        pipe = self.pipe = PIPES[self._shelf]
        number = 0
        while True:
            with pipe.changed:
                pipe.changed.wait_for(
                    lambda: len(pipe.buckets) > number or pipe.is_over or self.is_aborted  # noqa: B023
                )
                if self.is_aborted:
                    raise ConnectionAbortedError("the round was aborted")
                bucket = pipe.buckets[number] if len(pipe.buckets) > number else None
            if bucket is None:
                return
            load_weights(bucket)
            number += 1

    def abort_weight_update(self):
        self.is_aborted = True
        if pipe := PIPES.get(self._shelf):
            with pipe.changed:
                pipe.changed.notify_all()


def broken_buckets(caught_by=None, **attributes):
    """Have the kit run with a class that overrides a part of one side of healthy buckets."""

    def make(cls):
        sides = {"engine_cls": PackedEngine, "trainer_cls": PackedTrainer}
        sides["engine_cls" if issubclass(cls, MemoryEngine) else "trainer_cls"] = cls
        return type(cls.__name__, (Kit,), {"caught_by": caught_by, **sides, **attributes})

    return make


BLOCKED = "test_blocked_receive_is_unblocked"


@broken_buckets(
    passes=(
        BLOCKED,
        "test_an_aborted_round_changes_nothing[sending]",
        "test_two_workers_get_the_same",
    )
)
class TestPacksBuckets(PackedEngine):
    pass


@broken_buckets(BLOCKED, says="receive_weights goes on after abort_weight_update")
class TestWaitsForTheNextBucketThoughAborted(PackedEngine):
    def abort_weight_update(self):
        pass


@broken_buckets(BLOCKED, says="came a moment before `receive_weights` waited")
class TestForgetsAnAbortAsItBeginsToReceive(PackedEngine):
    def receive_weights(self, update_info, load_weights):
        self.is_aborted = False
        super().receive_weights(update_info, load_weights)


@broken_stream(BLOCKED, says="came a moment before `receive_weights` waited")
class TestLosesAnAbortBeforeItDials(Worker):
    def receive_weights(self, update_info, load_weights):
        self._aborted = False
        super().receive_weights(update_info, load_weights)


@broken_buckets(
    "test_an_aborted_round_changes_nothing[sending]",
    says=" twice",
    passes=("test_an_aborted_round_changes_nothing[received]",),
)
class TestSendsTheBucketsOfAFailedRoundAgain(PackedTrainer):
    unsent = ()

    def begin(self):
        super().begin()
        for bucket in self.unsent:
            self.pipe.put(bucket)

    def send_weights(self):
        try:
            super().send_weights()
            self.unsent = ()
        except BaseException:
            self.unsent = self.pipe.buckets
            raise


@broken_buckets(
    "test_an_aborted_round_changes_nothing[sending]",
    says="pieces arrived with other bytes than the trainer sent",
)
class TestKeepsWhatItReceivedOfAFailedRound(PackedEngine):
    """What it has already it does not take again."""

    kept = None

    def receive_weights(self, update_info, load_weights):
        kept, self.kept = self.kept or {}, {}

        def load(pairs):
            for name, tensor in pairs:
                self.kept[name] = kept.get(name, tensor)
                load_weights([(name, self.kept[name])])

        super().receive_weights(update_info, load)
        self.kept = None


@broken_buckets(
    "test_an_aborted_round_changes_nothing[sending]", says="RuntimeError: still sending (at "
)
class TestCountsBucketsThatNobodyHasTaken(PackedTrainer):
    num_open = 0

    def begin(self):
        if self.num_open:
            raise RuntimeError("still sending")
        super().begin()

    def flush(self):
        super().flush()
        self.num_open += 1

    def send_weights(self):
        super().send_weights()
        self.num_open = 0


@broken(
    "test_an_aborted_round_changes_nothing[sending]",
    says="1 of 4 pieces never arrived: 'embedding'",
    passes=("test_an_aborted_round_changes_nothing[first]",),
)
class TestGoesOnWhereAFailedRoundHasEnded(MemoryEngine):
    first = 0

    def receive_weights(self, update_info, load_weights):
        def load(pairs):
            load_weights(pairs)
            self.first += len(pairs)

        update_info.names = update_info.names[self.first :]
        super().receive_weights(update_info, load)
        self.first = 0


# -- what nobody without the token may reach


class Elsewhere(Trainer):
    """Listens at another address than it announces."""

    address, family = "0.0.0.0", socket.AF_INET

    def send_weights(self):
        with socket.create_server((self.address, 0), family=self.family):
            super().send_weights()


THIS_HOST = "test_only_this_host_reaches_it"


@broken_stream(THIS_HOST, says="it listens at [0.0.0.0]:")
class TestListensAtAllAddresses(Elsewhere):
    pass


@broken_stream(THIS_HOST, says="it listens at [::]:")
class TestListensAtAllAddressesOfIPv6(Elsewhere):
    address, family = "::", socket.AF_INET6


@broken_stream(THIS_HOST, says="it listens at [0.0.0.0]:")
class TestTakesDatagramsOfAnyHost(Trainer):
    def send_weights(self):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as own:
            own.bind(("0.0.0.0", 0))
            super().send_weights()


@broken_stream(THIS_HOST, says="it listens at [0.0.0.0]:")
class TestHasAHelperThatListens(Trainer):
    def send_weights(self):
        code = "import socket; s = socket.create_server(('0.0.0.0', 0)); print(flush=True); input()"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen([sys.executable, "-c", code], **pipes) as helper:
            helper.stdout.readline()
            super().send_weights()
            helper.communicate(b"\n")


@broken_stream(
    passes=(THIS_HOST,),
    options={"host": "0.0.0.0"},
)
class TestListensWhereAnOptionSays(Trainer):
    pass


STRANGER = "test_stranger_gets_nothing"
TOKENS = set()


def compares(is_token, **attributes):
    """Have the kit run with a trainer that compares in its own way what a peer has sent."""

    class Comparing(Trainer):
        def _accept(self, listener, update, stack):
            TOKENS.add(self._token)
            while len(self._sockets) <= self.client.num_workers:
                peer = stack.enter_context(listener.accept()[0])
                peer.settimeout(0.3)
                sent = b""
                with contextlib.suppress(OSError):
                    sent = peer.recv(stream_engine.TOKEN_NBYTES)
                if not is_token(sent, self._token):
                    peer.close()
                    continue
                self._sockets += (peer,)
                yield peer

    return broken_stream(dial_as_stranger=speak, **attributes)(Comparing)


TAKEN = "EngineError: receive_weights raised Connection"
TestComparesTheToken = compares(lambda sent, token: sent == token, passes=(STRANGER,))
TestTakesTheBeginningOfATokenForOne = compares(
    lambda sent, token: sent and token.startswith(sent), caught_by=STRANGER, says=TAKEN
)
TestComparesTheFirstHalfOfAToken = compares(
    lambda sent, token: sent[:16] == token[:16], caught_by=STRANGER, says=TAKEN
)
TestTakesTheTokenOfAnyPublisher = compares(
    lambda sent, token: sent in TOKENS, caught_by=STRANGER, says=TAKEN
)
TestTakesAnythingThatIsNoNoise = compares(
    lambda sent, token: b"HTTP" not in sent and sent, caught_by=STRANGER, says=TAKEN
)


def misspeak(self, peer, token):
    peer.sendall(b"token=" + token.encode())


@broken_stream(
    STRANGER,
    says="its peer was turned away",
    dial_as_stranger=misspeak,
)
class TestIsDialledInAnotherProtocol(Trainer):
    """The fault is in the subclass of the kit: no stranger has asked this engine anything."""


# -- many rounds

ROUNDS = "test_rounds_leave_nothing_behind"


@broken(
    ROUNDS,
    says="8 more rounds, each after a dry run, have left more in use:",
    passes=("test_shutdown_leaves_nothing",),
)
class TestOpensAFileInEachRound(MemoryEngine):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.files = []

    def receive_weights(self, update_info, load_weights):
        self.files.append(open("/dev/null"))  # noqa: SIM115, PTH123
        super().receive_weights(update_info, load_weights)

    def shutdown(self):
        for each in self.files:
            each.close()


@broken(ROUNDS, says="thread ", passes=("test_shutdown_leaves_nothing",))
class TestStartsAThreadInEachDryRun(MemoryTrainerEngine):
    def __init__(self, *arguments, **others):
        super().__init__(*arguments, **others)
        self.is_over = threading.Event()
        self.threads = []

    def round_finished(self, *, committed):
        if not committed:
            self.threads.append(threading.Thread(target=self.is_over.wait))
            self.threads[-1].start()

    def shutdown(self):
        super().shutdown()
        self.is_over.set()
        for each in self.threads:
            each.join()


@broken(
    ROUNDS,
    says="16 files beside round",
    passes=("test_shutdown_leaves_nothing",),
    options_in=lambda self, folder: {"folder": str(folder)},
)
class TestLeavesAFileOfEachRound(MemoryTrainerEngine):
    init_info_cls = InAFolder
    number = 0

    def send_weights(self):
        self.number += 1
        (Path(self.init_info.folder) / f"round {self.number}").write_bytes(b"weights")
        super().send_weights()

    def shutdown(self):
        super().shutdown()
        for each in Path(self.init_info.folder).iterdir():
            each.unlink()


@broken(
    "test_one_round_after_another_arrives",
    says="arrived with other bytes than the trainer sent",
)
class TestSendsWhatItHadWhereTorchCountsNoChange(MemoryTrainerEngine):
    def send_weights(self):
        known, tensors = vars(self).setdefault("known", {}), {}
        for name, tensor in self.source.iter_full():
            state = tensor.data_ptr(), tensor._version
            if known.get(name, (None, None))[0] != state:
                known[name] = state, tensor.clone()
            tensors[name] = known[name][1]
        fakes._SENT[self._shelf] = tensors
        self.client.update_weights({"names": list(tensors)})


@broken(
    "test_worker_that_begins_late_gets_the_same",
    says="the trainer's own tensors had other bytes while they were sent",
    hints="or to the tensors that it sends",
)
class TestMasksTensorsWhileItSendsThem(MemoryTrainerEngine):
    def send_weights(self):
        own = dict(self.source.iter_full())
        fakes._SENT[self._shelf] = {name: tensor.clone() for name, tensor in own.items()}
        self.mask(own)
        try:
            self.client.update_weights({"names": list(own)})
        finally:
            self.mask(own)

    def mask(self, tensors):
        for tensor in tensors.values():
            tensor.view(torch.uint8).bitwise_xor_(255)


class TakesTurnsByCommits(MemoryTrainerEngine):
    """Writes into two sets that its workers map; the one before the last commit is the next."""

    def __init__(self, init_info, **arguments):
        super().__init__(init_info, **arguments)
        self.sets = [{}, {}]

    def send_weights(self):
        place = self.sets[1]
        for name, tensor in self.source.iter_full():
            if name in place:
                place[name].copy_(tensor)
            else:
                place[name] = tensor.clone()
        fakes._SENT[self._shelf] = place
        self.client.update_weights({"names": list(place)})

    def round_finished(self, *, committed):
        if committed:
            self.sets.reverse()


@broken(
    "test_tensors_keep_their_bytes_for_as_long_as_declared[catch-up]",
    says="load_weights had returned: it had declined a version, and the next one was staged",
    passes=("test_tensors_keep_their_bytes_for_as_long_as_declared[commit]",),
)
class TestRewritesTheSetOfAWorkerThatDeclined(MemoryEngine):
    tensors_valid_until = "round"
    trainer_cls = TakesTurnsByCommits

    def receive_weights(self, update_info, load_weights):
        load_weights(list(fakes._SENT[self._shelf].items()))
