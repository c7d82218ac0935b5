"""Gated linear attention with the name and argument order of flash-linear-attention (fla 0.6), so that calls drop in.

    chunk_gla   S_t = diag(exp(g_t)) S_{t-1} + k_t v_t', one gate a step, head and key dimension (arXiv 2312.06635)

q, k, g (batch, seqlen, heads, K), v (batch, seqlen, heads, V). One gate a step and head is `linear.chunk_simple_gla`.
Values must be finite, as there: a NaN or Inf of v reaches rows of its chunk before it as well; zero padding.

    gpu_accel::tk_gla(q, k, v, g, initial, cu_seqlens, scale, chunk) -> (o, final state)
    gpu_accel::tk_gla_hopper(...) -> the same, by `gla_walk_kernel`
    gpu_accel::tk_gla_backward(do, dfinal, ...) -> (dq, dk, dv, dg, dinitial)

Backwards compute sums of gates and states again instead of keeping them, as in `chunked`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpu_accel.compat import INTERPRET
from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.flash_attention3.function import refuse_second
from gpu_accel.flash_attention3.launch import launch
from gpu_accel.thunderkittens import chunked, gla_hopper, gla_kernels, reference
from gpu_accel.thunderkittens.arguments import check_tensors, real
from gpu_accel.thunderkittens.linear import (
    _by_sequences,
    _check_copy,
    _flags,
    _need,
    _shape,
    _turned,
    _validate,
    choose,
)

# tests/gpu/test_gla.py has passed on an H200 (Triton 3.6.0) in bfloat16, float16 and float32, also packed. In float16
# more dimensions of K or V than these ask for more shared memory than there is.
_MOST_IN_FLOAT16 = 128
UNCHECKED = False  # True: "portable" takes them too, to test them
# How the kernels of all chunks are launched: the most columns of K and V a tile, warps, stages. WIDE_ROWS, for no tiles
# of 32 columns: 381 us for 594 of ROWS (8 x 2048 steps, 16 heads, K and V 128, on an H200).
ROWS = dict(block_k=64, block_v=64, num_warps=8, num_stages=2)
WIDE_ROWS = dict(block_k=64, block_v=64, num_warps=4, num_stages=1)
GRADIENTS = dict(block_k=32, block_v=64, num_warps=4)
MIRRORED = dict(block_v=64, num_warps=4)
# ptxas 12.8 loses the address of a tile of 32 columns of 16 bits that products read transposed, where nothing is loaded
# ahead (see `gpu_accel.testing.overwritten`): dq, dk and dg are wrong, or the access is illegal. So such tiles have 64.
_WHOLE_LINES = 64


class _Call:
    """What every kernel of a call is launched with."""

    def __init__(self, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, chunk: int) -> None:
        self.places = chunked._Places(v, cu_seqlens, chunk)
        self.chunk, self.heads, self.key_dim, self.value_dim = chunk, v.shape[2], k.shape[3], v.shape[3]
        self.most = 32 if v.dtype == torch.float32 else 64  # float32 takes three products for one, and registers
        self.common = dict(K=self.key_dim, V=self.value_dim, BT=chunk, VARLEN=cu_seqlens is not None,
                           PRECISION=chunked.precision(v.dtype))  # fmt: skip
        self.chunks = self.places.total * self.heads  # programs of the kernels that take all chunks at once
        self.any = bool(self.chunks and self.places.seqlen)
        self.sizes = (self.places.seqlen, self.places.chunks)

    def tiles(self, block_k: int = 64, block_v: int = 64, **options: int) -> tuple[dict, int, int]:
        """Options of a launch, and into how many blocks it cuts K and V."""
        bk = chunked._block(self.key_dim, min(block_k, self.most))
        bv = chunked._block(self.value_dim, min(block_v, self.most))
        return self.common | dict(BK=bk, BV=bv, **options), -(-self.key_dim // bk), -(-self.value_dim // bv)

    @property
    def levels(self) -> dict:
        return {"LEVELS": self.chunk.bit_length() - 1}


def _sums(call: _Call, g: Tensor) -> Tensor:
    sums = torch.empty(g.shape, dtype=torch.float32, device=g.device)
    options, blocks_k, _ = call.tiles(num_warps=4)
    if call.any:
        wanted = {name: options[name] for name in ("K", "BT", "BK", "VARLEN", "num_warps")}
        launch(gla_kernels._sums_kernel, call.chunks * blocks_k,
               (g, sums, *call.places.tables(), *g.stride(), *call.sizes, call.heads), wanted)  # fmt: skip
    return sums


def _states(call: _Call, x, values, sums, initial, scale: float, *, exact: bool, reverse: bool = False):
    """(states that enter every chunk, state at the end); reversed: gradients of those that leave, and of the first."""
    shape = (call.heads, call.key_dim, call.value_dim)
    states = values.new_empty((call.places.total, *shape), dtype=chunked.state_dtype(values.dtype, exact))
    final = values.new_empty((call.places.sequences, *shape), dtype=torch.float32)
    # three stages: 163 us for 186 (8 x 2048 steps, 16 heads, K and V 128, on an H200); reversed 165 for 147
    ahead = 3 if exact and not reverse and values.dtype == torch.bfloat16 else 2
    options, blocks_k, blocks_v = call.tiles(num_warps=4, num_stages=ahead)
    walks = call.places.sequences * call.heads * blocks_k * blocks_v
    if walks:
        launch(gla_kernels._states_kernel, walks,
               (x, values, sums, initial, states, final, *call.places.tables()[:2], *chunked._strides(x),
                *chunked._strides(values), *call.sizes, call.places.sequences, call.heads, scale),
               options | {"HAS_INITIAL": initial is not None, "REVERSE": reverse})  # fmt: skip
    return states, final


def _rows(call: _Call, q, k, values, sums, states, scale: float, *, reverse: bool) -> Tensor:
    """o, or reversed dv."""
    # rows beyond the last of packed sequences are written by nobody
    out = values.new_empty(values.shape) if call.places.cu is None else values.new_zeros(values.shape)
    if call.any:
        strides = [s for x in (q, k, values) for s in chunked._strides(x)]
        wide = values.dtype == torch.bfloat16 and all(64 < n <= 128 for n in (call.key_dim, call.value_dim))
        launch(gla_kernels._rows_kernel, call.chunks,
               (q, k, values, sums, states, out, *call.places.tables(), *strides, *call.sizes, call.heads, scale),
               call.tiles(**WIDE_ROWS if wide else ROWS)[0] | call.levels | {"REVERSE": reverse})  # fmt: skip
    return out


@torch.library.custom_op("gpu_accel::tk_gla", mutates_args=())
def gla_op(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None, scale: float,
    chunk: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q, k (batch, seqlen, heads, K), v (batch, seqlen, heads, V) of one dtype; g of the shape of q, any dtype;
    initial (sequences, heads, K, V) float32; cu_seqlens (sequences + 1,) with batch 1.
    """
    q, k, v = (chunked._unit(x) for x in (q, k, v))
    initial = None if initial is None else initial.contiguous()
    call = _Call(k, v, cu_seqlens, chunk)
    with chunked._device(v):
        sums = _sums(call, g)
        states, final = _states(call, k, v, sums, initial, scale, exact=False)
        return _rows(call, q, k, v, sums, states, scale, reverse=False), final


@torch.library.custom_op("gpu_accel::tk_gla_hopper", mutates_args=())
def gla_hopper_op(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None, scale: float,
    chunk: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `gla_op`, of what `gla_hopper.refusal` has nothing against."""
    initial = None if initial is None else initial.contiguous()
    if not v.numel():
        return chunked._of_no_values(k, v, initial)
    with chunked._device(v):
        return gla_hopper.forward(q, k, v, g, initial, scale=scale, segments=gla_hopper.segments_for(v, chunk))


@gla_hopper_op.register_fake
@gla_op.register_fake
def _(q, k, v, g, initial, cu_seqlens, scale, chunk):
    return v.new_empty(v.shape), v.new_empty(chunked._state_shape(k, v, cu_seqlens), dtype=torch.float32)


@torch.library.custom_op("gpu_accel::tk_gla_backward", mutates_args=())
def gla_backward_op(
    do: Tensor, dfinal: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial: Tensor | None,
    cu_seqlens: Tensor | None, scale: float, chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, g (float32) and initial."""
    do, q, k, v = (chunked._unit(x) for x in (do, q, k, v))
    initial, dfinal = (None if x is None else x.contiguous() for x in (initial, dfinal))
    call = _Call(k, v, cu_seqlens, chunk)
    fresh = torch.empty if cu_seqlens is None else torch.zeros
    dq, dk = (fresh(k.shape, dtype=k.dtype, device=k.device) for _ in range(2))
    dg = fresh(k.shape, dtype=torch.float32, device=k.device)
    with chunked._device(v):
        sums = _sums(call, g)
        # products of both states are summed up for dg: float32
        states, _ = _states(call, k, v, sums, initial, scale, exact=True)
        dstates, dinitial = _states(call, q, do, sums, dfinal, scale, exact=True, reverse=True)
        dv = _rows(call, q, k, do, sums, dstates, scale, reverse=True)
        ahead = chunked.copies_ahead(v.dtype)
        options, blocks_k, _ = call.tiles(num_stages=ahead, **GRADIENTS)
        if not INTERPRET and v.dtype != torch.float32 and (ahead == 1 or call.value_dim <= GRADIENTS["block_v"]):
            options |= dict(BK=_WHOLE_LINES, BV=_WHOLE_LINES)
            blocks_k = -(-call.key_dim // _WHOLE_LINES)
        if call.any:
            planes = call.levels["LEVELS"] + 2
            kind = torch.float32 if v.dtype == torch.float32 else torch.bfloat16
            ones = v.new_empty((planes, chunk, chunk), dtype=kind)
            launch(gla_kernels._ones_kernel, planes, (ones,), call.levels | dict(BT=chunk, num_warps=4))
            strides = [[s for x in some for s in chunked._strides(x)] for some in ((do, v), (q, k, v, do))]
            shape = (call.places.total, call.heads, chunk)
            mirrored, same = v.new_empty((*shape, chunk)), v.new_empty(shape, dtype=torch.float32)
            made = call.tiles(num_stages=2, **MIRRORED)[0]
            made = {name: x for name, x in made.items() if name not in ("K", "BK")}
            launch(
                gla_kernels._mirrored_kernel,
                call.chunks,
                (do, v, mirrored, same, *call.places.tables(), *strides[0], *call.sizes, call.heads, scale),
                made,
            )
            launch(gla_kernels._gradients_kernel, call.chunks * blocks_k,
                   (q, k, v, sums, ones, do, states, dstates, mirrored, same, dq, dk, dg, *call.places.tables(),
                    *strides[1], *call.sizes, call.heads, scale), options | call.levels)  # fmt: skip
    return dq, dk, dv, dg, dinitial


@gla_backward_op.register_fake
def _(do, dfinal, q, k, v, g, initial, cu_seqlens, scale, chunk):
    wide = torch.float32
    return (
        q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), v.new_empty(q.shape, dtype=wide),
        v.new_empty(chunked._state_shape(k, v, cu_seqlens), dtype=wide),
    )  # fmt: skip


refuse_second(gla_backward_op, "gated linear attention by kernels")


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:6])
    ctx.scalars = inputs[6:]
    ctx.shape = output[0].shape
    ctx.set_materialize_grads(False)


def _gradients(ctx, do, dfinal):
    q, k, v, g, initial, cu_seqlens = ctx.saved_tensors
    do = v.new_zeros(ctx.shape) if do is None else do
    dq, dk, dv, dg, dinitial = gla_backward_op(do, dfinal, q, k, v, g, initial, cu_seqlens, *ctx.scalars)
    return dq, dk, dv, dg.to(g.dtype), dinitial if ctx.needs_input_grad[4] else None, None, None, None


gla_op.register_autograd(_gradients, setup_context=_save)
gla_hopper_op.register_autograd(_gradients, setup_context=_save)


def refusal(v: Tensor, key_dim: int) -> str | None:
    """Why the kernels may not run on the GPU of v, or None."""
    if UNCHECKED or INTERPRET or not v.is_cuda or v.dtype != torch.float16:
        return None
    if max(key_dim, v.shape[3]) <= _MOST_IN_FLOAT16:
        return None
    return f"in float16 K and V are at most {_MOST_IN_FLOAT16} on a GPU, got {key_dim} and {v.shape[3]}"


def gated_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, scale: float | None = None, initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None, chunk: int = chunked.CHUNK, backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """S_t = diag(exp(g_t)) S_{t-1} + k_t v_t', o_t = scale S_t' q_t, differentiable in every tensor but cu_seqlens.

    Args:
        q, k: (batch, seqlen, heads, K); v: (batch, seqlen, heads, V); bfloat16, float16 or float32 (reference also
            float64), K and V up to 256.
        g: logarithms of gates (batch, seqlen, heads, K), of any of these dtypes, computed with in float32; gates below
            -88 count as -88 (exp of it is 6e-39), so -inf forgets everything before.
        scale: K**-0.5 unless given. initial_state: (sequences, heads, K, V).
        cu_seqlens: (sequences + 1,) int32 or int64, batch 1; values are checked on the CPU alone.
        chunk: steps that are done by matrix products at once, 16, 32 or 64.
        backend: "portable" (plain Triton; on a GPU in float16 with K and V up to 128), "hopper" (Gluon, on an H100 or
            H200: the forward in bfloat16, K up to 128, no packed sequences, chunks of 64, and portable gradients),
            "reference", or "auto": of these what was found right and fastest, see `explain_gla`.

    Returns:
        o (batch, seqlen, heads, V) in the dtype of v, and the final state (sequences, heads, K, V) float32.

    Raises:
        InvalidInputError: shapes, dtypes or devices do not fit. UnsupportedError: the backend cannot run here.
    """
    check_tensors({"q": q, "g": g})
    _validate(q, k, v, None, None, initial_state, cu_seqlens, chunk)
    _need(v.shape[2] == q.shape[2], f"q, k and v must have one number of heads, got {q.shape[2]} and {v.shape[2]}")
    _need(g.shape == q.shape, f"g must be (batch, seqlen, heads, K) {tuple(q.shape)}, got {_shape(g)}")
    scale = chunked.default_scale(q.shape[-1]) if scale is None else real("scale", scale)
    if backend == "hopper":
        why = gla_hopper.refusal(q, v, cu_seqlens, chunk)
        if why:
            raise UnsupportedError(f"the Hopper kernels: {why}; use backend='portable'")
    elif backend == "auto" and gla_hopper.auto_refusal(q, v, cu_seqlens, chunk) is None:
        backend = "hopper"
    if backend == "hopper":
        initial_state = None if initial_state is None else initial_state.float()
        return gla_hopper_op(q, k, v, g, initial_state, None, scale, chunk)
    why = refusal(v, q.shape[3])
    if choose(v, backend, why is None, ("hopper",)) == "portable":
        if why:
            raise UnsupportedError(f"{why}; use backend='reference'")
        initial_state = None if initial_state is None else initial_state.float()
        return gla_op(q, k, v, g, initial_state, cu_seqlens, scale, chunk)

    def one(part: slice, initial: Tensor | None) -> tuple[Tensor, Tensor]:
        return reference.gla_chunked(
            q[:, part], k[:, part], v[:, part], g[:, part], scale=scale, initial=initial, chunk=chunk
        )

    return _by_sequences(one, q, v, initial_state, cu_seqlens, k, g)


def explain_gla(
    q: Tensor, v: Tensor, *, cu_seqlens: Tensor | None = None, chunk: int = chunked.CHUNK, backend: str = "auto"
) -> str:
    """Which kernels `gated_linear_attention` takes for such tensors, forwards and backwards, and why not others.

    q: (batch, seqlen, heads, K); v: (batch, seqlen, heads, V); k and g decide nothing. Runs nothing; raises
    InvalidInputError and UnsupportedError as the call would.
    """
    check_tensors({"q": q, "v": v}, {"cu_seqlens": cu_seqlens}, ("cu_seqlens",))
    for name, x in (("q", q), ("v", v)):
        _need(x.dim() == 4, f"{name} must be (batch, seqlen, heads, dim), got {_shape(x)}")
    way = "forward: Gluon for Hopper, pairs of all chunks and a walk; gradients: plain Triton"
    if backend == "hopper":
        why = gla_hopper.refusal(q, v, cu_seqlens, chunk)
        if why:
            raise UnsupportedError(f"the Hopper kernels: {why}; use backend='portable'")
        return way
    why = gla_hopper.auto_refusal(q, v, cu_seqlens, chunk) if backend == "auto" else "asked for another backend"
    if why is None:
        return way
    not_portable = refusal(v, q.shape[3])
    chosen = choose(v, backend, not_portable is None, ("hopper",))
    not_hopper = f"not for Hopper: {why}"
    if chosen == "reference":
        return "; ".join(["both passes: plain torch", *([not_portable] if not_portable else []), not_hopper])
    return f"both passes: plain Triton; {not_hopper}"


def chunk_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, state_v_first: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, *, backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Gated linear attention; returns (o, final state or None). Arguments as in `gated_linear_attention`; for
    state_v_first and cu_seqlens_cpu see the head of linear.py."""
    if not isinstance(g, Tensor):
        raise InvalidInputError(f"g must be a tensor (batch, seqlen, heads, K), got {type(g).__name__}")
    output_final_state, state_v_first = _flags(output_final_state=output_final_state, state_v_first=state_v_first)
    _check_copy(q, k, v, cu_seqlens, cu_seqlens_cpu)
    o, state = gated_linear_attention(
        q, k, v, g, scale=scale, initial_state=_turned(initial_state, state_v_first), cu_seqlens=cu_seqlens,
        backend=backend,
    )  # fmt: skip
    return o, _turned(state, state_v_first) if output_final_state else None
