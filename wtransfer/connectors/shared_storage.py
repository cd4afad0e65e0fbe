"""Connector ``SharedStorageConnector``: prefix KV as files in a folder that instances share.

Whatever has been computed is stored, one file for each block and rank, and whichever instance gets
a request with the same beginning loads it. The folder may be on any file system that the instances
share; on one host they may be started and killed at any time.

1. S looks for names: a file of that name is there for every rank, or it is a miss. What it has
   seen it looks for again after half a second, but for the end of a prefix, which goes first. Those
   who lay blocks out in other ways look elsewhere.
2. W reads each file into memory of its own, and compares header, key, geometry, length and checksum
   before a byte of it reaches the cache. A file that is not what it should be is set aside.
3. W writes what was computed, to a temporary file that is then renamed: before ``wait_for_save``
   returns, or for a request that ended before S knew that nothing of its beginning had failed to
   load, in ``get_finished``. What others have put into the cache is not written.

Nothing that a disk does, full, read-only or broken, makes an answer wrong or ends a step. It costs
hits, and time: reading and writing is done within the step, so a slow disk makes steps slow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from wtransfer.connectors.interface import KVConnectorBase_V1

if TYPE_CHECKING:
    from collections.abc import Mapping


class SharedStorageConnector(KVConnectorBase_V1):
    """Stores and loads prefixes; options in ``kv_connector_extra_config``: `StorageOptions`."""

    scheduler_cls = "wtransfer.connectors.storage.scheduler:StorageScheduler"
    worker_cls = "wtransfer.connectors.storage.worker:StorageWorker"
    names_weights = True
    example_options: ClassVar[Mapping[str, Any]] = {"shared_storage_path": "/mnt/kv"}

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: Mapping[str, Any]) -> bool:  # noqa: ARG003
        """Return False: blocks come and go whole, all layers at once."""
        return False
