"""The tile layer in plain Triton: the vocabulary of ThunderKittens as functions to write kernels with.

    import gpu_accel.thunderkittens as tk

    @triton.jit
    def twice(x, y, rows, cols, stride):
        a = tk.load(tk.tile(x, tl.program_id(0) * 16, 0, rows, cols, stride, 1, 16, 64))
        tk.store(tk.tile(y, tl.program_id(0) * 16, 0, rows, cols, stride, 1, 16, 64), a + a)

A register tile is a two-dimensional tensor of a program, a vector of it one-dimensional. `tile` says where a tile lies
in a matrix and what of it exists, so loads and stores need no care at edges. Triton has no warps to address: what is a
warp's in the original is a tile's here. What plain Triton hides, or cannot say:

    shared tiles and their swizzle    made by the compiler for operands of products; `shared_tiles` counts conflicts
    cp.async and rings of stages      num_stages of a launch
    TMA                               tma_async_load and tma_store_async of a tensor descriptor
    mbarriers, warp specialisation    Gluon, which has them by name; `template.py` is the load-compute-finish template
    named barriers, clusters          not in Triton 3.6
"""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_accel.compat import dot

_TF32 = tl.constexpr("tf32")  # of float32 operands; Triton 3.6 takes no bare text as a default

# ---- where a tile lies


@triton.jit
def tile(x, row, col, rows, cols, row_stride, col_stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    """(addresses, which of them exist) of ROWS x COLS at (row, col) of a matrix (rows, cols).

    With the strides and sizes exchanged it is the transposed tile, by its addresses.
    """
    r = row + tl.arange(0, ROWS)
    c = col + tl.arange(0, COLS)
    at = x + r.to(tl.int64)[:, None] * row_stride + c.to(tl.int64)[None, :] * col_stride
    return at, (r < rows)[:, None] & (c < cols)[None, :]


@triton.jit
def load(where, other=0.0):
    """A register tile from memory; `other` where nothing exists."""
    at, there = where
    return tl.load(at, mask=there, other=other)


@triton.jit
def store(where, value):
    """A register tile to memory, in the type of the memory; nothing is written where nothing exists."""
    at, there = where
    tl.store(at, value.to(at.dtype.element_ty), mask=there)


@triton.jit
def tma_async_load(descriptor, row, col):
    """A tile by TMA, from a host tensor descriptor: no addresses in registers, zeros outside."""
    return descriptor.load([row, col])


@triton.jit
def tma_store_async(descriptor, row, col, value):
    """A tile by TMA to a host tensor descriptor, in its dtype; what lies outside is not written."""
    descriptor.store([row, col], value.to(descriptor.dtype))


@triton.jit
def register_cache(where):
    """Load once, in float32, for use many times."""
    return load(where).to(tl.float32)


# ---- products: acc + ..., in float32; acc may be None


@triton.jit
def mma_AB(a, b, acc, PRECISION: tl.constexpr = _TF32):
    """acc + a b."""
    return dot(a, b, acc, PRECISION)


@triton.jit
def mma_ABt(a, b, acc, PRECISION: tl.constexpr = _TF32):
    """acc + a b'."""
    return dot(a, tl.trans(b), acc, PRECISION)


@triton.jit
def mma_AtB(a, b, acc, PRECISION: tl.constexpr = _TF32):
    """acc + a' b, for an `a` that was loaded.

    Triton 3.4 to 3.7.0 miscompile this on Hopper for an `a` that came out of a product (flash-linear-attention issue
    640): store such a tile, or compute its transpose as a product of its own.
    """
    return dot(tl.trans(a), b, acc, PRECISION)


@triton.jit
def mma_AtBt(a, b, acc, PRECISION: tl.constexpr = _TF32):
    """acc + a' b', for an `a` that was loaded; see mma_AtB."""
    return dot(tl.trans(a), tl.trans(b), acc, PRECISION)


# ---- reductions and broadcasts: a col_vec has an entry a row, a row_vec one a column


@triton.jit
def row_sum(x):
    """Sum of each row of a tile (R, C): a col_vec (R,)."""
    return tl.sum(x, 1)


@triton.jit
def row_max(x):
    """Largest number of each row of a tile (R, C): a col_vec (R,)."""
    return tl.max(x, 1)


@triton.jit
def row_min(x):
    """Smallest number of each row of a tile (R, C): a col_vec (R,)."""
    return tl.min(x, 1)


@triton.jit
def col_sum(x):
    """Sum of each column of a tile (R, C): a row_vec (C,)."""
    return tl.sum(x, 0)


@triton.jit
def col_max(x):
    """Largest number of each column of a tile (R, C): a row_vec (C,)."""
    return tl.max(x, 0)


@triton.jit
def col_min(x):
    """Smallest number of each column of a tile (R, C): a row_vec (C,)."""
    return tl.min(x, 0)


@triton.jit
def broadcast_row(vec, ROWS: tl.constexpr):
    """A row_vec as every row of a tile."""
    return tl.broadcast_to(vec[None, :], (ROWS, vec.shape[0]))


@triton.jit
def broadcast_col(vec, COLS: tl.constexpr):
    """A col_vec as every column of a tile."""
    return tl.broadcast_to(vec[:, None], (vec.shape[0], COLS))


@triton.jit
def add_row(x, vec):
    """A row_vec (C,) added to every row of a tile (R, C)."""
    return x + vec[None, :]


@triton.jit
def mul_row(x, vec):
    """Every row of a tile (R, C) times a row_vec (C,)."""
    return x * vec[None, :]


@triton.jit
def add_col(x, vec):
    """A col_vec (R,) added to every column of a tile (R, C)."""
    return x + vec[:, None]


@triton.jit
def sub_col(x, vec):
    """Every column of a tile (R, C) less a col_vec (R,)."""
    return x - vec[:, None]


@triton.jit
def mul_col(x, vec):
    """Every column of a tile (R, C) times a col_vec (R,)."""
    return x * vec[:, None]


@triton.jit
def div_col(x, vec):
    """Every column of a tile (R, C) divided by a col_vec (R,)."""
    return x / vec[:, None]


@triton.jit
def cumsum(x, AXIS: tl.constexpr, REVERSE: tl.constexpr = False):
    """Running sums; down the columns with AXIS 0, along the rows with 1."""
    return tl.cumsum(x, AXIS, reverse=REVERSE)


@triton.jit
def warp_reduce_sum(x):
    """The sum of a vector, in every lane of it."""
    return tl.zeros_like(x) + tl.sum(x, 0)


@triton.jit
def warp_broadcast(x, lane):
    """Entry `lane` of a vector, in every lane of it."""
    lanes = tl.arange(0, x.shape[0])
    none = tl.zeros_like(x)
    return none + tl.sum(tl.where(lanes == lane, x, none), 0)


@triton.jit
def warp_shuffle(x, lanes):
    """x[lanes]: every lane reads another one."""
    return tl.gather(x, lanes, 0)


# ---- masks


@triton.jit
def make_causal(x, row, col, fill):
    """x where the key col + j is not after the query row + i, `fill` elsewhere."""
    i = row + tl.arange(0, x.shape[0])
    j = col + tl.arange(0, x.shape[1])
    return tl.where(i[:, None] >= j[None, :], x, fill)


@triton.jit
def tril(x, diagonal=0, fill=0.0):
    """x where column - row <= diagonal, `fill` elsewhere, as torch.tril."""
    i = tl.arange(0, x.shape[0])
    j = tl.arange(0, x.shape[1])
    return tl.where(j[None, :] - i[:, None] <= diagonal, x, fill)


@triton.jit
def triu(x, diagonal=0, fill=0.0):
    """x where column - row >= diagonal, `fill` elsewhere, as torch.triu."""
    i = tl.arange(0, x.shape[0])
    j = tl.arange(0, x.shape[1])
    return tl.where(j[None, :] - i[:, None] >= diagonal, x, fill)


@triton.jit
def right_fill(x, count, fill):
    """`fill` from column `count` on: the edge of the keys."""
    return tl.where((tl.arange(0, x.shape[1]) < count)[None, :], x, fill)


# ---- what kernels are built of


@triton.jit
def block_scheduler(program, tiles_m, tiles_n, GROUP: tl.constexpr):
    """(row, column) of a program's tile: GROUP rows of tiles at a time, columns first, so that L2 stays warm."""
    width = GROUP * tiles_n
    first = program // width * GROUP
    rows = tl.minimum(tiles_m - first, GROUP)
    return first + program % width % rows, program % width // rows


@triton.jit
def block_gemm(
    a, b, row, col, m, n, k, am, ak, bk, bn, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr = _TF32,
):  # fmt: skip
    """The BM x BN tile at (row, col) of a (m, k) times b (k, n), in float32. am, ak, bk, bn: strides in elements."""
    acc = tl.zeros((BM, BN), tl.float32)
    for at in range(0, k, BK):
        left = load(tile(a, row, at, m, k, am, ak, BM, BK))
        right = load(tile(b, at, col, k, n, bk, bn, BK, BN))
        acc = mma_AB(left, right, acc, PRECISION)
    return acc


@triton.jit
def block_attention(scores, values, acc, top, total, PRECISION: tl.constexpr = _TF32):
    """One step of attention over a block of keys: (acc, top, total) with the block in it.

    scores: q keys' in base 2, masked with -inf. acc (rows, D) is divided by total (rows,) at the end; top (rows,) is
    the largest score so far, -inf before the first block.
    """
    higher = tl.maximum(top, row_max(scores))
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    p = tl.exp2(sub_col(scores, shift))
    shrink = tl.exp2(top - shift)
    total = total * shrink + row_sum(p)
    acc = mma_AB(p.to(values.dtype), values, mul_col(acc, shrink), PRECISION)
    return acc, higher, total
