"""Mamba-2's state-space duality (arXiv 2405.21060, sections 6 and 7) on the kernels of linear attention.

The recurrence h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t', y_t = C_t' h_t + D x_t is linear attention with q = C, k = B,
v = x, the gate dt A and the weight dt. Softplus, D and the gate z are elementwise torch around the kernels.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

import torch
from torch import Tensor

from gpu_accel.errors import InvalidInputError, shown
from gpu_accel.flash_attention3.function import refuse_second
from gpu_accel.thunderkittens import chunked, linear, walk_back, walk_hopper
from gpu_accel.thunderkittens.arguments import check_tensors
from gpu_accel.thunderkittens.linear import _flags, _need, linear_attention

_CHUNKS = (16, 32, 64)


def _kernel_chunk(chunk_size: int) -> int:
    """Results do not depend on the chunk; the kernels' tiles take at most 64 steps."""
    return max(c for c in _CHUNKS if c <= max(16, chunk_size))


def _limits(limit: Any) -> tuple[float, float]:
    """(low, high) of dt; either may be infinite, so that it limits nothing."""
    two = isinstance(limit, tuple | list) and len(limit) == 2
    if two and all(isinstance(x, numbers.Real) and not isinstance(x, bool) for x in limit):
        try:
            low, high = (float(x) for x in limit)
        except OverflowError:  # an integer or a fraction beyond float64
            low = high = math.nan
        if low <= high and low < math.inf and high > -math.inf:  # NaN fails
            return low, high
    raise InvalidInputError(f"dt_limit must be two numbers, the lower one first, got {shown(limit)}")


def mamba_chunk_scan_combined(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, D: Tensor | None = None,
    z: Tensor | None = None, dt_bias: Tensor | None = None, initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None, cu_seqlens: Tensor | None = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf), return_final_states: bool = False,
    return_varlen_states: bool = False, *, backend: str = "auto",
):  # fmt: skip
    """y of Mamba-2's scan, or (y, final states); names and order of mamba_ssm.

    Args:
        x: (batch, seqlen, heads, headdim) bfloat16, float16 or float32. dt: (batch, seqlen, heads); A: (heads,).
        B, C: (batch, seqlen, groups, dstate) in the dtype of x; groups divide heads.
        chunk_size: a power of two from 16; kept for its name, since the result does not depend on it and the kernels
            take at most 64 steps at once.
        D: (heads,) or (heads, headdim). z: the shape of x; the result is y * silu(z). dt_bias: (heads,).
        initial_states: (batch, heads, headdim, dstate), with cu_seqlens (sequences, ...).
        seq_idx: (batch, seqlen) integers: where the number changes, the state starts from zero.
        cu_seqlens: (sequences + 1,) with batch 1: as seq_idx, and there is a final state of each sequence, which
            return_final_states returns. Beside it seq_idx may say the same, as mamba_ssm wants both, or cut further.
        return_varlen_states: also the states of all sequences of cu_seqlens, as the last of what is returned; then
            final states are (1, ...), that of the last sequence that has steps, as in mamba_ssm. Differentiable.
        dt_softplus, dt_limit: dt = clamp(softplus(dt + dt_bias), *dt_limit), so that without softplus the default
            makes 0 of a negative dt, as mamba_ssm does; (-inf, inf) leaves dt as it is.

    Raises:
        InvalidInputError: shapes or dtypes do not fit. UnsupportedError: the backend cannot run here.
    """
    check_tensors(
        {"x": x, "dt": dt, "A": A, "B": B, "C": C},
        {"D": D, "z": z, "dt_bias": dt_bias, "initial_states": initial_states, "seq_idx": seq_idx,
         "cu_seqlens": cu_seqlens}, ("seq_idx", "cu_seqlens"),
    )  # fmt: skip
    _need(x.dim() == 4, f"x must be (batch, seqlen, heads, headdim), got {tuple(x.shape)}")
    heads, headdim = x.shape[2:]
    _need(dt.shape == x.shape[:3], f"dt must be (batch, seqlen, heads) {tuple(x.shape[:3])}, got {tuple(dt.shape)}")
    for name, t in (("A", A), ("dt_bias", dt_bias)):
        _need(t is None or t.shape == (heads,), f"{name} must be (heads,) ({heads},)")
    _need(B.dim() == 4 and B.shape == C.shape, f"B and C must be (batch, seqlen, groups, dstate), got "
          f"{tuple(B.shape)} and {tuple(C.shape)}")  # fmt: skip
    _need(isinstance(chunk_size, int) and chunk_size >= 16 and chunk_size & (chunk_size - 1) == 0,
          f"chunk_size must be a power of two from 16, got {shown(chunk_size)}")  # fmt: skip
    low, high = _limits(dt_limit)
    dt_softplus, return_final_states, return_varlen_states = _flags(
        dt_softplus=dt_softplus, return_final_states=return_final_states, return_varlen_states=return_varlen_states
    )
    _need(not return_varlen_states or cu_seqlens is not None, "return_varlen_states needs cu_seqlens")
    _need(D is None or D.shape in ((heads,), (heads, headdim)), "D must be (heads,) or (heads, headdim)")
    _need(z is None or z.shape == x.shape, "z must have the shape of x")
    _need(seq_idx is None or seq_idx.shape == x.shape[:2], f"seq_idx must be (batch, seqlen) {tuple(x.shape[:2])}")
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    dt = dt.to(wide)
    dt = dt if dt_bias is None else dt + dt_bias.to(wide)
    dt = torch.nn.functional.softplus(dt) if dt_softplus else dt
    least = 0.0 if dt_softplus else -math.inf  # what dt is not below anyway
    low = -math.inf if low <= least else low
    chunk = _kernel_chunk(chunk_size)
    if seq_idx is None and cu_seqlens is None and initial_states is None and _walks(x, backend):
        linear._validate(C, B, x, dt, dt, None, None, chunk)
        if backend == "hopper":
            linear._refuse(walk_hopper.refusal(C, B, x, None, chunk))
        y, final = scan_op(C, B, x, dt, A.to(wide), low, high, chunk)
        y = _finished(x, y, D, z, wide)
        return (y, final.transpose(2, 3)) if return_final_states else y
    dt = _limited(dt, low, high)
    gates = dt * A.to(wide)
    if seq_idx is not None:
        fresh = torch.zeros_like(seq_idx, dtype=torch.bool)
        fresh[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
        if cu_seqlens is not None:  # a sequence begins with its own state, whatever number came before it
            fresh &= ~torch.isin(torch.arange(x.shape[1], device=x.device), cu_seqlens)
        gates = gates.masked_fill(fresh[..., None], -torch.inf)
    _need(initial_states is None or initial_states.dim() == 4, "initial_states must be (batch, heads, headdim, dstate)")
    initial = None if initial_states is None else initial_states.transpose(2, 3)
    y, final = linear_attention(
        C, B, x, g=gates, w=dt, scale=1.0, initial_state=initial, cu_seqlens=cu_seqlens, chunk=chunk, backend=backend,
    )  # fmt: skip
    y = _finished(x, y, D, z, wide)
    final = final.transpose(2, 3)
    if not return_varlen_states:
        return (y, final) if return_final_states else y
    if not return_final_states:
        return y, final
    assert cu_seqlens is not None
    last = torch.searchsorted(cu_seqlens, cu_seqlens[-1:]).sub(1).clamp(min=0)  # behind it there are none with steps
    return y, final.index_select(0, last), final


def _limited(dt: Tensor, low: float, high: float) -> Tensor:
    return dt.clamp(low, high) if (low, high) != (-math.inf, math.inf) else dt


def _finished(x: Tensor, y: Tensor, D: Tensor | None, z: Tensor | None, wide: torch.dtype) -> Tensor:
    """y with D x, times silu(z)."""
    if D is not None:
        y = (y.to(wide) + x.to(wide) * (D if D.dim() == 2 else D[:, None]).to(wide)).to(x.dtype)
    return y if z is None else (y.to(wide) * torch.nn.functional.silu(z.to(wide))).to(x.dtype)


def _walks(x: Tensor, backend: str) -> bool:
    """Whether `scan_op` is to run, which makes gates and their gradients with everything else."""
    taken = backend == "auto" and linear.GPU_CHECKED and linear.HOPPER_CHECKED
    return (taken or backend == "hopper") and x.dtype in (torch.bfloat16, torch.float16) and x.is_cuda


def _segments(v: Tensor, tiles: int, chunk: int) -> int:
    return chunked.segments_for(v.shape[0], v.shape[2], tiles, -(-v.shape[1] // chunk))


@torch.library.custom_op("gpu_accel::tk_mamba", mutates_args=())
def scan_op(
    q: Tensor, k: Tensor, v: Tensor, dt: Tensor, rates: Tensor, low: float, high: float, chunk: int
) -> tuple[Tensor, Tensor]:
    """Linear attention with weights w = clamp(dt, low, high) and gates w * rates (heads,): (o, final state).

    One walk, whose gates are made on the way; where it cannot run, as `chunked` with gates made beforehand.
    """
    q, k, v = (chunked._unit(x) for x in (q, k, v))
    with chunked._device(v):
        if v.numel() and walk_hopper.refusal(q, k, v, None, chunk) is None:
            tiles = -(-v.shape[3] // walk_hopper.walk_config(q.shape[3], v.shape[3]).block_v)
            if _segments(v, tiles, chunk) == 1:
                limited = (rates.contiguous(), low, high)
                return walk_hopper.walk(q, k, v, dt, dt, None, None, None, scale=1.0, segments=1, rates=limited)
    w = _limited(dt, low, high)
    way = "hopper or walk" if v.dtype == torch.bfloat16 else "hopper or chunks"
    return chunked.chunked._init_fn(q, k, v, w * rates, w, None, None, 1.0, chunk, 0, way)


@scan_op.register_fake
def _(q, k, v, dt, rates, low, high, chunk):
    return v.new_empty(v.shape), v.new_empty(chunked._state_shape(k, v, None), dtype=torch.float32)


@torch.library.custom_op("gpu_accel::tk_mamba_backward", mutates_args=())
def scan_backward_op(
    do: Tensor, dfinal: Tensor | None, q: Tensor, k: Tensor, v: Tensor, dt: Tensor, rates: Tensor, low: float,
    high: float, chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, dt and rates."""
    do, q, k, v = (chunked._unit(x) for x in (do, q, k, v))
    with chunked._device(v):
        segments = _segments(v, -(-min(q.shape[3], v.shape[3]) // 64), chunk) if v.numel() else 0
        unseen = walk_back.unseen(q.shape[3], v.shape[3], True, dfinal is not None, segments)
        if segments == 1 and not unseen and walk_back.refusal(q, k, v, None, chunk, 1.0, False) is None:
            dfinal = None if dfinal is None else dfinal.contiguous()
            limited = (rates.contiguous(), low, high)
            dq, dk, dv, drates, ddt, _ = walk_back.gradients(
                do, dfinal, q, k, v, dt, dt, None, None, None, scale=1.0, segments=1, rates=limited
            )
            return dq, dk, dv, ddt, drates
    w = _limited(dt, low, high)
    dq, dk, dv, dg, dw, _ = chunked.chunked_backward._init_fn(
        do, dfinal, q, k, v, w * rates, w, None, None, 1.0, chunk, 0, True, "hopper or chunks"
    )
    return dq, dk, dv, torch.where((dt >= low) & (dt <= high), dw + dg * rates, 0.0), (dg * w).sum((0, 1))


@scan_backward_op.register_fake
def _(do, dfinal, q, k, v, dt, rates, low, high, chunk):
    return tuple(x.new_empty(x.shape) for x in (q, k, v, dt, rates))


refuse_second(scan_backward_op, "Mamba-2 by kernels")


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:5])
    ctx.limits, ctx.shape = inputs[5:], output[0].shape
    ctx.set_materialize_grads(False)


def _gradients(ctx, do, dfinal):
    saved = ctx.saved_tensors
    do = saved[2].new_zeros(ctx.shape) if do is None else do
    return *scan_backward_op(do, dfinal, *saved, *ctx.limits), None, None, None


scan_op.register_autograd(_gradients, setup_context=_save)


def mamba_scan_recurrent(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None = None, z: Tensor | None = None,
    dt_bias: Tensor | None = None, initial_states: Tensor | None = None, seq_idx: Tensor | None = None,
    dt_softplus: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same as one loop over time, in the dtype it is given: the definition, for tests. (y, final states)."""
    groups = x.shape[2] // max(1, B.shape[2])
    B, C = (t.repeat_interleave(groups, 2) for t in (B, C))
    dt = dt if dt_bias is None else dt + dt_bias
    dt = torch.nn.functional.softplus(dt) if dt_softplus else dt
    h = x.new_zeros(x.shape[0], *x.shape[2:], B.shape[3]) if initial_states is None else initial_states
    ys = []
    for t in range(x.shape[1]):
        if seq_idx is not None and t:
            h = torch.where((seq_idx[:, t] == seq_idx[:, t - 1])[:, None, None, None], h, 0.0)
        h = h * (dt[:, t] * A).exp()[..., None, None] + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        ys.append((h * C[:, t, :, None]).sum(-1))
    y = torch.stack(ys, 1)
    y = y if D is None else y + x * (D if D.dim() == 2 else D[:, None])
    return (y if z is None else y * torch.nn.functional.silu(z)), h
