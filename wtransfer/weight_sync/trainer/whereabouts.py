"""Where the publishing rank of a trainer is, told to the other ranks by the trainer's own store.

That store belongs to torch's default group, which every sharded trainer has. It is only a place
for one short note. It has no authentication, so the secret stands in it only where the user gave
none; whoever can write there can take the trainer's collectives apart as well.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import msgspec

from wtransfer.errors import NotInitializedError, PeerLostError, ProtocolError
from wtransfer.transport.handshake import new_token, resolve_token

if TYPE_CHECKING:
    from collections.abc import Iterator


class Note(msgspec.Struct, frozen=True):
    """What the publishing rank leaves for the others."""

    rank: int
    """Its rank in torch's default group."""
    address: str
    """Where it listens."""
    token: str = ""
    """Secret of this address; empty: the one in everybody's environment."""

    @property
    def secret(self) -> str:
        """The secret to use."""
        return self.token or resolve_token(None, os.environ) or ""


def own_rank() -> int:
    """Return this process's rank in torch's default group; 0 where there is none."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class Whereabouts:
    """The note under one name.

    Args:
        name: Tells several publishers of one trainer apart.
        store: A torch store that all ranks share. Default: the one of torch's default group.
    """

    def __init__(self, name: str, store: Any = None) -> None:
        self._key = f"wtransfer/publisher/{name}"
        self._given = store

    def leave(self, rank: int, address: str, token: str) -> None:
        """Leave a note; it replaces an older one.

        Raises:
            PeerLostError: The store is gone.
        """
        known = resolve_token(None, os.environ) == token
        note = Note(rank, address, "" if known else token)
        with _naming_store():
            self._store().set(self._key, msgspec.json.encode(note).decode())

    def look(self) -> Note | None:
        """Return the note, if there is one by now.

        Raises:
            PeerLostError: The store is gone.
            ProtocolError: There is something else in its place.
        """
        written = self._read()
        if written is None:
            return None
        try:
            return msgspec.json.decode(written, type=Note)
        except msgspec.MsgspecError as error:
            raise ProtocolError(
                f"the trainer's store holds something else under {self._key!r}: {error}"
            ) from error

    def _read(self) -> bytes | None:
        store = self._store()
        with _naming_store():
            return store.get(self._key) if store.check([self._key]) else None

    def _store(self) -> Any:
        if self._given is not None:
            return self._given
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            raise NotInitializedError(
                "torch.distributed is not initialized in this process: the ranks of a trainer find "
                "each other by the store of its default group; call init_process_group first, or "
                "pass store="
            )
        from torch.distributed import distributed_c10d

        # Torch offers no public way to the store that it was given.
        return distributed_c10d._get_default_store()  # noqa: SLF001


@contextlib.contextmanager
def _naming_store() -> Iterator[None]:
    import torch.distributed as dist

    try:
        yield
    except dist.DistError as error:
        raise PeerLostError(f"the trainer's store is gone: {error}") from error


def token_of_link() -> str:
    """Return the secret for a new listener: the user's, else a random one."""
    return resolve_token(None, os.environ) or new_token()
