"""wtransfer's engines as trainer engines of vLLM's factory, by the names that its workers know.

For programs that drive vLLM's trainer engines (SkyRL, TorchRL, vLLM's examples)::

    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from wtransfer_vllm.trainer import init_info

    trainer = WeightTransferTrainerFactory.trainer_init(
        init_info("shm", rank=rank), client=client, source=source
    )
    trainer.send_weights()

The import registers the engines: a trainer's process never runs vLLM's plug-ins. vLLM's contract
stands: every rank of the trainer makes an engine and calls ``send_weights``, rank 0 sends, and the
others read their source beside it, which gathers with the sender's.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from wtransfer import ParamMeta, Publisher, StreamSource
from wtransfer.weight_sync.checkpoint_form import StreamForm

from wtransfer_vllm.names import our_name, vllm_names
from wtransfer_vllm.plugin import register_engines

try:
    from vllm.distributed.weight_transfer import base
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
except ImportError as error:
    if error.name == "vllm":
        raise
    raise ImportError(
        "this vLLM has no factory of trainer engines, which came with vLLM 0.27; "
        "wtransfer.Publisher(model, hosts=[URL]) needs none"
    ) from error

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from typing_extensions import Self
    from wtransfer.weight_sync.report import Report

logger = logging.getLogger(__name__)

DEADLINE_S = 30.0
"""The deadline of a `wtransfer.Publisher` that is given no other, in seconds."""


@dataclass
class TrainerInfo(base.TrainerInitInfo):
    """Rank and options of one trainer engine; ``rank=`` by name."""

    backend: ClassVar[str] = "wtransfer"
    """Name of the engine in vLLM; of the class that `init_info` chooses."""

    options: dict[str, Any] = field(default_factory=dict)
    """Options of the engine: ``options=`` of `wtransfer.Publisher`."""
    publisher: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `wtransfer.Publisher`: ``listen``, ``deadline_s`` and so on."""


class TrainerEngine(base.TrainerWeightTransferEngine):
    """Every engine of wtransfer, as a trainer of vLLM's sees it.

    Args:
        client: vLLM's ``VLLMWeightSyncClient``, or one of `wtransfer_vllm.clients`.
        source: vLLM's ``WeightSource``. Of its ``ModuleSource`` a model of transformers travels in
            the form of its checkpoint; any other source yields what travels.
        info: Rank and options.
    """

    init_info_cls: ClassVar[type[TrainerInfo]] = TrainerInfo

    def __init__(self, *, client: Any, source: Any, info: TrainerInfo) -> None:
        self.client = client
        self.source = source
        self.rank = info.rank
        self.is_sender = info.is_sender
        self.report: Report | None = None
        """Report of the last round, on the sender; None where it was aborted."""
        self.publisher: Publisher | None = None
        """The publisher, on the sender."""
        self._num_rounds = 0
        # A class derived from it may yield a form of its own.
        model = getattr(source, "_module", None) if type(source) is base.ModuleSource else None
        self._form = StreamForm(model)
        self._stream = StreamSource(info.publisher.get("deadline_s", DEADLINE_S))
        if self.is_sender:
            self.publisher = Publisher(
                self._stream,
                engine=our_name("engines", info.backend),
                options=info.options,
                hosts=[client],
                **info.publisher,
            )

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Self:
        """Return an engine; on the sender when every worker of the client has joined.

        Raises:
            TypeError: No source, or one that is not vLLM's.
            WTransferError: A worker did not join, or the engine or its options are wrong.
        """
        if not callable(getattr(source, "metadata", None)):
            raise TypeError(
                f"source is {type(source).__name__}, expected a WeightSource of vLLM, such as "
                "vllm.distributed.weight_transfer.base.ModuleSource(model)"
            )
        return cls(client=client, source=source, info=init_info)

    def send_weights(self, weight_version: str | None = None) -> Report | None:
        """Publish the weights as they are now: every worker commits, or all keep what they have.

        The source is read to its end in any case, so that no rank waits for another in a gather;
        unless one tensor takes longer than the publisher's deadline. The round waits for a server
        that is restarting, as long as the publisher's ``return_s`` says.

        Args:
            weight_version: Label. Default: ``round-1``, ``round-2`` and so on.

        Returns:
            The report, on the sender.

        Raises:
            WTransferError: No worker has the new weights; or, a `CommitError`, not every worker
                has them: its `report` names those that went back.
        """
        self._num_rounds += 1
        self.report = None
        try:
            whole = [ParamMeta(m.name, m.dtype, tuple(m.shape)) for m in self.source.metadata()]
            metadata = self._form.announce(whole)
        except BaseException:
            # The other ranks may have come to their gathers.
            for _ in _pass_over(self.source):
                pass
            raise
        if self.publisher is None:
            for _ in _pass_over(self.source):
                pass
            return None
        with self._stream.round(metadata, self._form.of(_pass_over(self.source))):
            label = weight_version or f"round-{self._num_rounds}"
            self.report = self.publisher.publish(label)
        return self.report.raise_unless_ok()

    def shutdown(self) -> None:
        """Let the workers leave."""
        if self.publisher is not None:
            self.publisher.close()


def init_info(
    backend: str, *, rank: int, options: dict[str, Any] | None = None, **publisher: Any
) -> TrainerInfo:
    """Return the init info with which vLLM's factory makes a trainer engine.

    Args:
        backend: Name of the engine in vLLM: ``shm``, ``file``, ``wtransfer-nccl``, a third party's.
        rank: Rank of this process among the trainer's; rank 0 sends.
        options: Options of the engine.
        **publisher: Further arguments of `wtransfer.Publisher`.

    Raises:
        ValueError: There is no such engine.
        TypeError: `rank` is no integer, or an argument is not for the caller to give.
    """
    if backend not in _infos:
        raise ValueError(
            f"wtransfer has no trainer engine {backend!r} here, only {', '.join(sorted(_infos))}"
        )
    if type(rank) is not int:
        # No other value is rank 0, which sends.
        raise TypeError(f"rank is {rank!r}, expected an integer")
    if given := sorted({"engine", "form", "hosts"} & publisher.keys()):
        raise TypeError(f"{', '.join(given)}: given by the backend, the source and the client")
    return _infos[backend](options or {}, publisher, rank=rank)


def _pass_over(source: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Return a fresh pass, which vLLM 0.33 has a method for."""
    found: Iterator[tuple[str, torch.Tensor]]
    found = source.iter_full() if hasattr(source, "iter_full") else iter(source)
    return found


_infos: dict[str, type[TrainerInfo]] = {}


def _register() -> None:
    """Enter every engine in vLLM's factory, by its name among vLLM's workers."""
    register_engines()
    for name in vllm_names("engines").values():
        info = type("TrainerInfo", (TrainerInfo,), {"backend": name})
        engine = type("TrainerEngine", (TrainerEngine,), {"init_info_cls": info})
        try:
            WeightTransferTrainerFactory.register_engine(name, engine)
        except ValueError:
            logger.warning("vLLM has a trainer engine %r of its own; wtransfer's is left out", name)
        else:
            _infos[name] = info


_register()
