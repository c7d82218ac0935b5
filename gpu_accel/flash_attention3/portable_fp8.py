"""FP8 attention forward in plain Triton: both products on fp8 tensor cores, one scale per block of q, k and v.

    S = q8 k8^T (exact products, float32 sums)     true scores = S * q_scale * k_scale * softmax_scale
    P = exp2(true scores - m + SHIFT) -> fp8       SHIFT = 8 for e4m3 (largest 256 of 448), 15 for e5m2
    acc = acc * alpha + (P v8) * v_scale           o = acc / l,   l = sum of the float32 P before rounding

* The scales cost nothing in S: q_scale * k_scale * softmax_scale * log2(e) is one number per row and block, the factor
  that the exponent's multiply-add needs anyway. SHIFT cancels between acc and l, and is taken out of the LSE.
* Sums over a block come from the tensor core, sums over blocks are made in float32 registers ("two-level"): Hopper's
  fp8 wgmma adds with about 14 bits and rounds towards zero, which at 16k keys would lose a percent. The same
  multiply-add brings in v_scale. `two_level=False` lets the tensor core add everything; v_scale then goes into alpha.
* v comes transposed, (head_dim, seqlen): fp8 wgmma reads its right operand along the sum only. The quantiser writes it.
* q, k and v arrive by TMA through rank-2 descriptors over all heads. Rows of the next head may appear behind the last
  key: their scores are masked, and the transposed v ends in zeros (by the quantiser, then by TMA), so nothing leaks.
* Head dimensions are cut into two powers of two where that pads less (192 = 128 + 64, 80 = 64 + 32), and outputs wider
  than 128 too, so that the block's product needs 64 registers a thread and not 128.
"""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from gpu_accel.compat import INTERPRET
from gpu_accel.errors import UnsupportedError
from gpu_accel.flash_attention3.device import LN2, LOG2E, dense_query_tile, key_range, seen_keys, tanh
from gpu_accel.flash_attention3.fp8_quantize import dot_fp8, fp8_format, to_fp8
from gpu_accel.flash_attention3.launch import capability, launch, next_power_of_2
from gpu_accel.flash_attention3.reference_fp8 import expand_scales

NAME = "portable"
KERNEL = "fp8_attention_forward (plain Triton)"
HEAD_DIMS = range(16, 257, 16)
_L2_SHARE = 16 << 20  # bytes of keys and values that the heads walked together may take


@dataclass(frozen=True)
class Fp8Config:
    """Tile of `block_m` query rows by `block_n` keys. `measured` says what was measured, on which card and date."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    two_level: bool = True
    measured: str = "not measured yet"
    date: str = ""
    card: str = ""

    def __str__(self) -> str:
        sums = "float32 sums over blocks" if self.two_level else "tensor-core sums"
        return f"{self.block_m}x{self.block_n}, {self.num_warps} warps, {self.num_stages} stages, {sums}"


BUCKETS = (64, 128, 256)
INTERPRETER = Fp8Config(64, 32, 4, 1, measured="interpreter")
# Few query rows (decoding), and GPUs with 100 KB of shared memory.
SHORT = {64: Fp8Config(64, 128, 4, 3), 128: Fp8Config(64, 128, 4, 3), 256: Fp8Config(64, 64, 8, 2)}
SMALL = {64: Fp8Config(64, 64, 4, 2), 128: Fp8Config(64, 64, 4, 2), 256: Fp8Config(64, 32, 8, 2)}


def bucket(head_dim: int) -> int:
    """The smallest tabulated head_dim that covers this one."""
    return next(b for b in BUCKETS if head_dim <= b)


@functools.cache
def table() -> dict[tuple[int, bool], Fp8Config]:
    """tuned/fp8_sm90.toml as {(head_dim bucket, causal): config}; a repeated or unknown key is an error."""
    path = Path(__file__).parent / "tuned" / "fp8_sm90.toml"
    found: dict[tuple[int, bool], Fp8Config] = {}
    for row in tomllib.loads(path.read_text())["config"]:
        key = (row.pop("head_dim"), row.pop("causal"))
        if key in found or key[0] not in BUCKETS:
            raise ValueError(f"{path.name}: repeated or unknown key {key}")
        found[key] = Fp8Config(**row)
    return found


def lookup(head_dim: int, *, causal: bool, seqlen_q: int, device: torch.device) -> Fp8Config:
    """The configuration of one launch: from the table, never searched for at run time."""
    if INTERPRET:
        return INTERPRETER
    if device.type == "cuda" and capability(device)[0] not in (9, 10):
        return SMALL[bucket(head_dim)]
    config = table()[bucket(head_dim), causal]
    return SHORT[bucket(head_dim)] if seqlen_q <= 64 < config.block_m else config


def candidates(head_dim: int) -> list[Fp8Config]:
    """What the tuner tries for a head_dim bucket. For sm_90 all but the last of 256 compile without spills."""
    rows = {
        64: [(128, 128, 8, 2), (128, 128, 8, 3), (128, 128, 4, 2), (64, 128, 4, 3), (128, 64, 8, 3), (128, 64, 4, 3)],
        128: [(128, 128, 8, 2), (128, 128, 8, 3), (64, 128, 4, 2), (64, 128, 4, 3), (128, 64, 8, 3), (64, 64, 4, 3)],
        256: [(64, 128, 8, 2), (64, 64, 8, 2), (64, 64, 8, 3), (64, 32, 8, 3), (128, 64, 16, 2)],
    }[bucket(head_dim)]
    return [Fp8Config(*row) for row in rows]


def parts(dim: int, largest: int) -> tuple[int, int]:
    """Cut `dim` into powers of two of at least 32 and at most `largest`, padding least; the second may be 0."""
    first = min(largest, max(32, 1 << (dim.bit_length() - 1)))
    if dim <= first:
        return first, 0
    second = max(32, next_power_of_2(dim - first))
    if second >= first and 2 * first <= largest:
        return 2 * first, 0
    return first, second


@triton.jit
def _attend(
    acc, acc2, l_i, m_i, vs_before, q, q2, row_scale, k, k2, v, v2, ks, vs, ks_step, vs_step, k_row0, v_row0,
    lo, hi, seqlen_k, diagonal, window_left, window_right, cap_out,
    N: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DV2: tl.constexpr, K_BLOCK: tl.constexpr,
    MASK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, TWO_LEVEL: tl.constexpr,
    E5M2: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Walk over the keys [lo, hi) in blocks of N."""
    for j in tl.range(lo, hi, N):
        block = j // K_BLOCK
        k_scale = tl.load(ks + block * ks_step)
        v_scale = tl.load(vs + block * vs_step)
        k_tile = k.load([k_row0 + j, 0])
        s = dot_fp8(q, tl.trans(k_tile), None)
        if D2 > 0:
            k_tile2 = k2.load([k_row0 + j, D])
            s = dot_fp8(q2, tl.trans(k_tile2), s)
        # never 0: a masked score is -inf, and -inf * 0 is NaN
        factor = tl.maximum(row_scale * k_scale, 1.1754943508222875e-38)
        if SOFTCAP:
            s = cap_out * tanh(s * factor[:, None])
        if MASK:
            cols = j + tl.arange(0, N)
            seen = seen_keys(cols, diagonal, seqlen_k, window_left, window_right, LEFT, RIGHT)
            s = tl.where(seen, s, float("-inf"))
        largest = tl.max(s, 1)
        if not SOFTCAP:
            largest = largest * factor
        m_new = tl.maximum(m_i, largest)
        m_use = m_new
        if MASK:  # a row that has seen nothing yet: -inf - -inf would be NaN
            m_use = tl.where(m_new == float("-inf"), 0.0, m_new)
        if SOFTCAP:
            p = tl.exp2(s - (m_use - SHIFT)[:, None])
        else:
            p = tl.exp2(s * factor[:, None] - (m_use - SHIFT)[:, None])
        alpha = tl.exp2(m_i - m_use)
        l_i = l_i * alpha + tl.sum(p, 1)
        m_i = m_new
        p8 = to_fp8(p, E5M2)
        v_tile = v.load([v_row0, j])
        if TWO_LEVEL:
            acc = acc * alpha[:, None] + dot_fp8(p8, tl.trans(v_tile), None) * v_scale
            if DV2 > 0:
                v_tile2 = v2.load([v_row0 + DV, j])
                acc2 = acc2 * alpha[:, None] + dot_fp8(p8, tl.trans(v_tile2), None) * v_scale
        else:
            keep = alpha * (vs_before / v_scale)  # acc is kept in units of the current block's scale
            vs_before = v_scale
            acc = dot_fp8(p8, tl.trans(v_tile), acc * keep[:, None])
            if DV2 > 0:
                v_tile2 = v2.load([v_row0 + DV, j])
                acc2 = dot_fp8(p8, tl.trans(v_tile2), acc2 * keep[:, None])
    return acc, acc2, l_i, m_i, vs_before


@triton.jit
def _store(o, tile, row, seqlen, stride, col, head_dim, M: tl.constexpr, COLS: tl.constexpr):
    c = col + tl.arange(0, COLS)
    pointers = o + row.to(tl.int64)[:, None] * stride + c[None, :]
    tl.store(pointers, tile.to(o.dtype.element_ty), mask=(row < seqlen)[:, None] & (c < head_dim)[None, :])


@triton.jit(do_not_specialize=["heads_together"])
def fp8_attention_forward(
    q, q2, k, k2, v, v2, o, lse, qs, ks, vs,
    qs_b, qs_h, qs_step, ks_b, ks_h, ks_step, vs_b, vs_h, vs_step, o_sb, o_sh, o_ss,
    batches, heads, heads_kv, seqlen_q, seqlen_k, head_dim, heads_together, window_left, window_right,
    qk_scale, cap_out,
    M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr, DV2: tl.constexpr,
    Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, TAIL: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr, TWO_LEVEL: tl.constexpr, E5M2: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    # Heaviest tiles (the last rows, under a causal mask) first, in groups of heads whose keys and values share L2.
    pid = tl.program_id(0)
    batch, head, m_block = dense_query_tile(pid, batches, heads, seqlen_q, heads_together, M)
    batch_head = batch * heads + head
    head_kv = head // (heads // heads_kv)
    batch_head_kv = batch * heads_kv + head_kv
    m0 = m_block * M
    row = m0 + tl.arange(0, M)
    offset = seqlen_k - seqlen_q
    diagonal = row + offset

    lo, hi, full_lo, full_hi = key_range(
        m0, seqlen_q, seqlen_k, window_left, window_right, M, N, LEFT, RIGHT, False, TAIL
    )

    q_row0 = batch_head * seqlen_q + m0
    k_row0 = batch_head_kv * seqlen_k
    v_row0 = batch_head_kv * head_dim
    qs += batch.to(tl.int64) * qs_b + head.to(tl.int64) * qs_h
    ks += batch.to(tl.int64) * ks_b + head_kv.to(tl.int64) * ks_h
    vs += batch.to(tl.int64) * vs_b + head_kv.to(tl.int64) * vs_h
    row_scale = tl.load(qs + row // Q_BLOCK * qs_step, mask=row < seqlen_q, other=1.0) * qk_scale
    q_tile = q.load([q_row0, 0])
    q_tile2 = q_tile
    if D2 > 0:
        q_tile2 = q2.load([q_row0, D])

    m_i = tl.full([M], float("-inf"), tl.float32)
    l_i = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DV], tl.float32)
    acc2 = l_i
    if DV2 > 0:
        acc2 = tl.zeros([M, DV2], tl.float32)
    v_unit = tl.full((), 1.0, tl.float32)

    edges = (lo, full_lo, full_hi, hi)
    for part in tl.static_range(3):  # masked, without a mask, masked
        if (part == 1) or (LEFT if part == 0 else TAIL):
            acc, acc2, l_i, m_i, v_unit = _attend(
                acc, acc2, l_i, m_i, v_unit, q_tile, q_tile2, row_scale, k, k2, v, v2, ks, vs, ks_step, vs_step,
                k_row0, v_row0, edges[part], edges[part + 1], seqlen_k, diagonal, window_left, window_right, cap_out,
                N, D, D2, DV, DV2, K_BLOCK, part != 1, LEFT, RIGHT, SOFTCAP, TWO_LEVEL, E5M2, SHIFT,
            )  # fmt: skip

    empty = l_i == 0.0
    total = tl.where(empty, 1.0, l_i)  # not "l > 0": NaN has to stay NaN
    inverse = 1.0 / total
    if not TWO_LEVEL:
        inverse = inverse * v_unit
    o += batch.to(tl.int64) * o_sb + head.to(tl.int64) * o_sh
    _store(o, acc * inverse[:, None], row, seqlen_q, o_ss, 0, head_dim, M, DV)
    if DV2 > 0:
        _store(o, acc2 * inverse[:, None], row, seqlen_q, o_ss, DV, head_dim, M, DV2)
    natural = tl.where(empty, float("-inf"), (m_i - SHIFT + tl.log2(total)) * LN2)
    tl.store(lse + batch_head.to(tl.int64) * seqlen_q + row, natural, mask=row < seqlen_q)


def tile_n(config: Fp8Config, k_block: int, one_scale: bool) -> int:
    """Keys per step: as configured, or the largest power of two below it that divides the scale block."""
    return config.block_n if one_scale else min(config.block_n, k_block & -k_block)


def _aligned(x: Tensor) -> Tensor:
    """Contiguous and on a 16-byte boundary, as TMA wants it; copies only when it has to."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _descriptor(x: Tensor, rows: int, cols: int) -> TensorDescriptor:
    """(rows, cols) blocks of a contiguous tensor seen as (everything else, last dimension); zeros outside."""
    width = x.shape[-1]
    return TensorDescriptor(x, [x.numel() // width, width], [width, 1], [rows, cols])


def forward(
    q8: Tensor,
    k8: Tensor,
    vt8: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    o: Tensor,
    *,
    q_block: int,
    k_block: int,
    softmax_scale: float,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    config: Fp8Config | None = None,
) -> Tensor:
    """Launch into `o`; returns lse (batch, heads, seqlen_q) float32. Arguments are already validated.

    Args:
        q8, k8: (batch, heads, seqlen, head_dim) fp8. vt8: (batch, heads_kv, head_dim, seqlen_k padded to 16) fp8.
        q_scale, k_scale, v_scale: float32 of shape (), (batch, heads) or (batch, heads, blocks).
        o: (batch, heads, seqlen_q, head_dim), any strides with last stride 1.
        window_right: 0 is causal, -1 is no bound.
    """
    batch, heads, sq, head_dim = q8.shape
    heads_kv, sk = k8.shape[1], k8.shape[2]
    lse = torch.empty(batch, heads, sq, dtype=torch.float32, device=q8.device)
    if lse.numel() == 0:
        return lse
    if sk == 0:
        o.zero_()
        return lse.fill_(float("-inf"))
    if max(batch * heads * sq, batch * heads_kv * sk) >= 1 << 31:
        raise UnsupportedError(
            f"fp8 attention counts rows of all heads in 32 bits, got batch {batch} x heads {heads} x seqlen "
            f"{max(sq, sk)}: split the batch"
        )
    if window_left >= sk - 1:
        window_left = -1
    if window_right >= sq - 1:
        window_right = -1
    config = config or lookup(head_dim, causal=window_right == 0, seqlen_q=sq, device=q8.device)
    m = config.block_m
    one_scale = k_scale.dim() < 3 and v_scale.dim() < 3
    n = tile_n(config, k_block, one_scale)
    (d, d2), (dv, dv2) = parts(head_dim, 256), parts(head_dim, 128)
    q8, k8, vt8 = _aligned(q8), _aligned(k8), _aligned(vt8)
    q_scale = expand_scales(q_scale, batch, heads, triton.cdiv(sq, q_block))
    k_scale = expand_scales(k_scale, batch, heads_kv, triton.cdiv(sk, k_block))
    v_scale = expand_scales(v_scale, batch, heads_kv, triton.cdiv(sk, k_block))
    together = 1
    if window_right >= 0:
        per_head = 2 * sk * head_dim
        together = max(1, min(64, _L2_SHARE // per_head)) * (heads // heads_kv)
    fmt = fp8_format(vt8.dtype)
    capped = softcap > 0
    arguments = (
        _descriptor(q8, m, d), _descriptor(q8, m, d2 or d), _descriptor(k8, n, d), _descriptor(k8, n, d2 or d),
        _descriptor(vt8, dv, n), _descriptor(vt8, dv2 or dv, n), o, lse, q_scale, k_scale, v_scale,
        *q_scale.stride(), *k_scale.stride(), *v_scale.stride(), *o.stride()[:3],
        batch, heads, heads_kv, sq, sk, head_dim, together, window_left, window_right,
        softmax_scale / softcap if capped else softmax_scale * LOG2E.value, softcap * LOG2E.value,
    )  # fmt: skip
    options = dict(
        M=m, N=n, D=d, D2=d2, DV=dv, DV2=dv2, Q_BLOCK=q_block, K_BLOCK=k_block,
        TAIL=window_right >= 0 or sk % n != 0, LEFT=window_left >= 0, RIGHT=window_right >= 0, SOFTCAP=capped,
        TWO_LEVEL=config.two_level, E5M2=fmt.name == "e5m2", SHIFT=fmt.p_shift,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    launch(fp8_attention_forward, triton.cdiv(sq, m) * batch * heads, arguments, options)
    return lse
