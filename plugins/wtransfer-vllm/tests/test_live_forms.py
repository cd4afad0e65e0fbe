"""Models that transformers trains in one form and vLLM loads in another: what is computed."""

import shutil
from contextlib import closing

import pytest
import torch
import wtransfer
from engines import PROMPTS, Engine, publish, start_ranks
from tiny_models import CONFIG, EXPERTS, HIDDEN, HYBRID, SIZES, make_twin

pytestmark = [pytest.mark.live, pytest.mark.nightly, pytest.mark.timeout(900)]

CONFIGS = {
    "qwen3_moe": EXPERTS,
    "mixtral": CONFIG
    | SIZES
    | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": HIDDEN,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    # The window that it has where its configuration states none.
    "gpt_oss": HYBRID["gpt_oss"] | {"sliding_window": 128},
    "qwen3_next": HYBRID["qwen3_next"],
}
NUM_STEPS = 5
OPTIONS = {"dtype": "bfloat16", "max_model_len": 512, "kv_cache_memory_bytes": 64 << 20}


def steps(model):
    """Train a model, and yield after each step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    tokens = torch.randint(0, 256, (2, 64), generator=torch.Generator().manual_seed(0))
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        yield


def start(folder, model, num_ranks, **options):
    if num_ranks > 1:
        return start_ranks(folder, model, **OPTIONS, **options)
    return Engine(folder, model=str(model), **OPTIONS, **options)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("model_type", CONFIGS)
def test_vllm_computes_with_what_transformers_has_trained(model_type, num_ranks, tmp_path):
    import transformers

    base = make_twin(tmp_path / "base", CONFIGS[model_type], 1)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    engine = start(tmp_path, base, num_ranks, weight_transfer_config={"backend": "shm"})
    served = []
    with closing(engine), wtransfer.Publisher(model, deadline_s=60) as publisher:
        engine.invite(publisher)
        publisher.wait_for_workers(1, timeout_s=20)
        for number, _ in enumerate(steps(model)):
            workers = publish(publisher, engine, f"step-{number}").workers
            assert len(workers) == num_ranks
            assert {(each.outcome, each.digests_equal) for each in workers} == {("committed", True)}
            served.append(engine.tokens(PROMPTS))
    assert len({str(tokens) for tokens in served}) == NUM_STEPS
    saved = tmp_path / "saved"
    model.save_pretrained(saved)
    for file in base.glob("tokenizer*"):
        shutil.copyfile(file, saved / file.name)
    with closing(start(tmp_path, saved, num_ranks)) as fresh:
        assert fresh.tokens(PROMPTS) == served[-1]
