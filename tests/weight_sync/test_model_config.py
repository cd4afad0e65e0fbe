"""The configuration of the model in training, on its way to the workers."""

from __future__ import annotations

import json

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from wtransfer import CheckpointSource, ParamMeta, StreamSource
from wtransfer.checkpoint.versions import VersionStore
from wtransfer.errors import SchemaError, SourceError
from wtransfer.manifest import MAX_CONFIG_LENGTH
from wtransfer.testing.contents import contents
from wtransfer.weight_sync.trainer.digesting import DigestingSource
from wtransfer.weight_sync.trainer.publisher import BaseCheckpoint
from wtransfer.weight_sync.trainer.sharded import ShardedSource
from wtransfer.weight_sync.trainer.source import as_source
from wtransfer.weight_sync.worker.target import StateDictTarget

CONFIG = {"model_type": "tiny", "eps": 1e-5, "use_cache": True}
TEXT = '{"eps":1e-05,"model_type":"tiny"}'
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


class Configuration:
    """A configuration with the method of those of transformers."""

    def __init__(self, **entries):
        self.entries = CONFIG | entries

    def to_diff_dict(self):
        return dict(self.entries)


class Model(nn.Linear):
    """A model in training that has a configuration."""

    def __init__(self, **entries):
        super().__init__(3, 4)
        self.config = Configuration(**entries)


class Serving(StateDictTarget):
    """A target that knows one configuration, and may allow others."""

    allows = False

    def __init__(self):
        super().__init__({name: torch.zeros_like(t) for name, t in Model().state_dict().items()})
        self.heard = []

    def check_config(self, text):
        self.heard.append(text)
        if text != TEXT and not self.allows:
            raise SchemaError("eps is another one")
        return ["another eps"] if text != TEXT else []


@pytest.fixture
def folder(tmp_path):
    """Writes a checkpoint with a configuration, or with none."""

    def write(config, tensors=None, name="checkpoint"):
        made = tmp_path / name
        made.mkdir()
        save_file(tensors or Model().state_dict(), made / "model.safetensors")
        if config is not None:
            (made / "config.json").write_text(json.dumps(config))
        return made

    return write


def config_of(source, base=None):
    """Return the configuration that a plan of a source has."""
    return DigestingSource(source, base=base).plan().manifest.config


def test_update_has_the_configuration_and_the_report_says_so(fleet, engine):
    model, target = Model(), Serving()
    made = fleet(model, engine=engine)
    made.join(target)
    report = made.publish("v1")
    assert report.ok
    assert report.with_config
    # The plans after it name the manifest, which is the same whatever training sets.
    model.config.entries["use_cache"] = False
    assert made.publish("v2").ok
    assert target.heard == [TEXT, TEXT]


def test_another_configuration_is_refused_before_any_byte_moves(fleet):
    model, target = Model(), Serving()
    made = fleet(model)
    made.join(target)
    first = made.publish("v1")
    before = contents(target.present())
    model.config.entries["eps"] = 1e-6
    with pytest.raises(SchemaError, match="eps is another one") as refused:
        made.publish("v2")
    assert refused.value.phase == "plan"
    assert contents(target.present()) == before
    target.allows = True
    report = made.publish("v3")
    assert report.workers[0].notes == ["another eps"]
    assert report.fingerprint == first.fingerprint


def broken(_):
    raise ArithmeticError("a class of another library")


def circle():
    entries = {}
    entries["self"] = entries
    return entries


@pytest.mark.parametrize("kind", ["long", "circle", "raises"])
def test_configuration_that_cannot_be_sent_ends_no_round(fleet, kind, caplog, monkeypatch):
    model, target = Model(), Serving()
    if kind == "raises":
        monkeypatch.setattr(Configuration, "to_diff_dict", broken)
        monkeypatch.setattr(Configuration, "to_dict", broken, raising=False)
    else:
        model.config.entries = circle() if kind == "circle" else {"a": "x" * MAX_CONFIG_LENGTH}
    made = fleet(model)
    made.join(target)
    report = made.publish("v1")
    assert (report.ok, report.with_config, target.heard) == (True, False, [])
    assert "the model's configuration is not sent: " in caplog.text


def test_source_without_a_configuration_is_not_compared(fleet):
    model, target = dict(Model().state_dict()), Serving()
    made = fleet(model)
    made.join(target)
    report = made.publish("v1")
    assert (report.ok, report.with_config, target.heard) == (True, False, [])


def test_target_that_knows_none_takes_any(fleet):
    model = Model()
    made = fleet(model)
    made.join(dict(Model().state_dict()))
    assert made.publish("v1").ok
    model.config.entries["eps"] = 1e-6
    assert made.publish("v2").with_config


def test_version_on_disk_keeps_the_configuration(fleet, tmp_path):
    model, target = Model(), Serving()
    made = fleet(model, engine="file", options={"path": str(tmp_path / "store"), "keep": 2})
    made.join(target)
    made.publish("v1")
    target.allows = True
    model.config.entries["eps"] = 1e-6
    with torch.no_grad():
        model.bias += 1
    made.publish("v2")
    store = VersionStore(tmp_path / "store")
    kept = [CheckpointSource(store.root / each.folder) for each in store.versions()]
    texts = [TEXT, TEXT.replace("1e-05", "1e-06")]
    assert [config_of(each) for each in kept] == texts
    # A worker that follows the folder has the plan of the manifest.
    assert [each.manifest.manifest.config for each in kept] == texts
    target.heard.clear()
    made.finish(made.publisher.rollback("v1", wait=False))
    assert target.heard == [TEXT]


def test_wrappers_are_looked_through():
    compiled = torch.compile(Model(), backend="eager")
    assert config_of(as_source(compiled)) == TEXT
    assert config_of(ShardedSource(Model(), store=object())) == TEXT


def test_class_without_defaults_tells_every_entry():
    class Needy(Configuration):
        def to_diff_dict(self):
            raise TypeError("missing 1 required positional argument")

        def to_dict(self):
            return dict(self.entries)

    model = Model()
    model.config = Needy()
    assert config_of(as_source(model)) == TEXT


def test_stream_has_the_one_that_it_is_given():
    source, tensors = StreamSource(), Model().state_dict()
    metadata = [ParamMeta(name, each.dtype, tuple(each.shape)) for name, each in tensors.items()]
    for config, text in ((None, ""), (CONFIG, TEXT)):
        source.config = config
        with source.round(metadata, tensors.items()):
            assert config_of(source) == text


@pytest.mark.parametrize("config", [None, {"eps": 1}, object()])
def test_attribute_of_that_name_may_be_anything(config):
    model = Model()
    model.config = config
    assert config_of(as_source(model)) == ""


def test_folder_has_its_own_and_a_single_file_none(folder):
    made = folder(CONFIG)
    assert config_of(CheckpointSource(made)) == TEXT
    assert config_of(CheckpointSource(made / "model.safetensors")) == ""
    (made / "config.json").write_text("{")
    with pytest.raises(SourceError, match=r"config\.json' cannot be read"):
        config_of(CheckpointSource(made))


def test_sealed_text_that_is_no_configuration_is_an_error(folder):
    from wtransfer.checkpoint.source import seal
    from wtransfer.transport.files import Folder

    made = folder(None)
    sealed = seal(made)
    with Folder(made) as opened:
        msgspec.structs.replace(sealed, config="[]").write(opened)
    with pytest.raises(SourceError, match="has no configuration that can be read"):
        config_of(CheckpointSource(made))


PART = {"model_type": "part", "eps": 2.0}
FLAT = {"model_type": "whole", "eps": 1.0, "scale": 3}
WHOLE = {"model_type": "whole", "text": {"model_type": "part", "eps": 1.0}, "scale": 3}


@pytest.mark.parametrize(
    ("own", "base", "sent"),
    [
        (None, WHOLE, WHOLE),
        ({"model_type": "whole", "scale": 4}, WHOLE, {"model_type": "whole", "scale": 4}),
        (PART, WHOLE, WHOLE | {"text": PART}),
        ({"model_type": "other"}, WHOLE, WHOLE),
        (PART, FLAT, FLAT | {"eps": 2.0}),
        (PART, None, PART),
        (None, None, None),
    ],
)
def test_base_gives_what_the_model_in_training_does_not_have(folder, own, base, sent):
    model = Model() if own else dict(Model().state_dict())
    if own:
        model.config.entries = own
    found = config_of(as_source(model), BaseCheckpoint(folder(base)))
    assert (json.loads(found) if found else None) == sent


def test_quantised_source_has_the_configuration_of_its_weights(folder):
    tensors = {
        "0.weight": torch.zeros(4, 3, dtype=torch.float8_e4m3fn),
        "0.weight_scale_inv": torch.ones(1, 1),
        "0.bias": torch.zeros(4),
    }
    model = nn.Sequential(nn.Linear(3, 4))
    model.config = Configuration()
    base = folder(CONFIG | {"quantization_config": FP8}, tensors)
    for each in (model, dict(model.state_dict())):
        source = as_source(each, None, base)
        assert source.scheme == "fp8:block128x128"
        assert config_of(source, BaseCheckpoint(base)) == TEXT
