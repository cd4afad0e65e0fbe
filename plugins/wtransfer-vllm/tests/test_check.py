"""Checking a model: its twins, what is compared, and faults that no proof of parameters sees."""

import contextlib
import json
import time

import architectures
import pytest
import stale_state
import torch
from architectures import DEEPSEEK, INT8, MOE, SIZES, check
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from tiny_models import make

from wtransfer_vllm import check as checking
from wtransfer_vllm import twins


@pytest.fixture
def model(tmp_path):
    """Maker of a folder with a configuration, and nothing else."""
    pytest.importorskip("transformers")

    def write(model_type, architecture, quantisation=None, **settings):
        if quantisation:
            settings |= {"quantization_config": quantisation}
        folder = tmp_path / model_type
        return architectures.write_model(folder, model_type, architecture, settings)

    return write


def run(*arguments):
    """Run the command in this process, as far as it gets without an engine."""
    return CliRunner().invoke(checking.check, [str(each) for each in arguments])


# -- twins


def test_twins_keep_dtype_widths_and_every_kind_of_layer_and_differ_in_every_tensor(
    model, tmp_path
):
    folder = model("deepseek_v3", "DeepseekV3ForCausalLM", **DEEPSEEK)
    (folder / "tokenizer.json").write_text("{}")
    for seed, name in enumerate("AB"):
        twins.make_twin(folder, tmp_path / name, seed)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in "AB")
    assert one.keys() == other.keys()
    assert not [name for name, tensor in one.items() if torch.equal(tensor, other[name])]
    assert {tensor.dtype for tensor in one.values()} == {torch.bfloat16}
    # Three dense layers and one with experts: two of each group, of whose halves eight are taken.
    assert "model.layers.2.mlp.gate_proj.weight" in one
    assert one["model.layers.3.mlp.experts.15.up_proj.weight"].shape == (64, 128)
    assert not [name for name in one if "layers.4." in name or "experts.16." in name]
    config = json.loads((tmp_path / "A" / "config.json").read_text())
    assert (config["vocab_size"], config["num_nextn_predict_layers"]) == (320, 0)
    assert (tmp_path / "A" / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("model_type", "architecture", "settings", "expected"),
    [
        ("llama", "LlamaForCausalLM", {}, (2, None)),
        ("qwen3_moe", "Qwen3MoeForCausalLM", MOE, (2, 4)),
        ("qwen3_moe", "Qwen3MoeForCausalLM", MOE | {"mlp_only_layers": [0, 1, 5]}, (3, 4)),
        (
            "gemma3_text",
            "Gemma3ForCausalLM",
            {"layer_types": ["sliding_attention"] * 4 + ["full_attention"] * 2},
            (5, None),
        ),
    ],
)
def test_twins_have_the_fewest_first_layers_with_every_kind(
    model, model_type, architecture, settings, expected
):
    config, quantisation = twins.small_config(model(model_type, architecture, **settings))
    assert (config.num_hidden_layers, getattr(config, "num_experts", None)) == expected
    assert quantisation is None


def test_language_model_within_another_is_made_smaller(model):
    text = SIZES | {"num_hidden_layers": 8, "layer_types": ["full_attention"] * 8}
    vision = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    folder = model(
        "gemma3",
        "Gemma3ForConditionalGeneration",
        text_config=text,
        vision_config=vision | {"intermediate_size": 64, "image_size": 28},
    )
    config, _ = twins.small_config(folder)
    assert (config.text_config.num_hidden_layers, config.vision_config.num_hidden_layers) == (2, 2)
    assert config.text_config.hidden_size == 128


def test_twin_is_quantised_as_its_model_by_scales_of_its_own_weights(model, tmp_path):
    pytest.importorskip("compressed_tensors")
    twins.make_twin(model("llama", "LlamaForCausalLM", INT8), tmp_path / "A", 1)
    tensors = load_file(tmp_path / "A" / "model.safetensors")
    weight = tensors["model.layers.0.mlp.gate_proj.weight"]
    assert weight.dtype == torch.int8
    assert (weight.abs().amax(1) >= 127).all() or (weight == -128).any()
    assert tensors["model.layers.0.mlp.gate_proj.weight_scale"].shape == (256, 1)
    assert tensors["lm_head.weight"].dtype == torch.bfloat16
    config = json.loads((tmp_path / "A" / "config.json").read_text())
    assert config["quantization_config"] == INT8


def test_experts_are_counted_in_the_model_and_told_as_its_checkpoint_has_them(model):
    each = model("qwen3_moe", "Qwen3MoeForCausalLM", **MOE)
    own = ["model.layers.0.mlp.gate.weight", "model.layers.0.mlp.experts.0.up_proj.weight"]
    assert twins.experts_of(each, own) == "16 experts, one tensor each"
    packed = ["model.layers.0.mlp.experts.gate_up_proj"]
    assert twins.experts_of(each, packed) == "16 experts, packed in one tensor"
    assert twins.experts_of(each, own[:1]) is None


def test_trainers_model_has_the_values_of_the_twin(model, tmp_path):
    folder = model("llama", "LlamaForCausalLM")
    twins.make_twin(folder, tmp_path / "A", 1)
    tensors = load_file(tmp_path / "A" / "model.safetensors")
    held = twins.make_trained(folder, 1).state_dict()
    assert all(torch.equal(held[name], tensors[name]) for name in tensors)


def test_disturbed_copy_differs_in_floats_and_in_packed_rows_and_links_the_rest(tmp_path):
    folder = make(tmp_path / "model", 1)
    file = folder / "model.safetensors"
    packed = torch.arange(12, dtype=torch.int8).reshape(3, 4)
    more = {"packed": packed, "order": torch.arange(3), "fp8": packed.to(torch.float8_e4m3fn)}
    tensors = load_file(file)
    tensors["twice"] = tensors["lm_head.weight"].clone()
    save_file(tensors | more, file, metadata={"format": "pt"})
    (folder / "wtransfer.json").write_text("a seal")
    twins.disturb(folder, tmp_path / "copy")
    made = load_file(tmp_path / "copy" / "model.safetensors")
    for name, tensor in tensors.items():
        assert not torch.equal(made[name], tensor), name
        assert torch.allclose(made[name].float(), tensor.float(), rtol=0.5), name
    assert torch.equal(made["twice"], made["lm_head.weight"])
    assert torch.equal(made["packed"], packed[[2, 0, 1]])
    assert torch.equal(made["fp8"].float(), packed[[2, 0, 1]].float())
    assert torch.equal(made["order"], torch.arange(3))
    assert (tmp_path / "copy" / "config.json").resolve() == folder / "config.json"
    assert not (tmp_path / "copy" / "wtransfer.json").exists()


# -- what cannot be checked


def test_model_that_cannot_be_checked_ends_with_2_and_a_sentence(model, tmp_path):
    gptq = model("llama", "LlamaForCausalLM", {"quant_method": "gptq", "bits": 4})
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    (unknown / "config.json").write_text('{"model_type": "of_tomorrow"}')
    (tmp_path / "empty").mkdir()
    for folder, sentence in (
        (gptq, "twins of quant_method 'gptq' cannot be made; use --full"),
        (unknown, "transformers does not know the configuration"),
        (tmp_path / "empty", "has no config.json"),
        ("not/cached", "neither a folder nor in the local cache"),
    ):
        done = run(folder, "--json")
        document = json.loads(done.stdout)
        assert (done.exit_code, document["result"]) == (2, "not checked"), done.output
        assert sentence in document["error"]
    assert "has no safetensors files" in run(gptq, "--full").stdout
    assert run(gptq, "--vllm", "[1]").exit_code == 2


def test_model_whose_configuration_cannot_be_made_smaller_ends_with_2_and_a_sentence(model):
    # Its layers have settings of their own by their numbers, of which the twin has too few.
    settings = {
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "global_head_dim": 64,
    }
    done = run(model("gemma4_text", "Gemma4ForCausalLM", **settings), "--json")
    document = json.loads(done.stdout)
    assert (done.exit_code, document["result"]) == (2, "not checked"), done.output
    assert document["error"].startswith("twins cannot be made: ValueError: ")
    assert document["error"].endswith("; use --full")


def test_an_error_of_any_kind_ends_with_2_and_is_shown_in_full(model, monkeypatch):
    def start(*_):
        raise OSError("no pipe")

    monkeypatch.setattr(checking, "_start", start)
    done = run(model("llama", "LlamaForCausalLM"))
    assert (done.exit_code, "not checked: OSError: no pipe" in done.stdout) == (2, True)
    assert 'raise OSError("no pipe")' in done.stderr


def test_engine_that_ends_or_hangs_is_named_with_the_end_of_its_log(tmp_path, monkeypatch):
    from wtransfer_vllm import check_engine

    stand_in = tmp_path / "stand_in.py"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(check_engine, "__name__", "stand_in")
    for text, timeout_s, sentence in (
        ("print('out of memory')", 60, "engine 'fresh' ended; its log ends:\nout of memory"),
        ("import time; time.sleep(60)", 0.2, "engine 'fresh' did not answer within 0.2 s"),
    ):
        stand_in.write_text(text)
        engine = check_engine.EngineProcess("fresh", tmp_path, {}, timeout_s)
        begun = time.monotonic()
        with pytest.raises(twins.CheckError, match=sentence):
            engine.facts()
        engine.close()
        assert time.monotonic() - begun < 30


def test_engine_that_does_not_start_is_shown_with_the_causes_in_its_log(tmp_path, monkeypatch):
    from wtransfer_vllm import check_engine

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(check_engine, "__name__", "stand_in")
    (tmp_path / "stand_in.py").write_text(
        "import os, sys\n"
        "print('E 1 ModuleNotFoundError: No module named x')\n"
        "print('ValueError: failed')\n"
        "sys.stdout.flush()\n"
        """os.write(int(sys.argv[1]), b'{"error": "ValueError: failed"}\\n')\n"""
    )
    with (
        contextlib.closing(check_engine.EngineProcess("fresh", tmp_path, {}, 60)) as engine,
        pytest.raises(check_engine.EngineError) as raised,
    ):
        engine.facts()
    assert str(raised.value).splitlines() == [
        "ValueError: failed",
        "ModuleNotFoundError: No module named x",
    ]


# -- what is compared


def answers(*steps):
    return [{"tokens": [token for token, _ in steps], "likely": [dict(each) for _, each in steps]}]


def test_answers_differ_where_a_token_is_less_probable_than_expected_and_at_no_near_tie():
    fresh = answers((7, {"7": -1.0, "8": -1.0004}), (5, {"5": -0.1}))
    same = answers((7, {"7": -1.0002, "8": -1.0}), (5, {"5": -0.1}))
    tie = answers((8, {"7": -1.0003, "8": -1.0}), (1, {"1": -0.1}))
    nothing = answers((7, {"7": float("nan")}), (5, {"5": float("nan")}))
    other = answers((7, {"7": -1.0, "8": -1.1}), (9, {"9": -0.2, "5": -3.0}))
    assert checking.difference(same, fresh, 1e-3) is None
    assert checking.difference(tie, fresh, 1e-3) is None
    assert checking.difference(nothing, fresh, 1e-3) is not None
    assert checking.difference(other, fresh, 1e-3) == (
        "prompt 1, step 2: token 9 with log probability -0.2000, expected 5 with -0.1000"
    )


class Engine:
    """Stands in for an engine that answers by the weights that it has."""

    def __init__(self, weights):
        self.weights = weights

    def do(self, order, prompts, salt, max_tokens):
        assert order == "ask"
        return [{"tokens": [1], "likely": [{"1": -float(self.weights)}]}] * len(prompts)


@pytest.mark.parametrize(
    ("touched", "result", "serves_on"), [(1, "refused", "right"), (3, "WRONG", "WRONG")]
)
def test_refused_update_ends_the_updates_and_what_serves_is_compared(
    monkeypatch, tmp_path, touched, result, serves_on
):
    updated = Engine(1)

    def refuse(self, label, source, base=None):
        updated.weights = touched
        return "layer 'x' takes no update"

    monkeypatch.setattr(checking, "CheckpointSource", lambda folder: folder)
    monkeypatch.setattr(checking.Comparison, "_publish", refuse)
    facts = dict.fromkeys(checking.FACTS, "x")
    facts |= {"vocab_size": 9, "special_tokens": [3], "max_model_len": 64}
    engines = checking.Engines(updated, Engine(2), facts, "no KV connector")
    document = checking.Comparison(engines, tmp_path, {}, pytest.fail).run()
    assert document["result"] == result
    assert [(row["name"], row["result"]) for row in document["rows"]] == [
        ("update", "refused"),
        ("serves on", serves_on),
        ("KV of a fresh engine", "refused"),
        ("KV of the updated engine", "refused"),
        ("update by transformers", "not run"),
    ]
    assert document["rows"][0]["why"] == "layer 'x' takes no update"


@pytest.mark.parametrize(
    ("case", "quantised"),
    [
        (("A", None, "right"), False),
        (("A", None, "right"), True),
        (("B", None, "WRONG"), False),
        (("B", "it does not fit", "refused"), False),
        (("A", "it does not fit", "WRONG"), True),
    ],
)
def test_update_of_a_trainers_own_model_is_compared_last(monkeypatch, tmp_path, case, quantised):
    weights, why, result = case
    (tmp_path / "A" / "model").mkdir(parents=True)
    settings = {"quantization_config": {"quant_method": "fp8"}} if quantised else {}
    (tmp_path / "A" / "model" / "config.json").write_text(json.dumps(settings))
    values, updated, trained = {"A": 1, "B": 2}, Engine(1), object()

    def publish(self, label, source, base=None):
        assert base == (tmp_path / "A" / "model" if quantised and source is trained else None)
        updated.weights = values[weights if source is trained else label]
        return why if source is trained else None

    monkeypatch.setattr(checking, "CheckpointSource", lambda folder: folder)
    monkeypatch.setattr(checking.Comparison, "_publish", publish)
    facts = dict.fromkeys(checking.FACTS, "x")
    facts |= {"vocab_size": 9, "special_tokens": [3], "max_model_len": 64}
    engines = checking.Engines(updated, Engine(2), facts, "no KV connector")
    document = checking.Comparison(engines, tmp_path, {}, lambda: trained).run()
    assert [row["result"] for row in document["rows"]] == ["right"] * 3 + ["refused"] * 2 + [result]
    assert document["rows"][-1]["name"] == "update by transformers"
    # A form that does not fit is no failure of updates in the checkpoint's.
    assert document["result"] == ("WRONG" if result == "WRONG" else "right")


class Caching:
    """Stands in for an engine that loads other KV cache than it has computed.

    Args:
        stored: Salts of what is stored, of both engines.
        has_prefix_cache: Whether it finds prefixes in a cache of its own first.
    """

    def __init__(self, stored, *, has_prefix_cache):
        self.stored, self.has_prefix_cache = stored, has_prefix_cache
        self.own, self.num_loaded = set(), 0

    def do(self, order, prompts=None, salt=None, max_tokens=None):
        if order == "hits":
            return self.num_loaded
        if order == "settle":
            self.own.clear()
            return True
        is_loaded = salt in self.stored and salt not in self.own
        self.num_loaded += is_loaded
        self.stored.add(salt)
        if self.has_prefix_cache:
            self.own.add(salt)
        return [{"tokens": [1], "likely": [{"1": -1.5 if is_loaded else -1.0}]}] * len(prompts)


@pytest.mark.parametrize("has_prefix_cache", [True, False])
def test_loaded_kv_is_compared_with_what_was_not_loaded(tmp_path, has_prefix_cache):
    facts = {"vocab_size": 9, "special_tokens": [3], "max_model_len": 64}
    stored = set()
    updated, fresh = (Caching(stored, has_prefix_cache=has_prefix_cache) for _ in range(2))
    engines = checking.Engines(updated, fresh, facts, None)
    row = checking.Comparison(engines, tmp_path, {})._share_kv("KV", updated, fresh)
    assert row.result == "WRONG"
    assert "log probability -1.5" in row.why


@pytest.mark.parametrize(
    ("fresh", "sentence"), [(1, "both models give the same tokens"), ("nan", "by no numbers")]
)
def test_engines_that_nothing_can_be_told_by_are_not_compared(tmp_path, fresh, sentence):
    facts = {"vocab_size": 9, "special_tokens": [3], "max_model_len": 64}
    engines = checking.Engines(Engine(1), Engine(fresh), facts, None)
    with pytest.raises(twins.CheckError, match=sentence):
        checking.Comparison(engines, tmp_path, {}).run()


# -- live

ROWS = [
    "update",
    "way back",
    "second update",
    "KV of a fresh engine",
    "KV of the updated engine",
    architectures.TRAINED,
]
nightly = pytest.mark.nightly


# A loader that copies past weight loaders.
IN_EACH_RUN = ("gpt-oss",)


@pytest.mark.live
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each, marks=() if each in IN_EACH_RUN else nightly)
        for each in architectures.CASES
    ],
)
def test_results_are_those_of_the_table(tmp_path, name):
    code, document = architectures.check_case(tmp_path / "model", name)
    found = architectures.results_of(document)
    shown = json.loads(architectures.FOUND.read_text())[name]
    assert {column: result for column, (result, _) in found.items()} == {
        column: shown[column][0] for column in found
    }
    codes = {"right": 0, "not checked": 2, "refused": 3}
    assert code == document["exit_code"] == codes[found["update"][0]]
    if code == 0:
        assert [row["name"] for row in document["rows"]] == ROWS
        assert document["model_class"] == architectures.CASES[name][1]
        assert "named" in document["places"].values()
        facts = {document["experts"], document["quantisation"]} - {None}
        assert facts < set(shown["kind"])


@pytest.mark.live
@pytest.mark.nightly
@pytest.mark.timeout(1000)
def test_model_itself_is_checked_against_a_disturbed_copy(tmp_path):
    code, document = check(make(tmp_path / "model", 1), "--full")
    results = [row["result"] for row in document["rows"]]
    assert (code, results) == (0, ["right"] * (len(ROWS) - 1) + ["not run"])


@pytest.mark.live
@nightly
@pytest.mark.timeout(1000)
@pytest.mark.parametrize(
    "fault",
    [
        "scale_in_an_attribute",
        "packed_copy_of_a_tied_head",
        "packed_closure",
        "scale_that_is_applied_again",
        "tensor_in_an_attribute",
    ],
)
def test_stale_state_beside_the_parameters_is_found(model, tmp_path, fault):
    folder = model("llama", "LlamaForCausalLM", tie_word_embeddings="tied" in fault)
    code, document = check(folder, env=stale_state.install(tmp_path, fault))
    update = document["rows"][0]
    assert (code, update["name"], update["result"]) == (1, "update", "WRONG")
    assert "log probability" in update["why"]
