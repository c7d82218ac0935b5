"""Tasks made of products: matrix times vector and matrix, attention.

Results must be good to float32. One TF32 product is not; three of operands split in two (`tf32x3`) are, and so are six
bfloat16 products of operands split in three. Both run on tensor cores.
"""

from __future__ import annotations

import torch

from .task import ONCE, Buffer, Dims, Task, Tensors, Truth


def _attention(x: Tensors, d: Dims) -> dict[str, Truth]:
    scores = x["q"] @ x["k"].t() * d["dim"] ** -0.5
    size = (x["q"].abs() @ x["k"].abs().t() * d["dim"] ** -0.5).amax(-1, keepdim=True)
    p = torch.softmax(scores, -1)
    return {"out": Truth(p @ x["v"], (p @ x["v"].abs()) * (1 + size))}


def _sdpa(x: Tensors, d: Dims) -> Tensors:
    q, k, v = (x[name][None, None] for name in "qkv")
    return {"out": torch.nn.functional.scaled_dot_product_attention(q, k, v)[0, 0]}


_TF32X3 = """        acc = tl.dot(left, right, acc, input_precision="tf32x3")"""
# bfloat16 keeps 8 bits: three of them hold a float32, and six of their nine products reach beyond its rounding. Tensor
# cores cut what does not fit into their sum instead of rounding it, so each block of K has a sum of its own.
_BF16X6 = """        l1 = left.to(tl.bfloat16)
        left -= l1.to(tl.float32)
        l2 = left.to(tl.bfloat16)
        l3 = (left - l2.to(tl.float32)).to(tl.bfloat16)
        r1 = right.to(tl.bfloat16)
        right -= r1.to(tl.float32)
        r2 = right.to(tl.bfloat16)
        r3 = (right - r2.to(tl.float32)).to(tl.bfloat16)
        part = tl.dot(l3, r1)
        part = tl.dot(l2, r2, part)
        part = tl.dot(l1, r3, part)
        part = tl.dot(l2, r1, part)
        part = tl.dot(l1, r2, part)
        acc += tl.dot(l1, r1, part)"""


_POINTERS = """        p = start + tl.arange(0, BLOCK_K)
        left = tl.load(a + i[:, None] * k + p[None, :], mask=(i[:, None] < m) & (p[None, :] < k), other=0.0)
        right = tl.load(b + p[:, None] * n + j[None, :], mask=(p[:, None] < k) & (j[None, :] < n), other=0.0)
"""
# Copies by TMA, which takes rows whose length is a multiple of 16 bytes only; what lies beyond the matrix is zero.
_DESCRIPTORS = """        left = tl.load_tensor_descriptor(left_of, [i0, start])
        right = tl.load_tensor_descriptor(right_of, [start, j0])
"""


def _tma_or_pointers(product: str) -> str:
    def deeper(text: str) -> str:
        return "".join(f"    {line}\n" for line in text.splitlines())

    return f"""    i0 = (first + pid % (GROUP * across) % rows) * BLOCK_M
    j0 = pid % (GROUP * across) // rows * BLOCK_N
    if (k % 4 == 0) & (n % 4 == 0):
        left_of = tl.make_tensor_descriptor(a, [m, k], [k, 1], [BLOCK_M, BLOCK_K])
        right_of = tl.make_tensor_descriptor(b, [k, n], [n, 1], [BLOCK_K, BLOCK_N])
        for start in range(0, k, BLOCK_K):
{deeper(_DESCRIPTORS + product)}    else:
        for start in range(0, k, BLOCK_K):
{deeper(_POINTERS + product)}"""


def _grouped_matmul(
    product: str, sides: tuple[int, ...], tile: tuple[int, int, int], *, stages: int, split: bool = False,
    tma: bool = False,
) -> str:  # fmt: skip
    """A Triton kernel whose programs go through GROUP rows of tiles together, so that operands stay in the cache.

    Args:
        split: SPLIT_K programs share the products of a tile and add theirs to the output by atomics, for shapes whose
            tiles are too few for all multiprocessors.
        tma: operands come through tensor descriptors, where their rows allow it.
    """
    loop = f"    for start in range(0, k, BLOCK_K):\n{_POINTERS}{product}"
    store = "tl.store("
    if split:
        loop = (
            "    share = tl.cdiv(tl.cdiv(k, SPLIT_K), BLOCK_K) * BLOCK_K\n    from_k = tl.program_id(1) * share\n"
            + loop.replace("range(0, k,", "range(from_k, min(from_k + share, k),")
        )
        store = "tl.atomic_add("
    if tma:
        loop = _tma_or_pointers(product).rstrip("\n")
    more = {
        "grid": ', "SPLIT_K"' if split else "", "constants": "# SPLIT_K = 2\n" if split else "",
        "fill": "# [fill]\n# out = 0.0\n" if split else "", "space": "# SPLIT_K = [1, 2, 4, 8]\n" if split else "",
        "parameter": ", SPLIT_K: tl.constexpr" if split else "",
    }  # fmt: skip
    return f'''# /// launch
# task = "matmul"
# grid = ["cdiv(m, BLOCK_M) * cdiv(n, BLOCK_N)"{more["grid"]}]
# num_warps = 8
# num_stages = {stages}
# [constants]
{more["constants"]}# BLOCK_M = {tile[0]}
# BLOCK_N = {tile[1]}
# BLOCK_K = {tile[2]}
# GROUP = 8
{more["fill"]}# [space]
{more["space"]}# BLOCK_M = {list(sides)}
# BLOCK_N = {list(sides)}
# BLOCK_K = [16, 32, 64]
# GROUP = [1, 4, 8]
# num_warps = [4, 8]
# num_stages = [2, 3, 4]
# ///
@triton.jit
def matmul(a, b, out, m, n, k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
           GROUP: tl.constexpr{more["parameter"]}):
    pid = tl.program_id(0)
    down = tl.cdiv(m, BLOCK_M)
    across = tl.cdiv(n, BLOCK_N)
    first = pid // (GROUP * across) * GROUP
    rows = min(down - first, GROUP)
    i = (first + pid % (GROUP * across) % rows).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    j = (pid % (GROUP * across) // rows).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
{loop}
    {store}out + i[:, None] * n + j[None, :], acc, mask=(i[:, None] < m) & (j[None, :] < n))
'''


# Attention in Triton, of `precision`: "ieee" on float32 units, "tf32x3" on tensor cores.
def _attention_kernel(precision: str, head: str) -> str:
    return f'''{head}@triton.jit
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
        s = tl.dot(query, tl.trans(key), input_precision="{precision}") * scale
        s = tl.where(j[None, :] < n, s, float("-inf"))
        top = tl.maximum(m_i, tl.max(s, 1))
        p = tl.exp(s - top[:, None])
        shrink = tl.exp(m_i - top)
        l_i = l_i * shrink + tl.sum(p, 1)
        acc = tl.dot(p, value, acc * shrink[:, None], input_precision="{precision}")
        m_i = top
    tl.store(out + i[:, None] * dim + c[None, :], acc / l_i[:, None], mask=inside)
'''


MATVEC = Task(
    name="matvec", title="Matrix times vector", family="matmul", dims=("m", "k"),
    inputs=(Buffer("a", ("m", "k")), Buffer("x", ("k",))), outputs=(Buffer("out", ("m",)),),
    shown=({"m": 6, "k": 130}, {"m": 3, "k": 64}), bench={"m": 8192, "k": 4096}, ranges={"m": (1, 9), "k": (1, 300)},
    oracle=lambda x, d: {"out": Truth(x["a"] @ x["x"], x["a"].abs() @ x["x"].abs())},
    library=lambda x, d: {"out": x["a"] @ x["x"]}, flops="2 * m * k", tolerance=32,
    start=f'''# /// launch
# task = "matvec"
# grid = ["m"]
# [constants]
# BLOCK = 64
# STREAM = 0
# [space]
# STREAM = [0, 1]
# BLOCK = [64, 128, 256, 512, 1024, 2048, 4096]
# num_warps = [1, 2, 4, 8]
# num_stages = [1, 2, 3, 4]
# ///
@triton.jit
def matvec(a, x, out, k, BLOCK: tl.constexpr, STREAM: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    acc = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, k, BLOCK):
        i = start + tl.arange(0, BLOCK)
        v = tl.load(a + row * k + i, mask=i < k, other=0.0{ONCE})
        acc += v * tl.load(x + i, mask=i < k, other=0.0)
    tl.store(out + row, tl.sum(acc, 0))
''',
    features=(f'''# /// launch
# task = "matvec"
# grid = ["cdiv(m, ROWS)"]
# [constants]
# ROWS = 4
# BLOCK = 1024
# STREAM = 1
# [space]
# STREAM = [0, 1]
# ROWS = [1, 2, 4, 8, 16]
# BLOCK = [256, 512, 1024, 2048]
# num_warps = [2, 4, 8]
# num_stages = [1, 2, 3, 4]
# ///
@triton.jit
def matvec(a, x, out, m, k, ROWS: tl.constexpr, BLOCK: tl.constexpr, STREAM: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    acc = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, k, BLOCK):
        i = start + tl.arange(0, BLOCK)
        there = (row[:, None] < m) & (i[None, :] < k)
        v = tl.load(a + row[:, None] * k + i[None, :], mask=there, other=0.0{ONCE})
        acc += v * tl.load(x + i, mask=i < k, other=0.0)
    tl.store(out + row, tl.sum(acc, 1), mask=row < m)
''', f'''# /// launch
# task = "matvec"
# grid = ["cdiv(m, ROWS)", "SPLIT_K"]
# [constants]
# ROWS = 4
# BLOCK = 512
# SPLIT_K = 2
# STREAM = 1
# [fill]
# out = 0.0
# [space]
# STREAM = [0, 1]
# ROWS = [1, 2, 4, 8, 16]
# BLOCK = [256, 512, 1024, 2048]
# SPLIT_K = [1, 2, 4, 8]
# num_warps = [2, 4, 8]
# num_stages = [1, 2, 3, 4]
# ///
@triton.jit
def matvec(a, x, out, m, k, ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLIT_K: tl.constexpr, STREAM: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    share = tl.cdiv(tl.cdiv(k, SPLIT_K), BLOCK) * BLOCK
    first = tl.program_id(1) * share
    acc = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(first, min(first + share, k), BLOCK):
        i = start + tl.arange(0, BLOCK)
        there = (row[:, None] < m) & (i[None, :] < k)
        v = tl.load(a + row[:, None] * k + i[None, :], mask=there, other=0.0{ONCE})
        acc += v * tl.load(x + i, mask=i < k, other=0.0)
    tl.atomic_add(out + row, tl.sum(acc, 1), mask=row < m)
''', '''// /// launch
// task = "matvec"
// grid = ["cdiv(m, ROWS)"]
// block = [32, "ROWS"]
// entry = "matvec"
// args = ["a", "x", "out", "m", "k"]
// [constants]
// ROWS = 4
// UNROLL = 8
// STREAM = 1
// [space]
// ROWS = [2, 4, 8, 16]
// UNROLL = [2, 4, 8, 16]
// STREAM = [0, 1]
// ///
extern "C" __global__ void matvec(const float* a, const float* x, float* out, long long m, long long k) {
    const long long row = (long long)blockIdx.x * ROWS + threadIdx.y;  // a warp takes a row
    if (row >= m) return;
    const float* line = a + row * k;
    const int lane = threadIdx.x, groups = k % 4 ? 0 : (int)(k / 4);  // rows of other lengths are not aligned
    float sum[4] = {0, 0, 0, 0};
    int i = lane;
    for (; i + (UNROLL - 1) * 32 < groups; i += UNROLL * 32) {
        float4 v[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const float4* from = (const float4*)line + i + u * 32;
            v[u] = STREAM ? __ldcs(from) : *from;
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const float4 w = ((const float4*)x)[i + u * 32];
            sum[0] += v[u].x * w.x, sum[1] += v[u].y * w.y, sum[2] += v[u].z * w.z, sum[3] += v[u].w * w.w;
        }
    }
    for (; i < groups; i += 32) {
        const float4 v = ((const float4*)line)[i], w = ((const float4*)x)[i];
        sum[0] += v.x * w.x, sum[1] += v.y * w.y, sum[2] += v.z * w.z, sum[3] += v.w * w.w;
    }
    for (long long j = groups * 4LL + lane; j < k; j += 32) sum[0] += line[j] * x[j];
    float all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
#pragma unroll
    for (int away = 16; away; away /= 2) all += __shfl_xor_sync(~0u, all, away);
    if (lane == 0) out[row] = all;
}
'''),
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
    features=(
        _grouped_matmul(_TF32X3, (64, 128, 256), (128, 128, 32), stages=3),
        _grouped_matmul(_BF16X6, (64, 128), (128, 64, 32), stages=3),
        _grouped_matmul(_BF16X6, (64, 128), (128, 64, 32), stages=3, split=True),
        _grouped_matmul(_BF16X6, (64, 128), (128, 64, 32), stages=3, tma=True),
    ),
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

ATTENTION = Task(
    name="attention", title="Attention of one head, without a mask", family="attention", dims=("m", "n", "dim"),
    inputs=(Buffer("q", ("m", "dim")), Buffer("k", ("n", "dim")), Buffer("v", ("n", "dim"))),
    outputs=(Buffer("out", ("m", "dim")),),
    shown=({"m": 20, "n": 33, "dim": 16}, {"m": 9, "n": 16, "dim": 8}),
    bench={"m": 4096, "n": 4096, "dim": 64}, ranges={"m": (1, 40), "n": (2, 40), "dim": (1, 20)},
    oracle=_attention, library=_sdpa, flops="4 * m * n * dim", tolerance=32, arithmetic=("tf32", 3),
    start=_attention_kernel("ieee", '''# /// launch
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
'''),
    features=(_attention_kernel("tf32x3", '''# /// launch
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
'''),),
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

TASKS = (MATVEC, MATMUL, ATTENTION)
