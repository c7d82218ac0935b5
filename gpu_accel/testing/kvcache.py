"""Calls of `flash_attn_with_kvcache`: caches full of NaN where no key is, pages in any order, and a judgement."""

from __future__ import annotations

import torch

from gpu_accel.compat import INTERPRET
from gpu_accel.flash_attention3 import portable_decode, reference_kvcache
from gpu_accel.flash_attention3.kvcache import make_call
from gpu_accel.flash_attention3.kvcache_problem import KVCall
from gpu_accel.flash_attention3.reference_kvcache import quantize_cache
from gpu_accel.testing.errors import assert_close_to_truth
from gpu_accel.testing.poison import poison_, poison_like
from gpu_accel.testing.truth import yardstick_attention

BF16 = torch.bfloat16
NAN = float("nan")


def draw(*shape, seed=0, dtype=BF16, device="cpu"):
    source = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(*shape, generator=source, device=device).to(dtype)


def make(
    *, batch=2, seqlen_q=1, heads=4, heads_kv=2, dim=32, dim_v=None, capacity=64, page=0, kind="", granularity="head",
    groups=1, dtype=BF16, lengths=None, new=0, seed=0, device="cpu", poison=True, **options,
) -> dict:  # fmt: skip
    """Arguments of a call. What belongs to no sequence is NaN (in integer caches, its scale where it has one)."""
    dim_v = dim if dim_v is None else dim_v
    lengths = [capacity - 3 * b - new for b in range(batch)] if lengths is None else lengths
    if page:
        each = -(-capacity // page)
        pages = batch * each + 1  # one that nobody uses
        order = torch.randperm(pages - 1, generator=torch.Generator().manual_seed(seed)) + 1
        options["page_table"] = order.view(batch, each).to(device, torch.int32)
        lead = (pages, page)
    else:
        lead = (batch, capacity)
    k, v = (draw(*lead, heads_kv, d, seed=seed + i, device=device) for i, d in ((1, dim), (2, dim_v)))
    if kind:
        k, options["k_descale"] = quantize_cache(k, kind, granularity, groups=groups)
        v, options["v_descale"] = quantize_cache(v, kind, granularity, groups=groups)
    else:
        k, v = k.to(dtype), v.to(dtype)
    if new:
        options["k"], options["v"] = (
            draw(batch, new, heads_kv, d, seed=seed + i, dtype=dtype, device=device) for i, d in ((3, dim), (4, dim_v))
        )
    q = draw(batch, seqlen_q, heads, dim, seed=seed + 5, dtype=dtype, device=device)
    lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
    arguments = {"q": q, "k_cache": k, "v_cache": v, "cache_seqlens": lengths, **options}
    if poison:
        poison_unused(arguments)
    return arguments


def poison_unused(arguments: dict) -> None:
    """NaN in every place of the cache that holds no key."""
    call = make_call(**arguments)
    used = torch.zeros(call.k_cache.shape[:2], dtype=torch.bool, device=call.q.device)
    for b in range(call.q.shape[0]):
        first, before, _ = reference_kvcache.lengths(call, b)
        row, place = reference_kvcache._places(call, b, torch.arange(first, before, device=call.q.device))
        used[row, place] = True
    for cache, scales in ((call.k_cache, call.k_scales), (call.v_cache, call.v_scales)):
        if call.kind in ("int8", "int4"):
            if scales.per_token and scales.tensor is not None:
                scales.tensor[~used] = NAN
        elif call.kind:
            cache.view(torch.uint8)[~used] = 0x7F
        else:
            cache[~used] = NAN


def clone(arguments: dict) -> dict:
    return {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}


def run(arguments: dict, config=None, forward=portable_decode.forward) -> tuple[torch.Tensor, torch.Tensor, KVCall]:
    """`forward` with outputs poisoned before; on a copy of the caches where it appends to them."""
    call = make_call(**(arguments if arguments.get("k") is None else clone(arguments)))
    o = poison_(torch.empty(*call.q.shape[:3], call.head_dim_v, dtype=call.q.dtype, device=call.q.device))
    lse = poison_like(torch.empty(o.shape[0], o.shape[2], o.shape[1], device=o.device))
    forward(call, o, lse, config)
    return o, lse, call


def yardstick(call: KVCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain torch operations in the dtype of q on what the cache stands for."""
    parts = []
    for b in range(call.q.shape[0]):
        k, v = reference_kvcache.gather(call, b, torch.float32)
        q = reference_kvcache.turned_query(call, b)
        parts.append(
            yardstick_attention(
                q[None],
                k[None].to(q.dtype),
                v[None].to(q.dtype),
                softmax_scale=call.softmax_scale,
                window_size=(call.window_left, call.window_right),
                softcap=call.softcap,
            )  # fmt: skip
        )
    o, lse = torch.cat([o for o, _ in parts]), torch.cat([lse for _, lse in parts])
    return (o, lse) if call.sinks is None else reference_kvcache.with_sink(o, lse, call.sinks)


def check(arguments: dict, config=None, forward=portable_decode.forward) -> tuple[torch.Tensor, torch.Tensor]:
    """Run, compare o, lse and the caches with the truth; returns o and lse.

    After an append the truth is that of the cache which the kernel has written, itself compared with the reference's.
    """
    o, lse, call = run(arguments, config, forward)
    o_true, lse_true = reference_kvcache.forward(call.q, call, torch.float64)
    o_ruler, lse_ruler = yardstick(call)
    assert_close_to_truth("o", o, o_true, o_ruler)
    # q is rounded after RoPE, which may go to the neighbour
    assert_close_to_truth("lse", lse, lse_true, lse_ruler, floor=2e-2 if call.rotary_dim else 2e-5)
    if call.new:
        expected = make_call(**clone(arguments))
        reference_kvcache.append(expected)
        same_cache(call, expected)
    return o, lse


def same_cache(call: KVCall, after: KVCall) -> None:
    """The caches after an append: equal, but for a rounding that may go to the neighbour."""
    for name, mine, other in (("k_cache", call.k_cache, after.k_cache), ("v_cache", call.v_cache, after.v_cache)):
        if call.kind == "int4":
            mine, other = (reference_kvcache.decode(x, "int4") for x in (mine, other))
        a, b = mine.float(), other.float()
        assert torch.equal(a.isnan(), b.isnan()), name
        a, b = a.nan_to_num(0.0), b.nan_to_num(0.0)
        step = {"int8": 1.0, "int4": 1.0}.get(call.kind)
        eps = {"e4m3": 2.0**-3, "e5m2": 2.0**-2}.get(call.kind) or torch.finfo(call.q.dtype).eps
        allowed = torch.full_like(b, step) if step else b.abs() * eps + 1e-6
        different = a != b
        assert ((a - b).abs() <= allowed).all(), f"{name}: {(a - b).abs().max().item()}"
        if not (INTERPRET and call.rotary_dim and call.q.dtype == BF16):  # which cuts bits off instead of rounding
            assert different.float().mean() < 0.01, f"{name}: {different.sum().item()} of {a.numel()} differ"
