"""Sinks and promises about bits in the Hopper kernels, forward and backward, dense and packed.

python3 -m pytest tests/gpu/test_hopper_features.py -q
"""

from __future__ import annotations

import pytest
import torch

from gpu_accel.flash_attention3 import explain, flash_attn_func, flash_attn_varlen_func
from gpu_accel.testing import make_qkv
from gpu_accel.testing.differential import Call, check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned_outputs"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an H100 or H200"
    ),
]


SINKS = {
    "full": {},
    "causal-lse-gradient": {"causal": True, "lse_gradient": True},
    "rows-without-keys": {"causal": True, "lengths_q": (500,), "lengths_k": (200,)},
    "window-softcap": {"window": (100, 0), "softcap": 5.0},
    "no-keys": {"lengths_k": (0,)},
    "packed": {"packed": True, "lengths_q": (300, 0, 65, 7), "lengths_k": (300, 40, 0, 129), "causal": True},
    "packed-used": {"packed": True, "lengths_q": (300, 9), "lengths_k": (300, 9), "used": True},
}


@pytest.mark.parametrize("options", SINKS.values(), ids=SINKS)
@pytest.mark.parametrize("d", [64, 128, 256])
def test_sinks(d, options):
    shape = {"lengths_q": (333,), "lengths_k": (333,), "batch": 1 if options.get("packed") else 2}
    call = {"backend": "hopper", "head_dim": d, "head_dim_v": d, "heads_kv": 2, "group": 2, "sinks": True}
    check(Call(**{**shape, **call, **options}))


def test_which_kernels_take_sinks():
    q = torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    said = explain(q, q, q, sinks=torch.zeros(2, device="cuda"))
    assert said.backend == "hopper" and said.backward.startswith("hopper")


def same(*results):
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def inputs(batch, sq, sk, d, seed=0):
    return make_qkv(batch=batch, seqlen_q=sq, seqlen_k=sk, heads=4, heads_kv=2, head_dim=d, dtype=torch.bfloat16,
                    device="cuda", seed=seed)  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (70, 0)}], ids=["full", "causal", "window"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_rows_do_not_depend_on_the_batch(d, options):
    call = {"return_lse": True, "batch_invariant": True, "backend": "hopper", **options}
    for seqlen in (1, 9, 64, 65, 500):
        q, k, v = inputs(7, seqlen, 500, d)
        together = flash_attn_func(q, k, v, **call)
        for b in (0, 3, 6):
            alone = flash_attn_func(q[b : b + 1], k[b : b + 1], v[b : b + 1], **call)
            assert same([x[b : b + 1] for x in together], alone)


@pytest.mark.parametrize("d", [64, 128])
def test_packed_rows_do_not_depend_on_neighbours(d):
    def run(lengths):
        rows = [inputs(1, n, n, d, seed=n) for n in lengths]
        q, k, v = (torch.cat([x[i][0] for x in rows]) for i in range(3))
        cu = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
        o, lse = flash_attn_varlen_func(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True, return_lse=True,
                                        batch_invariant=True, backend="hopper")  # fmt: skip
        start = int(cu[lengths.index(333)])
        return o[start : start + 333], lse[:, start : start + 333]

    alone = run([333])
    for lengths in ([9, 333], [10, 333], [333, 1000], [1, 64, 333, 65, 2000]):
        assert same(run(lengths), alone)
