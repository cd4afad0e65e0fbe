"""Which cache layouts are accepted, by every room alike, and that their blocks move whole."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch

from wtransfer.config import OffloadingConfig
from wtransfer.errors import CacheLayoutError, ConnectorOptionError, OffloadingOptionError
from wtransfer.kv import cache_view
from wtransfer.kv.cache_view import (
    CacheView,
    DevicePages,
    HostPages,
    byte_rows,
    geometries_of,
    page_form,
    page_rows,
    pages_of,
    runs_of,
)
from wtransfer.specs.interface import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
)

NUM_BLOCKS = 6


def plain(dtype=torch.bfloat16, width=8):
    return torch.zeros(NUM_BLOCKS, 2, 4, width, dtype=dtype)


LAYOUTS = {
    "plain": plain,
    "heads behind tokens": lambda: plain().permute(0, 2, 1, 3),
    "innermost dimension first": lambda: plain().permute(0, 3, 1, 2),
    "blocks with gaps": lambda: torch.zeros(2 * NUM_BLOCKS, 3, 8)[::2],
    "part of a page": lambda: torch.zeros(NUM_BLOCKS, 2, 4, 16)[:, :, :, :8],
    "two dimensions": lambda: torch.zeros(NUM_BLOCKS, 5, dtype=torch.uint8),
    "float8": lambda: plain(torch.float8_e4m3fn),
    "bool": lambda: plain(torch.bool),
    "keys and values apart": lambda: torch.zeros(2, NUM_BLOCKS, 4, 8).transpose(0, 1),
    "keys and values apart, large": lambda: torch.zeros(2, NUM_BLOCKS, 4, 4096).transpose(0, 1),
    "blocks innermost but one": lambda: torch.zeros(3, NUM_BLOCKS, 4).transpose(0, 1),
}


def fill(cache, seed):
    """Give every byte of a cache a value, through whatever view it is."""
    source = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 2, (*cache.shape, cache.element_size()), generator=source) * 63
    if cache.dtype == torch.bool:
        values //= 63
    values = values.to(torch.uint8).view(cache.dtype).view(cache.shape)
    cache.copy_(values.to(cache.device))
    return cache


def canonical(cache):
    nbytes = cache[0].nbytes
    tensors = [CanonicalKVCacheTensor(cache, nbytes)]
    return CanonicalKVCaches(tensors, [[CanonicalKVCacheRef(0, nbytes)]])


def gathered(pages, blocks):
    places = np.zeros((len(blocks), 1, pages.block_nbytes), np.uint8)
    count = np.arange(len(blocks))
    pages.gather(pages.mark(), np.array(blocks), places, count, count * 0)
    return places


@pytest.fixture(params=["host", "device", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """Where caches are; torch's `cpu` is the device that there is everywhere."""
    if request.param == "device":
        monkeypatch.setattr(cache_view, "HostPages", DevicePages)
    return "cuda" if request.param == "gpu" else "cpu"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("room", ["connectors", "specs"])
def test_every_layout_is_accepted_by_every_room_and_its_blocks_move_whole(layout, device, room):
    made = LAYOUTS[layout]
    here, there = (fill(made().to(device), seed) for seed in (1, 2))
    if room == "connectors":
        sides = [CacheView({"a": each}) for each in (here, there)]
        assert sides[0].pages == sides[1].pages == ((page_form("a", here), here[0].nbytes),)
        one, other = (each.blocks for each in sides)
    else:
        ((one,), (other,)) = (pages_of(canonical(each)) for each in (here, there))
    assert (one.num_blocks, one.block_nbytes) == (NUM_BLOCKS, here[0].nbytes)
    before = there.clone()
    places = gathered(one, [4, 1, 2])
    order = sorted(range(1, here.dim()), key=here.stride, reverse=True)
    dense = here[4].permute([each - 1 for each in order]).contiguous().cpu()
    assert places[0, 0].tobytes() == dense.view(torch.uint8).numpy().tobytes()
    count = np.arange(3)
    other.scatter(other.mark(), np.array([0, 5, 3]), places, count, count * 0)
    as_bytes = [each.cpu().contiguous().view(torch.uint8) for each in (here, there, before)]
    for source, target in ((4, 0), (1, 5), (2, 3)):
        assert torch.equal(as_bytes[1][target], as_bytes[0][source])
    for untouched in (1, 2, 4):
        assert torch.equal(as_bytes[1][untouched], as_bytes[2][untouched])


@pytest.mark.parametrize(
    "cache",
    [
        torch.zeros(6),
        torch.zeros(6, 0),
        torch.zeros(8, 4, 6)[:, :, ::2],
        torch.zeros(8, 4).t(),
        torch.zeros(1, 4).expand(6, 4),
        torch.zeros(6, 1, 4).expand(6, 3, 4),
    ],
)
def test_layout_that_cannot_be_copied_by_block_is_refused_by_every_room(cache):
    with pytest.raises(CacheLayoutError, match=r"layer 'a' of shape .* cannot be copied by block"):
        CacheView({"a": cache})
    with pytest.raises(CacheLayoutError, match="expected that the first dimension counts blocks"):
        pages_of(canonical(cache))
    assert issubclass(CacheLayoutError, ConnectorOptionError)
    assert issubclass(CacheLayoutError, OffloadingOptionError)


def test_page_has_the_bytes_that_are_asked_for_or_is_refused():
    tensor = torch.arange(8 * 100, dtype=torch.int64).to(torch.uint8).view(8, 100)
    places = gathered(HostPages(page_rows(tensor, 64)), [3])
    assert places.tobytes() == bytes(tensor[3, :64].tolist())
    # More than there is, less than a page that does not lie together, or nothing.
    apart = torch.zeros(2, 4, 8).transpose(0, 1)
    for bad, nbytes in ((tensor, 101), (apart, 32), (tensor, 0)):
        with pytest.raises(CacheLayoutError, match=f"each has {nbytes} bytes"):
            page_rows(bad, nbytes)


def test_cache_without_layers_or_with_other_numbers_of_blocks_is_refused():
    with pytest.raises(CacheLayoutError, match="the KV cache has no layers"):
        CacheView({})
    with pytest.raises(CacheLayoutError, match="group 0 of the KV cache has no layers"):
        pages_of(CanonicalKVCaches([], [[]]))
    with pytest.raises(CacheLayoutError, match=r"different numbers of blocks, \[3, 6\]"):
        CacheView({"a": plain(), "b": plain()[:3]})


def test_cache_of_no_blocks_is_accepted():
    assert CacheView({"a": plain()[:0]}).blocks.num_blocks == 0


# -- forms


def test_layers_of_different_sizes_lie_one_after_the_other():
    caches = {
        "odd": fill(torch.zeros(NUM_BLOCKS, 3, dtype=torch.uint8), 1),
        "wide": fill(plain(torch.float32), 2),
    }
    view = CacheView(caches)
    assert view.pages == (("'odd'=uint8[3]/1", 3), ("'wide'=float32[2,4,8]/1,2,3", 256))
    block = gathered(view.blocks, [2])[0, 0]
    assert block[:3].tolist() == caches["odd"][2].tolist()
    assert block[3:].tobytes() == caches["wide"][2].numpy().tobytes()


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
    here, there = CacheView({"a": plain(), "b": plain()}), CacheView(OTHER_FORMS[what]())
    assert here.blocks.block_nbytes == there.blocks.block_nbytes
    assert here.pages != there.pages


def test_gaps_between_pages_make_no_other_form():
    gaps = torch.zeros(2 * NUM_BLOCKS, 2, 4, 16, dtype=torch.bfloat16)[::2, :, :, :8]
    assert CacheView({"a": gaps}).pages == CacheView({"a": plain()}).pages


def test_form_of_a_layer_stands_in_the_geometry_where_the_host_states_it(arena_config):
    caches = canonical(plain())
    (without,) = geometries_of(arena_config, caches, 1 << 20)
    caches.group_data_refs[0][0].form = page_form("a", plain())
    (stated,) = geometries_of(arena_config, caches, 1 << 20)
    assert without.pages == (("bfloat16", 128),)
    assert stated.pages == (("'a'=bfloat16[2,4,8]/1,2,3", 128),)


@pytest.fixture
def arena_config():
    from wtransfer import config

    return OffloadingConfig(
        extra_config={},
        worker_kv_bytes_per_block=128,
        groups=(config.OffloadingGroupConfig(16, group_id=0),),
        model=config.OffloadingModelConfig("model", "bfloat16"),
        cache=config.OffloadingCacheConfig(16, 1),
        parallel=config.OffloadingParallelConfig(rank=0, world_size=1),
    )


# -- runs


def even(nbytes, num_layers):
    """Layers in one allocation: all pages of a block are evenly spaced."""
    return list(torch.zeros(num_layers, 8, nbytes, dtype=torch.uint8))


def scattered(nbytes, num_layers):
    """Layers with odd distances between them."""
    whole = torch.zeros(num_layers * (8 * nbytes + 64 * num_layers), dtype=torch.uint8)
    starts = [n * 8 * nbytes + 64 * n * n for n in range(num_layers)]
    return [whole[at : at + 8 * nbytes].view(8, nbytes) for at in starts]


def packed(nbytes, num_layers):
    """All layers of a block beside each other: rows have gaps."""
    return list(torch.zeros(8, num_layers, nbytes, dtype=torch.uint8).unbind(1))


def runs(layers):
    return list(runs_of([each.numpy() for each in layers]))


@pytest.mark.parametrize("make", [even, packed])
@pytest.mark.parametrize("order", [1, -1])
def test_pages_at_even_distances_are_one_array_that_reads_and_writes_every_layer(make, order):
    layers = make(512, 6)[::order]
    for number, each in enumerate(layers):
        each[:] = torch.arange(8).view(8, 1) * 6 + number
    (run,) = runs(layers)
    assert (run.where, run.shape, run.nbytes) == (slice(0, 3072), (6, 512), 3072)
    for block in range(8):
        assert run.pages[block].tobytes() == b"".join(bytes(each[block]) for each in layers)
    np.copyto(run.pages[1], 99)
    assert {int(each[1].unique()) for each in layers} == {99}


def test_pages_at_odd_distances_or_of_other_sizes_are_several_arrays():
    found = runs(scattered(512, 5))
    assert [run.pages.shape[1] for run in found] == [2, 2, 1]
    assert [run.where.start for run in found] == [0, 1024, 2048]
    whole = torch.zeros(3, 8, 512, dtype=torch.uint8)
    found = runs([whole[0], byte_rows(whole[1], 256), byte_rows(whole[2], 256)])
    assert [run.pages.shape for run in found] == [(8, 1, 512), (8, 2, 256)]


def test_a_run_keeps_the_memory_of_all_its_layers():
    base = np.zeros((5, 4, 64), np.uint8)
    # As those that were allocated one by one, and are evenly spaced all the same.
    layers = [base[n].view() for n in range(5)]
    alive = [weakref.ref(each) for each in layers]
    (run,) = runs_of(layers)
    del layers
    gc.collect()
    assert all(each() is not None for each in alive)
    del run
    gc.collect()
    assert not any(each() for each in alive)


@pytest.mark.parametrize(
    ("make", "nbytes"),
    list(itertools.product((even, scattered, packed), (256, cache_view._LARGE_NBYTES))),
)
def test_host_and_device_pages_put_blocks_into_the_same_places(make, nbytes):
    layers = make(nbytes, 3)
    for layer in layers:
        layer.copy_(torch.randint(0, 256, layer.shape, dtype=torch.uint8))
    blocks, slots, at = np.array([5, 0, 2]), np.array([1, 3, 0]), np.array([0, 0, 1])
    found = []
    for kind in (HostPages, DevicePages):
        places = np.zeros((4, 2, 3 * nbytes), np.uint8)
        pages = kind(layers)
        pages.gather(pages.mark(), blocks, places, slots, at)
        found.append(places)
    assert found[0].any()
    assert np.array_equal(*found)


# The program ended with the end of its stack, as `HostPages` has the reason.
BETWEEN = """
import mmap
import numpy as np
import torch
from wtransfer.kv.cache_view import HostPages

# So many that memory below the lowest one is used up.
some = [np.zeros((2, 1 << 15), np.uint8) for _ in range(256)]
low = min(some, key=lambda each: each.ctypes.data)
high = np.frombuffer(mmap.mmap(-1, low.nbytes), np.uint8).reshape(low.shape)
places = np.zeros((4, 1, 1 << 16), np.uint8)
assert low.ctypes.data < places.ctypes.data < high.ctypes.data
layers = [torch.from_numpy(each) for each in (low, high)]
for each, layer in enumerate(layers, start=1):
    layer[0] = each
pages, numbers = HostPages(layers), [np.array([each]) for each in (0, 1)]
pages.gather(None, numbers[0], places, numbers[1], numbers[0])
pages.scatter(None, numbers[1], places, numbers[1], numbers[0])
print([layer[1].unique().tolist() for layer in layers])
"""


def test_buffer_between_two_layers_is_not_taken_for_a_part_of_them(tmp_path):
    # A fresh process: where memory comes from depends on what was freed before.
    command = [sys.executable, "-c", BETWEEN]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (0, "[[1], [2]]\n")
