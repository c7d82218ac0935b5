"""torch's own checks of custom ops: schema, fake tensors, autograd registration, AOT dispatch with dynamic shapes."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from gpu_accel.flash_attention3 import featured, function, modifier
from gpu_accel.testing import make_qkv


def tensors(device, dtype=torch.float32, packed=False, grad=True):
    made = make_qkv(batch=2, seqlen_q=9, seqlen_k=17, heads=2, heads_kv=1, head_dim=16, head_dim_v=24, dtype=dtype,
                    device=device)  # fmt: skip
    made = [x.flatten(0, 1) if packed else x for x in made]
    return [x.requires_grad_(grad) for x in made]


def offsets(device):
    return [torch.tensor([0, n // 2, n], dtype=torch.int32, device=device) for n in (18, 34)]


@pytest.mark.parametrize("backend", ["portable", "reference"])
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_forward(backend, grad, device):
    torch.library.opcheck(
        function.flash_attention_forward, (*tensors(device, grad=grad), 0.25, -1, 0, 0.0, False, backend)
    )


@pytest.mark.parametrize("used", [False, True], ids=["whole", "seqused"])
def test_varlen_forward(used, device):
    cu_q, cu_k = offsets(device)
    seqused = [torch.tensor(n, dtype=torch.int32, device=device) for n in ([9, 4], [17, 3])] if used else [None, None]
    args = (*tensors(device, packed=True), cu_q, cu_k, *seqused, 0.25, 5, 0, 2.0, False, "portable")
    torch.library.opcheck(function.flash_attention_varlen_forward, args)


@pytest.mark.parametrize("with_dlse", [False, True])
def test_backward(with_dlse, device):
    q, k, v = tensors(device, grad=False)
    scalars = (0.25, -1, 0, 0.0, False, "portable")
    o, lse = function.flash_attention_forward(q, k, v, *scalars)
    dlse = torch.randn_like(lse) if with_dlse else None
    torch.library.opcheck(function.flash_attention_backward, (torch.randn_like(o), dlse, q, k, v, o, lse, *scalars))


def test_varlen_backward(device):
    q, k, v = tensors(device, packed=True, grad=False)
    cu_q, cu_k = offsets(device)
    tail = (cu_q, cu_k, None, None, 0.25, -1, -1, 0.0, True, "portable")
    o, lse = function.flash_attention_varlen_forward(q, k, v, *tail)
    torch.library.opcheck(function.flash_attention_varlen_backward, (torch.randn_like(o), None, q, k, v, o, lse, *tail))


def test_fake_results_have_the_real_strides(device):
    # outputs are contiguous whatever the strides of the inputs are
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors(device, grad=False))
    for out in function.flash_attention_forward(q, k, v, 0.25, -1, 0, 0.0, False, "portable"):
        assert out.is_contiguous()


# ---- calls with features: lists of tensors, optional tensors, a third result


@triton.jit
def causal(b, h, q_idx, kv_idx, shift):
    return q_idx >= kv_idx + tl.load(shift)


def featured_arguments(kind, device, grad):
    q, k, v = tensors(device, grad=grad)
    sinks, cu, slopes, aux, lists, size, mod = None, [None] * 4, None, [], [], (0, 0), ""
    if kind == "sinks":
        sinks = torch.randn(2, device=device, requires_grad=grad)
        slopes = torch.rand(2, 2, device=device)
    elif kind == "blocks":
        mod, aux = modifier(causal).key, [torch.zeros(1, dtype=torch.int32, device=device)]
        counts = torch.ones(1, 1, 1, dtype=torch.int32, device=device)
        lists, size = [counts, torch.zeros(1, 1, 1, 2, dtype=torch.int32, device=device)] * 2, (16, 16)
        q_counts = torch.tensor([[[1, 0]]], dtype=torch.int32, device=device)
        lists += [q_counts, torch.zeros(1, 1, 2, 1, dtype=torch.int32, device=device)] * 2
    else:
        q, k, v = tensors(device, packed=True, grad=grad)
        sinks, cu = torch.randn(2, device=device, requires_grad=grad), [*offsets(device), None, None]
    options = (0.25, -1, -1, 0.0, False, "portable", "", "", mod, *size, kind == "sinks", False)
    return (q, k, v, sinks, *cu, slopes, aux, lists, *options)


@pytest.mark.parametrize("kind", ["sinks", "blocks", "packed"])
def test_featured_forward(kind, device):
    torch.library.opcheck(featured.flash_attention_featured_forward, featured_arguments(kind, device, grad=True))


@pytest.mark.parametrize("kind", ["sinks", "blocks", "packed"])
def test_featured_backward(kind, device):
    arguments = featured_arguments(kind, device, grad=False)
    o, lse, _ = featured.flash_attention_featured_forward(*arguments)
    dlse = torch.randn_like(lse) if kind == "sinks" else None
    torch.library.opcheck(featured.flash_attention_featured_backward, (torch.randn_like(o), dlse, o, lse, *arguments))
