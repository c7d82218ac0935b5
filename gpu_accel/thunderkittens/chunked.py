"""Launchers and custom ops of chunked linear attention: what torch.compile, autograd and opcheck see.

    gpu_accel::tk_chunked(q, k, v, g, w, initial, cu_seqlens, scale, chunk, segments, way) -> (o, final state)
    gpu_accel::tk_chunked_backward(do, dfinal, ..., way) -> (dq, dk, dv, dg, dw, dinitial)

way, of the forward: "chunks" (two kernels, all chunks at once), "walk" (`fused_kernel`) or "hopper" (`walk_kernel`);
"hopper or walk" decides when it runs, since torch.compile knows no addresses. Of the backward: "chunks" or "hopper or
chunks" (`walk_back`, for gradients of gates).
Arguments are validated in `linear.py` and `mamba2.py`. Backwards compute the states again instead of keeping them:
they take K * V / chunk values a token and head, more than q, k and v together.
"""

from __future__ import annotations

import contextlib
import math

import torch
from torch import Tensor

from gpu_accel.compat import INTERPRET
from gpu_accel.flash_attention3.function import refuse_second
from gpu_accel.flash_attention3.gluon_launch import addressable
from gpu_accel.flash_attention3.launch import launch, next_power_of_2
from gpu_accel.thunderkittens import chunked_kernels as kernels
from gpu_accel.thunderkittens import fused_kernel, walk_back, walk_hopper

CHUNK = 64
_PROGRAMS = 264  # two for each SM of an H100: below this many a sequence is cut into segments
_LEAST_CHUNKS = 8  # of a segment
_MOST_SEGMENTS = 16
# Four accumulators. With 4 warps Triton 3.6 on an H100 got a wrong dg (700 times its bound) beside right dq and dk.
_DQK_WARPS = 8


def copies_ahead(dtype: torch.dtype) -> int:
    """Stages of kernels that read do, v and states for a gradient of q, k: nothing is loaded ahead in float16.

    There do and v are widened beside float32 states, and Triton 3.6 copies the next states over those that products
    are still reading (see `gpu_accel.testing.racing`).
    """
    return 1 if dtype == torch.float16 else 2

_FUSED_KEYS = 128  # the most of K that `fused_kernel` holds in registers


def _block(size: int, most: int = 64) -> int:
    """How much of a head dimension a program takes.

    Not 16 on a GPU: Triton 3.6 hands such tiles to wgmma wrongly on Hopper. Columns come out wrong, or the descriptor
    points outside of shared memory and the call is an illegal access. (V = 1 in `_output_kernel` showed it.)
    """
    block = max(16, min(most, next_power_of_2(size)))
    return block if block > 16 or INTERPRET else min(64, most)


def state_dtype(dtype: torch.dtype, exact: bool = False) -> torch.dtype:
    """bfloat16 stays so (the tensor core rounds the state to it anyway); float16 would overflow, so it is float32.

    exact: float32 in any case, for the gradient of the gates, which sums products of states.
    """
    return torch.bfloat16 if dtype == torch.bfloat16 and not exact else torch.float32


def precision(dtype: torch.dtype) -> str:
    """float16 fits into tf32 exactly; float32 is cut into three tf32 products, since tensor cores have no float32."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def segments_for(sequences: int, heads: int, tiles: int, chunks: int, programs: int = _PROGRAMS) -> int:
    """Into how many segments to cut every sequence so that `programs`, which fill a GPU, are not exceeded."""
    wanted = programs // max(1, sequences * heads * tiles)  # whole cuts only: 256 programs of 264 are enough
    return max(1, min(wanted, chunks // _LEAST_CHUNKS, _MOST_SEGMENTS))


def _strides(x: Tensor | None) -> tuple[int, int, int]:
    return (0, 0, 0) if x is None else x.stride()[:3]  # type: ignore[return-value]


def _unit(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _state_shape(k: Tensor, v: Tensor, cu_seqlens: Tensor | None):
    sequences = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return sequences, v.shape[2], k.shape[3], v.shape[3]


def _of_no_values(k: Tensor, v: Tensor, initial: Tensor | None) -> tuple[Tensor, Tensor]:
    """(o, state at the end) of a v without elements, not packed: the state stays what it was."""
    final = v.new_zeros(_state_shape(k, v, None), dtype=torch.float32)
    return v.new_empty(v.shape), final if initial is None else final.copy_(initial)


class _Places:
    """Which chunks there are: by arithmetic for equal lengths, by tables on the device for packed sequences."""

    def __init__(self, v: Tensor, cu_seqlens: Tensor | None, chunk: int) -> None:
        cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()  # kernels read it with stride 1
        self.seqlen, self.cu = v.shape[1], cu_seqlens
        self.chunks = -(-self.seqlen // chunk)
        self.offsets: Tensor | None = None
        self.sequence_of: Tensor | None = None
        if cu_seqlens is None:
            self.sequences = v.shape[0]
            self.total = self.sequences * self.chunks
            return
        self.sequences = cu_seqlens.shape[0] - 1
        self.total = self.seqlen // chunk + self.sequences  # never fewer than there are, whatever the lengths
        counts = (cu_seqlens.diff() + chunk - 1) // chunk
        self.offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32)
        every = torch.arange(self.total, device=v.device, dtype=torch.int32)
        found = torch.searchsorted(self.offsets[1:].contiguous(), every, right=True)
        self.sequence_of = torch.where(found < self.sequences, found, -1).to(torch.int32)

    def tables(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return self.cu, self.offsets, self.sequence_of


def _walk(k, v, g, w, initial, places, *, scale, chunk, segments, heads, group, reverse, exact=False,
          sums_only=False):  # fmt: skip
    """(states that enter every chunk, state at the end); with `reverse` from the end to the beginning.

    sums_only: no walk, but (what every segment adds, its decay), for a walk elsewhere.
    """
    key_dim, value_dim = k.shape[-1], v.shape[-1]
    bk, bv = _block(key_dim), _block(value_dim)
    tiles = -(-key_dim // bk) * -(-value_dim // bv)
    segments = segments or segments_for(places.sequences, heads, tiles, places.chunks)
    shape = (places.sequences, heads, key_dim, value_dim)
    states = v.new_empty((0 if sums_only else places.total, *shape[1:]), dtype=state_dtype(v.dtype, exact))
    final = v.new_empty(shape, dtype=torch.float32)
    local = v.new_empty((segments if segments > 1 else 0, *shape), dtype=torch.float32)
    decays = v.new_empty((segments if segments > 1 else 0, *shape[:2]), dtype=torch.float32)
    programs = places.sequences * heads * tiles * segments
    if not programs:
        return states, final
    tables = places.tables()[:2]
    for first in (True,) if sums_only else (True, False) if segments > 1 else (False,):
        launch(
            kernels._states_kernel, programs,
            (k, v, g, w, initial, local, decays, states, final, *tables,
             *_strides(k), *_strides(v), *_strides(g), *_strides(w),
             places.seqlen, places.chunks, places.sequences, heads, group, segments, scale),
            dict(K=key_dim, V=value_dim, BT=chunk, BK=bk, BV=bv, HAS_G=g is not None, HAS_W=w is not None,
                 HAS_INITIAL=initial is not None, VARLEN=places.cu is not None, REVERSE=reverse, LOCAL=first,
                 PRECISION=precision(v.dtype), num_warps=4, num_stages=2),
        )  # fmt: skip
    return (local, decays) if sums_only else (states, final)


def _fused_launch(bk: int) -> dict:
    """Measured at (16, 16, 8192, 64, 64) on an H100: 4 warps 569 us with 3 stages, 592 with 2; 8 warps 959 and 1066."""
    return dict(num_warps=8, num_stages=2) if bk > 64 else dict(num_warps=4, num_stages=3)


def fused_refusal(key_dim: int, dtype: torch.dtype) -> str | None:
    """Why one walk cannot do the whole forward, or None."""
    if dtype == torch.float32:
        return "float32 takes three products for one, and registers for them"
    most = _FUSED_KEYS if dtype == torch.bfloat16 else _FUSED_KEYS // 2  # float16 takes the state as float32
    return f"a state of {key_dim} rows in {dtype} does not stay in registers; {most} do" if key_dim > most else None


def _fused(q, k, v, g, w, initial, places, *, scale, chunk, segments, heads, group):
    """(o, state at the end) by `fused_kernel`."""
    key_dim, value_dim = q.shape[-1], v.shape[-1]
    bk, bv = _block(key_dim, _FUSED_KEYS), _block(value_dim)
    tiles = -(-value_dim // bv)
    segments = segments or segments_for(places.sequences, heads, tiles, places.chunks)
    common = dict(scale=scale, chunk=chunk, heads=heads, group=group)
    local = decays = None
    if segments > 1:
        local, decays = _walk(k, v, g, w, None, places, segments=segments, reverse=False, sums_only=True, **common)
    o = v.new_empty(v.shape) if places.cu is None else v.new_zeros(v.shape)
    final = v.new_empty((places.sequences, heads, key_dim, value_dim), dtype=torch.float32)
    programs = places.sequences * heads * tiles * segments
    far = chunk * max(1, *(x.stride(1) for x in (q, k, v, o)), *(x.stride(1) for x in (g, w) if x is not None)) >= 2**31
    if programs:
        launch(
            fused_kernel._fused_kernel, programs,
            (q, k, v, g, w, initial, local, decays, o, final, places.cu, *_strides(q), *_strides(k), *_strides(v),
             *_strides(g), *_strides(w), places.seqlen, places.sequences, heads, group, segments, scale),
            dict(K=key_dim, V=value_dim, BT=chunk, BK=bk, BV=bv, HAS_G=g is not None, HAS_W=w is not None,
                 HAS_INITIAL=initial is not None, HAS_LOCAL=segments > 1, VARLEN=places.cu is not None,
                 FAR=far, PRECISION=precision(v.dtype), **_fused_launch(bk)),
        )  # fmt: skip
    return o, final


def _hopper(q, k, v, g, w, initial, places, *, scale, chunk, segments, heads, group):
    """(o, state at the end) by `walk_kernel`."""
    key_dim, value_dim = q.shape[-1], v.shape[-1]
    tiles = -(-value_dim // walk_hopper.walk_config(key_dim, value_dim).block_v)
    if not v.numel():
        return _of_no_values(k, v, initial)
    segments = segments or segments_for(places.sequences, heads, tiles, places.chunks)
    local = decays = vectors = None
    if segments > 1:
        if w is not None or (g is not None and not walk_hopper.steady(g)):
            vectors = walk_hopper.gate_vectors(g, w, v, places.chunks)
        local, decays, _ = walk_hopper.segment_sums(k, v, g, w, segments=segments, vectors=vectors)
    return walk_hopper.walk(q, k, v, g, w, initial, local, decays, scale=scale, segments=segments, vectors=vectors)


def _walks_back(do, dfinal, q, k, v, g, w, initial, places, *, want_dg, scale, chunk, segments, heads, group):
    """All gradients by `walk_back`, or None where those walks cannot make them or were not seen right on a card."""
    tiles = -(-min(q.shape[-1], v.shape[-1]) // 64)
    segments = segments or segments_for(places.sequences, heads, tiles, places.chunks)
    first, last = initial is not None, dfinal is not None
    if want_dg:
        why = walk_back.unseen(q.shape[-1], v.shape[-1], w is not None, first or last, segments)
    else:
        why = walk_back.plain_unseen(q.shape[-1], v.shape[-1], group > 1)
    if why or walk_back.refusal(q, k, v, places.cu, chunk, scale, want_dg and first and last):
        return None
    local = dlocal = vectors = None
    if segments > 1:
        vectors = walk_hopper.gate_vectors(g, w, v, places.chunks)
        do = addressable(do)
        dlocal = walk_hopper.segment_sums(q, do, g, None, segments=segments, reverse=True, vectors=vectors, turned=True)
        # walks of dq have the state's transpose, and are the first: it comes as it is wanted, and last
        added, decay, _ = walk_hopper.segment_sums(v, k, g, w, segments=segments, vectors=vectors)
        local = added, decay
    common = dict(scale=scale, segments=segments, vectors=vectors)
    if want_dg:
        return walk_back.gradients(do, dfinal, q, k, v, g, w, initial, local, dlocal, **common)
    *made, dinitial = walk_back.plain(do, dfinal, q, k, v, g, initial, local, dlocal, **common)
    none = v.new_empty(0, dtype=torch.float32)
    return *made, none, none.clone(), dinitial


def _options(q, v, g, w, cu, chunk, **more):
    bk, bv = (_block(x.shape[-1]) for x in (q, v))
    return dict(K=q.shape[-1], V=v.shape[-1], BT=chunk, BK=bk, BV=bv,
                HAS_G=g is not None, HAS_W=w is not None, VARLEN=cu is not None, PRECISION=precision(v.dtype),
                num_warps=4, num_stages=2, **more)  # fmt: skip


def _device(x: Tensor):
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


@torch.library.custom_op("gpu_accel::tk_chunked", mutates_args=())
def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, w: Tensor | None, initial: Tensor | None,
    cu_seqlens: Tensor | None, scale: float, chunk: int, segments: int, way: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q, k (batch, seqlen, heads of q, K); v (batch, seqlen, heads, V); g, w (batch, seqlen, heads) float32;
    initial (sequences, heads, K, V) float32; cu_seqlens (sequences + 1,) with batch 1. segments 0: chosen here.
    """
    q, k, v = _unit(q), _unit(k), _unit(v)
    initial = None if initial is None else initial.contiguous()
    places = _Places(v, cu_seqlens, chunk)
    heads = v.shape[2]
    group = heads // q.shape[2] if q.shape[2] else 1
    common = dict(scale=scale, chunk=chunk, segments=segments, heads=heads, group=group)
    with _device(v):
        if way.startswith("hopper or "):
            fits = walk_hopper.refusal(q, k, v, cu_seqlens, chunk) is None
            way = "hopper" if fits else way.removeprefix("hopper or ")
        if way == "hopper":
            return _hopper(q, k, v, g, w, initial, places, **common)
        if way == "walk":
            return _fused(q, k, v, g, w, initial, places, **common)
        states, final = _walk(k, v, g, w, initial, places, reverse=False, **common)
        # rows beyond the last of packed sequences are written by nobody
        o = v.new_empty(v.shape) if cu_seqlens is None else v.new_zeros(v.shape)
        programs = places.total * heads * -(-v.shape[-1] // _block(v.shape[-1]))
        if programs and places.seqlen:
            launch(
                kernels._output_kernel, programs,
                (q, k, v, g, w, states, o, *places.tables(), *_strides(q), *_strides(k), *_strides(v), *_strides(g),
                 *_strides(w), places.seqlen, places.chunks, heads, group, scale),
                _options(q, v, g, w, cu_seqlens, chunk),
            )  # fmt: skip
    return o, final


@chunked.register_fake
def _(q, k, v, g, w, initial, cu_seqlens, scale, chunk, segments, way):
    return v.new_empty(v.shape), v.new_empty(_state_shape(k, v, cu_seqlens), dtype=torch.float32)


@torch.library.custom_op("gpu_accel::tk_chunked_backward", mutates_args=())
def chunked_backward(
    do: Tensor, dfinal: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, w: Tensor | None,
    initial: Tensor | None, cu_seqlens: Tensor | None, scale: float, chunk: int, segments: int, want_dg: bool, way: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, g, w, initial; those of an absent g or w, or an unwanted g, are empty tensors."""
    do, q, k, v = _unit(do), _unit(q), _unit(k), _unit(v)
    initial, dfinal = (None if x is None else x.contiguous() for x in (initial, dfinal))
    places = _Places(v, cu_seqlens, chunk)
    heads, heads_q = v.shape[2], q.shape[2]
    group = heads // heads_q if heads_q else 1
    common = dict(scale=scale, chunk=chunk, segments=segments, heads=heads, group=group)
    want_dg = want_dg and g is not None
    if (want_dg or w is None) and way != "chunks" and v.numel():
        with _device(v):
            made = _walks_back(do, dfinal, q, k, v, g, w, initial, places, want_dg=want_dg, **common)
        if made is not None:
            return made
    common["exact"] = want_dg
    per_head = (*v.shape[:3], q.shape[3])
    wide = q.dtype if group == 1 else torch.float32
    fresh = torch.empty if cu_seqlens is None else torch.zeros
    dq, dk = (fresh(per_head, dtype=wide, device=v.device) for _ in range(2))
    dv = fresh(v.shape, dtype=v.dtype, device=v.device)
    most = 32 if v.dtype == torch.float32 else 64  # of _dqk_kernel, which holds four accumulators
    smaller = {"BK": _block(q.shape[3], most), "BV": _block(v.shape[3], most)}
    blocks_k, blocks_v = -(-q.shape[3] // smaller["BK"]), -(-v.shape[3] // _block(v.shape[3]))
    rows = v.shape[0] * v.shape[1]
    dg = fresh((blocks_k if want_dg else 0, *v.shape[:3]), dtype=torch.float32, device=v.device)
    dw = fresh((blocks_v if w is not None else 0, *v.shape[:3]), dtype=torch.float32, device=v.device)
    with _device(v):
        states, _ = _walk(k, v, g, w, initial, places, reverse=False, **common)
        dstates, dinitial = _walk(q, do, g, None, dfinal, places, reverse=True, **common)
        if places.total and heads and places.seqlen:
            strides = [s for x in (q, k, v, g, w, do) for s in _strides(x)]
            sizes = (places.seqlen, places.chunks, heads, group, scale, rows)
            options = _options(q, v, g, w, cu_seqlens, chunk)
            launch(kernels._dv_kernel, places.total * heads * blocks_v,
                   (q, k, v, g, w, do, dstates, dv, dw, *places.tables(), *strides, *sizes), options)  # fmt: skip
            launch(kernels._dqk_kernel, places.total * heads * blocks_k,
                   (q, k, v, g, w, do, states, dstates, dq, dk, dg, *places.tables(), *strides, *sizes),
                   options | smaller | {"WANT_DG": want_dg, "num_warps": _DQK_WARPS,
                                        "num_stages": copies_ahead(v.dtype)})  # fmt: skip
    if group > 1:
        dq, dk = (x.unflatten(2, (heads_q, group)).sum(3).to(q.dtype) for x in (dq, dk))
    dg = dg.sum(0) if want_dg else dg.new_empty(0)
    dw = dw.sum(0) if w is not None else dw.new_empty(0)
    return dq, dk, dv, dg, dw, dinitial


@chunked_backward.register_fake
def _(do, dfinal, q, k, v, g, w, initial, cu_seqlens, scale, chunk, segments, want_dg, way):
    gates = v.shape[:3]
    wide = torch.float32
    return (
        q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape),
        v.new_empty(gates if want_dg and g is not None else (0,), dtype=wide),
        v.new_empty(gates if w is not None else (0,), dtype=wide),
        v.new_empty(_state_shape(k, v, cu_seqlens), dtype=wide),
    )  # fmt: skip


refuse_second(chunked_backward, "linear attention by kernels")


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:7])
    ctx.scalars = inputs[7:10]
    ctx.way = "hopper or chunks" if inputs[10].startswith("hopper") else "chunks"
    ctx.shape = output[0].shape
    ctx.set_materialize_grads(False)


def _gradients(ctx, do, dfinal):
    q, k, v, g, w, initial, cu_seqlens = ctx.saved_tensors
    do = v.new_zeros(ctx.shape) if do is None else do
    need = ctx.needs_input_grad
    dq, dk, dv, dg, dw, dinitial = chunked_backward(
        do, dfinal, q, k, v, g, w, initial, cu_seqlens, *ctx.scalars, bool(need[3]), ctx.way
    )
    return (dq, dk, dv, dg if need[3] else None, dw if need[4] else None, dinitial if need[5] else None,
            None, None, None, None, None)  # fmt: skip


chunked.register_autograd(_gradients, setup_context=_save)


def default_scale(key_dim: int) -> float:
    """1 / sqrt(K), as the libraries have it."""
    return 1.0 / math.sqrt(max(1, key_dim))
