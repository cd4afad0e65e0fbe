"""A stand-in for vLLM's factory of offloading specs, which has one of its own."""

import importlib


class OffloadingSpecFactory:
    _registry = {}  # noqa: RUF012

    @classmethod
    def register_spec(cls, name, module_path, class_name):
        if name in cls._registry:
            raise ValueError(f"Connector '{name}' is already registered.")
        cls._registry[name] = lambda: getattr(importlib.import_module(module_path), class_name)


OffloadingSpecFactory.register_spec("CPUOffloadingSpec", "vllms", "CPUOffloadingSpec")
