"""Messages of trainer and workers to the engine, and to each other, under the field's names."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from typing import ClassVar

from wtransfer.engines.collective import (
    CollectiveInitInfo,
    CollectiveTrainerInitInfo,
    CollectiveUpdateInfo,
    check_counts,
    check_timeout,
)
from wtransfer.errors import GroupError

COMMUNICATORS = ("nccl", "gloo")
"""Kinds of groups."""
STAGING = ("device", "pinned", "none")
"""Places where a worker's engine may stage, if it does."""
UNIQUE_ID_NBYTES = 128
"""Bytes of NCCL's unique id."""
BUCKET_NBYTES = 64 << 20
"""Bytes of a bucket: enough for a fast link, and few enough to show progress."""
OPERATION_TIMEOUT_S = 600.0
"""Time after which torch gives a bucket up by itself, in seconds: its own default for NCCL."""


@dataclass
class NCCLWeightTransferInitInfo(CollectiveInitInfo):
    """Meeting place of the ranks, and the settings that they must agree on.

    Exactly one rendezvous is given: address and port, or NCCL's unique id.
    """

    master_address: str = ""
    """Host of the rendezvous."""
    master_port: int = 0
    """Its port."""
    rendezvous: str = ""
    """Name of this meeting; secret. Trainers of other makes send none."""
    world_size: int = 0
    """Ranks of the group, the trainer's included."""
    packed_buffer_size_bytes: int = BUCKET_NBYTES
    """Bytes of a bucket, about."""
    timeout_s: float = OPERATION_TIMEOUT_S
    """Time after which a rank gives a bucket up by itself, in seconds."""
    nccl_unique_id_b64: str | None = None
    """Standard base64 of the 128 bytes of an ``ncclUniqueId``."""
    packed: bool = True
    """True: tensors travel in buckets, as they always do."""
    packed_num_buffers: int = 2
    """Buckets that the trainer keeps; workers need not know."""
    communicator: str = "nccl"
    """``nccl``, or ``gloo`` for ranks without a GPU."""
    atomic: str = "device"
    """Staging place of this worker's engine: ``device``, ``pinned``, or ``none``: the engine hands
    out the contents of its buckets, and the receiver stages."""

    def __post_init__(self) -> None:
        check_rendezvous(self.master_address, self.master_port, self.nccl_unique_id_b64)
        check_choices(self.communicator, self.atomic, packed=self.packed)
        check_timeout(self.timeout_s)
        check_counts(self, "world_size", "rank_offset", "packed_buffer_size_bytes")
        if self.world_size <= self.rank_offset:
            raise ValueError(
                f"`rank_offset` is {self.rank_offset} and `world_size` {self.world_size}; the "
                "group needs a rank of the trainer before the first worker, and a worker"
            )

    def check_joinable(self) -> None:
        """Raise unless this engine can join the group.

        Raises:
            GroupError: Only the unique id is known, or a trainer of another make hosts the meeting.
        """
        if self.nccl_unique_id_b64 is not None:
            raise no_unique_id()
        if not self.rendezvous:
            raise GroupError(
                f"the trainer at {self.master_address}:{self.master_port} names no `rendezvous`: "
                "it is not one of wtransfer, and would not understand this engine; let it use "
                "wtransfer.Publisher(engine='nccl'), or the serving engine's own nccl backend"
            )


@dataclass
class NCCLWeightTransferUpdateInfo(CollectiveUpdateInfo):
    """One update. Tensors are named only where the engine was given no layout."""

    packed: bool = False
    """Ignored, for callers of the seed era that say it here: tensors always travel in buckets."""


@dataclass
class NCCLTrainerInitInfo(CollectiveTrainerInitInfo):
    """Options of the engine."""

    backend: ClassVar[str] = "nccl"

    packed_buffer_size_bytes: int = BUCKET_NBYTES
    """Bytes of a bucket, about; a bucket is at least as large as the largest tensor."""
    timeout_s: float | None = None
    """Time after which a rank gives a bucket up by itself, if no control channel does, in seconds;
    None: 600 for NCCL, for gloo twice the publisher's deadline."""
    master_address: str = ""
    """The field's name for `host`."""
    master_port: int = 0
    """The field's name for `port`."""
    nccl_unique_id_b64: str | None = None
    """Refused: torch's group makes its unique id itself."""
    packed: bool = True
    """True: tensors travel in buckets, as they always do."""
    packed_num_buffers: int = 2
    """Buckets in device memory: one is filled while the others travel."""
    communicator: str = "nccl"
    """``nccl``; ``gloo`` runs the same engine in host memory, on machines without a GPU."""
    device: str = "cuda"
    """This trainer's device; without a number the one of ``LOCAL_RANK``, else the first."""
    atomic: str = "device"
    """Staging place of updates in workers' engines: ``device``, ``pinned`` memory, or ``none``."""

    def __post_init__(self) -> None:
        self._take_address()
        super().__post_init__()
        if self.nccl_unique_id_b64 is not None:
            check_rendezvous(self.master_address, self.master_port, self.nccl_unique_id_b64)
            raise ValueError(f"{no_unique_id()}")
        check_choices(self.communicator, self.atomic, packed=self.packed)
        if self.timeout_s is None and self.communicator == "nccl":
            self.timeout_s = OPERATION_TIMEOUT_S
        self.packed_num_buffers = int(self.packed_num_buffers)
        if self.packed_num_buffers < 2:  # noqa: PLR2004  # one to fill, one that travels
            raise ValueError(
                f"packed_num_buffers is {self.packed_num_buffers}, expected 2 or more: one is "
                "filled while another travels"
            )

    def _take_address(self) -> None:
        default = CollectiveTrainerInitInfo()
        if self.master_address:
            if self.host not in (default.host, self.master_address):
                raise ValueError("give `host` or `master_address`, which are the same, not both")
            self.host = self.master_address
        if int(self.master_port):
            if int(self.port) not in (default.port, int(self.master_port)):
                raise ValueError("give `port` or `master_port`, which are the same, not both")
            self.port = self.master_port = int(self.master_port)


def check_rendezvous(address: str, port: int, unique_id: str | None) -> None:
    """Raise unless exactly one way to meet is given, and whole.

    Args:
        address: Host, or nothing.
        port: Its port, or 0.
        unique_id: Base64 of NCCL's unique id, or None.

    Raises:
        ValueError: None, both, half of one, or no unique id.
    """
    if unique_id is None:
        if not address or not port:
            raise ValueError(
                "give exactly one rendezvous: `master_address` and `master_port` (got "
                f"{address!r} and {port!r}), or `nccl_unique_id_b64`"
            )
        return
    if address or port:
        raise ValueError(
            "give exactly one rendezvous: got `nccl_unique_id_b64` and `master_address` or "
            "`master_port` as well"
        )
    try:
        nbytes = len(base64.b64decode(unique_id, validate=True))
    except (binascii.Error, ValueError, TypeError) as error:
        raise ValueError(f"`nccl_unique_id_b64` is not standard base64: {error}") from error
    if nbytes != UNIQUE_ID_NBYTES:
        raise ValueError(
            f"`nccl_unique_id_b64` has {nbytes} bytes, an ncclUniqueId has {UNIQUE_ID_NBYTES}"
        )


def check_choices(communicator: str, atomic: str, *, packed: bool) -> None:
    """Raise unless these are existing choices.

    Raises:
        ValueError: There is no such choice; the error names it.
    """
    if communicator not in COMMUNICATORS:
        raise ValueError(f"communicator is {communicator!r}, expected one of {COMMUNICATORS}")
    if atomic not in STAGING:
        raise ValueError(f"atomic is {atomic!r}, expected one of {STAGING}")
    # The CLI hands over strings.
    if packed not in (True, "true", "True", "1"):
        raise ValueError("packed is false; this engine always sends tensors in buckets")


def no_unique_id() -> GroupError:
    """Return the error for groups of which only NCCL's unique id is known."""
    return GroupError(
        "`nccl_unique_id_b64` cannot be used: this engine forms its group by torch's "
        "ProcessGroupNCCL, which makes its unique id itself and cannot join by another's; meet by "
        "`master_address` and `master_port`"
    )
