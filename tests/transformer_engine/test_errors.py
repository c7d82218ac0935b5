"""What makes no sense is refused with an error of this library, on every way in."""

from __future__ import annotations

import pytest
import torch

from gpu_accel.errors import InvalidInputError
from gpu_accel.transformer_engine import (
    DelayedScaling,
    Scheme,
    dequantize_and_accumulate,
    dynamic_precision_select,
    encode,
    quantize,
    quantize_kv_cache,
    scaled_mm,
    scaled_mm_fp8,
)
from gpu_accel.transformer_engine.formats import unpack_nibbles, unpack_sixes
from gpu_accel.transformer_engine.ops import fp8_quantize

X = torch.ones(4, 32)
BYTES = torch.zeros(4, dtype=torch.uint8)
REFUSED = {
    "scheme-none": lambda: quantize(X, None),
    "scheme-list": lambda: quantize(X, ["mxfp8"]),
    "block-list": lambda: Scheme(element="e4m3", block=[1, 32], scale="fp32"),
    "block-float": lambda: Scheme(element="e4m3", block=(1, 32.0), scale="fp32"),
    "columnwise-text": lambda: quantize(X, columnwise="no"),
    "scale-number": lambda: quantize(X, "fp8", scale=1.0),
    "scale-complex": lambda: quantize(X, "fp8", scale=torch.tensor(2j)),
    "encode-list": lambda: encode([1.0], "e4m3"),
    "encode-stream-unused": lambda: encode(X, "e4m3", stream=3),
    "encode-stream-negative": lambda: encode(X, "e4m3", rounding="stochastic", seed=1, stream=-1),
    "unpack-more-than-there-is": lambda: unpack_nibbles(BYTES, 9),
    "unpack-half-a-group": lambda: unpack_sixes(BYTES),
    "product-of-numbers": lambda: scaled_mm(X, quantize(X, "mxfp8")),
    "bias-complex": lambda: scaled_mm(quantize(X), quantize(X), bias=torch.ones(4, dtype=torch.complex64)),
    "fp8-result-without-scale": lambda: scaled_mm_fp8(quantize(X, "fp8"), quantize(X, "fp8"), None),
    "margin-beyond-float32": lambda: fp8_quantize(X, torch.ones(3), margin=2000),
    "margin-half": lambda: DelayedScaling(margin=0.5),
    "history-list": lambda: fp8_quantize(X, [1.0]),
    "history-with-gradient": lambda: fp8_quantize(X, torch.ones(3, requires_grad=True)),
    "history-length-half": lambda: DelayedScaling(amax_history_len=1.5),
    "role": lambda: DelayedScaling().state("weights"),
    "state-without-history": lambda: DelayedScaling().state().load_state_dict({}),
}


@pytest.mark.parametrize("use", REFUSED.values(), ids=REFUSED.keys())
def test_refused(use):
    with pytest.raises(InvalidInputError):
        use()


def test_pages_longer_than_the_sequence_cost_nothing():
    k = torch.randn(2, 13, 3, 8)
    page, head = (quantize_kv_cache(k, k, granularity=g, page_size=10**9) for g in ("page", "head"))
    assert torch.equal(page.k_scale, head.k_scale) and torch.equal(page.dequantize()[0], head.dequantize()[0])


def test_a_whole_number_beyond_64_bits_is_a_scale():
    assert torch.equal(dequantize_and_accumulate(X, 10**30), X * 1e30)


def test_a_cache_prints_as_a_line():
    k = torch.zeros(2, 5, 3, 8)
    cache = quantize_kv_cache(k, k, dtype="int4", granularity="page", page_size=2)
    assert str(cache) == "QuantizedKVCache(int4, a scale a page (2 tokens), shape=(2, 5, 3, 8), 384 bytes, cpu)"
    assert cache != quantize_kv_cache(k, k, dtype="int4")  # no comparison of tensors that cannot say yes or no


def test_a_missing_figure_is_not_called_a_missing_unit():
    refused = dynamic_precision_select("matmul", "rtx-pro-6000").refused
    assert "no vendor document" in refused["bf16"] and "emulated" not in refused["bf16"]
