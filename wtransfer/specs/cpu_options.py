"""Options of `CPUOffloadingSpec`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wtransfer.errors import OffloadingOptionError

if TYPE_CHECKING:
    from collections.abc import Mapping


_MOST = {"cpu_bytes_to_use": 1 << 60, "num_copy_threads": 64, "deadline_s": 86_400}


@dataclass(frozen=True)
class CPUOffloadingOptions:
    """What a user may say, in ``kv_connector_extra_config``."""

    cpu_bytes_to_use: int
    """Host memory for all ranks of the instance together, headers included."""
    eviction_policy: str = "lru"
    """``lru``, ``arc`` or ``module:Class``."""
    verify_checksums: bool = True
    """Whether bytes are digested when they are stored, and compared when they are loaded."""
    num_copy_threads: int = 2
    """Threads of each rank, for each direction."""
    deadline_s: float = 30.0
    """Longest wait for other ranks, or for a copy that makes no progress, in seconds."""

    @classmethod
    def of(cls, extra_config: Mapping[str, Any]) -> CPUOffloadingOptions:
        """Read them; what stands beside them is for others.

        Raises:
            OffloadingOptionError: One is missing, or cannot be used.
        """
        options = cls(
            cpu_bytes_to_use=_number(extra_config, "cpu_bytes_to_use", None, int),
            eviction_policy=str(extra_config.get("eviction_policy", cls.eviction_policy)),
            verify_checksums=_flag(extra_config, "verify_checksums", cls.verify_checksums),
            num_copy_threads=_number(extra_config, "num_copy_threads", cls.num_copy_threads, int),
            deadline_s=_number(extra_config, "deadline_s", cls.deadline_s, float),
        )
        for name, most in _MOST.items():
            value = getattr(options, name)
            if not 0 < value <= most:
                raise OffloadingOptionError(f"{name}={value}: expected more than 0, at most {most}")
        return options


def _number(options: Mapping[str, Any], name: str, default: Any, kind: type) -> Any:
    value = options.get(name, default)
    if value is None:
        raise OffloadingOptionError(
            f"{name} is missing: set it in kv_connector_extra_config, to the bytes of host memory "
            "that all ranks of this instance may use together for KV cache"
        )
    try:
        if isinstance(value, bool) or kind(value) != float(value):
            raise ValueError(value)
        return kind(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise OffloadingOptionError(
            f"{name}={value!r}: expected a number ({kind.__name__})"
        ) from error


def _flag(options: Mapping[str, Any], name: str, default: bool) -> bool:
    value = options.get(name, default)
    if not isinstance(value, bool):
        raise OffloadingOptionError(f"{name}={value!r}: expected true or false")
    return value
