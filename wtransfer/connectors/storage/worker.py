"""A worker's side of ``SharedStorageConnector``."""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from wtransfer.blocks import BlockGeometry
from wtransfer.connectors.interface import ConnectorWorker
from wtransfer.connectors.settings import Instance
from wtransfer.connectors.storage.counts import Counts
from wtransfer.connectors.storage.files import BlockFiles
from wtransfer.connectors.storage.messages import StorageHandshake, StorageSaid
from wtransfer.connectors.storage.options import StorageOptions
from wtransfer.connectors.storage.pages import CachePages
from wtransfer.connectors.storage.room import Room
from wtransfer.connectors.storage.store import Store
from wtransfer.errors import ConnectorRoleError, StorageError
from wtransfer.kv.fence import WorkerFence

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from wtransfer.connectors.storage.messages import Transfer
    from wtransfer.transport.files import Folder
    from wtransfer.weights import WeightVersion

_BATCH_NBYTES = 32 << 20
_APART_NS = 1000
_OTHERS_DOING = frozenset({errno.ENOENT, errno.EAGAIN})


class _Block(NamedTuple):
    name: bytes
    number: int
    used_ns: int


class StorageWorker(ConnectorWorker):
    """Reads and writes files. Within a step, on the model's thread.

    Args:
        config: The serving engine's configuration.
        kv_cache_config: Not needed.

    Raises:
        ConnectorOptionError: An option cannot be used.
        StorageError: The shared folder cannot.
    """

    def __init__(self, config: Any, kv_cache_config: Any = None) -> None:
        super().__init__(config, kv_cache_config)
        self._instance = Instance.of(config)
        options = StorageOptions.of(config.kv_transfer_config.kv_connector_extra_config)
        self._fence = WorkerFence(self._instance.rank)
        self._counts = Counts()
        self._store = Store(options.shared_storage_path)
        self._room = Room(self._store, options.max_bytes, self._counts)
        self._pages: CachePages | None = None
        self._files: BlockFiles | None = None
        self._geometry = b""
        self._errors: set[int] = set()
        self._done, self._saved = -1, -1
        self._began: WeightVersion | None = None

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take the caches.

        Raises:
            ConnectorOptionError: They cannot be copied by block.
            ManifestError: Likewise, for their dtype.
        """
        instance, self._pages = self._instance, CachePages(kv_caches)
        geometry = BlockGeometry(
            instance.block_size, self._pages.pages, instance.num_ranks, instance.model
        )
        self._geometry = geometry.digest
        self._files = BlockFiles(self._store, geometry, instance.rank)

    def _registered(self) -> tuple[CachePages, BlockFiles]:
        if self._pages is None or self._files is None:
            raise ConnectorRoleError(
                f"{type(self).__name__} has no cache yet; call register_kv_caches before any step"
            )
        return self._pages, self._files

    # -- loading

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Load what the step needs; it is there when this returns, or named as an error."""
        for load in self.metadata.loads:
            self._load(load)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: what could be loaded is there."""

    def _load(self, load: Transfer) -> None:
        num_loaded = 0
        if self._fence.admits(load.versions):
            try:
                num_loaded = self._loaded(load)
            except Exception as error:
                self._counts.fail("load_failures", "error", error)
        # Else the weights have changed before, or even meanwhile.
        if not self._fence.admits(load.versions):
            num_loaded = 0
            self._counts.add("loads_fenced")
        self._counts.add("blocks_loaded", num_loaded)
        # Those after a missing one are computed in any case.
        self._errors.update(load.block_ids[num_loaded:])

    def _loaded(self, load: Transfer) -> int:
        """Load a request's blocks up to the first that is missing; return how many."""
        shelf = self._store.shelf(load.shelf)
        if shelf is None:
            self._counts.fail("load_failures", "absent", load.shelf)
            return 0
        num_loaded = 0
        with shelf:
            for blocks in self._batches(load):
                num_loaded += (num := self._load_batch(shelf, blocks))
                if num < len(blocks):
                    break
        return num_loaded

    def _load_batch(self, shelf: Folder, blocks: list[_Block]) -> int:
        pages, files = self._registered()
        rows = pages.rows(len(blocks))
        num = 0
        for block, row in zip(blocks, rows.numpy(), strict=True):
            reason = files.read(shelf, block.name, memoryview(row), block.used_ns)
            if reason is not None:
                self._counts.fail("load_failures", reason, f"{block.name.hex()} in {shelf.path!r}")
                break
            num += 1
        pages.scatter([block.number for block in blocks[:num]], rows[:num])
        return num

    def _batches(self, transfer: Transfer) -> Iterator[list[_Block]]:
        """Yield portions of blocks that do not take much memory."""
        _, files = self._registered()
        # Nor more than others may overlook.
        size = max(1, min(_BATCH_NBYTES, self._room.portion) // files.file_nbytes)
        # The beginning of a prefix counts as used last: without it the rest is of no use.
        used_ns = time.time_ns() - transfer.first * _APART_NS
        times = range(used_ns, used_ns - len(transfer.names) * _APART_NS, -_APART_NS)
        blocks = list(map(_Block, transfer.names, transfer.block_ids, times))
        for start in range(0, len(blocks), size):
            yield blocks[start : start + size]

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that could not be loaded."""
        errors, self._errors = self._errors, set()
        return errors

    # -- saving

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: blocks are stored whole, once all layers have them."""

    def wait_for_save(self) -> None:
        """Store what the step has computed. It never raises: what fails is computed once more."""
        self._saved = self.metadata.step
        self._save_all(self.metadata.saves)

    def get_finished(
        self,
        finished_req_ids: set[str],  # noqa: ARG002
    ) -> tuple[set[str] | None, set[str] | None]:
        """Store the last blocks of requests that have ended; name these as sent, stored or not."""
        parting = self.metadata.parting if self.has_connector_metadata() else []
        self._save_all(parting)
        return {each.request_id for each in parting} or None, None

    def _save_all(self, saves: Sequence[Transfer]) -> None:
        for save in saves:
            if not self._fence.admits(save.versions):
                self._counts.add("saves_fenced")
                continue
            try:
                self._save(save)
            except Exception as error:
                self._counts.fail("save_failures", _word(error), error)
                self._room.fill_up(error)
                # A disk that fails is not asked for each block. But what is missing or locked is
                # so by somebody else's doing, and the next block is another matter.
                if _errno(error) not in _OTHERS_DOING:
                    return

    def _save(self, save: Transfer) -> None:
        _, files = self._registered()
        for blocks in self._batches(save):
            new = self._missing(save.shelf, blocks)
            if not new:
                continue
            if not self._room.make(len(new) * files.file_nbytes):
                self._counts.fail("save_failures", "no_room", "max_bytes is too small")
                return
            # Not before: a shelf on which nothing comes to be would stay for ever.
            with self._store.make_shelf(save.shelf) as shelf:
                self._save_batch(shelf, new)

    def _missing(self, shelf_name: str, blocks: list[_Block]) -> list[_Block]:
        """Return those of which there is no file yet."""
        _, files = self._registered()
        try:
            shelf = self._store.shelf(shelf_name)
        except StorageError:
            # Something else has its name, which is set aside as soon as there is room.
            return blocks
        if shelf is None:
            return blocks
        with shelf:
            return [block for block in blocks if not files.has(shelf, block.name)]

    def _save_batch(self, shelf: Folder, blocks: list[_Block]) -> None:
        pages, files = self._registered()
        rows = pages.gather([block.number for block in blocks])
        for block, row in zip(blocks, rows.numpy(), strict=True):
            files.write(shelf, block.name, memoryview(row), block.used_ns)
            self._counts.add("blocks_saved")

    # -- the scheduler's side hears

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Take what the scheduler's side told for the step that begins."""
        super().bind_connector_metadata(connector_metadata)
        self._done = connector_metadata.step
        self._began = self._fence.version()

    def build_connector_worker_meta(self) -> StorageSaid:
        """Return which weights there are, and how far this worker has come."""
        rank = self._instance.rank
        began = {rank: self._began}
        return StorageSaid(self._fence.report(), {rank: self._done}, {rank: self._saved}, began)

    def get_handshake_metadata(self) -> StorageHandshake:
        """Return which weights there are, and how blocks are laid out."""
        return StorageHandshake(self._fence.version(), self._geometry)

    def get_stats(self) -> dict[str, float]:
        """Return what was loaded, saved and evicted, and what failed, by reason."""
        return self._counts.numbers()

    def shutdown(self) -> None:
        """Close the folder, and let go of the cache. A second call does nothing."""
        self._store.close()
        self._pages = self._files = None


def _errno(error: Exception) -> int | None:
    number: int | None = getattr(error.__cause__, "errno", None)
    return number


def _word(error: Exception) -> str:
    number = _errno(error)
    return errno.errorcode.get(number, "error").lower() if number else "error"
