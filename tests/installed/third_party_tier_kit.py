"""What the author of the tier would have in his tests. Run where the tier is installed."""

from wtransfer.testing.tier import TierConformance


class TestShelf(TierConformance):
    tier = "acme-shelf"

    def options_in(self, folder):
        return {"folder": str(folder)}
