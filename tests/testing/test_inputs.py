"""The input makers: same values in every kind of memory, NaN around poisoned rows, strides as promised."""

from __future__ import annotations

import pytest
import torch

from gpu_accel.errors import InvalidInputError
from gpu_accel.testing import (
    KINDS,
    LAYOUTS,
    make_qkv,
    make_varlen,
    never_written,
    poison_,
    poison_like,
    random_like,
    random_values,
    split_varlen,
)
from gpu_accel.testing import generator as make_generator

SAME_VALUES = [kind for kind in KINDS if kind not in ("outliers", "broadcast")]
SIZES = {"batch": 2, "seqlen_q": 7, "seqlen_k": 5, "heads": 4, "heads_kv": 2, "head_dim": 16}
FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2]


def storage(t: torch.Tensor) -> torch.Tensor:
    """The whole memory behind a view."""
    size = t.untyped_storage().nbytes() // t.element_size()
    return torch.as_strided(t, (size,), (1,), 0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", SAME_VALUES)
def test_every_memory_kind_holds_the_same_values(kind, layout, dtype):
    plain = make_qkv(**SIZES, layout=layout, dtype=dtype, seed=3)
    placed = make_qkv(**SIZES, layout=layout, dtype=dtype, kind=kind, seed=3)
    for a, b in zip(plain, placed, strict=True):
        assert a.shape == b.shape and b.dtype == dtype and b.stride(-1) == 1
        assert torch.equal(a.float(), b.float())
        assert a.is_contiguous() and not a.float().isnan().any()


def test_layouts_hold_the_same_values():
    q = {layout: make_qkv(**SIZES, layout=layout, seed=1).q for layout in LAYOUTS}
    assert q["bshd"].shape == (2, 7, 4, 16)
    assert torch.equal(q["bshd"].transpose(1, 2), q["bhsd"])
    assert torch.equal(q["bshd"].flatten(0, 1), q["thd"])


def test_seeds_and_generators_decide_the_values():
    q = make_qkv(**SIZES, seed=1).q
    assert torch.equal(q, make_qkv(**SIZES, seed=1).q) and not torch.equal(q, make_qkv(**SIZES, seed=2).q)
    source = make_generator(1)
    first, second = make_qkv(**SIZES, source=source).q, make_qkv(**SIZES, source=source).q
    assert torch.equal(q, first) and not torch.equal(first, second)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_poisoned_memory_is_nan_outside_the_view_and_aligned(layout, dtype):
    for t in make_qkv(**SIZES, layout=layout, kind="poisoned", dtype=dtype):
        memory = storage(t)
        assert int(never_written(memory).sum()) == memory.numel() - t.numel() > t.numel()
        assert memory.float().isnan().sum() == memory.numel() - t.numel()
        rows = t.storage_offset() * t.element_size(), *(s * t.element_size() for s in t.stride()[:-1])
        assert all(r % 16 == 0 for r in rows), "rows must be usable by TMA"


def test_strides_as_promised():
    packed = make_qkv(batch=2, seqlen_q=7, heads=4, heads_kv=2, head_dim=16, kind="packed")
    assert len({t.untyped_storage().data_ptr() for t in packed}) == 1
    unequal = make_qkv(**SIZES, kind="packed")
    assert unequal.k.untyped_storage().data_ptr() == unequal.v.untyped_storage().data_ptr()
    q, k, v = make_qkv(**SIZES, kind="broadcast")
    assert q.stride(0) == 0 and k.stride(2) == 0 and v.stride(2) == 0
    assert make_qkv(**SIZES, kind="misaligned").q.data_ptr() % 16 == 2
    q = make_qkv(**SIZES, kind="transposed").q
    assert q.transpose(1, 2).is_contiguous() and not q.is_contiguous()
    assert make_qkv(**SIZES, kind="strided").q.stride() == (15 * 4 * 32, 2 * 4 * 32, 32, 1)


def test_outliers_have_the_stated_rate_and_size():
    draw = random_values((1000, 1000), kind="outliers", dtype=torch.float32, generator=make_generator(0))
    # var = 1 + 0.001 * 100; |N(0, 1)| > 6 happens twice in 1e9, an outlier is that large with probability 0.55
    assert draw.var().item() == pytest.approx(1.1, rel=0.01)
    assert 450 < (draw.abs() > 6).sum().item() < 650
    assert draw.abs().max() > 20


def test_fp8_values_saturate_instead_of_turning_into_nan():
    draw = random_values((64, 64), dtype=torch.float8_e4m3fn, generator=make_generator(0))
    assert draw.float().abs().max() <= 448 and not draw.float().isnan().any()


def test_varlen_offsets_and_poison_around_the_sequences():
    x = make_varlen(lengths_q=[3, 0, 5], lengths_k=[2, 4, 0], heads=4, heads_kv=2, head_dim=16, kind="poisoned")
    assert x.cu_seqlens_q.tolist() == [0, 3, 3, 8] and x.cu_seqlens_k.tolist() == [0, 2, 6, 6]
    assert x.cu_seqlens_q.dtype == torch.int32 and (x.max_seqlen_q, x.max_seqlen_k) == (5, 4)
    assert x.q.shape == (8, 4, 16) and x.k.shape == (6, 2, 16)
    memory = storage(x.q).view(-1, 5, 32)
    assert memory[:3].isnan().all() and memory[-3:].isnan().all() and not memory[3:-3, :4, :16].isnan().any()
    assert [t.shape[1] for t in split_varlen(x.q, x.cu_seqlens_q)] == [3, 0, 5]


@pytest.mark.parametrize("kind", KINDS)
def test_zero_lengths(kind):
    q, k, v = make_qkv(batch=2, seqlen_q=0, seqlen_k=3, heads=2, head_dim=8, kind=kind)
    assert q.shape == (2, 0, 2, 8) and k.shape == v.shape == (2, 3, 2, 8)


def test_refusals():
    with pytest.raises(InvalidInputError, match="layout"):
        make_qkv(**SIZES, layout="sbhd")
    with pytest.raises(InvalidInputError, match="kind"):
        make_qkv(**SIZES, kind="weird")
    with pytest.raises(InvalidInputError, match="head_dim_v"):
        make_qkv(**SIZES, kind="packed", head_dim_v=8)
    with pytest.raises(InvalidInputError, match="lengths"):
        make_varlen(lengths_q=[1, 2], lengths_k=[1], heads=1, head_dim=8)
    with pytest.raises(InvalidInputError, match="poison"):
        poison_(torch.zeros(2, dtype=torch.bool))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64, torch.int32], ids=str)
def test_poison_like_is_all_poison_and_keeps_strides(dtype):
    like = torch.zeros(3, 4, 5).to(dtype).transpose(0, 1)
    buffer = poison_like(like)
    assert buffer.stride() == like.stride() and bool(never_written(buffer).all())
    assert not never_written(like).any()
    if dtype.is_floating_point:
        assert buffer.float().isnan().all()
        assert dtype.itemsize == 1 or not never_written(torch.full((2,), float("nan"), dtype=dtype)).any()


def test_random_like():
    like = make_qkv(**SIZES, kind="strided").q
    a = random_like(like, seed=1)
    assert a.shape == like.shape and a.dtype == like.dtype and a.is_contiguous()
    assert torch.equal(a, random_like(like, seed=1)) and not torch.equal(a, random_like(like, seed=2))
