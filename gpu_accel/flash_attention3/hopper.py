"""Host side of the Hopper kernels: which problems they take, their configurations, tensor-map cache and launch."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from gpu_accel.errors import InvalidInputError
from gpu_accel.flash_attention3 import launch

from .features import NONE, Features
from .gluon_launch import (
    QuickLaunch,
    addressable,
    heads_per_group,
    machine_refusal,
    programs_for,
    score_scales,
    tensor_map,
    tile_counter,
)
from .hopper_blocks import block_table, refuse_blocks
from .modifiers import device_function
from .problem import Problem, effective_window

NAME = "hopper"
KERNEL = "Gluon, warp-specialised, wgmma and TMA (sm_90a)"
MODIFIERS = frozenset({"alibi_slopes", "score_mod", "score_mod_grad", "mask_mod", "block_mask", "return_max_logits"})
FEATURES = frozenset({"sinks", "batch_invariant"}) | MODIFIERS
# What tests/gpu/test_hopper_modifiers.py has passed with (H100, Triton 3.6.0).
MOST_HEAD_DIM_MODIFIED = 256
PACKED_MODIFIED = True
_HEAD_DIMS = (64, 128, 256)
# 3.9 has fewer registers left for three consumers and puts a third less aside (200 bytes for 296) where O is rescaled
# behind a branch. Up to 3.8 nothing is put aside either way, and the branch cost 2 %. `seamless`, too, makes 3.9 put
# registers aside inside the steps of three consumers without a mask, and is off there; causal ones spill less with it.
_TRITON = tuple(int(n) for n in triton.__version__.split(".")[:2])
_INVARIANT_KEYS = 1 << 14  # the length whose tiles all calls take that promise bits


@dataclass(frozen=True, kw_only=True)
class ForwardConfig:
    """Tiles and switches of one forward kernel; a program works on `64 * consumers` query rows.

    `seamless`: little between steps and tiles (see hopper_forward.py), in dense calls without more (`_plain`).
    `dynamic`: tiles come from a queue. `lazy`: O is rescaled only where a row's maximum grew by more than 8 (base 2).
    Only the ablation clears `pipelined` (softmax under the products) or `specialized` (warps that only load; without
    them no ping_pong, no dynamic tiles, and o_chunks 1).
    """

    head_dim: int
    head_dim_v: int
    consumers: int
    block_n: int
    stages: int
    q_slots: int
    o_chunks: int
    ping_pong: bool
    dynamic: bool
    lazy: bool
    seamless: bool = False
    pipelined: bool = True
    specialized: bool = True

    def __post_init__(self) -> None:
        if self.seamless and (self.q_slots < 2 or self.stages > 4):
            raise InvalidInputError(
                f"seamless=True needs q_slots=2 and at most 4 stages, got q_slots={self.q_slots} and "
                f"stages={self.stages}: with one copy of Q a consumer would wait, its turn in hand, for the next "
                "tile's rows, the producer for the other consumer to be done with this tile's, and that one for the "
                "turn; and there are four named barriers for stages. Use seamless=False"
            )

    def registers(self) -> tuple[int, int, int]:
        """(cap at launch, per consumer thread, per producer thread) that share one SM's 65536 registers."""
        if not self.specialized:
            each = min(255, 65536 // (128 * self.consumers) // 8 * 8)
            return each, each, each
        threads = 32 * (4 * self.consumers + 4)
        producer = 24 if self.consumers <= 2 else 32
        return 65536 // threads // 8 * 8, min(240, (512 - producer) // self.consumers // 8 * 8), producer


def forward_config(head_dim: int, head_dim_v: int | None = None, *, causal: bool, seqlen_k: int) -> ForwardConfig:
    """The configuration for head dims up to 256 (each rounded up to 64, 128 or 256 by zero fill)."""
    d, dv = (next(n for n in _HEAD_DIMS if x <= n) for x in (head_dim, head_dim_v or head_dim))
    if d == dv == 64:
        # Bound by exponentials and issue slots, so a third consumer pays, but not where a tile has few steps
        # (development readings, see the paper's README; four stages for two consumers were 0.3 to 1.2 % slower).
        few_steps = seqlen_k <= (4096 if causal else 1024)
        return ForwardConfig(
            head_dim=64,
            head_dim_v=64,
            consumers=2 if few_steps else 3,
            block_n=128,
            stages=3,
            q_slots=2,
            o_chunks=1,
            ping_pong=False,
            dynamic=causal or few_steps,
            lazy=causal or few_steps or _TRITON >= (3, 9),
            seamless=few_steps or causal or _TRITON < (3, 9),
        )
    return ForwardConfig(
        head_dim=d,
        head_dim_v=dv,
        consumers=2,
        block_n=64 if max(d, dv) == 256 else 128,
        stages=2,
        # head_dim 256 has room for one copy of Q, and for O in quarters only
        q_slots=1 if d == 256 else 2,
        o_chunks=4 if dv == 256 else 1,
        ping_pong=True,
        dynamic=causal or d == dv == 128,  # full calls at 128: 1 to 2 % faster (records of an H200)
        lazy=True,
        seamless=d == dv == 128,  # at head_dim 256 it is level or slower, and there is but one copy of Q
    )


def refuse(problem: Problem) -> str | None:
    """Why the Hopper forward cannot run this problem, or None."""
    if max(problem.head_dim, problem.head_dim_v) > 256:
        return f"takes head_dim up to 256, got {problem.head_dim} and {problem.head_dim_v} (v)"
    if "sinks" in problem.features and problem.varlen and problem.seqlen_k == 0:
        return "has no kernel for packed sequences of which none has a key"
    return refuse_modifiers(problem, MODIFIERS) or machine_refusal(problem)


def refuse_modifiers(problem: Problem, concerned: frozenset[str]) -> str | None:
    """Why the Hopper kernels cannot do what this problem asks of scores, or None; `concerned`: what a pass knows of."""
    asked = problem.features & concerned
    if problem.varlen and asked and not PACKED_MODIFIED:
        return "does biases and modifiers of dense tensors only"
    dim = max(problem.head_dim, problem.head_dim_v)
    if asked and dim > MOST_HEAD_DIM_MODIFIED:
        return f"does biases, modifiers and block masks up to head_dim {MOST_HEAD_DIM_MODIFIED}, got {dim}"
    return refuse_blocks(problem.block_size)


def modifier_arguments(features: Features, table_shape: tuple[int, int, int] | None) -> tuple:
    """(alibi_slopes, its batch stride, aux_tensors) and the shape of the block table for a kernel; None for nothing."""
    return (*launch.bias_arguments(features), *(table_shape or (None, None, None)))


@functools.cache
def _forward_kernel() -> QuickLaunch:
    from .hopper_forward import attention_forward_kernel

    return QuickLaunch(attention_forward_kernel)


def _tile_table(
    config: ForwardConfig,
    total_q: int,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
) -> tuple[Tensor, int]:
    """The tiles of packed sequences, found on the device (see hopper_packed.py), and how many a head has at most."""
    from .hopper_packed import ENTRY, fill_tile_table

    batches, rows = cu_seqlens_q.shape[0] - 1, 64 * config.consumers
    most = -(-total_q // rows) + batches
    table = torch.empty((most + 1) * ENTRY.value, dtype=torch.int32, device=cu_seqlens_q.device)
    arguments = (table, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, batches, total_q)
    options = dict(
        BLOCK=rows,
        BATCH=launch.next_power_of_2(batches + 1),
        USED_Q=seqused_q is not None,
        USED_K=seqused_k is not None,
    )
    launch.launch(fill_tile_table, most, arguments, options)
    return table, most


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    features: Features = NONE,
    config: ForwardConfig | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Attention forward of bf16/fp16 tensors on sm_90.

    Args:
        q, k, v: (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with `cu_seqlens_*`; any strides: a view
            that the copy engine can't address is copied once. heads % heads_kv == 0; v may have another head_dim.
        softmax_scale: multiplies q k^T.
        window_left, window_right: keys that a query sees to either side of the bottom-right diagonal, -1 for all;
            causal is right 0.
        softcap: caps the scaled scores at +-softcap by tanh; 0 is off.
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k: contiguous int32 on the device of q, never read by the host.
        features: what no mask says. batch_invariant: tiles depend on head_dim and causal alone, and a row's bits on
            nothing but its own sequence, since neither the order of tiles nor the blocks that it does not see matter.
            Biases, modifiers and block masks: of dense tensors.
        config: tiles to use instead of the tuned ones.
        out, lse: results to write into, contiguous.

    Returns:
        out like q with the head_dim of v; lse float32, natural logarithm, (batch, heads, seqlen_q) or (heads, total_q);
        with `features.return_max_logits` also the largest score of each head, (heads,) float32.
    """
    packed = cu_seqlens_q is not None
    heads, head_dim, head_dim_v = q.shape[-2], q.shape[-1], v.shape[-1]
    if out is None:
        out = torch.empty((*q.shape[:-1], head_dim_v), dtype=q.dtype, device=q.device)
    if lse is None:
        shape = (heads, q.shape[0]) if packed else (q.shape[0], heads, q.shape[1])
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    q4, k4, v4, out4 = (x.unsqueeze(0) if packed else x for x in (q, k, v, out))
    q4, k4, v4 = (addressable(x) for x in (q4, k4, v4))
    batch, seqlen_q, seqlen_k, heads_kv = q4.shape[0], q4.shape[1], k4.shape[1], k4.shape[2]
    if q.numel() == 0 or seqlen_k == 0 or (cu_seqlens_q is not None and cu_seqlens_q.shape[0] == 1):
        lse = lse.fill_(-math.inf) if features.sinks is None else lse.copy_(features.sinks[:, None].expand(lse.shape))
        maxima = (lse.new_full((heads,), -math.inf),) if features.return_max_logits else ()
        return out.zero_(), lse, *maxima
    keys = seqlen_k
    if features.batch_invariant:
        keys = _INVARIANT_KEYS
    elif cu_seqlens_q is None:
        window_left, window_right = effective_window(window_left, window_right, seqlen_q, seqlen_k)
    else:
        keys = -(-seqlen_k // (cu_seqlens_q.shape[0] - 1))  # on average
    causal = window_right >= 0
    if config is None:
        config = forward_config(head_dim, head_dim_v, causal=causal, seqlen_k=keys)
        if not _timed(config, q.dtype, seqlen_k, window=(window_left, window_right), softcap=softcap):
            config = replace(config, seamless=False)
    if packed:
        config = replace(config, dynamic=True)  # tiles come with what the queue hands on
    if config.seamless and not _plain(config, features, packed=packed):
        config = replace(config, seamless=False)
    config = _modified_config(config, features)
    row_max = torch.empty_like(lse) if features.return_max_logits else None
    table = counter = tile_counter(q.device) if config.dynamic else lse
    table_shape = None
    if features.block_lists:
        table, table_shape = block_table(features, transposed=False, tile=64 * config.consumers, step=config.block_n,
                                         seqlen_rows=seqlen_q, seqlen_columns=seqlen_k)  # fmt: skip
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        table, num_m = _tile_table(config, seqlen_q, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    else:
        num_m = -(-seqlen_q // (64 * config.consumers))
    num_tiles = num_m * batch * heads
    grid = programs_for(num_tiles, q.device, queue=config.dynamic)
    launch_registers, consumer_registers, producer_registers = config.registers()
    rows = 64 if config.specialized else 64 * config.consumers
    natural = features.alibi_slopes is not None or bool(features.score_mod)
    slopes, slopes_sb, aux, *table_strides = modifier_arguments(features, table_shape)
    arguments = (
        tensor_map(q4, rows, config.head_dim),
        tensor_map(k4, config.block_n, config.head_dim),
        tensor_map(v4, config.block_n, config.head_dim_v),
        tensor_map(out4, rows, config.head_dim_v // config.o_chunks),
        out,
        lse,
        lse if features.sinks is None else features.sinks,
        counter,
        table,
        head_dim_v,
        seqlen_q,
        seqlen_k,
        heads,
        heads // heads_kv,
        num_m,
        num_tiles,
        heads_per_group(
            batch * heads, keys * (head_dim + head_dim_v) * q.element_size(), _walked_together(config, keys)
        ),
        window_left,
        window_right,
        *score_scales(softmax_scale, softcap, natural=natural),
        softcap,
        slopes,
        slopes_sb,
        aux,
        row_max,
        *table_strides,
    )
    constants = dict(
        CONSUMERS=config.consumers,
        HEAD_DIM=config.head_dim,
        HEAD_DIM_V=config.head_dim_v,
        BLOCK_N=config.block_n,
        STAGES=config.stages,
        Q_SLOTS=config.q_slots,
        O_CHUNKS=config.o_chunks,
        PING_PONG=config.ping_pong,
        CAUSAL=causal,
        WINDOW=window_left >= 0,
        SOFTCAP=softcap > 0,
        EVEN_K=seqlen_k % config.block_n == 0 and not packed,
        DYNAMIC=config.dynamic,
        LAZY=config.lazy,
        PACKED=packed,
        PIPELINED=config.pipelined,
        SPECIALIZED=config.specialized,
        SEAMLESS=config.seamless,
        SINKS=features.sinks is not None,
        SCORE_MOD=device_function(features.score_mod),
        MASK_MOD=device_function(features.mask_mod),
        CONSUMER_REGISTERS=consumer_registers,
        PRODUCER_REGISTERS=producer_registers,
    )
    # all that Triton would specialise on
    kinds = None if aux is None else tuple(x.dtype for x in aux)
    variant = (q.dtype, lse.data_ptr() % 16, slopes is None, row_max is None, table_shape is None, kinds)
    options = dict(num_warps=4 if config.specialized else 4 * config.consumers, maxnreg=launch_registers)
    _forward_kernel()(variant, grid, arguments, constants, options)
    if row_max is None:
        return out, lse
    return out, lse, row_max.amax(-1) if packed else row_max.amax((0, 2))


def _walked_together(config: ForwardConfig, keys: int) -> int:
    """Bytes of K and V of the heads whose tiles come together, longest first; of causal calls only.

    4 to 64 MB were tried (H200): less leaves L2 unused, more lets long tiles, which wait for memory, and short ones
    come in separate waves. At head_dim 256 a head has half as many tiles for its bytes.
    """
    if config.head_dim < 256:
        return 16 << 20
    return (8 if keys <= 512 else 32) << 20


def _timed(
    config: ForwardConfig, dtype: torch.dtype, seqlen_k: int, *, window: tuple[int, int], softcap: float
) -> bool:
    """Whether `seamless` was right and faster on a GPU with calls of this kind; the readings are in the paper's README.

    Windows on both sides, two bounds at once and bounds in fp16 were not timed; a soft cap at head_dim 128 is no
    faster, a tail of keys without a mask 2 to 3 % slower there.
    """
    left, right = window
    causal = right == 0
    if left >= 0 or right > 0 or softcap > 0:
        one = softcap == 0 or (left < 0 and config.head_dim == 64)
        return causal and one and dtype == torch.bfloat16
    return causal or config.head_dim == 64 or seqlen_k % config.block_n == 0


def _plain(config: ForwardConfig, features: Features, *, packed: bool) -> bool:
    """Whether a call is of the kind that `seamless` is made for: dense, with or without masks, windows and soft caps.

    Packed sequences and block masks know their tiles from a table; of modifiers and biases it would read what belongs
    to the tile behind the last. Sinks and largest scores were not timed.
    """
    return not packed and features.names() <= {"batch_invariant"} and config.specialized and config.pipelined


def _modified_config(config: ForwardConfig, features: Features) -> ForwardConfig:
    """The configuration with what modifiers and block masks need."""
    if features.return_max_logits:
        config = replace(config, lazy=False)  # whose maxima may be too small
    modified = features.alibi_slopes is not None or features.score_mod or features.mask_mod or features.block_lists
    if modified and config.consumers > 2:  # 160 registers are too few
        config = replace(config, consumers=2, stages=4, lazy=not features.return_max_logits)
    if features.block_lists:
        config = replace(config, dynamic=True)
        if features.block_size[1] % config.block_n:
            config = replace(config, block_n=64, stages=2 * config.stages)
    return config


def describe(problem: Problem) -> str:
    """The tiles `forward` takes for a problem it does not refuse."""
    keys, right = problem.seqlen_k, problem.window_right
    if "batch_invariant" in problem.features:
        keys = _INVARIANT_KEYS
    elif problem.varlen:
        keys = -(-keys // max(1, problem.batch))
    else:
        _, right = effective_window(problem.window_left, right, problem.seqlen_q, keys)
    c = forward_config(problem.head_dim, problem.head_dim_v, causal=right >= 0, seqlen_k=keys)
    if problem.features & {"alibi_slopes", "score_mod", "mask_mod", "block_mask"} and c.consumers > 2:
        c = replace(c, consumers=2, stages=4)
    if "block_mask" in problem.features:
        c = replace(c, dynamic=True, block_n=64 if problem.block_size[1] % c.block_n else c.block_n)
    order = "tiles drawn from a queue" if c.dynamic or problem.varlen else "tiles in order"
    return f"{64 * c.consumers}x{c.block_n}, {c.consumers} consumer warpgroups, {c.stages} stages, {order}"
