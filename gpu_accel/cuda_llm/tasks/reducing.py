"""Tasks that reduce: sums, dot products, means, scans, and rows that are normalised."""

from __future__ import annotations

import math
from typing import Any

import torch

from .task import ONCE, Buffer, Dims, Task, Tensors, Truth

EPS = 1e-5


def sum_of(terms: torch.Tensor, magnitude: torch.Tensor | None = None) -> Truth:
    """The sum of all terms; the scale is the sum of their magnitudes."""
    magnitude = terms.abs() if magnitude is None else magnitude
    return Truth(terms.sum().reshape(1), magnitude.sum().reshape(1))


def _mse(x: Tensors, d: Dims) -> dict[str, Truth]:
    return {"out": sum_of((x["x"] - x["y"]) ** 2 / d["n"], (x["x"].abs() + x["y"].abs()) ** 2 / d["n"])}


def _softmax(x: Tensors, d: Dims) -> dict[str, Truth]:
    value = torch.softmax(x["x"], -1)
    away = (x["x"].amax(-1, keepdim=True) - x["x"]).abs() + x["x"].abs()
    return {"out": Truth(value, value * (1 + away))}


def _layernorm(x: Tensors, d: Dims) -> dict[str, Truth]:
    mean = x["x"].mean(-1, keepdim=True)
    rstd = torch.rsqrt(x["x"].var(-1, unbiased=False, keepdim=True) + EPS)
    value = (x["x"] - mean) * rstd * x["weight"] + x["bias"]
    size = x["x"].abs() + x["x"].abs().mean(-1, keepdim=True)
    return {"out": Truth(value, size * rstd * x["weight"].abs() * (1 + (x["x"] - mean).abs() * rstd) + x["bias"].abs())}


def _cross_entropy(x: Tensors, d: Dims) -> dict[str, Truth]:
    chosen = x["x"].gather(1, x["target"][:, None])[:, 0]
    value = torch.logsumexp(x["x"], -1) - chosen
    return {"out": Truth(value, 1 + 2 * x["x"].abs().amax(-1) + math.log(d["cols"]))}


def _layernorm_library(x: Tensors, d: Dims) -> Tensors:
    return {"out": torch.nn.functional.layer_norm(x["x"], (d["cols"],), x["weight"], x["bias"], EPS)}


def _flat(name: str, arguments: str, load: str, block: int = 256) -> str:
    """A Triton kernel that sums a value of each element over the whole array, with an atomic for each block.

    Where all values are positive the blocks must be large: float32 loses too much in a sum of 100,000 of them.
    """
    return f'''# /// launch
# task = "{name}"
# grid = ["cdiv(n, BLOCK)"]
# [constants]
# BLOCK = {block}
# STREAM = 0
# [fill]
# out = 0.0
# [space]
# BLOCK = [128, 256, 512, 1024, 2048, 4096, 8192]
# STREAM = [0, 1]
# num_warps = [1, 2, 4, 8]
# ///
@triton.jit
def {name}({arguments}, out, n, BLOCK: tl.constexpr, STREAM: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
{load}
    tl.atomic_add(out, tl.sum(value, 0))
'''


def _flat_loop(name: str, arguments: str, load: str, scale: str = "") -> str:
    """The same with a fixed number of programs, each of which sums many blocks before its atomic and scales once."""
    return f'''# /// launch
# task = "{name}"
# grid = ["min(PROGRAMS, cdiv(n, BLOCK))"]
# num_warps = 8
# num_stages = 3
# [constants]
# BLOCK = 4096
# PROGRAMS = 528
# STREAM = 1
# [fill]
# out = 0.0
# [space]
# BLOCK = [1024, 2048, 4096, 8192]
# STREAM = [0, 1]
# PROGRAMS = [132, 264, 528, 1056, 2112]
# num_warps = [4, 8, 16]
# num_stages = [1, 2, 3, 4]
# ///
@triton.jit
def {name}({arguments}, out, n, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr, STREAM: tl.constexpr):
    acc = tl.zeros((BLOCK,), tl.float32)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, PROGRAMS * BLOCK):
        i = start + tl.arange(0, BLOCK)
    {load.replace(chr(10), chr(10) + "    ")}
        acc += value
    tl.atomic_add(out, tl.sum(acc, 0){scale})
'''


def _flat_passes(name: str, arguments: str, load: str) -> str:
    """The same with a second kernel in place of the atomics: the sum comes in one order, with equal bits each time."""
    return f'''# /// launch
# task = "{name}"
# grid = ["min(PROGRAMS, cdiv(n, BLOCK))"]
# num_warps = 8
# num_stages = 3
# [constants]
# BLOCK = 4096
# PROGRAMS = 528
# ALL = "next_power_of_2(PROGRAMS)"
# STREAM = 1
# [space]
# BLOCK = [1024, 2048, 4096, 8192]
# STREAM = [0, 1]
# PROGRAMS = [132, 264, 528, 1056]
# num_warps = [4, 8, 16]
# num_stages = [1, 2, 3, 4]
# [workspace.parts]
# shape = ["PROGRAMS"]
# [[then]]
# entry = "finish"
# grid = [1]
# ///
@triton.jit
def {name}({arguments}, parts, n, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr, STREAM: tl.constexpr):
    acc = tl.zeros((BLOCK,), tl.float32)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, PROGRAMS * BLOCK):
        i = start + tl.arange(0, BLOCK)
    {load.replace(chr(10), chr(10) + "    ")}
        acc += value
    tl.store(parts + tl.program_id(0), tl.sum(acc, 0))


@triton.jit
def finish(parts, out, n, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr, ALL: tl.constexpr):
    i = tl.arange(0, ALL)
    used = (i < PROGRAMS) & (i < tl.cdiv(n, BLOCK))
    tl.store(out, tl.sum(tl.load(parts + i, mask=used, other=0.0), 0))
'''


def _flat_shuffle(name: str, inputs: tuple[str, ...], value: str, scale: str = "") -> str:
    """CUDA C++: vector loads, UNROLL independent sums a thread, shuffles within a warp, a scaled atomic a block."""
    named = "".join(f"const float* {one}, " for one in inputs)
    loads = "\n".join(f"            const float4 {one}_ = ONCE((const float4*){one} + i + u * step);" for one in inputs)
    lanes = "\n".join(
        f"            {{ {' '.join(f'const float {one}v = {one}_.{lane};' for one in inputs)} sum[u] += {value}; }}"
        for lane in "xyzw"
    )
    tail = " ".join(f"const float {one}v = {one}[groups * 4 + threadIdx.x];" for one in inputs)
    return f'''// /// launch
// task = "{name}"
// grid = ["min(BLOCKS, cdiv(n, THREADS))"]
// block = ["THREADS"]
// entry = "{name}"
// args = [{", ".join(f'"{one}"' for one in (*inputs, "out", "n"))}]
// [constants]
// THREADS = 512
// BLOCKS = 264
// UNROLL = 4
// STREAM = 1
// [fill]
// out = 0.0
// [space]
// THREADS = [256, 512, 1024]
// BLOCKS = [132, 264, 528, 1056]
// UNROLL = [1, 2, 4, 8]
// STREAM = [0, 1]
// ///
#define ONCE(p) (STREAM ? __ldcs(p) : *(p))
extern "C" __global__ void __launch_bounds__(THREADS) {name}({named}float* out, long long n) {{
    __shared__ float warps[THREADS / 32];
    const long long groups = n / 4, step = (long long)gridDim.x * THREADS;
    float sum[UNROLL] = {{}};
    long long i = (long long)blockIdx.x * THREADS + threadIdx.x;
    for (; i + (UNROLL - 1) * step < groups; i += UNROLL * step) {{
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {{
{loads}
{lanes}
        }}
    }}
    for (; i < groups; i += step) {{
        const int u = 0;
        {{
{loads}
{lanes}
        }}
    }}
    if (blockIdx.x == 0 && threadIdx.x < n % 4) {{
        const int u = 0;
        {tail}
        sum[u] += {value};
    }}
#pragma unroll
    for (int u = 1; u < UNROLL; ++u) sum[0] += sum[u];
#pragma unroll
    for (int away = 16; away; away /= 2) sum[0] += __shfl_xor_sync(~0u, sum[0], away);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum[0];
    __syncthreads();
    if (threadIdx.x == 0) {{
        float all = 0;
        for (int w = 0; w < THREADS / 32; ++w) all += warps[w];
        atomicAdd(out, all{scale});
    }}
}}
'''


def _flat_cuda(name: str, inputs: tuple[str, ...], value: str) -> str:
    """One thread an element, every one with its own atomic."""
    named = "".join(f"const float* {one}, " for one in inputs)
    return f'''// /// launch
// grid = ["cdiv(n, 32)"]
// block = [32]
// entry = "{name}"
// args = [{", ".join(f'"{one}"' for one in (*inputs, "out", "n"))}]
// [fill]
// out = 0.0
// ///
extern "C" __global__ void {name}({named}float* out, long long n) {{
    long long i = blockIdx.x * 32LL + threadIdx.x;
    if (i < n) atomicAdd(out, {value});
}}
'''


def _chunk_cuda(name: str, inputs: tuple[str, ...], value: str) -> str:
    """One thread for 8192 neighbouring elements, and one atomic for each thread: nothing coalesces."""
    named = "".join(f"const float* {one}, " for one in inputs)
    return f'''// /// launch
// grid = ["cdiv(n, 32 * 8192)"]
// block = [32]
// entry = "{name}"
// args = [{", ".join(f'"{one}"' for one in (*inputs, "out", "n"))}]
// [fill]
// out = 0.0
// ///
extern "C" __global__ void {name}({named}float* out, long long n) {{
    long long first = (blockIdx.x * 32LL + threadIdx.x) * 8192;
    float sum = 0;
    for (long long i = first; i < n && i < first + 8192; ++i) sum += {value};
    if (first < n) atomicAdd(out, sum);
}}
'''


def _rows_cuda(name: str, inputs: tuple[str, ...], body: str) -> str:
    """One thread a row."""
    named = "".join(f"const {'int' if one == 'target' else 'float'}* {one}, " for one in inputs)
    return f'''// /// launch
// grid = ["cdiv(rows, 32)"]
// block = [32]
// entry = "{name}"
// args = [{", ".join(f'"{one}"' for one in (*inputs, "out", "rows", "cols"))}]
// ///
extern "C" __global__ void {name}({named}float* out, long long rows, long long cols) {{
    long long r = blockIdx.x * 32LL + threadIdx.x;
    if (r >= rows) return;
    x += r * cols;
{body}
}}
'''


def _rows(name: str, arguments: str, body: str, other: str = "") -> str:
    """A Triton kernel with a program for each row."""
    return f'''# /// launch
# task = "{name}"
# grid = ["rows"]
# [constants]
# BLOCK = "next_power_of_2(cols)"
# STREAM = 0
# [space]
# STREAM = [0, 1]
# num_warps = [1, 2, 4, 8, 16]
# ///
@triton.jit
def {name}({arguments}, out, cols, BLOCK: tl.constexpr, STREAM: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    v = tl.load(x + row * cols + i, mask=i < cols, other={other or "0.0"}{ONCE})
{body}
'''


_N: dict[str, Any] = {"shown": ({"n": 1000}, {"n": 333}), "bench": {"n": 1 << 25}, "ranges": {"n": (1, 1500)}}
_ROWS: dict[str, Any] = {
    "dims": ("rows", "cols"),
    "shown": ({"rows": 4, "cols": 100}, {"rows": 3, "cols": 257}),
    "bench": {"rows": 8192, "cols": 4096},
    "ranges": {"rows": (1, 6), "cols": (2, 300)},
}
_X, _Y, _ONE = Buffer("x", ("n",)), Buffer("y", ("n",)), (Buffer("out", (1,)),)
_MATRIX, _SAME = Buffer("x", ("rows", "cols")), (Buffer("out", ("rows", "cols")),)

_SUM = f"    value = tl.load(x + i, mask=i < n, other=0.0{ONCE})"
_DOT = f"    value = tl.load(x + i, mask=i < n, other=0.0{ONCE}) * tl.load(y + i, mask=i < n, other=0.0{ONCE})"
_MSE = (
    f"    away = tl.load(x + i, mask=i < n, other=0.0{ONCE}) - tl.load(y + i, mask=i < n, other=0.0{ONCE})\n"
    "    value = away * away / n"
)
_CIRCLE = f"    u = tl.load(x + i, mask=i < n, other=1.0{ONCE})\n    value = 4.0 * tl.sqrt(1.0 - u * u) / n"

_REST = "fmaxf(1.0f - xv * xv, 1e-30f)"  # whose root is it times its reciprocal root: sqrtf has a branch

REDUCTION = Task(
    name="reduction", title="Sum an array", family="reduction", dims=("n",), inputs=(_X,), outputs=_ONE,
    oracle=lambda x, d: {"out": sum_of(x["x"])}, library=lambda x, d: {"out": x["x"].sum().reshape(1)},
    flops="n", tolerance=32,
    start=_flat("reduction", "x", _SUM),
    features=(
        _flat_loop("reduction", "x", _SUM),
        _flat_shuffle("reduction", ("x",), "xv"),
        _flat_passes("reduction", "x", _SUM),
    ),
    naive_cuda=_flat_cuda("reduction", ("x",), "x[i]"), **_N,
)  # fmt: skip

DOT = Task(
    name="dot", title="Dot product of two arrays", family="reduction", dims=("n",), inputs=(_X, _Y), outputs=_ONE,
    oracle=lambda x, d: {"out": sum_of(x["x"] * x["y"])}, library=lambda x, d: {"out": (x["x"] @ x["y"]).reshape(1)},
    flops="2 * n", tolerance=32,
    start=_flat("dot", "x, y", _DOT),
    features=(
        _flat_loop("dot", "x, y", _DOT),
        _flat_shuffle("dot", ("x", "y"), "xv * yv"),
        _flat_passes("dot", "x, y", _DOT),
    ),
    naive_cuda=_flat_cuda("dot", ("x", "y"), "x[i] * y[i]"), **_N,
)  # fmt: skip

MSE = Task(
    name="mse", title="Mean squared error of two arrays", family="loss", dims=("n",), inputs=(_X, _Y), outputs=_ONE,
    oracle=_mse, library=lambda x, d: {"out": torch.nn.functional.mse_loss(x["x"], x["y"]).reshape(1)},
    flops="3 * n", tolerance=64,
    start=_flat("mse", "x, y", _MSE, 8192),
    features=(
        _flat_loop("mse", "x, y", _MSE.removesuffix(" / n"), " / n"),
        _flat_shuffle("mse", ("x", "y"), "(xv - yv) * (xv - yv)", " / n"),
    ),
    naive_cuda=_chunk_cuda("mse", ("x", "y"), "(x[i] - y[i]) * (x[i] - y[i]) / n"), **_N,
)  # fmt: skip

MONTE_CARLO = Task(
    name="monte_carlo", title="Monte Carlo integration of 4 sqrt(1 - u u) over given samples", family="monte_carlo",
    dims=("n",), inputs=(Buffer("x", ("n",), kind="unit"),), outputs=_ONE,
    oracle=lambda x, d: {"out": sum_of(4 * torch.sqrt(1 - x["x"] ** 2) / d["n"])},
    library=lambda x, d: {"out": (4 * torch.sqrt(1 - x["x"] ** 2)).mean().reshape(1)},
    flops="4 * n", tolerance=64,
    start=_flat("monte_carlo", "x", _CIRCLE, 8192),
    features=(
        _flat_loop("monte_carlo", "x", _CIRCLE.removesuffix(" / n"), " / n"),
        _flat_shuffle("monte_carlo", ("x",), f"4.0f * {_REST} * rsqrtf({_REST})", " / n"),
    ),
    naive_cuda=_chunk_cuda("monte_carlo", ("x",), "4.0f * sqrtf(1.0f - x[i] * x[i]) / n"), **_N,
)  # fmt: skip

SCAN = Task(
    name="scan", title="Running sum along rows", family="scan", inputs=(_MATRIX,), outputs=_SAME,
    oracle=lambda x, d: {"out": Truth(x["x"].cumsum(-1), x["x"].abs().cumsum(-1))},
    library=lambda x, d: {"out": x["x"].cumsum(-1)}, flops="rows * cols", tolerance=64,
    start=_rows("scan", "x", "    tl.store(out + row * cols + i, tl.cumsum(v, 0), mask=i < cols)"),
    naive_cuda=_rows_cuda("scan", ("x",), """    float sum = 0;
    for (long long i = 0; i < cols; ++i) out[r * cols + i] = sum += x[i];"""), **_ROWS,
)  # fmt: skip

SOFTMAX = Task(
    name="softmax", title="Softmax along rows", family="softmax", inputs=(_MATRIX,), outputs=_SAME,
    oracle=_softmax, library=lambda x, d: {"out": torch.softmax(x["x"], -1)}, flops="rows * cols * 5", tolerance=16,
    start=_rows("softmax", "x", """    e = tl.exp(v - tl.max(v, 0))
    tl.store(out + row * cols + i, e / tl.sum(e, 0), mask=i < cols)""", 'float("-inf")'),
    naive_cuda=_rows_cuda("softmax", ("x",), """    float most = x[0], sum = 0;
    for (long long i = 1; i < cols; ++i) most = fmaxf(most, x[i]);
    for (long long i = 0; i < cols; ++i) sum += expf(x[i] - most);
    for (long long i = 0; i < cols; ++i) out[r * cols + i] = expf(x[i] - most) / sum;"""), **_ROWS,
)  # fmt: skip

LAYERNORM = Task(
    name="layernorm", title="Layer norm along rows, with weight and bias", family="norm",
    inputs=(_MATRIX, Buffer("weight", ("cols",)), Buffer("bias", ("cols",))), outputs=_SAME,
    oracle=_layernorm, library=_layernorm_library, flops="rows * cols * 8", tolerance=32,
    start=_rows("layernorm", "x, weight, bias", f"""    mean = tl.sum(v, 0) / cols
    away = tl.where(i < cols, v - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(away * away, 0) / cols + {EPS})
    w = tl.load(weight + i, mask=i < cols)
    b = tl.load(bias + i, mask=i < cols)
    tl.store(out + row * cols + i, away * rstd * w + b, mask=i < cols)"""),
    naive_cuda=_rows_cuda("layernorm", ("x", "weight", "bias"), f"""    float mean = 0, var = 0;
    for (long long i = 0; i < cols; ++i) mean += x[i];
    mean /= cols;
    for (long long i = 0; i < cols; ++i) var += (x[i] - mean) * (x[i] - mean);
    float rstd = rsqrtf(var / cols + {EPS}f);
    for (long long i = 0; i < cols; ++i) out[r * cols + i] = (x[i] - mean) * rstd * weight[i] + bias[i];"""), **_ROWS,
)  # fmt: skip

CROSS_ENTROPY = Task(
    name="cross_entropy", title="Cross entropy of each row's logits", family="loss",
    inputs=(_MATRIX, Buffer("target", ("rows",), "int32", "index", "cols")), outputs=(Buffer("out", ("rows",)),),
    oracle=_cross_entropy,
    library=lambda x, d: {"out": torch.nn.functional.cross_entropy(x["x"], x["target"].long(), reduction="none")},
    flops="rows * cols * 4", tolerance=16,
    start=_rows("cross_entropy", "x, target", """    top = tl.max(v, 0)
    chosen = tl.load(x + row * cols + tl.load(target + row))
    tl.store(out + row, top + tl.log(tl.sum(tl.exp(v - top), 0)) - chosen)""", 'float("-inf")'),
    naive_cuda=_rows_cuda("cross_entropy", ("x", "target"), """    float most = x[0], sum = 0;
    for (long long i = 1; i < cols; ++i) most = fmaxf(most, x[i]);
    for (long long i = 0; i < cols; ++i) sum += expf(x[i] - most);
    out[r] = most + logf(sum) - x[target[r]];"""), **_ROWS,
)  # fmt: skip

TASKS = (REDUCTION, DOT, MSE, MONTE_CARLO, SCAN, SOFTMAX, LAYERNORM, CROSS_ENTROPY)
