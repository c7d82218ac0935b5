"""Random shapes, masks and offsets in the interpreter: what nobody thought of writing down."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_accel.flash_attention3 import flash_attn_func, flash_attn_varlen_func
from gpu_accel.testing import make_qkv
from gpu_accel.testing.attention import check_attention

SETTINGS = settings(max_examples=8, deadline=None, derandomize=True)
bounds = st.one_of(st.just(-1), st.integers(0, 80))


@st.composite
def options(draw):
    return {
        "causal": draw(st.booleans()),
        "window_size": (draw(bounds), draw(bounds)),
        "softcap": draw(st.sampled_from([0.0, 0.0, 1.0, 20.0])),
        "softmax_scale": draw(st.sampled_from([None, 0.05, 1.0])),
    }


@SETTINGS
@given(
    lengths=st.tuples(st.integers(0, 70), st.integers(0, 70)),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    dims=st.sampled_from([(8, 8), (16, 16), (24, 40), (48, 16)]),
    kind=st.sampled_from(["normal", "strided", "poisoned"]),
    options=options(),
    lse_gradient=st.booleans(),
    seed=st.integers(0, 5),
)
def test_dense(lengths, heads, dims, kind, options, lse_gradient, seed):
    q, k, v = make_qkv(batch=1, seqlen_q=lengths[0], seqlen_k=lengths[1], heads=heads[0], heads_kv=heads[1],
                       head_dim=dims[0], head_dim_v=dims[1], kind=kind, dtype=torch.float32, seed=seed)  # fmt: skip

    def attention(q, k, v, **o):
        return flash_attn_func(q, k, v, return_lse=True, backend="portable", **o)

    check_attention(attention, q, k, v, lse_gradient=lse_gradient, **options)


@SETTINGS
@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=5),
    extra=st.sampled_from([0, 3, 50]),
    options=options(),
    seed=st.integers(0, 5),
)
def test_packed(lengths, extra, options, seed):
    cu = [torch.tensor([0, *side]).cumsum(0).to(torch.int32) for side in zip(*lengths, strict=True)]
    g = torch.Generator().manual_seed(seed)
    rows = [int(c[-1]) for c in cu]
    q, k, v = (torch.randn(n + extra, 2, 16, generator=g) for n in (rows[0], rows[1], rows[1]))
    for x, n in ((q, rows[0]), (k, rows[1]), (v, rows[1])):
        x[n:] = float("nan")

    def attention(q, k, v, **o):
        return flash_attn_varlen_func(q, k, v, return_lse=True, backend="portable", **o)

    check_attention(attention, q, k, v, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], **options)
