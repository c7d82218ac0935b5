"""Merging partial results: any strides, empty parts, and what split attention needs it for."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.flash_attention3 import attention_truth, combine
from gpu_accel.flash_attention3.merging import combine_reference
from gpu_accel.testing import assert_close_to_truth

NAN, INF = float("nan"), float("inf")


def parts(splits=3, batch=2, seqlen=5, heads=3, dim=40, seed=0):
    source = torch.Generator().manual_seed(seed)
    o = torch.randn(splits, batch, seqlen, heads, dim, generator=source)
    return o, 3 * torch.randn(splits, batch, heads, seqlen, generator=source)


def check(o, lse, **options):
    found, found_lse = combine(o, lse, backend="portable", **options)
    true, true_lse = combine_reference(o, lse, dtype=torch.float64)
    finite = true.isfinite()
    assert torch.equal(found.isfinite(), finite)
    assert_close_to_truth("o", found, true, None, floor=4e-3 if found.dtype == torch.float16 else 4e-6)
    assert_close_to_truth("lse", found_lse, true_lse, None, floor=4e-6)
    return found, found_lse


@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 8), (7, 2, 5, 3, 40), (2, 1, 3, 2, 256), (3, 1, 1, 5, 128)], ids=str)
def test_follows_the_truth(shape):
    check(*parts(*shape))


def test_parts_without_keys_weigh_nothing_whatever_they_hold():
    o, lse = parts()
    lse[1], o[1] = -INF, NAN
    lse[:, 0, 1], o[:, 0, :, 1] = -INF, INF
    found, found_lse = check(o, lse)
    assert (found[0, :, 1] == 0).all() and (found_lse[0, 1] == -INF).all()


def test_strides_and_given_output():
    o, lse = parts()
    wide = torch.full((2, 3, 10, 5, 80), NAN).permute(1, 0, 3, 2, 4)  # splits, batch, seqlen, heads, dim
    view = wide[..., 2:8:2, 1::2]
    view.copy_(o)
    lse_view = torch.full((3, 5, 2, 3), NAN).permute(0, 2, 3, 1)
    lse_view.copy_(lse)
    expected, expected_lse = check(o, lse)
    out = torch.full((3, 2, 40, 5), NAN).permute(1, 3, 0, 2)
    found, found_lse = combine(view, lse_view, out=out, backend="portable")
    assert found is out and torch.equal(out, expected) and torch.equal(found_lse, expected_lse)


def test_other_dtypes():
    o, lse = parts()
    assert check(o, lse, out_dtype=torch.float16)[0].dtype == torch.float16
    assert combine(o.double(), lse.double())[0].dtype == torch.float64
    assert combine(o[:, :0], lse[:, :0])[0].shape == (0, 5, 3, 40)
    nothing, nothing_lse = combine(o[:0], lse[:0], backend="portable")
    assert (nothing == 0).all() and (nothing_lse == -INF).all()


def test_attention_over_parts_of_the_keys_is_attention():
    source = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, n, 2, 16, generator=source) for n in (3, 20, 20))
    pieces = [attention_truth(q, k[:, s], v[:, s]) for s in (slice(0, 7), slice(7, 7), slice(7, 20))]
    o = torch.stack([o for o, _ in pieces]).float()
    lse = torch.stack([lse for _, lse in pieces]).float()
    found, found_lse = combine(o, lse)
    true, true_lse = attention_truth(q, k, v)
    torch.testing.assert_close(found.double(), true, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(found_lse.double(), true_lse, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda o, lse: (o[0], lse), "splits, batch, seqlen, heads, head_dim"),
        (lambda o, lse: (o, lse.transpose(2, 3)), r"\(3, 2, 3, 5\)"),
        (lambda o, lse: (o, lse.half()), "float32"),
        (lambda o, lse: (o.int(), lse), "float"),
        (lambda o, lse: (o, None), "torch.Tensor"),
        (lambda o, lse: (o, lse.to("meta")), "one device"),
    ],
    ids=["rank", "lse-shape", "lse-dtype", "integers", "none", "device"],
)
def test_errors(change, message):
    with pytest.raises(InvalidInputError, match=message):
        combine(*change(*parts()))


@pytest.mark.parametrize("backend", ["portable", "reference"])
def test_compilers_and_fake_tensors_see_one_op(backend):
    o, lse = parts()
    wanted = combine(o, lse, backend=backend)

    def merged(o, lse, out=None):
        return combine(o, lse, backend=backend, out=out)

    for found in (torch.compile(merged, backend="aot_eager", fullgraph=True)(o, lse), merged(o, lse)):
        assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
    out = torch.empty_like(wanted[0])
    torch.compile(merged, backend="aot_eager", fullgraph=True)(o, lse, out)
    assert torch.equal(out, wanted[0])
    with FakeTensorMode() as mode:
        made = merged(mode.from_tensor(o), mode.from_tensor(lse))
    assert [(x.shape, x.dtype) for x in made] == [(x.shape, x.dtype) for x in wanted]


def test_refusals():
    o, lse = parts()
    with pytest.raises(InvalidInputError, match="out must be"):
        combine(o, lse, out=o)
    with pytest.raises(InvalidInputError, match="torch.Tensor, got list"):
        combine(o, lse, out=[1])
    with pytest.raises(InvalidInputError, match="share memory"):
        combine(o, lse, out=o.new_zeros(o.shape[-1]).expand(o.shape[1:]))
    memory = torch.zeros(o.numel() + 8)
    within = memory[: o.numel()].view(o.shape).copy_(o)
    with pytest.raises(InvalidInputError, match="out and out_partial share memory"):
        combine(within, lse, out=memory[8 : 8 + o[0].numel()].view(o.shape[1:]))
    wanted = combine(o, lse)[0]
    assert torch.equal(combine(within, lse, out=within[0])[0], wanted), "one of the parts, element on element"
    with pytest.raises(UnsupportedError, match="no backward"):
        combine(o, lse, out=torch.zeros(o.shape[1:], requires_grad=True))
    with pytest.raises(InvalidInputError, match="out_dtype"):
        combine(o, lse, out_dtype=torch.int8)
    with pytest.raises(UnsupportedError, match="no backward"):
        combine(o.requires_grad_(), lse)
    for backend, message in (("hopper", "no combine kernel"), ("portable", "float64")):
        with pytest.raises(UnsupportedError, match=message):
            combine(o.detach().double(), lse, backend=backend)
