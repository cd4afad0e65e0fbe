"""The conformance kit of weight transfer engines; the built-in engines pass it.

Subclass it in a test module of your own::

    from wtransfer.testing.engine import EngineConformance


    class TestMine(EngineConformance):
        engine = "mine"

A publisher and its workers run in this process, with the engine between them, so an engine needs
neither a second process nor a second host to be tested. Tests cannot be overridden; those that the
engine may fail are stated, each with its reason::

        expected_failures = {
            "test_empty_and_scalar_tensors_arrive": "my transport has no 0-dim tensors",
        }
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import pytest
import torch

from wtransfer.config import ParallelConfig, WeightTransferConfig
from wtransfer.deadline import Deadline
from wtransfer.engines.factory import WeightTransferTrainerFactory
from wtransfer.errors import RoundAbortedError
from wtransfer.registry.registry import registry
from wtransfer.testing.contents import TRAVELLING_DTYPES, contents, random_tensor
from wtransfer.testing.faults import Fault, Faults
from wtransfer.testing.fleet import Fleet
from wtransfer.testing.kit import ConformanceKit, registered_name
from wtransfer.testing.leftovers import Leftovers
from wtransfer.weight_sync.trainer.source import StateDictSource
from wtransfer.weight_sync.worker.target import StateDictTarget

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    MakeFleet = Callable[..., Fleet]

BIG_NBYTES = 24 * 2**20 + 4
"""Bytes of the one big tensor: larger than a usual bucket, and no multiple of it."""
NUM_SMALL = 2000
"""Number of small tensors."""


class EngineConformance(ConformanceKit):
    """Subclass it with a name that starts with ``Test``, and state the engine."""

    engine: ClassVar[str] = ""
    """Name of the engine, as a publisher would use it."""
    engine_cls: ClassVar[type | None] = None
    """Instead of a name: the worker class of an engine that is not installed."""
    trainer_cls: ClassVar[type | None] = None
    """Its trainer class, where the worker class does not name it."""
    options: ClassVar[dict[str, Any]] = {}
    """Options of the trainer side."""
    device: ClassVar[str] = "cpu"
    """Where the trainer's tensors lie, and the workers', as ``torch.device`` takes it."""
    deadline_s: ClassVar[float] = 10.0
    """Bound on every wait, in seconds. Raise it for engines that start slowly."""

    ends_within_s: ClassVar[float] = 5.0
    """Bound on the leftovers of a shutdown, in seconds."""
    smoke_test = "test_one_round_is_committed"

    # -- fixtures

    @pytest.fixture(autouse=True)
    def _tensors_on_device(self) -> Iterator[None]:
        """Create tensors on the device by default."""
        with torch.device(self.device):
            yield

    @pytest.fixture
    def worker_cls(self) -> type:
        """Return the worker class that is tested."""
        return self.engine_cls or registry("engines").get(self.engine)

    @pytest.fixture
    def twin_cls(self, worker_cls: type) -> type:
        """Return the trainer class that is tested."""
        if self.trainer_cls is not None:
            return self.trainer_cls
        if self.engine_cls is None:
            return WeightTransferTrainerFactory.trainer_class(self.engine)
        return WeightTransferTrainerFactory.trainer_class(registered_name("engines", worker_cls))

    @pytest.fixture
    def fleet(self, worker_cls: type, twin_cls: type) -> Iterator[MakeFleet]:
        """Make fleets of this engine, which are closed at the end of the test."""
        fleets: list[Fleet] = []

        def make(source: Any, *, trainer: type | None = None, engine: str | None = None) -> Fleet:
            name = engine or self.engine or registered_name("engines", worker_cls)
            trainer = trainer or (None if engine else twin_cls)
            made = Fleet(
                source,
                engine=name,
                trainer=trainer,
                options=dict(self.options),
                deadline_s=self.deadline_s,
            )
            fleets.append(made)
            return made

        yield make
        # Fixtures live on for a while, and what fleets know would, too.
        while fleets:
            fleets.pop().close()

    # -- arrival

    def test_one_round_is_committed(self, fleet: MakeFleet) -> None:
        """One tensor arrives at two workers."""
        with self.is_smoke_test():
            _round_trip(fleet({"weight": torch.arange(12.0)}))

    @pytest.mark.parametrize("dtype", TRAVELLING_DTYPES, ids=str)
    def test_every_dtype_arrives(self, fleet: MakeFleet, dtype: torch.dtype) -> None:
        """Bits are not interpreted, so NaN patterns and signs of zero arrive as well."""
        _round_trip(fleet({"weight": random_tensor(dtype, (3, 5), seed=1)}))

    def test_empty_and_scalar_tensors_arrive(self, fleet: MakeFleet) -> None:
        """Tensors without dimensions, and without elements."""
        source = {
            "scalar": torch.tensor(7.0),
            "empty": torch.empty(0),
            "no rows": torch.empty(0, 4, dtype=torch.int64),
            "no columns": torch.empty(4, 0, 3, dtype=torch.bfloat16),
            "one": torch.ones(1, dtype=torch.bool),
        }
        _round_trip(fleet(source))

    def test_one_big_tensor_arrives(self, fleet: MakeFleet) -> None:
        """A tensor may be larger than any buffer."""
        tensor = torch.arange(BIG_NBYTES // 4, dtype=torch.int32)
        _round_trip(fleet({"small": torch.ones(3), "big": tensor, "last": torch.zeros(1)}))

    def test_many_small_tensors_arrive(self, fleet: MakeFleet) -> None:
        """More tensors than buffers and messages."""
        _round_trip(fleet({f"layer.{i}": torch.full((i % 7,), float(i)) for i in range(NUM_SMALL)}))

    def test_tensors_of_any_strides_arrive(self, fleet: MakeFleet) -> None:
        """Elements are sent in C order, whatever their strides are in the trainer's memory."""
        base = random_tensor(torch.float32, (6, 8), seed=2)
        source = {"transposed": base.t(), "every other": base[:, ::2], "row": base[3]}
        made = fleet(source)
        member = made.join({name: tensor.clone() * 0 for name, tensor in source.items()})
        _publish(made, "v1")
        assert member.contents == contents(source)

    def test_names_of_any_characters_arrive(self, fleet: MakeFleet) -> None:
        """Names are not paths, and not ASCII."""
        names = ["a.b", "../up", "/etc/name", "with space", "ключ", "重み", "a" * 300, "%s{}"]
        _round_trip(fleet({name: torch.full((2,), float(i)) for i, name in enumerate(names)}))

    def test_one_round_after_another_arrives(self, fleet: MakeFleet) -> None:
        """Buffers are reused; bytes of an earlier round must not remain."""
        source = _model()
        made = fleet(source)
        member = made.join()
        for number in range(5):
            for tensor in source.values():
                tensor.add_(1)
            _publish(made, f"v{number}")
            assert member.contents == contents(source)
            assert member.session.version == f"v{number}"

    def test_two_workers_get_the_same(self, fleet: MakeFleet) -> None:
        """Each worker verifies the digests itself."""
        source = _model()
        made = fleet(source)
        members = [made.join(), made.join()]
        for version in ("v1", "v2"):
            source["weight"] += 1
            _publish(made, version)
            assert [member.contents for member in members] == [contents(source)] * 2

    def test_a_late_joiner_gets_the_current_version(self, fleet: MakeFleet, twin_cls: type) -> None:
        """It arrives at once if the trainer can ``resend``, else with the next round."""
        source = _model()
        made = fleet(source)
        made.join()
        _publish(made, "v1")
        late = made.join()
        if hasattr(twin_cls, "resend"):
            assert late.session.commit_pending(self.deadline_s)
            assert (late.session.version, late.contents) == ("v1", contents(source))
        source["weight"] += 1
        _publish(made, "v2")
        assert (late.session.version, late.contents) == ("v2", contents(source))

    # -- failures

    def test_an_aborted_round_changes_nothing(self, fleet: MakeFleet) -> None:
        """An abort in the middle of sending leaves the old version, and the engine usable."""
        source = _GatedSource(_model())
        made = fleet(source)
        member = made.join({name: torch.zeros_like(t) for name, t in source.tensors.items()})
        _publish(made, "v1")
        before = member.contents
        source.tensors["weight"] += 1
        source.reached.clear()
        source.gate.clear()
        round_ = made.publisher.publish("v2", wait=False)
        source.reached.wait(self.deadline_s)
        round_.abort("the test says so")
        source.gate.set()
        with pytest.raises(RoundAbortedError, match="the test says so"):
            made.finish(round_)
        assert (member.session.version, member.contents) == ("v1", before)
        _publish(made, "v3")
        assert member.contents == contents(source.tensors)

    @pytest.mark.parametrize("worker", [0, 1])
    def test_a_round_that_fails_on_one_worker_changes_none(
        self, fleet: MakeFleet, worker_cls: type, twin_cls: type, worker: int
    ) -> None:
        """``load_weights`` raises on one worker; the engine raises it too, and works again."""
        faults = Faults()
        source = _model()
        made = fleet(source, engine=registered_name("engines", faults.wrap(worker_cls, twin_cls)))
        members = [made.join(), made.join()]
        _publish(made, "v1")
        before = contents(source)
        source["weight"] += 1
        faults.arm(Fault("twice", tensor=1, worker=worker))
        with pytest.raises(ValueError, match="twice"):
            made.publish("v2")
        assert faults.fired
        assert [member.contents for member in members] == [before] * 2
        _publish(made, "v3")
        assert [member.contents for member in members] == [contents(source)] * 2

    def test_shutdown_leaves_nothing(self, fleet: MakeFleet) -> None:
        """No thread, descriptor or shared memory, within `ends_within_s`."""

        def live() -> None:
            made = fleet(_model())
            made.join(commit="copy")
            _publish(made, "v1")
            _publish(made, "v2")
            made.close()

        # A process may make something once and keep it, such as a pool of threads.
        live()
        leftovers = Leftovers()
        live()
        live()
        assert leftovers.found(self.ends_within_s) == []

    # -- declarations and infos

    def test_declared_attributes_are_valid(self, worker_cls: Any, twin_cls: Any) -> None:
        """Attributes have the types that the framework reads; each has a default."""
        assert getattr(worker_cls, "tensors_valid_until", "return") in ("return", "round")
        devices = getattr(worker_cls, "devices", ("cpu",))
        assert isinstance(devices, tuple), "devices is a tuple of device types"
        assert devices, "devices names at least one device type"
        assert all(isinstance(device, str) for device in devices)
        assert isinstance(getattr(worker_cls, "multi_host", False), bool)
        assert isinstance(getattr(worker_cls, "needs_generation", False), bool)
        assert isinstance(worker_cls.init_info_cls, type)
        assert isinstance(worker_cls.update_info_cls, type)
        assert isinstance(twin_cls.init_info_cls, type)

    def test_tensors_keep_their_bytes_for_as_long_as_declared(self, fleet: MakeFleet) -> None:
        """Tensors that are valid for the round keep their bytes through the next transfer."""
        source = _model()
        made = fleet(source)
        ledger = _Ledger(source)
        made.join(ledger)
        _publish(made, "v1")
        first = contents(source)
        assert contents(ledger.held) == first
        source["weight"] += 1
        round_ = made.publisher.publish("v2", wait=False)
        deadline = Deadline(self.deadline_s)
        while made.members[0].session.state != "pending":
            deadline.check("an update to be committed")
            time.sleep(0.002)
        assert contents(ledger.held) == first, "the next round wrote to tensors in use"
        made.finish(round_)
        assert contents(ledger.held) == contents(source)

    def test_infos_are_plain_data(self, fleet: MakeFleet, twin_cls: type) -> None:
        """Infos round-trip through msgpack."""
        infos = _sent_infos(fleet, twin_cls)
        assert infos, "the trainer sent no info at all"
        for info in infos:
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(info)) == info

    @pytest.mark.parametrize("what", ["init_info", "update_info"])
    def test_infos_that_do_not_fit_are_refused(self, worker_cls: type, what: str) -> None:
        """The error has the text that vLLM's has."""
        worker = _worker(worker_cls)
        parse = getattr(worker, f"parse_{what}")
        expected = f"^Invalid {what} for {worker_cls.__name__}: "
        with pytest.raises(ValueError, match=expected):
            parse({"no_such_field": 1})
        worker.shutdown()

    def test_receiving_before_init_raises(
        self, fleet: MakeFleet, worker_cls: type, twin_cls: type
    ) -> None:
        """The engine neither waits for data that cannot come, nor returns as if it had come."""
        update = _sent_infos(fleet, twin_cls)[-1]
        worker = _worker(worker_cls)
        info = worker.parse_update_info(update)
        with pytest.raises(Exception):  # noqa: B017, PT011 - the contract names no class
            worker.receive_weights(info, list)
        worker.shutdown()


class _Ledger(StateDictTarget):
    """A target that keeps the tensors of its last update."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.held: Mapping[str, torch.Tensor] = {}

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.held = dict(tensors)


class _GatedSource(StateDictSource):
    """A source whose iteration waits for the gate at its second tensor."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.tensors = tensors
        self.reached = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, pair in enumerate(super().iter_full()):
            if number == 1:
                self.reached.set()
                self.gate.wait()
            yield pair


def _model() -> dict[str, torch.Tensor]:
    return {
        "embedding": random_tensor(torch.bfloat16, (16, 8), seed=3),
        "weight": torch.arange(600.0).view(30, 20),
        "bias": torch.ones(30),
        "count": torch.tensor(3),
    }


def _publish(fleet: Fleet, version: str) -> None:
    report = fleet.publish(version)
    assert report.ok, str(report)


def _round_trip(fleet: Fleet) -> None:
    source = fleet.source
    assert isinstance(source, dict)
    members = [fleet.join(commit=commit) for commit in ("adopt", "copy")]
    _publish(fleet, "v1")
    assert [member.contents for member in members] == [contents(source)] * 2


def _worker(worker_cls: Any) -> Any:
    return worker_cls(WeightTransferConfig(worker_cls.__name__), ParallelConfig())


def _sent_infos(fleet: MakeFleet, twin_cls: Any) -> list[dict[str, Any]]:
    """Run a round and return the infos that the trainer has sent: init first."""
    sent: list[dict[str, Any]] = []

    class Tap:
        """A client that records infos."""

        def __init__(self, client: Any) -> None:
            self._client = client

        def __getattr__(self, name: str) -> Any:
            return getattr(self._client, name)

        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
            sent.append(init_info)
            self._client.init_weight_transfer_engine(init_info)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            sent.append(update_info)
            self._client.update_weights(update_info)

    class Tapped(twin_cls):  # type: ignore[misc]  # the class that is tested
        """The tested trainer, with a tap on its client."""

        @classmethod
        def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Any:
            return super().trainer_init(init_info, client=Tap(client), source=source)

    made = fleet(_model(), trainer=Tapped)
    made.join()
    _publish(made, "v1")
    return sent
