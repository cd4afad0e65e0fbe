"""What the seed era's engine does, apart from vLLM's base class."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from wtransfer_vllm.invitation import UpdateInfo
from wtransfer_vllm.layerwise import begin_again
from wtransfer_vllm.member import Member
from wtransfer_vllm.names import our_name
from wtransfer_vllm.place import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch
    from wtransfer.engines.interface import TensorSpec


class SeedAdapter:
    """Commits in ``receive_weights``, the only call of that time in which a model is written.

    vLLM hands over ``model.load_weights`` there, and reloads the model layer by layer around it.

    Args:
        config: Names the backend.
        parallel_config: vLLM's own; the model's is not to be had.
    """

    def __init__(self, config: Any, parallel_config: Any) -> None:
        self.config = config
        self.parallel_config = parallel_config
        self._target = SeedTarget()
        self.member = Member(
            self._target, our_name("engines", config.backend), _place(parallel_config)
        )

    def parse_init_info(self, init_dict: dict[str, Any]) -> Any:
        """Return it as it is; `init_transfer_engine` judges it, and does not raise."""
        return init_dict

    def parse_update_info(self, update_dict: dict[str, Any]) -> UpdateInfo:  # noqa: ARG002
        """Return the only info that there is: checkpoint format, so that vLLM reloads by layer."""
        return UpdateInfo()

    def init_transfer_engine(self, init_info: Any) -> None:
        """Join the publisher."""
        self.member.join(init_info)

    def receive_weights(self, update_info: Any, load_weights: Callable[..., Any]) -> None:  # noqa: ARG002
        """Commit; the outcome travels as a receipt, and to the engine core."""
        with self._target.within(load_weights):
            self.member.commit()

    def shutdown(self) -> None:
        """Leave every publisher. The worker may be asked to join again."""
        self.member.leave()


class SeedTarget:
    """A model that can only be reached while vLLM reloads it.

    Neither the checkpoint nor the model's configuration is known: the first complete update sets
    the form, and before the first commit there is no way back.
    """

    def __init__(self) -> None:
        self._load_weights: Callable[..., Any] | None = None
        self._applied: Mapping[str, torch.Tensor] | None = None
        self._loaded_before = False

    @contextlib.contextmanager
    def within(self, load_weights: Callable[..., Any]) -> Iterator[None]:
        """Let `apply` use vLLM's loader within."""
        self._load_weights = load_weights
        self._loaded_before = False
        try:
            yield
        finally:
            self._load_weights = None

    def schema(self) -> Mapping[str, TensorSpec] | None:
        """Return None: the form is that of the last whole update."""
        return None

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load a whole set."""
        assert self._load_weights is not None
        if self._loaded_before:
            begin_again(self._load_weights.__self__)  # type: ignore[attr-defined]  # bound method
        self._loaded_before = True
        self._applied = None
        self._load_weights(list(tensors.items()))
        self._applied = tensors

    def capture(self) -> Mapping[str, torch.Tensor] | None:
        """Return what was applied last, if anything."""
        return self._applied

    def forget(self) -> None:
        """Drop what was applied last: the model does not hold it any more."""
        self._applied = None


def _place(parallel_config: Any) -> Place:
    replica = getattr(parallel_config, "data_parallel_index", 0)
    return Place(f"vllm-seed-{replica}", parallel_config.rank, parallel_config.world_size)
