"""Host side of the Hopper backward: which problems it takes, its configurations, and the three launches of a call.

head_dim up to 128                                              head_dim 129 to 256
prepare     lse in base 2 and delta = rowsum(do * o) - dlse in  prepare  the same, without the sum
            one padded array; zeroes the float32 sum of dQ      dkdv     dK and dV
main        dK and dV, and dQ by atomic adds into that sum      dq       dQ
dq_finish   dQ = softmax_scale * sum, in the order and dtype of q
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .features import NONE, Features
from .gluon_launch import (
    addressable,
    fragment_map,
    heads_per_group,
    machine_refusal,
    number_map,
    programs_for,
    tensor_map,
    tile_counter,
)
from .hopper import modifier_arguments, refuse_modifiers
from .hopper_blocks import block_table
from .launch import launch
from .modifiers import device_function
from .problem import Problem, effective_window

NAME = "hopper"
KERNEL = "Gluon, warp-specialised, wgmma and TMA (sm_90a)"
_LOG2_E = 1.4426950408889634
_KEYS = 128  # keys of a tile
_SHORT = 1024  # causal calls of so many keys gain nothing by `early`: at 512 it was 2 % slower (H200)
_SHORT_FULL = 512  # up to here full calls at head_dim 64 gain by the other two choices (H200: 0.4 and 2 %)
MOST_HEAD_DIM = 256
_PREPARED = 4096  # numbers of o, and of dQ that are zeroed, in a program of `prepare`
_PIECE = 256  # of them side by side, of several heads
FEATURES = frozenset({"sinks", "alibi_slopes", "score_mod", "score_mod_grad", "mask_mod", "block_mask"})
_COMPILER = dict(num_warps=4, maxnreg=168)


@dataclass(frozen=True, kw_only=True)
class BackwardConfig:
    """Tiles and switches of one backward kernel; `*_slots` are buffers of a whole tile of K and of V.

    `share`: bytes of rows and of their dQ that the heads walked together may hold. `apart`: dQ in a warpgroup of its
    own (hopper_backward_apart.py), without turns; with it `early`, exponentials under dP and not behind S, and `ahead`,
    a queue's next tile drawn while this one's first rows come. `named` and `lean` are for ring attention's kernel: rows
    freed on named barriers, a warp at a time; fewer meetings.
    """

    head_dim: int
    block_m: int
    k_slots: int
    v_slots: int
    ping_pong: bool
    preload: bool
    dynamic: bool
    named: bool = False
    lean: bool = False
    share: int = 32 << 20
    apart: bool = False
    early: bool = False
    ahead: bool = False


@dataclass(frozen=True, kw_only=True)
class TwoPassConfig:
    """Switches of the two kernels for head_dim above 128, whose tiles are 64 keys and 128 query rows."""

    dynamic: bool
    head_dim: int = 256


def exponentials_early(causal: bool, seqlen_k: int, head_dim: int = 128) -> bool:
    """Whether the kernels with dQ apart take exponentials under dP, and not behind S."""
    return seqlen_k > _SHORT if causal else head_dim > 64 or seqlen_k > _SHORT_FULL


def backward_config(
    head_dim: int,
    *,
    causal: bool,
    steps_of_64: bool = False,
    plain: bool = False,
    apart: bool = False,
    seqlen_k: int = 1 << 20,
) -> BackwardConfig | TwoPassConfig:
    """The configuration for a head_dim up to 256 (rounded up to 64, 128 or 256 by zero fill).

    `steps_of_64` query rows are needed: a soft cap wants registers for 1 - tanh^2 that 128 rows at head_dim 64 do not
    leave, and a block mask's query blocks may be no multiples of 128. `apart`: the call is one that the kernel with dQ
    apart takes (`_plain`). `plain`: `named` and `lean`, for ring attention's kernel.
    """
    if head_dim > 128:
        return TwoPassConfig(dynamic=causal)
    padded = 64 if head_dim <= 64 and not steps_of_64 else 128
    # readings of an H200 with dQ apart: a queue for full calls 1.4 and 2.7 % at head_dim 64 with 1k and 2k keys, -2 to
    # -4 % at 128; 16 MB together 0.5 and 1.8 % at 64 causal, 0.2 % at 128, -2 % with 8k keys
    queued = apart and padded == 64 and seqlen_k > _SHORT_FULL
    return BackwardConfig(
        head_dim=padded,
        block_m=128 if padded == 64 else 64,
        k_slots=2,
        v_slots=2 if padded == 64 else 1,
        ping_pong=padded == 128,
        preload=padded == 128,
        dynamic=causal or queued,
        named=plain,
        lean=plain,
        share=(16 if apart and causal and seqlen_k <= _SHORT else 32) << 20,
        apart=apart,
        early=apart and exponentials_early(causal, seqlen_k, padded),
    )


def _plain(features: frozenset[str], *, bounded: bool, packed: bool) -> bool:
    """Dense, full or causal (not `bounded` by a window or a soft cap), no modifiers: what dQ apart is written for."""
    return not bounded and not packed and features <= {"sinks", "batch_invariant"}


def refuse(problem: Problem) -> str | None:
    """Why this backward cannot run the problem, or None."""
    if problem.deterministic and problem.head_dim <= 128:
        return "adds dq with atomics, in an order that changes from run to run, and deterministic was asked for"
    if problem.head_dim > MOST_HEAD_DIM:
        return f"takes head_dim up to {MOST_HEAD_DIM}, got {problem.head_dim}"
    if problem.varlen and problem.seqlen_k == 0 and "sinks" in problem.features:
        return "has no kernel for packed sequences of which none has a key"
    if problem.head_dim != problem.head_dim_v:
        return "head_dim of v must equal that of q and k"
    if problem.varlen and problem.features & {"alibi_slopes", "score_mod", "mask_mod"}:
        return "does alibi_slopes, score_mod and mask_mod of dense tensors only"
    return refuse_modifiers(problem, FEATURES - {"sinks"}) or machine_refusal(problem)


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    dlse: Tensor | None = None,
    softmax_scale: float,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    features: Features = NONE,
    config: BackwardConfig | TwoPassConfig | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of attention of (batch, seqlen, heads, head_dim), or packed (total, heads, head_dim), tensors on sm_90.

    Args:
        do, o: gradient and result of the forward, like q. Any strides; what the copy engine can't address, expanded
            dimensions for one, is copied once.
        q, k, v: inputs of the forward; heads is a multiple of heads_kv.
        lse: (batch, heads, seqlen_q), packed (heads, total_q), float32, natural logarithm, -inf for rows that see
            nothing, whose gradient is 0.
        dlse: gradient of lse, like it, or None.
        softmax_scale, window_left, window_right, softcap: as in the forward.
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k: as in the forward. With `seqused_*`, rows that do not count
            are zeroed in copies of q, k, v and do first: they may hold NaN.
        features: sinks, which lse includes; of dense tensors also biases, modifiers and block masks. score_mod_grad is
            applied to P and multiplied by dP - delta afterwards: it must be linear in its gradient.
        config: tiles to use instead of the tuned ones.

    Returns:
        dq, dk, dv, and with sinks dsinks (heads,): contiguous, shaped like q, k, v and of their dtype. Up to head_dim
        128 dq differs in the last bit from run to run; everything else does not change.
    """
    sinks = features.sinks
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    packed = cu_seqlens_q is not None
    if q.numel() == 0 or k.numel() == 0 or (cu_seqlens_q is not None and cu_seqlens_q.shape[0] == 1):
        nothing = (dq.zero_(), dk.zero_(), dv.zero_())
        return nothing if sinks is None else (*nothing, _without_keys(sinks, dlse, packed))
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        do, q = (_zeroed(x, cu_seqlens_q, seqused_q) for x in (do, q))
        k, v = (_zeroed(x, cu_seqlens_k, seqused_k) for x in (k, v))
        do, q, k, v, o, lse = (x.unsqueeze(0) for x in (do, q, k, v, o, lse))
        dlse = None if dlse is None else dlse.unsqueeze(0)
        ends = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
        tables = _packed_tables(q, k, *ends, window_left, window_right)
        window_left, window_right = -1, -1
    else:
        tables = None
        window_left, window_right = effective_window(window_left, window_right, q.shape[1], k.shape[1])
    do, q, k, v = (addressable(x) for x in (do, q, k, v))
    o = o if o.stride(-1) == 1 else o.contiguous()
    lse = lse.contiguous()
    dlse = None if dlse is None else dlse.to(torch.float32).contiguous()
    causal = window_right >= 0
    if config is None:
        bounded = window_left >= 0 or window_right > 0 or softcap > 0
        apart = _plain(features.names(), bounded=bounded, packed=packed)
        short = _short(softcap, features.block_size)
        config = backward_config(
            q.shape[-1], causal=causal, steps_of_64=short, apart=apart, seqlen_k=k.shape[1]
        )
    if packed or features.block_lists:
        config = replace(config, dynamic=True)
    softmax_scale = float(softmax_scale)
    scale, cap_in, cap_out = softmax_scale * _LOG2_E, 0.0, None
    natural = features.alibi_slopes is not None or bool(features.score_mod)
    if natural:
        scale, cap_in = _LOG2_E, softmax_scale
    if softcap > 0:
        scale, cap_in = _LOG2_E if natural else softcap * _LOG2_E, softmax_scale / softcap
        cap_out = softcap if natural else None
    run = _two_kernels if isinstance(config, TwoPassConfig) else _one_kernel
    stat = run(
        (do, q, k, v, o, lse, dlse),
        tuple(x.unsqueeze(0) if packed else x for x in (dq, dk, dv)),
        config,
        window=(window_left, window_right),
        scales=(softmax_scale, scale, cap_in),
        masks=dict(CAUSAL=causal, WINDOW=window_left >= 0, SOFTCAP=softcap > 0),
        features=features,
        cap_out=cap_out,
        tables=tables,
    )
    return (dq, dk, dv) if sinks is None else (dq, dk, dv, _sink_gradient(sinks, stat))


def _short(softcap: float, block_size: tuple[int, int]) -> bool:
    return softcap > 0 or block_size[0] % _KEYS > 0


def _functions(features: Features) -> dict:
    names = {"SCORE_MOD": "score_mod", "SCORE_MOD_GRAD": "score_mod_grad", "MASK_MOD": "mask_mod"}
    return {constant: device_function(getattr(features, name)) for constant, name in names.items()}


def _modifiers(features: Features, cap_out: float | None, shape: tuple[int, int, int] | None) -> tuple:
    """What the kernels call slopes, slopes_sb, aux, cap_out, table_width, table_sb, table_sh."""
    slopes, slopes_sb, aux, *table = modifier_arguments(features, shape)
    return slopes, slopes_sb, aux, cap_out, *table


def _sink_gradient(sinks: Tensor, stat: Tensor) -> Tensor:
    """-(probability of the sink) * delta, summed over batch and rows: (heads,). Rows that do not exist have lse inf."""
    lse, delta = stat.unbind(3)
    return -(torch.exp2(sinks.view(1, -1, 1, 1) * _LOG2_E - lse) * delta).sum((0, 2, 3))


def _without_keys(sinks: Tensor, dlse: Tensor | None, packed: bool) -> Tensor:
    """The sinks' gradient where there are no keys: lse is the sink. Packed: there are no sequences."""
    return torch.zeros_like(sinks) if dlse is None or packed else dlse.to(sinks.dtype).sum((0, 2))


def _zeroed(x: Tensor, cu: Tensor, used: Tensor | None) -> Tensor:
    """x, or a copy with zeros in the rows of (total, ...) that do not count. Never waits for the device."""
    if used is None:
        return x
    row = torch.arange(x.shape[0], device=x.device, dtype=torch.int32)
    at = (torch.searchsorted(cu, row, right=True) - 1).clamp_(0, used.shape[0] - 1)
    return torch.where((row - cu[at] < used[at])[:, None, None], x, 0.0)


def _packed_tables(q, k, cu_q, cu_k, used_q, used_k, left: int, right: int) -> tuple[Tensor, Tensor | None]:
    """The tables of hopper_backward_packed.py: queries seen by keys, and (above head_dim 128) the other way round."""
    seen_by_keys = _intervals(k, cu_q, cu_k, used_q, used_k, left, right)
    if q.shape[-1] <= 128:
        return seen_by_keys, None
    return seen_by_keys, _intervals(q, cu_k, cu_q, used_k, used_q, right, left)


def _intervals(k: Tensor, cu_q: Tensor, cu_k: Tensor, used_q, used_k, left: int, right: int) -> Tensor:
    """Which queries see each key."""
    from .hopper_backward_packed import fill_key_intervals, table_size

    num_n, batches = -(-k.shape[1] // _KEYS), cu_k.shape[0] - 1
    table = torch.empty(table_size(num_n), dtype=torch.int32, device=k.device)
    launch(
        fill_key_intervals,
        2 * num_n,
        (table, cu_q, cu_k, used_q, used_k, batches, left, right, num_n),
        dict(STEPS=batches.bit_length(), USED_Q=used_q is not None, USED_K=used_k is not None, num_warps=2),
    )
    return table


def _prepare(inputs: tuple, blocks: int, rows: int, d: int, dq_sum: Tensor | None) -> Tensor:
    """lse in base 2 and delta: (batch, heads, blocks, 2, rows) float32. Zeroes dq_sum."""
    from .hopper_backward_finish import prepare

    do, q, _, _, o, lse, dlse = inputs
    batch, seqlen_q, heads, head_dim = q.shape
    stat = torch.empty((batch, heads, blocks, 2, rows), dtype=torch.float32, device=q.device)
    together = min(_PIECE // d, heads & -heads)  # powers of two
    per_program = min(rows, _PREPARED // (together * d))
    launch(
        prepare,
        batch * (heads // together) * blocks * (rows // per_program),
        (o, do, lse, lse if dlse is None else dlse, stat, stat if dq_sum is None else dq_sum, *o.stride()[:3],
         *do.stride()[:3], heads, seqlen_q, blocks, head_dim),
        dict(D=d, M=rows, ROWS=per_program, HEADS=together, MASK_D=head_dim != d, DLSE=dlse is not None,
             ZERO=dq_sum is not None, num_warps=4),
    )  # fmt: skip
    return stat


def _finish(dq_sum: Tensor, dq: Tensor, softmax_scale: float, d: int, m: int) -> None:
    """dq (batch, seqlen, heads, head_dim) from its sums (batch, heads, blocks, 2, 4096)."""
    from .hopper_backward_finish import dq_finish

    batch, seqlen_q, heads, head_dim = dq.shape
    num_m = dq_sum.shape[2]
    launch(
        dq_finish,
        batch * heads * num_m * 2,
        (dq_sum, dq, *dq.stride()[:3], heads, seqlen_q, num_m, head_dim, softmax_scale),
        dict(D=d, M=m, MASK_D=head_dim != d, num_warps=4),
    )


def walk(q: Tensor, k: Tensor, config: BackwardConfig, *, share: int | None = None) -> tuple[int, ...]:
    """What tells a kernel of one pass how to go over (batch, seqlen, heads, dim) tensors: seqlen_q, seqlen_k, heads_kv,
    query heads of each, steps of rows, tiles of keys in a head and in all, and heads walked together."""
    (batch, seqlen_q, heads), (seqlen_k, heads_kv), m = q.shape[:3], k.shape[1:3], config.block_m
    per_kv, num_m, num_n = heads // heads_kv, -(-seqlen_q // m), -(-seqlen_k // _KEYS)
    rows = per_kv * num_m * m * config.head_dim * 8  # bytes of a key head's rows and of their dQ
    group = heads_per_group(batch * heads_kv, rows, config.share if share is None else share)
    return seqlen_q, seqlen_k, heads_kv, per_kv, num_m, num_n, num_n * batch * heads_kv, group


def _one_kernel(
    inputs, outputs, config: BackwardConfig, *, window, scales, masks, features, cap_out, tables
) -> Tensor:
    """One pass over the scores. Returns lse and delta."""
    from .hopper_backward_kernel import attention_backward_kernel

    do, q, k, v = inputs[:4]
    dq, dk, dv = outputs
    d, m = config.head_dim, config.block_m
    steps = walk(q, k, config)
    seqlen_q, seqlen_k, _, _, num_m, _, num_tiles, _ = steps
    dq_sum = torch.empty((q.shape[0], q.shape[2], num_m, 2, 4096), dtype=torch.float32, device=q.device)
    stat = _prepare(inputs, num_m, m, d, dq_sum)
    counter = tile_counter(q.device)
    table, shape = (counter if tables is None else tables[0]), None
    if features.block_lists:
        table, shape = block_table(features, transposed=True, tile=_KEYS, step=m, seqlen_rows=seqlen_k,
                                   seqlen_columns=seqlen_q)  # fmt: skip
    maps = (
        tensor_map(q, m, d),
        tensor_map(do, m, d),
        tensor_map(k, 64, d),
        tensor_map(v, 64, d),
        number_map(stat, m),
        fragment_map(dq_sum),
        tensor_map(dk, 64, d),
        tensor_map(dv, 64, d),
        counter,
    )
    numbers = (*steps, *window, *scales)
    options = dict(
        D=d,
        M=m,
        K_SLOTS=config.k_slots,
        V_SLOTS=config.v_slots,
        PRELOAD=config.preload,
        CAUSAL=masks["CAUSAL"],
        WINDOW=masks["WINDOW"],
        EVEN_K=seqlen_k % _KEYS == 0,
        DYNAMIC=config.dynamic,
    )
    programs = programs_for(num_tiles, q.device, queue=config.dynamic)
    if config.apart:
        from .hopper_backward_apart import attention_backward_apart_kernel

        options |= dict(EARLY=config.early, AHEAD=config.ahead, num_warps=4, maxnreg=128)
        launch(attention_backward_apart_kernel, programs, (*maps, *numbers), options)
    else:
        options |= dict(
            **masks,
            PING_PONG=config.ping_pong,
            PACKED=tables is not None,
            **_functions(features),
            **_COMPILER,
        )
        arguments = (*maps, table, *numbers, *_modifiers(features, cap_out, shape))
        launch(attention_backward_kernel, programs, arguments, options)
    _finish(dq_sum, dq, scales[0], d, m)
    return stat


def _two_kernels(
    inputs, outputs, config: TwoPassConfig, *, window, scales, masks, features, cap_out, tables
) -> Tensor:
    """The scores are computed twice, for dK and dV and for dQ. Returns lse and delta."""
    from .hopper_backward_dkdv import dkdv_kernel
    from .hopper_backward_dq import dq_kernel

    do, q, k, v = inputs[:4]
    dq, dk, dv = outputs
    batch, seqlen_q, heads, head_dim = q.shape
    seqlen_k, heads_kv = k.shape[1], k.shape[2]
    d = config.head_dim
    per_kv = heads // heads_kv
    num_m = -(-seqlen_q // 128)  # tiles of dQ; those of dK and dV walk over halves of them
    num_n = -(-seqlen_k // 64)
    stat = _prepare(inputs, 2 * num_m, 64, d, None)
    maps = (tensor_map(q, 64, d), tensor_map(do, 64, d), tensor_map(k, 64, d), tensor_map(v, 64, d))
    counter = tile_counter(q.device)
    last = (*window, head_dim // 8, 2 * num_m, *scales)
    options = dict(
        D=d, **masks, EVEN_K=seqlen_k % 64 == 0, MASK_D=head_dim != d, DYNAMIC=config.dynamic,
        PACKED=tables is not None, **_functions(features), **_COMPILER,
    )  # fmt: skip
    by_key, by_query = (None, None) if tables is None else tables
    key_shape, query_shape = None, None
    if features.block_lists:
        by_key, key_shape = block_table(features, transposed=True, tile=64, step=64, seqlen_rows=seqlen_k,
                                        seqlen_columns=seqlen_q)  # fmt: skip
        by_query, query_shape = block_table(features, transposed=False, tile=128, step=64, seqlen_rows=seqlen_q,
                                            seqlen_columns=seqlen_k)  # fmt: skip
    row_bytes = 2 * d * q.element_size()

    tiles = num_n * batch * heads_kv
    group = heads_per_group(batch * heads_kv, per_kv * seqlen_q * row_bytes)
    sizes = (seqlen_q, seqlen_k, heads_kv, per_kv, -(-seqlen_q // 64), num_n, tiles, group)
    outputs = (dk.view(torch.int32), dv.view(torch.int32))
    arguments = (*maps, number_map(stat, 64), *outputs, counter, by_key, *sizes, *last,
                 *_modifiers(features, cap_out, key_shape))  # fmt: skip
    launch(dkdv_kernel, programs_for(tiles, q.device, queue=config.dynamic), arguments, options)

    tiles = num_m * batch * heads
    group = heads_per_group(batch * heads, seqlen_k * row_bytes)
    sizes = (seqlen_q, seqlen_k, heads, per_kv, num_m, tiles, group)
    arguments = (*maps, stat, dq.view(torch.int32), counter, by_query, *sizes, *last,
                 *_modifiers(features, cap_out, query_shape))  # fmt: skip
    launch(dq_kernel, programs_for(tiles, q.device, queue=config.dynamic), arguments, options)
    return stat


def describe(problem: Problem) -> BackwardConfig | TwoPassConfig:
    """The configuration `backward` takes for a problem it does not refuse."""
    short = _short(problem.softcap, problem.block_size)
    if problem.varlen or "block_mask" in problem.features:
        return replace(backward_config(problem.head_dim, causal=False, steps_of_64=short), dynamic=True)
    left, right = effective_window(problem.window_left, problem.window_right, problem.seqlen_q, problem.seqlen_k)
    bounded = left >= 0 or right > 0 or problem.softcap > 0
    apart = _plain(problem.features, bounded=bounded, packed=False)
    return backward_config(
        problem.head_dim, causal=right >= 0, steps_of_64=short, apart=apart, seqlen_k=problem.seqlen_k
    )


__all__ = ["BackwardConfig", "TwoPassConfig", "backward", "backward_config", "describe", "refuse"]
