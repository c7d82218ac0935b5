"""The public face: backends and their explanation, compile, autocast, the module and the functions of the README."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import gpu_accel
from gpu_accel.errors import HardwareError, InvalidInputError, UnsupportedError
from gpu_accel.flash_attention3 import (
    FlashAttention3,
    backends,
    explain,
    flash_attention_3_backward,
    flash_attention_3_forward,
    flash_attn_func,
    flash_attn_varlen_func,
    function,
)
from gpu_accel.flash_attention3.backends import BACKENDS, choose
from gpu_accel.flash_attention3.problem import Problem
from gpu_accel.testing import make_qkv


def qkv(device, dtype=torch.float32, layout="bshd", sq=20, sk=33, heads=4, heads_kv=2, d=16, **more):
    return make_qkv(batch=2, seqlen_q=sq, seqlen_k=sk, heads=heads, heads_kv=heads_kv, head_dim=d, dtype=dtype,
                    device=device, layout=layout, **more)  # fmt: skip


def test_importing_the_package_needs_no_torch():
    code = "import gpu_accel, sys; gpu_accel.kernels(); assert not {'torch', 'triton'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_get_kernel_by_name():
    assert gpu_accel.get_kernel("flash_attention") is flash_attn_func
    assert gpu_accel.FlashAttention3 is FlashAttention3
    with pytest.raises(InvalidInputError, match="flash_attention"):
        gpu_accel.get_kernel("flash_atention")
    for name in (None, 3, []):
        with pytest.raises(InvalidInputError, match="no kernel called"):
            gpu_accel.get_kernel(name)
    with pytest.raises(AttributeError):
        _ = gpu_accel.no_such_name


def test_every_public_name_exists():
    import gpu_accel.flash_attention3 as package

    for name in package.__all__:
        assert getattr(package, name) is not None
    for name in gpu_accel.kernels():
        assert callable(gpu_accel.get_kernel(name))


def test_families_of_ops_are_found_by_name_as_a_whole():
    import gpu_accel.thunderkittens as tk

    families = [name for name in tk.__all__ if name.startswith("chunk_") or name.endswith(("_mul", "_norm", "entropy"))]
    assert len(families) >= 12 and set(families) <= set(gpu_accel.kernels())


@pytest.mark.parametrize("backend", ["auto", "portable", "reference"])
def test_backends_agree(backend, device):
    q, k, v = qkv(device)
    o, lse = flash_attn_func(q, k, v, causal=True, backend=backend, return_lse=True)
    expected, expected_lse = flash_attn_func(q, k, v, causal=True, backend="reference", return_attn_probs=True)
    torch.testing.assert_close(o, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-5)
    assert isinstance(flash_attn_func(q, k, v, backend=backend), torch.Tensor)


def test_is_torch_attention(device):
    q, k, v = qkv(device, sq=33)
    expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True)
    torch.testing.assert_close(flash_attn_func(q, k, v, causal=True), expected.transpose(1, 2), rtol=0, atol=1e-5)


def test_explain_tells_everything(device):
    q, k, v = qkv(device)
    said = explain(q, k, v, causal=True)
    assert said.backend == "portable" or device == "cuda"
    assert set(said.refused) == set(BACKENDS) - {said.backend}
    assert said.backward and said.problem.group == 2
    text = str(said)
    for word in ("forward", "backward", "not taken", said.backend, str(said.problem)):
        assert word in text
    if device == "cpu":
        assert "needs an NVIDIA GPU" in said.refused["hopper"] and said.path.startswith("pointer")


def test_explain_notes(device):
    q, k, v = qkv(device)
    wrong_way = q.transpose(-1, -2).contiguous().transpose(-1, -2)
    assert any("copied once" in note for note in explain(wrong_way, k, v).notes)
    q, k, v = qkv(device, sq=40)
    assert any("7 rows see no key" in note for note in explain(q, k, v, causal=True).notes)


def test_explain_packed(device):
    q, k, v = (x.flatten(0, 1) for x in qkv(device))
    cu = [torch.tensor([0, n, 2 * n], dtype=torch.int32, device=device) for n in (20, 33)]
    assert explain(q, k, v, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1]).problem.varlen


def test_any_last_stride(device):
    q, k, v = qkv(device)
    wrong_way = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, k, v)]
    assert all(x.stride(-1) != 1 for x in wrong_way)
    assert torch.equal(flash_attn_func(*wrong_way), flash_attn_func(q, k, v))


def test_hopper_on_a_cpu_is_a_hardware_error():
    q, k, v = qkv("cpu", torch.bfloat16, d=64)
    with pytest.raises(HardwareError, match="hopper"):
        flash_attn_func(q, k, v, backend="hopper")


def problem(**changes):
    given = dict(device_type="cuda", capability=(9, 0), dtype=torch.bfloat16, batch=1, seqlen_q=64, seqlen_k=64,
                 heads=2, heads_kv=2, head_dim=64, head_dim_v=64, causal=False, window_left=-1, window_right=-1,
                 softcap=0.0, varlen=False)  # fmt: skip
    return Problem(**{**given, **changes})


def test_auto_never_takes_the_reference_on_a_gpu():
    for changes in ({"dtype": torch.float64}, {"head_dim": 512}, {"capability": (7, 5)}):
        with pytest.raises(UnsupportedError, match="only when asked for"):
            choose(problem(**changes), "auto", "forward")
        assert choose(problem(**changes), "reference", "forward") == ("reference", {})


def test_auto_on_other_gpus_is_portable():
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0)):
        name, refused = choose(problem(capability=capability), "auto", "forward")
        assert name == "portable" and "9.0" in refused["hopper"]
        assert choose(problem(capability=capability), "auto", "backward")[0] == "portable"


def test_a_backend_without_backward_leaves_it_to_auto(monkeypatch):
    found = backends.module
    monkeypatch.setattr(backends, "module", lambda b, p: None if (b.name, p) == ("hopper", "backward") else found(b, p))
    assert choose(problem(), "hopper", "backward")[0] == "portable"


def test_deterministic_takes_the_portable_backward():
    # the Hopper backward adds with atomics; the gradients of a named forward follow the same rule
    for backend in ("auto", "hopper"):
        assert choose(problem(deterministic=True), backend, "backward")[0] == "portable"


def test_float64_on_a_cpu_is_the_reference():
    q, k, v = (x.double() for x in qkv("cpu"))
    assert explain(q, k, v).backend == "reference"
    o, lse = flash_attn_func(q, k, v, return_lse=True)
    assert o.dtype == lse.dtype == torch.float64
    with pytest.raises(UnsupportedError, match="float64"):
        flash_attn_func(q, k, v, backend="portable")


def test_gradcheck_through_the_op():
    leaves = [x.double().requires_grad_() for x in qkv("cpu", sq=3, sk=4, heads=2, heads_kv=1, d=8)]
    assert torch.autograd.gradcheck(
        lambda q, k, v: flash_attn_func(q, k, v, causal=True, softcap=3.0, return_lse=True), leaves, fast_mode=True
    )


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiles_without_a_graph_break(dynamic, device):
    q, k, v = (x.requires_grad_() for x in qkv(device))

    def call(q, k, v):
        o, lse = flash_attn_func(q * 2, k, v, causal=True, window_size=(9, None), return_lse=True)
        return (o + 1).sum() + lse.sum()

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    got = torch.autograd.grad(compiled(q, k, v), (q, k, v))
    expected = torch.autograd.grad(call(q, k, v), (q, k, v))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_packed_compiles_without_a_graph_break(device):
    # FlashInfer 2733, flash-attention 2013: no int from the device is needed
    q, k, v = (x.flatten(0, 1).requires_grad_() for x in qkv(device))
    cu = [torch.tensor([0, n, 2 * n], dtype=torch.int32, device=device) for n in (20, 33)]

    def call(q, k, v):
        return flash_attn_varlen_func(q, k, v, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], causal=True).sum()

    got = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v)
    torch.testing.assert_close(got, call(q, k, v))
    torch.autograd.grad(got, (q, k, v))


def test_autocast_decides_the_dtype(device):
    q, k, v = (x.requires_grad_() for x in qkv(device))
    with torch.autocast(device, torch.bfloat16):
        o = flash_attn_func(q, k, v)
    assert o.dtype == torch.bfloat16
    o.float().sum().backward()
    assert q.grad.dtype == torch.float32  # of the leaf, through the cast
    assert flash_attn_func(q, k, v).dtype == torch.float32


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_module(layout, precision, device):
    q, k, v = qkv(device, layout=layout)
    attention = FlashAttention3(precision=precision, layout=layout)
    o = attention(q, k, v, causal=True)
    assert o.dtype == torch.float32 and o.shape == q.shape
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    order = (lambda x: x.transpose(1, 2)) if layout == "bhsd" else (lambda x: x)
    expected = order(flash_attn_func(*(order(x.to(half)) for x in (q, k, v)), causal=True))
    assert torch.equal(o, expected.float())
    assert precision in repr(attention) and not list(attention.parameters())


def test_module_fp8(device):
    q, k, v = qkv(device, torch.bfloat16, layout="bhsd", d=32)
    o = FlashAttention3(precision="fp8")(q, k, v, causal=False)
    expected = FlashAttention3(precision="bf16")(q, k, v, causal=False)
    assert o.dtype == q.dtype and o.shape == q.shape
    error = (o.float() - expected.float()).norm() / expected.float().norm()
    assert 1e-4 < error < 0.1  # fp8 it is, and close
    with pytest.raises(UnsupportedError, match="forward only"):
        FlashAttention3(precision="fp8")(q.requires_grad_(), k, v)


def test_module_refuses_the_wrong_machine():
    q, k, v = qkv("cpu", layout="bhsd")
    with pytest.raises(HardwareError, match="hardware=None"):
        FlashAttention3(hardware="h100")(q, k, v)
    for wrong in ({"hardware": "abacus"}, {"precision": "int3"}, {"layout": "sbhd"}):
        with pytest.raises(InvalidInputError):
            FlashAttention3(**wrong)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("with_lse", [False, True], ids=["lse-recomputed", "lse-given"])
def test_forward_and_backward_functions(causal, with_lse, device):
    q, k, v = (x.requires_grad_() for x in qkv(device, torch.bfloat16, layout="bhsd", sq=33))
    o = flash_attention_3_forward(q, k, v, causal=causal, precision="bf16")
    do = torch.randn_like(o)
    expected = torch.autograd.grad(o, (q, k, v), do)
    lse = None
    if with_lse:
        _, lse = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal, return_lse=True)
    grads = flash_attention_3_backward(do, q, k, v, o, lse, causal=causal)
    for got, want in zip(grads, expected, strict=True):
        assert torch.equal(got, want)


def test_forward_function_is_fp8_by_default(device):
    q, k, v = qkv(device, torch.bfloat16, layout="bhsd", d=32)
    o = flash_attention_3_forward(q, k, v)
    assert o.shape == q.shape and not torch.equal(o, flash_attention_3_forward(q, k, v, precision="bf16"))


def test_meta_tensors_and_checkpointing(device):
    from torch.utils.checkpoint import checkpoint

    q, k, v = (x.requires_grad_() for x in qkv(device))
    o = checkpoint(lambda *x: flash_attn_func(*x, causal=True), q, k, v, use_reentrant=False)
    got = torch.autograd.grad(o.sum(), (q, k, v))
    expected = torch.autograd.grad(flash_attn_func(q, k, v, causal=True).sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    shape = flash_attn_func(*(x.to("meta") for x in (q, k, v))).shape
    assert shape == q.shape


def test_blackwell_is_taken_by_name_only():
    q = torch.zeros(1, 64, 2, 64, dtype=torch.bfloat16)
    problem = function.problem_of(q, q, q, window_left=-1, window_right=0, softcap=0.0)
    b200 = replace(problem, device_type="cuda", capability=(10, 0))
    name, refused = choose(b200, "auto", "forward")
    assert name == "portable" and "experimental and not measured" in refused["blackwell"]
    assert choose(b200, "blackwell", "forward") == ("blackwell", {})
    assert choose(b200, "blackwell", "backward")[0] == "portable"
    with pytest.raises(UnsupportedError, match="packed sequences"):
        choose(replace(b200, varlen=True), "blackwell", "forward")
    for elsewhere in (problem, replace(b200, capability=(9, 0))):
        with pytest.raises(HardwareError, match="blackwell"):
            choose(elsewhere, "blackwell", "forward")
