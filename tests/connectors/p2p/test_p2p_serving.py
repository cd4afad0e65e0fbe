"""Two mini engines, a router, and a model: the tokens are those of one engine alone."""

from __future__ import annotations

import contextlib
import random

import pytest

from wtransfer.testing.mini_engine.config import EngineConfig
from wtransfer.testing.mini_engine.instance import MODULES, Instance
from wtransfer.testing.mini_engine.router import Router
from wtransfer.transport.zygote import Zygote

OPTIONS = {
    "SharedMemoryConnector": {"shelf_bytes": 16 << 20},
    "ProcessGroupConnector": {"shelf_bytes": 16 << 20, "token": "a token of these tests"},
}


@pytest.fixture(scope="module")
def zygote():
    with Zygote(preload=["torch", *MODULES]) as made:
        yield made


@pytest.fixture
def host(zygote, kind):
    """Maker of hosts."""
    with contextlib.ExitStack() as stack:

        def make(engine_id, role=None, num_ranks=1):
            options = {"connector": kind, "options": OPTIONS[kind], "role": role} if role else {}
            settings = EngineConfig(engine_id=engine_id, num_ranks=num_ranks, **options)
            made = Instance(settings, zygote.spawn)
            stack.callback(made.close)
            return made

        yield make


def prompts(number):
    dice = random.Random(number)
    return [[dice.randrange(50) for _ in range(dice.randrange(34, 90))] for _ in range(number)]


@pytest.mark.slow  # the matrix of connectors shows it for one rank each time
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_prompt_that_another_host_has_computed_goes_on_with_the_same_tokens(host, num_ranks):
    alone = host("alone", num_ranks=num_ranks)
    one, other = (
        host(name, role, num_ranks) for name, role in (("p", "kv_producer"), ("d", "kv_consumer"))
    )
    router = Router(one, other)
    for prompt in prompts(3):
        routed = router.ask(prompt, 8)
        assert routed.answer.tokens == alone.ask(prompt, 8).tokens
        assert routed.answer.counts["tokens_loaded"] == (len(prompt) - 1) // 16 * 16
    prompt = prompts(4)[-1]
    handed = router.hand_over(prompt)
    assert handed.why is None
    one.processes[0].kill()
    one.processes[0].wait(5.0)
    routed = router.go_on(prompt, 8, handed)
    assert routed.answer.tokens == alone.ask(prompt, 8).tokens
    assert routed.answer.counts["tokens_loaded"] == 0
