"""Biases, modifiers and block masks in the Hopper kernels, and packed gradients above head_dim 128, against float64.

python3 -m pytest tests/gpu/test_hopper_modifiers.py -q
"""

from __future__ import annotations

import pytest
import torch
import triton
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from gpu_accel.flash_attention3 import explain, flash_attn_func, function, hopper
from gpu_accel.testing import make_qkv
from gpu_accel.testing.differential import Call, check
from gpu_accel.testing.features import check_features
from gpu_accel.testing.modifiers import relative, relative_grad, relative_twin, same_document, same_document_twin

BF16, FP16 = torch.bfloat16, torch.float16

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("poisoned_outputs"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an H100 or H200"
    ),
]


@pytest.fixture(autouse=True)
def unproven_too(monkeypatch):
    """What waits for this very proof is offered here."""
    monkeypatch.setattr(hopper, "MOST_HEAD_DIM_MODIFIED", 256)
    monkeypatch.setattr(hopper, "PACKED_MODIFIED", True)
    function._backend_name.cache_clear()
    yield
    function._backend_name.cache_clear()


CALLS = {
    "score": {"score_mod": True},
    "mask": {"mask_mod": True},
    "alibi-causal": {"alibi": True, "causal": True},
    "score-mask-alibi-sinks": {"score_mod": True, "mask_mod": True, "alibi": True, "sinks": True, "causal": True},
    "score-softcap-lse-gradient": {"score_mod": True, "softcap": 3.0, "lse_gradient": True},
    "alibi-softcap-window": {"alibi": True, "softcap": 5.0, "window": (100, 20)},
    "mask-window-max-logits": {"mask_mod": True, "window": (100, 0), "max_logits": True},
    "max-logits-sinks": {"max_logits": True, "sinks": True, "causal": True},
    "blocks-128": {"mask_mod": True, "block": 128},
    "blocks-64-score": {"mask_mod": True, "block": 64, "score_mod": True, "lse_gradient": True},
    "blocks-128-everything": {"mask_mod": True, "block": 128, "score_mod": True, "alibi": True, "softcap": 9.0,
                              "sinks": True, "max_logits": True},
    "blocks-fp16": {"mask_mod": True, "block": 128, "dtype": "fp16"},
    "more-queries": {"mask_mod": True, "block": 64, "lengths_q": (700,), "lengths_k": (90,)},
    "more-keys": {"mask_mod": True, "score_mod": True, "lengths_q": (65,), "lengths_k": (900,), "causal": True},
    "one-row-one-key": {"mask_mod": True, "score_mod": True, "lengths_q": (1,), "lengths_k": (1,)},
    "strided": {"mask_mod": True, "block": 128, "kind": "strided"},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("d", [128, 256, 64])
def test_calls(d, options):
    shape = {"lengths_q": (333,), "lengths_k": (400,), "batch": 2, "heads_kv": 2, "group": 2}
    check(Call(**{"backend": "hopper", "head_dim": d, "head_dim_v": d, **shape, **options}))


PACKED_CALLS = {
    "score": {"score_mod": True},
    "mask-causal": {"mask_mod": True, "causal": True},
    "alibi-window-used": {"alibi": True, "window": (90, 7), "used": True},
    "everything-poisoned": {"score_mod": True, "mask_mod": True, "alibi": True, "softcap": 5.0, "max_logits": True,
                            "kind": "poisoned"},
}  # fmt: skip


@pytest.mark.parametrize("options", PACKED_CALLS.values(), ids=PACKED_CALLS)
@pytest.mark.parametrize("d", [128, 64, 256])
def test_packed_calls(d, options):
    # sequences without queries, without keys, of one row; b is the sequence, indices count inside it
    shape = {"lengths_q": (300, 0, 65, 1, 129), "lengths_k": (17, 300, 100, 0, 400), "heads_kv": 2, "group": 2}
    check(Call(**{"backend": "hopper", "head_dim": d, "head_dim_v": d, "packed": True, **shape, **options}))


@triton.jit
def first_heads(b, h, q_idx, kv_idx):  # one number for a whole block
    return h < 2 + b


def first_heads_twin(b, h, q_idx, kv_idx):
    return (h < 2 + b) & (kv_idx >= 0) & (q_idx >= 0)


def dense(q, k, v, **options):
    return flash_attn_func(q, k, v, backend="hopper", **options)


def inputs(batch, sq, sk, heads, heads_kv, d, dtype=BF16):
    return make_qkv(batch=batch, seqlen_q=sq, seqlen_k=sk, heads=heads, heads_kv=heads_kv, head_dim=d, dtype=dtype,
                    device="cuda")  # fmt: skip


@pytest.mark.parametrize("blocks", [False, True], ids=["all", "blocks"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_captured_tensors(d, blocks):
    n = 1000
    q, k, v = inputs(2, n, n, 4, 2, d)
    document = (torch.arange(n, device="cuda") // 190).to(torch.int32)
    aux = (torch.randn(4, device="cuda") * 0.01, document)
    made = None
    if blocks:
        twin = lambda b, h, q_idx, kv_idx: same_document_twin(b, h, q_idx, kv_idx, *aux)  # noqa: E731
        made = create_block_mask(twin, None, None, n, n, device="cuda")
    check_features(dense, q, k, v, score_mod=relative, score_mod_grad=relative_grad, mask_mod=same_document,
                   aux_tensors=aux, truth={"score_mod": relative_twin, "mask_mod": same_document_twin},
                   **({"block_mask": made} if blocks else {}))  # fmt: skip


def test_one_number_for_a_block():
    check_features(dense, *inputs(2, 200, 300, 4, 2, 128), mask_mod=first_heads, truth={"mask_mod": first_heads_twin})


@pytest.mark.parametrize("d", [64, 128, 256])
def test_lists_without_a_mask_mod(d):
    # whole blocks only, other ones for each head; queries 256 to 383 see nothing, keys 128 to 255 are seen by nobody
    n = 512
    seen = torch.tensor([[[1, 0, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 1]],
                         [[0, 0, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0], [0, 0, 0, 1]]], device="cuda")  # fmt: skip
    counts = seen.sum(-1).int()[None]
    indices = seen.argsort(dim=-1, descending=True, stable=True).int()[None]
    none = torch.zeros_like(counts)
    made = BlockMask.from_kv_blocks(none, torch.zeros_like(indices), counts, indices, BLOCK_SIZE=128)
    q, k, v = inputs(1, n, n, 2, 1, d)
    big = seen.bool().repeat_interleave(128, 1).repeat_interleave(128, 2)
    check_features(dense, q, k, v, block_mask=made, truth={
        "block_mask": None, "mask_mod": lambda b, h, q_idx, kv_idx: big[h, q_idx, kv_idx]})  # fmt: skip


@pytest.mark.parametrize("d", [64, 128, 256])
def test_what_does_not_change_from_run_to_run(d):
    q, k, v = (x.requires_grad_() for x in inputs(3, 700, 700, 4, 2, d))
    made = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 700, 700, device="cuda")
    aux = (torch.zeros(4, device="cuda"), torch.zeros(700, dtype=torch.int32, device="cuda"))
    do = torch.randn_like(q)

    def run():
        o = dense(q, k, v, mask_mod=same_document, aux_tensors=aux, block_mask=made)
        return o, *torch.autograd.grad(o, (q, k, v), do)

    first = run()
    for _ in range(10):
        again = run()
        kept = range(4) if d > 128 else (0, 2, 3)  # dq is a sum of atomics
        assert all(torch.equal(first[i], again[i]) for i in kept)


PACKED = {
    "causal": {"causal": True},
    "full-lse-gradient": {"lse_gradient": True},
    "window-softcap": {"window": (90, 7), "softcap": 5.0},
    "used": {"used": True, "causal": True},
    "sinks": {"sinks": True, "causal": True},
    "poisoned": {"kind": "poisoned", "causal": True},
    "other-lengths": {"lengths_k": (17, 300, 100, 0, 129, 800), "causal": True},
    "one": {"lengths_q": (1000,), "lengths_k": (1000,)},
    "fp16": {"dtype": "fp16", "causal": True},
    "deterministic": {"deterministic": True},
}


@pytest.mark.parametrize("options", PACKED.values(), ids=PACKED)
@pytest.mark.parametrize("d", [256, 192, 136])
def test_packed_gradients_above_128(d, options):
    lengths = (300, 0, 65, 1, 129, 505)
    shape = {"lengths_q": lengths, "lengths_k": lengths, "heads_kv": 2, "group": 2}
    call = {"backend": "hopper", "head_dim": d, "head_dim_v": d, "packed": True, "gradients": True}
    check(Call(**{**shape, **call, **options}))


def test_which_kernels_take_them():
    q = torch.randn(1, 256, 2, 128, device="cuda", dtype=BF16, requires_grad=True)
    made = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, 256, 256, device="cuda")
    aux = (torch.zeros(2, device="cuda"), torch.zeros(256, dtype=torch.int32, device="cuda"))
    said = explain(q, q, q, mask_mod=same_document, aux_tensors=aux, block_mask=made)
    assert said.backend == "hopper" and said.backward.startswith("hopper")
    cu = torch.tensor([0, 256], dtype=torch.int32, device="cuda")
    x = torch.randn(256, 2, 256, device="cuda", dtype=BF16, requires_grad=True)
    assert explain(x, x, x, cu_seqlens_q=cu, cu_seqlens_k=cu).backward.startswith("hopper")
    said = explain(x, x, x, cu_seqlens_q=cu, cu_seqlens_k=cu, mask_mod=same_document, aux_tensors=aux)
    assert said.backend == "hopper" and said.backward.startswith("portable")
