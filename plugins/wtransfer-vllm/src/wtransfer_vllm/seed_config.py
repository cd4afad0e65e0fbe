"""vLLM's configuration of the seed era, which knows vLLM's own engines only.

``WeightTransferConfig.backend`` was a ``Literal`` then, so a registered engine could not be asked
for by its name. Here those names are added to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from collections.abc import Iterable


def allow(backends: Iterable[str]) -> None:
    """Let vLLM's configuration take further backends; a second call does nothing.

    Args:
        backends: The names.
    """
    from vllm.config.weight_transfer import WeightTransferConfig

    _widen(WeightTransferConfig, backends)


def _widen(config: type[Any], backends: Iterable[str]) -> None:
    known = get_args(config.__annotations__["backend"])
    further = [name for name in backends if name not in known]
    if not known or not further:
        return
    from pydantic.dataclasses import rebuild_dataclass

    wider = Literal.__getitem__((*known, *further))  # 3.10 has no star within brackets
    config.__annotations__["backend"] = wider
    config.__dataclass_fields__["backend"].type = wider
    rebuild_dataclass(config, force=True)
