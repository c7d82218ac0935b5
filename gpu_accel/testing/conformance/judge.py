"""Is what a library gave right? Output, log-sum-exp where it has one, and gradients, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpu_accel.errors import IncorrectResultError, UnsupportedError
from gpu_accel.flash_attention3.reference import attention_truth, attention_truth_backward
from gpu_accel.testing.attention import gradient_floor
from gpu_accel.testing.errors import assert_close_to_truth
from gpu_accel.testing.inputs import generator
from gpu_accel.testing.truth import yardstick_attention, yardstick_attention_backward

Attend = Callable[..., tuple[Tensor, Tensor | None]]

# Every library is held to the same: output and lse to twice the error of plain torch operations, gradients to four
# times, since some libraries add up dk and dv in 16 bits.
FACTOR, GRADIENTS_FACTOR = 2.0, 4.0


def check(
    attend: Attend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gradients: bool = True,
    do: Tensor | None = None,
    rows: slice = slice(None),
    **options: Any,
) -> None:
    """Run `attend` and judge all it gives. `rows` limits the judgement to packed rows that a caller may rely on.

    Raises:
        IncorrectResultError: names the tensor, error and bound.
    """
    leaves = [x.detach().requires_grad_(gradients) for x in (q, k, v)]
    o, lse = attend(*leaves, **options)
    truth, lse_truth = attention_truth(q, k, v, **options)
    ruler, lse_ruler = yardstick_attention(q, k, v, **options)
    covered = slice(0, len(ruler)) if o.dim() == 3 else slice(None)  # torch knows nothing of rows behind the last one
    kept = rows if rows != slice(None) else covered
    assert_close_to_truth("o", o[kept], truth[kept], ruler[kept], factor=FACTOR, by_scale=True)
    if lse is not None:
        columns = (..., kept) if o.dim() == 3 else ...
        assert_close_to_truth("lse", lse.float()[columns], lse_truth[columns], lse_ruler[columns], factor=FACTOR)
    if not gradients:
        return
    if do is None:
        do = torch.randn(o.shape, generator=generator(1, q.device), device=q.device).to(o.dtype)
    found = torch.autograd.grad(o, leaves, do)
    truths = attention_truth_backward(do, q, k, v, **options)
    rulers = yardstick_attention_backward(do, q, k, v, **options)
    for name, gradient, expected, measure in zip(("dq", "dk", "dv"), found, truths, rulers, strict=True):
        scale = expected.abs().max().item() if expected.numel() else 0.0
        assert_close_to_truth(
            name, gradient[: len(measure)], expected[: len(measure)], measure, factor=GRADIENTS_FACTOR,
            floor=gradient_floor(q.dtype, scale),
        )  # fmt: skip


def expect(what: str, holds: bool | Tensor) -> None:
    """Raise IncorrectResultError that says `what` unless it holds."""
    if not bool(holds):
        raise IncorrectResultError(what)


def run_case(case: Any, attend: Attend, device: torch.device) -> tuple[str, str]:
    """(verdict, detail): "pass", "wrong", "refused" (says that it cannot) or "error" (anything else it raised)."""
    try:
        case.run(attend, device)
    except IncorrectResultError as error:
        return "wrong", _line(error)
    except (UnsupportedError, NotImplementedError) as error:
        return "refused", _line(error)
    except Exception as error:
        if type(error).__module__.startswith("torch._dynamo"):
            return "error", f"torch.compile: {_line(error)}"
        refuses = isinstance(error, RuntimeError | AssertionError | ValueError) and "CUDA error" not in str(error)
        return ("refused" if refuses else "error"), f"{type(error).__name__}: {_line(error)}"
    return "pass", ""


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return "; ".join(lines[:3])[:300] or type(error).__name__
