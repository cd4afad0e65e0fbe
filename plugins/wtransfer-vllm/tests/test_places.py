"""The table of places beside vLLM itself: what is new there has no row, and is refused."""

import ast
import copy
import dataclasses
import json
import os
import types
import warnings
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: tests/make_env.py ENV")

from wtransfer_vllm import places, reach
from wtransfer_vllm.names import remember, vllm_names

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of what vLLM imports
    import vllm
    from vllm.config import (
        EngramConfig,
        KVTransferConfig,
        MultiModalConfig,
        PoolerConfig,
        VllmConfig,
    )
    from vllm.config.aux_output import AuxOutputConfig
    from vllm.config.ec_transfer import ECTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of what vLLM imports
    pytest.mark.skipif(
        not vllm.__version__.startswith("0.32."), reason="the table is that of vLLM 0.32"
    ),
]
SOURCES = Path(vllm.__file__).parent
NAMES = Path(__file__).with_name("places.json")
CLASSES = {
    "Scheduler": "v1/core/sched/scheduler.py",
    "Request": "v1/request.py",
    "EngineCore": "v1/engine/core.py",
    "GPUModelRunner": "v1/worker/gpu_model_runner.py",
    "InputBatch": "v1/worker/gpu_input_batch.py",
    "CachedRequestState": "v1/worker/gpu_input_batch.py",
    "SchedulerOutput": "v1/core/sched/output.py",
    "RequestState": "v1/engine/output_processor.py",
}
"""Classes of which each attribute was looked at: file."""
CONFIGS = ("VllmConfig", "KVTransferConfig", "ECTransferConfig", "ParallelConfig", "OffloadConfig")
CONFIGS += ("EngramConfig", "AuxOutputConfig", "EncoderCacheManagerConfig", "CacheConfig")
CONFIGS += ("MultiModalConfig", "PoolerConfig")


def attributes(name, file):
    """Return the attributes of a class: its fields, and what its methods set on themselves."""
    tree = ast.parse((SOURCES / file).read_text())
    (cls,) = (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name)
    return sorted({n.target.id for n in cls.body if isinstance(n, ast.AnnAssign)} | set_in(cls))


def set_in(tree):
    """Return the attributes that an object sets on itself within a piece of code."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def classes_that(holds):
    """Return the names of the classes in vLLM's models and layers of which a condition holds."""
    found = set()
    for file in sorted(SOURCES.glob("model_executor/**/*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and holds(node):
                found.add(node.name)
    return sorted(found)


def is_pooler(cls):
    return any("Pooler" in ast.unparse(base) for base in cls.bases)


def has_secondary_weights(cls):
    return any(
        isinstance(n, ast.Attribute) and n.attr == "secondary_weights" for n in ast.walk(cls)
    )


def made_once():
    """Return the attributes that a class makes where it finds them missing, and keeps."""
    found = set()
    for pattern in ("model_executor", "models", "v1/attention"):
        for file in sorted(SOURCES.glob(f"{pattern}/**/*.py")):
            tree = ast.parse(file.read_text())
            for cls in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
                found |= {f"{cls.name}.{name}" for name in guarded(cls)}
    return sorted(found)


def guarded(cls):
    """Yield the attributes that are set where a condition says that they are missing, and flags.

    A flag is one that is set where a condition asks for it.
    """
    for branch in (node for node in ast.walk(cls) if isinstance(node, ast.If)):
        stored = set_in(branch)
        condition = ast.unparse(branch.test) if stored else ""
        for name in stored:
            missing = (f"self.{name} is None", f"not hasattr(self, '{name}')")
            is_flag = condition.removeprefix("not ") == f"self.{name}"
            if is_flag or any(each in condition for each in missing):
                yield name


def found_in_vllm():
    """Return every name of vLLM's that may stand for a place."""
    configs = {name: getattr(vllm.config, name, None) for name in CONFIGS}
    configs |= {each.__name__: each for each in (AuxOutputConfig, ECTransferConfig)}
    ours = set(vllm_names("engines").values())
    return {
        "attributes": {name: attributes(name, file) for name, file in CLASSES.items()},
        "fields": {
            name: sorted(field.name for field in dataclasses.fields(config))
            for name, config in configs.items()
            if config is not None
        },
        "loaders": sorted(_LOAD_FORMAT_TO_MODEL_LOADER),
        "lower tiers": sorted(SecondaryTierFactory._registry),
        "made once": made_once(),
        "poolers": classes_that(is_pooler),
        "secondary weights": classes_that(has_secondary_weights),
        "weight engines": sorted(set(WeightTransferEngineFactory._registry) - ours),
    }


def test_every_connector_and_spec_of_vllm_has_a_row():
    ours = set(vllm_names("connectors").values())
    assert set(KVConnectorFactory._registry) - ours == {
        *places.CONNECTORS,
        *("MultiConnector", "OffloadingConnector"),
    }
    assert set(OffloadingSpecFactory._registry) - set(vllm_names("specs").values()) == set(
        places.SPECS
    )


@pytest.mark.nightly
def test_nothing_in_vllm_is_new_since_the_table_was_made():
    found = found_in_vllm()
    if os.environ.get("WTRANSFER_PLACES"):
        NAMES.write_text(json.dumps(found, indent=1) + "\n")
    known = json.loads(NAMES.read_text())
    assert found == known, (
        "look at each name that is new: what of it was computed from weights, and what does a "
        "commit make of it? Enter a row in wtransfer_vllm/places.py, or none; then write the names "
        "with WTRANSFER_PLACES=1"
    )


@pytest.fixture(scope="module")
def configured():
    """Make a configuration with fields set afterwards: vLLM would load the classes that they name.

    Sections are given by name, with the fields to be set in them.
    """

    def make(**fields):
        config = copy.deepcopy(default)
        for name, value in fields.items():
            if isinstance(value, dict):
                vars(getattr(config, name)).update(value)
            else:
                setattr(config, name, value)
        return config

    default = VllmConfig()
    return make


@pytest.fixture
def refusal(configured):
    def refusal(**fields):
        with pytest.raises(ValueError, match="takes no update") as caught:
            places.check_places(configured(**fields))
        return str(caught.value)

    return refusal


def kv(connector, **options):
    return KVTransferConfig(
        kv_connector=connector, kv_role="kv_both", kv_connector_extra_config=options
    )


def test_attributes_that_are_made_once_of_weights_are_vllms_own():
    made = {name.rpartition(".")[-1] for name in json.loads(NAMES.read_text())["made once"]}
    assert made.issuperset({*reach.MADE_ONCE, *reach.FLAGS, *reach.SCALES_MADE_ONCE})


def test_each_option_of_the_table_is_a_field_of_vllms_configuration(configured):
    model = types.SimpleNamespace(multimodal_config=MultiModalConfig())
    config = configured(engram_config=EngramConfig(), model_config=model)
    for path in places.OPTIONS:
        value = config
        for name in path.split("."):
            assert hasattr(value, name), path
            value = getattr(value, name)


def test_encoder_outputs_outside_of_the_engine_are_refused(refusal):
    ec = ECTransferConfig(ec_connector="ECExampleConnector", ec_role="ec_both")
    assert "start it without --ec-transfer-config: encoder outputs" in refusal(
        ec_transfer_config=ec
    )


@pytest.mark.parametrize(
    "connector",
    ["ExampleConnector", "MooncakeStoreConnector", "LMCacheConnectorV1", "somebody's"],
)
def test_store_that_other_engines_read_is_refused_also_under_multi_connector(refusal, connector):
    text = refusal(kv_transfer_config=kv(connector))
    assert f"without {connector} in --kv-transfer-config" in text
    parts = [{"kv_connector": "OffloadingConnector"}, {"kv_connector": connector}]
    assert refusal(kv_transfer_config=kv("MultiConnector", connectors=parts)) == text


def test_lower_tiers_are_named_where_they_know_hashes_alone(configured, refusal):
    def tiers(*kinds, **more):
        lower = [{"type": kind} for kind in kinds]
        options = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": lower, **more}
        return kv("OffloadingConnector", **options)

    config = configured(kv_transfer_config=tiers("fs", "obj"))
    places.check_places(config)
    assert places.rows_of(config)[-1].at_commit == "named"
    for kind in {*SecondaryTierFactory._registry, "Mine"} - {"fs", "obj"}:
        assert "a lower tier of this kind" in refusal(kv_transfer_config=tiers("fs", kind))
    own = {"spec_name": "Mine", "spec_module_path": "mine"}
    assert "forgets, is not known" in refusal(kv_transfer_config=tiers("fs", **own))


def test_memory_of_the_engine_is_not_refused(configured, refusal):
    assert "is not known" in refusal(
        kv_transfer_config=kv("OffloadingConnector", spec_name="Mine", spec_module_path="mine")
    )
    remember("connectors", "Ours", "Ours")
    for connector, options, at_commit in (
        ("OffloadingConnector", {}, "reset"),
        ("OffloadingConnector", {"spec_name": "TieringOffloadingSpec"}, "reset"),
        ("SimpleCPUOffloadConnector", {}, "reset"),
        ("NixlConnector", {}, "by request"),
        ("Ours", {}, "named"),
    ):
        config = configured(kv_transfer_config=kv(connector, **options))
        places.check_places(config)
        assert places.rows_of(config)[-1].at_commit == at_commit


def test_class_by_module_path_is_unknown_whatever_its_name(refusal):
    transfer = kv("OffloadingConnector")
    transfer.kv_connector_module_path = "somebody.elses"
    assert "whether it forgets, is not known" in refusal(kv_transfer_config=transfer)


@pytest.mark.parametrize(
    ("section", "field", "value", "option"),
    [
        ("parallel_config", "enable_eplb", True, "--enable-eplb"),
        ("parallel_config", "enable_elastic_ep", True, "--enable-elastic-ep"),
        ("scheduler_config", "scheduler_cls", "mine.Scheduler", "--scheduler-cls"),
        ("ec_manager_config", "encoder_cache_manager_cls", "mine.Manager", "--ec-manager-config"),
        (
            *("aux_output_config", "enable_return_routed_experts"),
            *(True, "--enable-return-routed-experts"),
        ),
    ],
)
def test_each_refused_option_is_named(refusal, section, field, value, option):
    assert f"start it without {option}: " in refusal(**{section: {field: value}})


def test_every_refused_place_is_named_at_once(configured):
    config = configured(parallel_config={"enable_eplb": True})
    config.offload_config.prefetch.offload_group_size = 8
    config.engram_config = EngramConfig(dp_shared_memory=True)
    with pytest.raises(ValueError, match="takes no update") as caught:
        places.check_places(config)
    for option in ("--enable-eplb", "--offload-group-size", "--engram-config"):
        assert f"start it without {option}" in str(caught.value)


@pytest.mark.parametrize(
    ("flash", "task", "score_type", "is_refused"),
    [
        (True, None, "late-interaction", True),
        (True, "token_embed", "bi-encoder", True),
        (True, None, "bi-encoder", False),
        (True, "embed", "late-interaction", False),
        (False, None, "late-interaction", False),
    ],
)
def test_query_that_waits_in_a_worker_for_its_documents_is_refused(
    configured, flash, task, score_type, is_refused
):
    pooler = PoolerConfig(enable_flash_late_interaction=flash, task=task)
    model = types.SimpleNamespace(pooler_config=pooler, score_type=score_type)
    rows = places.rows_of(configured(model_config=model))
    refused = [row.place for row in rows if row.at_commit == places.REFUSED]
    assert refused == [places.LATE_INTERACTION.place] * is_refused


@pytest.mark.parametrize(("device", "is_refused"), [("cpu", True), ("cuda", False)])
def test_compiled_code_with_weights_as_constants_is_refused(configured, device, is_refused):
    config = configured(
        device_config={"device_type": device},
        compilation_config={"inductor_compile_config": {"max_autotune": True}},
    )
    assert (places.FREEZING in places.rows_of(config)) == is_refused


def test_scheduler_of_vllms_own_is_known(configured):
    ours = "vllm.v1.core.sched.scheduler.Scheduler"
    places.check_places(configured(scheduler_config={"scheduler_cls": ours}))
