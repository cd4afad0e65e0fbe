"""Names of blocks: equal where keys and values are, and nowhere else."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from wtransfer.connectors.naming import BlockNaming
from wtransfer.kv.keys import FENCE_NBYTES, GROUP_NBYTES, MAX_KEY_NBYTES
from wtransfer.testing.mini_engine.contract import Request

PROMPT = list(range(10))


def ask(prompt=PROMPT, request_id="r", **particulars):
    """Return a request that differs from others in some of its attributes."""
    made = Request(request_id, prompt, 1)
    vars(made).update(particulars)
    return made


def names(request=None, fingerprint="f", block_size=4, root=b"root", **particulars):
    request = request or ask(**particulars)
    return BlockNaming(block_size, root).of(request).under(fingerprint)


def media(identifier="image", offset=0):
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset))


def test_equal_requests_have_equal_names_of_full_blocks():
    assert names() == names(ask(request_id="another"))
    assert len(names()) == 2
    assert names()[0] == names(ask(PROMPT[:4]))[0]


def test_name_differs_with_everything_that_kv_depends_on():
    different = [
        names(),
        names(fingerprint="g"),
        names(root=b"model"),
        names(block_size=5),
        names(ask([99, *PROMPT[1:]])),
        names(cache_salt="tenant"),
        names(mm_features=[media()]),
        names(mm_features=[media("other")]),
        names(mm_features=[media(offset=1)]),
    ]
    for one, other in itertools.combinations(different, 2):
        assert not set(one) & set(other)


def test_name_depends_on_all_blocks_before():
    other = names(ask([99, *PROMPT[1:]]))
    assert names()[1] != other[1]


def test_names_are_extended_as_tokens_become_known():
    request = ask()
    known = BlockNaming(4, b"root").of(request)
    before = list(known.under("f"))
    request.all_token_ids += [1, 2]
    assert known.under("f")[:2] == before
    assert known.under("f") == names(ask([*PROMPT, 1, 2]))
    assert known.under("f", 1) == before[:1]
    assert known.under("f", 0) == []
    assert known.under("g") == names(ask([*PROMPT, 1, 2]), "g")


def test_request_without_all_token_ids_is_named_by_its_prompt():
    request = SimpleNamespace(prompt_token_ids=PROMPT)
    assert BlockNaming(4, b"root").of(request).under("f") == names()


@pytest.mark.parametrize(
    "particulars",
    [
        {"prompt_embeds": object()},
        {"mm_features": [media(), media(None)]},
        {"lora_request": SimpleNamespace(lora_name="a", lora_path="/a")},
        {"cache_salt": "half a pair: \ud800"},
    ],
    ids=[
        "embeddings",
        "a picture without identifier",
        "an adapter, which may be trained on",
        "a salt that cannot be encoded",
    ],
)
def test_uncacheable_request_has_no_names(particulars):
    known = BlockNaming(4, b"root").of(ask(**particulars))
    assert known.under("f") == []


def test_prompt_of_embeddings_only_has_no_names():
    request = SimpleNamespace(prompt_token_ids=None, prompt_embeds=None)
    assert BlockNaming(4, b"root").of(request).under("f") == []


def test_name_fits_into_a_header():
    assert all(len(name) <= FENCE_NBYTES + MAX_KEY_NBYTES for name in names())


# FAULTS 30


def weak(data):
    """A hash of 16 bits that is the same for a lot."""
    return bytes([0, len(data) % 3])


def test_blocks_of_equal_weak_hash_have_different_names():
    naming = BlockNaming(4, b"root", weak)
    found = [naming.of(ask([n, *PROMPT])).under("f")[0] for n in range(200)]
    hashes = {name[FENCE_NBYTES:-GROUP_NBYTES] for name in found}
    assert (len(hashes), len(set(found))) == (1, 200)
