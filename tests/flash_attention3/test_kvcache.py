"""Attention over a KV cache: formats, pages, lengths, masks, splits and appends against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gpu_accel.flash_attention3 import decode_config, flash_attn_with_kvcache, portable_decode
from gpu_accel.flash_attention3.decode_config import INTERPRETER, automatic_splits
from gpu_accel.flash_attention3.kvcache import make_call
from gpu_accel.testing.kvcache import BF16, NAN, check, draw, make, run

CASES = {
    "one-query": dict(lengths=[64, 41]),
    "one-key": dict(lengths=[1, 2], page=5),
    "some-empty": dict(batch=3, lengths=[0, 33, 0], page=5),
    "all-empty": dict(lengths=[0, 0]),
    "mha": dict(batch=1, heads=2, heads_kv=2),
    "mqa": dict(heads=5, heads_kv=1, page=5),
    "group-of-3": dict(heads=6, heads_kv=2, lengths=[57, 50]),
    "prefix": dict(seqlen_q=7, causal=True, lengths=[60, 7], page=5),
    "more-queries-than-keys": dict(seqlen_q=9, causal=True, lengths=[4, 60]),
    "chunk-of-many-rows": dict(batch=1, seqlen_q=40, causal=True, lengths=[63], page=5),
    "full-prefix": dict(seqlen_q=3, lengths=[50, 64]),
    "window": dict(seqlen_q=5, window_size=(20, 3), lengths=[64, 31], page=5),
    "causal-window": dict(seqlen_q=2, causal=True, window_size=(17, -1), lengths=[64, 9]),
    "window-of-one-query": dict(window_size=(16, 0), lengths=[64, 9], page=5),
    "window-left-only": dict(seqlen_q=3, window_size=(11, None), lengths=[60, 33]),
    "softcap": dict(softcap=3.0, seqlen_q=2, causal=True),
    "odd-head-dim": dict(dim=24, dim_v=40, page=5),
    "wide-v": dict(dim=16, dim_v=64),
    "fp16": dict(dtype=torch.float16),
    "fp32": dict(dtype=torch.float32, seqlen_q=2, causal=True),
    "scale": dict(batch=1, softmax_scale=0.31),
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_follows_the_truth(options):
    check(make(num_splits=3, **options))


@pytest.mark.parametrize("page", [1, 7, 16, 32, 64])
def test_any_page_size(page):
    check(make(page=page, lengths=[64, 43], num_splits=2))


QUANTISED = {
    "e4m3-head": dict(kind="e4m3"),
    "e5m2-tensor": dict(kind="e5m2", granularity="tensor"),
    "e4m3-page": dict(kind="e4m3", granularity="page"),
    "e4m3-token": dict(kind="e4m3", granularity="token"),
    "e4m3-token-odd": dict(kind="e4m3", granularity="token", dim=24),
    "int8-head": dict(kind="int8"),
    "int8-token": dict(kind="int8", granularity="token"),
    "int4-token": dict(kind="int4", granularity="token"),
    "int4-groups": dict(kind="int4", granularity="token", groups=4),
    "int4-head": dict(kind="int4"),
    "int4-small-head": dict(kind="int4", dim=16, dim_v=8),
    "e4m3-fp32-query": dict(kind="e4m3", granularity="token", dtype=torch.float32),
}


LAYOUTS = [0, 16, 5]  # contiguous, pages of a block, odd pages
EIGHT_OR_FOUR = [
    pytest.param(options, LAYOUTS[i % 3], id=f"{name}-{('contiguous', 'pages-of-16', 'pages-of-5')[i % 3]}")
    for i, (name, options) in enumerate(QUANTISED.items())
]


@pytest.mark.parametrize(("options", "page"), EIGHT_OR_FOUR)
def test_eight_and_four_bits(options, page):
    check(make(page=page, lengths=[63, 20], seqlen_q=2, causal=True, num_splits=2, **options))


def test_scales_of_a_sequence_and_head_as_in_flashattention_3():
    a = make(kind="e4m3", page=16, poison=False)
    a["k_descale"], a["v_descale"] = (torch.rand(2, 2) + 0.5 for _ in range(2))
    check(a)
    a["k_descale"] = a["k_descale"].t().contiguous().t()  # strided
    check(a)


def test_query_far_outside_of_fp16_with_an_fp8_cache():
    a = make(kind="e4m3", softmax_scale=1e-7)
    a["q"] *= 2.0**20
    check(a)


def test_nan_that_is_seen_stays_visible():
    for kind in ("", "e4m3", "e5m2"):
        a = make(kind=kind, poison=False, lengths=[60, 50])
        a["v_cache"].view(torch.uint8)[1, 7] = 0x7F if kind else 0xFF
        o, _, _ = run(a)
        assert o[1].isnan().all() and o[0].isfinite().all()


def test_shared_prefix_pages_and_entries_that_are_never_looked_at():
    a = make(page=8, capacity=48, lengths=[40, 19], poison=False)
    a["page_table"][1, :2] = a["page_table"][0, :2]
    check(a)
    a["page_table"][0, 5:], a["page_table"][1, 3:] = -1, 1 << 30
    check(a)


def test_left_padding():
    a = make(batch=3, lengths=[64, 60, 20], cache_leftpad=torch.tensor([0, 37, 20], dtype=torch.int32))
    check(a)
    check(a | {"causal": True, "window_size": (30, 0)})
    check(make(page=5, lengths=[64, 60], cache_leftpad=torch.tensor([17, 1], dtype=torch.int32)))


@pytest.mark.parametrize("new", [0, 2])
def test_rows_of_a_larger_cache(new):
    a = make(batch=3, lengths=[50, 20, 60], poison=False, new=new)
    a |= {n: a[n][:2] for n in ("q", "k", "v") if n in a}
    a |= {"cache_batch_idx": torch.tensor([2, 0], dtype=torch.int32), "cache_seqlens": a["cache_seqlens"][:2]}
    check(a)


@pytest.mark.parametrize("seqlen_q", [1, 5])
def test_sinks(seqlen_q):
    sinks = torch.tensor([0.0, 3.0, -4.0, 10.0])
    a = make(batch=3, seqlen_q=seqlen_q, causal=True, lengths=[0, 60, 3], sinks=sinks, num_splits=3)
    o, lse = check(a)
    assert (o[0] == 0).all()
    torch.testing.assert_close(lse[0], sinks[:, None].expand(4, seqlen_q))


def test_lengths_as_one_number_and_as_none():
    a = make(lengths=[60, 60])
    o, _ = check(a)
    assert torch.equal(run(a | {"cache_seqlens": 60})[0], o)
    a = make(lengths=[64, 64], batch=2)
    assert torch.equal(run(a | {"cache_seqlens": None})[0], run(a)[0])


def test_strides():
    a = make(lengths=[60, 31], poison=False)
    plain, lse, _ = run(a)
    q = torch.full((2, 4, 3, 48), NAN, dtype=BF16)
    q[:, :, 1:2, 8:40] = a["q"].transpose(1, 2)
    k, v = (torch.full((2, 5, 150, 32), NAN, dtype=BF16) for _ in range(2))
    k[:, 1:3, 3:131:2], v[:, 1:3, 8:72] = a["k_cache"].transpose(1, 2), a["v_cache"].transpose(1, 2)
    views = q[:, :, 1:2, 8:40].transpose(1, 2), k[:, 1:3, 3:131:2].transpose(1, 2), v[:, 1:3, 8:72].transpose(1, 2)
    found = run(a | dict(zip(("q", "k_cache", "v_cache"), views, strict=True)))
    assert torch.equal(found[0], plain) and torch.equal(found[1], lse)
    broadcast = run(a | {"q": a["q"][:1].expand(2, -1, -1, -1)})[0]
    assert torch.equal(broadcast[0], plain[0])


@pytest.mark.parametrize("kind", ["e4m3", "e5m2", "int8"])
def test_bytes_at_odd_addresses(kind):
    """Codes of 8 bits are read two at a time where they can be."""
    a = make(kind=kind, lengths=[64, 31], batch=2, poison=False)
    plain = check(a)[0]
    odd = torch.empty(2, 64, 2, 33, dtype=a["k_cache"].dtype)[..., 1:]
    odd.copy_(a["k_cache"])
    assert odd.data_ptr() % 2 == 1
    o = check(a | {"k_cache": odd})[0]
    assert (o - plain).abs().max() < 0.02  # another order of the sum


def test_sizes_of_zero():
    assert run(make(seqlen_q=0))[0].shape == (2, 0, 4, 32)
    assert run(make(batch=0, lengths=[]))[0].shape == (0, 1, 4, 32)
    o, lse, _ = run(make(capacity=0, lengths=[0, 0]))
    assert (o == 0).all() and (lse == -torch.inf).all()
    a = make(page=4) | {"page_table": torch.zeros(2, 0, dtype=torch.int32), "cache_seqlens": None}
    assert (run(a)[0] == 0).all()


# -- splits


@pytest.mark.parametrize("splits", [1, 2, 4, 9])
def test_splits_change_nothing_but_rounding(splits):
    check(make(seqlen_q=2, causal=True, lengths=[64, 17], num_splits=splits))


@pytest.mark.parametrize("change", [{"fused": False}, {"prefetch": False}, {"min_blocks": 2}, {"block_n": 32}], ids=str)
def test_other_ways_to_run(change):
    config = replace(INTERPRETER, **change)
    check(make(seqlen_q=3, causal=True, page=16, lengths=[64, 17], num_splits=4), config)
    check(make(lengths=[64, 0], num_splits=4, window_size=(40, -1)), config)


def test_counters_are_left_at_zero(monkeypatch):
    taken = []

    def take(device, count):
        taken.append(torch.zeros(count, dtype=torch.int32))
        return taken[-1]

    monkeypatch.setattr(portable_decode._counters, "take", take)
    run(make(batch=3, lengths=[64, 0, 20], num_splits=5))
    assert len(taken) == 1 and (taken[0] == 0).all()


def test_bits_do_not_depend_on_neighbours():
    """A row alone, beside others, in a larger cache, in another order: the same bits."""
    a = make(capacity=80, heads=2, heads_kv=1, seqlen_q=2, causal=True, lengths=[77, 70], batch_invariant=True)
    o, lse, call = run(a)
    assert portable_decode.plan(call).split_keys > 0 and portable_decode.plan(call).splits > 1
    for b in range(2):
        alone = {n: x[b : b + 1] if isinstance(x, torch.Tensor) else x for n, x in a.items()}
        wide = {n: torch.nn.functional.pad(alone[n], (0, 0, 0, 0, 0, 100), value=NAN) for n in ("k_cache", "v_cache")}
        o_b, lse_b, _ = run(alone | wide)
        assert torch.equal(o_b[0], o[b]) and torch.equal(lse_b[0], lse[b])
    window = {"window_size": (40, 0)}
    assert torch.equal(run(alone | window)[0][0], run(a | window)[0][1])


def test_the_grid_depends_on_shapes_only():
    plans = {str(portable_decode.plan(make_call(**make(lengths=n)))) for n in ([0, 0], [64, 64], [1, 50])}
    assert len(plans) == 1


def test_automatic_splits_fill_the_machine():
    slots = 264  # an H100 with two programs on each of 132 processors
    assert automatic_splits(8, 64, slots) == 32  # batch 1, 4k keys: 256 programs of 2 blocks
    assert automatic_splits(8, 512, slots) == 32  # 32k keys
    assert automatic_splits(128, 64, slots) == 2  # batch 16
    assert automatic_splits(1024, 64, slots) == 1  # batch 128 fills it by itself
    assert automatic_splits(1, 0, slots) == automatic_splits(1, 1, slots) == 1
    for tiles in (1, 3, 100, 200, 263, 265, 5000):
        for blocks in (1, 7, 64, 1000):
            splits = automatic_splits(tiles, blocks, slots)
            each = -(-blocks // splits)
            assert 1 <= splits <= blocks and -(-blocks // each) == splits  # nobody without work


def test_every_shape_has_a_configuration(monkeypatch):
    monkeypatch.setattr(decode_config, "INTERPRET", False)
    for rows in (1, 4, 16, 17, 64, 100, 256, 5000):
        for bits in (4, 8, 16, 32):
            for dim in (8, 64, 80, 128, 192, 256):
                config = decode_config.lookup(rows, bits, dim)
                assert config.reason and config.block_n >= 16
    assert [decode_config.tile_rows(n) for n in (1, 16, 17, 64, 255, 256)] == [16, 16, 32, 64, 64, 128]


def test_a_card_with_little_shared_memory_gets_fewer_stages(monkeypatch):
    monkeypatch.setattr(decode_config, "_small_shared_memory", lambda device: True)
    config = decode_config.fitted(decode_config.DecodeConfig(64, 4, 4, 2), torch.device("cpu"))
    assert (config.num_stages, config.per_sm) == (2, 1)


def test_merging_holds_no_more_than_registers_allow():
    for per_sm, elements in ((1, 512), (2, 512), (4, 512), (2, 8192), (2, 32768)):
        config = decode_config.DecodeConfig(64, 4, 3, per_sm)
        for splits in (2, 7, 32, 1024):
            chunk = config.merge_chunk(splits, elements)
            assert chunk & (chunk - 1) == 0 and (chunk == 1 or chunk * elements <= 128 * 128)
    assert decode_config.DecodeConfig(64, 4, 3, 2).merge_chunk(32, 4 * 128) == 32  # one wait for memory


# -- appending

ROTARY = {
    "none": {},
    "halves": dict(rotary=16, rotary_interleaved=False),
    "pairs": dict(rotary=16),
    "whole-head": dict(rotary=32, rotary_interleaved=False),
}


def angles(positions: int, dim: int, dtype=BF16):
    angle = torch.arange(positions)[:, None] * 10000 ** (-torch.arange(0, dim, 2) / dim)
    return {"rotary_cos": angle.cos().to(dtype), "rotary_sin": angle.sin().to(dtype)}


@pytest.mark.parametrize("rotary", ROTARY.values(), ids=ROTARY.keys())
def test_append(rotary):
    options = dict(rotary)
    if dim := options.pop("rotary", 0):
        options |= angles(100, dim)
    check(make(new=1, lengths=[63, 0], num_splits=2, **options))
    check(make(page=5, new=3, seqlen_q=3, causal=True, lengths=[58, 0], **options))


def test_queries_without_a_mask_stand_at_one_position():
    check(make(new=3, seqlen_q=3, lengths=[58, 0], **angles(100, 32)))


@pytest.mark.parametrize(("options", "page"), EIGHT_OR_FOUR)
def test_append_rounds_to_the_cache(options, page):
    dim = options.get("dim", 32)
    rotary = angles(100, dim, torch.float32)
    a = make(page=page, new=3, seqlen_q=3, causal=True, lengths=[50, 0], rotary_interleaved=False, **options, **rotary)
    check(a)
    if options.get("granularity") == "token":
        before = a["k_descale"].nan_to_num(0.0)
        assert not torch.equal(run(a)[2].k_scales.tensor.nan_to_num(0.0), before)


@pytest.mark.parametrize("page", [0, 5])
@pytest.mark.parametrize("kind", ["e4m3", "int8", "int4"])
def test_append_without_scales(kind, page):
    a = make(kind=kind, page=page, batch=1, new=2, lengths=[30], dtype=torch.float32, poison=False)
    check(a | {"k_descale": None, "v_descale": None})


def test_more_new_keys_than_queries():
    check(make(new=7, seqlen_q=2, causal=True, lengths=[20, 0], num_splits=2))


def test_what_does_not_fit_is_not_written():
    """On a GPU lengths are not looked at: rows beyond the end are dropped, neighbours stay as they are."""
    a = make(batch=2, new=6, lengths=[60, 10], poison=False)
    _, _, call = run(a)
    assert torch.equal(call.k_cache[0, 60:], a["k"][0, :4]) and torch.equal(call.k_cache[1, 10:16], a["k"][1])
    assert torch.equal(call.k_cache[1, :10], a["k_cache"][1, :10])


def test_decoding_step_by_step_is_prefill():
    """Token by token through a paged cache gives what one causal call gives."""
    from gpu_accel.flash_attention3 import flash_attn_func

    n, page = 14, 4
    q, k, v = (draw(1, n, h, 32, seed=h, dtype=torch.float32) for h in (4, 2, 2))
    v = v + 1
    cache = [torch.full((8, page, 2, 32), NAN) for _ in range(2)]
    table = torch.tensor([[5, 2, 7, 0]], dtype=torch.int32)
    length = torch.zeros(1, dtype=torch.int32)
    outputs = []
    for step in (slice(0, 9), *(slice(t, t + 1) for t in range(9, n))):
        o = flash_attn_with_kvcache(
            q[:, step], *cache, k[:, step], v[:, step], cache_seqlens=length, page_table=table, causal=True
        )
        outputs.append(o)
        length += step.stop - step.start
    torch.testing.assert_close(torch.cat(outputs, 1), flash_attn_func(q, k, v, causal=True), atol=2e-5, rtol=2e-5)
