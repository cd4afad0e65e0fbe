"""Tests of the connector kit: how sides end, and what is left of them."""

from __future__ import annotations

import os
import tempfile
import time
from typing import TYPE_CHECKING

import pytest

from wtransfer.connectors.interface import KVConnectorRole
from wtransfer.testing.connector_kit import ConnectorKit
from wtransfer.testing.connector_tokens import IN_PARTS
from wtransfer.testing.leftovers import Leftovers
from wtransfer.testing.mini_engine.config import EngineConfig
from wtransfer.testing.mini_engine.reference import some_prompts

if TYPE_CHECKING:
    from pathlib import Path

    from wtransfer.testing.connector_host import Weights
    from wtransfer.testing.connector_kit import MakeSite
    from wtransfer.testing.connector_site import Site


class EndTests(ConnectorKit):
    """Whoever ends takes everything along."""

    @pytest.mark.parametrize("role", KVConnectorRole)
    def test_a_side_may_end_before_it_began(self, tmp_path: Path, role: KVConnectorRole) -> None:
        """Before it has got caches; and twice."""
        side = self._settings(EngineConfig(), tmp_path).make_connector(role)
        assert side is not None
        for _ in range(2):
            side.shutdown()

    def test_shutting_down_twice_does_nothing(self, site: Site) -> None:
        """On either side, in either order."""
        site.exchange(some_prompts(1)[0])
        for host in site.hosts:
            for tap in (*host.taps, *reversed(host.taps)):
                tap.side.shutdown()

    @pytest.mark.parametrize("where", ["leaver", "finder"])
    def test_shutting_down_ends_what_runs(self, make_site: MakeSite, where: str) -> None:
        """Whatever is under way ends one way or the other, and soon."""
        for num_steps in (1, 2, 4):
            site = make_site(IN_PARTS)
            for prompt in some_prompts(4):
                if where == "leaver":
                    site.begin_leaving(prompt)
                else:
                    site.begin_finding(prompt, site.leave(prompt))
            for _ in range(num_steps):
                site.step()
            begun = time.monotonic()
            site.close()
            assert time.monotonic() - begun < self.ends_within_s

    def test_nothing_is_left(
        self, tmp_path: Path, weights: Weights, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """No thread, descriptor, memory, or file but where the options say."""
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        monkeypatch.chdir(elsewhere)
        monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))
        settings = self._settings(IN_PARTS, tmp_path / "kept")

        def live() -> None:
            site = self._site(settings, weights, tmp_path / "kept")
            try:
                for prompt in some_prompts(2):
                    site.exchange(prompt)
                    site.leave(prompt)
                request = site.begin_finding(some_prompts(1)[0], None)
                site.step()
                site.finder.loop.scheduler.abort(request)
                site.begin_leaving(some_prompts(1, seed=1)[0])
                site.step()
            finally:
                site.close()

        # What is made once in a process and kept, such as a pool of threads, is no leftover.
        live()
        leftovers = Leftovers()
        live()
        live()
        assert leftovers.found(self.ends_within_s) == []
        assert os.listdir(elsewhere) == []  # noqa: PTH208 - names are enough
