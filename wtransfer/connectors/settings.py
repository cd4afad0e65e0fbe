"""What a connector reads of a serving engine's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import xxhash

from wtransfer.errors import ConnectorOptionError

if TYPE_CHECKING:
    from collections.abc import Mapping

_SPLIT = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "prefill_context_parallel_size",
    "decode_context_parallel_size",
    "cp_kv_cache_interleave_size",
)
"""How a host says what part of the KV cache each rank has; 1 where it does not say."""
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
    quantization: str | None = None
    """Of the weights, as the host does it."""
    split: tuple[int, ...] = (1,) * len(_SPLIT)
    """How layers, heads and tokens are divided among the ranks."""
    max_model_len: int | None = None
    """Longest request; some models turn positions by other factors where it is long."""
    architecture: str = ""
    """Digest of the model's Hugging Face configuration (positions, windows, ...), if it has one."""

    @classmethod
    def of(cls, vllm_config: Any) -> Instance:
        """Read it.

        Args:
            vllm_config: ``kv_transfer_config``, ``cache_config.block_size`` and, if there is one,
                ``cache_dtype``, ``parallel_config`` with ``rank`` and ``world_size``,
                ``model_config`` with ``model`` and ``dtype``. Where they are there also what else
                KV depends on: of ``parallel_config`` the sizes by which it is split, of
                ``model_config`` ``quantization``, ``max_model_len`` and ``hf_config``.

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
        model = vllm_config.model_config
        quantization = getattr(model, "quantization", None)
        return cls(
            engine_id=transfer.engine_id or "",
            model=str(model.model),
            dtype=str(model.dtype),
            block_size=int(vllm_config.cache_config.block_size),
            rank=int(parallel.rank),
            num_ranks=int(parallel.world_size),
            sends=sends,
            receives=receives,
            cache_dtype=str(getattr(vllm_config.cache_config, "cache_dtype", None) or "auto"),
            quantization=None if quantization is None else str(quantization),
            split=tuple(int(getattr(parallel, name, 1)) for name in _SPLIT),
            max_model_len=getattr(model, "max_model_len", None),
            architecture=_digest(getattr(model, "hf_config", None)),
        )

    @property
    def root(self) -> bytes:
        """What keys and values depend on besides tokens and weights, as bytes."""
        return msgspec.msgpack.encode(
            [
                self.model,
                self.dtype,
                self.cache_dtype,
                self.num_ranks,
                self.quantization,
                self.split,
                self.max_model_len,
                self.architecture,
            ]
        )


def _digest(hf_config: Any) -> str:
    """Return a digest of a Hugging Face configuration; empty if that is none."""
    if not hasattr(hf_config, "to_dict"):
        return ""
    # Not as JSON: those of a model's own code may have objects, whose `repr` only this process has.
    return xxhash.xxh3_128_hexdigest(repr(hf_config.to_dict()).encode())


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
