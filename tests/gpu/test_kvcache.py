"""Attention over a KV cache on the card: every configuration, the merge under load, graphs, far addresses."""

from __future__ import annotations

import pytest
import torch

from gpu_accel.flash_attention3 import combine, decode_config, flash_attn_with_kvcache, portable_decode
from gpu_accel.flash_attention3.kvcache import make_call
from gpu_accel.flash_attention3.merging import combine_reference
from gpu_accel.testing.kvcache import BF16, NAN, check, draw, make, run

ON = {"device": "cuda"}
LARGE = dict(heads=32, heads_kv=8, dim=128, capacity=2048, **ON)


@pytest.mark.parametrize("page", [0, 1, 16, 17, 64, 256])
@pytest.mark.parametrize("kind", ["", "e4m3", "e5m2", "int8", "int4"])
def test_formats_and_pages(kind, page):
    granularity = "token" if kind == "int4" else "head"
    check(make(batch=3, lengths=[2048, 777, 0], page=page, kind=kind, granularity=granularity, **LARGE))


OPTIONS = {
    "token-scales": dict(kind="e4m3", granularity="token", page=16),
    "page-scales": dict(kind="int8", granularity="page", page=64),
    "int4-groups": dict(kind="int4", granularity="token", groups=4, page=16),
    "mqa": dict(heads=16, heads_kv=1),
    "d64": dict(dim=64),
    "d256": dict(dim=256, heads=8, heads_kv=2),
    "d256-fp8": dict(dim=256, heads=8, heads_kv=2, kind="e4m3", page=16),
    "d72-v40": dict(dim=72, dim_v=40),
    "d192-v128": dict(dim=192, dim_v=128, heads=8),
    "fp16": dict(dtype=torch.float16),
    "fp32": dict(dtype=torch.float32, heads=8),
    "fp32-pages": dict(dtype=torch.float32, heads=8, page=16, seqlen_q=3, causal=True),
    "q5": dict(seqlen_q=5, causal=True),
    "q5-pages-fp8": dict(seqlen_q=5, causal=True, page=16, kind="e4m3"),
    "q33": dict(seqlen_q=33, causal=True, page=16),
    "q300": dict(seqlen_q=300, causal=True),
    "q300-fp8": dict(seqlen_q=300, causal=True, kind="e4m3", page=64),
    "q300-int4": dict(seqlen_q=300, causal=True, kind="int4", granularity="token"),
    "window": dict(window_size=(500, 0), page=16),
    "window-q9": dict(seqlen_q=9, window_size=(100, 3)),
    "softcap": dict(softcap=4.0, page=16),
    "splits-1": dict(num_splits=1),
    "splits-100": dict(num_splits=100),
    "batch-invariant": dict(batch_invariant=True, page=16),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options(options):
    check(make(batch=2, lengths=[2047, 301], **LARGE | options))


def test_sinks():
    check(make(batch=3, lengths=[2000, 0, 3], sinks=draw(32, dtype=torch.float32, **ON), **LARGE))


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("page", [0, 16])
def test_every_candidate_is_correct(bits, page):
    kind = "" if bits == 16 else "e4m3"
    a = make(batch=2, lengths=[2048, 333], page=page, kind=kind, **LARGE)
    for config in decode_config.candidates(bits):
        check(a, config)


def angles(positions: int, dim: int):
    angle = torch.arange(positions, **ON)[:, None] * 10000 ** (-torch.arange(0, dim, 2, **ON) / dim)
    return {"rotary_cos": angle.cos().to(BF16), "rotary_sin": angle.sin().to(BF16)}


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("kind", ["", "e4m3", "int8", "int4"])
@pytest.mark.parametrize("page", [0, 16, 7])
def test_append(page, kind, interleaved):
    granularity = "token" if kind in ("int8", "int4") else "head"
    for new in (1, 20):
        check(
            make(
                batch=2,
                lengths=[1500, 0],
                page=page,
                kind=kind,
                granularity=granularity,
                new=new,
                seqlen_q=new,
                causal=True,
                rotary_interleaved=interleaved,
                **angles(2100, 64),
                **LARGE,
            )  # fmt: skip
        )


def test_the_merge_under_load():
    """Many launches back to back with many splits: the same bits every time, whoever arrives last."""
    a = make(batch=8, lengths=[2048, 1, 0, 600, 64, 65, 2000, 1999], num_splits=24, **LARGE)
    first, lse, call = run(a)
    for _ in range(300):
        o, again = torch.full_like(first, NAN), torch.full_like(lse, NAN)
        portable_decode.forward(call, o, again)
        assert torch.equal(o, first) and torch.equal(again, lse)


def test_streams_do_not_share_counters():
    calls = [run(make(batch=4, num_splits=16, seed=10 * i, **LARGE)) for i in range(4)]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    for _ in range(50):
        found = []
        for stream, (o, lse, call) in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                result = torch.full_like(o, NAN), torch.full_like(lse, NAN)
                portable_decode.forward(call, *result)
                found.append(result)
        torch.cuda.synchronize()
        for (o, lse, _), result in zip(calls, found, strict=True):
            assert torch.equal(result[0], o) and torch.equal(result[1], lse)


def test_bits_do_not_depend_on_neighbours():
    a = make(batch=5, lengths=[2048, 2047, 700, 512, 5], batch_invariant=True, page=16, **LARGE)
    o, lse, _ = run(a)
    for b in range(5):
        alone = a | {n: a[n][b : b + 1] for n in ("q", "cache_seqlens", "page_table")}
        o_b, lse_b, _ = run(alone)
        assert torch.equal(o_b[0], o[b]) and torch.equal(lse_b[0], lse[b])


def test_a_graph_captured_with_short_sequences_is_replayed_with_long_ones():
    a = make(batch=2, lengths=[40, 3], page=16, new=1, causal=True, poison=False, **LARGE) | {"backend": "portable"}
    length, table = a["cache_seqlens"], a["page_table"]
    names = ("q", "k", "v")
    flash_attn_with_kvcache(**a)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = flash_attn_with_kvcache(**a)
    for step, n in enumerate((100, 1500, 2000, 0, 2047)):
        length.copy_(torch.tensor([n, n // 2]))
        table.copy_(table[:, torch.randperm(table.shape[1], **ON)])
        for name in names:
            a[name].copy_(draw(*a[name].shape, seed=100 + step, **ON))
        caches = {n: a[n].clone() for n in ("k_cache", "v_cache")}
        graph.replay()
        assert torch.equal(o, flash_attn_with_kvcache(**a | caches))


def test_no_call_waits_for_the_gpu():
    a = make(batch=2, lengths=[2000, 900], page=16, new=1, causal=True, poison=False, **LARGE)
    flash_attn_with_kvcache(**a)
    torch.cuda.set_sync_debug_mode("error")
    try:
        flash_attn_with_kvcache(**a)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("paged", [False, True])
def test_offsets_beyond_32_bits(paged):
    """Rows of the cache that lie more than 2**31 elements behind its first."""
    heads_kv, dim, capacity = 2, 64, 64
    stride = (1 << 31) // 3 + 8 - ((1 << 31) // 3) % 8
    shape, strides = (5, capacity, heads_kv, dim), (stride, heads_kv * dim, dim, 1)
    row = capacity * heads_kv * dim
    buffer = torch.empty(4 * stride + 2 * row, dtype=BF16, **ON)
    far = [buffer.as_strided(shape, strides, i * row) for i in range(2)]  # values lie in the gaps of keys
    for x in far:
        x.copy_(draw(*shape, **ON))
    near = [x.contiguous() for x in far]
    q, new = draw(1, 1, 4, dim, seed=1, **ON), draw(1, 1, heads_kv, dim, seed=2, **ON)
    length = torch.tensor([50], dtype=torch.int32, **ON)
    where = torch.tensor([4], dtype=torch.int32, **ON)
    place = {"page_table": where[None]} if paged else {"cache_batch_idx": where}
    found = [
        flash_attn_with_kvcache(q, *x, new, new, cache_seqlens=length, causal=True, **place) for x in (far, near)
    ]
    assert torch.equal(*found) and all(torch.equal(x[4], y[4]) for x, y in zip(far, near, strict=True))


def test_compiled():
    a = make(batch=2, lengths=[100, 9], new=1, poison=False, **LARGE)
    step = torch.compile(lambda **x: flash_attn_with_kvcache(**x, causal=True), fullgraph=True)
    expected = flash_attn_with_kvcache(**a | {n: a[n].clone() for n in ("k_cache", "v_cache")}, causal=True)
    with torch.no_grad():
        assert torch.equal(step(**a), expected)


@pytest.mark.parametrize("shape", [(2, 1, 1000, 16, 128), (9, 3, 33, 5, 72)], ids=str)
def test_combine(shape):
    splits, batch, seqlen, heads, dim = shape
    o = draw(*shape, dtype=torch.float32, **ON)
    lse = 3 * draw(splits, batch, heads, seqlen, seed=1, dtype=torch.float32, **ON)
    lse[0, 0], o[0, 0] = float("-inf"), NAN
    found, found_lse = combine(o, lse, out_dtype=BF16)
    true, true_lse = combine_reference(o, lse, dtype=torch.float64)
    assert (found.double() - true).abs().max() < 2e-2 and (found_lse.double() - true_lse).abs().max() < 1e-5


def test_a_plan_fills_the_machine():
    call = make_call(**make(batch=1, poison=False, **LARGE | {"capacity": 4096}))
    plan = portable_decode.plan(call)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    assert plan.tiles * plan.splits >= 0.8 * processors * plan.config.per_sm
