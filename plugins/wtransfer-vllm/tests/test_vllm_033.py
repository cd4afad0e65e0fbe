"""vLLM 0.33, which has no build for CPUs: its own modules, without a model.

The wheel is large, so this is run nightly.
"""

import json
import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.nightly, pytest.mark.live, pytest.mark.timeout(1800)]

RELEASE = "0.33.0"
LOOK = """
    import json
    import vllm
    from wtransfer_vllm import names, plugin
    plugin.register()
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    try:
        OffloadingSpecFactory.get_spec_cls({"spec_name": "wtransfer-CPUOffloadingSpec"})
    except ValueError as error:
        refusal = str(error)
    engine = WeightTransferEngineFactory._registry["shm"]()
    from wtransfer_vllm import trainer
    twin = trainer.WeightTransferTrainerFactory._registry["shm"]()
    print(json.dumps({
        "release": vllm.__version__,
        "engine": [engine.__name__, sorted(engine.__abstractmethods__)],
        "twin": [issubclass(twin, trainer.TrainerEngine), sorted(twin.__abstractmethods__)],
        "info": trainer.init_info("shm", rank=1).is_sender,
        "connectors": sorted(names.vllm_names("connectors").values()),
        "refusal": refusal,
        "watched": hasattr(EngineCore.collective_rpc, "wtransfer_call"),
    }))
"""


@pytest.fixture(scope="module")
def beside(tmp_path_factory):
    """Return the environment of processes that import vLLM 0.33."""
    folder = tmp_path_factory.mktemp("vllm-033")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
    subprocess.run([*pip, "-q", "-d", str(folder), f"vllm=={RELEASE}"], check=True, timeout=1500)
    (wheel,) = folder.glob("vllm-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder / "unpacked")
    wheel.unlink()
    path = [str(folder / "unpacked"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def run(beside, *command):
    done = subprocess.run(
        [sys.executable, *command],
        env=beside,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.covers("weights", "connectors", "specs", release=RELEASE, how="modules only")
def test_every_backend_is_registered_and_the_engine_core_watched(beside):
    said = json.loads(run(beside, "-c", textwrap.dedent(LOOK)).splitlines()[-1])
    assert said["release"] == RELEASE
    assert said["engine"] == ["VllmEngine", []]
    assert (said["twin"], said["info"]) == ([True, []], False)
    assert {"SharedStorageConnector", "wtransfer-OffloadingConnector"} <= set(said["connectors"])
    assert "runs under wtransfer's connector" in said["refusal"]
    assert said["watched"] is True


def test_the_adapter_keeps_its_contract_over_the_base_class_of_that_release(beside):
    tests = Path(__file__).with_name("test_connector.py")
    said = run(beside, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests))
    assert " passed" in said
    assert "skipped" not in said
