"""A worker's look at its model before the plan is there: while the trainer looks at its source."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from wtransfer.engines.interface import TensorSpec
    from wtransfer.weight_sync.worker.ledger import Ledger

logger = logging.getLogger(__name__)


class _Seen(NamedTuple):
    round_id: str
    num_changes: int
    schema: Mapping[str, TensorSpec] | None


class LookAhead:
    """Reads what updates must look like once a round, as soon as the round is known of.

    Of thousands of small tensors that takes as long as the trainer's look at as many. Everything
    here runs on the engine's thread.

    Args:
        ledger: Says what the model consists of.
        read: Returns the target's schema, or None where any complete update is taken.
    """

    def __init__(self, ledger: Ledger, read: Callable[[], Mapping[str, TensorSpec] | None]) -> None:
        self._ledger = ledger
        self._read = read
        self._seen: _Seen | None = None

    def look(self, round_id: str) -> None:
        """Read the schema for a round whose plan will come."""
        ledger, self._seen = self._ledger, None
        num_changes = ledger.num_changes
        if not ledger.at_rest:
            # The model may be changing this moment.
            return
        try:
            # Should it begin to change meanwhile, the count tells `schema`.
            self._seen = _Seen(round_id, num_changes, self._read())
        except Exception as error:
            # It is raised when the plan is judged, to whom it concerns.
            logger.debug("the model cannot be updated as it is: %s", error)

    def schema(self, round_id: str) -> Mapping[str, TensorSpec] | None:
        """Return the schema for a round, whose claim is entered: as it was seen, or read now.

        Raises:
            SchemaError: Nothing can be written to the model.
        """
        seen, self._seen = self._seen, None
        now = self._ledger.num_changes
        if seen is not None and seen.round_id == round_id and seen.num_changes == now:
            return seen.schema
        return self._read()
