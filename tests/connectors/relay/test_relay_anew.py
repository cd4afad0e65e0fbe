"""A prompt that loses its blocks and is computed anew, under the same weights or under others."""

from __future__ import annotations

import pytest

PROMPT = list(range(42))
BLOCKS = 10


@pytest.mark.parametrize("changes", [False, True])
def test_a_prompt_that_is_computed_anew_is_handed_on_whole(make, instance, *, changes):
    one, other = make("p"), make("d")
    request = one.prefill("r", PROMPT, chunk=20, upto=20, finish=False)
    one.free += one.requests["r"]
    if changes:
        make.weights.settle("w2")
        one.weights = other.weights = "w2"
        one.step()
        other.step()
    one.scheduler.get_num_new_matched_tokens(request, 0)
    blocks = one.requests["r"] = one.take(BLOCKS + 1)
    one.scheduler.update_state_after_alloc(request, instance.Blocks(blocks), 0)
    metadata = one.step(new=[(request, blocks, 0, len(PROMPT))])
    assert [len(save.names) for save in metadata.saves] == [BLOCKS if changes else BLOCKS - 5]
    outcome = other.decode("s", PROMPT, one.finish(request))
    assert (outcome["matched"], outcome["loaded"], outcome["wrong"]) == (BLOCKS, BLOCKS, 0)
