"""The worker's side of a spec in the seed's style: one handler for each direction."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from wtransfer.specs.interface import GPULoadStoreSpec, OffloadingWorker, TransferResult

if TYPE_CHECKING:
    from collections.abc import Iterable

    from wtransfer.specs.interface import LoadStoreSpec

logger = logging.getLogger(__name__)


class _NumberedBlocks(GPULoadStoreSpec):
    """Blocks of the cache as the seed hands them over: numbers in an array."""

    def __init__(self, spec: GPULoadStoreSpec) -> None:
        import numpy as np

        super().__init__(list(spec.block_ids), spec.group_sizes, spec.block_indices)
        self.block_ids = np.asarray(spec.block_ids, dtype=np.int64)  # type: ignore[assignment]


class HandlersWorker(OffloadingWorker):
    """Hands every job to the handler of its direction.

    Args:
        handlers: As ``get_handlers`` yields them: type of the source, type of the destination, and
            the handler between them.
    """

    def __init__(self, handlers: Iterable[tuple[Any, Any, Any]]) -> None:
        self._by_media = {
            (source.medium(), destination.medium()): handler
            for source, destination, handler in handlers
        }
        self._handlers = list({id(each): each for each in self._by_media.values()}.values())

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Hand a store to its handler."""
        return self._submit(job_id, _NumberedBlocks(src_spec), dst_spec)

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,  # noqa: ARG002  # handlers know of no such thing
    ) -> bool:
        """Hand a load to its handler."""
        return self._submit(job_id, src_spec, _NumberedBlocks(dst_spec))

    def get_finished(self) -> list[TransferResult]:
        """Return what ended, whether told as results or as pairs of number and success."""
        return [
            TransferResult(*each) if isinstance(each, tuple) else each
            for handler in self._handlers
            for each in handler.get_finished()
        ]

    def wait(self, job_ids: set[int]) -> None:
        """Let every handler wait for its own among these jobs."""
        for handler in self._handlers:
            handler.wait(job_ids)

    def shutdown(self) -> None:
        """Shut down the handlers that can be; once."""
        handlers, self._handlers, self._by_media = self._handlers, [], {}
        for handler in handlers:
            if hasattr(handler, "shutdown"):
                handler.shutdown()

    def _submit(self, job_id: int, source: Any, destination: Any) -> bool:
        media = (source.medium(), destination.medium())
        handler = self._by_media.get(media)
        if handler is None:
            logger.error("no handler copies from %s to %s; job %d failed", *media, job_id)
            return False
        try:
            return bool(handler.transfer_async(job_id, (source, destination)))
        except Exception:
            # A job that fails is a result, never an exception.
            logger.exception("job %d from %s to %s could not be begun", job_id, *media)
            return False
