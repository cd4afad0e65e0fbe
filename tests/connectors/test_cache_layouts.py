"""A cache that one connector accepts is accepted by all, and so is a refusal."""

from __future__ import annotations

import contextlib

import pytest
import torch

from wtransfer import KVConnectorFactory, KVTransferConfig, ServingConfig
from wtransfer.config import KVCacheConfig, ModelConfig
from wtransfer.connectors.interface import KVConnectorRole
from wtransfer.errors import CacheLayoutError

OPTIONS = {
    "SharedMemoryConnector": {"staging_bytes": 1 << 20},
    "ProcessGroupConnector": {"staging_bytes": 1 << 20, "token": "a token of these tests"},
    "OffloadingConnector": {"cpu_bytes_to_use": 1 << 20},
}
ACCEPTED = {
    "contiguous": torch.zeros(6, 2, 4, 8),
    "heads behind tokens": torch.zeros(6, 2, 4, 8).transpose(1, 2),
    "keys and values apart": torch.zeros(2, 6, 4, 8).transpose(0, 1),
    "blocks with gaps": torch.zeros(12, 2, 4, 8)[::2],
    "part of a page": torch.zeros(6, 2, 4, 16)[..., :8],
}
REFUSED = {
    "elements apart": torch.zeros(6, 2, 4, 16)[..., ::2],
    "one block for all": torch.zeros(1, 2, 4, 8).expand(6, 2, 4, 8),
    "no bytes": torch.zeros(6, 2, 0),
}


@pytest.fixture
def register(weights, leaves_nothing):
    """Register a cache with a connector's worker."""
    with contextlib.ExitStack() as stack:

        def registered(connector, cache):
            config = ServingConfig(
                kv_transfer_config=KVTransferConfig(
                    connector, "e", kv_connector_extra_config=OPTIONS[connector]
                ),
                cache_config=KVCacheConfig(6, 4, 2 * 4 * 8 * 4),
                model_config=ModelConfig("m", "float32"),
            )
            worker = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER)
            stack.callback(worker.shutdown)
            worker.register_kv_caches({"layer": cache})

        yield registered


@pytest.mark.parametrize("connector", OPTIONS)
@pytest.mark.parametrize("layout", ACCEPTED)
def test_layout_is_accepted_by_every_connector(register, connector, layout):
    register(connector, ACCEPTED[layout])


@pytest.mark.parametrize("connector", OPTIONS)
@pytest.mark.parametrize("layout", REFUSED)
def test_layout_is_refused_by_every_connector(register, connector, layout):
    with pytest.raises(CacheLayoutError, match="cannot be copied by block"):
        register(connector, REFUSED[layout])
