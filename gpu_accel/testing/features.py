"""Judge attention with sinks, biases, modifiers and block masks: outputs, maxima and gradients, the sinks' included.

check_features(attention, q, k, v, score_mod=device_function, truth={"score_mod": python_twin})
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpu_accel.flash_attention3.reference import (
    attention_reference,
    attention_truth,
    attention_truth_backward,
)
from gpu_accel.testing.errors import assert_close_to_truth, default_floor
from gpu_accel.testing.inputs import generator

_OURS_ALONE = ("score_mod_grad", "max_seqlen_q", "max_seqlen_k", "batch_invariant", "backend", "deterministic")
# dp - delta cancels: where a row sees one key the gradient is exactly 0, and rounding of terms of size one remains
_CANCELLATION = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def check_features(
    attention: Callable[..., tuple[Tensor, ...]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gradients: bool = True,
    lse_gradient: bool = False,
    truth: dict[str, Any] | None = None,
    seed: int = 0,
    **options: Any,
) -> None:
    """Run `attention(q, k, v, return_lse=True, return_max_logits=True, **options)` and its gradients against float64.

    The yardstick is the same mathematics in plain torch, every operation rounding to the dtype of the inputs; the
    log-sum-exp and maxima are judged by float32. `truth` replaces options in the reference: Python twins of device
    functions.

    Raises:
        IncorrectResultError: names the tensor, its error, the bound and the worst index.
    """
    known = {n: x for n, x in {**options, **(truth or {})}.items() if n not in _OURS_ALONE}
    sinks = options.get("sinks")
    leaves = [x.detach().requires_grad_(gradients) for x in (q, k, v)]
    if sinks is not None:
        leaves.append(sinks.detach().requires_grad_(gradients))
        options["sinks"] = leaves[3]
    o, lse, maxima = attention(*leaves[:3], return_lse=True, return_max_logits=True, **options)
    true = attention_truth(q, k, v, return_max_logits=True, **known)
    with torch.no_grad():
        ruler_o = attention_reference(q, k, v, dtype=q.dtype, **known)[0]
    ruler = attention_reference(q, k, v, dtype=torch.float32, return_max_logits=True, **known)
    assert_close_to_truth("o", o, true[0], ruler_o, by_scale=True)
    assert_close_to_truth("lse", lse, true[1], ruler[1])
    assert_close_to_truth("max_logits", maxima, true[2], ruler[2])
    if not gradients:
        return

    source = generator(seed + 1, q.device)
    do = torch.randn(o.shape, generator=source, device=q.device).to(o.dtype)
    dlse, outputs, sent = None, [o], [do]
    if lse_gradient:
        dlse = torch.randn(lse.shape, generator=source, device=q.device)
        dlse = torch.where(true[1] == float("-inf"), 0.0, dlse).to(lse.dtype)
        outputs, sent = [o, lse], [do, dlse]
    grads = torch.autograd.grad(outputs, leaves, sent)
    truths = attention_truth_backward(do, q, k, v, dlse=dlse, **known)
    rulers = _by_autograd(q, k, v, sinks, do, dlse, known)
    for name, grad, exact, measure in zip(("dq", "dk", "dv", "dsinks"), grads, truths, rulers, strict=False):
        scale = exact.abs().max().item() if exact.numel() else 0.0
        floor = max(default_floor(q.dtype, scale), _CANCELLATION[q.dtype])
        assert_close_to_truth(name, grad, exact, measure.to(grad.dtype), floor=floor)
    assert len(grads) == len(truths)


def _by_autograd(q, k, v, sinks, do, dlse, known: dict[str, Any]) -> tuple[Tensor, ...]:
    """Gradients of the chain of torch's operations, each in the dtype of the inputs."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v, *(() if sinks is None else (sinks,)))]
    options = known if sinks is None else {**known, "sinks": leaves[3]}
    with torch.enable_grad():
        outputs = attention_reference(*leaves[:3], dtype=q.dtype, **options)
    if not outputs[0].requires_grad:  # no rows at all
        return tuple(torch.zeros_like(x) for x in leaves)
    sent = [do] if dlse is None else [do, dlse.to(q.dtype)]
    grads = torch.autograd.grad(outputs[: len(sent)], leaves, sent, allow_unused=True)
    return tuple(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True))
