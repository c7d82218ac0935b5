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
    if low > least or high < math.inf:
        dt = dt.clamp(low, high)
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
        C, B, x, g=gates, w=dt, scale=1.0, initial_state=initial, cu_seqlens=cu_seqlens,
        chunk=_kernel_chunk(chunk_size), backend=backend,
    )  # fmt: skip
    if D is not None:
        y = (y.to(wide) + x.to(wide) * (D if D.dim() == 2 else D[:, None]).to(wide)).to(x.dtype)
    if z is not None:
        y = (y.to(wide) * torch.nn.functional.silu(z.to(wide))).to(x.dtype)
    final = final.transpose(2, 3)
    if not return_varlen_states:
        return (y, final) if return_final_states else y
    if not return_final_states:
        return y, final
    assert cu_seqlens is not None
    last = torch.searchsorted(cu_seqlens, cu_seqlens[-1:]).sub(1).clamp(min=0)  # behind it there are none with steps
    return y, final.index_select(0, last), final


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
