"""What vLLM's processes get: names, lazily, once, and never an exception."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from wtransfer_vllm.plugin import on_import

STANDINS = Path(__file__).parent / "standins"


def assemble(root, generation):
    """Return a folder with a stand-in for one generation of vLLM."""
    folder = root / generation
    shutil.copytree(STANDINS / "vllm", folder / "vllm")
    base = folder / "vllm" / "distributed" / "weight_transfer" / "base.py"
    shutil.copy(STANDINS / f"base_{generation}.py", base)
    return str(folder)


@pytest.fixture
def python(tmp_path):
    """Return a function that runs code beside a generation of vLLM, and returns its last line."""

    def run(generation, code, **env):
        path = os.pathsep.join([assemble(tmp_path, generation), *filter(None, sys.path)])
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env={**os.environ, "PYTHONPATH": path, **env},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout.splitlines()[-1])
        return (said if isinstance(said, dict) else {"said": said}) | {"log": done.stderr}

    return run


NAMES = """
    import json, logging, sys
    logging.basicConfig(level="DEBUG")
    from wtransfer_vllm.plugin import register
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as factory
    register()
    register()
    backends = list(factory._registry)
    heavy = [name for name in ("torch", "wtransfer.engines.shm", "pluggy") if name in sys.modules]
    print(json.dumps({"backends": backends, "heavy": heavy}))
"""


@pytest.mark.parametrize("generation", ["current", "seed"])
def test_every_engine_is_registered_once_without_importing_it(python, generation):
    found = python(generation, NAMES)
    assert {"nccl", "shm"} <= set(found["backends"])
    assert found["heavy"] == []
    # Each call says what it added, and how long that took.
    took = r".*\(\d+\.\d ms\)"
    assert len(re.findall(rf"INFO:.*weight transfer backends .*shm{took}", found["log"])) == 1
    assert len(re.findall(rf"DEBUG:.*no weight transfer backend{took}", found["log"])) == 1


def test_name_of_a_vllm_backend_stays_vllms(python):
    code = """
        import json, sys, types
        from wtransfer.registry.resolve import registry
        registry("engines").register("ipc", "nowhere", "Engine")
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as factory
        factory.register_engine("ipc", "vllms", "Own")
        theirs = factory._registry["ipc"]
        from wtransfer_vllm import names, plugin
        from wtransfer_vllm.plugin import register
        register()
        print(json.dumps({
            "kept": factory._registry["ipc"] is theirs,
            "ours": sorted(each for each in factory._registry if each.startswith("wtransfer-")),
            "means": names.our_name("engines", "wtransfer-ipc"),
            "is_ours": [names.is_ours("engines", each) for each in ("ipc", "wtransfer-ipc")],
        }))
    """
    found = python("current", code)
    assert found["kept"] is True
    assert "wtransfer-ipc" in found["ours"]
    assert found["means"] == "ipc"
    assert found["is_ours"] == [False, True]


KV_NAMES = """
    import json, sys
    from wtransfer.registry.resolve import registry
    registry("connectors").register("acme", "nowhere", "Connector")
    registry("specs").register("acme-disk", "nowhere", "Spec")
    from wtransfer_vllm.plugin import register
    register()
    register()
    early = [each for each in sys.modules if "kv_connector" in each or "kv_offload" in each]
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    refusals = {}
    for name in ("acme-disk", "wtransfer-CPUOffloadingSpec"):
        try:
            OffloadingSpecFactory._registry[name]()
        except ValueError as error:
            refusals[name] = str(error)
    heavy = [each for each in ("torch", "pluggy", "nowhere") if each in sys.modules]
    connectors = KVConnectorFactory._registry
    print(json.dumps([early, connectors, refusals, heavy]))
"""


@pytest.mark.parametrize("generation", ["current", "seed", "other"])
def test_connectors_and_specs_are_registered_when_vllm_imports_its_factories(python, generation):
    early, connectors, refusals, heavy = python(generation, KV_NAMES)["said"]
    assert early == []
    assert heavy == []
    ours = {
        name for name, (module, _) in connectors.items() if module == "wtransfer_vllm.connector"
    }
    assert ours == {
        "acme",
        "ProcessGroupConnector",
        "SharedMemoryConnector",
        "SharedStorageConnector",
        "wtransfer-MultiConnector",
        "wtransfer-OffloadingConnector",
    }
    assert connectors["OffloadingConnector"] == ["vllms", "OffloadingConnector"]
    for name, ours in (
        ("acme-disk", "acme-disk"),
        ("wtransfer-CPUOffloadingSpec", "CPUOffloadingSpec"),
    ):
        assert refusals[name] == (
            f"the offloading spec {ours!r} is wtransfer's and runs under wtransfer's connector: "
            f'set "kv_connector": "wtransfer-OffloadingConnector" and "spec_name": "{ours}" in '
            "--kv-transfer-config"
        )


def test_vllms_multi_connector_refuses_sub_connectors_of_wtransfer(python):
    code = """
        import json, types
        from wtransfer_vllm.plugin import register
        register()
        import vllm.distributed.kv_transfer.kv_connector.factory
        from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
        bag = types.SimpleNamespace

        def made(*names):
            children = [{"kv_connector": name} for name in names]
            transfer = bag(kv_connector_extra_config={"connectors": children})
            return MultiConnector(bag(kv_transfer_config=transfer), "role", kv_cache_config=None)

        theirs = made("NixlConnector", "OffloadingConnector").made_with[1:]
        try:
            made("NixlConnector", "SharedStorageConnector")
        except ValueError as error:
            print(json.dumps([theirs, str(error)]))
    """
    theirs, refusal = python("current", code)["said"]
    assert theirs == ["role", None]
    assert refusal == (
        "'SharedStorageConnector' is wtransfer's connector and runs under wtransfer's "
        'MultiConnector: set "kv_connector": "wtransfer-MultiConnector" in --kv-transfer-config'
    )


def test_unknown_engine_shape_is_reported_and_left_alone(python):
    found = python("other", NAMES)
    assert found["backends"] == ["nccl"]
    assert "does not know" in found["log"]


def test_invalid_setting_does_not_stop_vllm(python):
    found = python("current", NAMES, WTRANSFER_PIN="no pin at all")
    assert found["backends"] == ["nccl"]
    assert "vLLM goes on without" in found["log"]


@pytest.mark.parametrize("before", [True, False], ids=["core first", "plug-in first"])
def test_engine_core_is_watched_whenever_it_is_imported(python, before):
    code = f"""
        import json, sys
        from wtransfer_vllm.plugin import register
        if {before}:
            import vllm.v1.engine.core
        register()
        early = "vllm.v1.engine.core" in sys.modules
        import vllm.v1.engine.core as core
        watched = hasattr(core.EngineCore.collective_rpc, "wtransfer_call")
        finders = [f for f in sys.meta_path if vars(f).get("_name") == core.__name__]
        print(json.dumps({{"early": early, "watched": watched, "finders": len(finders)}}))
    """
    found = python("current", code)
    assert (found["early"], found["watched"], found["finders"]) == (before, True, 0)


@pytest.mark.parametrize(
    ("generation", "arguments"),
    [("seed", "place"), ("current", "whole, None, model")],
)
def test_engine_of_each_shape_reports_an_invalid_invitation_without_raising(
    python, generation, arguments, tmp_path
):
    code = f"""
        import json, types
        from wtransfer_vllm.plugin import register
        register()
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as factory
        bag = types.SimpleNamespace
        place = bag(rank=0, world_size=1, data_parallel_index=0)
        config = bag(backend="shm")
        model = bag(modules=list)
        whole = bag(
            parallel_config=place,
            model_config=bag(model={str(tmp_path)!r}, hf_config=None),
            load_config=bag(load_format="auto"),
            instance_id="x",
        )
        engine = factory.create_engine(config, {arguments})
        engine.init_transfer_engine(engine.parse_init_info({{"rank_offset": 1}}))
        said = engine.member.outcome.error
        engine.shutdown()
        print(json.dumps({{"class": type(engine).__name__, "said": said}}))
    """
    found = python(generation, code)
    assert found["class"] == {"seed": "SeedEngine", "current": "VllmEngine"}[generation]
    assert found["said"].startswith("init_info names no publisher of wtransfer")


def test_callback_runs_once_when_its_module_is_imported(tmp_path, monkeypatch):
    (tmp_path / "wtv_later.py").write_text("VALUE = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    on_import("wtv_later", lambda module: seen.append(module.VALUE))
    assert seen == []
    module = importlib.import_module("wtv_later")
    assert seen == [3]
    on_import("wtv_later", lambda module: seen.append(module.VALUE + 1))
    assert seen == [3, 4]
    importlib.reload(module)
    assert seen == [3, 4]
    del sys.modules["wtv_later"]


def test_callback_of_a_missing_module_never_runs(monkeypatch):
    seen = []
    on_import("wtv_never", seen.append)
    assert importlib.util.find_spec("wtv_never") is None
    assert seen == []
