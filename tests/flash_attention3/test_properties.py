"""Random shapes, masks and offsets in the interpreter: what nobody thought of writing down.

Every run draws other examples. A failure prints the smallest one found and a @reproduce_failure line that repeats it.
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_accel.flash_attention3 import attention_truth, flash_attn_func, flash_attn_varlen_func
from gpu_accel.testing import make_qkv
from gpu_accel.testing.attention import check_attention

# New cases every run on a desk; the same ones where a failure would stop somebody else's change.
SETTINGS = settings(
    max_examples=12, deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True, database=None
)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
bounds = st.one_of(st.just(-1), st.integers(0, 80))


def _check(attention, q, k, v, *, lse_gradient=False, **options):
    """float32 by `check_attention`; 16 bits by what rounding p and o, each by eps / 2, can do: eps times the largest v.

    The yardstick of `check_attention` is one draw of such rounding, so it is now and then too lucky for random cases.
    """
    if q.dtype == torch.float32:
        check_attention(attention, q, k, v, lse_gradient=lse_gradient, **options)
        return
    o, lse = attention(q, k, v, **options)
    o_true, lse_true = attention_truth(q, k, v, **options)
    largest = v.double().nan_to_num().abs().max().item() if v.numel() else 0.0
    bound = 1.1 * torch.finfo(q.dtype).eps * largest + 1e-6
    torch.testing.assert_close(o.double(), o_true, rtol=0, atol=bound)
    torch.testing.assert_close(lse.double(), lse_true, rtol=1e-4, atol=1e-4)


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
    batch=st.integers(1, 2),
    lengths=st.tuples(st.integers(0, 70), st.integers(0, 70)),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    dims=st.sampled_from([(8, 8), (16, 16), (24, 40), (48, 16)]),
    kind=st.sampled_from(["normal", "strided", "packed", "poisoned"]),
    dtype=dtypes,
    options=options(),
    lse_gradient=st.booleans(),
    seed=st.integers(0, 5),
)
def test_dense(batch, lengths, heads, dims, kind, dtype, options, lse_gradient, seed):
    if kind == "packed":  # views of one buffer: one length, one head_dim
        lengths, dims = (lengths[0], lengths[0]), (dims[0], dims[0])
    q, k, v = make_qkv(batch=batch, seqlen_q=lengths[0], seqlen_k=lengths[1], heads=heads[0], heads_kv=heads[1],
                       head_dim=dims[0], head_dim_v=dims[1], kind=kind, dtype=dtype, seed=seed)  # fmt: skip

    def attention(q, k, v, **o):
        return flash_attn_func(q, k, v, return_lse=True, backend="portable", **o)

    _check(attention, q, k, v, lse_gradient=lse_gradient, **options)


@SETTINGS
@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=5),
    extra=st.sampled_from([0, 3, 50]),
    heads=st.sampled_from([(2, 2), (4, 2)]),
    dtype=dtypes,
    options=options(),
    seed=st.integers(0, 5),
)
def test_packed(lengths, extra, heads, dtype, options, seed):
    cu = [torch.tensor([0, *side]).cumsum(0).to(torch.int32) for side in zip(*lengths, strict=True)]
    g = torch.Generator().manual_seed(seed)
    rows = [int(c[-1]) for c in cu]
    q, k, v = (
        torch.randn(n + extra, h, 16, generator=g).to(dtype)
        for n, h in ((rows[0], heads[0]), (rows[1], heads[1]), (rows[1], heads[1]))
    )
    for x, n in ((q, rows[0]), (k, rows[1]), (v, rows[1])):
        x[n:] = float("nan")

    def attention(q, k, v, **o):
        return flash_attn_varlen_func(q, k, v, return_lse=True, backend="portable", **o)

    _check(attention, q, k, v, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1], **options)
