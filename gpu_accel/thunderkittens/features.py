"""Linear attention with feature maps: Based (arXiv 2402.18668) and Hedgehog (arXiv 2402.04347).

    fused_chunk_based(q, k, v)                      1 + x + x^2 / 2 of x = scale q'k, the Taylor series of exp
    hedgehog_attention(q, k, v, q_map, k_map)       softmax of a learned projection and of its negative

Both are weights of pairs that are products of features, so the sum over earlier steps is linear attention on the
features, and the sum of weights that it is divided by is linear attention on values of one. Features are made by torch
and written to memory; nothing else differs from `linear.py`.

Values must be finite, as in `linear.py`: a NaN or Inf of v reaches rows of its chunk before it as well; zero padding.

With `window=` the last tokens have softmax's weights instead, and both parts are divided by one sum (`windowed.py`).

The second-order part of Based has K^2 products x_i x_j, but x_i x_j and x_j x_i are the same number: with weight 1 for
i < j and 1 / sqrt(2) for i = j, half of them do. 16 dimensions become 1 + 16 + 136 = 153 features, not 273.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from gpu_accel.compat import INTERPRET
from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.flash_attention3.launch import launch, next_power_of_2
from gpu_accel.flash_attention3.problem import check_first_gradient, check_flag
from gpu_accel.flash_attention3.reference import without_autocast
from gpu_accel.thunderkittens import (
    based_hopper,
    based_kernel,
    chunked,
    feature_kernels,
    hedgehog_fused,
    walk_hopper,
    windowed,
)
from gpu_accel.thunderkittens.arguments import check_tensors, real
from gpu_accel.thunderkittens.linear import (
    LARGEST_DIM,
    _flags,
    _need,
    _refuse,
    _shape,
    _validate,
    choose,
    linear_attention,
    normalised_walk,
    takes_normalised_walk,
)

# What tests/gpu/test_thunderkittens.py has passed on (H100, Triton 3.6.0): "auto" takes the kernels for that alone.
BASED_HOPPER_CHECKED = True
HEDGEHOG_CHECKED = (torch.bfloat16, torch.float16)
_ONES = 64  # columns of ones that sum weights up: a tile of the kernels
_MAP_ROWS, _MAP_WARPS = 128, 8  # of a block of the feature map
_MAP_BLOCKS = 1  # of a program of it; 2 and 4 were right on an H200, and not timed
_BASED_KEYS = 16  # the most of K whose squared state stays in registers


def taylor_features(x: Tensor) -> Tensor:
    """(..., K) to (..., 1 + K + K (K + 1) / 2): products of two such rows are 1 + x'y + (x'y)^2 / 2."""
    wide = x if x.dtype == torch.float64 else x.float()
    i, j = torch.triu_indices(x.shape[-1], x.shape[-1], device=x.device)
    weight = wide.new_ones(i.shape).masked_fill(i == j, math.sqrt(0.5))
    pairs = wide[..., i] * wide[..., j] * weight
    return torch.cat([torch.ones_like(wide[..., :1]), wide, pairs], -1).to(x.dtype)


@without_autocast
def hedgehog_features(x: Tensor, mapping: Tensor) -> Tensor:
    """(batch, seqlen, heads, K) by (heads, K, F) to (batch, seqlen, heads, 2 F): softmax(x W) and softmax(-x W)."""
    projected = torch.einsum("bthk,hkf->bthf", x, mapping)
    projected = projected if x.dtype == torch.float64 else projected.float()
    return torch.cat([projected.softmax(-1), (-projected).softmax(-1)], -1).to(x.dtype)


@torch.library.custom_op("gpu_accel::tk_hedgehog_features", mutates_args=())
def hedgehog_op(x: Tensor, mapping: Tensor) -> Tensor:
    """`hedgehog_features` in one kernel; the projection is not rounded to the dtype of x."""
    x = chunked._unit(x)
    batch, seqlen, heads, key_dim = x.shape
    count = mapping.shape[2]
    out = torch.empty(batch, seqlen, heads, 2 * count, dtype=x.dtype, device=x.device)
    if out.numel():
        rows = 16 if INTERPRET else _MAP_ROWS
        with chunked._device(x):
            launch(
                feature_kernels._hedgehog_kernel, batch * heads * -(-seqlen // (rows * _MAP_BLOCKS)),
                (x, mapping, out, *x.stride()[:3], *mapping.stride(), seqlen, heads),
                dict(K=key_dim, F=count, BT=rows, BK=max(16, next_power_of_2(key_dim)),
                     BF=max(16, next_power_of_2(count)), PRECISION=chunked.precision(x.dtype), EACH=_MAP_BLOCKS,
                     num_warps=_MAP_WARPS),
            )  # fmt: skip
    return out


@hedgehog_op.register_fake
def _(x, mapping):
    return torch.empty(*x.shape[:3], 2 * mapping.shape[2], dtype=x.dtype, device=x.device)


def _hedgehog_gradients(ctx, dout):
    saved = ctx.saved_tensors
    check_first_gradient("the kernel of Hedgehog's features", dout, *saved)
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in saved]
        features = hedgehog_features(*leaves)
    return torch.autograd.grad(features, leaves, dout)


hedgehog_op.register_autograd(
    _hedgehog_gradients, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


def _normalised(q: Tensor, k: Tensor, v: Tensor, norm: bool, cu_seqlens: Tensor | None, backend: str) -> Tensor:
    """Linear attention with scale 1, divided by the sum of its weights."""
    if norm and takes_normalised_walk(q, k, v, cu_seqlens, backend):
        return normalised_walk(q, k, v, 1.0, 1e-6)
    o, _ = linear_attention(q, k, v, scale=1.0, cu_seqlens=cu_seqlens, backend=backend)
    if not norm:
        return o
    ones = v.new_ones(*v.shape[:3], _ONES)
    total, _ = linear_attention(q, k, ones, scale=1.0, cu_seqlens=cu_seqlens, backend=backend)
    wide = o if o.dtype == torch.float64 else o.float()
    return (wide / (total[..., :1].to(wide.dtype) + 1e-6)).to(v.dtype)


@torch.library.custom_op("gpu_accel::tk_based", mutates_args=())
def based_op(q: Tensor, k: Tensor, v: Tensor, scale: float, norm: bool, way: str) -> Tensor:
    """Based's attention of q, k (batch, seqlen, heads of q, K up to 16) and v, features in registers.

    way: "portable" (`based_kernel`), "hopper" (`based_walk_kernel`) or "hopper or portable".
    """
    q, k, v = chunked._unit(q), chunked._unit(k), chunked._unit(v)
    if way == "hopper" or (way == "hopper or portable" and based_hopper.refusal(q, k, v) is None):
        with chunked._device(v):
            return based_hopper.walk(q, k, v, scale, norm)
    batch, seqlen, heads, value_dim = v.shape
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if o.numel():
        block_v = chunked._block(value_dim)
        strides = [s for x in (q, k, v) for s in x.stride()[:3]]
        with chunked._device(v):
            launch(
                based_kernel._based_kernel, batch * heads * -(-value_dim // block_v),
                (q, k, v, o, *strides, seqlen, batch, heads, heads // q.shape[2], scale),
                dict(K=q.shape[3], V=value_dim, BT=chunked.CHUNK, BK=_BASED_KEYS, BV=block_v, NORM=norm,
                     PRECISION=chunked.precision(v.dtype), **_based_launch()),
            )  # fmt: skip
    return o


def _based_launch() -> dict:
    return dict(num_warps=8, num_stages=2)


@based_op.register_fake
def _(q, k, v, scale, norm, way):
    return v.new_empty(v.shape)


def _based_save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3])
    ctx.scale, ctx.norm = inputs[3:5]


def _based_gradients(ctx, do):
    """By the features in memory: gradients take them anyway."""
    saved = ctx.saved_tensors
    check_first_gradient("Based's attention by kernels", do, *saved)
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in saved)
        o = _based_by_features(q, k, v, ctx.scale, ctx.norm, None, "auto")
    return *torch.autograd.grad(o, (q, k, v), do), None, None, None


based_op.register_autograd(_based_gradients, setup_context=_based_save)


def _inside(cu_seqlens: Tensor | None, *tensors: Tensor) -> list[Tensor]:
    """Zeros behind the last sequence: gradients of features there are 0 times what lies there, which may be NaN."""
    if cu_seqlens is None:
        return list(tensors)
    inside = (torch.arange(tensors[0].shape[1], device=cu_seqlens.device) < cu_seqlens[-1])[None, :, None, None]
    return [torch.where(inside, x, 0.0) for x in tensors]


def _based_by_features(q, k, v, scale, norm, cu_seqlens, backend) -> Tensor:
    q, k = _inside(cu_seqlens, q, k)
    wide = q if q.dtype == torch.float64 else q.float()
    features = taylor_features((wide * scale).to(q.dtype) if q.dtype != torch.float64 else wide * scale)
    return _normalised(features, taylor_features(k), v, norm, cu_seqlens, backend)


def fused_chunk_based(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, use_norm: bool = True, *, window: int | None = None,
    cu_seqlens: Tensor | None = None, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """o_t = sum over s <= t of w_ts v_s, w = 1 + x + x^2 / 2 with x = scale q_t'k_s; divided by the sum of w.

    Args:
        q, k: (batch, seqlen, heads of q, K), K at most 21 (253 features; at most 256 are taken); v: (batch, seqlen,
            heads, V). scale: any number, K**-0.5 unless given. use_norm: whether to divide. cu_seqlens: as in
            `linear_attention`.
        window: for the last `window` tokens, t itself among them, w is exp(x), of which the series is what comes
            before; divided by the sum of both. The layers of Based (arXiv 2402.18668) are not like that: sliding
            windows are layers of their own there, between those of the series, which is
            `flash_attn_func(q, k, v, causal=True, window_size=(window - 1, 0))`.

    Returns:
        o (batch, seqlen, heads, V) in the dtype of v, differentiable in q, k and v.

    Raises:
        InvalidInputError: shapes or dtypes do not fit, K is too large, or a window without the norm. UnsupportedError:
            the backend cannot run here; "hopper" with a window also where flash_attention3's cannot.
    """
    (use_norm,) = _flags(use_norm=use_norm)
    check_tensors({"q": q})
    _need(q.dim() == 4, f"q must be (batch, seqlen, heads, K), got {_shape(q)}")
    count = 1 + q.shape[-1] + q.shape[-1] * (q.shape[-1] + 1) // 2
    if count > LARGEST_DIM:
        raise InvalidInputError(f"K is {q.shape[-1]}, which makes {count} features; at most {LARGEST_DIM} are taken")
    _validate(q, k, v, None, None, None, cu_seqlens, chunked.CHUNK)
    scale = chunked.default_scale(q.shape[-1]) if scale is None else real("scale", scale)
    if window is not None:
        window, scale = windowed.check_window(window), windowed.score_scale(scale, q.shape[-1])
        _need(use_norm, "with a window softmax's weights and the series are divided by one sum: use_norm=True")
        seen = v.dtype in windowed.WINDOW_CHECKED
        kernels = backend == "hopper" or choose(v, backend, seen, ("hopper",)) == "portable"
        given = backend if kernels else "reference"

        def series(q, k, v):
            return fused_chunk_based(q, k, v, scale, False, cu_seqlens=cu_seqlens, backend=given)

        return windowed.attention(q, k, v, q, k, series, window, scale=scale, kind="plain", cu_seqlens=cu_seqlens,
                                  backend=given, kernels=kernels)  # fmt: skip
    if backend == "hopper":
        _refuse("packed sequences are not in this kernel" if cu_seqlens is not None else based_hopper.refusal(q, k, v))
        return based_op(q, k, v, scale, use_norm, "hopper")
    small = q.shape[-1] <= _BASED_KEYS and cu_seqlens is None and q.dtype in (torch.bfloat16, torch.float16)
    fits = v.is_cuda and q.dtype == torch.bfloat16 and based_hopper.size_refusal(q, v) is None
    if small and backend == "auto" and BASED_HOPPER_CHECKED and fits:
        return based_op(q, k, v, scale, use_norm, "hopper or portable")
    if small and backend == "portable" and choose(v, backend) == "portable":
        return based_op(q, k, v, scale, use_norm, "portable")
    return _based_by_features(q, k, v, scale, use_norm, cu_seqlens, backend)


def parallel_based(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, use_norm: bool = True, *, backend: str = "auto"
) -> Tensor:
    """`fused_chunk_based` under the name of fla's quadratic kernel, which the paper compared with."""
    return fused_chunk_based(q, k, v, scale, use_norm, backend=backend)


def hedgehog_attention(
    q: Tensor, k: Tensor, v: Tensor, q_map: Tensor, k_map: Tensor, *, window: int | None = None,
    scale: float | None = None, window_factor: Tensor | None = None, linear_factor: Tensor | None = None,
    cu_seqlens: Tensor | None = None, fused: bool | None = None, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """Linear attention on learned features, divided by the sum of its weights.

    Args:
        q, k: (batch, seqlen, heads, K); v: (batch, seqlen, heads, V). q_map, k_map: (heads, K, F), F at most 128.
        window: the last `window` tokens, t itself among them, have the weights of softmax,
            window_factor exp(scale q_t'k_s - c_t) with c_t the largest score of the row in its window, and those
            before linear_factor phi(q_t)'phi(k_s); all are divided by one sum. So does LoLCATs (arXiv 2410.10254)
            with its "sliding window"; the window of its kernel in ThunderKittens moves in steps of 64 tokens instead,
            and has 65 to 128 of them. Gradients flow through c_t; of equal largest scores the first key has it.
        scale: of the window's scores, any number, K**-0.5 unless given. window_factor, linear_factor: (heads of v,),
            1 unless given; differentiable, and of any floating dtype.
        fused: with a window, its softmax and the sum of both parts in one kernel (16 bits, K and V up to 128, sequences
            of one length; on Hopper all of it, in bfloat16 with a window of 128 and F = 64), or by flash_attention3 and
            kernels around it. None: for "auto" in one where a card has seen it right and there are heads enough to fill
            it, else by several.

    Returns:
        o (batch, seqlen, heads, V) in the dtype of v, differentiable in all five.

    Raises:
        InvalidInputError: shapes or dtypes do not fit, or what belongs to a window is given without one.
        UnsupportedError: the backend cannot run here; "hopper" with a window also where flash_attention3's cannot.
    """
    check_tensors({"q": q, "k": k, "v": v, "q_map": q_map, "k_map": k_map})
    _need(q.dim() == 4 and k.shape == q.shape and k.dtype == q.dtype,
          f"q and k must be (batch, seqlen, heads, K), got {_shape(q)}, {_shape(k)}")  # fmt: skip
    for name, x in (("q_map", q_map), ("k_map", k_map)):
        _need(x.dim() == 3 and x.shape[:2] == q.shape[2:] and 0 < x.shape[2] <= LARGEST_DIM // 2 and x.dtype == q.dtype,
              f"{name} must be (heads, K, F) {tuple(q.shape[2:])} with F at most {LARGEST_DIM // 2} in {q.dtype}, got "
              f"{_shape(x)}")  # fmt: skip
    _need(q_map.shape == k_map.shape, "q_map and k_map must have one number F of features, got "
          f"{_shape(q_map)} and {_shape(k_map)}")  # fmt: skip
    _validate(q, k, v, None, None, None, cu_seqlens, chunked.CHUNK)
    _check_factors(v, window, scale, window_factor, linear_factor)
    fused = None if fused is None else check_flag("fused", fused)
    _need(fused is None or window is not None, "fused belongs to a window: give window=")
    if backend == "hopper" and (refusal := walk_hopper.machine_refusal(v)):
        _refuse(refusal)
    checked = HEDGEHOG_CHECKED if window is None else windowed.WINDOW_CHECKED
    kernels = backend == "hopper" or choose(v, backend, v.dtype in checked, ("hopper",)) == "portable"
    q, k = _inside(cu_seqlens, q, k)
    if window is None:
        features = _features_of(q, kernels)
        return _normalised(features(q, q_map), features(k, k_map), v, True, cu_seqlens, backend)
    window, scale = windowed.check_window(window), windowed.score_scale(scale, q.shape[-1])
    tensors = (q, k, v, q_map, k_map, window_factor, linear_factor)
    why = hedgehog_fused.refusal(q, v, cu_seqlens) if kernels else f"backend {backend!r} is not by kernels here"
    _need_fused(fused, why)
    if why is None and (backend == "auto" and hedgehog_fused.taken(v) if fused is None else fused):
        return hedgehog_fused.window_op(*tensors, window, scale, backend != "portable")
    return hedgehog_in_parts(*tensors, cu_seqlens, window=window, scale=scale, backend=backend, kernels=kernels)


def _need_fused(fused: bool | None, why: str | None) -> None:
    if fused and why is not None:
        raise UnsupportedError(f"fused=True: {why}; use fused=None")


def hedgehog_in_parts(
    q: Tensor, k: Tensor, v: Tensor, q_map: Tensor, k_map: Tensor, window_factor: Tensor | None,
    linear_factor: Tensor | None, cu_seqlens: Tensor | None, *, window: int, scale: float, backend: str, kernels: bool,
) -> Tensor:  # fmt: skip
    """Hedgehog with a window by `windowed.attention`; arguments are checked."""
    given = backend if kernels else "reference"
    features = _features_of(q, kernels)

    def linear(q, k, v):
        return linear_attention(q, k, v, scale=1.0, cu_seqlens=cu_seqlens, backend=given)[0]

    return windowed.attention(
        q, k, v, features(q, q_map), features(k, k_map), linear, window, scale=scale, kind="shifted",
        window_factor=window_factor, linear_factor=linear_factor, cu_seqlens=cu_seqlens, backend=given,
        kernels=kernels,
    )  # fmt: skip


def _features_of(q: Tensor, kernels: bool) -> Callable[[Tensor, Tensor], Tensor]:
    wide = q.shape[3] <= LARGEST_DIM and q.dtype in (torch.bfloat16, torch.float16)
    return hedgehog_op if wide and kernels else hedgehog_features


def _check_factors(v: Tensor, window: object, scale: object, *factors: Tensor | None) -> None:
    names = dict(zip(("window_factor", "linear_factor"), factors, strict=True))
    given = [name for name, x in ({"scale": scale} | names).items() if x is not None]
    belong = "belongs" if len(given) == 1 else "belong"
    _need(window is not None or not given, f"{' and '.join(given)} {belong} to a window: give window=")
    check_tensors({"v": v}, names)
    for name, x in names.items():
        _need(x is None or x.shape == v.shape[2:3], f"{name} must be (heads,) ({v.shape[2]},), got {_shape(x)}"
              if x is not None else "")  # fmt: skip
