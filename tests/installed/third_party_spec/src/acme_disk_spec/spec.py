"""The spec: one file for each block."""

from pathlib import Path

from acme_disk_spec.manager import DiskManager
from acme_disk_spec.worker import DiskWorker
from wtransfer import OffloadingSpec


class DiskSpec(OffloadingSpec):
    def __init__(self, config):
        super().__init__(config)
        self.manager = DiskManager(
            self.extra_config["disk_bytes_to_use"]
            // (config.worker_kv_bytes_per_block * self.blocks_per_chunk)
        )
        self.worker = None

    def get_manager(self):
        return self.manager

    def get_worker(self, kv_caches):
        if self.worker is None:
            folder = Path(self.extra_config["folder"])
            rank = self.config.parallel.rank
            self.worker = DiskWorker(folder, kv_caches, self.blocks_per_chunk, rank)
        return self.worker
