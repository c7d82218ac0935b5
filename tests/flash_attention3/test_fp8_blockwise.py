"""Softmax over blocks of a row, forward and backward, against torch in float64."""

from __future__ import annotations

import pytest
import torch

from gpu_accel.errors import InvalidInputError
from gpu_accel.flash_attention3.blockwise import blockwise_softmax, softmax_reference

INF = float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("shape", "block_size"),
    [
        ((3, 5, 100), 4096),  # one block
        ((7, 100), 32),  # several, the last one shorter
        ((3, 70), 30),  # a block that is no power of two
        ((2, 2, 3, 4, 9), 4),
        ((130,), 16),
        ((5, 1), 1),
    ],
)
def test_forward_and_backward(shape, block_size, dtype, device):
    source = torch.Generator().manual_seed(0)
    x = (4 * torch.randn(shape, generator=source)).to(dtype)
    g = torch.randn(shape, generator=source).to(dtype)
    a = x.clone().to(device).requires_grad_()
    y = blockwise_softmax(a, block_size, backend="portable")
    y.backward(g.to(device))
    b = x.to(torch.float64, copy=True).requires_grad_()
    truth = torch.softmax(b, -1)
    truth.backward(g.double())
    eps = torch.finfo(dtype).eps
    assert y.dtype == dtype and y.is_contiguous()
    assert (y.cpu().double() - truth).abs().max() <= 0.51 * eps + 3e-7
    # dx = y (g - sum g y) is computed from the rounded y, as torch does
    assert (a.grad.cpu().double() - b.grad).abs().max() <= 4 * eps * g.abs().max() + 3e-7


def test_online_maximum_is_rescaled(device):
    """Growing rows: each block has a new maximum; the naive sum of exp would overflow."""
    x = torch.arange(200, dtype=torch.float32, device=device) * 10
    y = blockwise_softmax(x, 16, backend="portable")
    assert (y.cpu() - torch.softmax(x.cpu().double(), -1)).abs().max() < 1e-6
    assert (blockwise_softmax(x.flip(0), 16).flip(0).cpu() - y.cpu()).abs().max() < 1e-6


@pytest.mark.parametrize("block_size", [16, 4096])
def test_masked_rows_and_bad_values(block_size, device):
    x = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    x[0] = -INF
    x[1, :40] = -INF  # whole blocks that see nothing
    x[2, 10:] = -INF
    x[3, 7] = INF
    x[4, 33] = float("nan")
    a = x.clone().to(device).requires_grad_()
    y = blockwise_softmax(a, block_size, backend="portable")
    expected = torch.softmax(x.double(), -1)
    expected[0] = 0.0
    out = y.detach().cpu()
    assert torch.equal(torch.isnan(out).all(-1), torch.tensor([False, False, False, True, True, False]))
    good = [0, 1, 2, 5]
    assert (out[good] - expected[good]).abs().max() < 1e-6 and (out[0] == 0).all()
    y[good].square().sum().backward()
    assert (a.grad[0] == 0).all() and torch.isfinite(a.grad[good]).all()


def test_strides(device):
    x = torch.randn(4, 40, 30, device=device)
    for view in (x.transpose(1, 2), x[:, ::2], x[..., ::3], x[:1].expand(4, 40, 30), x.permute(2, 0, 1)):
        y = blockwise_softmax(view, 16, backend="portable")
        assert torch.equal(y, blockwise_softmax(view.contiguous(), 16, backend="portable"))
    leaf = x.clone().requires_grad_()
    blockwise_softmax(leaf, 16).sum().backward()  # a gradient with stride 0
    assert leaf.grad.abs().max() < 1e-6


def test_reference_and_empty(device):
    x = torch.randn(3, 20, device=device)
    assert torch.equal(blockwise_softmax(x, backend="reference"), softmax_reference(x))
    assert (blockwise_softmax(x) - softmax_reference(x)).abs().max() < 1e-6
    for shape in ((0, 5), (5, 0), (2, 0, 3)):
        assert blockwise_softmax(torch.empty(shape, device=device)).shape == shape


def test_op_is_well_formed_and_compiles(device):
    x = torch.randn(3, 20, device=device, requires_grad=True)
    torch.library.opcheck(torch.ops.gpu_accel.blockwise_softmax.default, (x, 16))
    compiled = torch.compile(lambda t: blockwise_softmax(t, 16), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), blockwise_softmax(x, 16))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((torch.zeros(()),), "at least one dimension"),
        ((torch.zeros(3, dtype=torch.float64),), "float64"),
        ((torch.zeros(3), 0), "block_size"),
        ((torch.zeros(3), 1 << 20), "block_size"),
    ],
)
def test_wrong_arguments(arguments, words):
    with pytest.raises(InvalidInputError, match=words):
        blockwise_softmax(*arguments)
