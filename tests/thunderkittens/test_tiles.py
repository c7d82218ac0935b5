"""The tile layer: every function inside a kernel against torch, kernels built of it, and the ladder."""

from __future__ import annotations

import inspect

import pytest
import torch
import triton
import triton.language as tl

import gpu_accel.thunderkittens as tk
from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.thunderkittens import ladder, tiles
from gpu_accel.thunderkittens.shared_tiles import bank_conflicts, place, swizzle_bytes
from tests.thunderkittens.helpers import randn


@triton.jit
def _products(a, b, c, WHICH: tl.constexpr):
    """a is (16, 32) or its transpose, b is (32, 64) or its transpose."""
    if WHICH == "AB" or WHICH == "ABt":
        left = tk.load(tk.tile(a, 0, 0, 13, 21, 21, 1, 16, 32))
    else:
        left = tk.load(tk.tile(a, 0, 0, 21, 13, 13, 1, 32, 16))
    if WHICH == "AB" or WHICH == "AtB":
        right = tk.load(tk.tile(b, 0, 0, 21, 50, 50, 1, 32, 64))
    else:
        right = tk.load(tk.tile(b, 0, 0, 50, 21, 21, 1, 64, 32))
    acc = tl.zeros((16, 64), tl.float32) + 1.0
    if WHICH == "AB":
        acc = tk.mma_AB(left, right, acc, "ieee")
    elif WHICH == "ABt":
        acc = tk.mma_ABt(left, right, acc, "ieee")
    elif WHICH == "AtB":
        acc = tk.mma_AtB(left, right, acc, "ieee")
    else:
        acc = tk.mma_AtBt(left, right, acc, "ieee")
    tk.store(tk.tile(c, 0, 0, 13, 50, 50, 1, 16, 64), acc)


@pytest.mark.parametrize("which", ["AB", "ABt", "AtB", "AtBt"])
def test_products(which, device):
    """Of rectangles, and of tiles that reach over the edges."""
    a, b = randn(13, 21, seed=1, device=device), randn(21, 50, seed=2, device=device)
    c = torch.full((13, 50), float("nan"), device=device)
    given = a.T.contiguous() if which.startswith("At") else a, b.T.contiguous() if which.endswith("Bt") else b
    _products[(1,)](*given, c, which)
    torch.testing.assert_close(c, a @ b + 1, rtol=1e-5, atol=1e-5)


@triton.jit
def _vectors(x, y, z, ROWS: tl.constexpr, COLS: tl.constexpr):
    t = tk.load(tk.tile(x, 0, 0, ROWS, COLS, COLS, 1, ROWS, COLS))
    e = tl.exp(tk.sub_col(t, tk.row_max(t)))
    t = tk.div_col(e, tk.row_sum(e)) + tk.broadcast_row(tk.col_max(t), ROWS) + tk.broadcast_col(tk.row_min(t), COLS)
    t = tk.mul_row(tk.add_col(t, tk.row_sum(t)), tk.col_sum(t)) + tk.add_row(t * 0.0, tk.col_min(t))
    tk.store(tk.tile(y, 0, 0, ROWS, COLS, COLS, 1, ROWS, COLS), tk.mul_col(t, tk.row_max(t)))
    lanes = tl.arange(0, COLS)
    v = tl.load(x + lanes)
    out = tk.warp_reduce_sum(v) + 10.0 * tk.warp_broadcast(v, 3) + 100.0 * tk.warp_shuffle(v, lanes ^ 1)
    tl.store(z + lanes, out)


def test_reductions_and_broadcasts(device):
    x = randn(8, 16, seed=1, device=device)
    y, z = torch.empty_like(x), torch.empty(16, device=device)
    _vectors[(1,)](x, y, z, 8, 16)
    t = x.softmax(1) + x.amax(0) + x.amin(1, keepdim=True)
    t = (t + t.sum(1, keepdim=True)) * t.sum(0) + t.amin(0)
    torch.testing.assert_close(y, t * t.amax(1, keepdim=True), rtol=1e-5, atol=1e-5)
    v = x[0]
    torch.testing.assert_close(z, v.sum() + 10 * v[3] + 100 * v[torch.arange(16, device=device) ^ 1])


@triton.jit
def _lanes(x, y, z):
    v = tl.load(x + tl.arange(0, 16))
    tl.store(y + tl.arange(0, 16), tk.warp_reduce_sum(v))
    tl.store(z + tl.arange(0, 16), tk.warp_broadcast(v, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32], ids=str)
def test_lanes_see_one_number_whatever_they_hold(dtype, device):
    x = torch.arange(1, 17, device=device).to(dtype)
    y, z = torch.empty_like(x), torch.empty_like(x)
    if dtype.is_floating_point:
        x[5] = float("inf")
    _lanes[(1,)](x, y, z)
    assert torch.equal(y, x.sum().expand(16).to(dtype)) and torch.equal(z, x[3].expand(16))


def test_every_name_says_what_it_is():
    things = {name: getattr(tk, name) for name in tk.__all__}  # the interpreter wraps a @triton.jit function in another
    assert not [name for name, x in things.items() if not inspect.getdoc(getattr(x, "fn", x))]


@triton.jit
def _masks(x, y, WHICH: tl.constexpr):
    t = tk.register_cache(tk.tile(x, 0, 0, 8, 16, 16, 1, 8, 16))
    if WHICH == "causal":
        t = tk.make_causal(t, 6, 3, -1.0)
    elif WHICH == "tril":
        t = tk.tril(t, 2)
    elif WHICH == "triu":
        t = tk.triu(t, -1)
    elif WHICH == "right":
        t = tk.right_fill(t, 5, 0.0)
    elif WHICH == "down":
        t = tk.cumsum(t, 0)
    else:
        t = tk.cumsum(t, 1, True)
    tk.store(tk.tile(y, 0, 0, 8, 16, 16, 1, 8, 16), t)


MASKS = {
    "causal": lambda x: torch.where(torch.arange(8)[:, None] + 6 >= torch.arange(16) + 3, x, -1.0),
    "tril": lambda x: x.tril(2),
    "triu": lambda x: x.triu(-1),
    "right": lambda x: torch.where(torch.arange(16) < 5, x, 0.0),
    "down": lambda x: x.cumsum(0),
    "along-back": lambda x: x.flip(1).cumsum(1).flip(1),
}


@pytest.mark.parametrize("which", MASKS)
def test_masks_and_running_sums(which, device):
    x = randn(8, 16, seed=1)
    y = torch.empty(8, 16, device=device)
    _masks[(1,)](x.to(device), y, which)
    torch.testing.assert_close(y.cpu(), MASKS[which](x))


@triton.jit
def _attention(q, k, v, o, seqlen, keys, scale, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    row = tl.program_id(0) * BM
    queries = tk.load(tk.tile(q, row, 0, seqlen, D, D, 1, BM, D))
    acc = tl.zeros((BM, D), tl.float32)
    top = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    for col in range(0, keys, BN):
        scores = tk.mma_ABt(queries, tk.load(tk.tile(k, col, 0, keys, D, D, 1, BN, D)), None) * scale
        scores = tk.make_causal(tk.right_fill(scores, keys - col, float("-inf")), row, col, float("-inf"))
        values = tk.load(tk.tile(v, col, 0, keys, D, D, 1, BN, D))
        acc, top, total = tk.block_attention(scores, values, acc, top, total)
    tk.store(tk.tile(o, row, 0, seqlen, D, D, 1, BM, D), tk.div_col(acc, total))


def test_attention_in_a_dozen_lines(device):
    q, k, v = (randn(37, 32, seed=s, device=device) for s in (1, 2, 3))
    o = torch.empty_like(q)
    _attention[(3,)](q, k, v, o, 37, 37, 32**-0.5 * 1.4426950408889634, 32, 16, 16)
    truth = torch.nn.functional.scaled_dot_product_attention(*(x[None, None] for x in (q, k, v)), is_causal=True)
    torch.testing.assert_close(o, truth[0, 0], rtol=2e-3, atol=2e-3)


@triton.jit
def _order(out, tiles_m, tiles_n, GROUP: tl.constexpr):
    program = tl.program_id(0)
    i, j = tiles.block_scheduler(program, tiles_m, tiles_n, GROUP)
    tl.store(out + program, i * tiles_n + j)


@pytest.mark.parametrize("group", [1, 4])
def test_every_tile_has_one_program(group, device):
    """Also where the rows of tiles are no multiple of the group."""
    out = torch.empty(7 * 3, dtype=torch.int32, device=device)
    _order[(21,)](out, 7, 3, group)
    assert sorted(out.tolist()) == list(range(21))
    if group == 4:
        assert out[:5].tolist() == [0, 3, 6, 9, 1]  # down four rows, then the next column


@pytest.mark.parametrize("level", [x.name for x in ladder.LEVELS if x.interpreted])
@pytest.mark.parametrize("shape", [(33, 24, 41), (16, 40, 16), (5, 0, 7), (0, 8, 4)], ids=str)
def test_levels_of_the_ladder(level, shape, device):
    m, n, k = shape
    a, b = (randn(*s, seed=x, dtype=torch.float16, device=device) for x, s in ((1, (m, k)), (2, (k, n))))
    if level == "tma":  # rows that start at multiples of 16 bytes
        a, b = (torch.nn.functional.pad(x, (0, 8))[:, : x.shape[1]] for x in (a, b))
        a, b = (torch.nn.functional.pad(x, (0, -x.shape[1] % 8))[:, : x.shape[1]] for x in (a, b))
    torch.testing.assert_close(ladder.run(level, a, b), (a.double() @ b.double()).half(), rtol=2e-3, atol=2e-3)


def test_what_the_ladder_refuses(device):
    a = randn(8, 8, seed=1, dtype=torch.float16, device=device)
    with pytest.raises(InvalidInputError, match="no level 'fast'"):
        ladder.run("fast", a, a)
    with pytest.raises(InvalidInputError, match="a must be"):
        ladder.run("naive", a, a[:3])
    with pytest.raises(InvalidInputError, match="float32"):
        ladder.run("naive", a.float(), a.float())
    with pytest.raises(UnsupportedError, match="multiples of 16 bytes"):
        ladder.run("tma", a[:, :3].contiguous(), a[:3])
    with pytest.raises(UnsupportedError, match="'template' needs a Hopper GPU"):  # the interpreter has no such thing
        ladder.run("template", a.cpu(), a.cpu())


def test_turns_of_two_consumers():
    assert tk.pingpong_schedule(4) == [
        ("mma 0", "wait"), ("epilogue 0", "mma 1"), ("mma 2", "epilogue 1"), ("epilogue 2", "mma 3"),
    ]  # fmt: skip


class TestSharedTiles:
    @pytest.mark.parametrize(("swizzle", "ways"), [(0, 8), (32, 4), (64, 2), (128, 1)])
    def test_conflicts_of_the_paper(self, swizzle, ways):
        """Appendix C: 32 x 64 of 16 bits."""
        assert bank_conflicts(32, 64, 2, swizzle) == ways

    def test_the_swizzle_goes_by_the_width(self):
        assert [swizzle_bytes(cols, 2) for cols in (16, 32, 64, 96, 128, 24)] == [32, 64, 128, 64, 128, 0]

    @pytest.mark.parametrize("swizzle", [32, 64, 128])
    def test_a_swizzle_is_a_permutation(self, swizzle):
        found = {place(row, col, 64, 2, swizzle) for row in range(32) for col in range(64)}
        assert found == set(range(0, 32 * 64 * 2, 2))

    def test_refusals(self):
        with pytest.raises(InvalidInputError, match="swizzle is 16"):
            place(0, 0, 64, 2, 16)
        with pytest.raises(InvalidInputError, match="not made of"):
            bank_conflicts(12, 64, 2, 0)
