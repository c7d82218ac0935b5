"""The delta rule with names and argument orders of flash-linear-attention (fla 0.6), so that calls drop in.

    chunk_delta_rule         S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}' k_t)'        (DeltaNet, arXiv 2406.06484)
    chunk_gated_delta_rule   the same, with exp(g_t) S_{t-1} for S_{t-1}             (Gated DeltaNet, arXiv 2412.06464)

q, k (batch, seqlen, heads of q, K), v (batch, seqlen, heads, V), g and beta (batch, seqlen, heads). Keys should have
unit length (use_qk_l2norm_in_kernel divides q and k by theirs); with beta in 0 .. 2 the recurrence then cannot grow.
Values must be finite: a NaN or Inf of k or v reaches rows of its chunk before it as well (see `linear.py`); zero
padding.

    gpu_accel::tk_delta(q, k, v, g, beta, initial, cu_seqlens, scale, chunk) -> (o, final state)
    gpu_accel::tk_delta_hopper(...) -> the same, by `delta_solve_kernel` and `delta_walk_kernel`
    gpu_accel::tk_delta_backward(do, dfinal, ..., hopper) -> (dq, dk, dv, dg, dbeta, dinitial)
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.flash_attention3.function import refuse_second
from gpu_accel.flash_attention3.launch import launch, next_power_of_2
from gpu_accel.thunderkittens import chunked, chunked_kernels, delta_hopper, delta_kernels, reference
from gpu_accel.thunderkittens.arguments import check_tensors, real
from gpu_accel.thunderkittens.linear import (
    _NARROW,
    _by_sequences,
    _check_copy,
    _flags,
    _need,
    _shape,
    _turned,
    _validate,
    choose,
)

# What its tests in tests/gpu have passed on (H100, float16 on an H200; Triton 3.6.0): "auto" takes the kernels for that
# alone. In float16 a gated one had gradients of beta that ptxas had made wrong (see `delta_kernels._inputs_kernel`).
GPU_CHECKED = (torch.bfloat16, torch.float16, torch.float32)
LARGEST_KEY = 128  # one program holds a state of K rows
# How kernels are launched, and otherwise in bfloat16, unless sequences are packed, where it is faster: us, for those
# with 8 warps and 2 stages (8 x 2048 steps, 16 heads, K and V 128, with gates, on an H200).
_LAUNCH = dict(num_warps=8, num_stages=2)
_IN_BFLOAT16 = {
    "_solve_kernel": dict(num_warps=4, maxnreg=168),  # 201 for 489: three programs an SM; 235 with 255 registers
    "_walk_kernel": dict(num_warps=4),  # 125 for 194, with states in float32 152 for 205
    "_walk_back_kernel": dict(num_stages=3),  # 319 for 342, and 382 with 4 warps
    "_dqk_kernel": dict(num_warps=4, num_stages=1),  # 469 for 817
    "_inputs_kernel": dict(num_warps=4, BV=32),  # 376 for 480
}


def _tile(v: Tensor) -> int:
    """Columns of v a program; float32 takes more registers for a product."""
    return chunked._block(v.shape[-1], 32 if v.dtype == torch.float32 else 64)


class _Call:
    """What every kernel of a call is launched with."""

    def __init__(self, k: Tensor, v: Tensor, g: Tensor | None, cu_seqlens: Tensor | None, chunk: int) -> None:
        self.places = chunked._Places(v, cu_seqlens, chunk)
        self.heads, self.key_dim, self.value_dim = v.shape[2], k.shape[3], v.shape[3]
        self.group = self.heads // k.shape[2] if k.shape[2] else 1
        self.blocks_v = -(-self.value_dim // _tile(v))
        self.options = dict(
            K=self.key_dim, V=self.value_dim, BT=chunk, BK=max(16, next_power_of_2(self.key_dim)),
            BV=_tile(v), HAS_G=g is not None, VARLEN=cu_seqlens is not None,
            PRECISION=chunked.precision(v.dtype),
        )  # fmt: skip
        self.dtype, self.device = v.dtype, v.device
        self.chunks = self.places.total * self.heads  # programs of the kernels that take all chunks at once
        self.walks = self.places.sequences * self.heads * self.blocks_v
        self.sizes = (self.places.seqlen, self.places.chunks)
        self.any = bool(self.chunks and self.places.seqlen)

    def made(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Rows beyond packed sequences are written by nobody."""
        return (torch.empty if self.places.cu is None else torch.zeros)(shape, dtype=dtype, device=self.device)

    def faster(self, kernel) -> dict:
        """Packed sequences were not seen with it on a GPU."""
        fits = self.dtype == torch.bfloat16 and self.places.cu is None
        return _IN_BFLOAT16.get(kernel.fn.__name__, {}) if fits else {}

    def launch(self, kernel, programs: int, arguments: tuple, **more: object) -> None:
        launch(kernel, programs, arguments, self.options | _LAUNCH | self.faster(kernel) | more)


def _solve(call: _Call, k, v, g, beta, *, keep: bool = False):
    """(T, which is empty unless it is to be kept, decay, fresh) of `delta_kernels`."""
    rows, chunk = v.shape[:3], call.options["BT"]
    inverse = v.new_empty((*rows, chunk) if keep else (0,), dtype=chunked.state_dtype(v.dtype))
    decay, fresh = v.new_empty((*rows, call.key_dim)), v.new_empty(v.shape)
    if call.any:
        strides = [s for x in (k, v, g, beta) for s in chunked._strides(x)]
        call.launch(delta_kernels._solve_kernel, call.chunks,
                    (k, v, g, beta, inverse, decay, fresh, *call.places.tables(), *strides, *call.sizes, call.heads,
                     call.group), KEEP=keep, EXACT="tf32" if v.dtype == torch.bfloat16 else "tf32x3")  # fmt: skip
    return inverse, decay, fresh


def _walk(call: _Call, k, v, g, decay, fresh, initial, *, exact: bool, low: Tensor | None = None):
    """(u, states that enter every chunk, state at the end). low: for what their dtype leaves of states."""
    shape = (call.heads, call.key_dim, call.value_dim)
    states = v.new_empty((call.places.total, *shape), dtype=chunked.state_dtype(v.dtype, exact))
    final = v.new_empty((call.places.sequences, *shape), dtype=torch.float32)
    u = v.new_empty(v.shape)
    if call.walks:
        call.launch(delta_kernels._walk_kernel, call.walks,
                    (k, g, decay, fresh, initial, states, low, u, final, *call.places.tables()[:2],
                     *chunked._strides(k), *chunked._strides(g), *call.sizes, call.places.sequences, call.heads,
                     call.group),
                    HAS_INITIAL=initial is not None)  # fmt: skip
    return u, states, final


def _in_chunks(call: _Call, do, q, k, v, g, beta, u, du, inverse, states, dstates, scale: float):
    """(dq, dk, dv, dbeta, dg) of what the walk back made."""
    rows, want_dg = v.shape[:3], g is not None
    dq, dk = (call.made(*rows, call.key_dim, dtype=q.dtype if call.group == 1 else torch.float32) for _ in range(2))
    direct = call.made(*rows, call.key_dim)  # what dk has but through U
    dv, dbeta, dg = call.made(*v.shape, dtype=v.dtype), call.made(*rows), call.made(*(rows if want_dg else (0,)))
    most = 32 if v.dtype == torch.float32 else 64
    smaller = {"BK": chunked._block(call.key_dim, most), "BV": chunked._block(call.value_dim, most)}
    blocks_k = -(-call.key_dim // smaller["BK"])
    planes = call.made(blocks_k if want_dg else 0, *rows)
    if call.any:
        tables, kernel = call.places.tables(), chunked_kernels._dqk_kernel
        strides = [s for x in (q, k, u, g, None, do) for s in chunked._strides(x)]
        launch(kernel, call.chunks * blocks_k,
               (q, k, u, g, None, do, states, dstates, dq, direct, planes, *tables, *strides, *call.sizes, call.heads,
                call.group, scale, v.shape[0] * v.shape[1]),
               chunked._options(q, v, g, None, call.places.cu, call.options["BT"]) | smaller
               | {"WANT_DG": want_dg, "WHOLE": want_dg, "num_warps": chunked._DQK_WARPS,
                  "num_stages": chunked.copies_ahead(v.dtype)} | call.faster(kernel))  # fmt: skip
        strides = [s for x in (k, v, g, beta) for s in chunked._strides(x)]
        call.launch(delta_kernels._inputs_kernel, call.chunks,
                    (k, v, g, beta, inverse, u, du, states, direct, planes, dk, dv, dg, dbeta, *tables, *strides,
                     *call.sizes, call.heads, call.group, v.shape[0] * v.shape[1]), PLANES=planes.shape[0])  # fmt: skip
    return dq, dk, dv, dbeta, dg


@torch.library.custom_op("gpu_accel::tk_delta", mutates_args=())
def delta_op(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, initial: Tensor | None,
    cu_seqlens: Tensor | None, scale: float, chunk: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """g and beta float32, initial (sequences, heads, K, V) float32; cu_seqlens (sequences + 1,) with batch 1."""
    q, k, v = (chunked._unit(x) for x in (q, k, v))
    initial = None if initial is None else initial.contiguous()
    call = _Call(k, v, g, cu_seqlens, chunk)
    with chunked._device(v):
        _, decay, fresh = _solve(call, k, v, g, beta)
        u, states, final = _walk(call, k, v, g, decay, fresh, initial, exact=False)
        o = v.new_empty(v.shape) if cu_seqlens is None else v.new_zeros(v.shape)
        if call.any:
            strides = [s for x in (q, k, u, g, None) for s in chunked._strides(x)]
            launch(chunked_kernels._output_kernel, call.chunks * -(-call.value_dim // chunked._block(call.value_dim)),
                   (q, k, u, g, None, states, o, *call.places.tables(), *strides, *call.sizes, call.heads, call.group,
                    scale), chunked._options(q, v, g, None, cu_seqlens, chunk))  # fmt: skip
    return o, final


@torch.library.custom_op("gpu_accel::tk_delta_hopper", mutates_args=())
def delta_hopper_op(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, initial: Tensor | None,
    cu_seqlens: Tensor | None, scale: float, chunk: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `delta_op`, of what `delta_hopper.refusal` has nothing against."""
    q, k, v = (chunked._unit(x) for x in (q, k, v))
    initial = None if initial is None else initial.contiguous()
    if not v.numel():
        return chunked._of_no_values(k, v, initial)
    with chunked._device(v):
        return delta_hopper.forward(q, k, v, g, beta, initial, scale)


@delta_hopper_op.register_fake
@delta_op.register_fake
def _(q, k, v, g, beta, initial, cu_seqlens, scale, chunk):
    return v.new_empty(v.shape), v.new_empty(chunked._state_shape(k, v, cu_seqlens), dtype=torch.float32)


@torch.library.custom_op("gpu_accel::tk_delta_backward", mutates_args=())
def delta_backward_op(
    do: Tensor, dfinal: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor,
    initial: Tensor | None, cu_seqlens: Tensor | None, scale: float, chunk: int, hopper: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, g (empty without gates), beta and initial; hopper: of what `tk_delta_hopper` took."""
    do, q, k, v = (chunked._unit(x) for x in (do, q, k, v))
    initial, dfinal = (None if x is None else x.contiguous() for x in (initial, dfinal))
    call = _Call(k, v, g, cu_seqlens, chunk)
    solves = hopper and bool(v.numel())
    in_chunks = solves and delta_hopper.back_refusal(v) is None
    exact = g is not None and not in_chunks
    shape = (call.heads, call.key_dim, call.value_dim)
    dstates = v.new_empty((call.places.total, *shape), dtype=chunked.state_dtype(v.dtype, exact))
    low, dlow = (torch.empty_like(dstates) if in_chunks and g is not None else None for _ in range(2))
    dinitial = v.new_empty((call.places.sequences, *shape), dtype=torch.float32)
    du = call.made(*v.shape, dtype=v.dtype)
    with chunked._device(v):
        if solves:
            of_q = q if in_chunks else None
            decay, fresh, lines, pairs, inverse = delta_hopper.solve(of_q, k, v, g, beta, scale, keep=True)
        else:
            inverse, decay, fresh = _solve(call, k, v, g, beta, keep=True)
        u, states, _ = _walk(call, k, v, g, decay, fresh, initial, exact=exact, low=low)
        if in_chunks:
            delta_hopper.walk_back(q, k, do, decay, lines[0], pairs, dfinal, du, dstates, dlow, dinitial, scale)
            dq, dk, dv, dbeta, dg = delta_hopper.gradients(
                q, k, v, u, do, du, inverse, (states, low), (dstates, dlow), *lines, scale
            )
        else:
            if call.walks:
                strides = [s for x in (q, k, g, do) for s in chunked._strides(x)]
                call.launch(delta_kernels._walk_back_kernel, call.walks,
                            (q, k, g, decay, do, dfinal, dstates, du, dinitial, *call.places.tables()[:2], *strides,
                             *call.sizes, call.places.sequences, call.heads, call.group, scale),
                            HAS_FINAL=dfinal is not None)  # fmt: skip
            dq, dk, dv, dbeta, dg = _in_chunks(call, do, q, k, v, g, beta, u, du, inverse.contiguous(), states, dstates,
                                                scale)  # fmt: skip
    if call.group > 1:
        dq, dk = (x.unflatten(2, (q.shape[2], call.group)).sum(3) for x in (dq, dk))
    return dq.to(q.dtype), dk.to(k.dtype), dv, dg, dbeta, dinitial


@delta_backward_op.register_fake
def _(do, dfinal, q, k, v, g, beta, initial, cu_seqlens, scale, chunk, hopper=False):
    wide = torch.float32
    return (
        q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape),
        v.new_empty(v.shape[:3] if g is not None else (0,), dtype=wide), v.new_empty(v.shape[:3], dtype=wide),
        v.new_empty(chunked._state_shape(k, v, cu_seqlens), dtype=wide),
    )  # fmt: skip


refuse_second(delta_backward_op, "the delta rule by kernels")


def _save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:7])
    ctx.scalars = inputs[7:]
    ctx.shape = output[0].shape
    ctx.set_materialize_grads(False)


def _gradients(ctx, do, dfinal, hopper=False):
    q, k, v, g, beta, initial, cu_seqlens = ctx.saved_tensors
    do = v.new_zeros(ctx.shape) if do is None else do
    need = ctx.needs_input_grad
    dq, dk, dv, dg, dbeta, dinitial = delta_backward_op(
        do, dfinal, q, k, v, g, beta, initial, cu_seqlens, *ctx.scalars, hopper
    )
    return dq, dk, dv, dg if need[3] else None, dbeta, dinitial if need[5] else None, None, None, None


delta_op.register_autograd(_gradients, setup_context=_save)
delta_hopper_op.register_autograd(functools.partial(_gradients, hopper=True), setup_context=_save)


def _unit_length(x: Tensor) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide * (wide.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, *, g: Tensor | None = None, scale: float | None = None,
    initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None, chunk: int = chunked.CHUNK,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """u_t = beta_t (v_t - exp(g_t) S_{t-1}' k_t), S_t = exp(g_t) S_{t-1} + k_t u_t', o_t = scale S_t' q_t.

    Args:
        q, k: (batch, seqlen, heads of q, K); v: (batch, seqlen, heads, V), heads a multiple of those of q.
        beta: (batch, seqlen, heads); g: logarithms of gates (batch, seqlen, heads) or None. Computed with in float32;
            gates below -88 count as -88.
        scale: K**-0.5 unless given. initial_state: (sequences, heads, K, V); cu_seqlens: (sequences + 1,), batch 1.
        chunk: steps that are done by matrix products at once, 16, 32 or 64.
        backend: "portable" (plain Triton), "hopper" (in Gluon, on an H100 or H200, in bfloat16, K up to 128, no packed
            sequences, chunks of 64; gradients but for the walk forwards, with V up to 128 and a head of q for each of
            v, else only what chunks solve), "reference", or "auto": the first of hopper, with K and V above 32, and
            portable that can run.

    Returns:
        o (batch, seqlen, heads, V) in the dtype of v, and the final state (sequences, heads, K, V) float32.

    Raises:
        InvalidInputError: shapes, dtypes or devices do not fit. UnsupportedError: the backend cannot run here, or K is
            more than the kernels hold.
    """
    check_tensors({"q": q, "beta": beta})
    _validate(q, k, v, g, beta, initial_state, cu_seqlens, chunk, "beta")
    scale = chunked.default_scale(q.shape[-1]) if scale is None else real("scale", scale)
    if backend == "hopper":
        why = delta_hopper.refusal(q, v, cu_seqlens, chunk)
        if why:
            raise UnsupportedError(f"the Hopper kernel: {why}; use backend='portable'")
    elif backend == "auto" and delta_hopper.auto_refusal(q, v, cu_seqlens, chunk) is None:
        backend = "hopper"
    if backend == "hopper":
        g, initial_state = (None if x is None else x.float() for x in (g, initial_state))
        return delta_hopper_op(q, k, v, g, beta.float(), initial_state, None, scale, chunk)
    if q.shape[-1] > LARGEST_KEY:
        if backend == "portable":
            raise UnsupportedError(f"K is {q.shape[-1]}; the kernels of the delta rule hold {LARGEST_KEY}")
        backend = "reference" if backend == "auto" else backend
    if choose(v, backend, v.dtype in GPU_CHECKED and min(q.shape[3], v.shape[3]) > _NARROW, ("hopper",)) == "portable":
        g, initial_state = (None if x is None else x.float() for x in (g, initial_state))
        return delta_op(q, k, v, g, beta.float(), initial_state, cu_seqlens, scale, chunk)

    def one(part: slice, initial: Tensor | None) -> tuple[Tensor, Tensor]:
        return reference.delta_rule_chunked(
            q[:, part], k[:, part], v[:, part], beta[:, part], g=None if g is None else g[:, part], scale=scale,
            chunk=chunk, initial=initial,
        )  # fmt: skip

    return _by_sequences(one, q, v, initial_state, cu_seqlens, k, g, beta)


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False, allow_neg_eigval: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, *, backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The gated delta rule; returns (o, final state or None). Arguments as in `delta_rule`, and:

    use_qk_l2norm_in_kernel: q and k are brought to unit length. use_beta_sigmoid_in_kernel: beta is the sigmoid of what
    is given, with allow_neg_eigval twice that. For state_v_first and cu_seqlens_cpu see the head of linear.py.
    """
    if not isinstance(beta, Tensor):
        raise InvalidInputError(f"beta must be a tensor (batch, seqlen, heads), got {type(beta).__name__}")
    check_tensors({"q": q, "k": k, "beta": beta})
    _need(q.dim() > 0 and k.dim() > 0, f"q and k must be (batch, seqlen, heads, K), got {_shape(q)}, {_shape(k)}")
    _need(beta.dim() == 3, f"beta must be (batch, seqlen, heads), got {_shape(beta)}")
    output_final_state, normalise, logits, twice, state_v_first = _flags(
        output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
    )  # fmt: skip
    _need(logits or not twice, "allow_neg_eigval doubles the sigmoid of use_beta_sigmoid_in_kernel, which is off")
    _check_copy(q, k, v, cu_seqlens, cu_seqlens_cpu)
    if normalise:
        q, k = _unit_length(q), _unit_length(k)
    if logits:
        beta = beta if beta.dtype == torch.float64 else beta.float()
        beta = (2.0 if twice else 1.0) * beta.sigmoid()
    o, state = delta_rule(
        q, k, v, beta, g=g, scale=scale, initial_state=_turned(initial_state, state_v_first), cu_seqlens=cu_seqlens,
        backend=backend,
    )  # fmt: skip
    return o, _turned(state, state_v_first) if output_final_state else None


def chunk_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False, cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None, *, state_v_first: bool = False, backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The delta rule without gates; returns (o, final state or None). Arguments as in `delta_rule`."""
    return chunk_gated_delta_rule(
        q, k, v, None, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        state_v_first=state_v_first, cu_seqlens=cu_seqlens, cu_seqlens_cpu=cu_seqlens_cpu, backend=backend,
    )  # fmt: skip
