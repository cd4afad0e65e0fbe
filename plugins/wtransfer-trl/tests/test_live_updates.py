"""Updates of a live vLLM by TRL's own objects, in the test's process, which is the trainer's."""

import queue
import re
from contextlib import closing

import pytest
import torch
from datasets import Dataset
from server import ServerOfWords
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer
from trl.generation.vllm_client import VLLMClient
from wtransfer.errors import AuthenticationError, WTransferError

import wtransfer_trl

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

PROMPT = "Once upon a time"


@pytest.fixture(autouse=True)
def shared_token(restored, monkeypatch, token):
    monkeypatch.setenv("WTRANSFER_TOKEN", token["WTRANSFER_TOKEN"])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_names_that_the_server_does_not_know_stand_beside_its_own(server):
    wtransfer_trl.install()
    client = VLLMClient(server.url)
    client.init_communicator("cpu")
    metadata = [(f"policy.{number}", "float32", [2]) for number in range(8)]
    beside = r"the update has 'policy\.0', .* more; the target wants 'lm_head\.weight', .* more"
    try:
        with pytest.raises(WTransferError, match=beside):
            client.update_named_params(
                metadata, ((name, torch.zeros(2)) for name, _, _ in metadata)
            )
    finally:
        client.close_communicator()


@pytest.mark.nightly
def test_wrong_token_is_named(server):
    wtransfer_trl.install(token="f" * 64, deadline_s=15)
    with pytest.raises(WTransferError) as caught:
        VLLMClient(server.url).init_communicator("cpu")
    assert isinstance(caught.value.__cause__, AuthenticationError)
    assert "token" in str(caught.value.__cause__)


@pytest.mark.nightly
def test_server_without_an_engine_is_named_with_what_starts_one(server_words, token, tmp_path):
    words, num_left_out = re.subn(r" --weight-transfer-config '.*'", "", server_words)
    assert num_left_out == 1
    wtransfer_trl.install()
    with closing(ServerOfWords(tmp_path, words, token)) as server:
        start = re.escape("""start it with --weight-transfer-config '{"backend": "shm"}'""")
        with pytest.raises(WTransferError, match=start):
            VLLMClient(server.url).init_communicator("cpu")
        transfer = wtransfer_trl.WeightTransfer(server.url)
        with pytest.raises(WTransferError, match="Please set weight_transfer_config"):
            transfer.init_weight_transfer()


class BegunError(Exception):
    """Rollouts would begin: TRL's loop on them needs CUDA kernels."""


class Rollouts:
    """Stands in for TRL's worker of rollouts, and ends the training when it is started."""

    def __init__(self):
        self.rollout_buffer, self.metrics_queue = queue.Queue(), queue.Queue()

    def start(self):
        raise BegunError

    def stop(self):
        pass

    def update_model_version(self, model_version):
        pass

    def check_health(self, stale_after_s):
        pass


def test_asynchronous_trainer_publishes_its_policy_before_rollouts_begin(
    server, models, monkeypatch, tmp_path
):
    # It asks CUDA for the name of a device.
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)
    before = server.tokens([PROMPT])
    transfer = wtransfer_trl.WeightTransfer(server.url)
    trainer = AsyncGRPOTrainer(
        model=str(models / "B"),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": PROMPT}]] * 8}),
        processing_class=AutoTokenizer.from_pretrained(models / "B"),
        args=AsyncGRPOConfig(
            output_dir=str(tmp_path),
            use_cpu=True,
            bf16=False,
            max_steps=1,
            per_device_train_batch_size=8,
            num_generations=8,
            vllm_server_base_url=server.url,
        ),
        rollout_worker=Rollouts(),
        weight_transfer=transfer,
    )
    try:
        with pytest.raises(BegunError):
            trainer.train()
        assert re.fullmatch(r"trl-\w+-1", server.label())
        assert server.tokens([PROMPT]) != before
    finally:
        transfer.destroy()
