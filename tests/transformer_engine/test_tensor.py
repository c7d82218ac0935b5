"""QuantizedTensor: what torch may do with it, and what it refuses."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.testing import generator
from gpu_accel.transformer_engine import formats
from gpu_accel.transformer_engine.quantizer import quantize
from gpu_accel.transformer_engine.schemes import SCHEMES
from gpu_accel.transformer_engine.tensor import QuantizedTensor


def made(name: str = "mxfp8", shape=(4, 6, 64), **options) -> QuantizedTensor:
    x = torch.randn(shape, generator=generator(0)).bfloat16()
    return quantize(x, name, backend="reference", **options)


def same(one: QuantizedTensor, other: QuantizedTensor) -> bool:
    pairs = [(one._inner[name], other._inner[name]) for name in one._inner]
    equal = all((a is None) == (b is None) and (a is None or torch.equal(a.float(), b.float())) for a, b in pairs)
    return equal and one.scheme == other.scheme and one.shape == other.shape and one.dtype == other.dtype


def test_it_looks_like_what_was_quantised():
    q = made()
    assert isinstance(q, torch.Tensor)
    assert (q.shape, q.dtype, q.device.type) == ((4, 6, 64), torch.bfloat16, "cpu")
    assert q.codes.dtype == torch.float8_e4m3fn and q.scales.dtype == torch.float8_e8m0fnu
    assert q.scales.shape == (24, 2) and q.emulated
    assert "mxfp8" in repr(q)
    assert q.nbytes == 4 * 6 * 64 + 24 * 2


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("weights_only", [True, False])
def test_saving_and_loading(name, weights_only):
    """bitsandbytes#1391 and others: a reloaded tensor gave nonsense."""
    q = made(name, columnwise=True)
    file = io.BytesIO()
    torch.save({"w": q}, file)
    file.seek(0)
    back = torch.load(file, weights_only=weights_only)["w"]
    assert isinstance(back, QuantizedTensor) and same(back, q)
    assert torch.equal(back.dequantize(), q.dequantize())


def test_pickle():
    q = made("nvfp4", columnwise=True)
    back = pickle.loads(pickle.dumps(q))
    assert isinstance(back, QuantizedTensor) and same(back, q) and back.dtype == q.dtype


@pytest.mark.parametrize("copies", [(True, False), (False, True), (True, True)], ids=["rows", "columns", "both"])
@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_comes_back_from_a_file(name, copies):
    for shape in ((3, 5, 32), (7, 96), (0, 32), (1, 1)):
        rowwise, columnwise = copies
        try:
            q = quantize(torch.randn(shape), name, rowwise=rowwise, columnwise=columnwise)
        except InvalidInputError:  # a Hadamard matrix needs more
            continue
        assert same(pickle.loads(pickle.dumps(q)), q), shape


def test_files_whose_parts_do_not_belong_together_are_refused():
    """Kernels trust sizes: with scales of fewer rows, or another shape, a product read foreign memory."""
    q = made("nvfp4", (32, 64), columnwise=True)
    make, (parts, dtypes, text, shape, dtype, wanted) = q.__reduce_ex__(4)

    def back(text=text, shape=shape, dtype=dtype, without=(), **changes):
        kept = {name: t for name, t in (parts | changes).items() if name not in without}
        return make(kept, dtypes | {name: t.dtype for name, t in changes.items()}, text, shape, dtype, wanted)

    assert same(back(), q)
    assert same(back(codes=torch.stack([q.codes, q.codes], -1)[..., 0]), q), "however it lies in memory"
    for changes in (
        {"scales": q.scales[:-1]}, {"scales": q.scales.view(torch.uint8)}, {"codes": q.codes[:-1]},
        {"col_scales": q.col_scales[:, :-1]}, {"col_codes": q.col_codes.view(torch.int8)},
        {"tensor_scale": torch.ones(1)}, {"tensor_scale": torch.ones(()).double()}, {"seen_amax": torch.ones(2)},
        {"scales": q.scales.to("meta")}, {"more": torch.ones(())}, {"without": ("scales",)}, {"without": ("codes",)},
        {"without": ("col_tensor_scale",)}, {"without": tuple(parts)}, {"shape": (64, 32)}, {"shape": (32, 64, 1)},
        {"shape": ()}, {"text": "mxfp8"}, {"text": "fp8"}, {"dtype": torch.int32}, {"dtype": torch.float8_e5m2},
    ):  # fmt: skip
        with pytest.raises(InvalidInputError, match="that is none|have as many elements"):
            back(**changes)


def test_as_a_parameter_in_a_state_dict():
    def module() -> torch.nn.Module:
        layer = torch.nn.Module()
        layer.weight = torch.nn.Parameter(made("nvfp4", (32, 64)), requires_grad=False)
        return layer

    one, other = module(), module()
    other.weight.data.scales.zero_() if isinstance(other.weight.data, QuantizedTensor) else None
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    assert same(other.weight.detach(), one.weight.detach())


def test_detach_clone_deepcopy():
    q = made(columnwise=True)
    assert same(q.detach(), q)
    other = q.clone()
    other.scales.zero_()
    assert not same(other, q)
    assert same(copy.deepcopy(q), q)


def test_to():
    q = made()
    wide = q.to(torch.float32)
    assert wide.dtype == torch.float32 and wide.dequantize().dtype == torch.float32
    assert same(q.to("cpu"), q)
    assert q.to("meta").device.type == "meta"
    with pytest.raises(UnsupportedError, match="dequantize"):
        q.to(torch.int8)


def test_views_keep_the_last_dimension():
    q = made()
    flat = q.view(24, 64)
    assert flat.shape == (24, 64) and torch.equal(flat.dequantize(), q.dequantize().view(24, 64))
    assert torch.equal(q.reshape(2, 2, 6, 64).dequantize(), q.dequantize().view(2, 2, 6, 64))
    with pytest.raises(UnsupportedError, match="last dimension"):
        q.view(4, 6 * 64)


def test_transposing_swaps_the_copies():
    q = made("fp8_1x128", (48, 160), columnwise=True)
    assert q.t().shape == (160, 48)
    assert torch.equal(q.t().dequantize(), q.dequantize_columns())
    assert same(q.t().t(), q)
    with pytest.raises(UnsupportedError, match="columnwise"):
        made("fp8_1x128", (48, 160)).t()


@pytest.mark.parametrize(
    "use", [lambda q: q + 1, lambda q: q @ q, lambda q: q[0], lambda q: q.float().sum(), lambda q: torch.cat([q, q])]
)
def test_arithmetic_is_refused_and_says_what_to_do(use):
    with pytest.raises(UnsupportedError, match="dequantize"):
        use(made())


def test_a_copy_that_was_not_made_is_missed():
    with pytest.raises(InvalidInputError, match="columnwise=True"):
        made().dequantize_columns()
    only = made("fp8", (8, 32), rowwise=False, columnwise=True)
    assert only.codes is None and torch.equal(only.dequantize(), made("fp8", (8, 32)).dequantize())


def test_copying_between_different_kinds_is_refused():
    with pytest.raises(InvalidInputError, match="copy"):
        made("mxfp8").copy_(made("fp8"))


def test_torch_compile_traces_what_it_holds():
    q = made("mxfp8", (32, 64))

    def f(q):
        return q.codes.float() * 2

    assert torch.equal(torch.compile(f, fullgraph=True, backend="aot_eager")(q), f(q))


def test_torch_compile_before_anything_was_decoded():
    """Tables of formats are kept between calls; what stands in for one while tracing must not be."""
    formats._table.cache_clear()
    q = made("mxfp8", (32, 64))
    for _ in range(2):  # with no table kept, and with one
        torch._dynamo.reset()
        f = torch.compile(lambda q: q.dequantize() * 2, fullgraph=True, backend="aot_eager")
        assert torch.equal(f(q), q.dequantize() * 2)


def test_shared_memory_holds_all_parts():
    q = made("nvfp4", (32, 64), columnwise=True)
    assert q.share_memory_() is q and all(t.is_shared() for t in q._inner.values() if t is not None)
