"""The built-in tiers pass the kit of tiers."""

from __future__ import annotations

from wtransfer.testing.fakes import MemoryTier
from wtransfer.testing.tier import TierConformance


class TestFileTier(TierConformance):
    tier = "file"
    size_option = "max_bytes"

    def options_in(self, folder):
        return {"shared_storage_path": str(folder)}


class TestMemoryTier(TierConformance):
    tier_cls = MemoryTier
    in_processes = False

    def options_in(self, folder):
        return {"shelf": str(folder)}
