"""SGLang's pages in a tier: which are found, what is damaged or late, and what is refused."""

import contextlib
import secrets
import threading
import time
from types import SimpleNamespace as Bag

import pytest
import torch
from wtransfer.errors import OffloadingOptionError, UnknownBackendError
from wtransfer.specs import payoff, tier_manager
from wtransfer.specs.factory import OffloadingSpecFactory
from wtransfer.testing.fakes import MemoryTier

pytest.importorskip("sglang")

import held_tier

from wtransfer_sglang import bridge, plugin, storage

pytestmark = pytest.mark.live

PAGE, NUM_PAGES, LAYERS, HEADS, DIM = 4, 8, 3, 2, 16
SIZE = PAGE * NUM_PAGES
SHAPES = {
    ("layer_first", "kv"): (2, LAYERS, SIZE, HEADS, DIM),
    ("page_first", "kv"): (2, SIZE, LAYERS, HEADS, DIM),
    ("page_first_direct", "kv"): (2, NUM_PAGES, LAYERS, PAGE, HEADS, DIM),
    ("page_head", "kv"): (2, NUM_PAGES, HEADS, PAGE, LAYERS, DIM),
    ("layer_first", "latent"): (LAYERS, SIZE, 1, DIM),
    ("page_first", "latent"): (SIZE, LAYERS, 1, DIM),
    ("page_first_direct", "latent"): (NUM_PAGES, LAYERS, PAGE, 1, DIM),
}
DEADLINE_S = 60.0


def until(condition):
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def key(number):
    return f"{number:064x}"


KEYS = [key(number) for number in range(3)]


def indices(pages):
    """Return the indices of tokens that SGLang gives for pages."""
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


class Pool:
    """Stands in for SGLang's host memory: its layout, and bytes that a seed gives."""

    def __init__(self, layout="layer_first", kind="kv", seed=0):
        shape = SHAPES[layout, kind]
        generator = torch.Generator().manual_seed(seed)
        self.kv_buffer = torch.randn(shape, generator=generator).to(torch.bfloat16)
        self.layout, self.page_size, self.size = layout, PAGE, SIZE
        self.size_per_token = self.kv_buffer.nbytes // SIZE
        self._axis = {"layer_first": -3, "page_first": -4}.get(layout)

    def page(self, number):
        """Return one page, as SGLang cuts it out."""
        if self._axis is not None:
            return self.kv_buffer.narrow(self._axis, number * PAGE, PAGE).clone()
        return self.kv_buffer.select(-5, number).clone()


def config(**changes):
    """Return SGLang's configuration of a rank's storage."""
    given = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1}
    given |= {"attn_cp_rank": 0, "attn_cp_size": 1, "is_mla_model": False, "model_name": "a"}
    return Bag(**{**given, **changes})


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(plugin, "is_registered", True)
    monkeypatch.setattr(storage, "get_model", lambda: Bag(kv_cache_dtype="auto"))
    with contextlib.suppress(ValueError):
        OffloadingSpecFactory.register_spec("held", "held_tier", "HeldTier")
    held_tier.gate.clear()
    yield
    held_tier.held.clear()
    held_tier.gate.set()
    held_tier.slow_s = 0.0


@pytest.fixture
def opened():
    """Maker of storages over one tier of memory."""
    made = []
    shelf = secrets.token_hex(4)

    def make(pool=None, *, extra=(), **changes):
        options = {"tier": "held", "shelf": shelf, **dict(extra)}
        made.append(storage.TierStorage(config(extra_config=options, **changes), {}))
        made[-1].register_mem_pool_host(pool or Pool())
        return made[-1]

    make.kept = MemoryTier.shelves[shelf]
    yield make
    held_tier.gate.set()
    for each in made:
        each.close()


def store(of, keys=KEYS, pages=(5, 0, 2)):
    """Store pages: SGLang waits a second at most, and a busy machine may take longer."""
    until(lambda: of.batch_set_v1(keys, indices(pages)) == [True] * len(keys))


def stored(opened, of):
    """Store pages, and wait until the tier has them."""
    number = len(opened.kept)
    store(of)
    until(lambda: len(opened.kept) == number + len(KEYS))


@pytest.mark.parametrize(("layout", "kind"), SHAPES)
def test_pages_come_back_to_other_places_bit_for_bit(opened, layout, kind):
    source, target = Pool(layout, kind), Pool(layout, kind, seed=1)
    former = target.page(4)
    stored(opened, opened(source))
    again = opened(target)
    assert again.batch_exists([*KEYS, key(7)]) == 3
    assert again.batch_get_v1([*KEYS, key(7)], indices((1, 6, 3, 4))) == [True] * 3 + [False]
    for place, page in zip((1, 6, 3), (5, 0, 2), strict=True):
        assert torch.equal(target.page(place), source.page(page))
    assert torch.equal(target.page(4), former)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_name": "b"},
        {"tp_rank": 1, "tp_size": 2},
        {"pp_rank": 1, "pp_size": 2},
        {"attn_cp_rank": 1, "attn_cp_size": 2},
    ],
)
def test_page_of_another_model_or_rank_is_a_miss(opened, changes):
    stored(opened, opened())
    assert opened().exists(KEYS[0])
    assert not opened(**changes).exists(KEYS[0])


def test_page_of_another_layout_or_dtype_is_a_miss(opened, monkeypatch):
    stored(opened, opened())
    assert not opened(Pool("page_first")).exists(KEYS[0])
    monkeypatch.setattr(storage, "get_model", lambda: Bag(kv_cache_dtype="fp8_e5m2"))
    assert not opened().exists(KEYS[0])


def test_pages_that_all_ranks_have_alike_are_found_by_each(opened):
    stored(opened, opened(is_mla_model=True, tp_size=2))
    assert opened(is_mla_model=True, tp_size=2, tp_rank=1).batch_exists(KEYS) == 3


def test_damaged_page_is_a_miss_until_it_is_stored_anew(opened, monkeypatch):
    # Not for a while alone.
    monkeypatch.setattr(tier_manager, "FAILED_S", 3600.0)
    source, target = Pool(), Pool(seed=1)
    first, second = opened(source), opened(target)
    stored(opened, first)
    damaged, *_ = opened.kept
    data = bytearray(opened.kept[damaged])
    data[-1] ^= 1
    opened.kept[damaged] = bytes(data)
    assert second.batch_exists(KEYS) == 3
    assert second.batch_get_v1(KEYS, indices((1, 6, 3))) == [False] * 3
    assert second.batch_exists(KEYS) == 0
    # The puts end after the call: no call but a look-up hears of it.
    held_tier.held.add("put")
    store(second, pages=(1, 6, 3))
    assert second.batch_exists(KEYS) == 0
    held_tier.gate.set()
    until(lambda: second.batch_exists(KEYS) == 3)
    assert first.batch_get_v1(KEYS, indices((1, 6, 3))) == [True] * 3


def test_tier_that_does_not_answer_is_a_miss_soon(opened):
    of = opened()
    stored(opened, of)
    held_tier.held.add("contains")
    begun = time.monotonic()
    assert of.batch_exists(KEYS) == 0
    assert of.batch_exists(KEYS) == 0
    assert time.monotonic() - begun < DEADLINE_S / 2


def test_load_that_takes_too_long_fails_and_writes_nothing_later(opened):
    target = Pool(seed=1)
    of = opened(target, extra={"deadline_s": 0.3})
    stored(opened, of)
    former = target.kv_buffer.clone()
    held_tier.held.add("get")
    num_ended = held_tier.num_ended["get"]
    assert of.batch_get_v1(KEYS, indices((1, 6, 3))) == [False] * 3
    held_tier.gate.set()
    until(lambda: held_tier.num_ended["get"] > num_ended)
    of.close()
    assert torch.equal(target.kv_buffer, former)


def test_calls_end_soon_when_sglang_ends_its_threads(opened):
    target = Pool(seed=1)
    of = opened(target, extra={"deadline_s": 3600})
    stored(opened, of)
    former, num_ended = target.kv_buffer.clone(), held_tier.num_ended["get"]
    controller = Bag(storage_backend=of, storage_stop_event=threading.Event())
    bridge.heed_storage_end(None, controller)
    held_tier.held.add("get")
    found = []
    thread = threading.Thread(
        target=lambda: found.append(of.batch_get_v1(KEYS, indices((1, 6, 3))))
    )
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    controller.storage_stop_event.set()
    thread.join(DEADLINE_S / 2)
    assert found == [[False] * 3]
    assert of.batch_exists(KEYS) == 0
    assert of.batch_set_v1([key(9)], indices((1,))) == [False]
    controller.storage_stop_event.clear()
    held_tier.gate.set()
    assert of.batch_exists(KEYS) == 3, "the pages are not taken for damaged"
    until(lambda: held_tier.num_ended["get"] > num_ended)
    of.close()
    assert torch.equal(target.kv_buffer, former), "SGLang has given the page to another block"


def test_store_does_not_wait_for_the_tier(opened):
    held_tier.held.add("put")
    source = Pool()
    of = opened(source)
    page = source.page(5)
    store(of, [KEYS[0]], (5,))
    # SGLang uses the page for another block.
    source.kv_buffer.zero_()
    held_tier.gate.set()
    until(lambda: len(opened.kept) == 1)
    assert of.batch_get_v1([KEYS[0]], indices((1,))) == [True]
    assert torch.equal(source.page(1), page)


def step(of, seconds, num_tokens=64):
    mode = Bag(is_extend=lambda: True)
    scheduler = Bag(tree_cache=Bag(cache_controller=Bag(storage_backend=of)))
    bridge.begin_step(scheduler, Bag(forward_mode=mode, extend_lens=[num_tokens]))
    time.sleep(seconds)
    bridge.end_step(None, scheduler, Bag(), Bag())


@pytest.mark.parametrize(("seconds", "pays"), [(0.0, False), (2.0, True)])
def test_loads_that_lose_to_computing_are_left(opened, seconds, pays):
    of = opened()
    stored(opened, of)
    step(of, seconds)
    held_tier.slow_s = 0.02
    for _ in range(payoff.MIN_LOADS):
        assert of.batch_get_v1(KEYS, indices((1, 6, 3))) == [True] * 3
    assert of.batch_exists(KEYS) == (3 if pays else 0)


def test_a_storage_of_sglangs_own_needs_no_hook():
    other = Bag(cache_controller=Bag(storage_backend=object()))
    for cache in (other, Bag(), Bag(cache_controller=None)):
        bridge.begin_step(Bag(tree_cache=cache), Bag())
        bridge.end_step(None, Bag(tree_cache=cache))


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({}, "needs the option tier"),
        ({"tier": "file", "shared_storage_path": "/x", "cpu_bytes_to_use": 1}, "leave it out"),
        ({"tier": "CPUOffloadingSpec"}, "is an offloading spec, and no tier"),
    ],
)
def test_option_that_cannot_be_used_is_refused(extra, text):
    with pytest.raises(OffloadingOptionError, match=text):
        storage.TierStorage(config(extra_config=extra), {})


def test_unknown_tier_is_refused_with_those_there_are():
    with pytest.raises(UnknownBackendError, match="file"):
        storage.TierStorage(config(extra_config={"tier": "fiel"}), {})


def test_unknown_option_is_refused_by_name(opened):
    with pytest.raises(OffloadingOptionError, match="sheff"):
        opened(extra={"sheff": "x"})


def test_pages_of_few_tokens_are_warned_of_once_for_all_ranks(opened, monkeypatch, caplog):
    opened(tp_rank=1)
    assert "--page-size" not in caplog.text
    opened()
    (told,) = (each.message for each in caplog.records if "--page-size" in each.message)
    assert told.startswith("--page-size 4: the tier held keeps a block of ")
    assert "250 of them for a prompt of 1,000 tokens" in told
    caplog.clear()
    monkeypatch.setattr(storage, "SMALL_PAGE", PAGE)
    opened()
    assert "--page-size" not in caplog.text


@pytest.mark.parametrize(
    "change", [{"layout": "page_unified"}, {"size_per_token": 1}, {"kv_buffer": None}]
)
def test_host_memory_of_another_kind_is_refused(opened, change):
    pool = Pool()
    vars(pool).update(change)
    with pytest.raises(OffloadingOptionError, match="--hicache-mem-layout"):
        opened(pool)


def test_kv_cache_of_several_kinds_is_refused(opened):
    of = opened()
    of.register_mem_host_pool_v2(Pool(), storage.PoolName.KV)
    with pytest.raises(OffloadingOptionError, match=r"several kinds \(mamba\)"):
        of.register_mem_host_pool_v2(Pool(), storage.PoolName.MAMBA)


def test_without_hooks_nothing_is_kept(monkeypatch):
    monkeypatch.setattr(plugin, "is_registered", False)
    with pytest.raises(RuntimeError, match="without the hooks of wtransfer-sglang"):
        storage.TierStorage(config(extra_config={"tier": "file"}), {})
