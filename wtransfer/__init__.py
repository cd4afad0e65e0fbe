"""A plug-in layer for what an inference fleet moves: weights, and KV cache to peers and tiers.

Importing it is cheap: neither torch nor any plug-in is imported until it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wtransfer import errors
    from wtransfer.calls import Announcer
    from wtransfer.checkpoint.source import CheckpointSource
    from wtransfer.config import (
        KVCacheConfig,
        KVTransferConfig,
        ModelConfig,
        OffloadingConfig,
        ParallelConfig,
        ServingConfig,
        WeightTransferConfig,
    )
    from wtransfer.connectors.factory import KVConnectorFactory
    from wtransfer.connectors.interface import (
        ConnectorScheduler,
        ConnectorWorker,
        KVConnectorBase,
        KVConnectorBase_V1,
        KVConnectorRole,
    )
    from wtransfer.dtypes import DTYPES
    from wtransfer.engines.factory import (
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )
    from wtransfer.engines.interface import (
        TrainerInitInfo,
        TrainerWeightTransferEngine,
        WeightSyncClient,
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferInitRequest,
        WeightTransferUpdateInfo,
        WeightTransferUpdateRequest,
    )
    from wtransfer.errors import WTransferError
    from wtransfer.registry import hooks
    from wtransfer.registry.hooks import hookimpl
    from wtransfer.specs.factory import OffloadingSpecFactory
    from wtransfer.specs.interface import (
        OffloadingManager,
        OffloadingSpec,
        OffloadingWorker,
        Tier,
    )
    from wtransfer.weight_sync.http.server import WorkerServer
    from wtransfer.weight_sync.trainer.publisher import Publisher
    from wtransfer.weight_sync.trainer.sharded import ShardedSource, TrainerRank
    from wtransfer.weight_sync.trainer.stream_source import StreamSource
    from wtransfer.weight_sync.worker.session import WorkerSession
    from wtransfer.weight_version import process_weights
    from wtransfer.weights import (
        LoadWeights,
        ParamMeta,
        TensorSpec,
        WeightSource,
        WeightTarget,
    )

    __version__: str

__all__ = [
    "DTYPES",
    "Announcer",
    "CheckpointSource",
    "ConnectorScheduler",
    "ConnectorWorker",
    "KVCacheConfig",
    "KVConnectorBase",
    "KVConnectorBase_V1",
    "KVConnectorFactory",
    "KVConnectorRole",
    "KVTransferConfig",
    "LoadWeights",
    "ModelConfig",
    "OffloadingConfig",
    "OffloadingManager",
    "OffloadingSpec",
    "OffloadingSpecFactory",
    "OffloadingWorker",
    "ParallelConfig",
    "ParamMeta",
    "Publisher",
    "ServingConfig",
    "ShardedSource",
    "StreamSource",
    "TensorSpec",
    "Tier",
    "TrainerInitInfo",
    "TrainerRank",
    "TrainerWeightTransferEngine",
    "WTransferError",
    "WeightSource",
    "WeightSyncClient",
    "WeightTarget",
    "WeightTransferConfig",
    "WeightTransferEngine",
    "WeightTransferEngineFactory",
    "WeightTransferInitInfo",
    "WeightTransferInitRequest",
    "WeightTransferTrainerFactory",
    "WeightTransferUpdateInfo",
    "WeightTransferUpdateRequest",
    "WorkerServer",
    "WorkerSession",
    "__version__",
    "errors",
    "hookimpl",
    "hooks",
    "process_weights",
]

_MODULES = {"errors": "wtransfer.errors", "hooks": "wtransfer.registry.hooks"}

_MEMBERS = {
    "wtransfer.calls": ("Announcer",),
    "wtransfer.config": (
        "KVCacheConfig",
        "KVTransferConfig",
        "ModelConfig",
        "OffloadingConfig",
        "ParallelConfig",
        "ServingConfig",
        "WeightTransferConfig",
    ),
    "wtransfer.connectors.factory": ("KVConnectorFactory",),
    "wtransfer.connectors.interface": (
        "ConnectorScheduler",
        "ConnectorWorker",
        "KVConnectorBase",
        "KVConnectorBase_V1",
        "KVConnectorRole",
    ),
    "wtransfer.engines.factory": ("WeightTransferEngineFactory", "WeightTransferTrainerFactory"),
    "wtransfer.engines.interface": (
        "TrainerInitInfo",
        "TrainerWeightTransferEngine",
        "WeightSyncClient",
        "WeightTransferEngine",
        "WeightTransferInitInfo",
        "WeightTransferInitRequest",
        "WeightTransferUpdateInfo",
        "WeightTransferUpdateRequest",
    ),
    "wtransfer.checkpoint.source": ("CheckpointSource",),
    "wtransfer.weight_sync.trainer.publisher": ("Publisher",),
    "wtransfer.weight_sync.worker.session": ("WorkerSession",),
    "wtransfer.weight_sync.trainer.sharded": ("ShardedSource", "TrainerRank"),
    "wtransfer.weight_sync.trainer.stream_source": ("StreamSource",),
    "wtransfer.weight_sync.http.server": ("WorkerServer",),
    "wtransfer.errors": ("WTransferError",),
    "wtransfer.registry.hooks": ("hookimpl",),
    "wtransfer.dtypes": ("DTYPES",),
    "wtransfer.weight_version": ("process_weights",),
    "wtransfer.weights": (
        "LoadWeights",
        "ParamMeta",
        "TensorSpec",
        "WeightSource",
        "WeightTarget",
    ),
    "wtransfer.specs.factory": ("OffloadingSpecFactory",),
    "wtransfer.specs.interface": (
        "OffloadingManager",
        "OffloadingSpec",
        "OffloadingWorker",
        "Tier",
    ),
}

_HOMES = {name: module for module, names in _MEMBERS.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, and keep it."""
    if name in _MODULES:
        value: Any = importlib.import_module(_MODULES[name])
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    elif name == "__version__":
        value = _installed_version()
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, also those that are not imported yet."""
    return sorted({*globals(), *__all__})


def _installed_version() -> str:
    import importlib_metadata

    return importlib_metadata.version(__name__)
