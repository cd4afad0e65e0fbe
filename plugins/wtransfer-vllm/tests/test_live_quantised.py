"""Quantised rollouts: by vLLM as it loads, and by the publisher in the form of the checkpoint."""

import json
import shutil
from contextlib import closing

import pytest
import torch
import wtransfer
from architectures import INT8, TOKEN, compressed_tensors
from engines import PROMPTS, Engine, publish, start_ranks
from safetensors.torch import load_file, save_file
from tiny_models import CONFIG, EXPERTS, config, make_twin
from wtransfer.checkpoint.quantisation import scheme_name
from wtransfer.errors import SchemaError

pytestmark = [
    pytest.mark.live,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]

HIDDEN = 256
"""Two blocks of 128, and one for keys."""
MODELS = {"llama": CONFIG | config(2, HIDDEN, tied=False), "qwen3_moe": EXPERTS}
OPTIONS = {"dtype": "bfloat16", "max_model_len": 512, "kv_cache_memory_bytes": 64 << 20}
UPDATED = OPTIONS | {"weight_transfer_config": {"backend": "shm"}}
BLOCK = [128, 128]
GROUP = {"strategy": "group", "group_size": 128}
SCHEMES = {
    "int8": INT8,
    "fp8 blocks": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": BLOCK,
        "modules_to_not_convert": ["lm_head"],
    },
    "rows of fp8": compressed_tensors("float", "channel", TOKEN),
    "blocks of fp8": compressed_tensors("float", "block", GROUP, block_structure=BLOCK),
}


def begin_checkpoint(model, settings, into):
    """Copy all of a checkpoint but its weights, with settings of quantisation."""
    shutil.copytree(model, into, ignore=shutil.ignore_patterns("*.safetensors"))
    plain = json.loads((model / "config.json").read_text())
    (into / "config.json").write_text(json.dumps(plain | {"quantization_config": settings}))


def quantise(model, settings, into):
    """Write a quantised checkpoint by the library that defines its form."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    begin_checkpoint(model, settings, into)
    is_fp8 = settings["quant_method"] == "fp8"
    # DeepSeek's blocks are the library's, with scales of float32 under another name.
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": BLOCK}
    if not is_fp8:
        weights = settings["config_groups"]["group_0"]["weights"]
    args = QuantizationArgs(**weights)
    height, width = weights.get("block_structure") or (1, None)
    written = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            written[name] = tensor
            continue
        rows, columns = tensor.shape
        blocks = tensor.to(torch.float32 if is_fp8 else tensor.dtype)
        blocks = blocks.reshape(rows // height, height, -1, width or columns)
        scale, zero = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), args)
        written[name] = quantize(tensor, scale, zero, args, dtype=args.pytorch_dtype())
        written[f"{name}_scale_inv" if is_fp8 else f"{name}_scale"] = scale
    save_file(written, into / "model.safetensors", metadata={"format": "pt"})
    return into


def trained(model, num_steps):
    """Train a model, and yield the number of each step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    tokens = torch.randint(0, 256, (2, 64), generator=torch.Generator().manual_seed(0))
    for number in range(num_steps):
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        yield number


def start(folder, model, num_ranks=1, **options):
    if num_ranks > 1:
        return start_ranks(folder, model, **options)
    return Engine(folder, model=str(model), **options)


def served_rounds(model, engine, num_rounds, **options):
    """Publish a step of training a round; return what was generated after each."""
    served = []
    with closing(engine), wtransfer.Publisher(model, deadline_s=60, **options) as publisher:
        engine.invite(publisher)
        publisher.wait_for_workers(1, timeout_s=20)
        for number in trained(model, num_rounds):
            workers = publish(publisher, engine, f"step-{number}").workers
            assert {(each.outcome, each.digests_equal) for each in workers} == {("committed", True)}
            served.append(engine.do("answer", PROMPTS))
    assert len({str(each) for each in served}) == num_rounds
    return served


def saved(model, base, into):
    """Write the weights of a model, with the tokenizer of its base."""
    model.save_pretrained(into)
    for file in base.glob("tokenizer*"):
        shutil.copyfile(file, into / file.name)
    return into


def model_of(name, tmp_path):
    """Return a checkpoint, and the model that is trained from it."""
    import transformers

    base = make_twin(tmp_path / "twin", MODELS[name], 1)
    return base, transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "scheme", "num_ranks"),
    [
        ("llama", "int8", 1),
        ("llama", "int8", 2),
        ("qwen3_moe", "int8", 1),
        ("llama", "fp8 blocks", 1),
        ("llama", "rows of fp8", 1),
        ("llama", "blocks of fp8", 1),
    ],
)
def test_vllm_serves_each_round_as_a_quantised_checkpoint_of_the_weights(
    name, scheme, num_ranks, tmp_path
):
    plain, model = model_of(name, tmp_path)
    base = quantise(plain, SCHEMES[scheme], tmp_path / "base")
    engine = start(tmp_path, base, num_ranks, **UPDATED)
    served = served_rounds(model, engine, 5, base=base)
    last = quantise(saved(model, plain, tmp_path / "saved"), SCHEMES[scheme], tmp_path / "last")
    with closing(start(tmp_path, last, num_ranks, **OPTIONS)) as fresh:
        assert fresh.do("answer", PROMPTS) == served[-1]


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("qwen3_moe", "int8_per_channel_weight_only"),
        ("llama", "fp8_per_channel"),
        ("llama", "fp8_per_block"),
    ],
)
def test_weights_that_vllm_quantises_as_it_loads_travel_as_they_are(name, quantization, tmp_path):
    base, model = model_of(name, tmp_path)
    engine = start(tmp_path, base, quantization=quantization, **UPDATED)
    served = served_rounds(model, engine, 3)
    last = saved(model, base, tmp_path / "saved")
    with closing(start(tmp_path, last, quantization=quantization, **OPTIONS)) as fresh:
        assert fresh.do("answer", PROMPTS) == served[-1]


def pack_four_bits(model, into, size=32):
    """Write a checkpoint of packed integers of 4 bits, with a scale for each group of a row."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    settings = compressed_tensors("int", "group", None, num_bits=4, group_size=size)
    settings["format"] = "pack-quantized"
    begin_checkpoint(model, settings, into)
    written = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            written[name] = tensor
            continue
        rows, columns = tensor.shape
        groups = tensor.float().view(rows, columns // size, size)
        scale = groups.abs().amax(-1) / 7
        numbers = (groups / scale.unsqueeze(-1)).round().to(torch.int8).view(rows, columns)
        written[f"{name}_packed"] = pack_to_int32(numbers, 4)
        written[f"{name}_scale"] = scale.to(tensor.dtype)
        written[f"{name}_shape"] = torch.tensor([rows, columns])
    save_file(written, into / "model.safetensors", metadata={"format": "pt"})
    return into


def test_packed_weights_of_four_bits_are_those_of_a_fresh_engine(models, tmp_path):
    pytest.importorskip("vllm._custom_ops")  # has the kernels
    if not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        pytest.skip("vLLM's kernel for them needs AVX-512")
    packed = {name: pack_four_bits(models / name, tmp_path / name) for name in "AB"}
    expected = {}
    for name, folder in packed.items():
        with closing(start(tmp_path, folder, **OPTIONS)) as fresh:
            expected[name] = fresh.do("answer", PROMPTS)
    assert expected["A"] != expected["B"]
    with closing(start(tmp_path, packed["A"], **UPDATED)) as engine:
        for name in "BAB":
            source = wtransfer.CheckpointSource(packed[name])
            with wtransfer.Publisher(source, deadline_s=60) as publisher:
                engine.invite(publisher)
                publisher.wait_for_workers(1, timeout_s=20)
                assert publish(publisher, engine, name).ok
            assert engine.do("answer", PROMPTS) == expected[name]


def test_update_of_another_scheme_is_refused_by_vllm_and_both_are_named(tmp_path):
    plain, model = model_of("llama", tmp_path)
    other, own = ("fp8 blocks", "int8")
    bases = {each: quantise(plain, SCHEMES[each], tmp_path / each) for each in (other, own)}
    names = [scheme_name(SCHEMES[each]) for each in (other, own)]
    with closing(start(tmp_path, bases[own], **UPDATED)) as engine:
        before = engine.do("answer", PROMPTS)
        with wtransfer.Publisher(model, base=bases[other], deadline_s=60) as publisher:
            engine.invite(publisher)
            publisher.wait_for_workers(1, timeout_s=20)
            with pytest.raises(SchemaError, match="as '{}', the target as '{}'".format(*names)):
                publish(publisher, engine, "step-1")
        assert engine.do("answer", PROMPTS) == before
