"""tk.gemm of eight-bit floats on a CPU: every layout and scale against float64, and what is refused."""

from __future__ import annotations

import pytest
import torch

import gpu_accel.thunderkittens as tk
from gpu_accel.errors import GpuAccelError, InvalidInputError, UnsupportedError
from gpu_accel.testing import assert_close_to_truth
from gpu_accel.thunderkittens.gemm_api import activated
from gpu_accel.thunderkittens.gemm_fp8 import gemm_op
from gpu_accel.transformer_engine import gemm as gemm_module
from gpu_accel.transformer_engine import quantizer
from tests.thunderkittens.helpers import randn

E4M3, E5M2, FP32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float32
# of a and b: whether the rows of a matrix are columns of memory
LAYOUTS = {"nt": (False, True), "nn": (False, False), "tn": (True, False), "tt": (True, True)}


def codes(rows, cols, dtype, turned, seed, device="cpu"):
    x = randn(*((cols, rows) if turned else (rows, cols)), seed=seed, device=device).to(dtype)
    return x.t() if turned else x


def right(a, b, scale_a=1.0, scale_b=1.0, bias=0.0, activation="none", dtype=torch.float64):
    wide = (a.to(dtype) * scale_a) @ (b.to(dtype) * scale_b) + bias
    return activated(wide, activation)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3)], ids=["e4m3", "e5m2-e4m3"])
@pytest.mark.parametrize("backend", ["portable", "reference", "auto"])
def test_layouts(backend, dtypes, layout, device):
    """Odd sizes, a scale for each row and column, an epilogue."""
    m, k, n = 21, 75, 34
    turned = LAYOUTS[layout]
    a, b = codes(m, k, dtypes[0], turned[0], 1, device), codes(k, n, dtypes[1], turned[1], 2, device)
    scale_a, scale_b = randn(m, seed=3, device=device).abs(), randn(n, seed=4, device=device).abs()
    bias = randn(n, seed=5, device=device)
    out = tk.gemm(a, b, bias=bias, activation="silu", scale_a=scale_a, scale_b=scale_b, out_dtype=FP32, backend=backend)
    given = (a, b, scale_a[:, None], scale_b, bias, "silu")
    assert_close_to_truth("out", out, right(*given), right(*given, dtype=FP32))


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_infinity_and_nan_are_as_in_torch(dtype, device):
    special = torch.tensor([0x7C, 0x7D, 0x7E, 0x7F, 0xFC, 0xFF], dtype=torch.uint8, device=device)
    a = torch.ones(6, 32, device=device).to(dtype)
    a.view(torch.uint8)[:, 0] = special
    b = torch.ones(32, 16, device=device).to(E4M3)
    wanted = (a.float() @ b.float()).expand(6, 16)
    for left, right_, out in ((a, b, wanted), (b.t(), a.t(), wanted.t())):
        for backend in ("portable", "reference"):
            found = tk.gemm(left, right_, out_dtype=FP32, backend=backend)
            torch.testing.assert_close(found, out, rtol=0, atol=0, equal_nan=True)


def test_one_scale_leading_dimensions_and_the_default_dtype(device):
    a, b = codes(2 * 3 * 4, 32, E4M3, False, 1, device).view(2, 3, 4, 32), codes(32, 16, E4M3, True, 2, device)
    out = tk.gemm(a, b, scale_a=torch.tensor(0.5, device=device))
    assert out.shape == (2, 3, 4, 16) and out.dtype == torch.bfloat16
    truth = right(a, b, 0.5)
    assert_close_to_truth("out", out, truth, truth.float().bfloat16())
    rows = randn(2, 3, 4, seed=3, device=device).abs()
    truth = right(a, b, rows[..., None])
    assert_close_to_truth("rows", tk.gemm(a, b, scale_a=rows), truth, truth.float().bfloat16())
    assert tk.gemm(a[0, 0, 0], b).shape == (16,)


@pytest.mark.parametrize("shape", [(0, 8, 8), (8, 0, 8), (4, 8, 0)], ids=str)
def test_sizes_of_zero(shape):
    m, n, k = shape
    a, b = torch.zeros(m, k).to(E4M3), torch.zeros(k, n).to(E4M3)
    assert torch.equal(tk.gemm(a, b, bias=torch.ones(n)), torch.ones(m, n).bfloat16())


def test_custom_op_and_compile(device):
    a, b = codes(5, 32, E4M3, False, 1, device), codes(32, 6, E4M3, True, 2, device)
    scale = torch.tensor(0.5, device=device)
    # test_schema adds numbers up, which torch has not for eight bits
    given = (a, b, None, scale, None, "silu", FP32, "reference")
    torch.library.opcheck(gemm_op, given, test_utils=("test_faketensor", "test_autograd_registration"))
    compiled = torch.compile(lambda a, b, s: tk.gemm(a, b, scale_a=s), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(a, b, scale), tk.gemm(a, b, scale_a=scale))


def test_what_is_copied_is_said():
    a, b = torch.zeros(8, 16).to(E4M3), torch.zeros(16, 8).to(E4M3)
    assert "b.t() copied first" in tk.explain_gemm(a, b)
    assert "copied first" not in tk.explain_gemm(a, torch.zeros(8, 16).to(E4M3).t())
    assert tk.explain_gemm(a, b, backend="reference").startswith("reference")


@pytest.mark.parametrize("interpreted", [True, False])
@pytest.mark.parametrize("backend", ["auto", "hopper", "portable", "reference"])
def test_explained_is_what_happens(backend, interpreted, monkeypatch):
    """Also that a backend is refused, and the reference where nothing else runs."""
    for module in (gemm_module, quantizer):
        monkeypatch.setattr(module, "INTERPRET", interpreted)
    launched = []
    monkeypatch.setattr(gemm_module, "scaled_mm_op", lambda *given: launched.append(1) or torch.zeros(4, 2))
    outcomes = []
    for call in (tk.gemm, tk.explain_gemm):
        try:
            outcomes.append(call(A, B, scale_a=torch.ones(4), backend=backend))
        except GpuAccelError as error:
            outcomes.append(error)
    found, said = outcomes
    if isinstance(found, GpuAccelError):
        assert type(said) is type(found) and str(said) == str(found)
    else:
        assert ("plain Triton" in said) == bool(launched) and ("float64" in said) == (not launched)
    with pytest.raises(InvalidInputError, match="row of a"):
        tk.explain_gemm(A, B, scale_a=torch.ones(3))


A, B = torch.zeros(4, 8).to(E4M3), torch.zeros(8, 2).to(E4M3)
WIDE, ONE = torch.zeros(8, 2), torch.ones(())


@pytest.mark.parametrize(("change", "error", "match"), [
    (dict(b=WIDE), InvalidInputError, "both be float8"),
    (dict(b=B[:4]), InvalidInputError, r"\(K, N\)"),
    (dict(scale_a=torch.ones(2)), InvalidInputError, "row of a"),
    (dict(scale_b=torch.ones(3)), InvalidInputError, "column of b"),
    (dict(scale_b=ONE.double()), InvalidInputError, "float32"),
    (dict(scale_a=1.0), InvalidInputError, "float32 tensor"),
    (dict(out_dtype=E4M3), InvalidInputError, "scaled_mm_fp8"),
    (dict(backend="cublas"), InvalidInputError, "choose one of"),
    (dict(activation="tanh"), InvalidInputError, "choose one of"),
    (dict(tile_size=8), UnsupportedError, "16"),
    (dict(backend="hopper"), UnsupportedError, "hopper"),
    (dict(bias=torch.zeros(2, requires_grad=True)), UnsupportedError, "gradient"),
    (dict(scale_a=torch.ones((), requires_grad=True)), UnsupportedError, "gradient"),
    (dict(a=WIDE.t(), b=WIDE, scale_a=ONE), InvalidInputError, "are for float8"),
])  # fmt: skip
def test_errors(change, error, match):
    with pytest.raises(error, match=match):
        tk.gemm(**dict(a=A, b=B) | change)
