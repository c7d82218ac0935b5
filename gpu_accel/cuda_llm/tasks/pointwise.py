"""Tasks of one value at a time, and lookups: sigmoid, ReLU, SwiGLU, embedding rows."""

from __future__ import annotations

from typing import Any

import torch

from .moving import exact
from .task import FLOOR, UNIT, Buffer, Dims, Task, Tensors, Truth


def _flat_map(name: str, arguments: str, value: str) -> str:
    """A Triton kernel that computes each output from the inputs at the same place."""
    loads = "\n".join(f"    {one}_ = tl.load({one} + i, mask=i < n)" for one in arguments.split(", "))
    return f'''# /// launch
# task = "{name}"
# grid = ["cdiv(n, BLOCK)"]
# [constants]
# BLOCK = 256
# [space]
# BLOCK = [256, 512, 1024, 2048, 4096]
# num_warps = [1, 2, 4, 8]
# ///
@triton.jit
def {name}({arguments}, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
{loads}
    tl.store(out + i, {value}, mask=i < n)
'''


def _strided_map(name: str, arguments: tuple[str, ...], value: str) -> str:
    """A CUDA kernel with vector loads: every thread computes UNROLL groups of four, a block apart."""
    named = "".join(f"const float* {one}, " for one in arguments)
    loads = "\n".join(f"            const float4 {one}_ = ((const float4*){one})[i];" for one in arguments)
    lanes = "\n".join(
        f"            {{ {' '.join(f'const float {one} = {one}_.{lane};' for one in arguments)} r.{lane} = {value}; }}"
        for lane in "xyzw"
    )
    tail = " ".join(f"const float {one} = {one}p[j];" for one in arguments)
    kept = " ".join(f"const float* {one}p = {one};" for one in arguments)
    return f'''// /// launch
// task = "{name}"
// grid = ["cdiv(cdiv(n, 4), THREADS * UNROLL)"]
// block = ["THREADS"]
// entry = "{name}"
// args = [{", ".join(f'"{one}"' for one in (*arguments, "out", "n"))}]
// [constants]
// THREADS = 256
// UNROLL = 2
// [space]
// THREADS = [128, 256, 512]
// UNROLL = [1, 2, 4]
// ///
extern "C" __global__ void __launch_bounds__(THREADS) {name}({named}float* out, long long n) {{
    const long long groups = n / 4;
    long long i = (long long)blockIdx.x * THREADS * UNROLL + threadIdx.x;
#pragma unroll
    for (int u = 0; u < UNROLL; ++u, i += THREADS) {{
        if (i < groups) {{
{loads}
            float4 r;
{lanes}
            ((float4*)out)[i] = r;
        }}
    }}
    if (blockIdx.x == 0 && threadIdx.x < n % 4) {{
        const long long j = groups * 4 + threadIdx.x;
        {kept}
        {{ {tail} out[j] = {value}; }}
    }}
}}
'''


def _naive_map(name: str, arguments: tuple[str, ...], value: str) -> str:
    named = "".join(f"const float* {one}, " for one in arguments)
    return f'''// /// launch
// grid = ["cdiv(n, 32)"]
// block = [32]
// entry = "{name}"
// args = [{", ".join(f'"{one}"' for one in (*arguments, "out", "n"))}]
// ///
extern "C" __global__ void {name}({named}float* out, long long n) {{
    long long i = blockIdx.x * 32LL + threadIdx.x;
    if (i < n) out[i] = {value};
}}
'''


_N: dict[str, Any] = {
    "dims": ("n",), "shown": ({"n": 5000}, {"n": 3333}), "bench": {"n": 1 << 25}, "ranges": {"n": (1, 2500)},
    "outputs": (Buffer("out", ("n",)),), "family": "elementwise",
}  # fmt: skip
_X = Buffer("x", ("n",))


def _swiglu(x: Tensors, d: Dims) -> dict[str, Truth]:
    gate = x["gate"] * torch.sigmoid(x["gate"])
    size = (gate.abs() * (1 + x["gate"].abs())) * x["up"].abs()
    lost = (x["gate"] * x["up"]).abs() * (FLOOR / UNIT)  # the sigmoid may be flushed to zero before it is multiplied
    return {"out": Truth(gate * x["up"], size + lost)}


SIGMOID = Task(
    name="sigmoid", title="Sigmoid of an array", inputs=(_X,),
    oracle=lambda x, d: {"out": Truth(torch.sigmoid(x["x"]), torch.sigmoid(x["x"]) * (1 + x["x"].abs()))},
    library=lambda x, d: {"out": torch.sigmoid(x["x"])}, flops="3 * n", tolerance=16,
    start=_flat_map("sigmoid", "x", "1.0 / (1.0 + tl.exp(-x_))"),
    naive_cuda=_naive_map("sigmoid", ("x",), "1.0f / (1.0f + expf(-x[i]))"),
    features=(_strided_map("sigmoid", ("x",), "__fdividef(1.0f, 1.0f + __expf(-x))"),), **_N,
)  # fmt: skip

RELU = Task(
    name="relu", title="ReLU of an array", inputs=(_X,),
    oracle=lambda x, d: {"out": exact(x["x"].clamp(min=0))},
    library=lambda x, d: {"out": torch.relu(x["x"])}, flops="n", tolerance=0,
    start=_flat_map("relu", "x", "tl.maximum(x_, 0.0)"),
    naive_cuda=_naive_map("relu", ("x",), "x[i] > 0 ? x[i] : 0"),
    features=(_strided_map("relu", ("x",), "fmaxf(x, 0.0f)"),), **_N,
)  # fmt: skip

SWIGLU = Task(
    name="swiglu", title="SwiGLU: gate times its sigmoid times up",
    inputs=(Buffer("gate", ("n",)), Buffer("up", ("n",))),
    oracle=_swiglu, library=lambda x, d: {"out": torch.nn.functional.silu(x["gate"]) * x["up"]},
    flops="5 * n", tolerance=16,
    start=_flat_map("swiglu", "gate, up", "gate_ / (1.0 + tl.exp(-gate_)) * up_"),
    naive_cuda=_naive_map("swiglu", ("gate", "up"), "gate[i] / (1.0f + expf(-gate[i])) * up[i]"),
    features=(_strided_map("swiglu", ("gate", "up"), "gate / (1.0f + __expf(-gate)) * up"),), **_N,
)  # fmt: skip

EMBEDDING = Task(
    name="embedding", title="Rows of a table, by index", family="gather", dims=("rows", "cols", "words"),
    inputs=(Buffer("table", ("words", "cols")), Buffer("index", ("rows",), "int32", "index", "words")),
    outputs=(Buffer("out", ("rows", "cols")),),
    shown=({"rows": 9, "cols": 100, "words": 30}, {"rows": 5, "cols": 257, "words": 7}),
    bench={"rows": 32768, "cols": 1024, "words": 4096},
    ranges={"rows": (1, 9), "cols": (1, 300), "words": (2, 20)},
    oracle=lambda x, d: {"out": exact(x["table"][x["index"]])},
    library=lambda x, d: {"out": torch.nn.functional.embedding(x["index"], x["table"])}, flops="0", tolerance=0,
    start='''# /// launch
# task = "embedding"
# grid = ["cdiv(cols, BLOCK)", "rows"]
# [constants]
# BLOCK = 128
# [space]
# BLOCK = [64, 128, 256, 512, 1024]
# num_warps = [1, 2, 4, 8]
# ///
@triton.jit
def embedding(table, index, out, cols, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(index + row).to(tl.int64)
    tl.store(out + row * cols + i, tl.load(table + word * cols + i, mask=i < cols), mask=i < cols)
''',
    naive_cuda='''// /// launch
// grid = ["cdiv(rows, 32)", "cols"]
// block = [32]
// entry = "embedding"
// args = ["table", "index", "out", "rows", "cols"]
// ///
extern "C" __global__ void embedding(const float* table, const int* index, float* out, long long rows,
                                     long long cols) {
    long long r = blockIdx.x * 32LL + threadIdx.x, j = blockIdx.y;  // neighbours read different rows
    if (r < rows) out[r * cols + j] = table[index[r] * cols + j];
}
''',
)  # fmt: skip

TASKS = (SIGMOID, RELU, SWIGLU, EMBEDDING)
