"""Keys and values in eight or four bits: `quantize_kv_cache`.

One scale per (batch, head) for all tokens, per token and head, or per page of tokens and head. The kernel reads the
cache where it lies, (batch, seqlen, heads, head_dim) with any strides of the first three, and writes codes in the same
order. Zeros, Inf and NaN: the policy of `scales.py` (fp8 keeps NaN in place, integers make their block NaN).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_accel.errors import InvalidInputError, shown
from gpu_accel.flash_attention3.launch import launch
from gpu_accel.transformer_engine import codec, formats, reference, scales
from gpu_accel.transformer_engine.checks import check_choice, check_strided
from gpu_accel.transformer_engine.codec import bits_of, encode, pack_pairs, scale_and_inverse
from gpu_accel.transformer_engine.quantizer import DTYPES, choose_backend, native_fp8
from gpu_accel.transformer_engine.schemes import Scheme
from gpu_accel.transformer_engine.sources import quickly

ELEMENTS = {"fp8": "e4m3", "fp8_e5m2": "e5m2", "int8": "int8", "int4": "int4"}
GRANULARITIES = ("head", "token", "page")
_INF = tl.constexpr(0x7F800000)


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedKVCache:
    """k, v: codes (batch, seqlen, heads, head_dim), float8, int8, or uint8 with two codes a byte.

    k_scale, v_scale: (batch, blocks, heads) float32, one for `tokens_per_scale` tokens each (the last may be short).
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor
    v_scale: Tensor
    dtype: str
    granularity: str
    tokens_per_scale: int
    head_dim: int

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
        """(k, v) as numbers, computed in float32."""
        pairs = ((self.k, self.k_scale), (self.v, self.v_scale))
        k, v = (_dequantize(codes, scale, self).to(dtype) for codes, scale in pairs)
        return k, v

    def __repr__(self) -> str:
        batch, seqlen, heads = self.k.shape[:3]
        return (
            f"QuantizedKVCache({self.dtype}, a scale a {self.granularity} ({self.tokens_per_scale} tokens), "
            f"shape={(batch, seqlen, heads, self.head_dim)}, {self.nbytes} bytes, {self.k.device})"
        )

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.k, self.v, self.k_scale, self.v_scale))


def _scheme(dtype: str) -> Scheme:
    return Scheme(element=ELEMENTS[dtype], block=(1, 0), scale="fp32")


def _dequantize(codes: Tensor, scale: Tensor, cache: QuantizedKVCache) -> Tensor:
    if cache.dtype == "int4":
        signed = formats.unpack_nibbles(codes, cache.head_dim).view(torch.int8)
        values = ((signed << 4) >> 4).float()
    elif cache.dtype == "int8":
        values = codes.float()
    else:
        values = formats.decode(codes, ELEMENTS[cache.dtype])
    rows = scale.repeat_interleave(max(1, cache.tokens_per_scale), 1)[:, : values.shape[1]]
    return values * rows[..., None]


@triton.jit
def _kv_tile(x, row, end, s_row, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, FINITE: tl.constexpr):
    """(values float32, bits of magnitudes) of ROWS tokens of one head; 0 from token `end` and column D on."""
    r = row + tl.arange(0, ROWS)
    c = tl.arange(0, COLS)
    mask = (r < end)[:, None] & (c < D)[None, :]
    t = tl.load(x + r.to(tl.int64)[:, None] * s_row + c[None, :], mask=mask, other=0.0).to(tl.float32)
    size = bits_of(t) & 0x7FFFFFFF
    if FINITE:
        size = tl.where(size < _INF, size, 0)
        t = tl.where(tl.abs(t) < float("inf"), t, float("nan"))
    return t, size


@triton.jit
def _kv_kernel(
    x, out, scale, seqlen, heads, s_batch, s_row, s_head, blocks, tokens,
    D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, PER_TOKEN: tl.constexpr, ELEMENT: tl.constexpr,
    LARGEST: tl.constexpr, FINITE: tl.constexpr, PACKED: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One block of tokens of one head, or (PER_TOKEN) ROWS tokens that have a scale each."""
    pid = tl.program_id(0).to(tl.int64)
    head = pid % heads
    block = pid // heads % blocks
    batch = pid // heads // blocks
    x += batch * s_batch + head * s_head
    WIDTH: tl.constexpr = (D + 1) // 2 if PACKED else D
    out += (batch * seqlen * heads + head) * WIDTH
    first = block * tokens
    end = tl.minimum(first + tokens, seqlen)
    inverse = 1.0
    if not PER_TOKEN:
        amax = 0
        for row in range(first, end, ROWS):
            t, size = _kv_tile(x, row, end, s_row, D, ROWS, COLS, FINITE)
            amax = tl.maximum(amax, tl.max(tl.max(size, 1), 0))
        stored, inverse = scale_and_inverse(amax, 1.0, 0, LARGEST, 0, 0)
        tl.store(scale + (batch * blocks + block) * heads + head, stored)
    for row in range(first, end, ROWS):
        t, size = _kv_tile(x, row, end, s_row, D, ROWS, COLS, FINITE)
        r = row + tl.arange(0, ROWS)
        if PER_TOKEN:
            stored, factors = scale_and_inverse(tl.max(size, 1), 1.0, 0, LARGEST, 0, 0)
            tl.store(scale + (batch * seqlen + r) * heads + head, stored, mask=r < end)
            y = t * factors[:, None]
        else:
            y = t * inverse
        codes = encode(y, 0, ELEMENT, False, NATIVE)
        if PACKED:
            codes = pack_pairs(tl.where((tl.arange(0, COLS) < D)[None, :], codes, 0).to(tl.uint8), ROWS, COLS)
            c = tl.arange(0, COLS // 2)
        else:
            c = tl.arange(0, COLS)
        pointers = out + r.to(tl.int64)[:, None] * (heads * WIDTH) + c[None, :]
        tl.store(pointers, codes, mask=(r < end)[:, None] & (c < WIDTH)[None, :])


def _tokens(granularity: str, seqlen: int, page_size: int) -> int:
    return {"head": max(1, seqlen), "token": 1, "page": min(page_size, max(1, seqlen))}[granularity]


def _quantize_one(x: Tensor, what: Scheme, granularity: str, tokens: int, backend: str) -> tuple[Tensor, Tensor]:
    batch, seqlen, heads, dim = x.shape
    blocks = max(1, triton.cdiv(seqlen, tokens)) if granularity == "head" else triton.cdiv(seqlen, tokens)
    if backend == "reference":
        return _reference(x, what, blocks, tokens)
    width = (dim + 1) // 2 if what.packed else dim
    out = torch.empty((batch, seqlen, heads, width), dtype=torch.uint8, device=x.device)
    scale = torch.ones((batch, blocks, heads), dtype=torch.float32, device=x.device)
    if not out.numel():
        return out, scale
    cols = triton.next_power_of_2(max(16, dim))
    per_token = granularity == "token"
    walked = 64 if per_token else tokens  # tokens of one program
    rows = max(1, min(triton.next_power_of_2(walked), 4096 // cols))
    programs = batch * heads * (triton.cdiv(seqlen, walked) if per_token else blocks)
    arguments = (x, out, scale, seqlen, heads, x.stride(0), x.stride(1), x.stride(2),
                 triton.cdiv(seqlen, walked) if per_token else blocks, walked)  # fmt: skip
    options = dict(
        D=dim, ROWS=rows, COLS=cols, PER_TOKEN=per_token, ELEMENT=codec.ELEMENTS[what.element], LARGEST=what.largest,
        FINITE=what.keeps_nan_in_place, PACKED=what.packed, NATIVE=native_fp8(x.device), enable_fp_fusion=False,
        num_warps=max(1, min(4, rows * cols // 1024)),
    )  # fmt: skip
    launch(_kv_kernel, programs, arguments, options)
    return out, scale


@torch.library.custom_op("gpu_accel::te_quantize_kv", mutates_args=())
def quantize_one_op(x: Tensor, dtype: str, granularity: str, tokens: int, backend: str) -> tuple[Tensor, Tensor]:
    """(codes (batch, seqlen, heads, width) as bytes, scales (batch, blocks, heads)) of keys or values."""
    return _quantize_one(x, _scheme(dtype), granularity, tokens, backend)


@quantize_one_op.register_fake
def _(x, dtype, granularity, tokens, backend):
    batch, seqlen, heads, dim = x.shape
    blocks = -(-seqlen // tokens)
    blocks = max(1, blocks) if granularity == "head" else blocks
    width = (dim + 1) // 2 if _scheme(dtype).packed else dim
    codes = x.new_empty((batch, seqlen, heads, width), dtype=torch.uint8)
    return codes, x.new_empty((batch, blocks, heads), dtype=torch.float32)


def _reference(x: Tensor, what: Scheme, blocks: int, tokens: int) -> tuple[Tensor, Tensor]:
    """The same in plain torch: every block of a head as one row of the per-row scheme."""
    batch, seqlen, heads, dim = x.shape
    padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, blocks * tokens - seqlen))
    rows = padded.view(batch, blocks, tokens, heads, dim).transpose(2, 3).reshape(batch * blocks * heads, tokens * dim)
    wide = what if not what.packed else what.with_(element="int8")
    bits = scales.amax_bits(rows, finite_only=what.keeps_nan_in_place)
    amax = bits.amax(1, keepdim=True) if bits.numel() else bits.new_zeros(rows.shape[0], 1)
    scale = scales.scale_fp32(amax.view(torch.float32), what.largest)
    if what.packed:  # codes of int4 are packed along head_dim, so they are made unpacked first
        scaled = rows.float() * scales.divide(1.0, scale, scale)
        codes = (scaled.nan_to_num(0.0).clamp(-7, 7).round().to(torch.int8).view(torch.uint8) & 0xF)  # fmt: skip
    else:
        codes = reference.quantize_reference(rows, wide).codes
    codes = codes.view(batch, blocks, heads, tokens, dim).transpose(2, 3).reshape(batch, blocks * tokens, heads, dim)
    codes = codes[:, :seqlen].contiguous()
    return formats.pack_nibbles(codes) if what.packed else codes, scale.view(batch, blocks, heads)


def quantize_kv_cache(
    k: Tensor,
    v: Tensor,
    *,
    dtype: str = "fp8",
    granularity: str = "token",
    page_size: int = 16,
    backend: str = "auto",
) -> QuantizedKVCache:
    """Quantise keys and values (batch, seqlen, heads, head_dim).

    Args:
        dtype: "fp8" (e4m3), "fp8_e5m2", "int8" or "int4" (symmetric, two a byte).
        granularity: what shares a scale within a head: all tokens ("head"), none ("token"), or `page_size` ("page").
        page_size: tokens of a page.

    Raises:
        InvalidInputError: shapes, dtypes or devices that do not fit, a last dimension that is not contiguous, an
            unknown dtype or granularity. HardwareError: backend="portable" without a GPU.
    """
    check_choice("dtype", dtype, ELEMENTS)
    check_choice("granularity", granularity, GRANULARITIES)
    if isinstance(page_size, bool) or not isinstance(page_size, int) or page_size < 1:
        raise InvalidInputError(f"page_size must be a positive integer, got {shown(page_size)}")
    for name, x in (("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 4:
            raise InvalidInputError(f"{name} must be a tensor (batch, seqlen, heads, head_dim)")
        check_strided(name, x)
        if x.dtype not in DTYPES:
            raise InvalidInputError(f"{name} must be float32, bfloat16 or float16, got {x.dtype}")
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            raise InvalidInputError(f"the last dimension of {name} must have stride 1: call .contiguous()")
    if k.shape != v.shape or k.device != v.device:
        raise InvalidInputError(
            f"k and v must agree, got {tuple(k.shape)} on {k.device}, {tuple(v.shape)} on {v.device}"
        )
    tokens = _tokens(granularity, k.shape[1], page_size)
    chosen = choose_backend(backend, k, "quantize_kv_cache")
    kept = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8, "int4": torch.uint8}[dtype]
    work = quantize_one_op if type(k) is not type(v) else quickly(quantize_one_op, k)
    made = [work(x.detach(), dtype, granularity, tokens, chosen) for x in (k, v)]
    codes = [c.view(kept) for c, _ in made]
    return QuantizedKVCache(
        k=codes[0], v=codes[1], k_scale=made[0][1], v_scale=made[1][1], dtype=dtype, granularity=granularity,
        tokens_per_scale=tokens, head_dim=k.shape[-1],
    )  # fmt: skip
