"""Tasks made of products: matrix times vector and matrix, convolutions, attention.

Results must be good to float32. One TF32 product is not; three of split operands (`tf32x3`) are, and run on tensor
cores.
"""

from __future__ import annotations

import torch

from .task import Buffer, Dims, Task, Tensors, Truth


def _conv(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.conv1d(x[None, None], w[None, None])[0, 0]


def _conv2(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.conv2d(x[None, None], w[None, None])[0, 0]


def _attention(x: Tensors, d: Dims) -> dict[str, Truth]:
    scores = x["q"] @ x["k"].t() * d["dim"] ** -0.5
    size = (x["q"].abs() @ x["k"].abs().t() * d["dim"] ** -0.5).amax(-1, keepdim=True)
    p = torch.softmax(scores, -1)
    return {"out": Truth(p @ x["v"], (p @ x["v"].abs()) * (1 + size))}


def _sdpa(x: Tensors, d: Dims) -> Tensors:
    q, k, v = (x[name][None, None] for name in "qkv")
    return {"out": torch.nn.functional.scaled_dot_product_attention(q, k, v)[0, 0]}


MATVEC = Task(
    name="matvec", title="Matrix times vector", family="matmul", dims=("m", "k"),
    inputs=(Buffer("a", ("m", "k")), Buffer("x", ("k",))), outputs=(Buffer("out", ("m",)),),
    shown=({"m": 6, "k": 130}, {"m": 3, "k": 64}), bench={"m": 8192, "k": 4096}, ranges={"m": (1, 9), "k": (1, 300)},
    oracle=lambda x, d: {"out": Truth(x["a"] @ x["x"], x["a"].abs() @ x["x"].abs())},
    library=lambda x, d: {"out": x["a"] @ x["x"]}, flops="2 * m * k", tolerance=32,
    start='''# /// launch
# task = "matvec"
# grid = ["m"]
# [constants]
# BLOCK = 64
# [space]
# BLOCK = [64, 128, 256, 512, 1024, 2048, 4096]
# num_warps = [1, 2, 4, 8]
# num_stages = [1, 2, 3, 4]
# ///
@triton.jit
def matvec(a, x, out, k, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    acc = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, k, BLOCK):
        i = start + tl.arange(0, BLOCK)
        acc += tl.load(a + row * k + i, mask=i < k, other=0.0) * tl.load(x + i, mask=i < k, other=0.0)
    tl.store(out + row, tl.sum(acc, 0))
''',
    features=('''# /// launch
# task = "matvec"
# grid = ["cdiv(m, ROWS)"]
# [constants]
# ROWS = 4
# BLOCK = 1024
# [space]
# ROWS = [1, 2, 4, 8, 16]
# BLOCK = [256, 512, 1024, 2048]
# num_warps = [2, 4, 8]
# num_stages = [1, 2, 3, 4]
# ///
@triton.jit
def matvec(a, x, out, m, k, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    acc = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, k, BLOCK):
        i = start + tl.arange(0, BLOCK)
        v = tl.load(x + i, mask=i < k, other=0.0)
        acc += tl.load(a + row[:, None] * k + i[None, :], mask=(row[:, None] < m) & (i[None, :] < k), other=0.0) * v
    tl.store(out + row, tl.sum(acc, 1), mask=row < m)
''',),
    naive_cuda='''// /// launch
// grid = ["cdiv(m, 32)"]
// block = [32]
// entry = "matvec"
// args = ["a", "x", "out", "m", "k"]
// ///
extern "C" __global__ void matvec(const float* a, const float* x, float* out, long long m, long long k) {
    long long r = blockIdx.x * 32LL + threadIdx.x;
    if (r >= m) return;
    float sum = 0;
    for (long long i = 0; i < k; ++i) sum += a[r * k + i] * x[i];
    out[r] = sum;
}
''',
)  # fmt: skip

MATMUL = Task(
    name="matmul", title="Matrix product in float32", family="matmul", dims=("m", "n", "k"),
    inputs=(Buffer("a", ("m", "k")), Buffer("b", ("k", "n"))), outputs=(Buffer("out", ("m", "n")),),
    shown=({"m": 33, "n": 20, "k": 40}, {"m": 16, "n": 48, "k": 17}),
    bench={"m": 2048, "n": 2048, "k": 2048}, ranges={"m": (1, 50), "n": (1, 50), "k": (1, 50)},
    oracle=lambda x, d: {"out": Truth(x["a"] @ x["b"], x["a"].abs() @ x["b"].abs())},
    library=lambda x, d: {"out": x["a"] @ x["b"]}, flops="2 * m * n * k", tolerance=32, arithmetic=("tf32", 3),
    start='''# /// launch
# task = "matmul"
# grid = ["cdiv(m, BLOCK_M)", "cdiv(n, BLOCK_N)"]
# [constants]
# BLOCK_M = 32
# BLOCK_N = 32
# BLOCK_K = 32
# [space]
# BLOCK_M = [16, 32, 64, 128]
# BLOCK_N = [16, 32, 64, 128]
# BLOCK_K = [16, 32, 64]
# num_warps = [2, 4, 8]
# num_stages = [1, 2, 3, 4]
# ///
@triton.jit
def matmul(a, b, out, m, n, k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, k, BLOCK_K):
        p = start + tl.arange(0, BLOCK_K)
        left = tl.load(a + i[:, None] * k + p[None, :], mask=(i[:, None] < m) & (p[None, :] < k), other=0.0)
        right = tl.load(b + p[:, None] * n + j[None, :], mask=(p[:, None] < k) & (j[None, :] < n), other=0.0)
        acc = tl.dot(left, right, acc, input_precision="ieee")
    tl.store(out + i[:, None] * n + j[None, :], acc, mask=(i[:, None] < m) & (j[None, :] < n))
''',
    features=('''# /// launch
# task = "matmul"
# grid = ["cdiv(m, BLOCK_M) * cdiv(n, BLOCK_N)"]
# num_warps = 8
# num_stages = 3
# [constants]
# BLOCK_M = 128
# BLOCK_N = 128
# BLOCK_K = 32
# GROUP = 8
# [space]
# BLOCK_M = [64, 128, 256]
# BLOCK_N = [64, 128, 256]
# BLOCK_K = [16, 32, 64]
# GROUP = [1, 4, 8]
# num_warps = [4, 8]
# num_stages = [2, 3, 4]
# ///
@triton.jit
def matmul(a, b, out, m, n, k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
           GROUP: tl.constexpr):
    pid = tl.program_id(0)
    down = tl.cdiv(m, BLOCK_M)
    across = tl.cdiv(n, BLOCK_N)
    first = pid // (GROUP * across) * GROUP
    rows = min(down - first, GROUP)
    i = (first + pid % (GROUP * across) % rows).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = (pid % (GROUP * across) // rows).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, k, BLOCK_K):
        p = start + tl.arange(0, BLOCK_K)
        left = tl.load(a + i[:, None] * k + p[None, :], mask=(i[:, None] < m) & (p[None, :] < k), other=0.0)
        right = tl.load(b + p[:, None] * n + j[None, :], mask=(p[:, None] < k) & (j[None, :] < n), other=0.0)
        acc = tl.dot(left, right, acc, input_precision="tf32x3")
    tl.store(out + i[:, None] * n + j[None, :], acc, mask=(i[:, None] < m) & (j[None, :] < n))
''',),
    naive_cuda='''// /// launch
// grid = ["cdiv(m, 32)", "n"]
// block = [32]
// entry = "matmul"
// args = ["a", "b", "out", "m", "n", "k"]
// ///
extern "C" __global__ void matmul(const float* a, const float* b, float* out, long long m, long long n, long long k) {
    long long i = blockIdx.x * 32LL + threadIdx.x, j = blockIdx.y;
    if (i >= m) return;
    float sum = 0;
    for (long long p = 0; p < k; ++p) sum += a[i * k + p] * b[p * n + j];
    out[i * n + j] = sum;
}
''',
)  # fmt: skip

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

ATTENTION = Task(
    name="attention", title="Attention of one head, without a mask", family="attention", dims=("m", "n", "dim"),
    inputs=(Buffer("q", ("m", "dim")), Buffer("k", ("n", "dim")), Buffer("v", ("n", "dim"))),
    outputs=(Buffer("out", ("m", "dim")),),
    shown=({"m": 20, "n": 33, "dim": 16}, {"m": 9, "n": 16, "dim": 8}),
    bench={"m": 4096, "n": 4096, "dim": 64}, ranges={"m": (1, 40), "n": (2, 40), "dim": (1, 20)},
    oracle=_attention, library=_sdpa, flops="4 * m * n * dim", tolerance=32, arithmetic=("tf32", 3),
    start='''# /// launch
# task = "attention"
# grid = ["cdiv(m, BLOCK_M)"]
# [constants]
# BLOCK_M = 16
# BLOCK_N = 16
# DIM = "max(16, next_power_of_2(dim))"
# [space]
# BLOCK_M = [16, 32, 64, 128]
# BLOCK_N = [16, 32, 64, 128]
# num_warps = [2, 4, 8]
# num_stages = [1, 2, 3]
# ///
@triton.jit
def attention(q, k, v, out, m, n, dim, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, DIM)
    scale = 1.0 / tl.sqrt(dim * 1.0)
    inside = (i[:, None] < m) & (c[None, :] < dim)
    query = tl.load(q + i[:, None] * dim + c[None, :], mask=inside, other=0.0)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, DIM), tl.float32)
    for start in range(0, n, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        there = (j[:, None] < n) & (c[None, :] < dim)
        key = tl.load(k + j[:, None] * dim + c[None, :], mask=there, other=0.0)
        value = tl.load(v + j[:, None] * dim + c[None, :], mask=there, other=0.0)
        s = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        s = tl.where(j[None, :] < n, s, float("-inf"))
        top = tl.maximum(m_i, tl.max(s, 1))
        p = tl.exp(s - top[:, None])
        shrink = tl.exp(m_i - top)
        l_i = l_i * shrink + tl.sum(p, 1)
        acc = tl.dot(p, value, acc * shrink[:, None], input_precision="ieee")
        m_i = top
    tl.store(out + i[:, None] * dim + c[None, :], acc / l_i[:, None], mask=inside)
''',
    features=('''# /// launch
# task = "attention"
# grid = ["cdiv(m, BLOCK_M)"]
# num_warps = 4
# num_stages = 2
# [constants]
# BLOCK_M = 64
# BLOCK_N = 64
# DIM = "max(16, next_power_of_2(dim))"
# [space]
# BLOCK_M = [32, 64, 128]
# BLOCK_N = [32, 64, 128]
# num_warps = [2, 4, 8]
# num_stages = [1, 2, 3]
# ///
@triton.jit
def attention(q, k, v, out, m, n, dim, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, DIM)
    scale = 1.0 / tl.sqrt(dim * 1.0)
    inside = (i[:, None] < m) & (c[None, :] < dim)
    query = tl.load(q + i[:, None] * dim + c[None, :], mask=inside, other=0.0)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, DIM), tl.float32)
    for start in range(0, n, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        there = (j[:, None] < n) & (c[None, :] < dim)
        key = tl.load(k + j[:, None] * dim + c[None, :], mask=there, other=0.0)
        value = tl.load(v + j[:, None] * dim + c[None, :], mask=there, other=0.0)
        s = tl.dot(query, tl.trans(key), input_precision="tf32x3") * scale
        s = tl.where(j[None, :] < n, s, float("-inf"))
        top = tl.maximum(m_i, tl.max(s, 1))
        p = tl.exp(s - top[:, None])
        shrink = tl.exp(m_i - top)
        l_i = l_i * shrink + tl.sum(p, 1)
        acc = tl.dot(p, value, acc * shrink[:, None], input_precision="tf32x3")
        m_i = top
    tl.store(out + i[:, None] * dim + c[None, :], acc / l_i[:, None], mask=inside)
''',),
    naive_cuda='''// /// launch
// grid = ["cdiv(m, 32)", "dim"]
// block = [32]
// entry = "attention"
// args = ["q", "k", "v", "out", "m", "n", "dim"]
// ///
extern "C" __global__ void attention(const float* q, const float* k, const float* v, float* out, long long m,
                                     long long n, long long dim) {
    long long i = blockIdx.x * 32LL + threadIdx.x, c = blockIdx.y;  // every output computes its own scores
    if (i >= m) return;
    float most = -3.4e38f, sum = 0, acc = 0;
    for (int pass = 0; pass < 2; ++pass)
        for (long long j = 0; j < n; ++j) {
            float s = 0;
            for (long long e = 0; e < dim; ++e) s += q[i * dim + e] * k[j * dim + e];
            s *= rsqrtf((float)dim);
            if (pass == 0) {
                most = fmaxf(most, s);
            } else {
                sum += expf(s - most);
                acc += expf(s - most) * v[j * dim + c];
            }
        }
    out[i * dim + c] = acc / sum;
}
''',
)  # fmt: skip

TASKS = (MATVEC, MATMUL, CONV1D, CONV2D, ATTENTION)
