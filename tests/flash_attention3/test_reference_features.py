"""The reference of sinks, ALiBi, modifiers and block masks: others' definitions, and its backward by autograd."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from gpu_accel.flash_attention3.reference import attention_reference, attention_truth, attention_truth_backward


def qkv(sq=20, sk=35, heads=4, heads_kv=2, d=8, dv=16, batch=2):
    g = torch.Generator().manual_seed(sq * 31 + sk)
    shapes = ((batch, sq, heads, d), (batch, sk, heads_kv, d), (batch, sk, heads_kv, dv))
    return tuple(torch.randn(s, generator=g, dtype=torch.float64).requires_grad_() for s in shapes)


def score_mod(score, b, h, q_idx, kv_idx):
    return torch.where((q_idx + kv_idx + h) % 5 == 0, float("-inf"), score + 0.1 * (b + 1) * torch.tanh(score) * kv_idx)


def mask_mod(b, h, q_idx, kv_idx):
    return (q_idx + 2 * b >= kv_idx - 3) & (kv_idx != h)


SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
SLOPES = torch.tensor([[0.5, 0.25, 0.1, 0.0], [1.0, 0.0, 0.3, 0.2]])
BLOCKS = create_block_mask(mask_mod, 2, 4, 20, 35, device="cpu", BLOCK_SIZE=16)
CASES = {
    "sinks": {"sinks": SINKS, "causal": True},
    "alibi": {"alibi_slopes": SLOPES, "window_size": (9, 30)},
    "score": {"score_mod": score_mod, "softcap": 3.0},
    "mask": {"mask_mod": mask_mod, "window_size": (12, -1)},
    "everything": {"sinks": SINKS, "alibi_slopes": SLOPES[0], "score_mod": score_mod, "mask_mod": mask_mod,
                   "softcap": 2.0, "causal": True},
    "blocks": {"mask_mod": mask_mod, "block_mask": BLOCKS},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_backward_is_what_autograd_finds(name):
    options = dict(CASES[name])
    leaves = list(qkv())
    if "sinks" in options:
        options["sinks"] = options["sinks"].clone().requires_grad_()
        leaves.append(options["sinks"])
    o, lse = attention_truth(*leaves[:3], **options)
    do = torch.randn_like(o)
    dlse = torch.randn_like(lse).masked_fill(lse.isinf(), 0.0)
    expected = torch.autograd.grad((o, lse), leaves, (do, dlse))
    detached = {n: x.detach() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    got = attention_truth_backward(do, *(x.detach() for x in leaves[:3]), dlse=dlse, **detached)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["score", "mask", "blocks"])
def test_is_flex_attention(name):
    options = {n: x for n, x in CASES[name].items() if n in ("score_mod", "mask_mod", "block_mask")}
    q, k, v = (x.detach() for x in qkv())
    block_mask = options.get("block_mask")
    if block_mask is None and "mask_mod" in options:
        block_mask = BLOCKS
    swapped = (x.transpose(1, 2) for x in (q, k, v))
    expected = flex_attention(*swapped, score_mod=options.get("score_mod"), block_mask=block_mask, enable_gqa=True)
    o, _ = attention_reference(q, k, v, **options)
    torch.testing.assert_close(o, expected.transpose(1, 2), rtol=0, atol=1e-10)


def test_maxima_are_of_what_the_softmax_sees():
    q, k, v = (x.detach() for x in qkv(batch=1))
    _, _, maxima = attention_reference(q, k, v, causal=True, sinks=SINKS + 100.0, return_max_logits=True)
    scores = torch.einsum("qhd,khd->hqk", q[0], k[0].repeat_interleave(2, 1)) * 8**-0.5
    seen = torch.ones(20, 35, dtype=torch.bool).tril(35 - 20)
    torch.testing.assert_close(maxima, scores.masked_fill(~seen, float("-inf")).amax((1, 2)))


def test_half_precision_computes_in_it_when_asked():
    q, k, v = (x.detach().to(torch.bfloat16) for x in qkv())
    o, lse = attention_reference(q, k, v, dtype=torch.bfloat16, **CASES["everything"])
    assert o.dtype == lse.dtype == torch.bfloat16
    assert (o.double() - attention_truth(q, k, v, **CASES["everything"])[0]).abs().max() < 0.05
