"""Compare which distributions the two sides of a connector use.

A connector's metadata, and the bytes that a spec or tier stores, mean what one distribution in one
version makes of them, or in versions that state one `contract_version`. So the handshake metadata
of a worker carry the origin of its connector, spec and tier, and the scheduler's side refuses
another distribution, version or contract before the first step. Handshake metadata that are no
`WeightHandshake`, those of a third party that names weights itself, carry none.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from wtransfer.connectors.fenced import WeightHandshake
from wtransfer.connectors.interface import KVConnectorRole
from wtransfer.errors import UnknownBackendError
from wtransfer.registry.discovery import contract_of
from wtransfer.registry.resolve import registry

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from wtransfer.connectors.interface import KVConnectorBase_V1, KVConnectorHandshakeMetadata
    from wtransfer.registry.discovery import Record


def agree(connector: KVConnectorBase_V1, transfer: Any) -> None:
    """Have one side of a connector report, or compare, the origin of its backends.

    Args:
        connector: The side; its ``role`` says which.
        transfer: The ``kv_transfer_config`` that it was made from.
    """
    records = {(each.kind.word, each.name): each for each in _records(transfer)}
    get, take = connector.get_handshake_metadata, connector.set_xfer_handshake_metadata

    def get_handshake_metadata() -> KVConnectorHandshakeMetadata | None:
        metadata = get()
        if isinstance(metadata, WeightHandshake):
            metadata.origins = [
                (*key, record.distribution, record.version, contract_of(_cls(record)))
                for key, record in records.items()
            ]
        return metadata

    def set_xfer_handshake_metadata(metadata: Mapping[int, KVConnectorHandshakeMetadata]) -> None:
        for rank, each in metadata.items():
            origins = each.origins if isinstance(each, WeightHandshake) else []
            for kind, name, distribution, version, contract in origins:
                record = records.get((kind, name))
                if record is not None:
                    where = f"on the worker of rank {rank}"
                    own = functools.partial(_cls, record)
                    record.check_origin(distribution, version, contract, where, own)
        take(metadata)

    if connector.role is KVConnectorRole.WORKER:
        vars(connector)["get_handshake_metadata"] = get_handshake_metadata
    else:
        vars(connector)["set_xfer_handshake_metadata"] = set_xfer_handshake_metadata


def _cls(record: Record) -> type:
    return registry(record.kind.word).load(record)


def _records(transfer: Any) -> Iterator[Record]:
    """Yield the records of a connector, and of the spec and tier that its options name."""
    options = transfer.kv_connector_extra_config or {}
    named = [("connectors", transfer.kv_connector)]
    named += [("specs", options[key]) for key in ("spec_name", "tier") if options.get(key)]
    for kind, name in named:
        # A class by module path has no record: its distribution is not known.
        with contextlib.suppress(UnknownBackendError):
            yield registry(kind).record(name)
