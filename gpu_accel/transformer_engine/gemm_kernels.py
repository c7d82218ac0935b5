"""Matrix products of quantised operands in plain Triton: out (M, N) = A (M, K) B (N, K)^T, both K-contiguous.

    _fp8_kernel         both operands e4m3 or e5m2 with float32 scales per tensor, per row, or per 128 of K: fp8 tensor
                        cores, one product of 128 of K at a time. Its sums leave the tensor core every 128 of K and are
                        added up in float32 registers ("two-level"), because Hopper's fp8 products are summed with about
                        14 bits; that is also where scales of blocks along K are multiplied in.
    _emulated_kernel    MX and NVFP4: codes become bf16 in registers, times the scale of their block, and go to bf16
                        tensor cores. Both steps are exact (a code has at most 4 significant bits, an e4m3 scale 4, an
                        e8m0 scale none, bf16 has 8), so the result is that of a GPU with such units up to the order of
                        float32 sums, at the speed of bf16.
    _native_kernel      the same for GPUs with such units (sm_100): codes and scales go to them as they are. Never run.

A program computes one tile of BM x BN; tiles are walked in groups of rows, so that B stays in L2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gpu_accel.compat import INTERPRET, dot, widen

_INTERPRET = tl.constexpr(INTERPRET)


@triton.jit
def _place(tiles_m, tiles_n, GROUP: tl.constexpr):
    """(tile row, tile column) of this program."""
    pid = tl.program_id(0)
    per_group = GROUP * tiles_n
    first = pid // per_group * GROUP
    high = tl.minimum(tiles_m - first, GROUP)
    return first + pid % per_group % high, pid % per_group // high


@triton.jit
def _operand(x, index, limit, pitch, k, K, BLOCK: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr):
    """Bytes (BLOCK, BK) of rows `index` from column k on; zeros outside."""
    c = k + tl.arange(0, BK)
    pointers = x + index.to(tl.int64)[:, None] * pitch + c[None, :]
    if EVEN:
        return tl.load(pointers, mask=(index < limit)[:, None], other=0)
    else:
        return tl.load(pointers, mask=(index < limit)[:, None] & (c < K)[None, :], other=0)


@triton.jit
def _as_fp8(x, E5M2: tl.constexpr):
    """Bytes as fp8; in the interpreter as float32, see `compat.widen`."""
    y = x.to(tl.float8e5, bitcast=True) if E5M2 else x.to(tl.float8e4nv, bitcast=True)
    if _INTERPRET:
        return widen(y, tl.float32)
    else:
        return y


@triton.jit
def _finish(acc, bias, out, m, n, M, N, BIAS: tl.constexpr):
    if BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    pointers = out + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(pointers, acc.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@triton.jit
def _fp8_kernel(
    a, b, scale_a, scale_b, bias, out, groups, M, N, K, tiles_m, tiles_n, sb_g, sa_m, sa_k, sb_n, sb_k,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, A_E5M2: tl.constexpr,
    B_E5M2: tl.constexpr, BLOCKED: tl.constexpr, ROWS_A: tl.constexpr, ROWS_B: tl.constexpr, BIAS: tl.constexpr,
    EVEN: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Scales are at scale_a[m // ROWS_A * sa_m + k // 128 * sa_k], so strides of 0 make them per row or per tensor.

    GROUPED 1: b is a stack of matrices (N, K), their scales `sb_g` apart; 128 rows of a have the one that `groups`
    (int32) names at the first of them, and become 0 where it is negative; bias is (G, N). GROUPED 2: groups share out
    K, and the result is a stack of products of `sb_g` rows, each over the 128s of K from groups[g] to groups[g + 1].
    """
    tm, tn = _place(tiles_m, tiles_n, GROUP)
    start = 0
    stop = K
    height = M
    if GROUPED == 2:
        each = tl.cdiv(sb_g, BM)
        group = tm // each
        tm -= group * each
        start = tl.load(groups + group) * 128
        stop = tl.minimum(tl.load(groups + group + 1) * 128, K)
        out += group.to(tl.int64) * sb_g * N
        height = sb_g
    if GROUPED == 1:
        group = tl.load(groups + tm.to(tl.int64) * BM // 128 * 128)
        b += tl.maximum(group, 0).to(tl.int64) * N * K
        scale_b += tl.maximum(group, 0).to(tl.int64) * sb_g
    m = tm * BM + tl.arange(0, BM)
    n = tn * BN + tl.arange(0, BN)
    pa = scale_a + (m // ROWS_A).to(tl.int64) * sa_m
    pb = scale_b + (n // ROWS_B).to(tl.int64) * sb_n
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(start, stop, BK):
        x = _as_fp8(_operand(a, m, height, K, k, K, BM, BK, EVEN), A_E5M2)
        y = _as_fp8(_operand(b, n, N, K, k, K, BN, BK, EVEN), B_E5M2)
        part = tl.dot(x, tl.trans(y), out_dtype=tl.float32)
        if BLOCKED:
            sa = tl.load(pa + k // 128 * sa_k, mask=m < height, other=0.0)
            sb = tl.load(pb + k // 128 * sb_k, mask=n < N, other=0.0)
            acc += part * sa[:, None] * sb[None, :]
        else:
            acc += part
    if not BLOCKED:
        sa = tl.load(pa, mask=m < height, other=0.0)
        sb = tl.load(pb, mask=n < N, other=0.0)
        acc = acc * sa[:, None] * sb[None, :]
    if GROUPED == 1:
        if BIAS:
            own = bias + tl.maximum(group, 0).to(tl.int64) * N
            acc += tl.load(own + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        acc = tl.where(group < 0, 0.0, acc)
    _finish(acc, bias, out, m, n, height, N, BIAS and GROUPED != 1)


@triton.jit
def _narrow_value(code, MANTISSA: tl.constexpr, BIAS_: tl.constexpr, WIDTH: tl.constexpr):
    """float32 of a code of fewer than eight bits: WIDTH bits below the sign."""
    size = (code & ((1 << WIDTH) - 1)).to(tl.int32)
    normal = ((size + ((127 - BIAS_) << MANTISSA)) << (23 - MANTISSA)).to(tl.float32, bitcast=True)
    small = size.to(tl.float32) * (2.0 ** (1 - BIAS_ - MANTISSA))
    value = tl.where(size < (1 << MANTISSA), small, normal)
    return tl.where((code >> WIDTH) & 1 != 0, -value, value)


@triton.jit
def _widened(
    x, scales, index, limit, pitch, k, K, groups,
    BLOCK: tl.constexpr, BK: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr, ELEMENT: tl.constexpr,
    E8M0: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Values (BLOCK, BK) in bf16, times the scales of their blocks. ELEMENT as in codec.py."""
    if ELEMENT == 4:
        packed = _operand(x, index, limit, pitch, k // 2, pitch, BLOCK, BK // 2, EVEN)
        codes = tl.reshape(tl.join(packed & 0xF, packed >> 4), (BLOCK, BK))
        values = _narrow_value(codes, 1, 1, 3)
    else:
        codes = _operand(x, index, limit, pitch, k, K, BLOCK, BK, EVEN)
        if ELEMENT == 2:
            values = _narrow_value(codes, 3, 1, 5)
        elif ELEMENT == 3:
            values = _narrow_value(codes, 2, 3, 5)
        else:
            values = _as_fp8(codes, ELEMENT == 1).to(tl.float32)
    g = k // G + tl.arange(0, BK // G)
    inside = (index < limit)[:, None] & (g < groups)[None, :]
    s = tl.load(scales + (index // ROWS).to(tl.int64)[:, None] * groups + g[None, :], mask=inside, other=0)
    if E8M0:
        power = tl.where(s == 0, 0x400000, s.to(tl.int32) << 23).to(tl.float32, bitcast=True)
        factor = tl.where(s == 0xFF, float("nan"), power)
    else:
        size = (s & 0x7F).to(tl.int32)
        normal = ((size + (120 << 3)) << 20).to(tl.float32, bitcast=True)
        factor = tl.where(size < 8, size.to(tl.float32) * 0.001953125, normal)
        factor = tl.where(size == 0x7F, float("nan"), factor)
    scaled = tl.reshape(values, (BLOCK, BK // G, G)) * factor[:, :, None]
    return tl.reshape(scaled, (BLOCK, BK)).to(tl.bfloat16)


@triton.jit
def _emulated_kernel(
    a, b, scale_a, scale_b, tensor_a, tensor_b, bias, out, M, N, K, pitch_a, pitch_b, groups, tiles_m, tiles_n,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr,
    A_ELEMENT: tl.constexpr, B_ELEMENT: tl.constexpr, ROWS_A: tl.constexpr, ROWS_B: tl.constexpr,
    E8M0: tl.constexpr, BIAS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    tm, tn = _place(tiles_m, tiles_n, GROUP)
    m = tm * BM + tl.arange(0, BM)
    n = tn * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        x = _widened(a, scale_a, m, M, pitch_a, k, K, groups, BM, BK, G, ROWS_A, A_ELEMENT, E8M0, EVEN)
        y = _widened(b, scale_b, n, N, pitch_b, k, K, groups, BN, BK, G, ROWS_B, B_ELEMENT, E8M0, EVEN)
        acc = dot(x, tl.trans(y), acc, "ieee")
    if not E8M0:
        acc = acc * (tl.load(tensor_a) * tl.load(tensor_b))
    _finish(acc, bias, out, m, n, M, N, BIAS)


@triton.jit
def _native_operand(
    x, scales, index, limit, pitch, k, K, groups, BLOCK: tl.constexpr, BK: tl.constexpr, G: tl.constexpr,
    ROWS: tl.constexpr, PACK: tl.constexpr, E8M0: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """(bytes (BLOCK, BK / PACK), scales (BLOCK, BK / G)); zeros outside, whatever their scale."""
    width = pitch if PACK == 2 else K
    codes = _operand(x, index, limit, pitch, k // PACK, width, BLOCK, BK // PACK, EVEN)
    g = k // G + tl.arange(0, BK // G)
    inside = (index < limit)[:, None] & (g < groups)[None, :]
    s = tl.load(scales + (index // ROWS).to(tl.int64)[:, None] * groups + g[None, :], mask=inside, other=0)
    if E8M0:
        return codes, s
    else:
        return codes, s.to(tl.float8e4nv, bitcast=True)


@triton.jit
def _native_kernel(
    a, b, scale_a, scale_b, tensor_a, tensor_b, bias, out, M, N, K, pitch_a, pitch_b, groups, tiles_m, tiles_n,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr,
    A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr, ROWS_A: tl.constexpr, ROWS_B: tl.constexpr, E8M0: tl.constexpr,
    BIAS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    A_PACK: tl.constexpr = 2 if A_FORMAT == "e2m1" else 1
    B_PACK: tl.constexpr = 2 if B_FORMAT == "e2m1" else 1
    tm, tn = _place(tiles_m, tiles_n, GROUP)
    m = tm * BM + tl.arange(0, BM)
    n = tn * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        x, sx = _native_operand(a, scale_a, m, M, pitch_a, k, K, groups, BM, BK, G, ROWS_A, A_PACK, E8M0, EVEN)
        y, sy = _native_operand(b, scale_b, n, N, pitch_b, k, K, groups, BN, BK, G, ROWS_B, B_PACK, E8M0, EVEN)
        acc = tl.dot_scaled(x, sx, A_FORMAT, tl.trans(y), sy, B_FORMAT, acc)
    if not E8M0:
        acc = acc * (tl.load(tensor_a) * tl.load(tensor_b))
    _finish(acc, bias, out, m, n, M, N, BIAS)
