from dataclasses import replace

import pytest

from wtransfer.demo.kv.story import KvStory, Row

NUM_SHARED = 96


def row(number, prefill="alive", num_loaded=NUM_SHARED, **facts):
    """Return a prompt of which everything is as promised."""
    nbytes = 1000 * num_loaded
    return replace(
        Row(
            number=number,
            prefill=prefill,
            num_prompt=130,
            num_loaded=num_loaded,
            num_cached=0,
            nbytes=nbytes,
            prefill_s=None if prefill == "gone" else 0.2,
            first_token_s=0.01,
            load_s=0.004 if num_loaded else None,
            memcpy_s=0.001 if num_loaded else None,
            fresh_s=0.3,
            tokens=[1, 2, number],
            expected=[1, 2, number],
            num_expected_computed=130,
        ),
        **facts,
    )


@pytest.fixture
def num_shared():
    return NUM_SHARED


@pytest.fixture
def story():
    """A story in which everything is as promised; tests then falsify one thing."""
    rows = [row(1), row(2), row(3, "killed", 0), row(4, "gone", 0), row(5), row(6)]
    exits = {"prefill": [0], "decode": [0, 0], "fresh": [0]}
    return KvStory(rows, ["prefill was killed"], exits)
