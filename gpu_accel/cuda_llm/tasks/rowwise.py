"""Tasks on rows with more to them than one reduction: RMS norm, argmax, sorting, least squares; pooling."""

from __future__ import annotations

from typing import Any

import torch

from .moving import exact
from .task import FAMILIES, ONCE, Buffer, Dims, Task, Tensors, Truth

EPS = 1e-5


def _rms(x: Tensors, d: Dims) -> dict[str, Truth]:
    total, size = x["x"] + x["residual"], x["x"].abs() + x["residual"].abs()
    rstd = torch.rsqrt((total * total).mean(-1, keepdim=True) + EPS)
    blur = 1 + (size * size).mean(-1, keepdim=True) * rstd * rstd
    weight = x["weight"].abs()
    return {"out": Truth(total * rstd * x["weight"], (size + total.abs() * blur) * rstd * weight),
            "total": Truth(total, size)}  # fmt: skip


def _rms_library(x: Tensors, d: Dims) -> Tensors:
    total = x["x"] + x["residual"]
    return {"out": torch.nn.functional.rms_norm(total, (d["cols"],), x["weight"], EPS), "total": total}


def _first_largest(x: Tensors, d: Dims) -> dict[str, Truth]:
    top = x["x"].amax(-1, keepdim=True)
    place = torch.arange(d["cols"], device=top.device).expand_as(x["x"])
    return {"out": exact(place.where(x["x"] == top, d["cols"]).amin(-1).double())}


def _ols(x: Tensors, d: Dims) -> dict[str, Truth]:
    mx, my = x["x"].mean(-1, keepdim=True), x["y"].mean(-1, keepdim=True)
    dx, dy = x["x"] - mx, x["y"] - my
    sxx = (dx * dx).sum(-1)
    slope = (dx * dy).sum(-1) / sxx
    wide, high = x["x"].abs() + mx.abs(), x["y"].abs() + my.abs()
    blur = ((wide * dy.abs() + high * dx.abs()).sum(-1) + slope.abs() * (wide * dx.abs()).sum(-1)) / sxx + slope.abs()
    away = x["x"].abs().mean(-1)
    return {
        "slope": Truth(slope, blur),
        "intercept": Truth(my[:, 0] - slope * mx[:, 0], x["y"].abs().mean(-1) + away * (blur + slope.abs())),
    }  # fmt: skip


def _ols_library(x: Tensors, d: Dims) -> Tensors:
    mx, my = x["x"].mean(-1), x["y"].mean(-1)
    dx, dy = x["x"] - mx[:, None], x["y"] - my[:, None]
    slope = (dx * dy).sum(-1) / (dx * dx).sum(-1)
    return {"slope": slope, "intercept": my - slope * mx}


_MATRIX = Buffer("x", ("rows", "cols"))
_ROWS: dict[str, Any] = {
    "dims": ("rows", "cols"),
    "shown": ({"rows": 4, "cols": 100}, {"rows": 3, "cols": 257}),
    "ranges": {"rows": (1, 6), "cols": (8, 300)},
}

RESIDUAL_RMS = Task(
    name="residual_rmsnorm", title="Add a residual and apply RMS norm with a weight", family="fused",
    inputs=(_MATRIX, Buffer("residual", ("rows", "cols")), Buffer("weight", ("cols",))),
    outputs=(Buffer("out", ("rows", "cols")), Buffer("total", ("rows", "cols"))),
    oracle=_rms, library=_rms_library, flops="rows * cols * 5", tolerance=16, bench={"rows": 8192, "cols": 4096},
    start=f'''# /// launch
# task = "residual_rmsnorm"
# grid = ["rows"]
# [constants]
# BLOCK = "next_power_of_2(cols)"
# [space]
# num_warps = [2, 4, 8, 16]
# ///
@triton.jit
def residual_rmsnorm(x, residual, weight, out, total, cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    v = tl.load(x + row * cols + i, mask=i < cols, other=0.0)
    v += tl.load(residual + row * cols + i, mask=i < cols, other=0.0)
    tl.store(total + row * cols + i, v, mask=i < cols)
    rstd = 1.0 / tl.sqrt(tl.sum(v * v, 0) / cols + {EPS})
    tl.store(out + row * cols + i, v * rstd * tl.load(weight + i, mask=i < cols), mask=i < cols)
''',
    naive_cuda=f'''// /// launch
// grid = ["cdiv(rows, 32)"]
// block = [32]
// entry = "residual_rmsnorm"
// args = ["x", "residual", "weight", "out", "total", "rows", "cols"]
// ///
extern "C" __global__ void residual_rmsnorm(const float* x, const float* residual, const float* weight, float* out,
                                            float* total, long long rows, long long cols) {{
    long long r = blockIdx.x * 32LL + threadIdx.x;
    if (r >= rows) return;
    float sum = 0;
    for (long long i = 0; i < cols; ++i) {{
        float v = x[r * cols + i] + residual[r * cols + i];
        total[r * cols + i] = v;
        sum += v * v;
    }}
    float rstd = rsqrtf(sum / cols + {EPS}f);
    for (long long i = 0; i < cols; ++i) out[r * cols + i] = total[r * cols + i] * rstd * weight[i];
}}
''', **_ROWS,
)  # fmt: skip

ARGMAX = Task(
    name="argmax", title="Place of the largest value of each row, the first of equals", family="search",
    inputs=(_MATRIX,), outputs=(Buffer("out", ("rows",), "int32"),), oracle=_first_largest,
    library=lambda x, d: {"out": x["x"].argmax(-1).to(torch.int32)}, flops="rows * cols", tolerance=0,
    bench={"rows": 8192, "cols": 4096},
    start=f'''# /// launch
# task = "argmax"
# grid = ["rows"]
# [constants]
# BLOCK = "next_power_of_2(cols)"
# STREAM = 0
# [space]
# STREAM = [0, 1]
# num_warps = [1, 2, 4, 8, 16]
# ///
@triton.jit
def argmax(x, out, cols, BLOCK: tl.constexpr, STREAM: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    v = tl.load(x + row * cols + i, mask=i < cols, other=float("-inf"){ONCE})
    tl.store(out + row, tl.argmax(v, 0))
''',
    naive_cuda='''// /// launch
// grid = ["cdiv(rows, 32)"]
// block = [32]
// entry = "argmax"
// args = ["x", "out", "rows", "cols"]
// ///
extern "C" __global__ void argmax(const float* x, int* out, long long rows, long long cols) {
    long long r = blockIdx.x * 32LL + threadIdx.x;
    if (r >= rows) return;
    int at = 0;
    for (long long i = 1; i < cols; ++i)
        if (x[r * cols + i] > x[r * cols + at]) at = (int)i;
    out[r] = at;
}
''', **_ROWS,
)  # fmt: skip

SORT = Task(
    name="sort", title="Sort each row, the least first", family="sort",
    inputs=(_MATRIX,), outputs=(Buffer("out", ("rows", "cols")),),
    oracle=lambda x, d: {"out": exact(x["x"].sort(-1).values)},
    library=lambda x, d: {"out": x["x"].sort(-1).values}, flops="rows * cols", tolerance=0,
    bench={"rows": 16384, "cols": 1024},
    start='''# /// launch
# task = "sort"
# grid = ["rows"]
# [constants]
# BLOCK = "next_power_of_2(cols)"
# CHUNK = 16
# [space]
# CHUNK = [8, 16, 32, 64]
# num_warps = [1, 2, 4, 8]
# ///
@triton.jit
def sort(x, out, cols, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    v = tl.load(x + row * cols + i, mask=i < cols, other=float("inf"))
    rank = tl.zeros((BLOCK,), tl.int32)  # how many values belong before each
    for start in range(0, cols, CHUNK):
        j = start + tl.arange(0, CHUNK)
        w = tl.load(x + row * cols + j, mask=j < cols, other=float("inf"))
        before = (w[None, :] < v[:, None]) | ((w[None, :] == v[:, None]) & (j[None, :] < i[:, None]))
        rank += tl.sum((before & (j[None, :] < cols)).to(tl.int32), 1)
    tl.store(out + row * cols + rank, v, mask=i < cols)
''',
    features=('''# /// launch
# task = "sort"
# grid = ["rows"]
# [constants]
# BLOCK = "next_power_of_2(cols)"
# [space]
# num_warps = [1, 2, 4, 8]
# ///
@triton.jit
def sort(x, out, cols, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    v = tl.load(x + row * cols + i, mask=i < cols, other=float("inf"))
    tl.store(out + row * cols + i, tl.sort(v), mask=i < cols)
''', '''// /// launch
// task = "sort"
// grid = ["rows"]
// block = ["THREADS"]
// shared = "4 * next_power_of_2(cols)"
// entry = "sort"
// args = ["x", "out", "cols"]
// [constants]
// THREADS = 256
// WIDTH = "next_power_of_2(cols)"
// [space]
// THREADS = [64, 128, 256, 512]
// ///
extern "C" __global__ void __launch_bounds__(THREADS) sort(const float* x, float* out, long long cols) {
    extern __shared__ float v[];  // a bitonic network over one row in shared memory
    const long long row = blockIdx.x * cols;
    for (int i = threadIdx.x; i < WIDTH; i += THREADS) v[i] = i < cols ? x[row + i] : __int_as_float(0x7f800000);
    __syncthreads();
    for (int size = 2; size <= WIDTH; size *= 2)
        for (int away = size / 2; away; away /= 2) {
            for (int t = threadIdx.x; t < WIDTH / 2; t += THREADS) {
                const int i = 2 * t - (t & (away - 1)), j = i + away;
                const float a = v[i], b = v[j];
                const bool up = (i & size) == 0;
                if ((a > b) == up) v[i] = b, v[j] = a;
            }
            __syncthreads();
        }
    for (int i = threadIdx.x; i < cols; i += THREADS) out[row + i] = v[i];
}
''', '''// /// launch
// task = "sort"
// grid = ["cdiv(rows, WARPS)"]
// block = [32, "WARPS"]
// shared = "4 * WARPS * (WIDTH + WIDTH // 32)"
// entry = "sort"
// args = ["x", "out", "rows", "cols"]
// [constants]
// WARPS = 4
// WIDTH = "max(64, next_power_of_2(cols))"
// [space]
// WARPS = [1, 2, 4, 8]
// ///
#define EACH (WIDTH / 32)
#define PUT(a, b) { const float l = fminf(a, b), h = fmaxf(a, b); a = l, b = h; }
#define HALF(a, b, low) a = low ? fminf(a, b) : fmaxf(a, b)
extern "C" __global__ void __launch_bounds__(32 * WARPS) sort(const float* x, float* out, long long rows,
                                                              long long cols) {
    // A warp sorts a row in registers: lane l holds places l * EACH and on. Each exchange puts the smaller value first:
    // a merge compares each place with its mirror image, then with places at half the distance and so on.
    extern __shared__ float lines[];
    float* mine = lines + threadIdx.y * (WIDTH + EACH);
    const unsigned lane = threadIdx.x, width = (unsigned)cols;
    const long long row = (long long)blockIdx.x * WARPS + threadIdx.y;
    if (row >= rows) return;
    const float* from = x + row * cols + lane;
    float* to = out + row * cols + lane;
    float v[EACH];
#pragma unroll
    for (int r = 0; r < EACH; ++r)  // in any order
        v[r] = r * 32 + lane < width ? from[r * 32] : __int_as_float(0x7f800000);
#pragma unroll
    for (int size = 2; size <= EACH; size *= 2) {
#pragma unroll
        for (int r = 0; r < EACH; ++r)
            if ((r & (size / 2)) == 0) PUT(v[r], v[r ^ (size - 1)])
#pragma unroll
        for (int away = size / 4; away; away /= 2)
#pragma unroll
            for (int r = 0; r < EACH; ++r)
                if ((r & away) == 0) PUT(v[r], v[r + away])
    }
#pragma unroll 1
    for (int mask = 1; mask < 32; mask = 2 * mask + 1) {
        bool low = (lane & (mask + 1) / 2) == 0;
#pragma unroll
        for (int r = 0; r < EACH / 2; ++r) {
            const float a = __shfl_xor_sync(~0u, v[EACH - 1 - r], mask), b = __shfl_xor_sync(~0u, v[r], mask);
            HALF(v[r], a, low);
            HALF(v[EACH - 1 - r], b, low);
        }
#pragma unroll 1
        for (int away = (mask + 1) / 4; away; away /= 2) {
            low = (lane & away) == 0;
#pragma unroll
            for (int r = 0; r < EACH; ++r) {
                const float a = __shfl_xor_sync(~0u, v[r], away);
                HALF(v[r], a, low);
            }
        }
#pragma unroll
        for (int away = EACH / 2; away; away /= 2)
#pragma unroll
            for (int r = 0; r < EACH; ++r)
                if ((r & away) == 0) PUT(v[r], v[r + away])
    }
#pragma unroll
    for (int r = 0; r < EACH; ++r) mine[lane * EACH + r + (lane * EACH + r) / 32] = v[r];
    __syncwarp();
#pragma unroll
    for (int r = 0; r < EACH; ++r)
        if (r * 32 + lane < width) to[r * 32] = mine[r * 33 + lane];
}
'''),
    naive_cuda='''// /// launch
// grid = ["cdiv(rows, 32)"]
// block = [32]
// entry = "sort"
// args = ["x", "out", "rows", "cols"]
// ///
extern "C" __global__ void sort(const float* x, float* out, long long rows, long long cols) {
    long long r = blockIdx.x * 32LL + threadIdx.x;
    if (r >= rows) return;
    for (long long i = 0; i < cols; ++i) {  // insertion
        float v = x[r * cols + i];
        long long j = i;
        for (; j > 0 && out[r * cols + j - 1] > v; --j) out[r * cols + j] = out[r * cols + j - 1];
        out[r * cols + j] = v;
    }
}
''', **_ROWS,
)  # fmt: skip

OLS = Task(
    name="ols", title="Least squares: slope and intercept of y over x, for each row", family="regression",
    inputs=(_MATRIX, Buffer("y", ("rows", "cols"))),
    outputs=(Buffer("slope", ("rows",)), Buffer("intercept", ("rows",))),
    families=tuple(one for one in FAMILIES if one != "sparse"),  # a row of one number has no slope
    oracle=_ols, library=_ols_library, flops="rows * cols * 8", tolerance=16, bench={"rows": 8192, "cols": 2048},
    start=f'''# /// launch
# task = "ols"
# grid = ["rows"]
# [constants]
# BLOCK = "next_power_of_2(cols)"
# STREAM = 0
# [space]
# STREAM = [0, 1]
# num_warps = [1, 2, 4, 8, 16]
# ///
@triton.jit
def ols(x, y, slope, intercept, cols, BLOCK: tl.constexpr, STREAM: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    u = tl.load(x + row * cols + i, mask=i < cols, other=0.0{ONCE})
    v = tl.load(y + row * cols + i, mask=i < cols, other=0.0{ONCE})
    mu = tl.sum(u, 0) / cols
    mv = tl.sum(v, 0) / cols
    du = tl.where(i < cols, u - mu, 0.0)
    b = tl.sum(du * (v - mv), 0) / tl.sum(du * du, 0)
    tl.store(slope + row, b)
    tl.store(intercept + row, mv - b * mu)
''',
    naive_cuda='''// /// launch
// grid = ["cdiv(rows, 32)"]
// block = [32]
// entry = "ols"
// args = ["x", "y", "slope", "intercept", "rows", "cols"]
// ///
extern "C" __global__ void ols(const float* x, const float* y, float* slope, float* intercept, long long rows,
                               long long cols) {
    long long r = blockIdx.x * 32LL + threadIdx.x;
    if (r >= rows) return;
    double mx = 0, my = 0, sxy = 0, sxx = 0;
    for (long long i = 0; i < cols; ++i) mx += x[r * cols + i], my += y[r * cols + i];
    mx /= cols;
    my /= cols;
    for (long long i = 0; i < cols; ++i) {
        double d = x[r * cols + i] - mx;
        sxy += d * (y[r * cols + i] - my);
        sxx += d * d;
    }
    slope[r] = (float)(sxy / sxx);
    intercept[r] = (float)(my - sxy / sxx * mx);
}
''', **_ROWS,
)  # fmt: skip

MAXPOOL = Task(
    name="maxpool3d", title="Largest value of every 2 x 2 x 2 block", family="pooling", dims=("d", "h", "w"),
    inputs=(Buffer("x", ("2 * d", "2 * h", "2 * w")),), outputs=(Buffer("out", ("d", "h", "w")),),
    shown=({"d": 2, "h": 3, "w": 40}, {"d": 1, "h": 5, "w": 33}), bench={"d": 64, "h": 256, "w": 256},
    ranges={"d": (1, 3), "h": (1, 5), "w": (1, 70)},
    oracle=lambda x, d: {"out": exact(torch.nn.functional.max_pool3d(x["x"][None, None], 2)[0, 0])},
    library=lambda x, d: {"out": torch.nn.functional.max_pool3d(x["x"][None, None], 2)[0, 0]},
    flops="8 * d * h * w", tolerance=0,
    start='''# /// launch
# task = "maxpool3d"
# grid = ["cdiv(w, BLOCK)", "d * h"]
# [constants]
# BLOCK = 64
# [space]
# BLOCK = [32, 64, 128, 256]
# num_warps = [1, 2, 4]
# ///
@triton.jit
def maxpool3d(x, out, h, w, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    z = row // h
    y = row % h
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    for part in tl.static_range(8):
        line = (z * 2 + part // 4) * (h * 2) + y * 2 + part // 2 % 2
        top = tl.maximum(top, tl.load(x + line * (w * 2) + i * 2 + part % 2, mask=i < w, other=float("-inf")))
    tl.store(out + row * w + i, top, mask=i < w)
''',
    features=(f'''# /// launch
# task = "maxpool3d"
# grid = ["cdiv(d * h, ROWS)", "cdiv(w, BLOCK)"]
# [constants]
# BLOCK = 256
# ROWS = 2
# STREAM = 1
# [space]
# STREAM = [0, 1]
# BLOCK = [64, 128, 256]
# ROWS = [1, 2, 4, 8]
# num_warps = [2, 4, 8]
# ///
@triton.jit
def maxpool3d(x, out, d, h, w, BLOCK: tl.constexpr, ROWS: tl.constexpr, STREAM: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i = tl.program_id(1) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
    there = (row[:, None] < d * h) & (i[None, :] < 2 * w)
    line = (row // h * 2) * (h * 2) + row % h * 2
    at = x + line[:, None] * (w * 2) + i[None, :]
    a = tl.load(at, mask=there, other=float("-inf"){ONCE})
    a = tl.maximum(a, tl.load(at + w * 2, mask=there, other=float("-inf"){ONCE}))
    b = tl.load(at + h * 2 * (w * 2), mask=there, other=float("-inf"){ONCE})
    b = tl.maximum(b, tl.load(at + (h * 2 + 1) * (w * 2), mask=there, other=float("-inf"){ONCE}))
    top = tl.max(tl.reshape(tl.maximum(a, b), (ROWS, BLOCK, 2)), 2)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + row[:, None] * w + j[None, :], top, mask=(row[:, None] < d * h) & (j[None, :] < w))
''',),
    naive_cuda='''// /// launch
// grid = ["cdiv(d * h, 32)", "w"]
// block = [32]
// entry = "maxpool3d"
// args = ["x", "out", "d", "h", "w"]
// ///
extern "C" __global__ void maxpool3d(const float* x, float* out, long long d, long long h, long long w) {
    long long row = blockIdx.x * 32LL + threadIdx.x, j = blockIdx.y;
    if (row >= d * h) return;
    float top = -3.4e38f;
    for (int p = 0; p < 8; ++p) {
        long long line = (row / h * 2 + p / 4) * (h * 2) + row % h * 2 + p / 2 % 2;
        top = fmaxf(top, x[line * w * 2 + j * 2 + p % 2]);
    }
    out[row * w + j] = top;
}
''',
)  # fmt: skip

TASKS = (RESIDUAL_RMS, ARGMAX, SORT, OLS, MAXPOOL)
