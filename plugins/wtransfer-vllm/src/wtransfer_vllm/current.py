"""Our engine in the shape of vLLM 0.27 to 0.33."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.weight_transfer.base import WeightTransferEngine

from wtransfer_vllm.invitation import InitInfo, UpdateInfo
from wtransfer_vllm.member import Member
from wtransfer_vllm.names import our_name
from wtransfer_vllm.place import place_of
from wtransfer_vllm.target import VllmTarget

if TYPE_CHECKING:
    import torch
    from torch import nn


class VllmEngine(WeightTransferEngine):
    """Every engine of wtransfer, as vLLM's worker sees it.

    Tensors travel beside vLLM, from the publisher to the session's own threads, while vLLM
    generates. Its calls carry two things: ``init``, where the publisher is, and ``finish``, the
    moment at which the model's thread commits.

    Args:
        config: Names the backend.
        vllm_config: vLLM's own.
        device: Where the model is.
        model: The model.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update: ClassVar[bool] = False

    def __init__(
        self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self.member = Member(
            VllmTarget(model, vllm_config),
            our_name("engines", config.backend),
            place_of(vllm_config.parallel_config, vllm_config.instance_id),
        )

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        """Return it as it is; `init_transfer_engine` judges it, and does not raise."""
        return init_dict

    def parse_update_info(self, update_dict: dict[str, Any]) -> Any:
        """Return it as it is."""
        return update_dict

    def init_transfer_engine(self, init_info: Any) -> None:
        """Join the publisher."""
        self.member.join(init_info)

    def start_weight_update(self) -> None:
        """Do nothing: the update is here already, staged and verified."""

    def update_weights(self, update_info: Any) -> None:
        """Do nothing: tensors do not come this way; the engine core refuses those that would."""

    def receive_weights(self, update_info: Any) -> None:
        """Do nothing, as `update_weights`."""

    def finish_weight_update(self) -> None:
        """Commit; the outcome travels as a receipt, and to the engine core."""
        self.member.commit()

    def shutdown(self) -> None:
        """Leave every publisher. The worker may be asked to join again."""
        self.member.leave()
