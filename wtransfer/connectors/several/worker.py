"""A worker's side of ``MultiConnector``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wtransfer.connectors.interface import ConnectorWorker, KVConnectorRole
from wtransfer.connectors.several.children import Children
from wtransfer.connectors.several.messages import SeveralHandshake, SeveralMetadata, SeveralSaid
from wtransfer.errors import ConnectorOptionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

    from wtransfer.connectors.interface import (
        KVConnectorBase_V1,
        KVConnectorHandshakeMetadata,
    )

MAX_EARLY = 4096
"""Requests of which a child has said that they are sent before it was known that it holds them."""
MAX_DONE = 4096
"""Requests that were named, of which it is known who has named them: it may be said again."""


class SeveralWorker(ConnectorWorker):
    """Passes everything on, and gathers what the children say.

    Args:
        config: The serving engine's configuration.
        kv_cache_config: Shape of the KV cache.

    Raises:
        ConnectorOptionError: The children are not described as they should be.
        PluginError: One of them cannot be found or loaded.
    """

    def __init__(self, config: Any, kv_cache_config: Any = None) -> None:
        super().__init__(config, kv_cache_config)
        self.children = Children(config, KVConnectorRole.WORKER, kv_cache_config)
        """The connectors, in order."""
        self._loading: dict[str, int] = {}
        self._holding: dict[str, set[int]] = {}
        # Of these, those that are named as received, as the host waits for that.
        self._ended_loading: set[str] = set()
        self._named: dict[str, set[int]] = {}
        self._done: dict[str, set[int]] = {}
        self._received: set[str] = set()
        self._errors: set[int] = set()

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Let every child take the caches."""
        self.children.tell(lambda _, child: child.register_kv_caches(kv_caches))

    # -- a step

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Let every child hear of preemptions."""
        told = self._of_children(kv_connector_metadata)
        self.children.tell(lambda number, child: child.handle_preemptions(told[number]))

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Let every child take what its scheduler's side told."""
        told = self._of_children(connector_metadata)
        super().bind_connector_metadata(connector_metadata)
        # One whose blocks are held still is the one before: what was said of it goes on to count.
        for request_id in connector_metadata.begun - self._holding.keys():
            self._named.pop(request_id, None)
            self._done.pop(request_id, None)
        self._loading |= connector_metadata.loading
        for request_id, numbers in connector_metadata.holding.items():
            self._hold(request_id, set(numbers), request_id in connector_metadata.ended_loading)
        self.children.tell(lambda number, child: child.bind_connector_metadata(told[number]))

    def _hold(self, request_id: str, numbers: set[int], ended_loading: bool) -> None:
        """Note which children have to name a request that has ended."""
        if not ended_loading:
            self._holding[request_id] = numbers
        elif request_id in self._loading:
            self._holding[request_id] = numbers | {self._loading[request_id]}
            self._ended_loading.add(request_id)
        else:
            # It was named as received before the scheduler's side heard that: that was its end.
            self._finish(request_id, numbers)

    def clear_connector_metadata(self) -> None:
        """Let every child forget it."""
        super().clear_connector_metadata()
        self.children.tell(lambda _, child: child.clear_connector_metadata())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Let every child begin to load."""
        self.children.tell(lambda _, child: child.start_load_kv(forward_context, **kwargs))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for every child."""
        self.children.tell(lambda _, child: child.wait_for_layer_load(layer_name))

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Let every child save."""
        self.children.tell(
            lambda _, child: child.save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)
        )

    def wait_for_save(self) -> None:
        """Wait for every child: the host calls this only after a step that counts."""
        self.children.tell(lambda _, child: child.wait_for_save())

    # -- what the children say

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests that are sent by all children that hold them, and those received."""

        def tell(number: int, child: KVConnectorBase_V1) -> None:
            sent, received = child.get_finished(set(finished_req_ids))
            self._send(number, sent or ())
            self._receive(number, received or ())

        self.children.tell(tell)
        ended = self._ended()
        # The host frees the blocks on whichever word comes first: only one is said of each.
        sent = ended - self._ended_loading
        received = self._received | (ended & self._ended_loading)
        self._received = set()
        self._ended_loading -= ended
        return sent or None, received or None

    def _ended(self) -> set[str]:
        """Return the requests that every child that holds them has named, each once."""
        ended = {each for each, by in self._holding.items() if by <= self._named.get(each, set())}
        for request_id in ended:
            self._finish(request_id, self._holding.pop(request_id))
        # A child may be done before it is known here that it holds anything; or it is mistaken.
        for request_id in list(self._named)[:-MAX_EARLY]:
            if request_id not in self._holding:
                del self._named[request_id]
        return ended

    def _finish(self, request_id: str, numbers: set[int]) -> None:
        """Note who has named a request: if it says so again, that is not about the next one."""
        self._named.pop(request_id, None)
        if request_id in self._ended_loading:
            # Its load may have been named as sent only.
            self._loading.pop(request_id, None)
        self._done[request_id] = numbers
        while len(self._done) > MAX_DONE:
            del self._done[next(iter(self._done))]

    def _send(self, number: int, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if request_id in self._holding or number not in self._done.get(request_id, ()):
                self._named.setdefault(request_id, set()).add(number)

    def _receive(self, number: int, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            # What another child says of it is about nothing.
            if self._loading.get(request_id) != number:
                continue
            del self._loading[request_id]
            if request_id in self._ended_loading:
                self._named.setdefault(request_id, set()).add(number)
            else:
                self._received.add(request_id)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that any child could not load."""
        self.children.tell(
            lambda _, child: self._errors.update(child.get_block_ids_with_load_errors())
        )
        errors, self._errors = self._errors, set()
        return errors

    def build_connector_worker_meta(self) -> SeveralSaid | None:
        """Return what each child says to its scheduler's side."""
        said = self.children.ask_all(lambda child: child.build_connector_worker_meta())
        return SeveralSaid(said) if any(each is not None for each in said) else None

    # -- before and after

    def get_handshake_metadata(self) -> SeveralHandshake | None:
        """Return what each child says to other instances."""
        said: list[KVConnectorHandshakeMetadata | None] = []
        self.children.tell(lambda _, child: said.append(child.get_handshake_metadata()))
        return SeveralHandshake(said) if any(each is not None for each in said) else None

    def get_stats(self) -> dict[str, float]:
        """Return the numbers of all children, each under its name."""
        return self.children.get_stats()

    def shutdown(self) -> None:
        """Shut all children down."""
        self.children.shutdown()

    def _of_children(self, told: SeveralMetadata) -> list[Any]:
        if len(told.children) != len(self.children):
            raise ConnectorOptionError(
                f"the scheduler's side speaks for {len(told.children)} connectors, and this worker "
                f"has {len(self.children)}: {self.children.names}; give both the same options"
            )
        return list(told.children)
