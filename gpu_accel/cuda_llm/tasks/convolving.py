"""Convolutions, in one dimension and of an image."""

from __future__ import annotations

import torch

from .task import Buffer, Task, Truth


def _conv(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.conv1d(x[None, None], w[None, None])[0, 0]


def _conv2(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.conv2d(x[None, None], w[None, None])[0, 0]


CONV1D = Task(
    name="conv1d", title="One-dimensional convolution without padding", family="convolution", dims=("n", "taps"),
    inputs=(Buffer("x", ("n + taps - 1",)), Buffer("w", ("taps",))), outputs=(Buffer("out", ("n",)),),
    shown=({"n": 300, "taps": 5}, {"n": 129, "taps": 3}), bench={"n": 1 << 24, "taps": 9},
    ranges={"n": (1, 500), "taps": (2, 9)},
    oracle=lambda x, d: {"out": Truth(_conv(x["x"], x["w"]), _conv(x["x"].abs(), x["w"].abs()))},
    library=lambda x, d: {"out": _conv(x["x"], x["w"])}, flops="2 * n * taps", tolerance=16,
    start='''# /// launch
# task = "conv1d"
# grid = ["cdiv(n, BLOCK)"]
# [constants]
# BLOCK = 128
# [space]
# BLOCK = [64, 128, 256, 512, 1024, 2048]
# num_warps = [1, 2, 4, 8]
# ///
@triton.jit
def conv1d(x, w, out, n, taps, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for tap in range(0, taps):
        acc += tl.load(x + i + tap, mask=i < n, other=0.0) * tl.load(w + tap)
    tl.store(out + i, acc, mask=i < n)
''',
    features=('''// /// launch
// task = "conv1d"
// grid = ["cdiv(n, 4 * THREADS * UNROLL)"]
// block = ["THREADS"]
// entry = "conv1d"
// args = ["x", "w", "out", "n", "taps"]
// [constants]
// THREADS = 256
// UNROLL = 1
// [space]
// THREADS = [128, 256, 512]
// UNROLL = [1, 2, 4]
// ///
extern "C" __global__ void __launch_bounds__(THREADS) conv1d(const float* x, const float* w, float* out, long long n,
                                                             long long taps) {
    // Four neighbouring outputs a thread: a window of eight inputs serves four taps, then moves on by four.
    const long long length = n + taps - 1;
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        const long long i = ((blockIdx.x * (long long)UNROLL + u) * THREADS + threadIdx.x) * 4;
        if (i >= n) return;
        float v[8], acc[4] = {0, 0, 0, 0};
#pragma unroll
        for (int p = 0; p < 4; ++p) v[p + 4] = i + p < length ? x[i + p] : 0.0f;
        for (int t = 0; t < taps; t += 4) {
#pragma unroll
            for (int p = 0; p < 4; ++p) v[p] = v[p + 4];
            const long long next = i + t + 4;
            if (next + 3 < length) {
                const float4 more = *(const float4*)(x + next);
                v[4] = more.x, v[5] = more.y, v[6] = more.z, v[7] = more.w;
            } else {
#pragma unroll
                for (int p = 0; p < 4; ++p) v[p + 4] = next + p < length ? x[next + p] : 0.0f;
            }
#pragma unroll
            for (int p = 0; p < 4; ++p) {
                const float tap = t + p < taps ? w[t + p] : 0.0f;
#pragma unroll
                for (int q = 0; q < 4; ++q) acc[q] += tap * v[p + q];
            }
        }
        if (i + 3 < n) {
            *(float4*)(out + i) = make_float4(acc[0], acc[1], acc[2], acc[3]);
        } else {
            for (int q = 0; q < 4 && i + q < n; ++q) out[i + q] = acc[q];
        }
    }
}
''',),
    naive_cuda='''// /// launch
// grid = ["cdiv(n, 32)"]
// block = [32]
// entry = "conv1d"
// args = ["x", "w", "out", "n", "taps"]
// ///
extern "C" __global__ void conv1d(const float* x, const float* w, float* out, long long n, long long taps) {
    long long i = blockIdx.x * 32LL + threadIdx.x;
    if (i >= n) return;
    float sum = 0;
    for (long long t = 0; t < taps; ++t) sum += x[i + t] * w[t];
    out[i] = sum;
}
''',
)  # fmt: skip

CONV2D = Task(
    name="conv2d", title="Convolution of an image with 3 x 3 weights, without padding", family="convolution",
    dims=("h", "w"),
    inputs=(Buffer("x", ("h + 2", "w + 2")), Buffer("taps", (3, 3))), outputs=(Buffer("out", ("h", "w")),),
    shown=({"h": 7, "w": 60}, {"h": 3, "w": 33}), bench={"h": 4096, "w": 8192}, ranges={"h": (1, 9), "w": (1, 90)},
    oracle=lambda x, d: {"out": Truth(_conv2(x["x"], x["taps"]), _conv2(x["x"].abs(), x["taps"].abs()))},
    library=lambda x, d: {"out": _conv2(x["x"], x["taps"])}, flops="18 * h * w", tolerance=16,
    start='''# /// launch
# task = "conv2d"
# grid = ["cdiv(w, BLOCK)", "h"]
# [constants]
# BLOCK = 64
# [space]
# BLOCK = [32, 64, 128, 256, 512, 1024]
# num_warps = [1, 2, 4, 8]
# ///
@triton.jit
def conv2d(x, taps, out, w, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(9):
        at = (row + tap // 3) * (w + 2) + i + tap % 3
        acc += tl.load(x + at, mask=i < w, other=0.0) * tl.load(taps + tap)
    tl.store(out + row * w + i, acc, mask=i < w)
''',
    features=('''// /// launch
// task = "conv2d"
// grid = ["cdiv(w, 4 * THREADS)", "cdiv(h, ROWS)"]
// block = ["THREADS"]
// entry = "conv2d"
// args = ["x", "taps", "out", "h", "w"]
// [constants]
// THREADS = 128
// ROWS = 8
// [space]
// THREADS = [32, 64, 128, 256]
// ROWS = [2, 4, 8, 16, 32]
// ///
extern "C" __global__ void __launch_bounds__(THREADS) conv2d(const float* x, const float* taps, float* out, long long h,
                                                             long long w) {
    // A thread walks down ROWS lines of four columns; each line is read once and goes into three sums.
    const long long j = (blockIdx.x * (long long)THREADS + threadIdx.x) * 4;
    const long long top = blockIdx.y * (long long)ROWS;
    if (j >= w) return;
    float t[9], acc[3][4] = {};
#pragma unroll
    for (int p = 0; p < 9; ++p) t[p] = taps[p];
    const int last = (int)min((long long)ROWS, h - top) + 2;
#pragma unroll
    for (int line = 0; line < ROWS + 2; ++line) {
        if (line >= last) break;
        const float* from = x + (top + line) * (w + 2) + j;
        float v[6];
#pragma unroll
        for (int p = 0; p < 6; ++p) v[p] = j + p < w + 2 ? from[p] : 0.0f;
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            acc[0][p] += t[6] * v[p] + t[7] * v[p + 1] + t[8] * v[p + 2];
            acc[1][p] += t[3] * v[p] + t[4] * v[p + 1] + t[5] * v[p + 2];
            acc[2][p] += t[0] * v[p] + t[1] * v[p + 1] + t[2] * v[p + 2];
        }
        if (line >= 2) {
            float* to = out + (top + line - 2) * w + j;
            if (j + 3 < w && w % 4 == 0) {
                *(float4*)to = make_float4(acc[0][0], acc[0][1], acc[0][2], acc[0][3]);
            } else {
                for (int p = 0; p < 4 && j + p < w; ++p) to[p] = acc[0][p];
            }
        }
#pragma unroll
        for (int p = 0; p < 4; ++p) acc[0][p] = acc[1][p], acc[1][p] = acc[2][p], acc[2][p] = 0.0f;
    }
}
''',),
    naive_cuda='''// /// launch
// grid = ["cdiv(h, 32)", "w"]
// block = [32]
// entry = "conv2d"
// args = ["x", "taps", "out", "h", "w"]
// ///
extern "C" __global__ void conv2d(const float* x, const float* taps, float* out, long long h, long long w) {
    long long i = blockIdx.x * 32LL + threadIdx.x, j = blockIdx.y;
    if (i >= h) return;
    float sum = 0;
    for (int t = 0; t < 9; ++t) sum += x[(i + t / 3) * (w + 2) + j + t % 3] * taps[t];
    out[i * w + j] = sum;
}
''',
)  # fmt: skip

TASKS = (CONV1D, CONV2D)
