"""Tensors of one round on a worker: checked and digested on arrival, verified before the commit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from wtransfer.errors import (
    DigestMismatchError,
    EngineError,
    IncompleteUpdateError,
    ManifestError,
    ProtocolError,
    RoundAbortedError,
    SchemaError,
)
from wtransfer.transport.digests import copy_digest, digest
from wtransfer.transport.memory import is_out_of_memory, out_of_memory
from wtransfer.transport.tensors import byte_view, lacks_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from wtransfer.transport.layout import TensorLayout
    from wtransfer.weight_sync.worker.held_memory import HeldMemory


class Staging:
    """The tensors of one round beside the model, which goes on serving the old ones.

    Used by one thread; `stop` may be called by any.

    Args:
        layout: The update.
        copies: True: tensors must be copied before `load_weights` returns; False: views of the
            engine's memory are kept.
        on_progress: Called with the number of bytes staged so far after each call.
        held: Memory of the weights that the worker has, where views are kept.
        check_held: Raises if a tensor was delivered there, which looks as if it was.
    """

    def __init__(
        self,
        layout: TensorLayout,
        *,
        copies: bool,
        on_progress: Callable[[int], None],
        held: HeldMemory | None = None,
        check_held: Callable[[str, torch.Tensor], None] = lambda _name, _tensor: None,
    ) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        """Name -> staged tensor."""
        self.nbytes = 0
        self._layout = layout
        self._algorithm = layout.manifest.algorithm
        self._digests: dict[str, str] = {}
        self._copies = copies
        self._on_progress = on_progress
        self._held = held
        self._check_held = check_held
        self._stopped: str | None = None

    def stop(self, reason: str) -> None:
        """Make every further `load_weights` raise, so that the engine's loop ends."""
        self._stopped = reason

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Stage tensors; engines get this callable.

        Args:
            weights: Pairs of name and tensor, any number of them, in any order.

        Returns:
            The staged names.

        Raises:
            RoundAbortedError: The round is over.
            ManifestError: A name that the plan does not have, or a name delivered twice.
            SchemaError: Another dtype or shape than planned.
            EngineError: A tensor without memory, or in that of the weights that the worker has.
            StagingMemoryError: No memory left.
        """
        # Also for no tensors: an engine that prepares checks this way that the round goes on.
        self._check_stopped()
        layout, staged = self._layout, set()
        for name, tensor in weights:
            self._check_stopped()
            number = layout.numbers.get(name)
            if number is None:
                raise ManifestError(
                    f"the engine delivered {name!r}, which the plan does not have", piece=str(name)
                )
            if name in self.tensors:
                raise ManifestError(f"the engine delivered {name!r} twice", piece=name)
            if tensor.dtype != layout.dtypes[number] or tensor.shape != layout.shapes[number]:
                raise SchemaError(
                    f"the engine delivered {name!r} as {tensor.dtype} {list(tensor.shape)}, the "
                    f"plan says {layout.dtypes[number]} {list(layout.shapes[number])}",
                    piece=name,
                )
            _check_memory(name, tensor)
            if self._held is not None and self._held.has_any(tensor):
                self._check_held(name, tensor)
            self._stage(name, tensor)
            staged.add(name)
        self._on_progress(self.nbytes)
        return staged

    def _check_stopped(self) -> None:
        if self._stopped is not None:
            raise RoundAbortedError(f"the round was ended: {self._stopped}")

    def _stage(self, name: str, tensor: torch.Tensor) -> None:
        try:
            # A separate object: the engine may point its own elsewhere when this returns.
            kept = tensor.detach()
            if not self._copies:
                digested = digest(kept, self._algorithm)
            elif tensor.device.type != "cpu":
                kept = tensor.clone()
                digested = digest(kept, self._algorithm)
            else:
                kept = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                digested = copy_digest(byte_view(kept), tensor, self._algorithm).hexdigest
        except (MemoryError, RuntimeError, OSError) as error:
            if not is_out_of_memory(error):
                raise
            raise out_of_memory(tensor.nbytes, error) from error
        self.tensors[name] = kept
        self._digests[name] = digested
        self.nbytes += kept.nbytes

    def digest_again(self) -> None:
        """Digest all staged tensors once more: the engine could have written to them meanwhile.

        Raises:
            RoundAbortedError: The round is over.
            EngineError: A tensor whose memory was freed meanwhile.
        """
        for name, tensor in self.tensors.items():
            self._check_stopped()
            _check_memory(name, tensor)
            self._digests[name] = digest(tensor, self._algorithm)

    def digests(self) -> list[str]:
        """Return the digests of the arrived pieces, in plan order.

        Raises:
            IncompleteUpdateError: Pieces never arrived.
        """
        names = self._layout.names
        missing = [name for name in names if name not in self._digests]
        if missing:
            raise IncompleteUpdateError(
                f"{len(missing)} of {len(names)} pieces never arrived: {_listed(missing)}",
                missing=missing[:20],
                piece=missing[0],
            )
        return [self._digests[name] for name in names]

    def compare(self, sent: Sequence[str]) -> DigestMismatchError:
        """Return an error that names the pieces which arrived with other bytes than were sent.

        Args:
            sent: The trainer's digests, in plan order, once `digests` has returned this worker's.

        Raises:
            ManifestError: The digests are not as many as the pieces.
            ProtocolError: The digests are the same: the publisher has contradicted itself.
        """
        own = self.digests()
        if len(sent) != len(own):
            raise ManifestError(
                f"the publisher sent {len(sent)} digests, the plan has {len(own)} pieces"
            )
        rows = zip(self._layout.names, own, sent, strict=True)
        wrong = [name for name, arrived, expected in rows if arrived != expected]
        if not wrong:
            raise ProtocolError(
                "every piece arrived with the digest that the publisher sent, and the set has not "
                "the fingerprint that it announced"
            )
        return DigestMismatchError(
            f"{len(wrong)} of {len(sent)} pieces arrived with other bytes than the trainer sent: "
            f"{_listed(wrong)}",
            pieces=wrong[:20],
            piece=wrong[0],
        )

    def check_ties(self, canonical: Mapping[str, str]) -> None:
        """Raise unless the names of each storage arrived with the same bytes.

        Args:
            canonical: Name or alias -> name of the storage.

        Raises:
            SchemaError: Names of one tensor arrived with different bytes.
        """
        first: dict[str, str] = {}
        kept = {each.piece.name: each.digest for each in self._layout.manifest.kept}
        digests = {**self._digests, **kept}
        for name in (*self._layout.names, *kept):
            other = first.setdefault(canonical.get(name, name), name)
            if digests[other] != digests[name]:
                raise SchemaError(
                    f"{other!r} and {name!r} are one tensor in the target (tied weights) and came "
                    "with different bytes",
                    piece=name,
                )


def _check_memory(name: str, tensor: torch.Tensor) -> None:
    # A read past the end of a storage would kill the process.
    if tensor.is_meta or lacks_memory(tensor):
        raise EngineError(
            f"the engine delivered {name!r} without all of its memory: its storage was freed or "
            "cut, or it is on the meta device",
            piece=name,
        )


def _listed(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(repr, names[:limit])) + more
