"""vLLM's registry of engines, the same in all generations."""

import importlib
from typing import ClassVar


class WeightTransferEngineFactory:
    _registry: ClassVar = {}

    @classmethod
    def register_engine(cls, name, module_path_or_cls, class_name=None):
        if name in cls._registry:
            raise ValueError(f"Weight transfer engine '{name}' is already registered.")
        cls._registry[name] = lambda: getattr(
            importlib.import_module(module_path_or_cls), class_name
        )

    @classmethod
    def create_engine(cls, config, *arguments):
        return cls._registry[config.backend]()(config, *arguments)


WeightTransferEngineFactory.register_engine(
    "nccl", "vllm.distributed.weight_transfer.nccl_engine", "NCCLWeightTransferEngine"
)
