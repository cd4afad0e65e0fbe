"""A cache as rows of bytes, however it is laid out in memory."""

from __future__ import annotations

import pytest
import torch

from wtransfer.connectors.storage.pages import CachePages
from wtransfer.errors import ConnectorOptionError

NUM_BLOCKS = 6


def plain(dtype=torch.bfloat16, width=8):
    return torch.zeros(NUM_BLOCKS, 2, 4, width, dtype=dtype)


LAYOUTS = {
    "plain": plain,
    "heads behind tokens": lambda: plain().permute(0, 2, 1, 3),
    "blocks with gaps": lambda: torch.zeros(2 * NUM_BLOCKS, 3, 8)[::2],
    "part of a page": lambda: torch.zeros(NUM_BLOCKS, 2, 4, 16)[:, :, :, :8],
    "two dimensions": lambda: torch.zeros(NUM_BLOCKS, 5, dtype=torch.uint8),
    "float8": lambda: plain(torch.float8_e4m3fn),
    "bool": lambda: plain(torch.bool),
    "keys and values apart": lambda: torch.zeros(2, NUM_BLOCKS, 4, 8).transpose(0, 1),
}


def fill(cache, seed):
    """Give every byte of a cache a value, through whatever view it is."""
    source = torch.Generator().manual_seed(seed)
    as_bytes = cache.view(torch.uint8)
    most = 2 if cache.dtype == torch.bool else 256
    as_bytes.copy_(torch.randint(0, most, as_bytes.shape, generator=source, dtype=torch.uint8))
    return cache


def same(one, other):
    return torch.equal(one.view(torch.uint8).cpu(), other.view(torch.uint8).cpu())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_go_to_rows_and_back(layout, device):
    caches = {"a": fill(LAYOUTS[layout]().to(device), 1), "b": fill(plain().to(device), 2)}
    others = {"a": fill(LAYOUTS[layout]().to(device), 3), "b": fill(plain().to(device), 4)}
    before = {name: cache.clone() for name, cache in others.items()}
    here, there = CachePages(caches), CachePages(others)
    assert here.pages == there.pages
    rows = here.gather([4, 1, 2])
    assert (rows.shape, rows.dtype, rows.is_cpu) == ((3, here.block_nbytes), torch.uint8, True)
    there.scatter([0, 5, 3], rows)
    for name, cache in caches.items():
        for source, target in ((4, 0), (1, 5), (2, 3)):
            assert same(others[name][target], cache[source])
        for untouched in (1, 2, 4):
            assert same(others[name][untouched], before[name][untouched])


def test_layers_of_different_sizes_lie_one_after_the_other():
    caches = {
        "odd": fill(torch.zeros(NUM_BLOCKS, 3, dtype=torch.uint8), 1),
        "wide": fill(plain(torch.float32), 2),
    }
    pages = CachePages(caches)
    assert pages.pages == (("'odd'=uint8[3]/1", 3), ("'wide'=float32[2,4,8]/1,2,3", 256))
    assert (pages.block_nbytes, pages.num_blocks) == (259, NUM_BLOCKS)
    row = pages.gather([2])[0]
    assert torch.equal(row[:3], caches["odd"][2])
    assert torch.equal(row[3:].clone().view(torch.float32), caches["wide"][2].flatten())


TOKENS_FIRST = {"a": plain, "b": plain}
OTHER_FORMS = {
    "tokens behind heads, of as many bytes": lambda: {
        name: torch.zeros(NUM_BLOCKS, 4, 2, 8, dtype=torch.bfloat16) for name in "ab"
    },
    "another order in memory": lambda: {
        name: torch.zeros(NUM_BLOCKS, 4, 2, 8, dtype=torch.bfloat16).transpose(1, 2)
        for name in "ab"
    },
    "layers in another order": lambda: {"b": plain(), "a": plain()},
    "layers of other names": lambda: {"a": plain(), "c": plain()},
    "another dtype of as many bytes": lambda: {name: plain(torch.float16) for name in "ab"},
}


@pytest.mark.parametrize("what", OTHER_FORMS)
def test_blocks_of_another_form_are_told_apart_though_they_have_as_many_bytes(what):
    here = CachePages({name: made() for name, made in TOKENS_FIRST.items()})
    there = CachePages(OTHER_FORMS[what]())
    assert here.block_nbytes == there.block_nbytes
    assert here.pages != there.pages


def test_gaps_between_pages_make_no_other_form():
    gaps = torch.zeros(2 * NUM_BLOCKS, 2, 4, 16, dtype=torch.bfloat16)[::2, :, :, :8]
    assert CachePages({"a": gaps}).pages == CachePages({"a": plain()}).pages


def test_no_blocks_are_no_rows():
    pages = CachePages({"a": plain()})
    assert pages.gather([]).shape == (0, pages.block_nbytes)
    pages.scatter([], pages.rows(0))


@pytest.mark.parametrize("block_ids", [[NUM_BLOCKS], [-1], [0, 99]])
def test_a_block_that_is_none_is_refused_before_anything_is_written(block_ids):
    caches = {"a": fill(plain(), 1)}
    before = caches["a"].clone()
    pages = CachePages(caches)
    with pytest.raises(IndexError, match="of 6"):
        pages.gather(block_ids)
    with pytest.raises(IndexError, match="of 6"):
        pages.scatter(block_ids, pages.rows(len(block_ids)))
    assert same(caches["a"], before)


@pytest.mark.parametrize(
    ("caches", "text"),
    [
        ({}, "has no layers"),
        ({"a": plain(), "b": plain()[:3]}, r"different numbers of blocks: \[3, 6\]"),
        ({"a": torch.zeros(6)}, r"layer 'a' has shape \(6,\)"),
        ({"a": plain().transpose(2, 3)}, "expected that the first dimension counts blocks"),
    ],
)
def test_a_cache_that_cannot_be_moved_by_block_is_refused(caches, text):
    with pytest.raises(ConnectorOptionError, match=text):
        CachePages(caches)
