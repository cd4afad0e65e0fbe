"""Connector ``MultiConnector``: several connectors under one.

The first in order that has something of a request loads it; all of them save what is computed after
that. Its option is vLLM's::

    kv_connector_extra_config = {
        "connectors": [
            {"kv_connector": "SharedMemoryConnector"},
            {"kv_connector": "SharedStorageConnector",
             "kv_connector_extra_config": {"shared_storage_path": "/mnt/kv"}},
        ]
    }

A child may be anybody's, and is fenced by itself where it does not name weights. It gets the
configuration with the fields given for it in the place of the parent's; ``engine_id`` and
``kv_role`` are the parent's where it has none of its own.

Children do not stand in each other's way. One that raises when it is asked what it has, has
nothing. Of every other call all children hear, and what one of them raised is raised when the last
has heard; what the others said meanwhile is said the next time. One exception: what a child raises
while a step's metadata are built ends that step, and the host must not go on as if it had not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from wtransfer.connectors.interface import KVConnectorBase_V1
from wtransfer.connectors.several.children import OPTION
from wtransfer.host.registry import registry

if TYPE_CHECKING:
    from collections.abc import Mapping


class MultiConnector(KVConnectorBase_V1):
    """Several connectors under one.

    Raises:
        ConnectorOptionError: ``connectors`` is missing, or one of them has unknown fields.
        PluginError: One of them cannot be found or loaded.
    """

    scheduler_cls = "wtransfer.connectors.several.scheduler:SeveralScheduler"
    worker_cls = "wtransfer.connectors.several.worker:SeveralWorker"
    names_weights = True
    example_options: ClassVar[Mapping[str, Any]] = {
        "connectors": [
            {
                "kv_connector": "OffloadingConnector",
                "kv_connector_extra_config": {"cpu_bytes_to_use": 8 << 30},
            },
            {
                "kv_connector": "SharedStorageConnector",
                "kv_connector_extra_config": {"shared_storage_path": "/mnt/kv"},
            },
        ]
    }

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: Mapping[str, Any]) -> bool:
        """Return whether one of them works layer by layer."""
        for fields in extra_config.get(OPTION) or ():
            options = fields.get("kv_connector_extra_config") or {}
            place = fields.get("kv_connector_module_path")
            child = registry("connectors").get_or_import(fields["kv_connector"], place)
            if child.requires_piecewise_for_cudagraph(options):
                return True
        return False
