"""Which blocks the Hopper backward visits and what it masks in them: its own device code, run on numpy arrays.

Gluon has no interpreter, but these functions are plain arithmetic: with numpy in place of `gl` they run as they are.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest

from gpu_accel.flash_attention3 import hopper_backward_device, hopper_backward_dq, hopper_device

KEYS = ROWS = 64
SHARED = {name: getattr(hopper_backward_device, name).fn for name in ("exponentials", "times_slopes")}
UNMODIFIED = (False, None, None, None, False)  # no ALiBi, score_mod, its gradient, mask_mod, block lists


class Block(np.ndarray):
    type = SimpleNamespace(layout=None)


GL = SimpleNamespace(
    minimum=np.minimum,
    maximum=np.maximum,
    where=np.where,
    exp2=np.exp2,
    arange=lambda start, stop, layout: np.arange(start, stop),
    SliceLayout=lambda dim, layout: None,
    cdiv=lambda a, b: (a + b - 1) // b,
)


@pytest.fixture
def on_numpy(monkeypatch):
    """A device function as a Python function."""

    def get(module, name):
        fn = getattr(module, name).fn
        columns_of = hopper_device.columns_of.fn
        monkeypatch.setitem(columns_of.__globals__, "gl", GL)
        plain = {"pack_pairs": lambda x, dtype: x, "columns_of": columns_of, **SHARED}
        for names in (fn.__globals__, vars(hopper_backward_device)):
            for key, value in {"gl": GL, "KEYS": KEYS, "ROWS": ROWS, **plain}.items():
                if key in names:
                    monkeypatch.setitem(names, key, value)
        return fn

    return get


def cases(count):
    rng = random.Random(0)
    yield 1, 1, -1, -1
    yield 333, 257, -1, -1
    yield 129, 515, -1, 0
    yield 515, 129, -1, 0
    for sq, sk in ((300, 300), (200, 263)):  # limits on either side of the edges of blocks
        for n in (1, 2, 62, 63, 64, 65):
            yield from ((sq, sk, n, -1), (sq, sk, n, 0), (sq, sk, -1, n))
    for _ in range(count):
        left = rng.choice([-1, 0, 5, 64, 100, 300])
        yield rng.randint(1, 400), rng.randint(1, 400), left, rng.choice([-1, 0, 0, 7, 70])


def visible(sq, sk, left, right):
    row, key = np.arange(sq)[:, None] + sk - sq, np.arange(sk)[None, :]
    seen = np.ones((sq, sk), bool)
    if right >= 0:
        seen &= key <= row + right
    if left >= 0:
        seen &= key >= row - left
    return seen


def zeros():
    return np.zeros((64, 64)).view(Block)


def padded(seen):
    """Rows that do not exist are hidden by lse = inf, not by the mask."""
    rows, keys = (-(-n // 128) * 128 for n in seen.shape)
    full = np.zeros((rows, keys), bool)
    full[: seen.shape[0], : seen.shape[1]] = seen
    return full


@pytest.mark.parametrize("sq, sk, left, right", list(cases(60)))
def test_blocks_of_keys_and_their_masks(sq, sk, left, right, on_numpy):
    blocks, ds = on_numpy(hopper_backward_dq, "_key_blocks"), on_numpy(hopper_backward_dq, "_ds")
    seen = padded(visible(sq, sk, left, right))
    flags = (right >= 0, left >= 0)
    shift = sk - sq
    for row0 in range(0, sq, 2 * ROWS):
        lo, hi = blocks(row0, sk, shift, left, right, *flags)
        assert 0 <= lo < hi <= -(-sk // KEYS)
        assert not seen[row0 : row0 + 128, : lo * KEYS].any() and not seen[row0 : row0 + 128, hi * KEYS :].any()
        for half in (row0, row0 + ROWS):
            lse = np.where(np.arange(half, half + ROWS) < sq, 0.0, np.inf)
            for j in range(lo, hi):
                got = ds(zeros(), zeros() + 1.0, lse, np.zeros(64), half, j * KEYS, shift, sk, left, right, 1.0, 0.0,
                         2, (0, 0), (), (), None, *flags, False, sk % KEYS == 0, False, *UNMODIFIED)  # fmt: skip
                assert np.array_equal(got, seen[half : half + ROWS, j * KEYS : (j + 1) * KEYS])


@pytest.mark.parametrize("tile, rows", [(64, 64), (128, 64), (128, 128)])
@pytest.mark.parametrize("sq, sk, left, right", list(cases(25)))
def test_blocks_of_queries_and_their_masks(sq, sk, left, right, tile, rows, on_numpy):
    blocks = on_numpy(hopper_backward_device, "query_blocks")
    probabilities = on_numpy(hopper_backward_device, "modified_probabilities")
    seen = padded(visible(sq, sk, left, right))
    flags = (right >= 0, left >= 0)
    shift, num_m = sk - sq, -(-sq // rows)
    for key0 in range(0, sk, tile):
        lo, hi = blocks(key0, shift, num_m, left, right, rows, tile, *flags)
        assert 0 <= lo < hi <= num_m
        assert not seen[: lo * rows, key0 : key0 + tile].any() and not seen[hi * rows :, key0 : key0 + tile].any()
        for first in range(key0, key0 + tile, KEYS):
            for i in range(lo, hi):
                lse = np.where(np.arange(i * rows, (i + 1) * rows) < sq, 0.0, np.inf)
                s = np.zeros((KEYS, rows)).view(Block)
                got, _ = probabilities(s, lse, first, i * rows, shift, sk, left, right, 1.0, 0.0, 2, (0, 0), (), (),
                                       None, *flags, False, sk % tile == 0, False, *UNMODIFIED)  # fmt: skip
                assert np.array_equal(got.T, seen[i * rows : (i + 1) * rows, first : first + KEYS])
