"""The scheduler's side of ``MultiConnector``."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any

from wtransfer.connectors.fenced import REMOTE_WEIGHTS
from wtransfer.connectors.interface import ConnectorScheduler, KVConnectorRole
from wtransfer.connectors.settings import Instance
from wtransfer.connectors.several.children import Children
from wtransfer.connectors.several.messages import SeveralMetadata, SeveralSaid
from wtransfer.errors import ConnectorOptionError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wtransfer.connectors.interface import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorOutput,
    )

logger = logging.getLogger(__name__)


class SeveralScheduler(ConnectorScheduler):
    """Chooses who loads a request, and passes all else on.

    Args:
        config: The serving engine's configuration.
        kv_cache_config: Shape of the KV cache.

    Raises:
        ConnectorOptionError: The children are not described as they should be.
        PluginError: One of them cannot be found or loaded.
    """

    def __init__(self, config: Any, kv_cache_config: Any = None) -> None:
        super().__init__(config, kv_cache_config)
        self.children = Children(config, KVConnectorRole.SCHEDULER, kv_cache_config)
        """The connectors, in order."""
        self._chosen: dict[str, tuple[int, bool]] = {}
        self._next = SeveralMetadata()
        self._underway: set[str] = set()
        self._silenced: set[str] = set()

    def on_new_request(self, request: Any) -> None:
        """Let every child hear of a request."""
        self._next.begun.add(request.request_id)
        self.children.tell(lambda _, child: child.on_new_request(request))

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return what the first child has that has anything.

        All are asked: a child may count on it. One that cannot say yet is waited for, unless one
        before it has something.
        """
        self._chosen.pop(request.request_id, None)
        answers = self.children.ask_all(lambda child: _matched(child, request, num_computed_tokens))
        for number, answer in enumerate(answers):
            num_tokens, is_later = (0, False) if answer is None else answer
            if num_tokens is None:
                return None, False
            if num_tokens > 0:
                self._chosen[request.request_id] = number, is_later
                return num_tokens, is_later
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Let the chosen child load; the others hear that they have nothing to load."""
        request_id = request.request_id
        chosen, is_later = self._chosen.get(request_id, (-1, False))
        if num_external_tokens and is_later:
            self._next.loading[request_id] = chosen
            self._underway.add(request_id)

        def tell(number: int, child: KVConnectorBase_V1) -> None:
            num_tokens = num_external_tokens if number == chosen else 0
            child.update_state_after_alloc(request, blocks, num_tokens)

        self.children.tell(tell)

    def build_connector_meta(self, scheduler_output: Any) -> SeveralMetadata:
        """Return what each child tells its workers.

        What a child raises ends the step, and the host with it: what the others have built for it
        is lost, and loads that were promised would never come.
        """
        built: list[KVConnectorMetadata] = []
        self.children.tell(
            lambda _, child: built.append(child.build_connector_meta(scheduler_output))
        )
        told, self._next = self._next, SeveralMetadata()
        told.children = built
        return told

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Let each child hear what its own workers said, and what was said of requests."""
        said = connector_output.kv_connector_worker_meta
        said_by = said.children if isinstance(said, SeveralSaid) else [None] * len(self.children)
        self._underway -= connector_output.finished_recving or set()

        def tell(number: int, child: KVConnectorBase_V1) -> None:
            output = copy.copy(connector_output)
            for name, each in vars(output).items():
                if isinstance(each, set):
                    setattr(output, name, set(each))
            output.kv_connector_worker_meta = said_by[number]
            child.update_connector_output(output)

        self.children.tell(tell)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Hear that a request has ended; its blocks stay if any child wants that.

        Where two children say different things to the next instance under the same names, the
        first one's stand.
        """
        request_id = request.request_id
        self._chosen.pop(request_id, None)
        is_loading = request_id in self._underway
        self._underway.discard(request_id)
        params: dict[str, Any] = {}
        holding: list[int] = []

        def tell(number: int, child: KVConnectorBase_V1) -> None:
            stays, given = child.request_finished(request, block_ids)
            if stays:
                holding.append(number)
                self._next.holding[request_id] = holding
                if is_loading:
                    self._next.ended_loading.add(request_id)
            # The weights are those of the instance, whichever child says so.
            both = (params.keys() & (given or {}).keys()) - {REMOTE_WEIGHTS}
            if both:
                # A request asks for it, so it must not end the host. The lease of this one's
                # blocks runs out by itself.
                self._warn_of_two(number, both)
            else:
                params.update(given or {})

        self.children.tell(tell)
        return bool(holding), params or None

    def _warn_of_two(self, number: int, both: set[str]) -> None:
        name = self.children.names[number]
        if name not in self._silenced:
            logger.warning(
                "%s and a connector before it both say %s to the next instance, which hears the "
                "first; only one of them can hand requests over: give the others another kv_role",
                name,
                sorted(both),
            )
        self._silenced.add(name)

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        """Let each child hear what its own workers say to other instances."""

        def tell(number: int, child: KVConnectorBase_V1) -> None:
            said = {rank: each.children[number] for rank, each in metadata.items()}
            said = {rank: each for rank, each in said.items() if each is not None}
            if said:
                child.set_xfer_handshake_metadata(said)

        self.children.tell(tell)

    def get_finished_count(self) -> int | None:
        """Return how many workers name a request before it counts; None: all.

        Raises:
            ConnectorOptionError: The children do not agree.
        """
        said = {child.get_finished_count() for child in self.children}
        if len(said) == 1:
            return said.pop()
        num_ranks = Instance.of(self.config).num_ranks
        counts = {num_ranks if each is None else each for each in said}
        if len(counts) > 1:
            raise ConnectorOptionError(
                f"connectors under one MultiConnector want {sorted(counts)} workers to have named "
                "a request before it counts; they must agree"
            )
        return counts.pop()

    def has_pending_push_work(self) -> bool:
        """Return whether any child has."""
        return any(self.children.ask_all(lambda child: child.has_pending_push_work()))

    def take_events(self) -> list[Any]:
        """Return the events of all children."""
        said = self.children.ask_all(lambda child: list(child.take_events()))
        return [event for events in said for event in events or ()]

    def reset_cache(self) -> bool | None:
        """Let all children forget what they keep.

        Returns:
            False if one of them did not; None if none of them says that it keeps anything.
        """
        said: list[bool | None] = []
        self.children.tell(lambda _, child: said.append(child.reset_cache()))
        if False in said:
            return False
        return True if True in said else None

    def get_stats(self) -> dict[str, float]:
        """Return the numbers of all children, each under its name."""
        return self.children.get_stats()

    def shutdown(self) -> None:
        """Shut all children down."""
        self.children.shutdown()


def _matched(
    child: KVConnectorBase_V1, request: Any, num_computed_tokens: int
) -> tuple[int | None, bool]:
    """Return what a child has; what is no answer raises here, where it is that child's fault."""
    num_tokens, is_later = child.get_num_new_matched_tokens(request, num_computed_tokens)
    return None if num_tokens is None else int(num_tokens), bool(is_later)
