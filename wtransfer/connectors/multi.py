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
from wtransfer.errors import ConnectorOptionError
from wtransfer.registry.registry import registry

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


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
        return any(
            child.requires_piecewise_for_cudagraph(fields.get("kv_connector_extra_config") or {})
            for child, fields in _child_classes(extra_config)
        )

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Return the layout that one of them needs.

        Raises:
            ConnectorOptionError: Two of them need different ones.
        """
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        asked = [
            child.get_required_kvcache_layout(vllm_config) for child, _ in _child_classes(options)
        ]
        layouts = sorted(set(filter(None, asked)))
        if len(layouts) > 1:
            raise ConnectorOptionError(
                f"connectors under one MultiConnector need the KV cache in the layouts {layouts}; "
                "they must agree"
            )
        return layouts[0] if layouts else None

    @property
    def requires_kv_delivery(self) -> bool:  # type: ignore[override]
        """Whether one of them must hand on what a request has computed."""
        return any(child.requires_kv_delivery for child in self.side.children)


def _child_classes(
    options: Mapping[str, Any],
) -> Iterator[tuple[type[KVConnectorBase_V1], Mapping[str, Any]]]:
    """Yield the class and the fields of each child that is described as it should be.

    What is wrong with others is said when they are made.
    """
    for fields in options.get(OPTION) or ():
        if isinstance(fields, dict) and fields.get("kv_connector"):
            place = fields.get("kv_connector_module_path")
            yield registry("connectors").get_or_import(fields["kv_connector"], place), fields
