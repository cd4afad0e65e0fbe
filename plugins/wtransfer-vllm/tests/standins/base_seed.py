"""The engine's base class of vLLM 0.16 to 0.19."""

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

TInitInfo = TypeVar("TInitInfo")
TUpdateInfo = TypeVar("TUpdateInfo")


class WeightTransferEngine(ABC, Generic[TInitInfo, TUpdateInfo]):
    def __init__(self, config, parallel_config):
        self.config = config
        self.parallel_config = parallel_config

    @abstractmethod
    def init_transfer_engine(self, init_info): ...

    @abstractmethod
    def receive_weights(self, update_info, load_weights): ...

    @abstractmethod
    def shutdown(self): ...

    @staticmethod
    @abstractmethod
    def trainer_send_weights(iterator, trainer_args): ...
