"""Which name a worker of vLLM gives to KV cache of the weights that it has loaded."""

import logging
import time

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from wtransfer import Publisher, WorkerSession
from wtransfer.testing.fleet import Fleet
from wtransfer.weight_sync.worker import committer as committer_module
from wtransfer.weight_sync.worker import vouching
from wtransfer.weight_sync.worker.target import StateDictTarget
from wtransfer.weight_version import ProcessWeights

from wtransfer_vllm import vouching as vllm_vouching
from wtransfer_vllm.member import Member, Place
from wtransfer_vllm.target import VllmTarget
from wtransfer_vllm.vouching import vouch_for_checkpoint, weights_were_replaced

F1 = "1" * 32
PATIENCE_S = 20.0


class Bag:
    def __init__(self, **values):
        self.__dict__.update(values)


def config_of(model, load_format="auto", **more):
    return Bag(
        model_config=Bag(model=str(model), hf_config=Bag()),
        load_config=Bag(load_format=load_format),
        **more,
    )


def weights(value=1.0):
    return {"a": torch.full((4, 4), value), "b": torch.arange(3.0) + value}


def write(folder, value=1.0):
    folder.mkdir(exist_ok=True)
    save_file(weights(value), folder / "model.safetensors")
    # What comes next has another time: the kernel's clock for files has ticks.
    time.sleep(0.02)
    return folder


def published(tensors):
    """Return the fingerprint that a worker has after a round of these weights."""
    with Fleet(dict(tensors)) as made:
        member = made.join()
        assert made.publish("v").ok
        return member.session.fingerprint


def wait_for(condition):
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("WTRANSFER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def log(caplog):
    caplog.set_level(logging.INFO)
    return caplog


@pytest.fixture
def process(cache, monkeypatch):
    """The names of this process, as if the test were alone in it."""
    return new_process(monkeypatch)


def new_process(monkeypatch):
    made = ProcessWeights()
    for module in (vouching, vllm_vouching, committer_module):
        monkeypatch.setattr(module, "process_weights", made)
    return made


def name_of(process):
    wait_for(process.version)
    return process.version().fingerprint


@pytest.fixture
def vouched(monkeypatch, cache):
    """Return the name that a new process gives to a checkpoint's weights."""

    def vouched(folder, **more):
        process, config = new_process(monkeypatch), config_of(folder, **more)
        vouch_for_checkpoint(config)
        return name_of(process)

    return vouched


def test_vouched_name_equals_that_of_an_update_of_equal_weights(vouched, tmp_path):
    names = [vouched(write(tmp_path / "A", value)) for value in (1.0, 2.0)]
    assert names == [published(weights(1.0)), published(weights(2.0))]
    assert vouched(write(tmp_path / "another place", 1.0)) == names[0]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"load_format": "dummy"}, "a model of load format 'dummy' does not consist of its files"),
        (
            {"speculative_config": Bag(draft_model_config=Bag(model="a draft"))},
            "the draft model 'a draft' has weights of its own",
        ),
    ],
)
def test_model_of_more_than_its_checkpoint_has_a_local_name(vouched, tmp_path, log, more, why):
    assert vouched(write(tmp_path / "A"), **more).startswith("local:")
    assert log.messages == [
        f"KV cache is not shared with other processes until the next weight update: {why}"
    ]


def test_name_stands_in_vllms_log_which_has_lines_of_its_own_loggers_only(vouched, tmp_path, log):
    folder = write(tmp_path / "A")
    for line in (f"the weights loaded from {folder} are ", "are known to be "):
        name = vouched(folder)
        wait_for(lambda: log.records)
        (record,) = log.records
        assert record.name.startswith("vllm.")
        assert line in record.getMessage()
        assert name in record.getMessage()
        log.clear()


def test_draft_within_the_model_keeps_the_name(vouched, tmp_path):
    folder = write(tmp_path / "A")
    own = Bag(draft_model_config=Bag(model=str(folder)))
    assert vouched(folder, speculative_config=own) == published(weights())


def test_model_that_is_not_on_disk_has_a_local_name(vouched, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert vouched("nobody/nothing").startswith("local:")


# -- sessions, and weights that were replaced ------------------------------------------------------


def test_session_keeps_the_vouched_name(process, tmp_path):
    config = config_of(write(tmp_path / "A"))
    vouch_for_checkpoint(config)
    name = name_of(process)
    with WorkerSession(VllmTarget(nn.Linear(1, 1), config)) as session:
        assert process.version().fingerprint == name
        assert session.fingerprint.startswith("local:")
        vouch_for_checkpoint(config)
        assert process.version().fingerprint == name, "the session knows better"
        session.weights_lost("asleep")
        assert process.version().fingerprint == session.fingerprint


def member_of(config):
    target = StateDictTarget({"w": torch.zeros(4)})
    target.vouched_as = config.model_config
    return Member(target, "shm", Place("i", 0, 1))


def test_first_commit_replaces_the_vouched_name(process, tmp_path):
    config = config_of(write(tmp_path / "A"))
    vouch_for_checkpoint(config)
    name, member = name_of(process), member_of(config)
    with Publisher({"w": torch.ones(4)}) as publisher:
        member.join({"wtransfer": {"address": publisher.address, "token": publisher.token}})
        publisher.wait_for_workers(1, timeout_s=20)
        assert process.version().fingerprint == name
        round_ = publisher.publish("v", wait=False)
        wait_for(lambda: member.pending)
        member.commit()
        assert round_.result(20).ok
        assert process.version().fingerprint == member.session.fingerprint != name
    member.session.close()


@pytest.mark.parametrize("with_an_engine", [False, True])
def test_replaced_weights_have_a_local_name(process, tmp_path, with_an_engine):
    config = config_of(write(tmp_path / "A"))
    vouch_for_checkpoint(config)
    names = [name_of(process)]
    worker = Bag(vllm_config=config)
    if with_an_engine:
        worker.weight_transfer_engine = Bag(member=member_of(config))
    for _ in range(2):
        weights_were_replaced(worker, "reload_weights was called")
        names.append(process.version().fingerprint)
    assert len(set(names)) == 3
    assert all(name.startswith("local:") for name in names[1:])


def test_weights_lost_before_the_first_join_have_a_local_name(process, tmp_path):
    config = config_of(write(tmp_path / "A"))
    vouch_for_checkpoint(config)
    name, member = name_of(process), member_of(config)
    worker = Bag(vllm_config=config, weight_transfer_engine=Bag(member=member))
    weights_were_replaced(worker, "asleep at level 2")
    assert process.version().fingerprint.startswith("local:")
    with Publisher({"w": torch.ones(4)}) as publisher:
        member.join({"wtransfer": {"address": publisher.address, "token": publisher.token}})
        assert process.version().fingerprint not in (name, None)
        assert member.session.state == "empty"
    member.session.close()


def test_replaced_weights_empty_the_session(process, tmp_path):
    config = config_of(write(tmp_path / "A"))
    vouch_for_checkpoint(config)
    name, member = name_of(process), member_of(config)
    with Publisher({"w": torch.ones(4)}) as publisher:
        member.join({"wtransfer": {"address": publisher.address, "token": publisher.token}})
        worker = Bag(vllm_config=config, weight_transfer_engine=Bag(member=member))
        weights_were_replaced(worker, "reload_weights was called")
        assert member.session.state == "empty"
        assert process.version().fingerprint.startswith("local:")
        assert process.version().fingerprint != name
    member.session.close()
