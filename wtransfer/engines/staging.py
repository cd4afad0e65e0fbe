"""What a worker has received of one round, digested as it arrives, proven before it is applied."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from wtransfer.errors import (
    DigestMismatchError,
    IncompleteUpdateError,
    ManifestError,
    RoundAbortedError,
    SchemaError,
    StagingMemoryError,
)
from wtransfer.transport.digests import copy_digest, digest
from wtransfer.transport.tensors import byte_view, dtype_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from wtransfer.manifest import Manifest, Piece


class Staging:
    """The tensors of one round beside the model, which goes on serving the old ones.

    Used by one thread; `stop` may be called by any.

    Args:
        manifest: What will arrive.
        copies: Whether tensors must be copied before `load_weights` returns; otherwise views of
            the engine's memory are kept.
        on_progress: Called with the number of bytes staged so far after each call.
    """

    def __init__(
        self, manifest: Manifest, *, copies: bool, on_progress: Callable[[int], None]
    ) -> None:
        self.manifest = manifest
        self.tensors: dict[str, torch.Tensor] = {}
        self.nbytes = 0
        self._pieces = {piece.name: piece for piece in manifest.pieces}
        self._digests: dict[str, str] = {}
        self._copies = copies
        self._on_progress = on_progress
        self._stopped: str | None = None

    def stop(self, reason: str) -> None:
        """Let every further `load_weights` raise, so that the engine's loop ends."""
        self._stopped = reason

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Stage tensors. This is the callable that engines are given.

        Args:
            weights: Pairs of name and tensor, any number of them, in any order.

        Returns:
            The names that were staged.

        Raises:
            RoundAbortedError: The round is over.
            ManifestError: A name that the plan does not have, or one that came before.
            SchemaError: Another dtype or shape than planned.
            StagingMemoryError: No memory left.
        """
        staged = set()
        # Also for none: so an engine asks, while it prepares, whether it shall go on.
        self._check_stopped()
        for name, tensor in weights:
            self._check_stopped()
            piece = self._pieces.get(name)
            if (
                piece is None
                or name in self.tensors
                or dtype_name(tensor.dtype) != piece.dtype
                or tensor.shape != piece.shape
            ):
                raise self._unexpected(name, tensor, piece)
            self._stage(piece, tensor)
            staged.add(name)
        self._on_progress(self.nbytes)
        return staged

    def _check_stopped(self) -> None:
        if self._stopped is not None:
            raise RoundAbortedError(f"the round was ended: {self._stopped}")

    def _unexpected(
        self, name: str, tensor: torch.Tensor, piece: Piece | None
    ) -> ManifestError | SchemaError:
        if piece is None:
            return ManifestError(
                f"the engine delivered {name!r}, which the plan does not have", piece=str(name)
            )
        if name in self.tensors:
            return ManifestError(f"the engine delivered {name!r} twice", piece=name)
        return SchemaError(
            f"the engine delivered {name!r} as {dtype_name(tensor.dtype)} "
            f"{list(tensor.shape)}, the plan says {piece.dtype} {list(piece.shape)}",
            piece=name,
        )

    def _stage(self, piece: Piece, tensor: torch.Tensor) -> None:
        try:
            # An object of our own: the engine may point its own elsewhere when this returns.
            kept = tensor.detach()
            if self._copies:
                kept, digested = self._copy(kept)
            else:
                digested = digest(kept, self.manifest.algorithm)
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise out_of_memory(piece.nbytes, error) from error
        except (RuntimeError, OSError) as error:
            if not is_out_of_memory(error):
                raise
            raise out_of_memory(piece.nbytes, error) from error
        self.tensors[piece.name] = kept
        self._digests[piece.name] = digested
        self.nbytes += kept.nbytes

    def _copy(self, tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
        algorithm = self.manifest.algorithm
        if tensor.device.type != "cpu":
            kept = tensor.clone()
            return kept, digest(kept, algorithm)
        kept = torch.empty(tensor.shape, dtype=tensor.dtype)
        return kept, copy_digest(byte_view(kept), tensor, algorithm).hexdigest

    def verify(self, digests: Sequence[str], canonical: Mapping[str, str]) -> list[str]:
        """Prove that everything arrived as it was sent.

        Args:
            digests: The trainer's, in plan order.
            canonical: Name or alias -> name of the storage; names of one storage must agree. Empty
                where no storage has two names.

        Returns:
            This worker's digests, in plan order.

        Raises:
            IncompleteUpdateError: Pieces never arrived.
            DigestMismatchError: Pieces arrived with other bytes.
        """
        if len(digests) != len(self._pieces):
            raise ManifestError(
                f"the seal has {len(digests)} digests, the plan has {len(self._pieces)} pieces"
            )
        self._check_complete()
        wrong = [
            name
            for name, sealed in zip(self._pieces, digests, strict=True)
            if self._digests[name] != sealed
        ]
        if wrong:
            raise DigestMismatchError(
                f"{len(wrong)} of {len(digests)} pieces arrived with other bytes than the trainer "
                f"sent: {_listed(wrong)}",
                pieces=wrong[:20],
                piece=wrong[0],
            )
        self._check_tied(canonical)
        return [self._digests[name] for name in self._pieces]

    def _check_complete(self) -> None:
        missing = [name for name in self._pieces if name not in self.tensors]
        if missing:
            raise IncompleteUpdateError(
                f"{len(missing)} of {len(self._pieces)} pieces never arrived: {_listed(missing)}",
                missing=missing[:20],
                piece=missing[0],
            )

    def _check_tied(self, canonical: Mapping[str, str]) -> None:
        first: dict[str, str] = {}
        for name in self._pieces if canonical else ():
            other = first.setdefault(canonical.get(name, name), name)
            if self._digests[other] != self._digests[name]:
                raise SchemaError(
                    f"{other!r} and {name!r} are one tensor in the target (tied weights) and came "
                    "with different bytes",
                    piece=name,
                )


def out_of_memory(nbytes: int | str, cause: BaseException) -> StagingMemoryError:
    """Return the one error that every shortage of staging memory becomes."""
    return StagingMemoryError(
        f"no memory to stage {nbytes} bytes: {cause}; free memory, or use an engine that stages "
        "once per host (shm)"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch or the system means a shortage of memory, in whatever words."""
    import errno

    if isinstance(error, OSError):
        return error.errno in (errno.ENOMEM, errno.ENOSPC)
    return "alloc" in str(error) and "memory" in str(error)


def _listed(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(repr, names[:limit])) + more
