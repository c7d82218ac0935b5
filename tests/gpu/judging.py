"""How GPU tests of ThunderKittens' kernels judge: beside float64, with plain torch as the ruler."""

from __future__ import annotations

import math

import torch

from gpu_accel.testing import assert_close_to_truth, default_floor, generator

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def randn(*shape: int, seed: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed, "cuda"), device="cuda").to(dtype)


def run(function, tensors, grads, dtype=None):
    leaves = [(x.detach().clone() if dtype is None else x.detach().to(dtype)).requires_grad_() for x in tensors]
    out = function(*leaves)
    out = list(out) if isinstance(out, tuple) else [out]
    total = sum((o.double() * d.double()).sum() for o, d in zip(out, grads, strict=True))
    return [o.detach() for o in out] + list(torch.autograd.grad(total, leaves))


def judge(names, function, tensors, grads, factor=2.0, floors=None):
    mine, truth = run(function("portable"), tensors, grads), run(function("reference"), tensors, grads, torch.float64)
    ruler = run(function("reference"), tensors, grads)
    for name, out, right, measure in zip(names, mine, truth, ruler, strict=True):
        floor = max((floors or {}).get(name, 0.0), default_floor(out.dtype, right.abs().max().item()))
        assert_close_to_truth(name, out, right, measure, factor=factor, floor=floor)


def judge_values(names, function, tensors):
    """As `judge`, without gradients."""
    mine, ruler = function("portable")(*tensors), function("reference")(*tensors)
    truth = function("reference")(*(x.double() for x in tensors))
    for name, *three in zip(names, mine, truth, ruler, strict=False):
        assert_close_to_truth(name, *three)


def assert_repeats(call, tensors):
    """The same bits again, and in a graph that is replayed with another third tensor in between."""
    first = call(*tensors)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, call(*tensors), strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call(*tensors)
    values = tensors[2].clone()
    for factor in (2.0, 1.0):
        tensors[2].copy_(values * factor)
        graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(first, kept, strict=True))


def between_nan(x, shift):
    """x (batch, seqlen, heads, dim) as a view with NaN before and behind, and steps apart."""
    batch, seqlen, heads, dim = x.shape
    wide = torch.full((batch, seqlen + 64, heads + 1, dim + 2 * shift), math.nan, dtype=x.dtype, device=x.device)
    view = wide[:, 37 : 37 + seqlen, 1:, shift : shift + dim]
    return view.copy_(x)
