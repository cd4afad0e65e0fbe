"""LoRA adapters that are loaded in place, under the name that they had: what they answer."""

import contextlib
import shutil

import httpx
import pytest
import tiny_models
from engines import PROMPTS, Engine
from kv import BLOCK_SIZE, LOCAL_HITS, PLAIN, STORAGE, count_hits, start
from server import ANSWER_S, Server
from stream import Stream
from test_live_kv_weights import run_until
from test_live_lower_tiers import TIERS

pytestmark = [pytest.mark.live, pytest.mark.nightly, pytest.mark.timeout(600)]

LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}


@pytest.fixture
def adapter(tmp_path):
    """Folder of an adapter, and a function that writes another one there."""
    folder = tmp_path / "adapter"

    def write(seed):
        shutil.rmtree(folder, ignore_errors=True)
        tiny_models.make_adapter(folder, seed)

    write(1)
    return folder, write


@pytest.fixture(scope="module")
def fresh(models, tmp_path_factory):
    """What an engine answers that has loaded one adapter, by the adapter's seed."""
    folder = tmp_path_factory.mktemp("fresh")
    answers = {}
    with contextlib.closing(Engine(folder, model=str(models / "A"), **PLAIN, **LORA)) as engine:
        for seed in (1, 2, 3):
            path = tiny_models.make_adapter(folder / f"{seed}", seed)
            one = {"lora_name": f"of seed {seed}", "lora_int_id": seed, "lora_path": str(path)}
            answers[seed] = engine.do("generate", PROMPTS, 16, one)
    assert answers[1] != answers[2] != answers[3] != answers[1]
    return answers


@pytest.mark.parametrize("connector", [STORAGE, TIERS], ids=["storage", "vllm's tiers"])
def test_requests_that_ask_for_a_load_have_the_adapter_of_now_beside_a_connector(
    models, fresh, adapter, tmp_path, connector
):
    folder, write = adapter
    one = {"lora_name": "policy", "lora_int_id": 1, "lora_path": str(folder)}
    in_place = one | {"load_inplace": True}
    more = {"weight_transfer_config": {"backend": "shm"}, **LORA}
    more |= {"worker_extension_cls": "cpu_tiers.Breaking"}
    with contextlib.closing(start(tmp_path, models / "A", connector, **more)) as engine:

        def ask(how=one):
            return count_hits(engine, lambda: engine.do("generate", PROMPTS, 16, how), LOCAL_HITS)

        assert ask() == (fresh[1], 0)
        answers, hits = ask()
        assert answers == fresh[1]
        assert hits > 0
        engine.do("begin", "running", PROMPTS[0], 100, None, one)
        engine.do("step", 10)
        write(2)
        # It goes on with the adapter that is loaded by the first step of what asks for that.
        engine.do("begin", "asks", PROMPTS[1], 100, None, in_place)
        engine.do("step", 1)
        write(3)  # which no further step reads
        shutil.rmtree(folder)
        tokens = run_until(engine, "running", "asks")["tokens"]
        assert tokens["asks"][:16] == fresh[2][1][:16]
        assert ask()[0] == fresh[2]
        # No block of what ran is found by who goes on from there.
        prompt = engine.do("tokens_of", PROMPTS[0])
        text = [{"prompt_token_ids": prompt + tokens["running"]}]
        found = count_hits(engine, lambda: engine.do("generate", text, 4, one), LOCAL_HITS)[1]
        assert found <= len(prompt) < len(prompt) + BLOCK_SIZE < len(text[0]["prompt_token_ids"])
        for seed in (3, 1):
            write(seed)
            assert ask(in_place)[0] == fresh[seed]
            assert ask()[0] == fresh[seed]
        # Removed, its number means what comes next: the same name, or another one.
        for seed, name in ((2, "policy"), (3, "another"), (1, "policy")):
            engine.do("remove_adapter", 1)
            write(seed)
            assert ask(one | {"lora_name": name})[0] == fresh[seed]
        # Who asks for a load and goes before it is carried out leaves all as it was.
        gone = in_place | {"lora_path": str(tmp_path / "nowhere")}
        engine.do("begin", "gone", PROMPTS[1], 16, None, gone)
        engine.do("abort", "gone")
        assert ask()[0] == fresh[1]
        # Loaded in place from another folder, it is read there again where vLLM has dropped it,
        # also for a request that had come before.
        elsewhere = tiny_models.make_adapter(tmp_path / "elsewhere", 2)
        engine.do("begin", "waits", PROMPTS[1], 16, None, one)
        engine.do("load_adapter", in_place | {"lora_path": str(elsewhere)})
        for number in range(2, 2 + LORA["max_loras"]):
            engine.do("load_adapter", one | {"lora_name": f"{number}", "lora_int_id": number})
        assert run_until(engine, "waits")["tokens"]["waits"] == fresh[2][1]
        assert ask(one | {"lora_path": str(elsewhere)})[0] == fresh[2]
    # What the adapters computed is in no store, where other processes would find it by its name.
    assert not [each for each in tmp_path.rglob("*.bin") if each.is_relative_to(tmp_path / "tier")]
    assert not [each for each in (tmp_path / "kv").rglob("*") if each.is_file()]


def test_server_answers_with_the_adapter_that_was_loaded_in_place_and_reads_it_once(
    models, adapter, tmp_path
):
    folder, write = adapter
    options = ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "2"]
    env = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    server = Server(tmp_path, models / "A", "shm", env=env, more=options)
    with contextlib.closing(server):

        def load(name, path, **more):
            body = {"lora_name": name, "lora_path": str(path), **more}
            answer = httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, timeout=ANSWER_S)
            answer.raise_for_status()

        def ask(name, prompts=PROMPTS):
            body = {"model": name, "prompt": prompts, "max_tokens": 16, "temperature": 0}
            body |= {"return_token_ids": True}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=ANSWER_S)
            said = answer.raise_for_status().json()
            assert said["model"] == name
            return [choice["token_ids"] for choice in said["choices"]]

        load("policy", folder)
        expected = {}
        for seed in (1, 2, 3):
            path = tiny_models.make_adapter(tmp_path / f"of seed {seed}", seed)
            load(path.name, path)
            expected[seed] = ask(path.name)
        assert ask("policy") == expected[1] != expected[2]
        for seed in (2, 3, 1):
            running = Stream(server.url, PROMPTS[0], 200, model="policy")
            write(seed)
            load("policy", folder, load_inplace=True)
            shutil.rmtree(folder)
            assert ask("policy") == ask("policy") == expected[seed]
            running.end()
            assert running.ended_by == "length"
            assert ask("policy") == expected[seed]
        listed = httpx.get(f"{server.url}/v1/models", timeout=ANSWER_S).json()["data"]
        assert "policy" in [each["id"] for each in listed]
        metrics = httpx.get(f"{server.url}/metrics", timeout=ANSWER_S).text
        assert "policy#" not in metrics
        # Unloaded and loaded again, it has another number in vLLM, and the same name and folder.
        body = {"lora_name": "policy"}
        httpx.post(f"{server.url}/v1/unload_lora_adapter", json=body, timeout=ANSWER_S)
        write(2)
        load("policy", folder)
        assert ask("policy") == expected[2]
