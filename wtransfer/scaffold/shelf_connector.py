"""KV connector `shelf-connector`: blocks of KV cache as files in a folder that instances share."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar

import torch

from wtransfer import KVConnectorBase_V1, Tier
from wtransfer.connectors.interface import ConnectorScheduler, ConnectorWorker, KVConnectorMetadata
from wtransfer.connectors.serving_config import Instance
from wtransfer.connectors.tracked_requests import TrackedRequests, only_group
from wtransfer.kv.header import CHECKSUM_NBYTES, checksum
from wtransfer.kv.keys import hash_blocks

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Options:
    """Options in ``kv_connector_extra_config``; all others are refused."""

    folder: str
    """Where the files are; every process of every instance has to see it."""


@dataclass
class Step(KVConnectorMetadata):
    """The work of one step, name and number of each block: plain data, which travels."""

    loads: list[tuple[str, int]] = field(default_factory=list)
    saves: list[tuple[str, int]] = field(default_factory=list)


class ShelfConnectorScheduler(ConnectorScheduler):
    """Look blocks up by name, and plan loads and saves."""

    def __init__(self, config: Any, kv_cache_config: Any = None) -> None:
        super().__init__(config, kv_cache_config)
        self.folder, self.instance = _folder(self.options), Instance.of(config)
        self.progress = TrackedRequests()
        self.first: dict[str, int] = {}
        self.loads: list[tuple[str, int]] = []

    def on_new_request(self, request: Any) -> None:
        """Follow a request from now on."""
        self.progress.know(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Count the tokens in blocks that every rank has saved; the last token is computed."""
        size = self.instance.block_size
        first, last = num_computed_tokens // size, (request.num_tokens - 1) // size
        self.first[request.request_id] = first
        found = list(takewhile(self._is_saved, self._names(request)[first:last]))
        return len(found) * size, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan the load of as many tokens as the host wants, into the blocks that it gives."""
        first = self.first[request.request_id]
        part = slice(first, first + num_external_tokens // self.instance.block_size)
        block_ids = only_group(blocks.get_block_ids())[part]
        self.loads += zip(self._names(request)[part], block_ids, strict=True)

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        """Return the planned loads, and saves of the blocks that this step fills."""
        step, self.loads, size = Step(self.loads), [], self.instance.block_size
        for each in self.progress.step(scheduler_output):
            part = slice(each.num_before // size, each.num_computed // size)
            # A host may not know the last tokens yet: their block is not named, nor saved.
            step.saves += zip(self._names(each.request)[part], each.block_ids[part], strict=False)
        return step

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget a request; its blocks are free, as saves end within their step."""
        self.progress.forget(request.request_id)
        self.first.pop(request.request_id, None)
        return False, None

    def _names(self, request: Any) -> list[str]:
        """Name each block by all tokens up to its end.

        The token ids that a connector sees are encoded with weights, salt and media.
        """
        size = self.instance.block_size
        return [name.hex() for name in hash_blocks(request.all_token_ids, size)]

    def _is_saved(self, name: str) -> bool:
        return all((self.folder / f"{name}.{n}").exists() for n in range(self.instance.num_ranks))


class ShelfConnectorWorker(ConnectorWorker):
    """Copy blocks between the caches of one rank and its files."""

    def __init__(self, config: Any, kv_cache_config: Any = None) -> None:
        super().__init__(config, kv_cache_config)
        self.folder, self.rank = _folder(self.options), Instance.of(config).rank
        self.caches: Mapping[str, torch.Tensor] = {}
        self.staged: dict[str, dict[str, torch.Tensor]] = {}
        self.not_loaded: set[int] = set()

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Keep the caches, by layer; dimension 0 counts blocks."""
        self.caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load the blocks of this step."""
        for name, block in self.metadata.loads:
            if not self._load(self.folder / f"{name}.{self.rank}", block):
                self.not_loaded.add(block)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return at once: loads end in `start_load_kv`."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Copy one layer of the blocks that the step fills."""
        for name, block in self.metadata.saves:
            page = kv_layer[block].flatten().view(torch.uint8).to("cpu", copy=True)
            # Equal prompts in one step have the same blocks: the second copy is the first.
            self.staged.setdefault(name, {})[layer_name] = page

    def wait_for_save(self) -> None:
        """Write the copies: the step counts. A save that fails is a later miss."""
        for name, pages in self.staged.items():
            data = torch.cat([pages[layer] for layer in self.caches]).numpy().tobytes()
            try:
                path = self.folder / f"{name}.{self.rank}"
                Tier.write_whole(path, memoryview(checksum(data) + data))
            except OSError as error:
                logger.warning("block %s was not saved: %s", name, error)

    def clear_connector_metadata(self) -> None:
        """End the step; copies of one that does not count are dropped."""
        super().clear_connector_metadata()
        self.staged = {}

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that the host has to compute instead."""
        not_loaded, self.not_loaded = self.not_loaded, set()
        return not_loaded

    def _load(self, path: Path, block: int) -> bool:
        pages = [cache[block] for cache in self.caches.values()]
        try:
            found = path.read_bytes()
        except OSError:
            return False
        data = bytearray(found[CHECKSUM_NBYTES:])
        # All is compared before one byte is written.
        is_whole = len(data) == sum(page.nbytes for page in pages)
        if not is_whole or checksum(data) != found[:CHECKSUM_NBYTES]:
            return False
        rest = torch.frombuffer(data, dtype=torch.uint8)
        for page in pages:
            page.copy_(rest[: page.nbytes].view(page.dtype).view(page.shape))
            rest = rest[page.nbytes :]
        return True


class ShelfConnector(KVConnectorBase_V1):
    """The connector: names its two sides, which live in different processes."""

    scheduler_cls = ShelfConnectorScheduler
    worker_cls = ShelfConnectorWorker
    options_cls = Options
    example_options: ClassVar[Mapping[str, Any]] = {"folder": "/mnt/kv"}


def _folder(options: Options) -> Path:
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
