"""Hedgehog with a window in fewer kernels than `windowed.py` has parts, forward.

    gpu_accel::tk_hedgehog_window(q, k, v, q_map, k_map, window_factor, linear_factor, window, scale, hopper) -> o

    features of q and k    a kernel each
    averages               a walk over the features, `window` steps late: of values, and what their weights sum to
    o                      softmax in the window, its largest scores on the way, and the sum of both parts

or, on Hopper with a window of 128 and maps of 64 features, all of it in one (`hedgehog_walk_kernel.py`).

`windowed.py` has the formula. Its parts read q and k once more for the largest scores, walk once more for sums of
weights, and write the window's result. Gradients are by those parts, which are computed again for them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gpu_accel.compat import INTERPRET
from gpu_accel.flash_attention3.launch import launch
from gpu_accel.flash_attention3.problem import check_first_gradient
from gpu_accel.thunderkittens import chunked, hedgehog_hopper, walk_hopper, window_kernels, windowed

_ROWS = 16 if INTERPRET else 64
_ONES = 64  # columns of ones that sum weights up: a tile of the kernels
_LAUNCH = dict(num_warps=4, num_stages=2)
_EARLY = True  # what the walk gave is asked for before the window is walked: 568 us for 591 (16 x 2048, 16 heads)
# What tests/gpu/test_windowed.py has passed on (H200, Triton 3.6.0): "auto" takes these kernels for these dtypes alone.
CHECKED: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
WHOLE = True  # whether `hedgehog_walk_kernel` does what it can: 345 us for 543 (16 x 2048 steps, 16 heads, H200)


def refusal(q: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> str | None:
    """Why these kernels cannot take this call, or None."""
    if cu_seqlens is not None:
        return "packed sequences (cu_seqlens) are not in this kernel"
    if v.dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 and float16, got {v.dtype}"
    if max(q.shape[3], v.shape[3]) > 128:
        return f"takes K and V up to 128, got {q.shape[3]} and {v.shape[3]}"
    return None


def taken(v: Tensor) -> bool:
    """Whether "auto" takes these kernels: seen right, and as many heads as fill a GPU, since sequences are not cut."""
    tiles = -(-v.shape[3] // 64)
    few = chunked.segments_for(v.shape[0], v.shape[2], tiles, -(-v.shape[1] // chunked.CHUNK)) > 1
    return v.dtype in CHECKED and not few


def _averages(left: Tensor, right: Tensor, v: Tensor, hopper: bool) -> tuple[Tensor, Tensor]:
    """(averages of v (batch, seqlen, heads, V), sums of weights (batch, heads, seqlen) float32)."""
    hopper = hopper and v.dtype == torch.bfloat16  # in float16 no GPU has run a walk that gives the sums of weights
    if hopper and v.numel() and walk_hopper.refusal(left, right, v, None, chunked.CHUNK) is None:
        sums = torch.empty(v.shape[0], v.shape[2], v.shape[1], dtype=torch.float32, device=v.device)
        o, _ = walk_hopper.walk(left, right, v, None, None, None, None, None, scale=1.0, segments=1,
                                norm=windowed.FLOOR, inner=sums)  # fmt: skip
        return o, sums
    tail = (None, None, None, None, 1.0, chunked.CHUNK, 0, "chunks")
    o, _ = chunked.chunked(left, right, v, *tail)
    ones = v.new_ones(*v.shape[:3], _ONES)
    weight = chunked.chunked(left, right, ones, *tail)[0][..., 0].float()
    return (o.float() / (weight + windowed.FLOOR)[..., None]).to(v.dtype), weight.transpose(1, 2).contiguous()


@torch.library.custom_op("gpu_accel::tk_hedgehog_window", mutates_args=())
def window_op(
    q: Tensor, k: Tensor, v: Tensor, q_map: Tensor, k_map: Tensor, window_factor: Tensor | None,
    linear_factor: Tensor | None, window: int, scale: float, hopper: bool,
) -> Tensor:  # fmt: skip
    """o (batch, seqlen, heads of v, V); arguments as of `hedgehog_attention`, checked there. hopper: the walk, too."""
    from gpu_accel.thunderkittens.features import hedgehog_op

    q, k, v = (chunked._unit(x) for x in (q, k, v))
    q_map, k_map = chunked._unit(q_map), chunked._unit(k_map)
    factors = [None if x is None else x.float().contiguous() for x in (window_factor, linear_factor)]
    if WHOLE and hopper and v.numel() and hedgehog_hopper.refusal(q, k, v, q_map, k_map, window, scale) is None:
        with chunked._device(v):
            return hedgehog_hopper.attend(q, k, v, q_map, k_map, factors[0], factors[1], scale, windowed.FLOOR)
    batch, seqlen, heads, value_dim = v.shape
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    late = min(window, seqlen)
    if o.numel():
        averages, weight = v[:, :0], v.new_empty(0, dtype=torch.float32)
        with chunked._device(v):
            if late < seqlen:
                left, right = hedgehog_op(q[:, late:], q_map), hedgehog_op(k[:, :-late], k_map)
                averages, weight = _averages(left, right, v[:, :-late], hopper)
            launch(
                window_kernels._window_join_kernel, batch * heads * -(-seqlen // _ROWS),
                (q, k, v, averages.contiguous(), weight, *factors, o, *(s for x in (q, k, v) for s in x.stride()[:3]),
                 seqlen, heads, heads // q.shape[2], late, scale * math.log2(math.e), windowed.FLOOR),
                dict(K=q.shape[3], V=value_dim, BT=_ROWS, BK=chunked._block(q.shape[3], 128),
                     BV=chunked._block(value_dim, 128), HAS_A=factors[0] is not None, HAS_B=factors[1] is not None,
                     PRECISION=chunked.precision(v.dtype), EARLY=_EARLY, **_LAUNCH),
            )  # fmt: skip
    return o


@window_op.register_fake
def _(q, k, v, q_map, k_map, window_factor, linear_factor, window, scale, hopper):
    return torch.empty(v.shape, dtype=v.dtype, device=v.device)


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:7])
    ctx.window, ctx.scale, ctx.hopper = inputs[7:]


def _gradients(ctx, do):
    from gpu_accel.thunderkittens.features import hedgehog_in_parts

    saved = ctx.saved_tensors
    check_first_gradient("Hedgehog's window in one kernel", do, *saved)
    given: list[Any] = [None if x is None else x.detach().requires_grad_() for x in saved]
    q, k, v, q_map, k_map, first, second = given
    with torch.enable_grad():
        o = hedgehog_in_parts(q, k, v, q_map, k_map, first, second, None, window=ctx.window,
                              scale=ctx.scale, backend="auto" if ctx.hopper else "portable", kernels=True)  # fmt: skip
    found = iter(torch.autograd.grad(o, [x for x in given if x is not None], do))
    return *(None if x is None else next(found) for x in given), None, None, None


window_op.register_autograd(_gradients, setup_context=_save)
