"""The class that a config names; its sides are imported where they are needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from wtransfer.connectors.interface import KVConnectorBase_V1

if TYPE_CHECKING:
    from collections.abc import Mapping


class OffloadingConnector(KVConnectorBase_V1):
    """Drive an offloading spec; KV of other weights is a miss (`wtransfer.kv.fence`).

    The spec and its options stand in ``kv_connector_extra_config``: ``spec_name``,
    ``spec_module_path``, and the options that the spec asks for.

    1. S looks blocks up in the spec's manager, and prepares the jobs that load or store them.
    2. W gives the jobs to the spec's worker, stores only after a forward pass that counts.
    3. A request waits for its load, and others are computed meanwhile.
    4. The blocks of a request that ends stay until they are stored.
    5. A spec that reports a job neither by ``deadline_s`` nor a tenth later is named in the log and
       counted (``overdue_jobs_total``), and asked for nothing until it has reported. No request
       waits for the job: one that was to load begins anew, in other blocks, where the host lets
       connectors hold blocks (``bind_gpu_block_pool``); elsewhere it waits. The blocks of an
       overdue load stay held until the report (``overdue_blocks_held``), for a thread or a process
       of the spec may still write into them; so they are lost where that never comes.
    6. Of a model with several KV cache groups each block has a key of its own. Of a window are
       loaded the last blocks that the tokens to come attend to, and the blocks of a window are held
       while they are stored.
    """

    scheduler_cls = "wtransfer.connectors.offloading.scheduler:OffloadingScheduler"
    worker_cls = "wtransfer.connectors.offloading.worker:OffloadingSide"
    names_weights = True
    supports_hma = True
    example_options: ClassVar[Mapping[str, Any]] = {"cpu_bytes_to_use": 8 << 30}
    options_cls: ClassVar[tuple[type | str, ...]] = (
        "wtransfer.connectors.offloading.scheduler:OffloadingOptions",
    )

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: Mapping[str, Any]) -> bool:  # noqa: ARG003
        """Return False: blocks come and go whole, all layers at once."""
        return False
