"""What the author of the spec would have in his tests. Run where the spec is installed."""

import os
from typing import ClassVar

from wtransfer.testing.spec import SpecConformance


class TestDisk(SpecConformance):
    spec = "acme-disk"
    options: ClassVar = {"folder": os.environ["ACME_FOLDER"]}
    size_option = "disk_bytes_to_use"
