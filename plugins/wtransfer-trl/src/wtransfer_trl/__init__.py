"""TRL's trainers publish their policy to vLLM by wtransfer.

``install()`` for synchronous trainers, `WeightTransfer` for asynchronous ones.
"""

from wtransfer_trl.metrics import Metrics
from wtransfer_trl.modes import install
from wtransfer_trl.weight_transfer import WeightTransfer

__all__ = ["Metrics", "WeightTransfer", "install"]
