"""The Gluon decode kernel on a Hopper card: layouts, formats, pages, the merge, streams, graphs."""

from __future__ import annotations

import functools

import pytest
import torch

hopper_decode = pytest.importorskip("gpu_accel.flash_attention3.hopper_decode")

from gpu_accel.errors import UnsupportedError  # noqa: E402
from gpu_accel.flash_attention3 import explain_kvcache, flash_attn_with_kvcache  # noqa: E402
from gpu_accel.flash_attention3.hopper_decode import Config  # noqa: E402
from gpu_accel.testing.kvcache import BF16, NAN, draw, make  # noqa: E402
from gpu_accel.testing.kvcache import check as check_any  # noqa: E402
from gpu_accel.testing.kvcache import run as run_any  # noqa: E402

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs Hopper"
)
check = functools.partial(check_any, forward=hopper_decode.forward)
run = functools.partial(run_any, forward=hopper_decode.forward)

ON = {"device": "cuda"}
LARGE = dict(heads=32, heads_kv=8, dim=128, capacity=2048, **ON)
CONFIGS = {
    "16-keys": Config(16),
    "32-keys": Config(32),
}


@pytest.mark.parametrize("page", [0, 1, 16, 17, 64, 256])
@pytest.mark.parametrize("kind", ["", "e4m3"])
def test_formats_and_pages(kind, page):
    check(make(batch=3, lengths=[2048, 777, 0], page=page, kind=kind, **LARGE))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_every_configuration_is_correct(config):
    for kind, page in (("", 0), ("e4m3", 16)):
        a = make(batch=1, lengths=[2048], page=page, kind=kind, **LARGE)
        for length in (2048, 1985, 333, 64, 1, 0, 2048):  # and counters come back
            a["cache_seqlens"].fill_(length)
            check(a, config)


OPTIONS = {
    "fp16": dict(dtype=torch.float16),
    "mha": dict(heads=8),
    "group-3": dict(heads=24),
    "mqa": dict(heads=16, heads_kv=1),
    "d64": dict(dim=64),
    "d64-fp8-pages": dict(dim=64, kind="e4m3", page=16),
    "d128-v64": dict(dim=128, dim_v=64),
    "d64-v128-fp8": dict(dim=64, dim_v=128, kind="e4m3"),
    "q3": dict(seqlen_q=3, causal=True),
    "q4-pages-fp8": dict(seqlen_q=4, causal=True, page=16, kind="e4m3"),
    "q2-full": dict(seqlen_q=2),
    "splits-1": dict(num_splits=1),
    "splits-100": dict(num_splits=100),
    "batch-invariant": dict(batch_invariant=True, page=16),
    "new": dict(new=1, seqlen_q=1, causal=True, page=16, lengths=[2000, 301]),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options(options):
    check(make(**{"batch": 2, "lengths": [2047, 301], **LARGE, **options}))


def test_the_merge_under_load():
    """Many launches back to back: the same bits every time, whoever arrives last."""
    a = make(batch=1, lengths=[2048], num_splits=24, **LARGE)
    first, lse, call = run(a)
    for i in range(300):
        call.cache_seqlens.fill_(2048 if i % 3 else 100 + i)
        o, again = torch.full_like(first, NAN), torch.full_like(lse, NAN)
        hopper_decode.forward(call, o, again)
        if i % 3:
            assert torch.equal(o, first) and torch.equal(again, lse)


def test_streams_share_no_counters():
    calls = [run(make(batch=1, seed=10 * i, lengths=[2048], **LARGE)) for i in range(4)]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    for _ in range(50):
        found = []
        for stream, (o, lse, call) in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                result = torch.full_like(o, NAN), torch.full_like(lse, NAN)
                hopper_decode.forward(call, *result)
                found.append(result)
        torch.cuda.synchronize()
        for (o, lse, _), result in zip(calls, found, strict=True):
            assert torch.equal(result[0], o) and torch.equal(result[1], lse)


def test_graphs_keep_their_counters():
    a = make(batch=1, lengths=[40], page=16, new=1, causal=True, poison=False, **LARGE) | {"backend": "hopper"}
    length = a["cache_seqlens"]
    flash_attn_with_kvcache(**a)
    graphs, results = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph in graphs:
        with torch.cuda.graph(graph):
            results.append(flash_attn_with_kvcache(**a))
    for step, n in enumerate((100, 1500, 2000, 0, 2047)):
        length.fill_(n)
        for name in ("q", "k", "v"):
            a[name].copy_(draw(*a[name].shape, seed=100 + step, **ON))
        caches = {n: a[n].clone() for n in ("k_cache", "v_cache")}
        for graph in graphs:
            graph.replay()
        expected = flash_attn_with_kvcache(**a | caches)
        assert torch.equal(results[0], expected) and torch.equal(results[1], expected)


def test_bits_do_not_depend_on_neighbours():
    a = make(batch=5, lengths=[2048, 2047, 700, 512, 5], batch_invariant=True, page=16, **LARGE)
    o, lse, _ = run(a)
    for b in range(5):
        alone = a | {n: a[n][b : b + 1] for n in ("q", "cache_seqlens", "page_table")}
        o_b, lse_b, _ = run(alone)
        assert torch.equal(o_b[0], o[b]) and torch.equal(lse_b[0], lse[b])


def test_offsets_beyond_32_bits():
    heads_kv, dim, capacity = 2, 64, 64
    stride = (1 << 31) // 3 + 8 - ((1 << 31) // 3) % 8
    shape, strides = (5, capacity, heads_kv, dim), (stride, heads_kv * dim, dim, 1)
    buffer = torch.empty(4 * stride + capacity * heads_kv * dim, dtype=BF16, **ON)
    far = buffer.as_strided(shape, strides)
    far.copy_(draw(*shape, **ON))
    q = draw(1, 1, 4, dim, seed=1, **ON)
    where = torch.tensor([[4]], dtype=torch.int32, **ON)
    length = torch.tensor([50], dtype=torch.int32, **ON)
    found = [
        flash_attn_with_kvcache(q, x, x, cache_seqlens=length, page_table=where, backend="hopper")
        for x in (far, far.contiguous())
    ]
    assert torch.equal(*found)


def test_what_it_refuses():
    for options, message in (({"softcap": 3.0}, "soft cap"), ({"window_size": (5, 0)}, "window")):
        with pytest.raises(UnsupportedError, match=message):
            flash_attn_with_kvcache(**make(batch=1, lengths=[9], **LARGE, **options), backend="hopper")


@pytest.mark.parametrize("options", [{}, {"page": 16}, {"kind": "e4m3"}], ids=["contiguous", "pages", "e4m3"])
def test_auto_takes_it(options):
    a = make(batch=2, lengths=[2048, 333], poison=False, **LARGE, **options)
    assert explain_kvcache(**a).backend == "hopper"
    assert torch.equal(flash_attn_with_kvcache(**a), flash_attn_with_kvcache(**a, backend="hopper"))


def test_auto_under_a_compiler():
    """Which knows no addresses: the op chooses."""
    a = make(batch=2, lengths=[2048, 333], poison=False, **LARGE)
    step = torch.compile(lambda **x: flash_attn_with_kvcache(**x), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(step(**a), flash_attn_with_kvcache(**a, backend="hopper"))


def test_auto_leaves_odd_addresses_to_the_portable_kernel():
    a = make(batch=2, lengths=[2048, 333], poison=False, **LARGE)
    a["k_cache"] = torch.empty(2, 2048, 8, 136, dtype=BF16, **ON)[..., 4:132].copy_(a["k_cache"])
    assert explain_kvcache(**a).backend == "portable"
    assert torch.equal(flash_attn_with_kvcache(**a), flash_attn_with_kvcache(**a, backend="portable"))
