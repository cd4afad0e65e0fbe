"""What the parts of the connector kit have in common: what an author states, and what tests get."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import pytest
import torch

from wtransfer.connectors.naming import BlockNaming
from wtransfer.registry.registry import registry
from wtransfer.testing.connector_host import KitHost, Weights
from wtransfer.testing.connector_site import Site
from wtransfer.testing.mini_engine.config import EngineConfig, ModelShape

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    MakeSite = Callable[..., Site]

SMALL = ModelShape(width=32, num_heads=2, num_kv_heads=1)
"""The model of tests that do not ask for another."""


class ConnectorKit:
    """What an author states of a connector; its tests stand in the subclasses."""

    connector: ClassVar[str] = ""
    """Name of the connector, as a user would write it."""
    connector_cls: ClassVar[type | None] = None
    """Instead of a name: the class of a connector that is not installed."""
    kind: ClassVar[str] = "store"
    """``store``: what one request has left, another finds that begins alike. ``transfer``: the
    instance that a request's ``kv_transfer_params`` name goes on with it."""
    is_shared: ClassVar[bool] = False
    """Whether a store is found by other instances as well."""
    options: ClassVar[dict[str, Any]] = {}
    """Its options."""
    prefill_params: ClassVar[dict[str, Any]] = {"do_remote_decode": True}
    """For ``transfer``: what a request says that another instance goes on with."""
    deadline_s: ClassVar[float] = 10.0
    """Bound on every wait, in seconds; also on how long blocks are kept for nobody."""
    ends_within_s: ClassVar[float] = 5.0
    """Longest that a shutdown may take while work is under way, and that something of it may be
    left afterwards, in seconds."""
    module_path: ClassVar[str | None] = None
    """Module of a connector whose name is registered nowhere."""
    in_processes: ClassVar[bool] = True
    """Whether a fresh process finds the connector by its name."""

    def options_in(self, folder: Path) -> dict[str, Any]:
        """Return the connector's options.

        Args:
            folder: A place of the test's own, for what it keeps in files.
        """
        del folder
        return dict(self.options)

    def damage(self, site: Site) -> bool:
        """Damage whatever is kept of blocks now.

        Override it, and return True; False: it cannot be reached.

        Args:
            site: ``leaver.workers[0].side`` is the worker's side that has kept it, and
                ``site.folder`` what `options_in` was given.
        """
        del site
        return False

    def weaken(
        self, monkeypatch: pytest.MonkeyPatch, hash_function: Callable[[bytes], bytes]
    ) -> None:
        """Let all sides that are made from now on name blocks by another hash function.

        Override it where blocks are not named by `wtransfer.connectors.naming.BlockNaming`.
        """
        monkeypatch.setattr(BlockNaming.__init__, "__defaults__", (hash_function,))

    # -- what the tests get

    @pytest.fixture(autouse=True)
    def one_thread(self) -> Iterator[None]:
        """Whatever is computed has the same bits."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(before)

    @pytest.fixture
    def weights(self) -> Iterator[Weights]:
        """The weights of all instances of a test."""
        weights = Weights()
        yield weights
        weights.close()

    @pytest.fixture
    def make_site(self, tmp_path: Path, weights: Weights) -> Iterator[MakeSite]:
        """Makes sites that are closed at the end of the test."""
        sites: list[Site] = []

        def make(settings: EngineConfig | None = None, **options: Any) -> Site:
            settings = self._settings(settings or EngineConfig(), tmp_path / "kept")
            sites.append(self._site(settings, weights, tmp_path / "kept", **options))
            return sites[-1]

        yield make
        while sites:
            sites.pop().close()

    @pytest.fixture
    def site(self, make_site: MakeSite) -> Site:
        """A site of the usual size."""
        return make_site()

    def _settings(self, settings: EngineConfig, folder: Path) -> EngineConfig:
        folder.mkdir(exist_ok=True)
        named = {
            "model": SMALL if settings.model == ModelShape() else settings.model,
            "connector": self.connector or _registered(self.connector_cls),
            "module_path": self.module_path,
            "options": self.options_in(folder),
        }
        return msgspec.structs.replace(settings, **named)

    def _site(self, settings: EngineConfig, weights: Weights, folder: Path, **options: Any) -> Site:
        leaver = KitHost(settings, weights, **options)
        finder = leaver
        if self._are_two():
            other = msgspec.structs.replace(settings, engine_id="another")
            finder = KitHost(other, weights, **options)
        params = self.prefill_params if self.kind == "transfer" else None
        return Site(
            leaver,
            finder,
            weights,
            folder=folder,
            prefill_params=params,
            deadline_s=self.deadline_s,
        )

    def _are_two(self) -> bool:
        """Return whether another instance finds what one has left."""
        return self.kind == "transfer" or self.is_shared


def _registered(connector_cls: type | None) -> str:
    """Register a class that has no name, once, and return its name."""
    assert connector_cls is not None, "state the connector or the connector_cls that is tested"
    name = f"conformance of {connector_cls.__qualname__} at {id(connector_cls):x}"
    if not registry("connectors").registered(name):
        registry("connectors").register(name, connector_cls)
    return name
