"""FP8 attention with the paper's two ingredients: a scale per block and incoherent processing (arXiv:2407.08608, 3.3).

    o = fp8_attention(q, k, v, causal=True)                     # bfloat16 in, bfloat16 out, fp8 inside
    q8, q_scale = fp8_block_quantize(q, hadamard=True, seed=0)  # the same in two steps, to keep k and v in fp8
    o = fp8_attention_quantized(q8, k8, v8, q_scale, k_scale, v_scale, causal=True)
    print(fp8_error_report(q, k, v))                            # what fp8 costs on your tensors

Forward only: nothing here has a gradient, and inputs that require one are refused instead of silently detached.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from gpu_accel.compat import INTERPRET
from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.flash_attention3 import fp8_quantize, hopper_fp8, portable_fp8
from gpu_accel.flash_attention3.blockwise import blockwise_softmax
from gpu_accel.flash_attention3.fp8_error import fp8_error_report
from gpu_accel.flash_attention3.fp8_inputs import (
    as_heads,
    check_heads,
    check_layout,
    check_rotary,
    check_rows_per_scale,
)
from gpu_accel.flash_attention3.fp8_quantize import (
    FORMATS,
    Fp8Format,
    fp8_format,
    quantize_blocks,
    quantize_op,
    tensor_core_refusal,
)
from gpu_accel.flash_attention3.function import nobody_watches
from gpu_accel.flash_attention3.hadamard import check_rows, choose_backend, hadamard_block, hadamard_transform
from gpu_accel.flash_attention3.launch import capability
from gpu_accel.flash_attention3.problem import (
    Problem,
    check_flag,
    check_scalars,
    check_seed,
    check_strided,
    normalise_window,
    values_readable,
)
from gpu_accel.flash_attention3.reference_fp8 import fp8_attention_reference, quantize_reference, transpose_values

BLOCK = 128  # rows per scale: the paper's B_r and B_c
_LONGEST = 1 << 30  # rows of a block: one block for every tensor that fits a GPU
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

__all__ = [
    "blockwise_softmax",
    "describe",
    "fp8_attention",
    "fp8_attention_quantized",
    "fp8_block_quantize",
    "fp8_error_report",
    "hadamard_transform",
    "refuse",
]


def _no_gradient(**tensors: Tensor | None) -> None:
    wanting = [name for name, x in tensors.items() if isinstance(x, Tensor) and x.requires_grad]
    if wanting and torch.is_grad_enabled():
        raise UnsupportedError(
            f"fp8 attention is forward only, but {', '.join(wanting)} requires a gradient: train with "
            f"flash_attn_func in bfloat16, or call this under torch.no_grad() or with .detach()ed tensors"
        )


def fp8_block_quantize(
    tensor: Tensor,
    block_size: int = BLOCK,
    scale_per_block: bool = True,
    dtype: str | torch.dtype = "e4m3",
    *,
    hadamard: bool = False,
    seed: int = 0,
    transpose: bool = False,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Round a tensor to fp8 with one float32 scale per block of rows: ``tensor ~ q8.float() * scale``.

    Args:
        tensor: (..., seqlen, head_dim) bfloat16, float16 or float32, any strides with last stride 1. For q of layout
            (batch, seqlen, heads, head_dim) pass ``q.transpose(1, 2)``: it is read in place.
        block_size: rows per scale; the last block may be shorter.
        scale_per_block: False gives one scale for the whole tensor.
        dtype: "e4m3" (3 bits of mantissa, up to 448) or "e5m2" (2 bits, up to 57344).
        hadamard: first multiply every row by the random orthogonal matrix of `hadamard_transform(seed=seed)`. Do it to
            q and k with one seed, never to v: q k^T stays the same, outliers spread. A row whose magnitudes add up to
            more than float32 holds becomes NaN.
        transpose: write (..., head_dim, seqlen padded with zeros to a multiple of 16), as fp8 tensor cores want v.
        rotary_cos, rotary_sin: (at least seqlen, rotary_dim / 2) bfloat16, float16 or float32: row i is first turned by
            row i of them, in float32, and rounded to its dtype, as the rotary embedding by itself would.
        rotary_interleaved: pairs of dimensions (0, 1), (2, 3)... (GPT-J); False: (0, rotary_dim / 2)... (Llama).
        backend: "portable" (plain Triton) and "reference" (plain torch) give the same bits. "hopper" (Gluon, sm_90)
            multiplies by the Hadamard matrix, or transposes, on tensor cores, for 16-bit tensors of dim 64 and 128 with
            one scale per 128 rows. Transposed, only -0 becomes 0; times the matrix, other bits (`hopper_quantize.py`
            bounds them). "auto": the first of hopper, where it has been measured to be faster, portable and reference
            that runs.

    Returns:
        q8, contiguous, of the shape of `tensor` (or transposed), and the scales: (..., ceil(seqlen / block_size)), or
        () for one scale. A block without finite non-zero values has scale 1; Inf and NaN become NaN and do not count
        for the scale; scales are at least 2**-126.

    Raises:
        InvalidInputError, HardwareError (backend="portable" without a GPU), UnsupportedError (a gradient is wanted, or
        what backend="hopper" refuses).
    """
    fmt = fp8_format(dtype)
    check_rows("tensor", tensor)
    _no_gradient(tensor=tensor, rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    check_rows_per_scale("block_size", block_size)
    seed = check_seed(seed)
    scale_per_block, hadamard = check_flag("scale_per_block", scale_per_block), check_flag("hadamard", hadamard)
    transpose = check_flag("transpose", transpose)
    cos, sin = check_rotary(rotary_cos, rotary_sin, tensor)
    interleaved = check_flag("rotary_interleaved", rotary_interleaved)
    if transpose and block_size % 16:
        raise InvalidInputError(f"transpose=True needs a block_size that is a multiple of 16, got {block_size}")
    block_size = min(block_size, _LONGEST)
    allowed = ("auto", "hopper", "portable", "reference")
    chosen = choose_backend(backend, tensor, what="fp8_block_quantize", allowed=allowed)
    why = None
    if backend == "hopper" or (backend == "auto" and fp8_quantize.TENSOR_CORES):
        why = tensor_core_refusal(tensor, block_size, scale_per_block, hadamard, transpose, cos is not None)
        if backend == "hopper" and why is not None:
            raise UnsupportedError(f"fp8_block_quantize, backend='hopper' {why}: use backend='portable' (or 'auto')")
        chosen = "hopper" if why is None else chosen
    if chosen == "reference":
        return quantize_reference(
            tensor, block_size, scale_per_block, fmt.name, hadamard=hadamard, seed=seed, transpose=transpose,
            rotary_cos=cos, rotary_sin=sin, rotary_interleaved=interleaved,
        )  # fmt: skip
    given = [tensor] if cos is None or sin is None else [tensor, cos, sin]
    run = quantize_blocks if nobody_watches(*given) else quantize_op
    return run(
        tensor, block_size, scale_per_block, fmt.name, hadamard, seed, transpose, cos, sin, interleaved,
        chosen == "hopper",
    )  # fmt: skip


@torch.library.custom_op("gpu_accel::fp8_attention_forward", mutates_args=())
def _attention_op(
    q8: Tensor, k8: Tensor, vt8: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor, q_block: int, k_block: int,
    softmax_scale: float, window_left: int, window_right: int, softcap: float, out_dtype: torch.dtype, bshd: bool,
    backend: str = "portable",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _attend(q8, k8, vt8, q_scale, k_scale, v_scale, q_block, k_block, softmax_scale, window_left, window_right,
                   softcap, out_dtype, bshd, backend)  # fmt: skip


def _attend(q8, k8, vt8, q_scale, k_scale, v_scale, q_block, k_block, softmax_scale, window_left, window_right, softcap,
            out_dtype, bshd, backend):  # fmt: skip
    """The op's body: `backend` is "hopper" or "portable" by now."""
    o = _empty_output(q8, out_dtype, bshd)
    forward = hopper_fp8.forward if backend == "hopper" else portable_fp8.forward
    lse = forward(
        q8, k8, vt8, q_scale, k_scale, v_scale, o.transpose(1, 2) if bshd else o, q_block=q_block, k_block=k_block,
        softmax_scale=softmax_scale, window_left=window_left, window_right=window_right, softcap=softcap,
    )  # fmt: skip
    return o, lse


def _empty_output(q8: Tensor, out_dtype: torch.dtype, bshd: bool) -> Tensor:
    batch, heads, seqlen, dim = q8.shape
    shape = (batch, seqlen, heads, dim) if bshd else (batch, heads, seqlen, dim)
    return torch.empty(shape, dtype=out_dtype, device=q8.device)


@_attention_op.register_fake
def _(q8, k8, vt8, q_scale, k_scale, v_scale, q_block, k_block, softmax_scale, window_left, window_right, softcap,
      out_dtype, bshd, backend="portable"):  # fmt: skip
    return _empty_output(q8, out_dtype, bshd), torch.empty(q8.shape[:3], dtype=torch.float32, device=q8.device)


def _why_not(device_type: str, capability_: tuple[int, int] | None, head_dim: int) -> str | None:
    if device_type == "cpu" and not INTERPRET:
        return "CPU tensors need Triton's interpreter (TRITON_INTERPRET=1 before Python starts) or backend='reference'"
    if device_type not in ("cpu", "cuda"):
        return f"device {device_type!r} is not one that Triton compiles for here"
    if capability_ is not None and capability_ < (8, 9):
        return f"fp8 tensor cores need compute capability 8.9 or later, this GPU has {capability_[0]}.{capability_[1]}"
    if not portable_fp8.HEAD_DIMS[0] <= head_dim <= portable_fp8.HEAD_DIMS[-1] or head_dim % 16:  # a SymInt: no `in`
        return f"head_dim {head_dim} is not a multiple of 16 from 16 to 256: pad it with zeros and give softmax_scale"
    return None


def refuse(problem: Problem) -> str | None:
    """Why fp8 attention cannot run this problem (of bfloat16, float16 or float32 inputs), or None."""
    if problem.varlen:
        return "packed sequences (cu_seqlens) are not supported in fp8: pad, or loop over the sequences"
    if problem.requires_grad:
        return "fp8 attention is forward only"
    if problem.head_dim_v != problem.head_dim:
        return f"head_dim of v ({problem.head_dim_v}) differs from that of q and k ({problem.head_dim})"
    return _why_not(problem.device_type, problem.capability, problem.head_dim)


def _resolve(
    backend: str, q: Tensor, seqlen_k: int, causal: bool, *, k_block: int = BLOCK, one_scale: bool = True
) -> str:
    """The backend that runs: hopper, portable or reference. "auto" never falls back on a GPU, it raises."""
    here = capability(q.device) if q.is_cuda else None
    if backend == "hopper" or (backend == "auto" and hopper_fp8.not_chosen(q.shape[-1], seqlen_k, causal) is None):
        why = hopper_fp8.refuse(q.device.type, here, q.shape[-1], k_block, one_scale)
        if why is None:
            return "hopper"
        if backend == "hopper":
            raise UnsupportedError(f"fp8 attention, backend='hopper': {why}: use backend='portable' (or 'auto')")
    chosen = choose_backend(backend, q, what="fp8 attention", allowed=("auto", "hopper", "portable", "reference"))
    if chosen == "portable":
        why = _why_not(q.device.type, here, q.shape[-1])
        if why:
            raise UnsupportedError(f"fp8 attention: {why}")
    return chosen


def _check_scale(name: str, scale: Tensor, x: Tensor, block: int) -> None:
    if isinstance(scale, Tensor):
        check_strided(name, scale)
    batch, heads, seqlen = x.shape[:3]
    allowed = ((), (batch, heads), (batch, heads, -(-seqlen // block)))
    if not isinstance(scale, Tensor) or scale.dtype != torch.float32 or tuple(scale.shape) not in allowed:
        got = f"{scale.dtype} {tuple(scale.shape)}" if isinstance(scale, Tensor) else type(scale).__name__
        raise InvalidInputError(
            f"{name} must be float32 of shape () or {allowed[1]} or {allowed[2]} (one per {block} rows), got {got}"
        )
    if scale.device != x.device:
        raise InvalidInputError(f"{name} must be on {x.device}, got {scale.device}")


def _check_sums(v_scale: Tensor, fmt: Fp8Format, seqlen_k: int, *, kernel: bool) -> None:
    """Sums of p v are divided at the end only, and kernels hold p times 2**p_shift: they must stay within float32.

    Looks at v_scale on the CPU only.
    """
    if not values_readable(v_scale) or v_scale.numel() == 0:
        return
    limit = torch.finfo(torch.float32).max / max(1, seqlen_k) / (2.0**fmt.p_shift if kernel else 1.0)
    largest = float(v_scale.nan_to_num(0.0).max()) * fmt.largest
    if largest > limit:
        raise InvalidInputError(
            f"v holds values up to {largest:.3g}, and sums over {seqlen_k} keys may overflow float32 from {limit:.3g} "
            f"on: divide v by a power of two and multiply the output by it"
        )


def fp8_attention_quantized(
    q8: Tensor,
    k8: Tensor,
    v8: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    *,
    q_block: int = BLOCK,
    k_block: int = BLOCK,
    v_transposed: bool = False,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    out_dtype: torch.dtype = torch.bfloat16,
    layout: str = "bhsd",
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of tensors that are fp8 already; `fp8_attention` explains the options it shares.

    Args:
        q8: (batch, heads, seqlen_q, head_dim) e4m3 or e5m2; k8: (batch, heads_kv, seqlen_k, head_dim) of one dtype.
        v8: like k8, or with `v_transposed` (batch, heads_kv, head_dim, seqlen_k padded with zeros to a multiple of 16),
            which `fp8_block_quantize(transpose=True)` writes. Anything else is transposed first, which costs a copy.
        q_scale, k_scale, v_scale: float32 of shape (), (batch, heads) or (batch, heads, ceil(seqlen / block)).
        q_block, k_block: rows per scale of q, and of k and v; k_block must be a multiple of 32.
        layout: of the output only, "bhsd" or "bshd".

    Raises what `fp8_attention` raises, and InvalidInputError for scales or blocks that do not fit.
    """
    for name, x in (("q8", q8), ("k8", k8), ("v8", v8)):
        if not isinstance(x, Tensor) or x.dim() != 4:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise InvalidInputError(f"{name} must be a 4-dimensional tensor, got {got}")
        check_strided(name, x)
        if x.dtype not in (f.dtype for f in FORMATS.values()):
            raise InvalidInputError(f"{name} must be float8_e4m3fn or float8_e5m2, got {x.dtype}: fp8_block_quantize")
    _no_gradient(q8=q8, k8=k8, v8=v8, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    sk = k8.shape[2]
    if check_flag("v_transposed", v_transposed):
        pitch = -(-sk // 16) * 16
        if tuple(v8.shape) != (*k8.shape[:2], k8.shape[3], pitch):
            raise InvalidInputError(
                f"transposed v8 must be {(*k8.shape[:2], k8.shape[3], pitch)} (batch, heads_kv, head_dim, padded "
                f"seqlen_k), got {tuple(v8.shape)}"
            )
    check_heads(q8, k8, v8[..., :sk].transpose(-1, -2) if v_transposed else v8)
    q_block, k_block = check_rows_per_scale("q_block", q_block), check_rows_per_scale("k_block", k_block)
    per_block = any(isinstance(x, Tensor) and x.dim() == 3 for x in (k_scale, v_scale))
    if per_block and k_block % 32:
        raise InvalidInputError(f"k_block must be a multiple of 32 (a step of the tensor cores), got {k_block}")
    _check_scale("q_scale", q_scale, q8, q_block)
    _check_scale("k_scale", k_scale, k8, k_block)
    _check_scale("v_scale", v_scale, k8, k_block)
    # one block however long is one block: kernels need not loop over, nor references repeat, rows that do not exist
    q_block = min(q_block, max(BLOCK, -(-q8.shape[2] // BLOCK) * BLOCK))
    k_block = min(k_block, max(BLOCK, -(-sk // BLOCK) * BLOCK))
    if out_dtype not in OUT_DTYPES:
        raise InvalidInputError(f"out_dtype must be bfloat16, float16 or float32, got {out_dtype}")
    check_layout(layout)
    scale, softcap = check_scalars(q8.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale, softcap)
    left, right = normalise_window(window_size, causal)
    return_lse = check_flag("return_lse", return_lse)
    chosen = _resolve(backend, q8, sk, left < 0 and right == 0, k_block=k_block, one_scale=not per_block)
    _check_sums(v_scale, fp8_format(v8.dtype), sk, kernel=chosen != "reference")
    if chosen == "reference":
        o, lse = fp8_attention_reference(
            q8, k8, v8, q_scale, k_scale, v_scale, q_block=q_block, k_block=k_block, softmax_scale=scale,
            window_size=(left, right), softcap=softcap, v_transposed=v_transposed, block_n=portable_fp8.tile_n(
                portable_fp8.INTERPRETER, k_block, not per_block),
        )  # fmt: skip
        o = o.to(out_dtype)
        o = o.transpose(1, 2).contiguous() if layout == "bshd" else o
    else:
        vt8 = v8 if v_transposed else transpose_values(v8)
        run = _attend if nobody_watches(q8, k8, vt8, q_scale, k_scale, v_scale) else _attention_op
        o, lse = run(
            q8, k8, vt8, q_scale, k_scale, v_scale, q_block, k_block, scale, left, right, softcap, out_dtype,
            layout == "bshd", chosen,
        )  # fmt: skip
    return (o, lse) if return_lse else o


def fp8_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    block_scale: bool = True,
    hadamard: bool = True,
    dtype: str | torch.dtype = "e4m3",
    out_dtype: torch.dtype = torch.bfloat16,
    layout: str = "bhsd",
    return_lse: bool = False,
    seed: int = 0,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention computed in fp8: quantise q, k and v, then both matrix products on fp8 tensor cores.

    Args:
        q: (batch, heads, seqlen_q, head_dim), k and v: (batch, heads_kv, seqlen_k, head_dim), bfloat16, float16 or
            float32, any strides with last stride 1; with layout="bshd" seqlen comes before heads. heads is a multiple
            of heads_kv, head_dim a multiple of 16 up to 256.
        softmax_scale: default head_dim ** -0.5. causal: bottom-right aligned. window_size: (left, right) keys visible
            beside the diagonal, inclusive, -1 or None: all. softcap: 0 is off.
        block_scale: one scale per 128 rows of q, k and v (the paper's recipe); False: one per tensor.
        hadamard: multiply q and k by a random orthogonal matrix first (from `seed`), which spreads outliers. Nearly
            all of the paper's accuracy comes from this.
        dtype: "e4m3" or "e5m2" for q, k, v and the probabilities.
        return_lse: also return the log-sum-exp, (batch, heads, seqlen_q) float32, natural logarithm.
        backend: "hopper" (Gluon, sm_90), "portable" (plain Triton), "reference" (plain torch, slow),
            "auto": the first of these that is chosen by itself (`describe`) and runs.

    Returns:
        o like q in `out_dtype`, contiguous in `layout`. A row that sees no key is 0, with lse -inf.

    Raises:
        InvalidInputError: shapes, dtypes, strides; on the CPU also values of v so large that a sum over the keys could
        overflow float32: above 1.3e36 / seqlen_k (e5m2: 1e34 / seqlen_k). A GPU is not waited for to look at them, so
        there o is then Inf or NaN. UnsupportedError: head_dim, an old GPU, or an input that requires a
        gradient (forward only), or what backend="hopper" refuses. HardwareError: backend="portable" for CPU tensors
        outside Triton's interpreter.
    """
    q, k, v = as_heads(layout, q=q, k=k, v=v)
    check_heads(q, k, v)
    _no_gradient(q=q, k=k, v=v)
    fmt = fp8_format(dtype)
    scale, softcap = check_scalars(q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale, softcap)
    left, right = normalise_window(window_size, causal)
    backend = _resolve(backend, q, k.shape[2], left < 0 and right == 0)
    quantize = functools.partial(
        fp8_block_quantize, scale_per_block=block_scale, dtype=fmt.name, seed=seed,
        backend="auto" if backend == "hopper" else backend,
    )  # fmt: skip
    q8, q_scale = quantize(q, hadamard=hadamard)
    k8, k_scale = quantize(k, hadamard=hadamard)
    v8, v_scale = quantize(v, transpose=True)
    return fp8_attention_quantized(
        q8, k8, v8, q_scale, k_scale, v_scale, v_transposed=True, softmax_scale=scale,
        window_size=(left, right), softcap=softcap, out_dtype=out_dtype, layout=layout, return_lse=return_lse,
        backend=backend,
    )  # fmt: skip


def describe(
    head_dim: int,
    *,
    seqlen_q: int = 4096,
    causal: bool = False,
    block_scale: bool = True,
    hadamard: bool = True,
    dtype: str | torch.dtype = "e4m3",
    device: torch.device | str = "cuda",
) -> dict[str, str]:
    """What `fp8_attention` would run, in words: kernel, tile, scales, Hadamard matrix, ranges. Needs no GPU."""
    device = torch.device(device)
    where, capability_ = device, None
    if device.type == "cuda":
        here = torch.cuda.is_available()
        capability_ = capability(device) if here else (9, 0)  # the card of the table
        where = device if here else torch.device("meta")
    why = _why_not(device.type, capability_, head_dim)
    if why:
        return {"kernel": "none", "refused": why}
    fmt = fp8_format(dtype)
    block = hadamard_block(head_dim)
    shared = {
        "format": f"{fmt.name}, largest {fmt.largest:g}",
        "scales": f"one per {BLOCK} rows of q, k and v" if block_scale else "one per tensor",
        "hadamard": f"{head_dim // block} block(s) of {block} on q and k" if hadamard else "off",
        "v": "transposed by the quantiser",
    }
    refused = hopper_fp8.refuse(device.type, capability_, head_dim, BLOCK, not block_scale)
    refused = refused or hopper_fp8.not_chosen(head_dim, seqlen_q, causal)
    if refused is None:
        tile = hopper_fp8.describe(head_dim, causal=causal, seqlen_k=seqlen_q)
        return {"kernel": hopper_fp8.KERNEL, "tile": tile, **shared, "not taken": "portable: hopper comes first"}
    config = portable_fp8.lookup(head_dim, causal=causal, seqlen_q=seqlen_q, device=where)
    (d, d2), (dv, dv2) = portable_fp8.parts(head_dim, 256), portable_fp8.parts(head_dim, 128)
    return {
        "kernel": portable_fp8.KERNEL,
        "tile": str(config),
        "measured": config.measured,
        "head_dim": f"{head_dim} as {d}{f' + {d2}' if d2 else ''} for q k^T, {dv}{f' + {dv2}' if dv2 else ''} for p v",
        **shared,
        "format": f"{shared['format']}; probabilities scaled by 2**{fmt.p_shift}",
        "not taken": f"hopper: {refused}",
    }
