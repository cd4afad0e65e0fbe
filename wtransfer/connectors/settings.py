"""What a connector reads of a serving engine's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from wtransfer.errors import ConnectorOptionError

if TYPE_CHECKING:
    from collections.abc import Mapping

_ROLES = {"kv_both": (True, True), "kv_producer": (True, False), "kv_consumer": (False, True)}

TOptions = TypeVar("TOptions", bound=msgspec.Struct)


@dataclass(frozen=True)
class Instance:
    """One serving instance, as seen by one of its processes."""

    engine_id: str
    """Its identity."""
    model: str
    """The model, as its users name it."""
    dtype: str
    """Of its computation."""
    block_size: int
    """Tokens per block."""
    rank: int
    """This process's; of no account on the scheduler's side."""
    num_ranks: int
    """Workers of the instance."""
    sends: bool
    """Whether others may have its KV cache."""
    receives: bool
    """Whether it takes that of others."""
    cache_dtype: str = "auto"
    """Of keys and values; ``auto``: that of the computation."""

    @classmethod
    def of(cls, vllm_config: Any) -> Instance:
        """Read it.

        Args:
            vllm_config: ``kv_transfer_config``, ``cache_config.block_size`` and, if there is one,
                ``cache_dtype``, ``parallel_config`` with ``rank`` and ``world_size``,
                ``model_config`` with ``model`` and ``dtype``.

        Raises:
            ConnectorOptionError: ``kv_role`` is none, or the block size is not said.
        """
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        role = transfer.kv_role or "kv_both"
        if role not in _ROLES:
            raise ConnectorOptionError(f"kv_role={role!r}: expected one of {sorted(_ROLES)}")
        if vllm_config.cache_config is None or not vllm_config.cache_config.block_size:
            raise ConnectorOptionError("cache_config.block_size is not set; a connector needs it")
        sends, receives = _ROLES[role]
        return cls(
            engine_id=transfer.engine_id or "",
            model=str(vllm_config.model_config.model),
            dtype=str(vllm_config.model_config.dtype),
            block_size=int(vllm_config.cache_config.block_size),
            rank=int(parallel.rank),
            num_ranks=int(parallel.world_size),
            sends=sends,
            receives=receives,
            cache_dtype=str(getattr(vllm_config.cache_config, "cache_dtype", None) or "auto"),
        )

    @property
    def root(self) -> bytes:
        """What keys and values depend on besides tokens and weights, as bytes."""
        return msgspec.msgpack.encode([self.model, self.dtype, self.cache_dtype, self.num_ranks])


def read_options(cls: type[TOptions], extra_config: Mapping[str, Any]) -> TOptions:
    """Return a connector's options.

    Args:
        cls: What they are; with ``forbid_unknown_fields`` a slip of the pen is found.
        extra_config: ``kv_connector_extra_config``.

    Raises:
        ConnectorOptionError: One is unknown, missing, or of another type.
    """
    try:
        return msgspec.convert(dict(extra_config), cls)
    except msgspec.ValidationError as error:
        known = ", ".join(field.name for field in msgspec.structs.fields(cls))
        raise ConnectorOptionError(
            f"kv_connector_extra_config: {error}; the options are {known}"
        ) from error


def load_failure_policy(policy: str) -> str:
    """Return what becomes of a request whose blocks could not be loaded.

    Args:
        policy: ``kv_load_failure_policy``: ``recompute`` or ``fail``.

    Raises:
        ConnectorOptionError: It is neither.
    """
    if policy not in _POLICIES:
        raise ConnectorOptionError(
            f"kv_load_failure_policy={policy!r}: expected one of {', '.join(_POLICIES)}"
        )
    return policy


_POLICIES = ("recompute", "fail")
