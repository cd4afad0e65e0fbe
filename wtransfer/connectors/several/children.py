"""The connectors under a ``MultiConnector``, of one role."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeVar

from wtransfer.connectors.factory import KVConnectorFactory
from wtransfer.errors import ConnectorOptionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from wtransfer.connectors.interface import KVConnectorBase_V1, KVConnectorRole

logger = logging.getLogger(__name__)

OPTION = "connectors"
"""The one option: what the children are."""

# What is one child's own. The parent's would be another connector's.
_OWN: dict[str, Any] = {"kv_connector_module_path": None, "kv_connector_extra_config": {}}

TAnswer = TypeVar("TAnswer")


class Children:
    """Connectors, in order.

    Args:
        config: The parent's configuration.
        role: Which side they are.
        kv_cache_config: Shape of the KV cache.

    Raises:
        ConnectorOptionError: They are not described as they should be.
        PluginError: One of them cannot be found or loaded.
    """

    def __init__(self, config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self._all: list[KVConnectorBase_V1] = []
        self.names: list[str] = []
        """What each is called, as its number and its name."""
        self._counts: Counter[str] = Counter()
        try:
            for number, fields in enumerate(_described(config.kv_transfer_config)):
                child = _config_of(config, number, fields)
                made = KVConnectorFactory.create_connector(child, role, kv_cache_config)
                self._all.append(made)
                self.names.append(f"{number}_{fields['kv_connector']}")
        except BaseException:
            self.shutdown_quietly()
            raise

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[KVConnectorBase_V1]:
        return iter(self._all)

    def tell(self, call: Callable[[int, KVConnectorBase_V1], object]) -> None:
        """Call every child, also after one of them has raised.

        Args:
            call: Gets a child's number, and the child.

        Raises:
            Exception: The first that a child has raised.
        """
        first: Exception | None = None
        for number, child in enumerate(self._all):
            try:
                call(number, child)
            except Exception as error:  # noqa: PERF203  # each child by itself
                if first is None:
                    first = error
                else:
                    logger.exception("%s has failed as well", self.names[number])
        if first is not None:
            raise first

    def ask(self, number: int, question: Callable[[KVConnectorBase_V1], TAnswer]) -> TAnswer | None:
        """Ask one child something that it may as well not answer.

        Returns:
            Its answer; None if it has raised. The first time that is logged, then only counted.
        """
        try:
            return question(self._all[number])
        except Exception:
            failed = f"{self.names[number]}_unanswered_total"
            self._counts[failed] += 1
            if self._counts[failed] == 1:
                logger.exception(
                    "%s has failed, and counts as one that has nothing", self.names[number]
                )
            return None

    def ask_all(self, question: Callable[[KVConnectorBase_V1], TAnswer]) -> list[TAnswer | None]:
        """Ask every child, as `ask` does; return the answers in order."""
        return [self.ask(number, question) for number in range(len(self._all))]

    def get_stats(self) -> dict[str, float]:
        """Return the numbers of all children, each under its name."""
        numbers: dict[str, float] = dict(self._counts)
        answers = self.ask_all(lambda child: child.get_stats())
        for name, given in zip(self.names, answers, strict=True):
            numbers |= {f"{name}_{each}": figure for each, figure in (given or {}).items()}
        return numbers

    def shutdown(self) -> None:
        """Shut all of them down."""
        self.tell(lambda _, child: child.shutdown())

    def shutdown_quietly(self) -> None:
        """Shut all of them down on the way out of something that has failed already."""
        try:
            self.shutdown()
        except Exception:
            logger.exception("a connector could not be shut down")


def _described(transfer: Any) -> Sequence[Mapping[str, Any]]:
    """Return the fields of each child."""
    extra = dict(transfer.kv_connector_extra_config)
    described = extra.pop(OPTION, None)
    if extra:
        raise ConnectorOptionError(
            f"kv_connector_extra_config: MultiConnector has no options {sorted(extra)}; it has "
            f"{OPTION!r}, and what is meant for one of these stands there"
        )
    if not isinstance(described, (list, tuple)) or not described:
        raise ConnectorOptionError(
            f"kv_connector_extra_config: {OPTION!r} is {described!r:.100}; expected a list with "
            'one dictionary for each connector, such as {"kv_connector": "SharedStorageConnector", '
            '"kv_connector_extra_config": {...}}'
        )
    for number, fields in enumerate(described):
        if not isinstance(fields, dict) or not fields.get("kv_connector"):
            raise ConnectorOptionError(
                f"{OPTION}[{number}] is {fields!r:.100}; expected a dictionary with 'kv_connector'"
            )
    return described


def _config_of(config: Any, number: int, fields: Mapping[str, Any]) -> Any:
    """Return the configuration of a child: the parent's, but for how KV is transferred."""
    parent = config.kv_transfer_config
    try:
        transfer = dataclasses.replace(parent, **{**copy.deepcopy(_OWN), **fields})
    except TypeError as error:
        known = ", ".join(each.name for each in dataclasses.fields(parent))
        raise ConnectorOptionError(
            f"{OPTION}[{number}] ({fields['kv_connector']}): {error}; the fields are {known}"
        ) from error
    child = copy.copy(config)
    # A copy of a frozen one is ours to finish. To construct it anew would run a host's own checks.
    object.__setattr__(child, "kv_transfer_config", transfer)
    return child
