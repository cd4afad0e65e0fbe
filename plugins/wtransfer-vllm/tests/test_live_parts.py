"""A trainer that holds a part of what vLLM serves: the rest does not travel, and is proven."""

import json
import shutil
from contextlib import ExitStack, closing

import pytest
import torch
import wtransfer
from architectures import FILES, VISION
from engines import PROMPTS, Engine, publish, until
from safetensors.torch import load_file, save_file
from tiny_models import CONFIG, write_tokenizer
from wtransfer.errors import DigestMismatchError

pytestmark = [pytest.mark.live, pytest.mark.nightly, pytest.mark.timeout(900)]

TEXT = CONFIG | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "head_dim": 32,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
IDEFICS3 = {
    "architectures": ["Idefics3ForConditionalGeneration"],
    "text_config": TEXT,
    "vision_config": VISION,
    "image_token_id": 300,
    "scale_factor": 2,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
BACKEND = {"weight_transfer_config": {"backend": "shm"}}
OPTIONS = {"dtype": "bfloat16", "max_model_len": 512, "kv_cache_memory_bytes": 64 << 20}
PREFIX = "model.text_model."
"""Of the names that the language part has in the checkpoint; its head has a name of its own."""


def make(folder):
    """Write a random vision-language checkpoint; return its tensors."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    torch.manual_seed(0)
    config = Idefics3Config(**IDEFICS3)
    model = Idefics3ForConditionalGeneration(config).to(torch.bfloat16)
    with torch.no_grad():
        for each in model.parameters():
            each.normal_(0, 0.2 if each.ndim > 1 else 0.05)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    for name, contents in FILES["Idefics3 (vision), by text"].items():
        (folder / name).write_text(json.dumps(contents))
    return load_file(folder / "model.safetensors")


def copy_with(folder, into, tensors):
    """Write a copy of a checkpoint with some tensors changed; return its folder."""
    shutil.copytree(folder, into)
    whole = load_file(into / "model.safetensors") | tensors
    save_file(whole, into / "model.safetensors", metadata={"format": "pt"})
    return into


def in_checkpoint(tensors):
    """Return the names of the language part in the checkpoint."""
    return {
        name if name.startswith("lm_head") else PREFIX + name.removeprefix("model."): tensor
        for name, tensor in tensors.items()
    }


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "model"
    folder.mkdir()
    make(folder)
    return folder


@pytest.fixture
def language(base):
    """The language part by itself, as a trainer holds it, and not one tensor of the rest."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**TEXT)).to(torch.bfloat16)
    whole = load_file(base / "model.safetensors")
    names = in_checkpoint(dict.fromkeys(model.state_dict()))
    own = {mine: whole[its] for its, mine in zip(names, model.state_dict(), strict=True)}
    model.load_state_dict(own)
    return model


def change(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for each in model.parameters():
            each.add_((torch.randn(each.shape, generator=generator) * 0.05).to(each.dtype))


def start(stack, folder, model):
    engine = Engine(folder, model=str(model), **OPTIONS | BACKEND)
    return stack.enter_context(closing(engine))


def fresh_tokens(folder, base, model):
    saved = copy_with(base, folder, in_checkpoint(model.state_dict()))
    with closing(Engine(folder, model=str(saved), **OPTIONS)) as fresh:
        return fresh.tokens(PROMPTS)


def test_language_part_is_updated_beside_a_tower_that_stays(base, language, tmp_path):
    sent = sum(each.nbytes for each in language.state_dict().values())
    with ExitStack() as stack:
        engine = start(stack, tmp_path, base)
        publisher = stack.enter_context(
            wtransfer.Publisher(language, form=in_checkpoint, base=base, deadline_s=60)
        )
        engine.invite(publisher)
        publisher.wait_for_workers(1, timeout_s=20)
        for number in range(3):
            change(language, number)
            if number == 2:
                engine.do("sleep", 2)
                engine.do("rpc", "let_memory_go")
                engine.do("wake_up")
            report = publish(publisher, engine, f"step-{number}")
            assert (report.ok, report.nbytes) == (True, sent)
        served = engine.tokens(PROMPTS)
        assert "Failed to load weights" not in engine.log.read_text()  # vLLM's, of tables
    assert served == fresh_tokens(tmp_path / "saved", base, language)


def test_another_tower_is_refused_by_name_and_a_restarted_vllm_joins_again(
    base, language, tmp_path
):
    tower = "model.vision_model.encoder.layers.1.mlp.fc1.weight"
    whole = load_file(base / "model.safetensors")
    whole[tower][0, 0] += 1
    other = copy_with(base, tmp_path / "other", {tower: whole[tower]})
    with ExitStack() as stack:
        publisher = stack.enter_context(
            wtransfer.Publisher(language, form=in_checkpoint, base=base, deadline_s=60)
        )
        wrong = start(stack, tmp_path, other)
        before = wrong.tokens(PROMPTS)
        wrong.invite(publisher)
        publisher.wait_for_workers(1, timeout_s=20)
        change(language, 0)
        with pytest.raises(DigestMismatchError, match=f"'{tower}' is not sent"):
            publisher.publish("step-0")
        assert wrong.tokens(PROMPTS) == before
        wrong.close()
        with closing(Engine(tmp_path, model=str(base), **OPTIONS | BACKEND)) as engine:
            engine.invite(publisher)
            publisher.wait_for_workers(1, timeout_s=20)
            assert publish(publisher, engine, "step-1").ok
            served = engine.tokens(PROMPTS)
        with closing(Engine(tmp_path, model=str(base), **OPTIONS | BACKEND)) as engine:
            engine.invite(publisher)
            # It is brought the part that it missed, and proves the rest from its own checkpoint.
            until(lambda: engine.do("session")["state"] == "pending")
            engine.commit("step-1")
            assert engine.tokens(PROMPTS) == served
            change(language, 1)
            assert publish(publisher, engine, "step-2").ok
            served = engine.tokens(PROMPTS)
    assert served == fresh_tokens(tmp_path / "saved", base, language)
