"""TRL's server-mode trainers publish their policy by wtransfer: ``wtransfer_trl.install()``."""

from wtransfer_trl.metrics import Metrics
from wtransfer_trl.server_mode import install

__all__ = ["Metrics", "install"]
