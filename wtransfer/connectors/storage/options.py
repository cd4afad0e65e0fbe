"""Options of ``SharedStorageConnector``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from wtransfer.connectors.settings import read_options
from wtransfer.errors import ConnectorOptionError

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULT_MAX_BYTES = 16 << 30
"""What is kept where the user does not say: 16 GiB."""


class StorageOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a user may say, in ``kv_connector_extra_config``."""

    shared_storage_path: Annotated[str, msgspec.Meta(min_length=1)]
    """The folder; made where there is none. It may hold other things as well."""
    max_bytes: Annotated[int, msgspec.Meta(ge=1)] = DEFAULT_MAX_BYTES
    """Bytes of blocks that are kept there, of all models, weights and instances together. Beyond
    that the oldest use goes first. Each process that writes, so each rank of each instance, may be
    a sixty-fourth above it, or a block where that is more. Not counted are what is being written, a
    block for each process, and what was found damaged, 16 files. Where instances that share the
    folder say different bounds, the smallest one holds."""

    @classmethod
    def of(cls, extra_config: Mapping[str, Any]) -> StorageOptions:
        """Read them.

        Raises:
            ConnectorOptionError: One is unknown, missing, or cannot be used.
        """
        options = read_options(cls, extra_config)
        if "\0" in options.shared_storage_path:
            raise ConnectorOptionError(
                f"shared_storage_path={options.shared_storage_path!r:.200}: no path has a NUL"
            )
        return options
