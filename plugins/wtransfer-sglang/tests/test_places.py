"""The table of places beside SGLang itself: what is new there has no row, and is refused."""

import ast
import functools
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace as Bag

import pytest
from plain_server import cache_of, parts, put

from wtransfer_sglang import places

sglang = pytest.importorskip("sglang", reason="SGLang is not installed: tests/make_env.py ENV")

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of SGLang's sources
    pytest.mark.skipif(
        not sglang.__version__.startswith("0.5.23"), reason="the table is that of SGLang 0.5.23"
    ),
]
SOURCES = Path(sglang.__file__).parent / "srt"
NAMES = Path(__file__).with_name("places.json")
CLASSES = {
    "Scheduler": "managers/scheduler.py",
    "Req": "managers/schedule_batch.py",
    "ReqLogprob": "managers/schedule_batch.py",
    "ScheduleBatch": "managers/schedule_batch.py",
    "TpModelWorker": "managers/tp_worker.py",
    "ModelRunner": "model_executor/model_runner.py",
    "ReqState": "managers/tokenizer_manager.py",
    "TokenizerManager": "managers/tokenizer_manager.py",
}
"""Classes of which each attribute was looked at: file."""
READERS = re.compile(r"\b(load_file|safe_open|torch\.load|load_state_dict_from_url)\(")
"""Calls by which a model reads files that an update does not bring."""


def attributes(name, file):
    """Return the attributes of a class: its fields, and what its methods set on themselves."""
    tree = ast.parse((SOURCES / file).read_text())
    (cls,) = (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name)
    found = {n.target.id for n in cls.body if isinstance(n, ast.AnnAssign)}
    for node in ast.walk(cls):
        is_own = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if is_own and isinstance(node.value, ast.Name) and node.value.id == "self":
            found.add(node.attr)
    return sorted(found)


@functools.cache
def sources():
    """Return the sources of SGLang by their modules."""
    files = sorted(SOURCES.glob("**/*.py"))
    names = (".".join(each.relative_to(SOURCES.parents[1]).with_suffix("").parts) for each in files)
    return {name: each.read_text() for name, each in zip(names, files, strict=True)}


@functools.cache
def classes():
    """Return the classes in SGLang: name with its module -> names of its bases."""
    return {
        f"{module}.{name}": re.findall(r"\w+", bases)
        for module, text in sources().items()
        for name, bases in re.findall(r"^class (\w+)\(([^()]*)\):", text, re.MULTILINE)
    }


def classes_from(base):
    """Return the names of the classes that are made from one, or from those that are."""
    known, names = {base}, []
    while True:
        found = [
            name for name, bases in classes().items() if name not in names and known & set(bases)
        ]
        if not found:
            return sorted(names)
        names += found
        known |= {name.rpartition(".")[2] for name in found}


def models_that_read_files():
    """Return the functions in SGLang's models that read files, by class and file."""
    found = set()
    for file in sorted(SOURCES.glob("models/**/*.py")):
        text = file.read_text()
        if not READERS.search(text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                for each in node.body:
                    if isinstance(each, ast.FunctionDef) and READERS.search(ast.unparse(each)):
                        found.add(f"{file.stem}.{node.name}.{each.name}")
    return sorted(found)


def arguments():
    """Return SGLang's arguments: name -> default."""
    found = {}
    for file in sorted(SOURCES.glob("arg_groups/fields/*.py")):
        for cls in ast.parse(file.read_text()).body:
            if isinstance(cls, ast.ClassDef):
                fields = [each for each in cls.body if isinstance(each, ast.AnnAssign)]
                found |= {each.target.id: value_of(each.value) for each in fields}
    return found


def value_of(node):
    try:
        return ast.literal_eval(node)
    except (TypeError, ValueError):
        return ast.unparse(node) if node is not None else None


def options():
    """Return the options of SGLang's command line, with their other names."""
    found = {f"--{name.replace('_', '-')}" for name in arguments()}
    for file in sorted(SOURCES.glob("arg_groups/fields/*.py")):
        found |= set(re.findall(r'"(--[a-z0-9-]+)"', file.read_text()))
    return found


def load_formats():
    tree = ast.parse((SOURCES / "configs/load_config.py").read_text())
    (cls,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "LoadFormat")
    return [value_of(each.value) for each in cls.body if isinstance(each, ast.Assign)]


def storages():
    """Return the names by which SGLang has storages of HiCache."""
    tree = ast.parse((SOURCES / "mem_cache/storage/backend_factory.py").read_text())
    calls = [each for each in ast.walk(tree) if isinstance(each, ast.Call)]
    registered = [each for each in calls if ast.unparse(each.func).endswith(".register_backend")]
    return {value_of(each.args[0]) for each in registered}


def prefix_caches_by_name():
    """Return the names under which SGLang registers prefix caches."""
    call = re.compile(r'register_radix_cache_backend\(\s*"(\w+)"')
    return sorted({name for text in sources().values() for name in call.findall(text)})


def found_in_sglang():
    """Return every name of SGLang's that may stand for a place."""
    return {
        "attributes": {name: attributes(name, file) for name, file in CLASSES.items()},
        "arguments": sorted(arguments()),
        "load formats": load_formats(),
        "models that read files": models_that_read_files(),
        "offloaders": classes_from("BaseOffloader"),
        "prefix caches": classes_from("BasePrefixCache"),
        "prefix caches by name": prefix_caches_by_name(),
        "storages": classes_from("HiCacheStorage"),
    }


def test_nothing_in_sglang_is_new_since_the_table_was_made():
    found = found_in_sglang()
    if os.environ.get("WTRANSFER_PLACES"):
        NAMES.write_text(json.dumps(found, indent=1) + "\n")
    known = json.loads(NAMES.read_text())
    assert found == known, (
        "look at each name that is new: what of it was computed from weights, and what does a "
        "commit make of it? Enter a row in wtransfer_sglang/places.py, or none; then write the "
        "names with WTRANSFER_PLACES=1"
    )


def test_every_storage_of_sglang_has_a_row():
    assert storages() == set(places.STORAGES)


def test_every_prefix_cache_of_the_table_is_one_of_sglangs():
    assert set(places.CACHES) <= set(classes_from("BasePrefixCache"))


def test_every_model_of_the_table_reads_files_where_it_loads():
    found = {each.split(".")[1] for each in models_that_read_files()}
    assert set(places.OTHER_FILES) <= found


def test_each_option_of_the_table_is_an_argument_of_sglangs_and_off_by_default():
    defaults, known = arguments(), options()
    for paths, row in places.OPTIONS.items():
        for option in re.findall(r"--[a-z0-9-]+", row.place):
            assert option in known, option
        for path in paths.split(" and "):
            owner, name = path.split(".", 1)
            if owner == "options":
                assert not defaults[name] or defaults[name] == row.off, path
            elif owner == "scheduler" and "." not in name:
                assert name in attributes("Scheduler", CLASSES["Scheduler"]), path


def test_every_word_of_the_table_is_documented():
    rows = [*places.ALWAYS, *places.OPTIONS.values(), *places.CACHES.values()]
    rows += [row for _, row in places.OTHER_FILES.values()]
    words = {row.at_commit for row in rows} | {word for word, _ in places.STORAGES.values()}
    documented = set(re.findall(r"^(\w[\w ]*?)  +\S", places.__doc__, re.MULTILINE))
    assert words == documented


def refusal(given):
    return places.refusal_of(**vars(given))


def test_plain_server_is_not_refused():
    given = parts()
    assert refusal(given) is None
    given.derived = "SGLang's own reason"
    assert refusal(given) == "SGLang's own reason"


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("options.speculative_algorithm", "EAGLE", "--speculative-algorithm: a draft model would"),
        ("scheduler.draft_worker", object(), "--speculative-algorithm: a draft model would keep"),
        ("options.disaggregation_mode", "prefill", "--disaggregation-mode: requests of which"),
        ("scheduler.model_config.quantization", "fp8", "quantised weights: "),
        ("scheduler.tp_worker.is_hybrid_swa", True, "several groups of KV cache.* sliding windows"),
        ("scheduler.is_hybrid_ssm", True, "several groups of KV cache.* state spaces"),
        ("scheduler.model_config.is_multimodal", True, "a multimodal model: "),
        ("scheduler.enable_lora", True, "--enable-lora: "),
        ("scheduler.dllm_config", object(), "--dllm-algorithm: "),
        ("options.enable_hisparse", True, "--enable-hisparse: .* beside the prefix cache"),
        ("options.enable_lmcache", True, "--enable-lmcache: "),
        ("options.enable_flexkv", True, "--enable-flexkv: it finds KV by tokens alone"),
        ("options.enable_pdmux", True, "--enable-pdmux: .* beside the prefix cache"),
        ("options.enable_unified_cache_external_linker", True, "links blocks of another store"),
        ("options.enable_streaming_session", True, "--enable-streaming-session: "),
        ("parallel.pp_size", 2, "--pp-size: "),
        ("parallel.attn_dp_enabled", True, "data-parallel attention"),
        ("options.elastic_ep_backend", "mooncake", "--elastic-ep-backend: "),
        ("options.enable_eplb", True, "--enable-eplb: "),
        ("options.dwdp_size", 2, "--dwdp-size: "),
        ("options.kt_weight_path", "folder", "--kt-weight-path: "),
        ("options.offload_group_size", 1, "--offload-group-size: "),
        ("options.ple_offload_backend", "file", "--ple-offload-backend file: "),
        ("options.weight_cache_mode", "client", "--weight-cache-mode: "),
        ("options.forward_hooks", [{}], "--forward-hooks: "),
        ("options.language_only", True, "--language-only: "),
        ("options.enable_nvidia_megakernel", True, "--enable-nvidia-megakernel: "),
        ("options.enable_amd_monokernel", True, "--enable-amd-monokernel: "),
        ("options.enable_return_hidden_states", True, "--enable-return-hidden-states: "),
        ("options.return_hidden_states_mode", "full", "--return-hidden-states-mode full: "),
        ("options.enable_return_aux_hidden_states", True, "--enable-return-aux-hidden-states: "),
    ],
)
def test_each_refused_place_is_named(path, value, text):
    given = parts()
    put(given, path, value)
    assert re.search(f"start it without .*{text}", refusal(given))


@pytest.mark.parametrize(
    ("path", "value", "at_commit"),
    [
        ("options.return_hidden_states_mode", "last", None),
        ("options.cpu_offload_gb", 1, "loaded"),
        ("options.init_expert_location", "places.json", "loaded"),
        ("options.enable_return_routed_experts", True, "recomputed"),
        ("options.enable_hierarchical_cache", True, "named"),
        ("options.enable_session_radix_cache", True, "named"),
        ("options.enable_weights_cpu_backup", True, "reset"),
        ("options.enable_custom_logit_processor", True, "not of weights"),
    ],
)
def test_place_that_a_commit_renews_is_not_refused(path, value, at_commit):
    given = parts()
    put(given, path, value)
    assert refusal(given) is None
    rows = places.rows_of(given.scheduler, given.parallel, given.options)
    assert [row.at_commit for row in rows[len(places.ALWAYS) : -1]] == [at_commit][
        : bool(at_commit)
    ]


@pytest.mark.parametrize("option", ["routed_experts", "indexer_topk"])
def test_what_is_found_by_slots_is_refused_beside_lower_levels(option):
    given = parts()
    put(given, f"options.enable_return_{option}", True)
    assert refusal(given) is None
    given.options.enable_hierarchical_cache = True
    name = option.replace("_", "-")
    assert f"without --enable-return-{name}, or without --enable-hier" in refusal(given)


def test_prefix_cache_that_is_unknown_is_refused_by_its_option_or_class():
    given = parts()
    given.scheduler.tree_cache = cache_of("UnifiedRadixCache", "of.another")
    assert "without UnifiedRadixCache as prefix cache: by which name" in refusal(given)
    given.options.radix_cache_backend = "mine"
    assert "start it without --radix-cache-backend mine: by which name" in refusal(given)


def test_prefix_cache_and_its_option_are_told_once():
    given = parts()
    module = "sglang.srt.mem_cache.storage.flexkv.flexkv_radix_cache"
    given.scheduler.tree_cache = cache_of("FlexKVRadixCache", module)
    given.options.enable_flexkv = True
    assert refusal(given) == "start it without --enable-flexkv: it finds KV by tokens alone"


def with_storage(name, storage=None):
    given = parts()
    given.options.hicache_storage_backend = name
    given.scheduler.tree_cache.cache_controller = Bag(storage_backend=storage)
    return given


def test_storage_that_is_unknown_is_refused_and_tiers_and_sglangs_own_are_not():
    for name in places.STORAGES:
        assert refusal(with_storage(name)) is None
    ours = cache_of("TierStorage", "wtransfer_sglang.storage")
    assert refusal(with_storage("dynamic", ours)) is None
    for given in (with_storage("dynamic", cache_of("Mine", "mine")), with_storage("somebody's")):
        assert "start it without --hicache-storage-backend " in refusal(given)
        assert "whether it forgets, is not known" in refusal(given)


@pytest.mark.parametrize("name", places.OTHER_FILES)
def test_model_that_reads_other_files_at_each_load_is_refused(name):
    attribute, row = places.OTHER_FILES[name]
    given = parts()
    model = given.scheduler.tp_worker.model_runner.model = type(name, (), {})()
    assert refusal(given) is None
    setattr(model, attribute, [object()])
    assert f"start it without {row.place}: each load reads" in refusal(given)


def test_every_refused_place_is_named_at_once():
    given = parts()
    given.options.enable_eplb = given.options.enable_streaming_session = True
    given.derived = "SGLang's own reason"
    eplb, session, derived = refusal(given).split("; ")
    assert eplb.startswith("start it without --enable-eplb: ")
    assert session.startswith("start it without --enable-streaming-session: ")
    assert derived == "SGLang's own reason"
