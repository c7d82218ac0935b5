"""Gradients through the custom op against float64: dq, dk, dv, and the gradient of the log-sum-exp."""

from __future__ import annotations

import pytest
import torch

from gpu_accel.errors import UnsupportedError
from gpu_accel.flash_attention3 import flash_attn_func, portable_backward, portable_forward
from gpu_accel.testing import attention_truth_backward, make_qkv
from gpu_accel.testing.attention import check_attention

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

CASES = {
    "one-query-one-key": ((1, 1, 1, 1, 1, 16, 16), {}),
    "one-query-many-keys": ((1, 1, 45, 2, 2, 16, 16), {"causal": True}),
    "whole-blocks": ((1, 64, 64, 1, 1, 32, 32), {}),
    "odd-lengths": ((1, 35, 67, 2, 2, 16, 16), {}),
    "causal-square": ((1, 65, 65, 1, 1, 16, 16), {"causal": True}),
    "causal-sq-lt-sk": ((1, 20, 70, 1, 1, 16, 16), {"causal": True}),
    "causal-sq-gt-sk-rows-see-nothing": ((1, 70, 20, 1, 1, 16, 16), {"causal": True}),
    "no-queries": ((1, 0, 5, 2, 2, 16, 16), {}),
    "no-keys": ((1, 5, 0, 2, 2, 16, 16), {}),
    "sliding-window": ((1, 70, 70, 1, 1, 16, 16), {"causal": True, "window_size": (20, -1)}),
    "window-both-sides": ((1, 50, 60, 1, 1, 16, 16), {"window_size": (3, 5)}),
    "window-keys-nobody-sees": ((1, 20, 66, 1, 1, 16, 16), {"window_size": (4, 0)}),
    "window-right-only": ((1, 66, 50, 1, 1, 16, 16), {"window_size": (None, 7)}),
    "softcap": ((1, 33, 40, 1, 1, 16, 16), {"softcap": 1.5}),
    "softcap-causal-window-gqa": ((1, 40, 50, 2, 1, 16, 16), {"softcap": 5.0, "causal": True, "window_size": (9, 0)}),
    "grouped-heads-are-summed": ((2, 34, 34, 6, 2, 16, 16), {"causal": True}),
    "multi-query": ((1, 34, 34, 3, 1, 16, 16), {}),
    "head-dim-8": ((1, 20, 20, 1, 1, 8, 8), {}),
    "head-dim-104-not-a-multiple-of-32": ((1, 20, 33, 1, 1, 104, 104), {"causal": True}),
    "head-dim-192-v-128": ((1, 20, 33, 1, 1, 192, 128), {"causal": True}),
    "head-dim-256": ((1, 17, 33, 1, 1, 256, 256), {}),
    "v-wider-than-q": ((1, 20, 33, 2, 1, 16, 48), {}),
}


def attention(q, k, v, **options):
    return flash_attn_func(q, k, v, return_lse=True, backend="portable", **options)


def inputs(shape, dtype, device, kind="normal"):
    batch, sq, sk, heads, heads_kv, d, dv = shape
    return make_qkv(batch=batch, seqlen_q=sq, seqlen_k=sk, heads=heads, heads_kv=heads_kv, head_dim=d, head_dim_v=dv,
                    kind=kind, dtype=dtype, device=device)  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_case(name, device):
    shape, options = CASES[name]
    check_attention(attention, *inputs(shape, FP32 if device == "cpu" else BF16, device), **options)


@pytest.mark.parametrize("name", ["odd-lengths", "causal-sq-gt-sk-rows-see-nothing", "softcap", "multi-query"])
def test_gradient_of_lse(name, device):
    shape, options = CASES[name]
    check_attention(attention, *inputs(shape, FP32, device), lse_gradient=True, **options)


def test_gradient_of_lse_alone(device):
    q, k, v = (x.requires_grad_() for x in inputs((1, 20, 30, 2, 1, 16, 16), FP32, device))
    _, lse = attention(q, k, v)
    dlse = torch.randn_like(lse)
    got = torch.autograd.grad(lse, (q, k, v), dlse)
    expected = attention_truth_backward(torch.zeros_like(q), q.detach(), k.detach(), v.detach(), dlse=dlse)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_half_precision(dtype, causal, device):
    check_attention(attention, *inputs((1, 50, 70, 2, 1, 64, 64), dtype, device), causal=causal)


@pytest.mark.parametrize("name", ["odd-lengths", "causal-square", "head-dim-192-v-128", "softcap-causal-window-gqa"])
def test_descriptors_and_pointers_give_the_same(name, device):
    shape, options = CASES[name]
    if device == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("TMA needs compute capability 9.0")
    q, k, v = inputs(shape, FP16, device)
    left, right = options.get("window_size", (-1, -1))
    call = {"softmax_scale": 0.2, "window_left": left, "softcap": options.get("softcap", 0.0),
            "window_right": 0 if options.get("causal") else right}  # fmt: skip
    results = []
    for path in ("pointer", "tma"):
        o, lse = portable_forward.forward(q, k, v, path=path, **call)
        do = torch.ones_like(o)
        results.append(portable_backward.backward(do, q, k, v, o, lse, path=path, **call))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["strided", "packed", "poisoned"])
def test_layouts_are_free(kind, device):
    # flash-attention issue 2541: gradients of views of a fused QKV tensor
    q, k, v = inputs((2, 37, 37, 2, 2, 16, 16), FP32, device, kind)
    check_attention(attention, q, k, v, causal=True)


def test_broadcast_gradient_of_the_output(device):
    # out.sum().backward() sends a gradient whose strides are all 0 (flash-attention 355, pytorch 138529)
    q, k, v = (x.requires_grad_() for x in inputs((2, 32, 32, 4, 1, 32, 32), FP32, device))
    attention(q, k, v)[0].sum().backward()
    expected = attention_truth_backward(torch.ones_like(q), q.detach(), k.detach(), v.detach())
    for x, truth in zip((q, k, v), expected, strict=True):
        torch.testing.assert_close(x.grad.double(), truth, rtol=0, atol=2e-5)


def test_strided_gradient_of_the_output(device):
    q, k, v = (x.requires_grad_() for x in inputs((1, 20, 20, 2, 2, 16, 16), FP32, device))
    do = torch.randn(1, 2, 16, 20, device=device).permute(0, 3, 1, 2)  # last stride 20
    got = torch.autograd.grad(attention(q, k, v)[0], (q, k, v), do)
    again = torch.autograd.grad(attention(q, k, v)[0], (q, k, v), do.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


def test_same_inputs_same_bits(device):
    q, k, v = inputs((1, 50, 50, 4, 2, 32, 32), FP16, device)
    o, lse = attention(q, k, v, causal=True)
    call = {"softmax_scale": 0.2, "window_right": 0}
    runs = [portable_backward.backward(torch.ones_like(o), q, k, v, o, lse, **call) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_large_inputs_give_finite_gradients(device):
    # flash-attention issue 1052: NaN in dq
    q, k, v = (x * 3 for x in inputs((1, 96, 96, 1, 1, 64, 64), FP16, device))
    check_attention(attention, q, k, v, causal=True)


def test_keys_behind_the_end_do_not_overflow(device):
    # pytorch issue 196678: every lse far below -88 and a partial last block, where exp(0 - lse) would be inf
    q, k, v = inputs((1, 20, 45, 1, 1, 64, 64), BF16, device)
    q, k = q.abs() * 10, -k.abs() * 10
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, lse = attention(*leaves)
    assert (lse < -90).all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(o.float().square().sum(), leaves))


def test_only_what_is_needed(device):
    q, k, v = inputs((1, 20, 20, 1, 1, 16, 16), FP32, device)
    v.requires_grad_()
    attention(q, k, v)[0].sum().backward()
    assert q.grad is None and k.grad is None and v.grad.isfinite().all()


def test_no_double_backward_is_an_error_not_a_wrong_number(device):
    q, k, v = (x.requires_grad_() for x in inputs((1, 8, 8, 1, 1, 16, 16), FP32, device))
    (dq,) = torch.autograd.grad(attention(q, k, v)[0].sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="first gradients only"):
        dq.sum().backward()
