"""The scheduler's end of what connects this host with a connector."""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from wtransfer.connectors.interface import KVConnectorOutput
from wtransfer.testing.mini_engine.plain import from_plain, to_plain
from wtransfer.testing.mini_engine.schedule import KVCacheBlocks

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from wtransfer.connectors.interface import KVConnectorBase_V1
    from wtransfer.testing.mini_engine.messages import Said
    from wtransfer.testing.mini_engine.request import Request
    from wtransfer.testing.mini_engine.schedule import SchedulerOutput


class SchedulerLink:
    """Calls the connector's scheduler side, and puts together what the ranks say.

    Args:
        connector: The side.
        num_ranks: Workers, each with a side of its own.
    """

    def __init__(self, connector: KVConnectorBase_V1, num_ranks: int) -> None:
        self.connector = connector
        """The side."""
        self._num_ranks = num_ranks
        self.num_unknown = 0
        """How often a rank has named a request that nobody waits for, or that it had named."""
        self._sent: defaultdict[str, set[int]] = defaultdict(set)
        self._received: defaultdict[str, set[int]] = defaultdict(set)

    def meet(self, handshakes: Sequence[Any]) -> None:
        """Pass on what the ranks' sides say before the first step, in order of rank."""
        said = {rank: from_plain(each) for rank, each in enumerate(handshakes) if each is not None}
        if said:
            self.connector.set_xfer_handshake_metadata(said)

    def matched(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Ask how many tokens can be loaded, and whether that outlasts the step."""
        return self.connector.get_num_new_matched_tokens(request, num_computed_tokens)

    def allocated(self, request: Request, num_external_tokens: int) -> None:
        """Tell which blocks a request has got."""
        if num_external_tokens:
            # What was said so far is of another load of the same request.
            self._received.pop(request.request_id, None)
        blocks = KVCacheBlocks(request.block_ids)
        self.connector.update_state_after_alloc(request, blocks, num_external_tokens)

    def metadata(self, output: SchedulerOutput) -> Any:
        """Return what the workers' sides are told for a step."""
        metadata = to_plain(self.connector.build_connector_meta(output))
        # Nobody here routes by them; taken all the same, as a host does.
        self.connector.take_events()
        return metadata

    def hear(
        self,
        said: Sequence[Said | None],
        *,
        running: Collection[str] = (),
        held: Collection[str] = (),
        loading: Collection[str] = (),
        failing: Collection[str] = (),
    ) -> KVConnectorOutput:
        """Pass on what the ranks' sides say after a step; return it as one.

        A rank may say the same twice, or late: that is counted, and changes nothing. It may also
        have sent a request before this has ended: that counts once it has.

        Args:
            said: In order of rank.
            running: Requests that have not ended.
            held: Requests that have, and whose blocks stay until they are named.
            loading: Requests whose blocks are being loaded, those that have ended included.
            failing: Those among them of which a part could not be loaded.
        """
        heard = [each for each in said if each is not None]
        metas = [from_plain(each.metadata) for each in heard if each.metadata is not None]
        output = KVConnectorOutput(
            finished_sending=self._agreed(
                self._sent, [each.finished_sending for each in heard], held, early=running
            ),
            finished_recving=self._agreed(
                self._received, [each.finished_recving for each in heard], loading
            ),
            kv_connector_worker_meta=(
                functools.reduce(lambda one, other: one.aggregate(other), metas) if metas else None
            ),
            invalid_block_ids=set().union(*(each.invalid_block_ids for each in heard)),
        )
        output.failed_recving = (output.finished_recving or set()).intersection(failing)
        self.connector.update_connector_output(output)
        return output

    def finished(self, request: Request) -> bool:
        """Tell that a request has ended; return whether its blocks must stay."""
        stay, params = self.connector.request_finished(request, list(request.block_ids))
        request.kv_transfer_params = params
        return stay

    def _agreed(
        self,
        named: defaultdict[str, set[int]],
        said: Sequence[set[str]],
        expected: Collection[str],
        early: Collection[str] = (),
    ) -> set[str] | None:
        """Return the requests that every rank has named by now, of those that are expected."""
        for rank, request_ids in enumerate(said):
            for request_id in request_ids:
                is_known = request_id in expected or request_id in early
                self.num_unknown += not is_known or rank in named[request_id]
                named[request_id].add(rank)
        needed = self.connector.get_finished_count() or self._num_ranks
        agreed = {each for each, ranks in named.items() if len(ranks) >= needed}
        agreed = {each for each in agreed if each in expected}
        for request_id in list(named):
            is_known = request_id in expected or request_id in early
            if request_id in agreed or not is_known:
                del named[request_id]
        return agreed or None
