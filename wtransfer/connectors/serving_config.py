"""Read a serving engine's configuration, and a connector's options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import xxhash

from wtransfer.config import decode_options
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
"""Fields of ``parallel_config`` that divide the KV cache among ranks; 1 where one is missing."""
_ROLES = {"kv_both": (True, True), "kv_producer": (True, False), "kv_consumer": (False, True)}

TOptions = TypeVar("TOptions", bound=msgspec.Struct)


@dataclass(frozen=True)
class Instance:
    """One serving instance, as seen by one of its processes."""

    engine_id: str
    """Name of the instance, unique among those that exchange KV."""
    model: str
    """Name of the model."""
    dtype: str
    """Dtype of the computation."""
    block_size: int
    """Tokens per block."""
    rank: int
    """Rank of this process; unused on the scheduler's side."""
    num_ranks: int
    """Number of workers."""
    sends: bool
    """True if other instances may load its KV."""
    receives: bool
    """True if the instance loads KV of other instances."""
    cache_dtype: str = "auto"
    """Dtype of keys and values; ``auto``: that of the computation."""
    quantization: str | None = None
    """Quantization of the weights, as the host names it."""
    split: tuple[int, ...] = (1,) * len(_SPLIT)
    """Sizes by which layers, heads and tokens are divided among ranks."""
    max_model_len: int | None = None
    """Longest request; some models rotate positions by factors that depend on it."""
    architecture: str = ""
    """Digest of the Hugging Face configuration (positions, windows, ...), if there is one."""

    @classmethod
    def of(cls, vllm_config: Any) -> Instance:
        """Read the configuration.

        Args:
            vllm_config: ``kv_transfer_config``, ``cache_config.block_size`` and, if there is one,
                ``cache_dtype``, ``parallel_config`` with ``rank`` and ``world_size``,
                ``model_config`` with ``model`` and ``dtype``. Read if present, as KV depends on
                them: sizes of ``parallel_config`` by which the cache is split; ``quantization``,
                ``max_model_len`` and ``hf_config`` of ``model_config``.

        Raises:
            ConnectorOptionError: ``kv_role`` is unknown, or the block size is not set.
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
        hf_config: Any = getattr(model, "hf_config", None)
        architecture = ""
        if hasattr(hf_config, "to_dict"):
            # Not as JSON: a model's own code may add objects, and `repr` takes them. A text with an
            # address in it makes a digest that only this process has, which is a miss elsewhere.
            architecture = xxhash.xxh3_128_hexdigest(repr(hf_config.to_dict()).encode())
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
            architecture=architecture,
        )

    @property
    def root(self) -> bytes:
        """Everything that keys and values depend on besides request and weights, as bytes."""
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


def read_options(cls: type[TOptions], extra_config: Mapping[str, Any]) -> TOptions:
    """Return a connector's options as an object.

    Args:
        cls: The options, a dataclass or `msgspec.Struct`.
        extra_config: ``kv_connector_extra_config``.

    Raises:
        ConnectorOptionError: An option is unknown, missing, or of another type.
    """
    return decode_options(extra_config, cls, ConnectorOptionError, "kv_connector_extra_config")
