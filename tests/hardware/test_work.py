"""Formulas for work against counting by brute force, and the roofline against arithmetic by hand."""

from __future__ import annotations

import itertools

import pytest

from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.hardware import (
    Roofline,
    attention_bytes,
    attention_flops,
    attention_pairs,
    bytes_of,
    copy_bytes,
    gemm_bytes,
    gemm_flops,
    profile,
)

LENGTHS = [(1, 1), (7, 7), (8, 5), (5, 8), (9, 2), (2, 9), (0, 4), (4, 0), (3, 1)]
WINDOWS = [(-1, -1), (None, None), (0, 0), (2, 0), (0, 3), (3, 2), (-1, 2), (2, -1), (50, 50)]


def count(seqlen_q, seqlen_k, causal, window):
    left, right = (float("inf") if side is None or side < 0 else side for side in window)
    pairs = 0
    for i, j in itertools.product(range(seqlen_q), range(seqlen_k)):
        place = i + seqlen_k - seqlen_q
        pairs += place - left <= j <= place + right and not (causal and j > place)
    return pairs


@pytest.mark.parametrize("seqlens", LENGTHS, ids=str)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_pairs_against_counting(seqlens, window, causal):
    assert attention_pairs(*seqlens, causal=causal, window_size=window) == count(*seqlens, causal, window)


def test_pairs_need_no_loop():
    assert attention_pairs(10**9, 10**9, causal=True) == 10**9 * (10**9 + 1) // 2


class Counter:
    """Counts the multiplications and additions of matrix products as loops would do them."""

    def __init__(self) -> None:
        self.flops = 0

    def products(self, pairs: int, inner: int) -> None:
        for _ in range(pairs):
            self.flops += 2 * inner


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (2, 1)], ids=str)
def test_attention_flops_against_counting(causal, window):
    sizes = {"batch": 2, "seqlen_q": 6, "seqlen_k": 9, "heads": 3, "head_dim": 8, "head_dim_v": 4}
    forward, backward = Counter(), Counter()
    for _ in range(2 * 3):
        pairs = count(6, 9, causal, window)
        for inner in (8, 4):  # Q K^T, P V
            forward.products(pairs, inner)
        for inner in (8, 4, 4, 8, 8):  # Q K^T, dO V^T, P^T dO, dS K, dS^T Q
            backward.products(pairs, inner)
    assert attention_flops(**sizes, causal=causal, window_size=window) == forward.flops
    assert attention_flops(**sizes, causal=causal, window_size=window, which="backward") == backward.flops


def test_paper_convention():
    sizes = {"batch": 4, "seqlen_q": 4096, "heads": 16, "head_dim": 128}
    full = attention_flops(**sizes, convention="paper")
    assert full == 4 * 4096**2 * 128 * 16 * 4 == attention_flops(**sizes)
    assert attention_flops(**sizes, convention="paper", causal=True) == full / 2
    assert attention_flops(**sizes, convention="paper", which="backward") == 2.5 * full
    assert attention_flops(**sizes, which="backward") == 2.5 * full
    assert attention_flops(**sizes, convention="paper", which="backward", causal=True) == 1.25 * full
    exact = attention_flops(**sizes, causal=True)
    assert full / 2 < exact == pytest.approx(full / 2, rel=1e-3)
    for unknown in ({"window_size": (4, 0)}, {"head_dim_v": 64}):
        with pytest.raises(InvalidInputError, match="convention"):
            attention_flops(**sizes, convention="paper", **unknown)


@pytest.mark.parametrize("convention", ["exact", "paper"])
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_varlen_is_the_sum_of_its_sequences(convention, which):
    options = {"heads": 3, "head_dim": 16, "causal": True, "convention": convention, "which": which}
    total = attention_flops(lengths_q=[5, 0, 9], lengths_k=[7, 3, 2], **options)
    assert total == sum(attention_flops(seqlen_q=q, seqlen_k=k, **options) for q, k in [(5, 7), (0, 3), (9, 2)])
    with pytest.raises(InvalidInputError, match="lengths"):
        attention_flops(lengths_q=[5], lengths_k=[7, 3], **options)


@pytest.mark.parametrize(
    ("dtype", "out", "size", "out_size"), [("bf16", None, 2, 2), ("e4m3", None, 1, 2), ("fp16", "fp32", 2, 4)]
)
def test_attention_bytes_against_counting(dtype, out, size, out_size):
    batch, sq, sk, heads, heads_kv, d, dv = 2, 5, 7, 6, 2, 16, 8
    read = {"q": batch * sq * heads * d, "k": batch * sk * heads_kv * d, "v": batch * sk * heads_kv * dv}
    o, lse = batch * sq * heads * dv, batch * sq * heads
    options = {"batch": batch, "seqlen_q": sq, "seqlen_k": sk, "heads": heads, "heads_kv": heads_kv, "head_dim": d,
               "head_dim_v": dv, "dtype": dtype, "out_dtype": out}  # fmt: skip
    assert attention_bytes(**options) == sum(read.values()) * size + o * out_size + lse * 4
    backward = sum(read.values()) * (size + out_size) + 2 * o * out_size + lse * 4
    assert attention_bytes(**options, which="backward") == backward
    varlen = attention_bytes(heads=6, head_dim=16, lengths_q=[2, 3], lengths_k=[4, 4])
    assert varlen == attention_bytes(heads=6, head_dim=16, seqlen_q=5, seqlen_k=8)
    assert attention_bytes(heads=6, head_dim=16, lengths_q=[]) == 0


def test_gemm_and_copy_against_counting():
    m, n, k = 3, 5, 7
    assert gemm_flops(m, n, k, batch=2) == sum(2 for _ in itertools.product(range(2), range(m), range(n), range(k)))
    elements = {"a": m * k, "b": k * n, "c": m * n}
    assert gemm_bytes(m, n, k) == 2 * sum(elements.values())
    fp8 = elements["a"] + elements["b"] + 2 * elements["c"]
    assert gemm_bytes(m, n, k, batch=2, dtype="fp8", out_dtype="bf16") == 2 * fp8
    assert gemm_bytes(m, n, k, accumulate=True) == 2 * (sum(elements.values()) + elements["c"])
    assert copy_bytes(10, "fp32") == 80 and copy_bytes(16, "fp4") == 16
    assert bytes_of("e5m2") == 1 and bytes_of("float32") == 4
    for word in ("fp64_tensor", "fp16_acc16", "fp7"):
        with pytest.raises(InvalidInputError):
            bytes_of(word)


def test_roofline_by_hand():
    roof = Roofline(profile("h100-sxm"))
    assert roof.compute_time(989.4e12, "bf16") == pytest.approx(1000)
    assert roof.memory_time(3352e9) == pytest.approx(1000)
    assert roof.ridge("bf16") == pytest.approx(989.4e12 / 3352e9)
    below, above = 0.5 * roof.ridge("bf16"), 2 * roof.ridge("bf16")
    assert roof.attainable(below, "bf16") == pytest.approx(989.4 / 2) and roof.attainable(above, "bf16") == 989.4
    assert roof.bound(below * 1e9, 1e9, "bf16") == "memory" and roof.bound(above * 1e9, 1e9, "bf16") == "compute"
    assert roof.time(1e12, 1e9, "bf16") == roof.compute_time(1e12, "bf16") > roof.memory_time(1e9)
    assert roof.time(1e6, 1e9, "bf16") == roof.memory_time(1e9)
    assert roof.fraction(2 * roof.time(1e12, 1e9, "bf16"), 1e12, 1e9, "bf16") == pytest.approx(0.5)
    assert Roofline(profile("h100"), scale=0.5).compute_time(1e12, "bf16") == 2 * roof.compute_time(1e12, "bf16")


def test_roofline_refuses():
    roof = Roofline(profile("h100"))
    with pytest.raises(UnsupportedError, match="fp4"):
        roof.ridge("fp4")
    for call in (lambda: roof.memory_time(-1), lambda: roof.compute_time(float("nan"), "bf16"),
                 lambda: roof.fraction(0, 1, 1, "bf16"), lambda: roof.fraction(float("nan"), 1, 1, "bf16"),
                 lambda: Roofline(profile("h100"), scale=0), lambda: Roofline(profile("h100"), scale=float("nan")),
                 lambda: roof.attainable(-1, "bf16")):  # fmt: skip
        with pytest.raises(InvalidInputError):
            call()


@pytest.mark.parametrize(
    "count",
    [
        lambda: attention_flops(seqlen_q=4, heads=1, head_dim=8, which="fwd"),
        lambda: attention_flops(seqlen_q=4, heads=1, head_dim=8, convention="papers"),
        lambda: attention_bytes(seqlen_q=4, heads=1, head_dim=8, which="fwd"),
        lambda: attention_flops(seqlen_q=-4, heads=1, head_dim=8),
        lambda: attention_flops(lengths_q=[3, -3], heads=1, head_dim=8),
        lambda: attention_flops(seqlen_q=4, lengths_k=[3], heads=1, head_dim=8),
        lambda: gemm_flops(-1, 2, 3),
        lambda: gemm_bytes(1, -2, 3),
        lambda: copy_bytes(-3),
    ],
    ids=["which", "convention", "bytes-which", "seqlen", "length", "lengths-k-alone", "gemm", "gemm-bytes", "copy"],
)
def test_work_that_makes_no_sense_is_not_counted(count):
    with pytest.raises(InvalidInputError):
        count()
