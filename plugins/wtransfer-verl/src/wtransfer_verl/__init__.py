"""verl's trainers send their weights to rollouts by wtransfer.

Importing this registers the checkpoint engine ``wtransfer``: verl does it by
``checkpoint_engine.custom_backend_module=wtransfer_verl``.
"""

from wtransfer_verl.checkpoint_engine import WTransferCheckpointEngine
from wtransfer_verl.checkpoint_manager import CheckpointManager

__all__ = ["CheckpointManager", "WTransferCheckpointEngine"]
