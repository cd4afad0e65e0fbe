"""A scheduler's bridge: which ranks take orders, and how a rank follows the first one."""

import os
import secrets
import sys
from types import SimpleNamespace as Bag

import pytest
import torch
import wtransfer
from plain_server import parts

pytest.importorskip("sglang")

from wtransfer.errors import WTransferError

from wtransfer_sglang import bridge
from wtransfer_sglang.orders import Join, Leave

pytestmark = pytest.mark.live
TOKEN = secrets.token_hex(16)


@pytest.fixture
def opened(monkeypatch):
    """Open the bridge of a scheduler at a place among others."""
    made = []

    # Stands in for modules of SGLang that import others, which exist for CUDA alone.
    updater = Bag(_unsupported_derived_weight_cache_error=lambda model: None)
    components = "sglang.srt.model_executor.model_runner_components"
    monkeypatch.setitem(sys.modules, components, Bag(weight_updater=updater))

    def opened(variable=bridge.JOIN_VARIABLE, **parallel):
        given = parts()
        config = Bag(load_format="dummy")
        runner = Bag(
            model=torch.nn.Linear(2, 2),
            load_config=config,
            model_config=Bag(hf_config=Bag(), model_path="", revision=None),
        )
        monkeypatch.setattr(bridge, "computing_with", lambda *_: "")
        scheduler = given.scheduler
        scheduler.tp_worker = Bag(model_runner=runner, is_hybrid_swa=False)
        scheduler.tp_cpu_group, scheduler.enable_hicache_storage = None, True
        at = Bag(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, dp_size=1, attn_dp_enabled=False)
        vars(at).update(parallel)
        monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: at)
        overrides = "sglang.srt.arg_groups.overrides.resolved_view"
        monkeypatch.setattr(overrides, lambda _: given.options)
        monkeypatch.setenv("WTRANSFER_TOKEN", TOKEN)
        monkeypatch.setenv(variable, f"unix:@wtransfer-bridge-{secrets.token_hex(6)}")
        made.append(bridge.Bridge(scheduler))
        return made[-1]

    yield opened
    for each in made:
        if each.session is not None:
            each.session.close()


def refusal_told_to(**options):
    """Return what a publisher is told that publishes to the address of the environment."""
    with wtransfer.Publisher(
        {"weight": torch.zeros(2)}, token=TOKEN, deadline_s=10, **options
    ) as publisher:
        publisher.wait_for_workers(1, timeout_s=10)
        with pytest.raises(WTransferError) as told:
            publisher.publish("v")
    return str(told.value)


def test_only_the_first_pipeline_stage_has_a_session_and_it_refuses(opened):
    later, _first = (opened(pp_size=2, pp_rank=stage) for stage in (1, 0))
    assert later.session is None
    assert later.orders_to_send() == []
    told = refusal_told_to(listen=os.environ[bridge.JOIN_VARIABLE])
    assert "start it without --pp-size: " in told


def test_data_parallel_attention_is_one_instance_that_refuses(opened):
    opened(bridge.LISTEN_VARIABLE, dp_size=2, attn_dp_enabled=True)
    told = refusal_told_to(hosts=[os.environ[bridge.LISTEN_VARIABLE]])
    assert "data-parallel attention" in told


def test_data_parallel_replicas_have_no_address_in_common(opened):
    with pytest.raises(ValueError, match="run the replicas as servers of their own"):
        opened(bridge.LISTEN_VARIABLE, dp_size=2)


def test_rank_that_has_not_seen_the_end_of_its_publisher_follows_the_first_rank_to_another():
    first, other = (
        wtransfer.Publisher(
            {"weight": torch.zeros(2)},
            listen=f"unix:@wtransfer-bridge-{secrets.token_hex(6)}",
            token=TOKEN,
            deadline_s=10,
        )
        for _ in range(2)
    )
    with (
        first,
        other,
        bridge.RankSession({"weight": torch.ones(2)}, None, token=TOKEN) as session,
    ):
        session.follow(Join(1, first.address))
        first.wait_for_workers(1, timeout_s=10)
        session.follow(Join(2, other.address))
        other.wait_for_workers(1, timeout_s=10)
        session.follow(Leave(3, other.address))
        assert session.status().publisher is None
