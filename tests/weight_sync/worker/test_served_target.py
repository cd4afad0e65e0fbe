"""A serving engine's model, loaded from a checkpoint, as the target of updates."""

import json
import time

import pytest
import torch
from safetensors.torch import save_file

from wtransfer.checkpoint.model_config import MAX_LAYERS, canonical_config
from wtransfer.checkpoint.served import ServedCheckpoint
from wtransfer.errors import SchemaError
from wtransfer.weight_sync.worker.served_target import CONFIG_VARIABLE, ServedTarget
from wtransfer.weight_sync.worker.session import is_set
from wtransfer.weights import TensorSpec


class Engine(ServedTarget):
    """Loads into a dictionary."""

    def __init__(self, checkpoint):
        super().__init__(checkpoint)
        self.model = {}
        self.fails = False

    def load(self, weights):
        for name, tensor in weights:
            if self.fails:
                raise RuntimeError("the load fails")
            self.model[name] = tensor


def write(folder, value):
    folder.mkdir(exist_ok=True)
    tensors = {"w": torch.full((4,), value, dtype=torch.bfloat16)}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path / "A", 1.0)


@pytest.fixture
def engine(folder):
    return Engine(ServedCheckpoint(folder))


def test_form_is_that_of_the_checkpoint_and_an_update_is_cast_to_it(engine):
    assert engine.schema() == {"w": TensorSpec(torch.bfloat16, (4,))}
    engine.apply({"w": torch.full((4,), 1.0001)})
    assert engine.model["w"].dtype is torch.bfloat16
    assert torch.equal(engine.model["w"], torch.ones(4, dtype=torch.bfloat16))


def test_other_name_of_a_tied_tensor_is_cast_too(tmp_path):
    names = ("embedding", "lm_head.weight")
    save_file(
        {name: torch.ones(4, dtype=torch.bfloat16) for name in names}, tmp_path / "a.safetensors"
    )
    engine = Engine(ServedCheckpoint(tmp_path, tied=True))
    for name in names:
        engine.apply({name: torch.full((4,), 1.0001)})
    assert {name: each.dtype for name, each in engine.model.items()} == dict.fromkeys(
        names, torch.bfloat16
    )


def test_way_back_is_the_checkpoint_and_then_the_set_applied_last(engine):
    assert torch.equal(engine.capture()["w"], torch.ones(4, dtype=torch.bfloat16))
    first = {"w": torch.zeros(4)}
    engine.apply(first)
    assert engine.capture() is first
    engine.fails = True
    with pytest.raises(RuntimeError):
        engine.apply({"w": torch.ones(4)})
    assert engine.capture() is None, "of a mix there is nothing to go back to"
    engine.fails = False
    engine.apply(first)
    engine.forget()
    assert engine.capture() is None


def test_weights_that_are_lost_before_the_first_update_are_not_the_checkpoints(engine):
    engine.forget()
    assert engine.capture() is None
    assert engine.base() is engine.checkpoint


def test_checkpoint_that_was_changed_is_no_way_back(engine, folder):
    assert engine.base() is engine.checkpoint
    time.sleep(0.02)  # the kernel's clock for files has ticks
    write(folder, 2.0)
    assert engine.base() is None
    assert engine.capture() is None


def test_without_a_checkpoint_the_first_update_sets_the_form(engine):
    bare = Engine(None)
    assert (bare.schema(), bare.base(), bare.capture()) == (None, None, None)
    bare.apply({"w": torch.ones(2)})
    assert bare.model["w"].dtype is torch.float32


@pytest.mark.parametrize(
    ("value", "is_on"), [(None, False), ("", False), ("0", False), ("1", True)]
)
def test_switch_of_a_serving_engine_is_a_variable(monkeypatch, value, is_on):
    if value is None:
        monkeypatch.delenv("WTRANSFER_VLLM_CAST", raising=False)
    else:
        monkeypatch.setenv("WTRANSFER_VLLM_CAST", value)
    assert is_set("WTRANSFER_VLLM_CAST") is is_on


def test_switch_that_says_neither_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("WTRANSFER_VLLM_CAST", "yes")
    with pytest.raises(ValueError, match="WTRANSFER_VLLM_CAST is 'yes', expected 0 or 1"):
        is_set("WTRANSFER_VLLM_CAST")


CONFIG = {"model_type": "tiny", "rope_theta": 10000.0, "text": {"eps": 1e-5, "layers": [1, 2]}}


@pytest.fixture
def configured(folder):
    (folder / "config.json").write_text(json.dumps(CONFIG | {"use_cache": True}))
    return Engine(ServedCheckpoint(folder))


@pytest.mark.parametrize(
    ("received", "lines"),
    [
        (CONFIG | {"use_cache": False, "_name_or_path": "elsewhere"}, []),
        (
            CONFIG | {"rope_theta": 5e5},
            ["rope_parameters.rope_theta is 10000.0 here and 500000.0 in the update"],
        ),
        (
            {**CONFIG, "bias": True, "text": {"eps": 1e-6, "layers": [1]}},
            [
                "bias is not set here and True in the update",
                "text.eps is 1e-05 here and 1e-06 in the update",
                "text.layers is [1, 2] here and [1] in the update",
            ],
        ),
        (
            {"model_type": "other", "rope_theta": 1},
            ["model_type is 'tiny' here and 'other' in the update"],
        ),
    ],
)
def test_update_of_another_configuration_is_refused_by_name(
    configured, monkeypatch, received, lines
):
    text = canonical_config(received)
    if not lines:
        assert configured.check_config(text) == []
        return
    # The second time it is known.
    for _ in range(2):
        with pytest.raises(SchemaError) as refused:
            configured.check_config(text)
        assert refused.value.mismatches == lines
        assert all(line in str(refused.value) for line in lines)
        assert f"{CONFIG_VARIABLE}=1 in the environment" in str(refused.value)
    monkeypatch.setenv(CONFIG_VARIABLE, "1")
    (note,) = configured.check_config(text)
    assert note == f"computes by another configuration: {'; '.join(lines)}"
    assert configured.check_config(canonical_config(CONFIG)) == []


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "null",
        "7",
        '"text"',
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"text": ' + "9" * 10_000 + "}",
        '{"text": {"__float__": []}}',
        '{"text": {"__float__": "code"}}',
        f'{{"num_hidden_layers": {MAX_LAYERS + 1}}}',
        "\ud800",
    ],
)
def test_configuration_that_is_none_is_a_refusal(configured, text):
    with pytest.raises(SchemaError, match="it cannot be read"):
        configured.check_config(text)


def test_class_that_fails_on_a_configuration_is_a_refusal(configured, monkeypatch):
    def fail(config):
        raise KeyError("heads")

    monkeypatch.setattr(configured, "read_config", fail)
    # One that is equal as it is written is not read at all.
    assert configured.check_config(canonical_config(CONFIG)) == []
    with pytest.raises(SchemaError, match=r"it cannot be read \(KeyError: 'heads'\)"):
        configured.check_config(canonical_config(CONFIG | {"entry": 1}))


def test_long_list_of_differences_is_cut(configured):
    many = CONFIG | {f"entry_{number}": "x" * 10_000 for number in range(30)}
    with pytest.raises(SchemaError, match="and 10 more") as refused:
        configured.check_config(canonical_config(many))
    assert len(refused.value.mismatches) == 20
    assert len(str(refused.value)) < 4000


def test_checkpoint_without_a_configuration_compares_nothing(engine):
    assert engine.check_config(canonical_config(CONFIG)) == []
    assert Engine(None).check_config("{") == []
