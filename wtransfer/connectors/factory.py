"""Make connectors by name, for either generation of the contract. A thin face over the registry.

Source: names, signatures and texts are those of vLLM's factory, which had both generations when it
first appeared; `KVConnectorFactory.create_connector` is today's.
"""

from __future__ import annotations

import inspect
import logging
import os
from typing import TYPE_CHECKING, Any

from wtransfer.connectors.fenced import fence
from wtransfer.connectors.interface import KVConnectorBase, KVConnectorBase_V1
from wtransfer.connectors.origins import agree
from wtransfer.errors import ConnectorGenerationError, PluginTypeError, RegistrationError
from wtransfer.registry import hooks
from wtransfer.registry.resolve import registry

if TYPE_CHECKING:
    from wtransfer.connectors.interface import Connector, KVConnectorRole

logger = logging.getLogger(__name__)

SWITCH = "VLLM_USE_V1"
"""Environment variable that says which generation the process runs; read in every call."""


class KVConnectorFactory:
    """Connectors by name."""

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        """Register a connector at run time; its module is imported on first use.

        Args:
            name: Its name, compared exactly as written.
            module_path: Module of the class.
            class_name: Name of the class.

        Raises:
            AlreadyRegisteredError: The name is registered or a built-in's; a `ValueError`.
        """
        registry("connectors").register(name, module_path, class_name)

    @classmethod
    def create_connector_v0(cls, rank: int, local_rank: int, config: Any) -> KVConnectorBase:
        """Make a connector of the first generation.

        Args:
            rank: Rank of this worker.
            local_rank: Its rank on this host.
            config: Its ``kv_transfer_config.kv_connector`` names the connector.

        Raises:
            ConnectorGenerationError: The process runs the other generation; a `ValueError`.
            UnknownBackendError: No backend has this name; a `ValueError`.
            PluginTypeError: The class belongs to the other generation; an `AssertionError`, too.
        """
        _refuse_other_generation(0)
        name = _transfer_config(config).kv_connector
        connector_cls = _of_generation(KVConnectorBase, registry("connectors").get(name))
        made: KVConnectorBase = connector_cls(rank, local_rank, config)
        return made

    @classmethod
    def create_connector_v1(
        cls, config: Any, role: KVConnectorRole, kv_cache_config: Any = None
    ) -> KVConnectorBase_V1:
        """Make one side of a connector.

        The name is looked up; where no backend has it, it is the name of a class in the module
        ``kv_connector_module_path``. A class whose constructor knows no `kv_cache_config` gets two
        arguments. A connector without ``names_weights`` gets the fence of
        `wtransfer.connectors.fenced`. The scheduler's side refuses workers whose connector, spec or
        tier is of another distribution or version, with a `PluginIncompatibleError`, when it is
        given their handshake metadata.

        Args:
            config: The serving engine's configuration, with ``kv_transfer_config``.
            role: Side to make.
            kv_cache_config: Shape of the KV cache.

        Raises:
            ConnectorGenerationError: The process runs the other generation; a `ValueError`.
            UnknownBackendError: No backend has this name; a `ValueError`.
            PluginTypeError: The class belongs to the other generation; an `AssertionError`, too.
            PluginError: The connector cannot be loaded, for one of the other reasons.
        """
        _refuse_other_generation(1)
        transfer = _transfer_config(config)
        connector_cls = _of_generation(KVConnectorBase_V1, _class_of(transfer))
        logger.info(
            "Creating v1 connector with name: %s and engine_id: %s",
            transfer.kv_connector,
            transfer.engine_id,
        )
        made = _make(connector_cls, config, role, kv_cache_config)
        if not made.names_weights:
            fence(made, config)
        agree(made, transfer)
        hooks.board.attach(made)
        if made.side is not None:
            hooks.board.attach(made.side)
        return made

    create_connector = create_connector_v1
    """Today's name of `create_connector_v1`."""

    @classmethod
    def get_connector_class(cls, kv_transfer_config: Any) -> type[Connector]:
        """Return the class that a configuration names, of either generation.

        Raises:
            PluginError: The connector cannot be found or loaded.
        """
        return _class_of(kv_transfer_config)


def _refuse_other_generation(asked: int) -> None:
    text = os.environ.get(SWITCH, "1")
    try:
        runs_v1 = bool(int(text))
    except ValueError as error:
        raise ConnectorGenerationError(
            f"{SWITCH} is {text!r}, which is no number; expected 0 or 1"
        ) from error
    if runs_v1 != bool(asked):
        raise ConnectorGenerationError(
            f"Attempting to initialize a V{asked} Connector, but found envs.{SWITCH}={runs_v1}"
        )


def _transfer_config(config: Any) -> Any:
    transfer = config.kv_transfer_config
    if transfer is None:
        raise RegistrationError(
            "kv_transfer_config must be set to create a connector, and it is None",
            kind="connectors",
        )
    return transfer


def _class_of(transfer: Any) -> type[Any]:
    name = transfer.kv_connector
    if name is None:
        raise RegistrationError(
            f"kv_connector must name a connector, one of {registry('connectors').names()}; it is "
            "None",
            kind="connectors",
        )
    return registry("connectors").get_or_import(name, transfer.kv_connector_module_path)


def _of_generation(base: type[Connector], found: type[Any]) -> type[Any]:
    if not issubclass(found, base):
        raise PluginTypeError(
            f"{found.__qualname__} is no subclass of {base.__name__}, which a connector of this "
            f"generation must be; its bases are {', '.join(b.__name__ for b in found.__bases__)}",
            kind="connectors",
            name=found.__qualname__,
        )
    return found


def _make(
    connector_cls: type[KVConnectorBase_V1], config: Any, role: KVConnectorRole, cache_config: Any
) -> KVConnectorBase_V1:
    """Call a constructor of two or three arguments: by signature, as a trial would hide errors."""
    try:
        signature = inspect.signature(connector_cls)
    except (TypeError, ValueError):
        return connector_cls(config, role, cache_config)

    def takes(*args: Any, **named: Any) -> bool:
        try:
            signature.bind(*args, **named)
        except TypeError:
            return False
        return True

    if takes(config, role, kv_cache_config=cache_config):
        return connector_cls(config, role, kv_cache_config=cache_config)
    if takes(config, role, cache_config):
        return connector_cls(config, role, cache_config)
    return connector_cls(config, role)
