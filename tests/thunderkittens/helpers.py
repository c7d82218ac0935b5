"""What the tests here share: a judge that knows how the interpreter rounds, and a run with its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gpu_accel.compat import INTERPRET
from gpu_accel.testing import assert_close_to_truth, generator

# Triton's interpreter cuts float32 to bfloat16 instead of rounding it, which doubles every error of a rounding.
BF16_FACTOR = 4.0 if INTERPRET else 2.0


def close(name: str, out: Tensor, truth: Tensor, ruler: Tensor, *, narrow: bool = False) -> None:
    """Judge one result; `narrow`: it is wide, but was computed from bfloat16."""
    factor = BF16_FACTOR if narrow or out.dtype == torch.bfloat16 else 2.0
    floor = None
    if out.dtype == torch.bfloat16 and INTERPRET and truth.numel():
        floor = torch.finfo(torch.bfloat16).eps * float(truth.abs().max())
    assert_close_to_truth(name, out, truth, ruler, factor=factor, floor=floor)


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(*shape, generator=generator(seed, device), device=device).to(dtype)


def run(function: Callable, tensors: Sequence[Tensor | None], grads: Sequence[Tensor], dtype=None) -> list:
    """Results of `function`, then the gradients of every tensor under output gradients `grads`; None stays None."""
    leaves = [
        None if x is None else (x.detach().clone() if dtype is None else x.detach().to(dtype)).requires_grad_()
        for x in tensors
    ]
    out = function(*leaves)
    out = list(out) if isinstance(out, tuple) else [out]
    total = sum((o.double() * d.double()).sum() for o, d in zip(out, grads, strict=True))
    wanted = [x for x in leaves if x is not None]
    found = torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True)
    each = iter(found)
    return [o.detach() for o in out] + [None if x is None else next(each) for x in leaves]
