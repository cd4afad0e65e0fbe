"""Our engine in the shape of vLLM 0.16 and 0.17, which knows no start and no finish."""

from __future__ import annotations

from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine

from wtransfer_vllm.invitation import InitInfo, UpdateInfo
from wtransfer_vllm.seed_adapter import SeedAdapter


class SeedEngine(SeedAdapter, WeightTransferEngine):
    """Every engine of wtransfer, as the worker of that time sees it."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Refuse: weights are sent by a `Publisher`.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "weights are sent by wtransfer.Publisher(model, hosts=[...]), which needs no vLLM"
        )
