"""Calls that nobody should make, and combinations that nobody thought of: an answer or a clear error."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl  # noqa: F401  (the interpreter looks for it beside every device function)
from torch.autograd import forward_ad

from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.flash_attention3 import (
    combine,
    flash_attn_func,
    flash_attn_with_kvcache,
    fp8_block_quantize,
    hadamard_transform,
)
from gpu_accel.thunderkittens import gemm, rms_norm
from gpu_accel.transformer_engine import Float8CurrentScaling, Linear, quantize


@triton.jit
def before(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


@triton.jit
def scaled(score, b, h, q_idx, kv_idx):
    return score * 0.5


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_mod": scaled}, "mask_mod is called with"),
        ({"score_mod": before}, "score_mod is called with"),
        ({"mask_mod": before, "aux_tensors": (torch.zeros(3),)}, "1 aux_tensors"),
    ],
    ids=["score-for-mask", "mask-for-score", "aux-not-taken"],
)
def test_a_modifier_with_other_arguments(options, message):
    q = draw(1, 5, 2, 16)
    with pytest.raises(InvalidInputError, match=message):
        flash_attn_func(q, q, q, **options)


def test_vmap_goes_through_features():
    q, k, sinks = draw(3, 2, 9, 2, 16), draw(2, 9, 2, 16), draw(3, 2)

    def attend(one, sink):
        return flash_attn_func(one, k, k, sinks=sink, mask_mod=before)

    found = torch.vmap(attend)(q, sinks)
    assert torch.equal(found, torch.stack([attend(one, sink) for one, sink in zip(q, sinks, strict=True)]))
    leaves = q.requires_grad_(), sinks.requires_grad_()
    mapped = torch.autograd.grad(torch.vmap(attend)(*leaves).square().sum(), leaves)
    looped = torch.stack([attend(one, sink) for one, sink in zip(*leaves, strict=True)])
    for a, b in zip(mapped, torch.autograd.grad(looped.square().sum(), leaves), strict=True):
        torch.testing.assert_close(a, b)


def test_vmap_over_what_writes_is_refused():
    cache = draw(2, 8, 2, 16)
    with pytest.raises(UnsupportedError, match="flash_attn_with_kvcache has no rule"):
        torch.vmap(lambda q: flash_attn_with_kvcache(q, cache, cache))(draw(3, 2, 1, 2, 16))
    with pytest.raises(UnsupportedError, match="combine has no rule"):
        torch.vmap(combine)(draw(2, 3, 1, 2, 2, 16), draw(2, 3, 1, 2, 2))


def test_traces_are_refused():
    with pytest.raises(UnsupportedError, match=r"torch\.export"):
        torch.jit.trace(lambda q: flash_attn_func(q, q, q), (draw(1, 5, 2, 16),))
    layer = Linear(16, 16, recipe=Float8CurrentScaling())
    with pytest.raises(UnsupportedError, match=r"torch\.export"):
        torch.jit.trace(layer, (draw(4, 16),))


ATTENDED = {
    "flash_attn_func": lambda q: flash_attn_func(q, q, q, backend="portable"),
    "reference": lambda q: flash_attn_func(q, q, q, backend="reference"),
    "kvcache": lambda q: flash_attn_with_kvcache(q, q.detach().clone(), q.detach().clone()),
    "hadamard": hadamard_transform,
    "fp8_block_quantize": lambda q: fp8_block_quantize(q)[0],
    "rms_norm": lambda q: rms_norm(q, draw(16)),
    "gemm": lambda q: gemm(q.reshape(-1, 16), draw(16, 16)),
    "quantize": lambda q: quantize(q, "fp8").dequantize(),
}


@pytest.mark.parametrize("name", ATTENDED)
def test_derivatives_in_forward_mode_are_refused(name):
    """torch drops a tangent at a custom op without a word, and torch.func.jvp then gives zero."""
    q = draw(1, 5, 2, 16)
    ATTENDED[name](q)
    with pytest.raises(UnsupportedError, match="has a tangent|no rule for the transforms"):
        torch.func.jvp(ATTENDED[name], (q,), (q,))
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match="has a tangent"):
        ATTENDED[name](forward_ad.make_dual(q, q))
    with forward_ad.dual_level():
        ATTENDED[name](q)  # of something else
