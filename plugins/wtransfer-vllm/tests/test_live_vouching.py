"""Which name a live vLLM gives to KV cache of what it has loaded, and of what it receives."""

import time

import pytest
from engines import Engine, publish

pytestmark = [pytest.mark.live, pytest.mark.nightly, pytest.mark.timeout(300)]


@pytest.fixture
def engine(models, tmp_path):
    engine = Engine(
        tmp_path,
        model=str(models / "A"),
        weight_transfer_config={"backend": "shm"},
        env={"WTRANSFER_CACHE": str(tmp_path / "cache")},
    )
    yield engine
    engine.close()


def test_loaded_and_received_weights_have_one_name(engine, joined, weights):
    own = engine.do("kv_name")
    assert own.startswith("local:")
    engine.do("vouch")
    end = time.monotonic() + 20
    while (vouched := engine.do("kv_name")) is None:
        assert time.monotonic() < end
    publisher, held = joined("A")
    assert engine.do("kv_name") == vouched, "joining a publisher changes nothing"
    assert [each.fingerprint for each in publisher.workers()] != [vouched]
    loaded = dict(held)
    held.update(weights["B"])
    other = publish(publisher, engine, "b").fingerprint
    assert engine.do("kv_name") == other != vouched
    held.update(loaded)
    assert publish(publisher, engine, "a").fingerprint == vouched
    assert engine.do("kv_name") == vouched
    engine.do("rpc", "reload_weights")
    lost = engine.do("kv_name")
    engine.do("weights_replaced")
    names = [own, lost, engine.do("kv_name")]
    assert len(set(names)) == 3
    assert all(name.startswith("local:") for name in names)
