"""Pages at even distances are one array, which keeps the memory of all of them."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

from wtransfer.transport.pages import byte_rows, runs_of


def rows_of(caches):
    return [byte_rows(each, each[0].nbytes).numpy() for each in caches]


def test_rows_are_the_bytes_of_blocks_whatever_lies_between():
    cache = torch.arange(40, dtype=torch.int16).view(4, 10)[1:, :6]
    rows = byte_rows(cache, 12).numpy()
    assert rows.shape == (3, 12)
    assert [row.tobytes() for row in rows] == [each.numpy().tobytes() for each in cache]
    rows[1] = 0
    assert cache[1].tolist() == [0] * 6


@pytest.mark.parametrize("order", [1, -1])
def test_a_run_reads_and_writes_every_layer(order):
    whole = torch.arange(4 * 3 * 8, dtype=torch.uint8).view(4, 3, 8)
    layers = rows_of([whole[n] for n in range(4)][::order])
    (run,) = runs_of(layers, 3)
    assert (run.where, run.shape, run.nbytes) == (slice(0, 32), (4, 8), 32)
    for block in range(3):
        assert run.pages[block].tobytes() == b"".join(rows[block].tobytes() for rows in layers)
    np.copyto(run.pages[1], 9)
    assert whole[:, 1].unique().tolist() == [9]


def test_a_run_keeps_the_memory_of_all_its_layers():
    base = torch.zeros(5, 4, 64, dtype=torch.uint8)
    # As those that were allocated one by one, and are evenly spaced all the same.
    layers = [torch.from_numpy(base.numpy()[n].view()) for n in range(5)]
    rows = rows_of(layers)
    alive = [weakref.ref(each) for each in rows]
    (run,) = runs_of(rows, 4)
    del rows, layers
    gc.collect()
    assert all(each() is not None for each in alive)
    del run
    gc.collect()
    assert not any(each() for each in alive)
