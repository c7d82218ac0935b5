"""Host side of `walk_kernel`: which calls it takes, its tiles, tensor maps and launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from gpu_accel.flash_attention3.gluon_launch import QuickLaunch, gluon_available, multiprocessors, tensor_map
from gpu_accel.flash_attention3.launch import capability, launch, next_power_of_2, tma_refusal
from gpu_accel.thunderkittens import gates_kernel
from gpu_accel.thunderkittens.gemm_hopper import zero_counters

CHUNK = 64
_KEYS = (64, 128)  # what K is padded to
_NEAR_KEYS = 64  # padded: with more of them states of chunks in shared memory would leave one program an SM
_MOST_LINES = 2**31  # of gates: their coordinate is one 32-bit number
# Whether chunks of all heads are dealt evenly to as many programs as a GPU holds, where heads do not fill its last
# round: some heads are walked by two programs, with the same bits. Only the form that tests on an H200 found right so:
# with gates and weights, K = 128 and V = 64.
DEAL = True
# Whether a forward whose gates are one a head (retention's) takes them as that, without a kernel that sums them up
# before: 95 us for 105 at 8 x 2048 steps, 16 heads, K = V = 128 (H200).
STEADY = True
_SEGMENT_STAGES = 4
Rates = tuple[Tensor, float, float] | None
_quick: list[QuickLaunch] = []
_quick_segments: list[QuickLaunch] = []


@dataclass(frozen=True, kw_only=True)
class WalkConfig:
    """Columns of v that a program takes, how many chunks ahead it loads, and whether q S waits for the scores."""

    block_v: int = 64
    stages: int = 2
    late: bool = False


def walk_config(key_dim: int, value_dim: int) -> WalkConfig:
    """Two programs an SM: 227 KiB of shared memory hold two rings of 3 stages at K = 64 and of 2 at K = 128."""
    return WalkConfig(stages=3 if key_dim <= 64 else 2)


def machine_refusal(x: Tensor, half: bool = False) -> str | None:
    """What is wrong with the machine, the dtype or this Triton, or None. half: float16 is taken, too."""
    if x.device.type != "cuda" or torch.version.hip:
        return f"needs an NVIDIA GPU of compute capability 9.0, got a {x.device.type} tensor"
    if capability(x.device) != (9, 0):
        return "needs compute capability 9.0 (H100, H200), got {}.{}".format(*capability(x.device))
    if x.dtype != torch.bfloat16 and not (half and x.dtype == torch.float16):
        return f"takes bfloat16{' and float16' if half else ''}, got {x.dtype}"
    return None if gluon_available() else "this Triton has no usable Gluon dialect"


def size_refusal(q: Tensor, v: Tensor, cu_seqlens: Tensor | None, chunk: int) -> str | None:
    """Why the kernel cannot take these sizes, or None."""
    if cu_seqlens is not None:
        return "packed sequences (cu_seqlens) are not in this kernel"
    if chunk != CHUNK:
        return f"its chunks have {CHUNK} steps, not {chunk}"
    if not 16 <= q.shape[-1] <= _KEYS[-1] or q.shape[-1] % 8 or v.shape[-1] % 8:
        return f"K must be a multiple of 8 from 16 to {_KEYS[-1]} and V one of 8, got {q.shape[-1]} and {v.shape[-1]}"
    if v.shape[0] * v.shape[2] * (v.shape[1] + CHUNK) >= _MOST_LINES:
        return "it has 2^31 gates or more"
    return None


def problem_refusal(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, chunk: int) -> str | None:
    """Why the kernel cannot take these sizes and strides, or None."""
    why = size_refusal(q, v, cu_seqlens, chunk)
    if why is not None:
        return why
    if any(x.stride(-1) != 1 for x in (q, k, v)):
        return "a last dimension is not contiguous"
    why = tma_refusal(q, k, v)
    return None if why == "no GPU" else why


def refusal(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, chunk: int) -> str | None:
    """Why the Hopper kernel cannot run this forward, or None."""
    return machine_refusal(v, half=True) or problem_refusal(q, k, v, cu_seqlens, chunk)


def gate_vectors(
    g: Tensor | None, w: Tensor | None, v: Tensor, chunks: int, rates: Rates = None
) -> tuple[Tensor, Tensor]:
    """(sums of g, w) as `_gates_kernel` makes them; absent ones are 64 numbers that nobody reads.

    rates: ((heads,) float32, low, high): w is kept between both, g is w * rates and not read.
    """
    batch, seqlen, heads = v.shape[:3]
    shape = (batch, heads, chunks * CHUNK)
    made = [v.new_empty(CHUNK if x is None else shape, dtype=torch.float32) for x in (g, w)]
    if g is not None or w is not None:
        block = min(16, next_power_of_2(heads))
        strides = [s for x in (g, w) for s in ((0, 0, 0) if x is None else x.stride())]
        launch(
            gates_kernel._gates_kernel, batch * chunks * triton.cdiv(heads, block),
            (g, w, *made, *strides, seqlen, chunks, heads, *(rates or (None, 0.0, 0.0))),
            dict(BT=CHUNK, BH=block, HAS_G=g is not None, HAS_W=w is not None, HAS_RATES=rates is not None,
                 num_warps=4),
        )  # fmt: skip
    return made[0], made[1]


def _line_map(x: Tensor):
    """TMA map over float32 numbers one after the other, in blocks of a chunk."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return TensorDescriptor(x, [x.numel()], [1], [CHUNK], gl.NVMMASharedLayout(0, 32, 1))


def walk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, w: Tensor | None, initial: Tensor | None,
    local: Tensor | None, decays: Tensor | None, *, scale: float, segments: int, config: WalkConfig | None = None,
    norm: float | None = None, reverse: bool = False, vectors: tuple[Tensor, Tensor] | None = None,
    states: Tensor | None = None, across: Tensor | None = None, x: Tensor | None = None, inner: Tensor | None = None,
    turns: int = 1, rates: Rates = None, powers: Tensor | None = None, wide: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(o (batch, seqlen, heads, V), final state (batch, heads, K, V) float32); arguments as in `chunked.chunked`.

    q and k may have fewer heads than g and w, or v may.
    local, decays: of `segment_sums`, where there is more than one segment. norm: divide by the sum of
    weights plus this; without gates, weights, a first state and segments, and with `inner` (batch, heads, seqlen) for
    those sums. vectors: what `gate_vectors` made of g and w.
    reverse; states, x and inner, and across for a walk forwards, which leaves the final state alone: see `walk_kernel`.
    turns: heads whose o are added up, so that o has heads / turns. rates: as `gate_vectors` takes them.
    powers: with states, in float16: see `walk_kernel`. wide: o is float32, of float16.
    """
    from gpu_accel.thunderkittens import walk_kernel

    if not _quick:
        _quick.append(QuickLaunch(walk_kernel.walk_kernel))
    batch, seqlen = v.shape[:2]
    heads = max(q.shape[2], v.shape[2])
    key_dim, value_dim = q.shape[3], v.shape[3]
    config = config or walk_config(key_dim, value_dim)
    chunks = triton.cdiv(seqlen, CHUNK)
    forwards = states is None and not reverse
    form = (key_dim, value_dim, g is not None, w is not None) == (128, config.block_v, True, True)
    form = form and forwards and segments == 1
    gate = g if w is None and vectors is None and forwards and g is not None and steady(g) else None
    given = None if gate is not None else g
    sums, weights = vectors or gate_vectors(given, w, v, chunks, rates)
    kind = torch.float32 if wide else v.dtype
    o = torch.empty((batch, seqlen, heads // turns, value_dim), dtype=kind, device=v.device)
    final = torch.empty((batch, heads, key_dim, value_dim), dtype=torch.float32, device=v.device)
    block_k = next(n for n in _KEYS if key_dim <= n)
    tiles = triton.cdiv(value_dim, config.block_v)
    keys = [tensor_map(x, CHUNK, block_k) for x in (q, k)]
    values = [tensor_map(x, CHUNK, config.block_v) for x in (v, o)]
    optional = [final if x is None else x for x in (initial, local, decays)]
    kept = v if states is None else states  # no map of nothing
    map_of_states = tensor_map(kept, block_k, config.block_v)
    map_of_x = values[0] if x is None else tensor_map(x, CHUNK, config.block_v)
    far = 0 if x is None else max(x.stride()[:3]) // 8
    strides = (0, 0, 0) if x is None else [s // 8 for s in x.stride()[:3]]  # multiples of 8: TMA reads q, k and v too
    memory = [final if t is None else t for t in (states, across, x if gate is None else gate, inner)]
    constants = dict(BK=block_k, BV=config.block_v, STAGES=config.stages, GATED=g is not None, WEIGHTED=w is not None,
                     HAS_INITIAL=initial is not None, HAS_LOCAL=local is not None, NORM=norm is not None,
                     REVERSE=reverse, GATES=states is not None, LATE=config.late,
                     TOTALS=norm is not None and inner is not None,
                     NEAR=states is not None and block_k <= _NEAR_KEYS, TURNS=turns)  # fmt: skip
    aligned = initial is None or initial.data_ptr() % 16 == 0
    programs = batch * heads // turns * tiles * segments
    dealt = DEAL and form and _worth_dealing(programs, 2 * sms(v))
    if dealt:
        programs = 2 * sms(v)
        optional[1] = final.new_empty((programs, block_k, config.block_v))
        optional[2] = zero_counters(v.device, programs)
    _quick[0](
        (far >= 2**31, aligned, gate is not None and gate.data_ptr() % 16 == 0, v.dtype, wide), programs,
        (*keys, *values, _line_map(sums), _line_map(weights), *optional, final,
         chunks, heads, heads // q.shape[2], batch, segments, tiles, key_dim, value_dim, scale, norm or 0.0,
         map_of_states, map_of_x, *memory, *strides, seqlen, heads // v.shape[2], powers),
        constants | dict(DEAL=dealt, UNIT=scale == 1, STEADY=gate is not None), dict(num_warps=4),
    )  # fmt: skip
    return o, final


def segment_sums(
    k: Tensor, v: Tensor, g: Tensor | None, w: Tensor | None, *, segments: int, reverse: bool = False,
    vectors: tuple[Tensor, Tensor] | None = None, turned: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What segments add to the state (segments - 1, batch, heads, K, V), their decays (segments - 1, batch, heads), and
    the former as (.., V, K) if `turned`, else without elements; float32, of all but the last, behind which there is no
    other.

    k or v may have fewer heads than the other one, and g and w have as many as the latter. reverse: from the last chunk
    to the first, what q and do add to the gradient of the state, without weights. vectors: what `gate_vectors` made.
    """
    from gpu_accel.thunderkittens import segments_kernel

    if not _quick_segments:
        _quick_segments.append(QuickLaunch(segments_kernel.segments_kernel))
    batch, seqlen = v.shape[:2]
    heads, key_dim, value_dim = max(k.shape[2], v.shape[2]), k.shape[3], v.shape[3]
    chunks = triton.cdiv(seqlen, CHUNK)
    gate = g if vectors is None and w is None and g is not None and steady(g) else None
    vectors = vectors or gate_vectors(None if gate is not None else g, w, k if heads > v.shape[2] else v, chunks)
    shape = (segments - 1, batch, heads)
    local = torch.empty((*shape, key_dim, value_dim), dtype=torch.float32, device=v.device)
    other = local.new_empty((*shape, value_dim, key_dim) if turned else 0)
    decays = local.new_empty(shape)
    block_k, tiles = next(n for n in _KEYS if key_dim <= n), triton.cdiv(value_dim, 64)
    _quick_segments[0](
        (gate is not None and gate.data_ptr() % 16 == 0, v.dtype), batch * heads * tiles * (segments - 1),
        (tensor_map(k, CHUNK, block_k), tensor_map(v, CHUNK, 64), *map(_line_map, vectors),
         decays if gate is None else gate, local, other, decays, chunks, heads, heads // k.shape[2],
         heads // v.shape[2], batch, segments, tiles, key_dim, value_dim, seqlen),
        dict(BK=block_k, BV=64, STAGES=_SEGMENT_STAGES, GATED=g is not None, WEIGHTED=w is not None, REVERSE=reverse,
             STEADY=gate is not None, TURNED=turned),
        dict(num_warps=4),
    )  # fmt: skip
    return local, decays, other


def steady(g: Tensor) -> bool:
    """Whether a forward without weights takes gates as one a head."""
    return STEADY and _one_a_head(g)


def _one_a_head(g: Tensor) -> bool:
    """Whether all steps of all sequences read the same float32 number of a head."""
    same = all(s == 0 or n == 1 for s, n in zip(g.stride()[:2], g.shape[:2], strict=True))
    return g.dtype == torch.float32 and g.numel() > 0 and same and (g.stride(2) == 1 or g.shape[2] == 1)


def sms(x: Tensor) -> int:
    return multiprocessors(x.device) if x.is_cuda else 2  # tensors of compile tests lie on the CPU


def _worth_dealing(programs: int, places: int) -> bool:
    """Whether there is more than one round of programs, and the last one leaves more than a twentieth of all idle."""
    rounds = triton.cdiv(programs, places)
    return programs > places and 20 * programs < 19 * rounds * places
