"""TRL's trainers publish their policy to vLLM by wtransfer.

``install()`` for trainers with ``vllm_mode="server"``, `WeightTransfer` for asynchronous ones.
"""

from wtransfer_trl.metrics import Metrics
from wtransfer_trl.server_mode import install
from wtransfer_trl.weight_transfer import WeightTransfer

__all__ = ["Metrics", "WeightTransfer", "install"]
