"""FlexAttention's score_mod and mask_mod as Triton device functions, forward and backward, against float64."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
import triton
import triton.language as tl

from gpu_accel.compat import INTERPRET
from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.flash_attention3 import explain, flash_attn_func, flash_attn_varlen_func, modifier
from gpu_accel.flash_attention3.modifiers import device_function
from gpu_accel.testing import make_qkv, make_varlen
from gpu_accel.testing.features import check_features

FP32 = torch.float32


def inputs(shape, device, dtype=FP32):
    batch, sq, sk, heads, heads_kv, d, dv = shape
    return make_qkv(batch=batch, seqlen_q=sq, seqlen_k=sk, heads=heads, heads_kv=heads_kv, head_dim=d, head_dim_v=dv,
                    dtype=dtype, device=device)  # fmt: skip


def dense(q, k, v, **options):
    return flash_attn_func(q, k, v, backend="portable", **options)


def packed(q, k, v, **options):
    return flash_attn_varlen_func(q, k, v, backend="portable", **options)


# ---- device functions, and their twins in torch


@triton.jit
def relative(score, b, h, q_idx, kv_idx, bias):
    return score + tl.load(bias + h) * (q_idx - kv_idx)


@triton.jit
def relative_grad(grad, score, b, h, q_idx, kv_idx, bias):
    return grad


def relative_twin(score, b, h, q_idx, kv_idx, bias):
    return score + bias[h] * (q_idx - kv_idx)


@triton.jit
def curved(score, b, h, q_idx, kv_idx):  # not linear, and -inf hides every third key
    return tl.where((kv_idx + h) % 3 == 1, float("-inf"), score + 0.1 * (b + 1) * score * score)


@triton.jit
def curved_grad(grad, score, b, h, q_idx, kv_idx):
    return grad * (1.0 + 0.2 * (b + 1) * score)


def curved_twin(score, b, h, q_idx, kv_idx):
    return torch.where((kv_idx + h) % 3 == 1, float("-inf"), score + 0.1 * (b + 1) * score * score)


@triton.jit
def constant(score, b, h, q_idx, kv_idx):  # a row of scores, broadcast over the queries
    return -0.1 * kv_idx


@triton.jit
def constant_grad(grad, score, b, h, q_idx, kv_idx):
    return grad * 0.0


def constant_twin(score, b, h, q_idx, kv_idx):
    return -0.1 * kv_idx.to(score.dtype)


@triton.jit
def table(score, b, h, q_idx, kv_idx, values):  # reads a (rows, keys) table: an index outside would be seen
    return score + tl.load(values + q_idx * 35 + kv_idx)


@triton.jit
def table_grad(grad, score, b, h, q_idx, kv_idx, values):
    return grad


def table_twin(score, b, h, q_idx, kv_idx, values):
    return score + values[q_idx, kv_idx]


@triton.jit
def same_document(b, h, q_idx, kv_idx, document):
    return tl.load(document + q_idx) == tl.load(document + kv_idx)


def same_document_twin(b, h, q_idx, kv_idx, document):
    return document[q_idx] == document[kv_idx]


@triton.jit
def checkers(b, h, q_idx, kv_idx):
    return (q_idx + kv_idx + h) % 2 == 0


def checkers_twin(b, h, q_idx, kv_idx):
    return (q_idx + kv_idx + h) % 2 == 0


@triton.jit
def first_keys(b, h, q_idx, kv_idx):  # says nothing of the queries; entry 1 of the batch sees nothing
    return kv_idx < 3 * (1 - b)


def first_keys_twin(b, h, q_idx, kv_idx):
    return kv_idx < 3 * (1 - b)


SHAPE = (2, 20, 35, 2, 1, 16, 24)
SCORES = {
    "captured-bias": (relative, relative_grad, relative_twin, "bias", {}),
    "curved-and-hiding": (curved, curved_grad, curved_twin, None, {"causal": True}),
    "without-the-score": (constant, constant_grad, constant_twin, None, {}),
    "table-lookup": (table, table_grad, table_twin, "values", {"window_size": (12, 4)}),
    "after-the-soft-cap": (curved, curved_grad, curved_twin, None, {"softcap": 1.5}),
}


def aux(name, device):
    source = torch.Generator().manual_seed(3)
    sizes = {None: (), "bias": (2,), "values": (20, 35)}
    return () if name is None else (torch.randn(sizes[name], generator=source).to(device),)


@pytest.mark.parametrize("name", SCORES)
def test_score_mod(name, device):
    mod, grad, twin, captured, options = SCORES[name]
    check_features(dense, *inputs(SHAPE, device), score_mod=mod, score_mod_grad=grad, truth={"score_mod": twin},
                   aux_tensors=aux(captured, device), **options)  # fmt: skip


MASKS = {
    "checkers": (checkers, checkers_twin, (1, 20, 35, 2, 1, 16, 16), {}),
    "checkers-causal-window": (checkers, checkers_twin, (1, 40, 35, 2, 1, 16, 16), {"window_size": (9, 0)}),
    "rows-that-see-nothing": (first_keys, first_keys_twin, (2, 18, 20, 1, 1, 16, 16), {}),
}


@pytest.mark.parametrize("name", MASKS)
def test_mask_mod(name, device):
    mod, twin, shape, options = MASKS[name]
    check_features(dense, *inputs(shape, device), mask_mod=mod, truth={"mask_mod": twin}, lse_gradient=True, **options)


def test_documents(device):
    document = torch.tensor([0] * 13 + [1] * 9 + [2] * 13, device=device)
    check_features(dense, *inputs((1, 35, 35, 2, 2, 16, 16), device), mask_mod=same_document, causal=True,
                   aux_tensors=(document,), truth={"mask_mod": same_document_twin})  # fmt: skip


def test_with_sinks_and_alibi(device):
    check_features(dense, *inputs((1, 20, 35, 2, 1, 16, 16), device), score_mod=curved, score_mod_grad=curved_grad,
                   mask_mod=checkers, sinks=torch.tensor([0.5, -1.0], device=device),
                   alibi_slopes=torch.tensor([0.25, 0.1], device=device),
                   truth={"score_mod": curved_twin, "mask_mod": checkers_twin})  # fmt: skip


def test_packed_counts_inside_sequences(device):
    q, k, v, cu_q, cu_k, _, _ = make_varlen(lengths_q=[7, 0, 20], lengths_k=[11, 3, 19], heads=2, heads_kv=1,
                                            head_dim=16, dtype=FP32, device=device)  # fmt: skip
    check_features(packed, q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, score_mod=curved, score_mod_grad=curved_grad,
                   mask_mod=checkers, truth={"score_mod": curved_twin, "mask_mod": checkers_twin})  # fmt: skip


@triton.jit
def note(score, b, h, q_idx, kv_idx, seen):
    tl.store(seen + 1 + q_idx + 0 * kv_idx, 1)
    return score


@triton.jit
def note_grad(grad, score, b, h, q_idx, kv_idx, seen):
    tl.store(seen + 1 + q_idx + 0 * kv_idx, 1)
    return grad


def test_a_sequence_of_which_no_row_counts(device):
    # its rows are computed and thrown away, but a table must not be read in front of its first row
    q, k, v, cu_q, cu_k, _, _ = make_varlen(lengths_q=[5, 9], lengths_k=[140, 20], heads=1, heads_kv=1, head_dim=16,
                                            dtype=FP32, device=device)  # fmt: skip
    used = {name: torch.tensor(n, dtype=torch.int32, device=device)
            for name, n in (("seqused_q", [0, 9]), ("seqused_k", [140, 20]))}  # fmt: skip
    seen = torch.zeros(12, dtype=torch.int32, device=device)
    check_features(packed, q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **used, score_mod=note,
                   score_mod_grad=note_grad, aux_tensors=(seen,),
                   truth={"score_mod": lambda score, *at: score})  # fmt: skip
    assert seen.tolist() == [0] + 9 * [1] + [0, 0]


def test_half_precision(device):
    check_features(dense, *inputs((1, 20, 35, 2, 1, 64, 64), device, torch.float16), score_mod=relative,
                   score_mod_grad=relative_grad, aux_tensors=aux("bias", device),
                   truth={"score_mod": relative_twin})  # fmt: skip


def test_is_flex_attention(device):
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = inputs((1, 20, 20, 2, 2, 16, 16), device)
    (bias,) = aux("bias", device)
    got = dense(q, k, v, score_mod=relative, aux_tensors=(bias,))

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + bias[h] * (q_idx - kv_idx)

    expected = flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), score_mod=score_mod)
    torch.testing.assert_close(got, expected.transpose(1, 2), rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_compiles_as_one_graph(device):
    q, k, v = (x.requires_grad_() for x in inputs((1, 8, 8, 2, 2, 16, 16), device))
    mod, grad, mask = modifier(curved), modifier(curved_grad), modifier(checkers)
    sinks = torch.zeros(2, device=device, requires_grad=True)

    def call(q, k, v, sinks):
        o, lse = flash_attn_func(q * 2, k, v, score_mod=mod, score_mod_grad=grad, mask_mod=mask, sinks=sinks,
                                 return_lse=True)  # fmt: skip
        return o.square().sum() + lse.sum()

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(q, k, v, sinks), (q, k, v, sinks))
    expected = torch.autograd.grad(call(q, k, v, sinks), (q, k, v, sinks))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_bare_function_inside_compile_says_what_to_do(device):
    q, k, v = inputs((1, 8, 8, 2, 2, 16, 16), device)

    def call(q):
        return flash_attn_func(q, k, v, mask_mod=checkers)

    with pytest.raises(Exception, match="inside torch.compile mask_mod must be wrapped outside"):
        torch.compile(call, fullgraph=True, backend="eager")(q)


def test_keys_tell_functions_apart():
    a, b = modifier(curved), modifier(checkers)
    assert a.key != b.key and modifier(curved).key == a.key and modifier(a) is a
    assert device_function(a.key) is curved and device_function("") is None
    assert "curved" in repr(a)
    with pytest.raises(UnsupportedError, match="not known in this process"):
        device_function("nobody#0")


WITHOUT_LANGUAGE = """
import triton

@triton.jit
def bare(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx
"""
CALLS_IT = """
import triton
import triton.language as tl
from modifiers_without_language import bare

@triton.jit
def calls_bare(b, h, q_idx, kv_idx):
    return bare(b, h, q_idx, kv_idx)
"""


@pytest.mark.skipif(not INTERPRET, reason="only Triton's interpreter wants triton.language beside a function")
def test_modules_without_triton_language(tmp_path, monkeypatch):
    (tmp_path / "modifiers_without_language.py").write_text(WITHOUT_LANGUAGE)
    (tmp_path / "modifiers_that_call_it.py").write_text(CALLS_IT)
    monkeypatch.syspath_prepend(tmp_path)
    q = torch.zeros(1, 5, 2, 16)
    for module, name in (("modifiers_without_language", "bare"), ("modifiers_that_call_it", "calls_bare")):
        function = getattr(importlib.import_module(module), name)
        for call in (flash_attn_func, explain):
            with pytest.raises(InvalidInputError, match="cannot call bare.*to the module modifiers_without_language"):
                call(q, q, q, mask_mod=function)
        monkeypatch.delitem(sys.modules, module)


def test_gradient_needs_its_derivative(device):
    q, k, v = inputs((1, 8, 8, 2, 2, 16, 16), device)
    with torch.no_grad():
        flash_attn_func(q.requires_grad_(), k, v, score_mod=curved)
    with pytest.raises(UnsupportedError, match="pass score_mod_grad"):
        flash_attn_func(q, k, v, score_mod=curved)
    with pytest.raises(UnsupportedError, match="pass score_mod_grad"):
        flash_attn_func(q.detach(), k, v, score_mod=curved, sinks=torch.zeros(2, device=device, requires_grad=True))
    said = explain(q.detach(), k, v, score_mod=curved)
    assert said.backward.startswith("none") and "score_mod has no score_mod_grad" in said.backward


def test_who_refuses(device):
    q, k, v = inputs((1, 8, 8, 2, 2, 16, 16), device)
    for backend in ("blackwell", "reference"):
        with pytest.raises(UnsupportedError, match="does not do mask_mod"):
            flash_attn_func(q, k, v, mask_mod=checkers, backend=backend)
    said = explain(q, k, v, mask_mod=checkers)
    assert "NVIDIA" in said.refused["hopper"] and "a block_mask skips whole blocks" in " ".join(said.notes)


def python_function(score, b, h, q_idx, kv_idx):
    return score


WRONG = {
    "python-function": ({"score_mod": python_function}, InvalidInputError, "decorate the function with @triton.jit"),
    "not-a-function": ({"mask_mod": 3}, InvalidInputError, "got int 3"),
    "grad-alone": ({"score_mod_grad": curved_grad}, InvalidInputError, "score_mod, which was not given"),
    "aux-alone": ({"aux_tensors": (torch.zeros(2),)}, InvalidInputError, "neither was given"),
    "aux-tensor": ({"mask_mod": checkers, "aux_tensors": torch.zeros(2)}, InvalidInputError, "a tuple of tensors"),
    "aux-number": ({"mask_mod": checkers, "aux_tensors": (1,)}, InvalidInputError, r"aux_tensors\[0\] must be a tens"),
    "aux-many": ({"mask_mod": checkers, "aux_tensors": (torch.zeros(1),) * 9}, InvalidInputError, "at most 8"),
    "aux-complex": (
        {"mask_mod": checkers, "aux_tensors": (torch.zeros(4) + 0j,)}, InvalidInputError, "view_as_real"),
    "aux-strided": (
        {"mask_mod": checkers, "aux_tensors": (torch.zeros(4, 4).T,)}, InvalidInputError, "must be contiguous"),
    "aux-device": (
        {"mask_mod": checkers, "aux_tensors": (torch.zeros(2, device="meta"),)}, InvalidInputError, "device of q"),
    "aux-learned": (
        {"mask_mod": checkers, "aux_tensors": (torch.zeros(2, requires_grad=True),)}, UnsupportedError, "get none"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name):
    options, kind, message = WRONG[name]
    q = torch.zeros(1, 5, 2, 16)
    cu = torch.tensor([0, 5], dtype=torch.int32)
    with pytest.raises(kind, match=message):
        flash_attn_func(q, q, q, **options)
    with pytest.raises(kind, match=message):
        explain(q, q, q, **options)
    with pytest.raises(kind, match=message):
        flash_attn_varlen_func(q[0], q[0], q[0], cu_seqlens_q=cu, cu_seqlens_k=cu, **options)
