"""Sparse matrix times dense matrix: every row has the same number of entries, given as values and columns (ELL)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .task import Buffer, Dims, Task, Tensors, Truth


def _product(values: Tensor, columns: Tensor, b: Tensor) -> Tensor:
    out = torch.zeros(values.shape[0], b.shape[1], dtype=b.dtype, device=b.device)
    for entry in range(values.shape[1]):  # one gather a time: all at once would take entries times the memory
        out += values[:, entry, None] * b[columns[:, entry]]
    return out


def _as_csr(x: Tensors, d: Dims) -> tuple[Tensor, Tensor]:
    """The format that cuSPARSE takes; columns of a row in order."""
    columns, order = x["columns"].sort(-1)
    values = x["values"].gather(1, order)
    starts = torch.arange(d["m"] + 1, dtype=torch.int32, device=columns.device) * d["entries"]
    shape = (d["m"], d["k"])
    return torch.sparse_csr_tensor(starts, columns.flatten(), values.flatten(), shape, check_invariants=False), x["b"]


def _csr_product(x: Any, d: Dims) -> Tensors:
    return {"out": x[0] @ x[1]}


SPMM = Task(
    name="spmm", title="Sparse matrix (ELL) times dense matrix", family="sparse", dims=("m", "k", "n", "entries"),
    inputs=(Buffer("values", ("m", "entries")), Buffer("columns", ("m", "entries"), "int32", "index", "k"),
            Buffer("b", ("k", "n"))),
    outputs=(Buffer("out", ("m", "n")),),
    shown=({"m": 9, "k": 30, "n": 40, "entries": 5}, {"m": 4, "k": 17, "n": 65, "entries": 3}),
    bench={"m": 65536, "k": 65536, "n": 128, "entries": 16},
    ranges={"m": (1, 12), "k": (2, 40), "n": (1, 80), "entries": (2, 8)},
    oracle=lambda x, d: {"out": Truth(_product(x["values"], x["columns"], x["b"]),
                                      _product(x["values"].abs(), x["columns"], x["b"].abs()))},
    prepare=_as_csr, library=_csr_product, flops="2 * m * n * entries", tolerance=16,
    start='''# /// launch
# task = "spmm"
# grid = ["m", "cdiv(n, BLOCK)"]
# [constants]
# BLOCK = 64
# [space]
# BLOCK = [32, 64, 128]
# num_warps = [1, 2, 4]
# ///
@triton.jit
def spmm(values, columns, b, out, n, entries, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for entry in range(0, entries):
        at = tl.load(columns + row * entries + entry).to(tl.int64)
        acc += tl.load(values + row * entries + entry) * tl.load(b + at * n + j, mask=j < n, other=0.0)
    tl.store(out + row * n + j, acc, mask=j < n)
''',
    features=('''# /// launch
# task = "spmm"
# grid = ["cdiv(m, ROWS)", "cdiv(n, BLOCK)"]
# [constants]
# BLOCK = 128
# ROWS = 4
# [space]
# BLOCK = [32, 64, 128]
# ROWS = [1, 2, 4, 8, 16]
# num_warps = [1, 2, 4, 8]
# num_stages = [1, 2, 3, 4]
# ///
@triton.jit
def spmm(values, columns, b, out, m, n, entries, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((ROWS, BLOCK), tl.float32)
    for entry in range(0, entries):
        at = tl.load(columns + row * entries + entry, mask=row < m, other=0).to(tl.int64)
        value = tl.load(values + row * entries + entry, mask=row < m, other=0.0)
        acc += value[:, None] * tl.load(b + at[:, None] * n + j[None, :], mask=j[None, :] < n, other=0.0)
    tl.store(out + row[:, None] * n + j[None, :], acc, mask=(row[:, None] < m) & (j[None, :] < n))
''', '''// /// launch
// task = "spmm"
// grid = ["cdiv(m, ROWS)", "cdiv(n, 128)"]
// block = [32, "ROWS"]
// entry = "spmm"
// args = ["values", "columns", "b", "out", "m", "n", "entries"]
// [constants]
// ROWS = 4
// UNROLL = 4
// [space]
// ROWS = [1, 2, 4, 8]
// UNROLL = [1, 2, 4, 8]
// ///
extern "C" __global__ void spmm(const float* values, const int* columns, const float* b, float* out, long long m,
                                long long n, long long entries) {
    const long long row = (long long)blockIdx.x * ROWS + threadIdx.y;  // a warp takes a row, four columns a thread
    const long long j = blockIdx.y * 128LL + threadIdx.x * 4;
    if (row >= m) return;
    float acc[4] = {0, 0, 0, 0};
    const float* v = values + row * entries;
    const int* c = columns + row * entries;
    if (n % 4 == 0 && j < n) {
#pragma unroll UNROLL
        for (long long e = 0; e < entries; ++e) {
            const float a = v[e];
            const float4 r = *(const float4*)(b + c[e] * n + j);
            acc[0] += a * r.x, acc[1] += a * r.y, acc[2] += a * r.z, acc[3] += a * r.w;
        }
        *(float4*)(out + row * n + j) = make_float4(acc[0], acc[1], acc[2], acc[3]);
    } else {
        for (int p = 0; p < 4 && j + p < n; ++p) {
            for (long long e = 0; e < entries; ++e) acc[p] += v[e] * b[c[e] * n + j + p];
            out[row * n + j + p] = acc[p];
        }
    }
}
'''),
    naive_cuda='''// /// launch
// grid = ["cdiv(m, 32)", "n"]
// block = [32]
// entry = "spmm"
// args = ["values", "columns", "b", "out", "m", "n", "entries"]
// ///
extern "C" __global__ void spmm(const float* values, const int* columns, const float* b, float* out, long long m,
                                long long n, long long entries) {
    long long i = blockIdx.x * 32LL + threadIdx.x, j = blockIdx.y;
    if (i >= m) return;
    float sum = 0;
    for (long long e = 0; e < entries; ++e) sum += values[i * entries + e] * b[columns[i * entries + e] * n + j];
    out[i * n + j] = sum;
}
''',
)  # fmt: skip

TASKS = (SPMM,)
