"""The configuration, without what judges its values; `test_old_vllm.py` has the real one."""

from dataclasses import dataclass


@dataclass
class WeightTransferConfig:
    backend: str = "nccl"
