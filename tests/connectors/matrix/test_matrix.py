"""Tokens are those of a fresh model, whichever connectors a host has, and whoever loads."""

from __future__ import annotations

import random

import pytest
from matrix_serving_kit import MODEL
from matrix_stacks import ALONE, P2P_KINDS, PAIRS, TWINS, Stack
from matrix_watch import Watch

NEW_TOKENS = 4
BLOCK_SIZES = (1, 16, 128)
BUDGETS = {1: 7, 16: 24, 128: 100}
"""Tokens per step that let pieces of prompts end within blocks, and some fill none."""
USUAL = [Stack(pair) for pair in (("tier", "files"), ("shm", "tier"), ("several", "group"))]
"""Pairs that are tried each time: among them everyone has its turn."""


def cases(stacks, usual):
    """Return stacks with every block size, twins with one."""

    def marks(stack, block_size):
        if block_size == 16:
            return () if stack in usual else pytest.mark.slow
        return pytest.mark.slow if stack in ALONE else pytest.mark.nightly

    return [
        pytest.param(stack, block_size, id=f"{stack}-{block_size}", marks=marks(stack, block_size))
        for block_size in BLOCK_SIZES
        for stack in stacks
        if block_size == 16 or stack not in TWINS
    ]


matrix = pytest.mark.parametrize(
    ("stack", "block_size"), cases([*ALONE, *PAIRS, *TWINS], [*ALONE, *USUAL])
)


def drawn(length, *what):
    dice = random.Random(str(what))
    return [dice.randrange(MODEL.vocabulary) for _ in range(length)]


def unit(block_size):
    """Return a length that is long enough to be cut, whatever the blocks."""
    return max(block_size, 16)


def gone_on(text, answer, length, block_size):
    """Return a text that begins with another one, and then is not what its host has generated."""
    return [*text, (answer[0] + 1) % MODEL.vocabulary, *drawn(length, "on", text[:8], block_size)]


def apart(block_size, loader, length, count=2):
    """Return texts that have no block in common, nor with those for another loader."""
    return [
        [count * loader + n, *drawn(length - 1, "apart", loader, n, block_size)]
        for n in range(count)
    ]


def alike(block_size, loader):
    """Return texts that part within a block, and how long they are alike."""
    size = unit(block_size)
    num_alike = size + block_size // 2
    common = drawn(num_alike, "alike", loader, block_size)
    rest = drawn(size + size // 2 + 2, "rest", loader, block_size)
    return [[*common, n, *rest[n:]] for n in range(2)], num_alike


def only(stack, loader, tokens):
    """Return what each connector has loaded if one of them has loaded all."""
    return [tokens if number == loader else 0 for number in range(len(stack.kinds))]


@pytest.mark.parametrize(
    "block_size", [16, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 128))]
)
def test_without_a_connector_all_of_that_gives_the_same_tokens(host, kit, block_size):
    """In pieces, giving way, and with beginnings that the cache has: what the rest rests on."""
    size = unit(block_size)
    made = host([], block_size, 4 * size // block_size, max_num_batched_tokens=size + 8)
    others, num_alike = alike(block_size, 0)
    cached = []
    for texts in (apart(block_size, 0, 2 * size), *([text] for text in others)):
        before = made.scheduler.counts["tokens_cached"]
        with Watch(made, NEW_TOKENS) as watch:
            requests = [watch.add(made.submit(text, NEW_TOKENS)) for text in texts]
            made.run()
        assert kit.references(texts, count=NEW_TOKENS) == [each.output for each in requests]
        for each in requests:
            watch.check(each)
        cached.append(made.scheduler.counts["tokens_cached"] - before)
    assert made.scheduler.counts["preemptions"] > 0
    assert cached[-1] == num_alike // block_size * block_size > 0


@matrix
def test_prompts_in_pieces_are_kept_handed_over_and_gone_on_with(service, stack, block_size):
    budget, size = BUDGETS[block_size], unit(block_size)
    made = service(stack, block_size, 16 * size // block_size, max_num_batched_tokens=budget)
    for loader in stack.loaders:
        texts = apart(block_size, loader, 2 * size + size // 2)
        held = made.hold_for(loader, texts, NEW_TOKENS)
        asked = [
            gone_on(each.prompt_token_ids, each.output, max(block_size, 32), block_size)
            for each in held.requests
        ]
        found = made.ask(asked, NEW_TOKENS, held)
        whole = sum(len(text) // block_size * block_size for text in texts)
        assert found.loaded == only(stack, loader, whole)
        assert "tokens_cached" not in found.counts
        assert found.counts["tokens_computed"] == (
            sum(map(len, asked)) - whole + len(asked) * (NEW_TOKENS - 1)
        )
        assert min(*held.pieces(), *found.pieces()) >= 2


@matrix
def test_preempted_request_is_kept_and_continues_with_the_same_tokens(service, stack, block_size):
    """There are blocks for three prompts, and none for what follows them.

    Then as many are loaded, and each needs more to come to its end. While the others keep theirs it
    cannot, so one has to give way, however long loads take.
    """
    size = unit(block_size)
    length = 2 * size
    made = service(stack, block_size, 3 * length // block_size, max_num_batched_tokens=size + 8)
    for loader in stack.loaders:
        held = made.hold_for(loader, apart(block_size, loader, length, 3), NEW_TOKENS)
        assert held.counts["preemptions"] > 0
        # Who gave way comes first now, and does not: else what was kept of it would not be used.
        held.requests.reverse()
        asked = [
            gone_on(each.prompt_token_ids, each.output, size - 1, block_size)
            for each in held.requests
        ]
        found = made.ask(asked, NEW_TOKENS, held)
        assert found.counts["preemptions"] > 0
        # All of them at first; who gave way once more, or what the cache still has of it.
        assert found.loaded[loader] >= 3 * length


@matrix
def test_prompt_cached_in_part_is_loaded_from_its_first_uncached_block(service, stack, block_size):
    made = service(stack, block_size, 16 * unit(block_size) // block_size)
    for loader in stack.loaders:
        texts, num_alike = alike(block_size, loader)
        held = made.hold_for(loader, texts, NEW_TOKENS)
        made.ask([texts[0][:num_alike]], 1)
        asked = [
            gone_on(each.prompt_token_ids, each.output, 5, block_size) for each in held.requests
        ]
        found = made.ask(asked, NEW_TOKENS, held)
        cached = num_alike // block_size * block_size
        beyond = [len(text) // block_size * block_size - cached for text in texts]
        assert cached > 0
        assert min(beyond) > 0
        assert found.counts["tokens_cached"] == 2 * cached
        assert found.loaded == only(stack, loader, sum(beyond))


@pytest.mark.parametrize(
    ("stack", "block_size"),
    cases([each for each in PAIRS if len(P2P_KINDS & set(each.kinds)) == 1], USUAL),
)
def test_the_first_that_has_something_loads_though_the_other_has_more(service, stack, block_size):
    made = service(stack, block_size, 16 * unit(block_size) // block_size)
    texts, num_alike = alike(block_size, 0)
    made.ask([texts[0][:num_alike]], 1)
    made.host.scheduler.pool.reset()
    (p2p,) = stack.p2p_numbers
    held = made.hand_over(p2p, texts[:1], NEW_TOKENS)
    asked = gone_on(texts[0], held.requests[0].output, 5, block_size)
    found = made.ask([asked], NEW_TOKENS, held)
    num_there = len(texts[0]) if p2p == 0 else num_alike
    assert found.loaded == only(stack, 0, num_there // block_size * block_size)
