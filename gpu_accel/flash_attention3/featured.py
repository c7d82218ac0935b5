"""The custom ops of calls with features (`features.py`): sinks, biases, modifiers, block masks, dense or packed.

    gpu_accel::flash_attention_featured_forward(q, k, v, sinks, cu_seqlens_q, ...) -> (o, lse, max_logits)
    gpu_accel::flash_attention_featured_backward -> (dq, dk, dv, dsinks)

Schemas hold no functions and no nested structures: modifiers travel as keys, a block mask as a list of tensors. What
was not asked for comes back as a tensor of no elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gpu_accel.flash_attention3.features import Features
from gpu_accel.flash_attention3.function import (
    empty_gradients,
    empty_outputs,
    nobody_watches,
    refuse_second,
    run_backward,
    run_forward,
)


def attention(
    q: Tensor, k: Tensor, v: Tensor, features: Features, *, softmax_scale: float, window_left: int, window_right: int,
    softcap: float, deterministic: bool, backend: str, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Run a validated call: the op, or straight the kernel where nobody watches."""
    sinks = features.sinks
    options = (softmax_scale, window_left, window_right, softcap, deterministic, backend, *_scalars(features))
    tensors = (sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, features.alibi_slopes,
               list(features.aux_tensors), list(features.block_lists))  # fmt: skip
    if nobody_watches(q, k, v) and (sinks is None or nobody_watches(sinks)):
        return _forward(q, k, v, *tensors, *options)
    return flash_attention_featured_forward(q, k, v, *tensors, *options)


def _scalars(f: Features) -> tuple:
    return (f.score_mod, f.score_mod_grad, f.mask_mod, *f.block_size, f.return_max_logits, f.batch_invariant)


def _features(sinks, alibi_slopes, aux_tensors, block_lists, scalars) -> Features:
    score_mod, score_mod_grad, mask_mod, q_block, kv_block, return_max_logits, batch_invariant = scalars
    return Features(
        sinks=sinks, alibi_slopes=alibi_slopes, score_mod=score_mod, score_mod_grad=score_mod_grad, mask_mod=mask_mod,
        aux_tensors=tuple(aux_tensors), block_lists=tuple(block_lists), block_size=(q_block, kv_block),
        return_max_logits=return_max_logits, batch_invariant=batch_invariant,
    )  # fmt: skip


def _options(window, features, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k) -> dict:
    softmax_scale, window_left, window_right, softcap = window
    options = dict(softmax_scale=softmax_scale, window_left=window_left, window_right=window_right, softcap=softcap,
                   features=features)  # fmt: skip
    if cu_seqlens_q is not None:
        options.update(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q, seqused_k=seqused_k)
    return options


def _forward(
    q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, alibi_slopes, aux_tensors, block_lists,
    softmax_scale, window_left, window_right, softcap, deterministic, backend, *scalars,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    features = _features(sinks, alibi_slopes, aux_tensors, block_lists, scalars)
    window = (softmax_scale, window_left, window_right, softcap)
    packed = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    results = run_forward(q, k, v, backend, **_options(window, features, *packed))
    return results if len(results) == 3 else (*results, results[1].new_empty(0))


@torch.library.custom_op("gpu_accel::flash_attention_featured_forward", mutates_args=())
def flash_attention_featured_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None, seqused_k: Tensor | None, alibi_slopes: Tensor | None, aux_tensors: Sequence[Tensor],
    block_lists: Sequence[Tensor], softmax_scale: float, window_left: int, window_right: int, softcap: float,
    deterministic: bool, backend: str, score_mod: str, score_mod_grad: str, mask_mod: str, q_block: int, kv_block: int,
    return_max_logits: bool, batch_invariant: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _forward(
        q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, alibi_slopes, aux_tensors, block_lists,
        softmax_scale, window_left, window_right, softcap, deterministic, backend, score_mod, score_mod_grad, mask_mod,
        q_block, kv_block, return_max_logits, batch_invariant,
    )  # fmt: skip


@flash_attention_featured_forward.register_fake
def _(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, alibi_slopes, aux_tensors, block_lists,
      softmax_scale, window_left, window_right, softcap, deterministic, backend, score_mod, score_mod_grad, mask_mod,
      q_block, kv_block, return_max_logits, batch_invariant):  # fmt: skip
    heads = q.shape[-2]
    shape = (q.shape[0], heads, q.shape[1]) if cu_seqlens_q is None else (heads, q.shape[0])
    o, lse = empty_outputs(q, v, shape)
    return o, lse, lse.new_empty(heads if return_max_logits else 0)


@torch.library.custom_op("gpu_accel::flash_attention_featured_backward", mutates_args=())
def flash_attention_featured_backward(
    do: Tensor, dlse: Tensor | None, o: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, seqused_q: Tensor | None, seqused_k: Tensor | None,
    alibi_slopes: Tensor | None, aux_tensors: Sequence[Tensor], block_lists: Sequence[Tensor], softmax_scale: float,
    window_left: int, window_right: int, softcap: float, deterministic: bool, backend: str, score_mod: str,
    score_mod_grad: str, mask_mod: str, q_block: int, kv_block: int, return_max_logits: bool, batch_invariant: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    scalars = (score_mod, score_mod_grad, mask_mod, q_block, kv_block, return_max_logits, batch_invariant)
    features = _features(sinks, alibi_slopes, aux_tensors, block_lists, scalars)
    window = (softmax_scale, window_left, window_right, softcap)
    packed = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    grads = run_backward(do, dlse, q, k, v, o, lse, backend, deterministic, **_options(window, features, *packed))
    return grads if len(grads) == 4 else (*grads, lse.new_empty(0))


@flash_attention_featured_backward.register_fake
def _(do, dlse, o, lse, q, k, v, sinks, *rest):
    return *empty_gradients(q, k, v), lse.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)


_TENSORS = 9  # q, k, v, sinks, four offsets, alibi_slopes


def _save(ctx, inputs, output):
    aux_tensors, block_lists = inputs[_TENSORS : _TENSORS + 2]
    ctx.counts = len(aux_tensors)
    ctx.save_for_backward(*output[:2], *inputs[:_TENSORS], *aux_tensors, *block_lists)
    ctx.scalars = inputs[_TENSORS + 2 :]
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)


def _gradients(ctx, do, dlse, _):
    o, lse, *tensors = ctx.saved_tensors
    inputs, lists = tensors[:_TENSORS], tensors[_TENSORS:]
    aux_tensors, block_lists = lists[: ctx.counts], lists[ctx.counts :]
    do = torch.zeros_like(o) if do is None else do
    dq, dk, dv, dsinks = flash_attention_featured_backward(
        do, dlse, o, lse, *inputs, aux_tensors, block_lists, *ctx.scalars
    )
    nothing = (None,) * (_TENSORS - 4)
    lists_nothing = ([None] * len(aux_tensors), [None] * len(block_lists))
    return dq, dk, dv, None if inputs[3] is None else dsinks, *nothing, *lists_nothing, *(None for _ in ctx.scalars)


flash_attention_featured_forward.register_autograd(_gradients, setup_context=_save)
refuse_second(flash_attention_featured_backward)


def _one_by_one(op):
    """The rule of vmap for an op with lists of tensors, which torch has none for: one call after the other."""

    def pick(x, dim, i: int):
        if isinstance(x, (list, tuple)):
            return [pick(one, d, i) for one, d in zip(x, dim, strict=True)] if dim is not None else x
        return x if dim is None else x.select(dim, i)

    def rule(info, in_dims, *arguments):
        found = [
            op(*(pick(x, dim, i) for x, dim in zip(arguments, in_dims, strict=True))) for i in range(info.batch_size)
        ]
        return tuple(torch.stack(parts) for parts in zip(*found, strict=True)), (0,) * len(found[0])

    op.register_vmap(rule)


_one_by_one(flash_attention_featured_forward)
_one_by_one(flash_attention_featured_backward)
