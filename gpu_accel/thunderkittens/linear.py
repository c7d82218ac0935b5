"""Linear attention with names and argument orders of flash-linear-attention (fla 0.6), so that calls drop in.

    chunk_linear_attn   no gates           chunk_retention   one decay a head, 1 - 2^(-5 - h) (arXiv 2307.08621)
    chunk_simple_gla    one gate a step and head (arXiv 2312.06635, section 4, with scalar gates)

All take q, k (batch, seqlen, heads, K) and v (batch, seqlen, heads, V) in bfloat16, float16 or float32 (the reference
also float64), and return (o, final state or None). States are (sequences, heads, K, V) float32, with state_v_first
(sequences, heads, V, K). With cu_seqlens (sequences + 1,) the batch is 1 and sequences lie one after another; rows
beyond the last belong to none, may hold anything, and give zeros. cu_seqlens_cpu is a copy of it on the CPU, with which
its values are checked without waiting for a GPU; the kernels do without.

Values must be finite, but for gates of -inf. Within a chunk the sum over earlier steps is a product with a triangle of
weights, and zero times NaN or Inf is NaN: one in v (in the delta rule also in k) makes NaN of the rows of its chunk
before it too, not only of those behind. Zero what pads; do not leave it as it was allocated.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gpu_accel.errors import HardwareError, InvalidInputError, UnsupportedError, shown
from gpu_accel.flash_attention3.launch import launch
from gpu_accel.flash_attention3.problem import check_first_gradient, check_flag
from gpu_accel.thunderkittens import chunked, gates_kernel, reference, walk_hopper
from gpu_accel.thunderkittens.arguments import check_copy, check_cu_seqlens, check_tensors, integer, real

BACKENDS = ("auto", "portable", "reference")
_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# What tests/gpu/test_thunderkittens.py has passed on (H100, Triton 3.6.0): "auto" takes the kernels for that alone.
GPU_CHECKED = True
# The same for `walk_kernel` in Gluon (test_walks.py): "auto" takes its forward where it can run.
HOPPER_CHECKED = True
_NARROW = 16  # K and V up to this have run on a card in 16 bits only (test_tiles_of_16_columns)
_WALKED_KEYS = range(33, 129)  # of one walk, in bfloat16, that those tests passed on
_DECAYS = 64  # of retention, of a program that makes them
LARGEST_DIM = 256
MOST_SEGMENTS = 1024  # of one sequence: each has sums of its own in memory


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidInputError(message)


def _flags(**given: object) -> list[bool]:
    """True or False, each of them: a text would be taken for True."""
    return [check_flag(name, x) for name, x in given.items()]


def _shape(x: Tensor) -> str:
    return f"{tuple(x.shape)} {x.dtype}"


def _refuse(why: str | None) -> None:
    if why is not None:
        raise UnsupportedError(f"backend 'hopper': {why}")


def choose(x: Tensor, backend: str, checked: bool | None = None, others: tuple[str, ...] = ()) -> str:
    """ "portable" or "reference". checked: whether "auto" may take the kernels on a GPU; None: GPU_CHECKED.
    others: names that the caller has dealt with.

    Raises InvalidInputError for another name; UnsupportedError where the kernels do not take the dtype or device.
    """
    from gpu_accel.compat import INTERPRET

    _need(backend in BACKENDS, f"backend is {backend!r}; choose one of {', '.join(BACKENDS + others)}")
    if backend == "auto":
        checked = GPU_CHECKED if checked is None else checked
        backend = "portable" if x.is_cuda and checked and x.dtype in _KERNEL_DTYPES else "reference"
    if backend == "portable":
        if x.dtype not in _KERNEL_DTYPES:
            raise UnsupportedError(f"the kernels take bfloat16, float16 and float32, got {x.dtype}; use 'reference'")
        if not x.is_cuda and not INTERPRET:
            raise UnsupportedError("the kernels need a GPU, or TRITON_INTERPRET=1; use backend='reference' on a CPU")
    return backend


def _validate(q: Tensor, k: Tensor, v: Tensor, g, w, initial, cu_seqlens, chunk: int, w_name: str = "w") -> None:
    optional = {"g": g, w_name: w, "initial_state": initial, "cu_seqlens": cu_seqlens}
    check_tensors({"q": q, "k": k, "v": v}, optional, ("cu_seqlens",))
    for name, x in (("q", q), ("k", k), ("v", v)):
        _need(x.dim() == 4, f"{name} must be (batch, seqlen, heads, dim), got {_shape(x)}")
        _need(x.dtype == q.dtype, f"q, k and v must have one dtype, got {_shape(q)}, {_shape(x)}")
    _need(q.shape == k.shape, f"q and k must have one shape, got {tuple(q.shape)} and {tuple(k.shape)}")
    _need(q.shape[:2] == v.shape[:2], f"batch and seqlen differ: q {tuple(q.shape)}, v {tuple(v.shape)}")
    heads, heads_q = v.shape[2], q.shape[2]
    _need(
        heads == heads_q or (heads_q > 0 and heads % heads_q == 0),
        f"the {heads} heads of v must be a multiple of the {heads_q} of q and k",
    )
    _need(
        0 < q.shape[3] <= LARGEST_DIM and 0 < v.shape[3] <= LARGEST_DIM,
        f"head dimensions must be 1 to {LARGEST_DIM}, got {q.shape[3]} and {v.shape[3]}",
    )
    for name, x in (("g", g), (w_name, w)):
        if x is not None:
            _need(x.shape == v.shape[:3],
                  f"{name} must be (batch, seqlen, heads) {tuple(v.shape[:3])}, got {_shape(x)}")  # fmt: skip
    sequences = v.shape[0]
    if cu_seqlens is not None:
        _need(v.shape[0] == 1, f"with cu_seqlens the batch must be 1, got {v.shape[0]}; flatten the sequences")
        check_cu_seqlens(cu_seqlens, v.shape[1])
        sequences = cu_seqlens.shape[0] - 1
    if initial is not None:
        wanted = (sequences, heads, q.shape[3], v.shape[3])
        _need(initial.shape == wanted,
              f"initial_state must be (sequences, heads, K, V) {wanted}, got {_shape(initial)}")  # fmt: skip
    _need(isinstance(chunk, int) and chunk in (16, 32, 64), f"the chunk must be 16, 32 or 64, got {shown(chunk)}")


def _turned(state: Tensor | None, state_v_first: bool) -> Tensor | None:
    """A state with keys first from one with values first, and back."""
    return state.transpose(-2, -1) if state_v_first and isinstance(state, Tensor) and state.dim() == 4 else state


def _check_copy(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, copy: Tensor | None) -> None:
    if copy is not None:
        _validate(q, k, v, None, None, None, cu_seqlens, chunked.CHUNK)
        check_copy(cu_seqlens, copy, v.shape[1])


def _of_no_steps(o: Tensor, *given: Tensor | None) -> Tensor:
    """Zeros of a reference that took no step, which depend on what was given: gradients are zeros, not absent."""
    return o + sum(x[:0].sum().to(o.dtype) for x in given if x is not None)


def _by_sequences(
    one: Callable[[slice, Tensor | None], tuple[Tensor, Tensor]], q: Tensor, v: Tensor, initial: Tensor | None,
    cu_seqlens: Tensor | None, *others: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(o, final states) by a reference, one(rows, first state) of a sequence after the other.

    q, v, initial and others: all that gradients may be asked of.
    """
    edges = [0, v.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    outs, finals = [], []
    for n, (start, stop) in enumerate(zip(edges, edges[1:], strict=False)):
        first = initial if cu_seqlens is None or initial is None else initial[n : n + 1]
        o, final = one(slice(start, stop), first)
        outs.append(o)
        finals.append(final)
    if cu_seqlens is not None:
        outs.append(torch.zeros_like(v[:, edges[-1] :]))
    o = torch.cat(outs, 1)
    if not edges[-1]:
        o = _of_no_steps(o, q, v, initial, *others)
    state = torch.cat(finals) if finals else v.new_empty((0, v.shape[2], q.shape[3], v.shape[3]))
    return o, state if v.dtype == torch.float64 else state.float()


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, g: Tensor | None = None, w: Tensor | None = None, scale: float | None = None,
    initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None, chunk: int = chunked.CHUNK,
    segments: int = 0, fused: bool | None = None, backend: str = "auto",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """S_t = exp(g_t) S_{t-1} + w_t k_t v_t', o_t = scale q_t' S_t, differentiable in every tensor but cu_seqlens.

    Args:
        q, k: (batch, seqlen, heads of q, K); v: (batch, seqlen, heads, V), heads a multiple of those of q.
        g: logarithms of gates, w: weights, (batch, seqlen, heads), computed with in float32; None: 0 and 1. Gates
            below -88 count as -88 (exp of it is 6e-39), so -inf forgets everything before.
        scale: K**-0.5 unless given. initial_state: (sequences, heads, K, V).
        cu_seqlens: (sequences + 1,) int32 or int64, from 0 on, not decreasing, at most seqlen. Values are checked on
            the CPU alone: on a GPU that would wait for it, and wrong ones read and write what is not theirs.
        chunk: steps that are done by matrix products at once. segments: parts that a sequence is
            cut into by kernels, up to 1024; 0 lets the launcher choose.
        fused: the portable forward as one walk that keeps the state in registers (K up to 128, bfloat16 and float16),
            or as two kernels with all chunks at once. None: one walk in bfloat16 with K from 33 to 128.
        backend: "hopper" is the walk in Gluon, bfloat16 and float16 on compute capability 9.0, with gradients by walks
            too where those were seen right on a card, as Mamba-2's, and else by the portable kernels; "portable",
            "reference"; "auto": the first of them that can run, and was seen right on a card. In float16 nothing but
            results can overflow in walks (see `walk_kernel`); the portable kernels round products of q and k, times
            weights and scale, to float16.

    Returns:
        o (batch, seqlen, heads, V) in the dtype of v, and the final state (sequences, heads, K, V) float32.

    Raises:
        InvalidInputError: shapes, dtypes or devices do not fit. UnsupportedError: the backend cannot run here.
    """
    _validate(q, k, v, g, w, initial_state, cu_seqlens, chunk)
    segments = integer("segments", segments, 0, MOST_SEGMENTS)
    fused = None if fused is None else check_flag("fused", fused)
    scale = chunked.default_scale(q.shape[-1]) if scale is None else real("scale", scale)
    if backend == "hopper":
        _need(fused is None, "fused is for the portable kernels")
        _refuse(walk_hopper.refusal(q, k, v, cu_seqlens, chunk))
        g, w, initial_state = (None if x is None else x.float() for x in (g, w, initial_state))
        return chunked.chunked(q, k, v, g, w, initial_state, None, scale, chunk, segments, "hopper")
    seen = v.dtype != torch.float32 or min(q.shape[3], v.shape[3]) > _NARROW
    if choose(v, backend, GPU_CHECKED and seen, others=("hopper",)) == "portable":
        g, w, initial_state = (None if x is None else x.float() for x in (g, w, initial_state))
        given, refusal = fused, chunked.fused_refusal(q.shape[-1], v.dtype)
        if fused and refusal:
            raise UnsupportedError(f"fused=True: {refusal}; use fused=None")
        if fused is None:
            fused = v.dtype == torch.bfloat16 and _WALKED_KEYS[0] <= q.shape[-1] <= _WALKED_KEYS[-1]
        hopper = "hopper or " if backend == "auto" and HOPPER_CHECKED and given is None else ""
        way = hopper + ("walk" if fused else "chunks")
        return chunked.chunked(q, k, v, g, w, initial_state, cu_seqlens, scale, chunk, segments, way)
    if fused:
        raise UnsupportedError(f"fused=True: backend {backend!r} is not by kernels here; use fused=None")

    def one(part: slice, initial: Tensor | None) -> tuple[Tensor, Tensor]:
        return reference.linear_attention_chunked(
            q[:, part], k[:, part], v[:, part], g=None if g is None else g[:, part],
            w=None if w is None else w[:, part], scale=scale, chunk=chunk, initial=initial,
        )  # fmt: skip

    return _by_sequences(one, q, v, initial_state, cu_seqlens, k, g, w)


def _normalized(
    o: Tensor, q: Tensor, k: Tensor, scale: float, cu_seqlens: Tensor | None, floor: float = 1e-10
) -> Tensor:
    """o divided by scale q_t' (k_1 + ... + k_t), the sum of the weights of linear attention."""
    if cu_seqlens is not None:  # what lies beyond the last sequence must not reach any gradient
        inside = (torch.arange(k.shape[1], device=k.device) < cu_seqlens[-1])[None, :, None, None]
        q, k = torch.where(inside, q, 0.0), torch.where(inside, k, 0.0)
    sums = k.float().cumsum(1) if k.dtype != torch.float64 else k.cumsum(1)
    if cu_seqlens is not None and k.shape[1]:
        rows = torch.arange(k.shape[1], device=k.device)
        which = torch.searchsorted(cu_seqlens[1:].contiguous(), rows, right=True).clamp_max(cu_seqlens.numel() - 2)
        before = torch.nn.functional.pad(sums, (0, 0, 0, 0, 1, 0))[:, cu_seqlens[which].long()]
        sums = sums - before
    z = (q.to(sums.dtype) * sums).sum(-1, keepdim=True) * scale
    if z.shape[2] != o.shape[2]:
        z = z.repeat_interleave(o.shape[2] // z.shape[2], 2)
    return (o.to(z.dtype) / (z + floor)).to(o.dtype)


@torch.library.custom_op("gpu_accel::tk_normalised_walk", mutates_args=())
def normalised_walk(q: Tensor, k: Tensor, v: Tensor, scale: float, floor: float) -> Tensor:
    """Linear attention divided by the sum of its weights (plus floor), by `walk_kernel` where that can run."""
    with chunked._device(v):
        if not v.numel():
            return torch.empty(v.shape, dtype=v.dtype, device=v.device)
        if walk_hopper.refusal(q, k, v, None, chunked.CHUNK) is None:
            return walk_hopper.walk(q, k, v, None, None, None, None, None, scale=scale, segments=1, norm=floor)[0]
        return _normalised_in_steps(q, k, v, scale, floor)


def _normalised_in_steps(q: Tensor, k: Tensor, v: Tensor, scale: float, floor: float) -> Tensor:
    o, _ = linear_attention(q, k, v, scale=scale, backend="portable")
    return _normalized(o, q, k, scale, None, floor)


@normalised_walk.register_fake
def _(q, k, v, scale, floor):
    return torch.empty(v.shape, dtype=v.dtype, device=v.device)


def _normalised_save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3])
    ctx.scale, ctx.floor = inputs[3:]


def _normalised_gradients(ctx, do):
    saved = ctx.saved_tensors
    check_first_gradient("linear attention in one walk", do, *saved)
    with torch.enable_grad():
        q, k, v = (x.detach().requires_grad_() for x in saved)
        o = _normalised_in_steps(q, k, v, ctx.scale, ctx.floor)
    return *torch.autograd.grad(o, (q, k, v), do), None, None


normalised_walk.register_autograd(_normalised_gradients, setup_context=_normalised_save)


def takes_normalised_walk(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, backend: str) -> bool:
    """Whether `normalised_walk` is to run: asked for, or "auto" where it was seen right and fills the GPU.

    Raises UnsupportedError where it was asked for and cannot run.
    """
    if backend == "hopper":
        _refuse(walk_hopper.refusal(q, k, v, cu_seqlens, chunked.CHUNK))
        return True
    heads = v.shape[0] * v.shape[2] * -(-v.shape[3] // 64)
    few = chunked.segments_for(1, heads, 1, -(-v.shape[1] // chunked.CHUNK)) > 1  # sequences are not cut here
    sizes = walk_hopper.size_refusal(q, v, cu_seqlens, chunked.CHUNK) is None
    return backend == "auto" and HOPPER_CHECKED and v.is_cuda and v.dtype == torch.bfloat16 and sizes and not few


def chunk_linear_attn(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, normalize: bool = True, cu_seqlens: Tensor | None = None, *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Linear attention without gates; returns (o, final state or None). Arguments as in `linear_attention`.

    normalize divides by the sum of weights, q_t' (k_1 + ... + k_t). Raises UnsupportedError for normalize with an
    initial state: what its keys sum to is not in it.
    """
    normalize, output_final_state = _flags(normalize=normalize, output_final_state=output_final_state)
    if normalize and initial_state is not None:
        raise UnsupportedError("normalize=True with an initial state: the sum of earlier keys is unknown")
    _validate(q, k, v, None, None, initial_state, cu_seqlens, chunked.CHUNK)
    scale = chunked.default_scale(q.shape[-1]) if scale is None else real("scale", scale)
    if normalize and not output_final_state and takes_normalised_walk(q, k, v, cu_seqlens, backend):
        return normalised_walk(q, k, v, scale, 1e-10), None
    o, state = linear_attention(
        q, k, v, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens, backend=backend
    )
    if normalize:
        o = _normalized(o, q, k, scale, cu_seqlens)
    return o, state if output_final_state else None


def chunk_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    state_v_first: bool = False, cu_seqlens: Tensor | None = None, cu_seqlens_cpu: Tensor | None = None, *,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Linear attention with one gate a step and head; returns (o, final state or None).

    Arguments as in `linear_attention`. g: log gates (batch, seqlen, heads); g_gamma: log decays (heads,), the same at
    every step. Both: their sum.
    """
    output_final_state, state_v_first = _flags(output_final_state=output_final_state, state_v_first=state_v_first)
    _check_copy(q, k, v, cu_seqlens, cu_seqlens_cpu)
    if g_gamma is not None:
        check_tensors({"v": v, "g_gamma": g_gamma}, {"g": g})
        _need(v.dim() == 4 and (g is None or g.shape == v.shape[:3]), "v must be (batch, seqlen, heads, dim), and g "
              f"(batch, seqlen, heads), got v {_shape(v)}")  # fmt: skip
        _need(g_gamma.shape == v.shape[2:3], f"g_gamma must be (heads,) ({v.shape[2]},), got {_shape(g_gamma)}")
        decay = g_gamma.float()[None, None]
        g = decay.expand(v.shape[:3]) if g is None else g + decay
    o, state = linear_attention(
        q, k, v, g=g, scale=scale, initial_state=_turned(initial_state, state_v_first), cu_seqlens=cu_seqlens,
        backend=backend,
    )  # fmt: skip
    return o, _turned(state, state_v_first) if output_final_state else None


def retention_decay(heads: int, device: torch.device | str = "cpu") -> Tensor:
    """log(1 - 2^(-5 - h)) for h = 0 .. heads - 1, float32.

    Raises:
        InvalidInputError: heads is no whole number, device none of torch's. HardwareError: there is no such GPU here.
    """
    _need(isinstance(heads, int | torch.SymInt) and not isinstance(heads, bool) and 0 <= heads < 1 << 31,
          f"heads must be a whole number from 0 to 2^31 - 1, got {shown(heads)}")  # fmt: skip
    if not isinstance(device, torch.device):
        try:
            device = torch.device(device)
        except (RuntimeError, TypeError, ValueError) as error:
            raise InvalidInputError(
                f"device must be one of torch's, as 'cuda' or 'cpu', got {shown(device)}"
            ) from error
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise HardwareError(f"there is no {device} here ({torch.cuda.device_count()} CUDA devices)")
    return torch.log1p(-torch.exp2(-5.0 - torch.arange(heads, device=device, dtype=torch.float64))).float()


@torch.library.custom_op("gpu_accel::tk_retention_decay", mutates_args=())
def retention_op(v: Tensor) -> Tensor:
    """`retention_decay` of the heads of v (batch, seqlen, heads, dim) in one kernel; torch's own are seven."""
    heads = v.shape[2]
    out = v.new_empty(heads, dtype=torch.float32)
    if heads:
        with chunked._device(v):
            launch(gates_kernel._retention_kernel, -(-heads // _DECAYS), (out, heads),
                   dict(BLOCK=_DECAYS, num_warps=1))  # fmt: skip
    return out


@retention_op.register_fake
def _(v):
    return v.new_empty(v.shape[2], dtype=torch.float32)


def chunk_retention(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, initial_state: Tensor | None = None,
    output_final_state: bool = False, cu_seqlens: Tensor | None = None, *, state_v_first: bool = False,
    cu_seqlens_cpu: Tensor | None = None, backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Retention (Sun et al., arXiv:2307.08621): every head decays by a constant of its own, `retention_decay`.

    Returns (o, final state or None). Arguments as in `linear_attention`.
    """
    (state_v_first,) = _flags(state_v_first=state_v_first)
    _validate(q, k, v, None, None, _turned(initial_state, state_v_first), cu_seqlens, chunked.CHUNK)
    plain = choose(v, "auto" if backend == "hopper" else backend, others=("hopper",)) != "portable"
    decay = retention_decay(v.shape[2], v.device) if plain else retention_op(v.detach())
    return chunk_simple_gla(
        q, k, v, None, decay, scale, initial_state, output_final_state, state_v_first, cu_seqlens, cu_seqlens_cpu,
        backend=backend,
    )  # fmt: skip
