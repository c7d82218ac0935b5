"""The plain-Triton forward against float64, in the interpreter or on a GPU; every shape has its reason."""

from __future__ import annotations

import pytest
import torch

from gpu_accel.flash_attention3 import launch, portable_backward, portable_forward
from gpu_accel.flash_attention3.problem import normalise_window
from gpu_accel.testing import attention_truth, make_qkv
from gpu_accel.testing.attention import check_attention
from gpu_accel.testing.differential import DTYPES, Call, check

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# name, (batch, sq, sk, heads, heads_kv, d, dv), options
CASES = {
    "one-query-one-key": ((1, 1, 1, 1, 1, 16, 16), {}),
    "decode-step": ((2, 1, 45, 4, 2, 32, 32), {"causal": True}),
    "whole-blocks-need-no-mask": ((1, 64, 48, 1, 1, 32, 32), {}),
    "odd-lengths-tail-blocks": ((1, 33, 67, 2, 2, 32, 32), {}),
    "causal-square": ((1, 65, 65, 2, 2, 32, 32), {"causal": True}),
    "causal-chunked-prefill-sq-lt-sk": ((1, 20, 70, 2, 2, 16, 16), {"causal": True}),
    "causal-sq-gt-sk-rows-see-nothing": ((1, 70, 20, 2, 2, 16, 16), {"causal": True}),
    "no-queries": ((1, 0, 5, 2, 2, 16, 16), {}),
    "no-keys": ((1, 5, 0, 2, 2, 16, 16), {}),
    "sliding-window": ((1, 70, 70, 2, 2, 16, 16), {"causal": True, "window_size": (20, -1)}),
    "window-of-one-key": ((1, 40, 40, 1, 1, 16, 16), {"window_size": (0, 0)}),
    "window-both-sides-narrower-than-a-block": ((1, 50, 60, 1, 1, 16, 16), {"window_size": (3, 5)}),
    "window-left-only-rows-see-nothing": ((1, 20, 66, 1, 1, 16, 16), {"window_size": (0, None)}),
    "window-right-only": ((1, 66, 50, 1, 1, 16, 16), {"window_size": (None, 7)}),
    "window-wider-than-everything": ((1, 33, 33, 1, 1, 16, 16), {"window_size": (1000, 1000)}),
    "softcap": ((1, 40, 40, 2, 2, 32, 32), {"softcap": 1.5}),
    "softcap-causal-window": ((1, 40, 50, 2, 1, 16, 16), {"softcap": 5.0, "causal": True, "window_size": (9, 0)}),
    "softmax-scale": ((1, 20, 20, 1, 1, 16, 16), {"softmax_scale": 1.7}),
    "grouped-heads": ((2, 34, 34, 6, 2, 16, 16), {"causal": True}),
    "multi-query": ((1, 34, 34, 3, 1, 16, 16), {}),
    "head-dim-8-below-one-tile": ((1, 20, 20, 1, 1, 8, 8), {}),
    "head-dim-40-is-32-plus-16": ((1, 33, 40, 1, 1, 40, 40), {"causal": True}),
    "head-dim-72-of-vision-models": ((1, 33, 40, 1, 1, 72, 72), {}),
    "head-dim-96-is-64-plus-32": ((1, 33, 40, 1, 1, 96, 96), {"causal": True}),
    "head-dim-104-padded-to-128": ((1, 16, 24, 1, 1, 104, 104), {}),
    "head-dim-128": ((1, 33, 40, 1, 1, 128, 128), {"causal": True}),
    "head-dim-192-v-128": ((1, 33, 40, 1, 1, 192, 128), {"causal": True}),
    "head-dim-256": ((1, 33, 40, 1, 1, 256, 256), {}),
    "v-wider-than-q": ((1, 20, 33, 2, 1, 16, 48), {}),
}


def run(q, k, v, path, *, causal=False, window_size=(-1, -1), softcap=0.0, softmax_scale=None):
    left, right = normalise_window(window_size, causal)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return portable_forward.forward(
        q, k, v, softmax_scale=scale, window_left=left, window_right=right, softcap=softcap, path=path
    )


def inputs(shape, dtype, device, kind="normal", seed=0):
    batch, sq, sk, heads, heads_kv, d, dv = shape
    return make_qkv(batch=batch, seqlen_q=sq, seqlen_k=sk, heads=heads, heads_kv=heads_kv, head_dim=d, head_dim_v=dv,
                    kind=kind, dtype=dtype, device=device, seed=seed)  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_case(name, kernel_path, device):
    shape, options = CASES[name]
    check_attention(
        lambda q, k, v, **o: run(q, k, v, kernel_path, **o),
        *inputs(shape, FP32 if device == "cpu" else BF16, device),
        gradients=False,
        **options,
    )


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_dtypes(dtype, causal, kernel_path, device):
    q, k, v = inputs((2, 50, 70, 4, 2, 64, 64), dtype, device)
    check_attention(lambda *x, **o: run(*x, kernel_path, **o), q, k, v, gradients=False, causal=causal)


@pytest.mark.parametrize("kind", ["strided", "packed", "poisoned"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_layouts_are_free(kind, causal, kernel_path, device):
    # "packed": views of one QKV tensor; "poisoned": NaN between and behind the rows
    q, k, v = inputs((2, 37, 37, 2, 2, 32, 32), FP16, device, kind)
    check_attention(lambda *x, **o: run(*x, kernel_path, **o), q, k, v, gradients=False, causal=causal)
    again = run(q.contiguous(), k.contiguous(), v.contiguous(), kernel_path, causal=causal)
    for a, b in zip(run(q, k, v, kernel_path, causal=causal), again, strict=True):
        assert torch.equal(a, b)


def test_broadcast_keys(device):
    # expand()ed over heads and batch: strides of 0, which TMA cannot describe
    q, k, v = inputs((2, 20, 33, 4, 4, 16, 16), FP32, device, "broadcast")
    assert 0 in k.stride()
    check_attention(lambda *x, **o: run(*x, "pointer", **o), q, k, v, gradients=False)


def test_strides_are_per_tensor(device):
    # FlagAttention issue 45: k a view of every second row, v contiguous
    q, k, v = inputs((1, 20, 40, 2, 2, 16, 16), FP32, device)
    k = torch.stack([k, torch.full_like(k, float("nan"))], 2).flatten(1, 2)[:, ::2]
    check_attention(lambda *x, **o: run(*x, "pointer", **o), q, k, v, gradients=False)


def test_a_row_depends_on_its_own_data_only(device):
    # the bits of one row must not change with the number of its neighbours (vllm issue 51902)
    q, k, v = inputs((2, 40, 50, 2, 2, 32, 32), FP16, device)
    o, lse = run(q, k, v, None)
    alone, lse_alone = run(q[1:, 7:8], k[1:], v[1:], None)
    torch.testing.assert_close(o[1:, 7:8], alone, rtol=0, atol=2e-3)
    torch.testing.assert_close(lse[1:, :, 7:8], lse_alone, rtol=0, atol=1e-5)
    both, _ = run(torch.cat([q, q]), torch.cat([k, k]), torch.cat([v, v]), None)
    assert torch.equal(both[:2], o) and torch.equal(both[2:], o)


def test_very_negative_scores_stay_finite(device):
    # cudnn-frontend issue 1072: one query, all scores far below zero
    q, k, v = inputs((1, 1, 128, 2, 2, 64, 64), BF16, device)
    q, k = q.abs() * 20, -k.abs() * 20
    o, lse = run(q, k, v, None)
    assert o.isfinite().all() and lse.isfinite().all() and (lse < -100).all()
    check_attention(lambda *x, **c: run(*x, None, **c), q, k, v, gradients=False)


def test_nan_input_is_not_hidden(device):
    q, k, v = inputs((1, 20, 20, 1, 1, 16, 16), FP32, device)
    q[0, 3] = float("nan")
    o, lse = run(q, k, v, None)
    assert o[0, 3].isnan().all() and lse[0, 0, 3].isnan()
    rest = [i for i in range(20) if i != 3]
    assert o[0, rest].isfinite().all()


def test_more_queries_than_keys_is_zero_by_contract(device):
    # flash-attention issues 1778, 581: "half the output is zero" is what bottom-right alignment means
    q, k, v = inputs((1, 64, 32, 1, 1, 16, 16), FP32, device)
    o, lse = run(q, k, v, None, causal=True)
    assert not o[:, :32].any() and (lse[..., :32] == float("-inf")).all()
    assert o[:, 32:].abs().sum(-1).gt(0).all()
    torch.testing.assert_close(o.double(), attention_truth(q, k, v, causal=True)[0], rtol=0, atol=1e-5)


def test_what_lies_off_16_bytes():
    x = torch.zeros(2 * 3 * 4 * 16 + 1, dtype=torch.bfloat16)
    dense = x[:-1].view(2, 3, 4, 16)
    assert not launch.off_16_bytes(dense)
    assert launch.off_16_bytes(x[1:].view(2, 3, 4, 16))
    assert launch.off_16_bytes(torch.zeros(2, 3, 4, 17, dtype=torch.bfloat16)[..., :16])
    assert not launch.off_16_bytes(dense[:, :, :1].expand(2, 3, 4, 16))
    assert not launch.off_16_bytes(torch.zeros(17, dtype=torch.bfloat16)[:16].view(1, 1, 1, 16))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_no_tile_is_narrower_than_128_bytes_on_hopper(dtype, monkeypatch, device):
    """Packed attention at head_dim 80 ended in an illegal access: ptxas 12.8 had lost the address of 16 columns."""
    monkeypatch.setattr(launch, "_target", (9, 0))
    least = 128 // DTYPES[dtype].itemsize
    for d, dv in ((8, 16), (40, 104), (72, 80), (96, 64), (160, 136)):
        q, k, v, o = (torch.empty(5, 1, n, dtype=DTYPES[dtype]) for n in (d, d, dv, dv))
        packed = {name: torch.tensor([0, 5], dtype=torch.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")}
        with launch.recording() as entries:
            portable_forward.forward(q, k, v, softmax_scale=1.0, **packed)
            portable_backward.backward(o, q, k, v, o, torch.zeros(1, 5), softmax_scale=1.0, **packed)
        for kernel, _, _, options in entries:
            if "D" in options:
                tiles = [options[name] for name in ("D", "D2", "DV", "DV2")]
                assert all(n == 0 or n >= least for n in tiles), (kernel, d, dv, tiles)
                assert tiles[0] + tiles[1] >= d and tiles[2] + tiles[3] >= dv
    check(Call(backend="portable", dtype=dtype, head_dim=40, head_dim_v=104, packed=True, lengths_q=(12,),
               lengths_k=(4,), used=True, causal=True, kind="poisoned"), device=device)  # fmt: skip
