"""Tasks that move values and compute little: copy, reverse, transpose, bias and GELU, histogram."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .task import Buffer, Dims, Task, Tensors, Truth


def exact(value: Tensor) -> Truth:
    return Truth(value, value.abs())


def _gelu(x: Tensors, dims: Dims) -> dict[str, Truth]:
    z = x["x"] + x["bias"]
    magnitude = x["x"].abs() + x["bias"].abs()
    return {"out": Truth(0.5 * z * (1 + torch.erf(z / math.sqrt(2))), magnitude)}


def _histogram_library(x: Tensors, d: Dims) -> Tensors:
    """`histc` takes integers on a GPU only; it does not look for the largest value first, as `bincount` does."""
    if x["x"].is_cuda:
        return {"out": torch.histc(x["x"], d["bins"], 0, d["bins"])}
    return {"out": torch.bincount(x["x"], minlength=d["bins"]).to(torch.int32)}


# Tiles copied by TMA on their way in, or both ways; it takes rows whose length is a multiple of 16 bytes only.
_COPY_TMA = '''# /// launch
# task = "matrix_copy"
# grid = ["cdiv(cols, BLOCK_N)", "cdiv(rows, BLOCK_M)"]
# [constants]
# BLOCK_M = 8
# BLOCK_N = 256
# [space]
# BLOCK_M = [1, 4, 8, 16, 32]
# BLOCK_N = [64, 128, 256, 512]
# num_warps = [1, 2, 4, 8]
# ///
@triton.jit
def matrix_copy(x, out, rows, cols, gap, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    i0 = tl.program_id(1) * BLOCK_M
    j0 = tl.program_id(0) * BLOCK_N
    if (cols % 4 == 0) & (gap % 4 == 0):
        source = tl.make_tensor_descriptor(x, [rows, cols], [cols + gap, 1], [BLOCK_M, BLOCK_N])
        target = tl.make_tensor_descriptor(out, [rows, cols], [cols, 1], [BLOCK_M, BLOCK_N])
        tl.store_tensor_descriptor(target, [i0, j0], tl.load_tensor_descriptor(source, [i0, j0]))
    else:
        i = i0.to(tl.int64) + tl.arange(0, BLOCK_M)[:, None]
        j = j0 + tl.arange(0, BLOCK_N)[None, :]
        there = (i < rows) & (j < cols)
        tl.store(out + i * cols + j, tl.load(x + i * (cols + gap) + j, mask=there), mask=there)
'''
_TRANSPOSE_TMA = '''# /// launch
# task = "transpose"
# grid = ["cdiv(rows, BLOCK_M)", "cdiv(cols, BLOCK_N)"]
# [constants]
# BLOCK_M = 64
# BLOCK_N = 64
# [space]
# BLOCK_M = [16, 32, 64, 128]
# BLOCK_N = [16, 32, 64, 128]
# num_warps = [1, 2, 4, 8]
# ///
@triton.jit
def transpose(x, out, rows, cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    i0 = tl.program_id(0) * BLOCK_M
    j0 = tl.program_id(1) * BLOCK_N
    if (rows % 4 == 0) & (cols % 4 == 0):
        source = tl.make_tensor_descriptor(x, [rows, cols], [cols, 1], [BLOCK_M, BLOCK_N])
        target = tl.make_tensor_descriptor(out, [cols, rows], [rows, 1], [BLOCK_N, BLOCK_M])
        tl.store_tensor_descriptor(target, [j0, i0], tl.trans(tl.load_tensor_descriptor(source, [i0, j0])))
    else:
        i = i0.to(tl.int64) + tl.arange(0, BLOCK_M)
        j = j0.to(tl.int64) + tl.arange(0, BLOCK_N)
        tile = tl.load(x + i[:, None] * cols + j[None, :], mask=(i[:, None] < rows) & (j[None, :] < cols))
        tl.store(out + j[:, None] * rows + i[None, :], tl.trans(tile), mask=(j[:, None] < cols) & (i[None, :] < rows))
'''

MATRIX_COPY = Task(
    name="matrix_copy", title="Copy a matrix whose rows lie `pitch` apart", family="copy",
    dims=("rows", "cols", "gap"),
    inputs=(Buffer("x", ("rows", "cols + gap")),), outputs=(Buffer("out", ("rows", "cols")),),
    shown=({"rows": 5, "cols": 130, "gap": 6}, {"rows": 3, "cols": 64, "gap": 4}),
    bench={"rows": 8192, "cols": 4096, "gap": 32}, ranges={"rows": (1, 7), "cols": (1, 300), "gap": (1, 9)},
    oracle=lambda x, d: {"out": exact(x["x"][:, : d["cols"]])},
    library=lambda x, d: {"out": x["x"][:, : d["cols"]].contiguous()},
    flops="0", tolerance=0, features=(_COPY_TMA,),
    start='''# /// launch
# task = "matrix_copy"
# grid = ["cdiv(cols, BLOCK)", "rows"]
# [constants]
# BLOCK = 128
# [space]
# BLOCK = [64, 128, 256, 512, 1024, 2048, 4096]
# num_warps = [1, 2, 4, 8]
# ///
@triton.jit
def matrix_copy(x, out, cols, gap, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + row * cols + i, tl.load(x + row * (cols + gap) + i, mask=i < cols), mask=i < cols)
''',
    naive_cuda='''// /// launch
// grid = ["rows"]
// block = [1]
// entry = "matrix_copy"
// args = ["x", "out", "cols", "gap"]
// ///
extern "C" __global__ void matrix_copy(const float* x, float* out, long long cols, long long gap) {
    long long row = blockIdx.x;  // one thread walks a row: nothing coalesces
    for (long long i = 0; i < cols; ++i) out[row * cols + i] = x[row * (cols + gap) + i];
}
''',
)  # fmt: skip

REVERSE = Task(
    name="reverse", title="Reverse an array", family="copy", dims=("n",),
    inputs=(Buffer("x", ("n",)),), outputs=(Buffer("out", ("n",)),),
    shown=({"n": 1000}, {"n": 257}), bench={"n": 1 << 25}, ranges={"n": (1, 1500)},
    oracle=lambda x, d: {"out": exact(x["x"].flip(0))},
    library=lambda x, d: {"out": x["x"].flip(0)},
    flops="0", tolerance=0,
    start='''# /// launch
# task = "reverse"
# grid = ["cdiv(n, BLOCK)"]
# [constants]
# BLOCK = 256
# [space]
# BLOCK = [128, 256, 512, 1024, 2048, 4096]
# num_warps = [1, 2, 4, 8]
# ///
@triton.jit
def reverse(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + (n - 1 - i), mask=i < n), mask=i < n)
''',
    features=('''// /// launch
// task = "reverse"
// grid = ["cdiv(cdiv(n, 4), THREADS * UNROLL)"]
// block = ["THREADS"]
// entry = "reverse"
// args = ["x", "out", "n"]
// [constants]
// THREADS = 256
// UNROLL = 2
// [space]
// THREADS = [128, 256, 512]
// UNROLL = [1, 2, 4]
// ///
extern "C" __global__ void __launch_bounds__(THREADS) reverse(const float* x, float* out, long long n) {
    const long long groups = n / 4, cut = n % 4;
    long long i = (long long)blockIdx.x * THREADS * UNROLL + threadIdx.x;
#pragma unroll
    for (int u = 0; u < UNROLL; ++u, i += THREADS) {
        if (i < groups) {  // four outputs from the mirrored four inputs, which are aligned only if n is a multiple of 4
            const float* from = x + n - 4 * i - 4;
            float4 v;
            if (cut == 0) {
                v = *(const float4*)from;
            } else {
                v = make_float4(from[0], from[1], from[2], from[3]);
            }
            ((float4*)out)[i] = make_float4(v.w, v.z, v.y, v.x);
        }
    }
    if (blockIdx.x == 0 && threadIdx.x < cut) out[n - 1 - threadIdx.x] = x[threadIdx.x];
}
''',),
    naive_cuda='''// /// launch
// grid = ["cdiv(n, 32)"]
// block = [32]
// entry = "reverse"
// args = ["x", "out", "n"]
// ///
extern "C" __global__ void reverse(const float* x, float* out, long long n) {
    long long i = blockIdx.x * 32LL + threadIdx.x;
    if (i < n) out[i] = x[n - 1 - i];
}
''',
)  # fmt: skip

TRANSPOSE = Task(
    name="transpose", title="Transpose a matrix", family="transpose", dims=("rows", "cols"),
    inputs=(Buffer("x", ("rows", "cols")),), outputs=(Buffer("out", ("cols", "rows")),),
    shown=({"rows": 40, "cols": 33}, {"rows": 12, "cols": 64}),
    bench={"rows": 4096, "cols": 8192}, ranges={"rows": (1, 70), "cols": (1, 70)},
    oracle=lambda x, d: {"out": exact(x["x"].t())},
    library=lambda x, d: {"out": x["x"].t().contiguous()},
    flops="0", tolerance=0,
    start='''# /// launch
# task = "transpose"
# grid = ["cdiv(rows, BLOCK_M)", "cdiv(cols, BLOCK_N)"]
# [constants]
# BLOCK_M = 32
# BLOCK_N = 32
# [space]
# BLOCK_M = [16, 32, 64, 128]
# BLOCK_N = [16, 32, 64, 128]
# num_warps = [1, 2, 4, 8]
# ///
@triton.jit
def transpose(x, out, rows, cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    tile = tl.load(x + i[:, None] * cols + j[None, :], mask=(i[:, None] < rows) & (j[None, :] < cols))
    tl.store(out + j[:, None] * rows + i[None, :], tl.trans(tile), mask=(j[:, None] < cols) & (i[None, :] < rows))
''',
    features=('''// /// launch
// task = "transpose"
// grid = ["cdiv(cols, 32)", "cdiv(rows, 32 * TILES)"]
// block = [32, "LINES"]
// entry = "transpose"
// args = ["x", "out", "rows", "cols"]
// [constants]
// LINES = 8
// TILES = 1
// PAD = 1
// [space]
// LINES = [4, 8, 16, 32]
// TILES = [1, 2, 4]
// PAD = [0, 1]
// ///
extern "C" __global__ void transpose(const float* x, float* out, long long rows, long long cols) {
    __shared__ float tile[32][32 + PAD];  // padded, so that a column lies in 32 banks
    const long long j = blockIdx.x * 32LL;
    for (int t = 0; t < TILES; ++t) {
        const long long i = (blockIdx.y * (long long)TILES + t) * 32;
        if (t) __syncthreads();
#pragma unroll
        for (int line = threadIdx.y; line < 32; line += LINES)
            if (i + line < rows && j + threadIdx.x < cols)
                tile[line][threadIdx.x] = x[(i + line) * cols + j + threadIdx.x];
        __syncthreads();
#pragma unroll
        for (int line = threadIdx.y; line < 32; line += LINES)
            if (j + line < cols && i + threadIdx.x < rows)
                out[(j + line) * rows + i + threadIdx.x] = tile[threadIdx.x][line];
    }
}
''', _TRANSPOSE_TMA),
    naive_cuda='''// /// launch
// grid = ["cdiv(rows, 32)", "cols"]
// block = [32]
// entry = "transpose"
// args = ["x", "out", "rows", "cols"]
// ///
extern "C" __global__ void transpose(const float* x, float* out, long long rows, long long cols) {
    long long i = blockIdx.x * 32LL + threadIdx.x, j = blockIdx.y;  // loads lie a row apart
    if (i < rows) out[j * rows + i] = x[i * cols + j];
}
''',
)  # fmt: skip

BIAS_GELU = Task(
    name="bias_gelu", title="Add a bias and apply GELU (erf)", family="elementwise", dims=("rows", "cols"),
    inputs=(Buffer("x", ("rows", "cols")), Buffer("bias", ("cols",))), outputs=(Buffer("out", ("rows", "cols")),),
    shown=({"rows": 4, "cols": 100}, {"rows": 2, "cols": 257}),
    bench={"rows": 8192, "cols": 4096}, ranges={"rows": (1, 6), "cols": (1, 300)},
    oracle=_gelu,
    library=lambda x, d: {"out": torch.nn.functional.gelu(x["x"] + x["bias"])},
    flops="rows * cols * 8", tolerance=16,
    start='''# /// launch
# task = "bias_gelu"
# grid = ["cdiv(cols, BLOCK)", "rows"]
# [constants]
# BLOCK = 128
# [space]
# BLOCK = [64, 128, 256, 512, 1024, 2048]
# num_warps = [1, 2, 4, 8]
# ///
@triton.jit
def bias_gelu(x, bias, out, cols, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(x + row * cols + i, mask=i < cols) + tl.load(bias + i, mask=i < cols)
    tl.store(out + row * cols + i, 0.5 * z * (1 + tl.erf(z * 0.7071067811865476)), mask=i < cols)
''',
    naive_cuda='''// /// launch
// grid = ["cdiv(rows, 32)", "cols"]
// block = [32]
// entry = "bias_gelu"
// args = ["x", "bias", "out", "rows", "cols"]
// ///
extern "C" __global__ void bias_gelu(const float* x, const float* bias, float* out, long long rows, long long cols) {
    long long i = blockIdx.x * 32LL + threadIdx.x, j = blockIdx.y;
    if (i >= rows) return;
    float z = x[i * cols + j] + bias[j];
    out[i * cols + j] = 0.5f * z * (1.0f + erff(z * 0.70710678f));
}
''',
)  # fmt: skip

HISTOGRAM = Task(
    name="histogram", title="Count how often each value occurs", family="histogram", dims=("n", "bins"),
    inputs=(Buffer("x", ("n",), "int32", "index", "bins"),), outputs=(Buffer("out", ("bins",), "int32"),),
    shown=({"n": 900, "bins": 16}, {"n": 300, "bins": 7}),
    bench={"n": 1 << 25, "bins": 256}, ranges={"n": (1, 1200), "bins": (1, 40)},
    oracle=lambda x, d: {"out": exact(torch.bincount(x["x"], minlength=d["bins"]).double())},
    library=_histogram_library,
    flops="0", tolerance=0,
    start='''# /// launch
# task = "histogram"
# grid = ["cdiv(n, BLOCK)"]
# [constants]
# BLOCK = 256
# [fill]
# out = 0
# [space]
# BLOCK = [128, 256, 512, 1024, 2048]
# num_warps = [1, 2, 4, 8]
# ///
@triton.jit
def histogram(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n, other=0)
    tl.atomic_add(out + value, 1, mask=i < n)
''',
    features=('''// /// launch
// task = "histogram"
// grid = ["min(BLOCKS, cdiv(n, THREADS))"]
// block = ["THREADS"]
// shared = "4 * COPIES * (bins + 1)"
// entry = "histogram"
// args = ["x", "out", "n", "bins"]
// [constants]
// THREADS = 512
// BLOCKS = 1056
// COPIES = 8
// STREAM = 1
// [fill]
// out = 0
// [space]
// STREAM = [0, 1]
// THREADS = [128, 256, 512]
// BLOCKS = [264, 528, 1056, 2112]
// COPIES = [1, 2, 4, 8, 16]
// ///
extern "C" __global__ void __launch_bounds__(THREADS) histogram(const int* x, int* out, long long n, long long bins) {
    extern __shared__ int kept[];  // COPIES tables, so that threads of a warp seldom meet
    const int width = (int)bins + 1, mine = threadIdx.x % COPIES * width;
    for (int i = threadIdx.x; i < COPIES * width; i += THREADS) kept[i] = 0;
    __syncthreads();
    const long long groups = n / 4, step = (long long)gridDim.x * THREADS;
    const int4* x4 = (const int4*)x;
    for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; i < groups; i += step) {
        const int4 v = STREAM ? __ldcs(x4 + i) : x4[i];
        atomicAdd(kept + mine + v.x, 1);
        atomicAdd(kept + mine + v.y, 1);
        atomicAdd(kept + mine + v.z, 1);
        atomicAdd(kept + mine + v.w, 1);
    }
    if (blockIdx.x == 0 && threadIdx.x < n % 4) atomicAdd(kept + mine + x[groups * 4 + threadIdx.x], 1);
    __syncthreads();
    for (int b = threadIdx.x; b < bins; b += THREADS) {
        int sum = 0;
        for (int c = 0; c < COPIES; ++c) sum += kept[c * width + b];
        if (sum) atomicAdd(out + b, sum);
    }
}
''', '''# /// launch
# task = "histogram"
# grid = ["min(PROGRAMS, cdiv(n, BLOCK))"]
# [constants]
# BLOCK = 2048
# PROGRAMS = 528
# BINS = "next_power_of_2(bins)"
# [fill]
# out = 0
# [space]
# BLOCK = [1024, 2048, 4096]
# PROGRAMS = [264, 528, 1056]
# num_warps = [4, 8]
# ///
@triton.jit
def histogram(x, out, n, bins, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr, BINS: tl.constexpr):
    counts = tl.zeros((BINS,), tl.int32)
    b = tl.arange(0, BINS)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, PROGRAMS * BLOCK):
        i = start + tl.arange(0, BLOCK)
        counts += tl.histogram(tl.load(x + i, mask=i < n, other=0), BINS)
        counts -= tl.where(b == 0, tl.maximum(start + BLOCK - n, 0).to(tl.int32), 0)
    tl.atomic_add(out + b, counts, mask=b < bins)
'''),
    naive_cuda='''// /// launch
// grid = ["cdiv(n, 32)"]
// block = [32]
// entry = "histogram"
// args = ["x", "out", "n"]
// [fill]
// out = 0
// ///
extern "C" __global__ void histogram(const int* x, int* out, long long n) {
    long long i = blockIdx.x * 32LL + threadIdx.x;
    if (i < n) atomicAdd(out + x[i], 1);
}
''',
)  # fmt: skip

TASKS = (MATRIX_COPY, REVERSE, TRANSPOSE, BIAS_GELU, HISTOGRAM)
