"""The tests that every KV connector has to pass; the built-in ones pass them, too.

Subclass it in a test module of your own::

    from wtransfer.testing.connector import ConnectorConformance


    class TestMine(ConnectorConformance):
        connector = "MyConnector"
        kind = "store"

        def options_in(self, folder):
            return {"path": str(folder)}

It is served from the mini engine: a real scheduler, a real model whose keys and values are the
same bits whether they were computed or loaded, and metadata that travels as plain data. Tests
cannot be overridden, except by one that says why the connector may fail it::

        @pytest.mark.xfail(reason="it only ever saves")
        def test_something_is_loaded(self, site):
            super().test_something_is_loaded(site)
"""

from __future__ import annotations

from wtransfer.testing.connector_calls import CallTests
from wtransfer.testing.connector_ends import EndTests
from wtransfer.testing.connector_faults import FaultTests
from wtransfer.testing.connector_processes import ProcessTests
from wtransfer.testing.connector_tokens import TokenTests
from wtransfer.testing.connector_weights import WeightsTests
from wtransfer.testing.excuses import check_excused


class ConnectorConformance(TokenTests, CallTests, FaultTests, WeightsTests, EndTests, ProcessTests):
    """Subclass it with a name that starts with ``Test``, and say which connector is meant.

    What can be said stands in `wtransfer.testing.connector_kit.ConnectorKit`.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        check_excused(cls, ConnectorConformance)
