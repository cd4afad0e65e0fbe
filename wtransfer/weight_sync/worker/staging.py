"""What a worker has received of one round, digested as it arrives, proven before it is applied."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import torch
import xxhash

from wtransfer.engines.outline import Outline
from wtransfer.engines.staged import StagedTensors
from wtransfer.errors import (
    DigestMismatchError,
    IncompleteUpdateError,
    ManifestError,
    RoundAbortedError,
    SchemaError,
    StagingMemoryError,
)
from wtransfer.transport.digests import copy_digest, digest
from wtransfer.transport.host_tensors import HostTensors
from wtransfer.transport.tensors import byte_view, dtype_name, torch_dtypes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from wtransfer.manifest import Manifest, Piece


class Staging:
    """The tensors of one round beside the model, which goes on serving the old ones.

    Used by one thread; `stop` may be called by any.

    Args:
        manifest: What will arrive.
        copies: Whether tensors must be copied before `load_weights` returns; otherwise views of
            the engine's memory are kept.
        on_progress: Called with the number of bytes staged so far after each call.
        outline: The manifest's, where it is known already.
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        copies: bool,
        on_progress: Callable[[int], None],
        outline: Outline | None = None,
    ) -> None:
        self.manifest = manifest
        self.tensors = StagedTensors(outline or Outline.of_manifest(manifest))
        self.nbytes = 0
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
        # Also for none: so an engine asks, while it prepares, whether it shall go on.
        self._check_stopped()
        if isinstance(weights, HostTensors) and self._stage_places(weights):
            staged = set(weights.names)
        else:
            staged = self._stage_each(weights)
        self._on_progress(self.nbytes)
        return staged

    def _stage_places(self, weights: HostTensors) -> bool:
        """Stage what lies as the plan has it next, digested where it lies; return whether it does.

        What does not is staged one by one, which also says what is wrong with it.
        """
        if self._copies or self.manifest.algorithm != "xxh3-128" or not weights.names:
            return False
        first = len(self.tensors.starts)
        planned = self.tensors.outline.part(first, first + len(weights.names))
        if (
            weights.names != planned.names
            or weights.shapes != planned.shapes
            or torch_dtypes(weights.dtype_names) != planned.dtypes
        ):
            return False
        stops = list(map(operator.add, weights.starts, planned.sizes))
        within = min(weights.starts) >= 0 and max(stops) <= weights.memory.size
        if not within or not self.tensors.put_places(weights.memory, weights.starts):
            return False
        self._digests.update(zip(weights.names, self._digested(weights, stops), strict=True))
        self.nbytes += sum(planned.sizes)
        return True

    def _digested(self, weights: HostTensors, stops: list[int]) -> Iterator[str]:
        view, hexdigest = weights.memory.data, xxhash.xxh3_128_hexdigest
        for start, stop in zip(weights.starts, stops, strict=True):
            self._check_stopped()
            yield hexdigest(view[start:stop])

    def _stage_each(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        staged = set()
        for name, tensor in weights:
            self._check_stopped()
            piece = self._piece(name)
            if (
                piece is None
                or name in self.tensors
                or dtype_name(tensor.dtype) != piece.dtype
                or tensor.shape != piece.shape
            ):
                raise self._unexpected(name, tensor, piece)
            self._stage(piece, tensor)
            staged.add(name)
        return staged

    def _piece(self, name: str) -> Piece | None:
        number = self.tensors.outline.numbers.get(name)
        return None if number is None else self.manifest.pieces[number]

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
        self.tensors.put(piece.name, kept)
        self._digests[piece.name] = digested
        self.nbytes += kept.nbytes

    def _copy(self, tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
        algorithm = self.manifest.algorithm
        if tensor.device.type != "cpu":
            kept = tensor.clone()
            return kept, digest(kept, algorithm)
        kept = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        return kept, copy_digest(byte_view(kept), tensor, algorithm).hexdigest

    def digest_again(self) -> None:
        """Digest all that was staged once more: its engine could have written there meanwhile."""
        for name, tensor in self.tensors.items():
            self._check_stopped()
            self._digests[name] = digest(tensor, self.manifest.algorithm)

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
        names = self.tensors.outline.names
        if len(digests) != len(names):
            raise ManifestError(
                f"the seal has {len(digests)} digests, the plan has {len(names)} pieces"
            )
        self._check_complete()
        own = list(map(self._digests.__getitem__, names))
        if own != list(digests):
            rows = zip(names, own, digests, strict=True)
            wrong = [name for name, arrived, sealed in rows if arrived != sealed]
            raise DigestMismatchError(
                f"{len(wrong)} of {len(digests)} pieces arrived with other bytes than the trainer "
                f"sent: {_listed(wrong)}",
                pieces=wrong[:20],
                piece=wrong[0],
            )
        self._check_tied(canonical)
        return own

    def _check_complete(self) -> None:
        names = self.tensors.outline.names
        # Nothing is staged that the plan does not have.
        if len(self._digests) == len(names):
            return
        missing = [name for name in names if name not in self._digests]
        raise IncompleteUpdateError(
            f"{len(missing)} of {len(names)} pieces never arrived: {_listed(missing)}",
            missing=missing[:20],
            piece=missing[0],
        )

    def _check_tied(self, canonical: Mapping[str, str]) -> None:
        first: dict[str, str] = {}
        for name in self.tensors.outline.names if canonical else ():
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
