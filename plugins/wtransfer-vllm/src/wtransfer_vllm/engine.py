"""The weight engines that vLLM's workers make: one class for each shape of vLLM's contract.

============  ========================================  ======================================
class         constructor                               commits in
============  ========================================  ======================================
`VllmEngine`  ``(config, vllm_config, device, model)``  ``finish_weight_update()``
`SeedEngine`  ``(config, parallel_config)``             ``receive_weights(info, load_weights)``
============  ========================================  ======================================

The first is the contract of vLLM 0.27 to 0.33, the second that of 0.16 and 0.17, the seed era.

Tensors travel beside vLLM, from the publisher to the session's own threads, while vLLM generates.
vLLM's calls carry two things: ``init``, where the publisher is, and the moment at which the model's
thread commits. No call raises for a fault of a transfer: see `wtransfer_vllm.messages`.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.weight_transfer.base import WeightTransferEngine

from wtransfer_vllm.block_hashes import names_blocks
from wtransfer_vllm.member import Member, place_of
from wtransfer_vllm.names import our_name
from wtransfer_vllm.target import SeedTarget, VllmTarget
from wtransfer_vllm.vouching import vouch_for_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn


class _Engine(WeightTransferEngine):
    """The calls that both shapes have."""

    member: Member

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        """Return the info as it is: `Member.join` judges it, and does not raise."""
        return init_dict

    def init_transfer_engine(self, init_info: Any) -> None:
        """Join the publisher."""
        self.member.join(init_info)

    def parse_update_info(self, update_dict: dict[str, Any]) -> Any:  # noqa: ARG002
        """Return an empty info; in checkpoint format, for which the seed era reloads by layer."""
        return types.SimpleNamespace(is_checkpoint_format=True)

    def shutdown(self) -> None:
        """Leave every publisher. The worker may be asked to join again."""
        self.member.leave()


class VllmEngine(_Engine):
    """Every engine of wtransfer, as vLLM's worker sees it.

    Args:
        config: Names the backend.
        vllm_config: vLLM's own.
        device: Device of the model.
        model: The model.
    """

    supports_draft_weight_update: ClassVar[bool] = False

    def __init__(
        self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        if names_blocks(vllm_config):
            # While the files are those that were loaded.
            vouch_for_checkpoint(vllm_config)
        self.member = Member(
            VllmTarget(model, vllm_config),
            our_name("engines", config.backend),
            place_of(vllm_config.parallel_config, vllm_config.instance_id),
        )

    def start_weight_update(self) -> None:
        """Do nothing: the update is here already, staged and verified."""

    def update_weights(self, update_info: Any) -> None:
        """Do nothing: the engine core refuses updates that carry tensors."""

    def receive_weights(self, update_info: Any) -> None:
        """Do nothing, as `update_weights`."""

    def finish_weight_update(self) -> None:
        """Commit the staged update."""
        self.member.commit()


class SeedEngine(_Engine):
    """Every engine of wtransfer, as the worker of vLLM 0.16 and 0.17 sees it.

    Commits in ``receive_weights``, the only call of that time in which a model is written: vLLM
    hands over ``model.load_weights`` there, and reloads the model layer by layer around it.

    Args:
        config: Names the backend.
        parallel_config: vLLM's own; the model's configuration is out of reach.
    """

    def __init__(self, config: Any, parallel_config: Any) -> None:
        self.config = config
        self.parallel_config = parallel_config
        self._target = SeedTarget()
        engine = our_name("engines", config.backend)
        self.member = Member(self._target, engine, place_of(parallel_config, "seed"))

    def receive_weights(self, update_info: Any, load_weights: Callable[..., Any]) -> None:  # noqa: ARG002
        """Commit the staged update."""
        with self._target.within(load_weights):
            self.member.commit()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Refuse: a `Publisher` sends weights.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError(
            "weights are sent by wtransfer.Publisher(model, hosts=[...]), which needs no vLLM"
        )
