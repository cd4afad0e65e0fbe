"""The engine's base class of vLLM 0.22, a shape that has no adapter."""

from abc import ABC, abstractmethod


class WeightTransferEngine(ABC):
    def __init__(self, config, parallel_config, model):
        self.config = config
        self.parallel_config = parallel_config
        self.model = model

    @abstractmethod
    def init_transfer_engine(self, init_info): ...

    @abstractmethod
    def receive_weights(self, update_info, load_weights): ...

    @abstractmethod
    def shutdown(self): ...
