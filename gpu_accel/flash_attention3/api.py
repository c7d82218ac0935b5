"""The public functions: check everything once, say what will run, call the custom op.

Layout is (batch, seqlen, heads, head_dim) as in flash-attn, or (total, heads, head_dim) with `cu_seqlens_*`. Causal
masks and windows are aligned to the bottom right: with seqlen_q > seqlen_k and causal, the first seqlen_q - seqlen_k
rows see nothing, so their output is 0 and their log-sum-exp -inf.

A masked key has probability 0, and 0 times NaN is NaN: NaN or Inf in a row of v reaches queries that do not see the
row, unless it lies in padding (behind the last sequence or `seqused_k`). Gradients are those of autograd, once: no
double backward, and of the transforms of torch.func only vmap (one call after the other) is supported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpu_accel.flash_attention3 import featured, function
from gpu_accel.flash_attention3.backends import check_name
from gpu_accel.flash_attention3.features import check_features
from gpu_accel.flash_attention3.problem import (
    check_flag,
    check_packed,
    check_scalars,
    check_tensors,
    normalise_window,
    values_readable,
)

Window = tuple[int | None, int | None]


def autocasted(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under torch.autocast, matrix products run in its dtype: so does attention (float64 is left alone)."""
    if not isinstance(tensors[0], Tensor):
        return tensors
    device = tensors[0].device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    halves = (torch.float16, torch.bfloat16, torch.float32)
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.dtype in halves else x for x in tensors)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    score_mod: Any = None,
    score_mod_grad: Any = None,
    mask_mod: Any = None,
    aux_tensors: Sequence[Tensor] = (),
    block_mask: Any = None,
    deterministic: bool = False,
    batch_invariant: bool = False,
    return_lse: bool = False,
    return_attn_probs: bool = False,
    return_max_logits: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """Exact attention, differentiable, in memory linear in the sequence length.

    Args:
        q: (batch, seqlen_q, heads, head_dim), float16, bfloat16, float32 or (reference only) float64.
        k: (batch, seqlen_k, heads_kv, head_dim); heads is a multiple of heads_kv (grouped and multi-query attention).
        v: (batch, seqlen_k, heads_kv, head_dim_v). Head dimensions are multiples of 8, up to 256 in the kernels.
            Any strides; where the last one is not 1 the tensor is copied once.
        softmax_scale: default head_dim ** -0.5.
        causal: query i sees keys up to i + seqlen_k - seqlen_q.
        window_size: (left, right) keys seen beside that diagonal, both ends included; -1 or None is no bound;
            other negative numbers are refused.
            A model's sliding window of w keys that includes the query itself is (w - 1, 0).
        softcap: scores become softcap * tanh(score / softcap); 0 is off.
        sinks: (heads,) logits, learnable, of any floating-point dtype: one more term exp(sinks[h]) in the denominator
            of each softmax (gpt-oss; FlashAttention-4's learnable_sink). Part of lse. -inf is no sink. NaN and +inf
            are errors on the CPU; on a GPU values are not read, and the rows of that head become NaN.
        alibi_slopes: float32 (heads,) or (batch, heads): adds -slope * |i + seqlen_k - seqlen_q - j| to the score of
            query i and key j, after the soft cap. Finite: likewise checked on the CPU only, else NaN rows.
        score_mod: FlexAttention's (score, b, h, q_idx, kv_idx, *aux_tensors) -> score as a `@triton.jit` function on
            tiles, see `modifiers.py`; after soft cap and ALiBi. Its gradient is
            score_mod_grad: (grad, score, b, h, q_idx, kv_idx, *aux_tensors) -> gradient of the score that was given.
        mask_mod: FlexAttention's (b, h, q_idx, kv_idx, *aux_tensors) -> seen or not, likewise; joins causal and window.
        aux_tensors: contiguous tensors that both may read; they get no gradient.
        block_mask: torch's BlockMask for the lengths of q and k: blocks that it does not list are never touched,
            `mask_mod` (which has to say the same as the Python one that the mask was built from) is applied to partial
            blocks only.
        deterministic: only take a backward that gives the same bits every time (the portable one always does).
        batch_invariant: the bits of a row depend on its own sequence only: not on the batch size, on the sequences
            beside it, or on how far they are padded. Only takes kernels that promise it.
        return_lse, return_attn_probs: also return the log-sum-exp; the second is flash-attn's name for it.
        return_max_logits: also return the largest score of each head that any row of the batch sees (for QK-clip),
            (heads,) float32, as the softmax sees it: scaled, capped, biased and modified. No gradient.
        backend: "auto", "hopper", "portable", "reference", or "blackwell": experimental, not measured, so never taken
            by "auto". A named backend without a backward for this problem leaves the gradients to "auto";
            :func:`explain` tells which.

    Returns:
        o (batch, seqlen_q, heads, head_dim_v) of the dtype of q; with `return_lse` also lse (batch, heads, seqlen_q),
        float32, natural logarithm, differentiable; with `return_max_logits` the maxima last. Rows that see no key: o 0,
        lse -inf (with sinks: the sink), gradients 0.

    Raises:
        InvalidInputError: wrong shape, dtype, device or value. UnsupportedError: valid, but no kernel for it.
        HardwareError: the backend asked for needs another machine.
    """
    q, k, v = autocasted(q, k, v)
    check_tensors(q, k, v, varlen=False)
    scale, softcap = check_scalars(q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale, softcap)
    deterministic = check_flag("deterministic", deterministic)
    with_lse = check_flag("return_lse", return_lse) | check_flag("return_attn_probs", return_attn_probs)
    check_name(backend)
    left, right = normalise_window(window_size, causal)
    features = check_features(
        q, k, v, batch=q.shape[0], varlen=False, window_left=left, window_right=right, sinks=sinks,
        alibi_slopes=alibi_slopes, score_mod=score_mod, score_mod_grad=score_mod_grad, mask_mod=mask_mod,
        aux_tensors=aux_tensors, block_mask=block_mask, return_max_logits=return_max_logits,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    maxima: list[Tensor] = []
    if features is not None:
        o, lse, *maxima = featured.attention(
            q, k, v, features, softmax_scale=scale, window_left=left, window_right=right, softcap=softcap,
            deterministic=deterministic, backend=backend,
        )  # fmt: skip
    elif function.nobody_watches(q, k, v):
        o, lse = function.run_forward(
            q, k, v, backend, softmax_scale=scale, window_left=left, window_right=right, softcap=softcap
        )
    else:
        o, lse = function.flash_attention_forward(
            q, k, v, scale, left, right, softcap, deterministic, backend
        )
    return _results(o, lse, maxima, with_lse, return_max_logits)


def _results(o: Tensor, lse: Tensor, maxima: Sequence[Tensor], with_lse: bool, with_maxima: bool):
    results = (o, *((lse,) if with_lse else ()), *(maxima if with_maxima else ()))
    return results if len(results) > 1 else o


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    score_mod: Any = None,
    score_mod_grad: Any = None,
    mask_mod: Any = None,
    aux_tensors: Sequence[Tensor] = (),
    block_mask: Any = None,
    deterministic: bool = False,
    batch_invariant: bool = False,
    return_lse: bool = False,
    return_attn_probs: bool = False,
    return_max_logits: bool = False,
    backend: str = "auto",
    validate: bool | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """:func:`flash_attn_func` for sequences packed one behind the other.

    Args:
        q: (total_q, heads, head_dim); k, v: (total_k, heads_kv, ...).
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32 on the device of q: sequence b is rows cu[b] to cu[b + 1].
            Lengths may be 0. Rows behind the last sequence get o 0, lse -inf, gradients 0.
        max_seqlen_q, max_seqlen_k: not needed, since the kernels find their sequence themselves; checked when given and
            values are validated.
        seqused_q, seqused_k: (batch,) int32: only so many rows of each sequence count.
        sinks, alibi_slopes, score_mod, mask_mod ...: as there, with b the sequence and indices counted inside it; there
            is no block_mask for packed sequences.
        validate: read and check the values of cu_seqlens and seqused, which waits for the device. Default: only for CPU
            tensors, so that CUDA graphs and torch.compile work.

    Returns:
        o (total_q, heads, head_dim_v); with `return_lse` also lse (heads, total_q).

    Raises what `flash_attn_func` raises, and InvalidInputError for lengths that do not fit, where values are read.
    """
    q, k, v = autocasted(q, k, v)
    check_tensors(q, k, v, varlen=True)
    compiling = torch.compiler.is_compiling()
    values = not compiling and (values_readable(q) if validate is None else check_flag("validate", validate))
    check_packed(
        q, k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, values=values
    )
    scale, softcap = check_scalars(q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale, softcap)
    deterministic = check_flag("deterministic", deterministic)
    with_lse = check_flag("return_lse", return_lse) | check_flag("return_attn_probs", return_attn_probs)
    check_name(backend)
    left, right = normalise_window(window_size, causal)
    features = check_features(
        q, k, v, batch=cu_seqlens_q.shape[0] - 1, varlen=True, window_left=left, window_right=right, sinks=sinks,
        alibi_slopes=alibi_slopes, score_mod=score_mod, score_mod_grad=score_mod_grad, mask_mod=mask_mod,
        aux_tensors=aux_tensors, block_mask=block_mask, return_max_logits=return_max_logits,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    maxima: list[Tensor] = []
    if features is not None:
        o, lse, *maxima = featured.attention(
            q, k, v, features, softmax_scale=scale, window_left=left, window_right=right, softcap=softcap,
            deterministic=deterministic, backend=backend, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
            seqused_q=seqused_q, seqused_k=seqused_k,
        )  # fmt: skip
    else:
        o, lse = function.flash_attention_varlen_forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
            scale, left, right, softcap, deterministic, backend,
        )  # fmt: skip
    return _results(o, lse, maxima, with_lse, return_max_logits)
