"""Judge any attention function, ours or another's, on inputs of your choice: output, log-sum-exp and gradients.

check_attention(my_attention, q, k, v, causal=True)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gpu_accel.flash_attention3.reference import attention_truth, attention_truth_backward
from gpu_accel.testing.errors import assert_close_to_truth, default_floor
from gpu_accel.testing.inputs import generator
from gpu_accel.testing.truth import yardstick_attention, yardstick_attention_backward

# attention(q, k, v, softmax_scale=..., causal=..., window_size=..., softcap=..., [cu_seqlens_*]) -> (o, lse)
Attention = Callable[..., tuple[Tensor, Tensor]]


def check_attention(
    attention: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gradients: bool = True,
    lse_gradient: bool = False,
    seed: int = 0,
    **options,
) -> None:
    """Run `attention(q, k, v, **options) -> (o, lse)` and, by autograd, its gradients; compare all with float64.

    The bound is twice the error that plain torch operations make in the same dtype, plus a floor. `lse_gradient` sends
    a gradient through lse too (rows that see nothing get none). Inputs with NaN in their padding stay as they are.

    Raises:
        IncorrectResultError: names the tensor, its error, the bound and the worst index.
    """
    packed = {n: options[n] for n in ("cu_seqlens_q", "cu_seqlens_k") if options.get(n) is not None}
    used = {n: options[n] for n in ("seqused_q", "seqused_k") if options.get(n) is not None}
    scalars = {n: x for n, x in options.items() if n not in packed and n not in used}
    leaves = [x.detach().requires_grad_(gradients) for x in (q, k, v)]
    o, lse = attention(*leaves, **options)
    o_true, lse_true = attention_truth(q, k, v, **options)
    # torch's own operations, where they can follow; `used` rows have no counterpart there
    ruler = (None, None) if used else _covering(yardstick_attention(q, k, v, **packed, **scalars), o_true, lse_true)
    floor = _FLOOR[q.dtype] if used else None
    assert_close_to_truth("o", o, o_true, ruler[0], floor=floor, by_scale=not used)
    assert_close_to_truth("lse", lse, lse_true, ruler[1], floor=1e-5 if used else None)
    if not gradients:
        return

    source = generator(seed + 1, q.device)
    do = torch.randn(o.shape, generator=source, device=q.device).to(o.dtype)
    dlse = torch.randn(lse.shape, generator=source, device=q.device) if lse_gradient else None
    outputs, sent = [o], [do]
    if dlse is not None:
        dlse = torch.where(lse_true == float("-inf"), 0.0, dlse).to(lse.dtype)
        outputs, sent = [o, lse], [do, dlse]
    grads = torch.autograd.grad(outputs, leaves, sent)
    truths = attention_truth_backward(do, q, k, v, dlse=dlse, **options)
    rulers: tuple = (None, None, None)
    if not used and not lse_gradient:
        rulers = yardstick_attention_backward(do, q, k, v, **packed, **scalars)
    for name, grad, truth, measure in zip(("dq", "dk", "dv"), grads, truths, rulers, strict=True):
        if measure is not None and measure.shape != truth.shape:  # packed, with rows behind the last sequence
            measure = _pad_rows(measure, truth)
        scale = truth.abs().max().item() if truth.numel() else 0.0
        floor = gradient_floor(q.dtype, scale)
        if measure is None:
            floor = max(1.0, scale) * _FLOOR[q.dtype]
        assert_close_to_truth(name, grad, truth, measure, floor=floor)


def gradient_floor(dtype: torch.dtype, scale: float) -> float:
    """What a gradient of attention may err whatever the yardstick says; `scale` is the largest |true gradient|.

    dp - delta cancels: where a row sees one key the gradient is exactly 0, and rounding of terms of size one remains.
    """
    return max(default_floor(dtype, scale), _CANCELLATION[dtype])


_CANCELLATION = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
_FLOOR = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # where torch gives no yardstick


def _covering(ruler: tuple[Tensor, Tensor], o_true: Tensor, lse_true: Tensor) -> tuple[Tensor, Tensor]:
    """The yardstick with the rows behind the last sequence, which the truth has and torch does not."""
    o, lse = ruler
    if o.shape == o_true.shape:
        return o, lse
    extra = lse.new_full((*lse_true.shape[:-1], lse_true.shape[-1] - lse.shape[-1]), float("-inf"))
    return _pad_rows(o, o_true), torch.cat([lse, extra], -1)


def _pad_rows(x: Tensor, like: Tensor) -> Tensor:
    return torch.cat([x, x.new_zeros(like.shape[0] - x.shape[0], *x.shape[1:])])
