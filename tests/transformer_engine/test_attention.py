"""mixed_precision_attention: what it chooses, and that both ways are attention."""

from __future__ import annotations

import pytest
import torch

from gpu_accel.testing import generator
from gpu_accel.transformer_engine import attention
from gpu_accel.transformer_engine.attention import attention_error, attention_precision, mixed_precision_attention


def drawn(seqlen: int = 40) -> list[torch.Tensor]:
    g = generator(0)
    return [torch.randn(1, seqlen, heads, 32, generator=g).bfloat16() for heads in (4, 2, 2)]


@pytest.mark.parametrize("causal", [False, True])
def test_both_precisions_are_attention(causal):
    q, k, v = drawn()
    out = {p: mixed_precision_attention(q, k, v, causal=causal, precision=p, backend="reference").float()
           for p in ("auto", "bf16", "fp8")}  # fmt: skip
    wide = [t.float().transpose(1, 2) for t in (q, k, v)]
    truth = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=causal, enable_gqa=True).transpose(1, 2)
    assert torch.equal(out["auto"], out["bf16"])  # no FP8 units here
    errors = {p: float((o - truth).norm() / truth.norm()) for p, o in out.items()}
    assert errors["bf16"] < 0.01 < errors["fp8"] < 0.1, errors


def test_what_is_chosen(monkeypatch):
    """On a GPU with FP8 units: many keys, no gradient, an error that is allowed."""
    q, k, v = drawn(2048)
    assert 0.01 < attention_error() < 0.1
    assert attention_precision(q, k, v) == ("bf16", "no FP8 units on cpu")
    monkeypatch.setattr(attention, "_has_fp8", lambda device: True)
    assert attention_precision(q, k, v)[0] == "fp8"
    assert "error" in attention_precision(q, k, v, max_error=0.01)[1]
    assert "keys" in attention_precision(q[:, :64], k[:, :64], v[:, :64])[1]
    assert "head" in attention_precision(*(t[..., :24] for t in (q, k, v)))[1]
    assert "gradient" in attention_precision(q.requires_grad_(), k, v)[1]
    with torch.no_grad():
        assert attention_precision(q, k, v)[0] == "fp8"
