"""The engine's base class of vLLM 0.27 to 0.33."""

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

TInitInfo = TypeVar("TInitInfo")
TUpdateInfo = TypeVar("TUpdateInfo")


class WeightTransferEngine(ABC, Generic[TInitInfo, TUpdateInfo]):
    supports_draft_weight_update = True

    def __init__(self, config, vllm_config, device, model):
        self.config = config
        self.vllm_config = vllm_config
        self.device = device
        self.model = model

    @abstractmethod
    def init_transfer_engine(self, init_info): ...

    @abstractmethod
    def start_weight_update(self): ...

    @abstractmethod
    def finish_weight_update(self): ...

    @abstractmethod
    def receive_weights(self, update_info): ...

    @abstractmethod
    def shutdown(self): ...
