"""Connector ``SharedStorageConnector``: prefix KV as files in a folder that instances share.

The connector is `OffloadingConnector` with the tier ``file`` (`wtransfer.specs.file`) where no
other is named. KV that an instance computes is stored, one file for each block and rank, and every
instance with the folder loads it. The folder may be on any file system that the instances share; on
one host they may be started and killed at any time. A disk that is full, read-only, slow or broken
costs hits, and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from wtransfer.connectors.offloading.connector import OffloadingConnector

if TYPE_CHECKING:
    from collections.abc import Mapping


class SharedStorageConnector(OffloadingConnector):
    """Store and load prefixes.

    Options in ``kv_connector_extra_config``: those of `wtransfer.specs.file.FileOptions` and
    `wtransfer.specs.tier.TierOptions`; ``spec_name`` names another tier.
    """

    scheduler_cls = "wtransfer.connectors.offloading.scheduler:SharedStorageScheduler"
    worker_cls = "wtransfer.connectors.offloading.worker:SharedStorageSide"
    example_options: ClassVar[Mapping[str, Any]] = {"shared_storage_path": "/mnt/kv"}
    options_cls = ("wtransfer.specs.file:FileOptions", "wtransfer.specs.tier:TierOptions")
