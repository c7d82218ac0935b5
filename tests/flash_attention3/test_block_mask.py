"""torch's BlockMask: its blocks are walked, whole ones are not masked, unlisted ones are never touched."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl  # noqa: F401  (the interpreter looks for it beside every device function)
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.flash_attention3 import (
    explain,
    flash_attn_func,
    flash_attn_varlen_func,
    modifier,
    portable_backward,
    portable_forward,
)
from gpu_accel.flash_attention3.block_mask import block_mask_lists
from gpu_accel.flash_attention3.features import Features
from gpu_accel.testing import make_qkv
from gpu_accel.testing.features import check_features

FP32 = torch.float32


def inputs(sq, sk, heads=2, heads_kv=1, d=16, batch=1, dtype=FP32, device="cpu"):
    return make_qkv(batch=batch, seqlen_q=sq, seqlen_k=sk, heads=heads, heads_kv=heads_kv, head_dim=d, dtype=dtype,
                    device=device)  # fmt: skip


def dense(q, k, v, **options):
    return flash_attn_func(q, k, v, backend="portable", **options)


@triton.jit
def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def causal_twin(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


@triton.jit
def by_entry_and_head(b, h, q_idx, kv_idx):  # entry 1 sees a band, head 1 only far keys: whole blocks, partial, none
    return (kv_idx - q_idx < 20 - 30 * b) & (kv_idx >= 18 * h)


def by_entry_and_head_twin(b, h, q_idx, kv_idx):
    return (kv_idx - q_idx < 20 - 30 * b) & (kv_idx >= 18 * h)


CASES = {
    "causal-16x16": (causal, causal_twin, (48, 48), 16, None),
    "causal-odd-lengths-32x16": (causal, causal_twin, (45, 50), (32, 16), None),
    "causal-16x48-not-a-power-of-two": (causal, causal_twin, (35, 90), (16, 48), None),
    "batch-and-heads": (by_entry_and_head, by_entry_and_head_twin, (33, 50), 16, (2, 2)),
    "heads-only": (by_entry_and_head, by_entry_and_head_twin, (33, 50), 16, (None, 2)),
}


@pytest.mark.parametrize("name", CASES)
def test_against_the_truth(name, device):
    mod, twin, (sq, sk), size, shape = CASES[name]
    batch, heads = shape or (None, None)
    if name == "heads-only":
        twin_of_mask, batch_size = (lambda b, h, i, j: by_entry_and_head_twin(0 * b, h, i, j)), 1
    else:
        twin_of_mask, batch_size = twin, batch or 1
    mask = create_block_mask(twin_of_mask, batch, heads, sq, sk, device=device, BLOCK_SIZE=size)
    assert 0 < mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum() < mask.kv_indices.numel()  # some are skipped
    q, k, v = inputs(sq, sk, batch=batch_size, device=device)
    check_features(dense, q, k, v, mask_mod=mod, block_mask=mask, truth={"mask_mod": twin})


def test_is_flex_attention(device):
    q, k, v = inputs(40, 40, heads_kv=2, device=device)
    mask = create_block_mask(causal_twin, None, None, 40, 40, device=device, BLOCK_SIZE=16)
    got, lse = dense(q, k, v, mask_mod=causal, block_mask=mask, return_lse=True)
    expected = flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask)
    torch.testing.assert_close(got, expected.transpose(1, 2), rtol=0, atol=1e-5)
    same, same_lse = dense(q, k, v, causal=True, return_lse=True)
    torch.testing.assert_close(got, same, rtol=0, atol=1e-6)
    torch.testing.assert_close(lse, same_lse, rtol=0, atol=1e-6)


def poisoned(x, blocks, size):
    x = x.clone()
    for block in blocks:
        x[:, block * size : (block + 1) * size] = float("nan")
    return x


def test_unlisted_blocks_are_never_touched(device):
    # keys of block 1 and queries of block 2 are NaN and nobody lists them: no NaN comes out, forward or backward
    counts = torch.tensor([[[2, 1, 0]]], dtype=torch.int32, device=device)
    indices = torch.tensor([[[[0, 2, 1], [2, 0, 1], [0, 1, 2]]]], dtype=torch.int32, device=device)
    none = torch.zeros_like(counts)
    mask = BlockMask.from_kv_blocks(none, indices, counts, indices, BLOCK_SIZE=16, seq_lengths=(48, 48))
    q, k, v = inputs(48, 48, device=device)
    q, k, v = (x.requires_grad_() for x in (poisoned(q, [2], 16), poisoned(k, [1], 16), poisoned(v, [1], 16)))
    o, lse = dense(q, k, v, block_mask=mask, return_lse=True)
    assert o.isfinite().all()
    assert (lse[:, :, 32:] == float("-inf")).all() and (o[:, 32:] == 0).all()
    grads = torch.autograd.grad(o.square().sum(), (q, k, v))
    assert all(g.isfinite().all() for g in grads)
    assert (grads[1][:, 16:32] == 0).all() and (grads[2][:, 16:32] == 0).all()


@triton.jit
def nothing(b, h, q_idx, kv_idx):
    return kv_idx < 0


def test_whole_blocks_are_not_masked(device):
    # a mask_mod that hides everything is only asked about partial blocks
    counts = torch.tensor([[[1, 1]]], dtype=torch.int32, device=device)
    full = torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32, device=device)
    partial = torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32, device=device)
    mask = BlockMask.from_kv_blocks(counts, partial, counts, full, BLOCK_SIZE=32, seq_lengths=(64, 64))
    q, k, v = inputs(64, 64, device=device)
    got = dense(q, k, v, mask_mod=nothing, block_mask=mask)
    parts = [dense(*(x[:, at : at + 32] for x in (q, k, v))) for at in (0, 32)]
    torch.testing.assert_close(got, torch.cat(parts, 1), rtol=0, atol=1e-6)


def test_lengths_that_blocks_do_not_divide_equal_dense(device):
    # SeerAttention pull request 33: wrong at 0 % sparsity when seqlen % block != 0
    counts = torch.full((1, 1, 3), 3, dtype=torch.int32, device=device)
    indices = torch.arange(3, dtype=torch.int32, device=device).expand(1, 1, 3, 3).contiguous()
    mask = BlockMask.from_kv_blocks(torch.zeros_like(counts), indices, counts, indices, BLOCK_SIZE=16,
                                    seq_lengths=(41, 47))  # fmt: skip
    q, k, v = (x.requires_grad_() for x in inputs(41, 47, device=device))
    sparse, full = dense(q, k, v, block_mask=mask), dense(q, k, v)
    torch.testing.assert_close(sparse, full, rtol=0, atol=1e-6)
    do = torch.randn_like(full)
    for a, b in zip(*(torch.autograd.grad(o, (q, k, v), do) for o in (sparse, full)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@triton.jit
def late(b, h, q_idx, kv_idx):  # the last keys are seen by all
    return q_idx + kv_idx >= 12


def late_twin(b, h, q_idx, kv_idx):
    return q_idx + kv_idx >= 12


BEYOND = {  # mask blocks that reach beyond the end by whole tiles
    "keys-96-blocks-64": (16, 96, (16, 64)),
    "keys-32-blocks-64": (16, 32, (16, 64)),
    "keys-64-blocks-48": (33, 64, (32, 48)),
    "queries-128-blocks-48": (128, 32, (48, 32)),  # beyond the rows that statistics are padded to
    "queries-9-blocks-256": (9, 20, (256, 32)),
}


@pytest.mark.parametrize("name", BEYOND)
def test_blocks_that_reach_beyond_the_end(name, kernel_path, device):
    sq, sk, size = BEYOND[name]
    # NaN behind the ends, and scores so low that exp2(0 - lse) overflows: a row or key too many would be Inf * 0
    q, k, v = inputs(sq, sk, device=device)
    q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, 256), value=float("nan"))[:, : x.shape[1]]
               for x in (q + 3, k - 3, v))  # fmt: skip
    mask = create_block_mask(late_twin, None, None, sq, sk, device=device, BLOCK_SIZE=size)
    lists, size = block_mask_lists(mask, batch=1, heads=2, seqlen_q=sq, seqlen_k=sk, device=q.device, has_mask_mod=True)
    modified = Features(mask_mod=modifier(late).key)
    results = []
    for features in (modified, replace(modified, block_lists=lists, block_size=size)):
        call = {"softmax_scale": 2.0, "features": features, "path": kernel_path}
        o, lse = portable_forward.forward(q, k, v, **call)
        results.append((o, lse, *portable_backward.backward(torch.ones_like(o), q, k, v, o, lse, **call)))
    assert (results[0][1] < -89).any()
    for without, with_blocks in zip(*results, strict=True):
        torch.testing.assert_close(with_blocks, without, rtol=1e-4, atol=1e-4)


def test_descriptors_and_pointers_give_the_same(device):
    if device == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("TMA needs compute capability 9.0")
    q, k, v = inputs(40, 50, dtype=torch.float16, device=device)
    mask = create_block_mask(causal_twin, None, None, 40, 50, device=device, BLOCK_SIZE=16)
    lists, size = block_mask_lists(mask, batch=1, heads=2, seqlen_q=40, seqlen_k=50, device=q.device, has_mask_mod=True)
    features = Features(mask_mod=modifier(causal).key, block_lists=lists, block_size=size,
                        sinks=torch.zeros(2, device=device), alibi_slopes=torch.ones(2, device=device))  # fmt: skip
    results = []
    for path in ("pointer", "tma"):
        call = {"softmax_scale": 0.25, "features": features, "path": path}
        o, lse = portable_forward.forward(q, k, v, **call)
        results.append((o, lse, *portable_backward.backward(torch.ones_like(o), q, k, v, o, lse, **call)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.filterwarnings("ignore")
def test_compiles_as_one_graph(device):
    q, k, v = (x.requires_grad_() for x in inputs(20, 20, device=device))
    mask, mod = create_block_mask(causal_twin, None, None, 20, 20, device=device, BLOCK_SIZE=16), modifier(causal)

    def call(q, k, v, mask):
        return flash_attn_func(q * 2, k, v, mask_mod=mod, block_mask=mask).square().sum()

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(q, k, v, mask), (q, k, v))
    expected = torch.autograd.grad(call(q, k, v, mask), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def causal_mask(sq=32, sk=32, **options):
    return create_block_mask(causal_twin, None, None, sq, sk, device="cpu", BLOCK_SIZE=16, **options)


def edited(**changes):
    mask = causal_mask()
    for name, x in changes.items():
        setattr(mask, name, x)
    return mask


BOTH = torch.full((1, 1, 2), 2, dtype=torch.int32)
WRONG = {
    "not-a-mask": (lambda: torch.ones(32, 32), {}, InvalidInputError, "must be a torch.nn.attention.*got Tensor"),
    "mask-mod-missing": (causal_mask, {"mask_mod": None}, InvalidInputError, "pass the same function as a Triton"),
    "longer-mask": (lambda: causal_mask(64, 64), {}, InvalidInputError, "for 64 queries and 64 keys, but q has 32"),
    "larger-mask-of-as-many-blocks": (lambda: create_block_mask(causal_twin, None, None, 128, 128, device="cpu"), {},
                                      InvalidInputError, "for 128 queries and 128 keys, but q has 32"),
    "shorter-keys-in-as-many-blocks": (lambda: causal_mask(32, 30), {}, InvalidInputError, "32 queries and 30 keys"),
    "more-heads": (lambda: create_block_mask(causal_twin, 1, 3, 32, 32, device="cpu", BLOCK_SIZE=16), {},
                   InvalidInputError, "heads 2 or 1"),
    "int64": (lambda: edited(kv_indices=causal_mask().kv_indices.long()), {}, InvalidInputError, "int32"),
    "block-beyond": (lambda: edited(kv_indices=causal_mask().kv_indices + 1), {}, InvalidInputError, "from 0 to 1"),
    "block-twice": (lambda: edited(kv_indices=causal_mask().kv_indices * 0 + 1, kv_num_blocks=BOTH), {},
                    InvalidInputError, "listed once"),
    "count-beyond": (lambda: edited(kv_num_blocks=BOTH * 9), {}, InvalidInputError, "room for 2"),
    "small-blocks": (lambda: create_block_mask(causal_twin, None, None, 32, 32, device="cpu", BLOCK_SIZE=8), {},
                     UnsupportedError, "multiples of 16"),
    "causal-too": (causal_mask, {"causal": True}, UnsupportedError, "make both part of the"),
    "window-too": (causal_mask, {"window_size": (4, 4)}, UnsupportedError, "make both part of the"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_masks(name):
    make, options, kind, message = WRONG[name]
    q, k, v = inputs(32, 32)
    for call in (flash_attn_func, explain):
        with pytest.raises(kind, match=message):
            call(q, k, v, **{"mask_mod": causal, "block_mask": make(), **options})


def test_packed_sequences_have_no_block_mask():
    q = torch.zeros(32, 2, 16)
    cu = torch.tensor([0, 32], dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="use mask_mod alone"):
        flash_attn_varlen_func(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, mask_mod=causal, block_mask=causal_mask())


def test_gradients_need_query_blocks():
    q, k, v = inputs(32, 32)
    mask = edited(q_num_blocks=None, q_indices=None, full_q_num_blocks=None, full_q_indices=None)
    flash_attn_func(q, k, v, mask_mod=causal, block_mask=mask)
    with pytest.raises(UnsupportedError, match="compute_q_blocks=True"):
        flash_attn_func(q.requires_grad_(), k, v, mask_mod=causal, block_mask=mask)


def test_explain_cuts_tiles_to_blocks(device):
    q, k, v = inputs(32, 32, device=device)
    said = explain(q, k, v, mask_mod=modifier(causal), block_mask=create_block_mask(
        causal_twin, None, None, 32, 32, device=device, BLOCK_SIZE=16))  # fmt: skip
    assert said.config.startswith("16x16") and "cut to the block mask's 16x16" in said.config
    assert "multiples of 64" in said.refused["hopper"] and "block_mask" in said.refused["reference"]
