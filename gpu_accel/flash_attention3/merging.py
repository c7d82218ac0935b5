"""Merging partial attention results: what split-KV decoding and ring attention end with.

    lse = log sum_s exp(lse_s)          o = sum_s exp(lse_s - lse) o_s

A partial result of no keys has lse -inf and weighs nothing, whatever its o holds. Partials are merged in their order,
so the result has the same bits every time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_accel.compat import INTERPRET
from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.flash_attention3.backends import check_name
from gpu_accel.flash_attention3.device import LN2, LOG2E
from gpu_accel.flash_attention3.function import _on_device_of, nobody_watches, refuse_transforms
from gpu_accel.flash_attention3.launch import launch, next_power_of_2
from gpu_accel.flash_attention3.problem import (
    FLOAT_DTYPES,
    check_not_over,
    check_strided,
    check_written,
    share_memory,
)

_ELEMENTS = 2048  # of o in a program: 16 for each of 128 threads


def combine_reference(out_partial: Tensor, lse_partial: Tensor, *, dtype: torch.dtype | None = None):
    """:func:`combine` in plain torch, in float32, or in float64 where `dtype` or the partials say so."""
    compute = torch.float64 if torch.float64 in (dtype, out_partial.dtype) else torch.float32
    lse_s = lse_partial.to(compute)
    lse = torch.logsumexp(lse_s, 0) if len(lse_s) else lse_s.new_full(lse_s.shape[1:], float("-inf"))
    weight = torch.where(lse_s == float("-inf"), 0.0, torch.exp(lse_s - lse))
    weight = weight.transpose(2, 3)[..., None]
    o = torch.where(weight == 0, 0.0, out_partial.to(compute) * weight).sum(0)
    return o.to(dtype or out_partial.dtype), lse


@triton.jit(do_not_specialize=["seqlen", "heads"])
def combine_kernel(
    parts, lses, out, lse_out, p_s, p_b, p_t, p_h, p_d, l_s, l_b, l_h, l_t, o_b, o_t, o_h, o_d, lo_b, lo_h, lo_t,
    splits, seqlen, heads, rows,
    R: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """R rows (batch, token, head), heads fastest."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    live = row < rows
    h = row % heads
    t = (row // heads) % seqlen
    b = row // (heads * seqlen)
    d = tl.arange(0, D)
    mask = live[:, None] & (d < DIM)[None, :]
    part = parts + (b * p_b + t * p_t + h * p_h)[:, None] + d.to(tl.int64)[None, :] * p_d
    at = lses + b * l_b + h * l_h + t * l_t
    m = tl.full([R], float("-inf"), tl.float32)
    total = tl.zeros([R], tl.float32)
    acc = tl.zeros([R, D], tl.float32)
    for _ in range(0, splits):
        x = tl.load(at, mask=live, other=0.0) * LOG2E
        o = tl.load(part, mask=mask, other=0.0).to(tl.float32)
        m_new = tl.maximum(m, x)
        m_use = tl.where(m_new == float("-inf"), 0.0, m_new)
        weight = tl.exp2(x - m_use)
        alpha = tl.exp2(m - m_use)
        total = total * alpha + weight
        o = tl.where((x == float("-inf"))[:, None], 0.0, o)  # of no keys: may be anything
        acc = acc * alpha[:, None] + o * weight[:, None]
        m = m_new
        at += l_s
        part += p_s
    safe = tl.where(total == 0.0, 1.0, total)
    tl.store(
        out + (b * o_b + t * o_t + h * o_h)[:, None] + d.to(tl.int64)[None, :] * o_d,
        (acc / safe[:, None]).to(out.dtype.element_ty), mask=mask,
    )  # fmt: skip
    tl.store(lse_out + b * lo_b + h * lo_h + t * lo_t, (m + tl.log2(safe)) * LN2, mask=live)


def _check(out_partial: Tensor, lse_partial: Tensor, out: Tensor | None, out_dtype: torch.dtype | None) -> torch.dtype:
    for name, x, rank, layout in (
        ("out_partial", out_partial, 5, "(splits, batch, seqlen, heads, head_dim)"),
        ("lse_partial", lse_partial, 4, "(splits, batch, heads, seqlen)"),
    ):
        if not isinstance(x, Tensor):
            raise InvalidInputError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        check_strided(name, x)
        if x.dim() != rank:
            raise InvalidInputError(f"{name} must be {layout}, got shape {tuple(x.shape)}")
        if x.dtype not in FLOAT_DTYPES:
            raise InvalidInputError(f"{name} must be a float tensor of 16, 32 or 64 bits, got {x.dtype}")
    splits, batch, seqlen, heads, _ = out_partial.shape
    if tuple(lse_partial.shape) != (splits, batch, heads, seqlen):
        raise InvalidInputError(
            f"lse_partial must be (splits, batch, heads, seqlen) = {(splits, batch, heads, seqlen)} for out_partial "
            f"{tuple(out_partial.shape)}, got {tuple(lse_partial.shape)}"
        )
    if lse_partial.dtype not in (torch.float32, torch.float64):
        raise InvalidInputError(f"lse_partial must be float32, got {lse_partial.dtype}")
    if lse_partial.device != out_partial.device:
        raise InvalidInputError(f"partials must be on one device, got {out_partial.device} and {lse_partial.device}")
    if out_dtype is not None and out_dtype not in FLOAT_DTYPES:
        raise InvalidInputError(f"out_dtype must be a float dtype of 16, 32 or 64 bits, got {out_dtype!r}")
    if out is not None and not isinstance(out, Tensor):
        raise InvalidInputError(f"out must be a torch.Tensor, got {type(out).__name__}")
    dtype = out_dtype or (out.dtype if out is not None else out_partial.dtype)
    if out is not None and (
        tuple(out.shape) != tuple(out_partial.shape[1:]) or out.device != out_partial.device or out.dtype != dtype
    ):
        raise InvalidInputError(
            f"out must be {dtype} of shape {tuple(out_partial.shape[1:])} on {out_partial.device}, got {out.dtype} "
            f"{tuple(out.shape)} on {out.device}"
        )
    if out is not None:
        check_written("out", out)
        check_not_over("out", out, lse_partial=lse_partial)
        if share_memory(out, out_partial):
            for part in out_partial:  # one of them may be what is written
                check_not_over("out", out, out_partial=part)
    return dtype


def combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    *,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Merge attention over parts of the keys into attention over all of them.

    Args:
        out_partial: (splits, batch, seqlen, heads, head_dim), each part normalised by itself; float32 is usual. Any
            strides. Rows whose lse is -inf are not looked at.
        lse_partial: (splits, batch, heads, seqlen), float32, natural logarithm. Any strides. (FlashAttention-3's
            flash_attn_combine has the last two the other way round: pass lse_partial.transpose(2, 3).)
        out: where to write o; out_dtype: default that of `out`, or of out_partial.
        backend: "auto", "portable" or "reference" (plain torch). Not differentiable.

    Returns:
        o (batch, seqlen, heads, head_dim) and lse (batch, heads, seqlen) in float32. No part with a key: 0 and -inf.

    Raises:
        InvalidInputError: wrong shape, dtype or device. UnsupportedError: no such kernel, or a gradient is asked for.
    """
    check_name(backend)
    refuse_transforms("combine")
    dtype = _check(out_partial, lse_partial, out, out_dtype)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (out_partial, lse_partial, out)):
        raise UnsupportedError("combine has no backward: call it under torch.no_grad(), or detach the partials")
    if backend == "hopper":
        raise UnsupportedError("backend 'hopper' has no combine kernel: merging is bound by memory, take 'portable'")
    device = out_partial.device
    wide = torch.float64 in (out_partial.dtype, lse_partial.dtype, dtype)
    portable = not wide and (device.type == "cuda" or (device.type == "cpu" and INTERPRET))
    if not portable and (backend == "portable" or (backend == "auto" and device.type != "cpu")):
        raise UnsupportedError(
            "the Triton kernel merges float16, bfloat16 and float32 on a GPU (or in Triton's interpreter), got "
            f"{out_partial.dtype} to {dtype} on {device}: convert, or ask for backend='reference'"
        )
    name = "reference" if backend == "reference" or not portable else "portable"
    if name == "portable" and nobody_watches(out_partial, lse_partial):
        return _merge(out_partial, lse_partial, out, dtype)
    o, lse = combine_op(out_partial, lse_partial, dtype, name)
    return (o if out is None else out.copy_(o)), lse


@torch.library.custom_op("gpu_accel::combine", mutates_args=())
def combine_op(out_partial: Tensor, lse_partial: Tensor, dtype: torch.dtype, name: str) -> tuple[Tensor, Tensor]:
    """What torch.compile sees: a call that was checked."""
    if name == "reference":
        return combine_reference(out_partial, lse_partial, dtype=dtype)
    return _merge(out_partial, lse_partial, None, dtype)


@combine_op.register_fake
def _(out_partial, lse_partial, dtype, name):
    wide = name == "reference" and torch.float64 in (dtype, out_partial.dtype)
    lse = lse_partial.new_empty(lse_partial.shape[1:], dtype=torch.float64 if wide else torch.float32)
    return out_partial.new_empty(out_partial.shape[1:], dtype=dtype), lse


def _merge(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch the kernel."""
    device = out_partial.device
    splits, batch, seqlen, heads, dim = out_partial.shape
    o = torch.empty(batch, seqlen, heads, dim, dtype=dtype, device=device) if out is None else out
    lse = torch.empty(batch, heads, seqlen, dtype=torch.float32, device=device)
    rows = batch * seqlen * heads
    if not rows:
        return o, lse
    padded = next_power_of_2(max(dim, 1))
    tile = max(1, min(_ELEMENTS // padded, next_power_of_2(rows)))
    arguments = (
        out_partial, lse_partial, o, lse, *out_partial.stride(), *lse_partial.stride(), *o.stride(), *lse.stride(),
        splits, seqlen, heads, rows,
    )  # fmt: skip
    with _on_device_of(o):
        launch(combine_kernel, triton.cdiv(rows, tile), arguments, {"R": tile, "DIM": dim, "D": padded, "num_warps": 4})
    return o, lse
