"""The quantiser and the Hadamard transform: bit for bit against plain torch, and what they promise about odd values."""

from __future__ import annotations

import pytest
import torch

from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.flash_attention3.fp8 import fp8_block_quantize, hadamard_transform
from gpu_accel.flash_attention3.fp8_quantize import FORMATS
from gpu_accel.flash_attention3.hadamard import hadamard_block, hadamard_reference, random_signs
from gpu_accel.flash_attention3.reference_fp8 import dequantize, quantize_reference, transpose_values
from gpu_accel.flash_attention3.rotary import apply_rotary

INF, NAN = float("inf"), float("nan")


def wide(shape, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    """Random numbers over many orders of magnitude, so that normal, subnormal and zero results all occur."""
    source = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=source) * torch.exp(3 * torch.randn(shape, generator=source))).to(dtype)


def assert_bits(x: torch.Tensor, device: str, **options) -> tuple[torch.Tensor, torch.Tensor]:
    values, scales = fp8_block_quantize(x.to(device), backend="portable", **options)
    twin, twin_scales = quantize_reference(x.to(device), **options)
    assert torch.equal(scales, twin_scales)
    assert values.shape == twin.shape and values.is_contiguous()
    different = (values.view(torch.uint8) != twin.view(torch.uint8)).sum().item()
    assert different == 0, f"{different} of {values.numel()} bytes differ"
    return values.cpu(), scales.cpu()


SHAPES = {
    "one-block": (1, 2, 128, 64),
    "last-block-shorter": (2, 1, 200, 64),
    "one-row": (1, 1, 1, 128),
    "dim-no-power-of-two": (1, 2, 77, 80),
    "two-dimensional": (130, 96),
    "five-dimensional": (2, 1, 2, 33, 32),
}


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
@pytest.mark.parametrize("hadamard", [False, True], ids=["plain", "hadamard"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_bits_equal_the_twin(shape, hadamard, dtype, device):
    assert_bits(wide(shape, dtype=torch.bfloat16), device, dtype=dtype, hadamard=hadamard, seed=3)


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 48, "transpose": True, "hadamard": True},
        {"block_size": 16},
        {"block_size": 7},
        {"block_size": 1024},
        {"scale_per_block": False, "hadamard": True},
        {"scale_per_block": False, "transpose": True},
    ],
    ids=lambda o: "-".join(f"{k}={v}" for k, v in o.items()),
)
def test_bits_equal_the_twin_for_other_blocks(options, device):
    assert_bits(wide((1, 2, 150, 80), dtype=torch.float16), device, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"hadamard": True, "seed": 3},
        {"rotary_interleaved": False, "hadamard": True},
        {"rotary_interleaved": False, "scale_per_block": False, "dtype": "e5m2"},
        {"block_size": 1024, "transpose": True},  # read in pieces, twice
    ],
    ids=lambda o: "-".join(f"{k}={v}" for k, v in o.items()),
)
def test_rotary_embedding_on_the_way(options, device):
    """The bits of turning first and quantising then; 48 of 80 dimensions turn."""
    x = wide((1, 2, 150, 80), dtype=torch.float16) / 16  # the interpreter's cast to bfloat16 does not round
    angle = torch.randn(160, 24, generator=torch.Generator().manual_seed(1)).to(device) * 3
    cos, sin = angle.cos(), angle.sin()
    values, scales = assert_bits(x, device, rotary_cos=cos, rotary_sin=sin, **options)
    how = options.get("rotary_interleaved", True)
    rest = {k: v for k, v in options.items() if k != "rotary_interleaved"}
    rows = x.to(device)[0].transpose(0, 1)
    turned = apply_rotary(rows, cos, sin, torch.arange(150, device=device), interleaved=how).transpose(0, 1)[None]
    twin, twin_scales = quantize_reference(turned, **rest)
    assert torch.equal(scales, twin_scales.cpu())
    assert torch.equal(values.view(torch.uint8), twin.view(torch.uint8).cpu())


def test_wrong_rotary_tables():
    x, cos = torch.zeros(2, 9, 16), torch.ones(9, 8)
    for given in (
        (cos, None), (cos, cos.half()), (cos[:8], cos[:8]), (torch.ones(9, 9), torch.ones(9, 9)), (cos[:, :0],) * 2,
        (cos.double(),) * 2, (cos[0], cos[0]), (1, 2),
    ):  # fmt: skip
        with pytest.raises(InvalidInputError, match="rotary_"):
            fp8_block_quantize(x, rotary_cos=given[0], rotary_sin=given[1])
    for given, name in (((cos.to_sparse(), cos), "rotary_cos"), ((cos, cos.to_sparse_csr()), "rotary_sin")):
        with pytest.raises(UnsupportedError, match=rf"{name} has layout .*{name}.to_dense\(\)"):
            fp8_block_quantize(x, rotary_cos=given[0], rotary_sin=given[1])


def test_a_block_of_many_rows_is_read_in_pieces(device):
    # 4096 x 32 values do not fit one tile, so the kernel passes over the rows twice
    assert_bits(wide((1, 1, 4200, 32)), device, block_size=4096, hadamard=True)


def test_every_fp8_number_and_every_tie_rounds_as_torch_does(device):
    for name, fmt in FORMATS.items():
        numbers = torch.arange(256, dtype=torch.uint8).view(fmt.dtype).float()
        numbers = numbers[torch.isfinite(numbers)].unique()
        between = (numbers[1:] + numbers[:-1]) / 2
        nudged = [torch.nextafter(between, torch.full_like(between, s)) for s in (-INF, INF)]
        x = torch.cat([numbers, between, *nudged])[:, None]  # the largest number is there: scale 1
        values, scales = assert_bits(x, device, block_size=len(x), dtype=name)
        assert scales.item() == 1.0
        assert torch.equal(values[: len(numbers), 0].float(), numbers)


def test_policy_for_zeros_inf_nan_and_tiny_values(device):
    x = torch.randn(6 * 32, 32, generator=torch.Generator().manual_seed(0))
    x[:32] = 0.0
    x[32 + 5, 3] = INF
    x[64 + 7, 4] = -NAN
    x[96:128] *= 1e-42  # subnormal in float32
    x[128:160] = NAN
    x[160:192] *= 1e37
    values, scales = assert_bits(x, device, block_size=32)
    assert torch.isfinite(scales).all() and (scales >= 2.0**-126).all()
    assert scales[0] == 1.0 and (values[:32].float() == 0).all()
    # one bad value is visible and harms nobody else
    for block, row, column in ((1, 37, 3), (2, 71, 4)):
        rows = slice(32 * block, 32 * block + 32)
        bad = ~torch.isfinite(values[rows].float())
        assert bad.sum() == 1 and bad[row % 32, column]
        clean = x[rows].clone()
        clean[row % 32, column] = 0.0
        assert scales[block] == clean.abs().max() / 448.0
    assert torch.isnan(values[128:160].float()).all() and scales[4] == 1.0
    assert torch.isfinite(values[160:].float()).all()


def test_infinity_becomes_nan_in_both_formats(device):
    x = torch.ones(16, 16)
    x[2, 3] = -INF
    for name in FORMATS:
        values, scales = assert_bits(x, device, dtype=name, scale_per_block=False)
        assert torch.isnan(values[2, 3].float()) and torch.isnan(values.float()).sum() == 1
        assert scales.shape == () and scales > 0


def test_error_is_within_half_a_step_of_the_format(device):
    x = wide((1, 1, 256, 64))
    values, scales = fp8_block_quantize(x.to(device), backend="portable")
    back = dequantize(values, scales, 128).cpu()
    steps = scales.repeat_interleave(128)[:256].cpu()[None, None, :, None] * 2.0**-9  # subnormal spacing
    assert ((back - x).abs() <= torch.maximum(x.abs() * 2.0**-4, steps / 2) * 1.0001).all()


@pytest.mark.parametrize("kind", ["bshd-view", "every-second-row", "broadcast", "offset"])
def test_strides_do_not_matter(kind, device):
    base = wide((2, 70, 3, 32), dtype=torch.bfloat16).to(device)
    if kind == "bshd-view":
        x = base.transpose(1, 2)
    elif kind == "every-second-row":
        x = base[:, ::2].transpose(1, 2)
    elif kind == "broadcast":
        x = base[:1, :, :1].transpose(1, 2).expand(2, 3, 70, 32)
    else:
        x = base.flatten()[32 + 1 :][: 70 * 32].view(1, 1, 70, 32)
    for transpose in (False, True):
        a = fp8_block_quantize(x, backend="portable", transpose=transpose, hadamard=True)
        b = fp8_block_quantize(x.contiguous(), backend="portable", transpose=transpose, hadamard=True)
        assert torch.equal(a[0].view(torch.uint8), b[0].view(torch.uint8)) and torch.equal(a[1], b[1])


def test_rows_outside_the_tensor_are_never_used(device):
    buffer = torch.full((1, 1, 200, 64), NAN)
    buffer[..., :77, :48] = wide((77, 48))
    x = buffer[..., :77, :48]
    values, scales = assert_bits(x, device, transpose=True, block_size=64, hadamard=True)
    assert values.shape == (1, 1, 48, 80) and (values[..., 77:].view(torch.uint8) == 0).all()
    assert torch.isfinite(values.float()).all() and torch.isfinite(scales).all()


def test_transposed_values_are_the_same_values(device):
    x = wide((2, 2, 100, 64)).to(device)
    plain, s1 = fp8_block_quantize(x, backend="portable")
    transposed, s2 = fp8_block_quantize(x, backend="portable", transpose=True)
    assert torch.equal(s1, s2)
    assert torch.equal(transpose_values(plain).view(torch.uint8), transposed.view(torch.uint8))


def test_empty_tensors(device):
    values, scales = fp8_block_quantize(torch.empty(2, 3, 0, 64, device=device), backend="portable")
    assert values.shape == (2, 3, 0, 64) and scales.shape == (2, 3, 0)
    values, scales = fp8_block_quantize(torch.empty(0, 3, 5, 64, device=device), scale_per_block=False)
    assert values.shape == (0, 3, 5, 64) and scales.item() == 1.0


@pytest.mark.parametrize("backend", ["portable", "reference"])
@pytest.mark.parametrize("shape", [(1, 2, 0, 8), (0, 2, 3, 8), (0, 8), (2, 0, 0, 8)], ids=str)
def test_empty_tensors_with_every_option(shape, backend, device):
    x, table = torch.empty(shape, device=device), torch.ones(3, 2, device=device)
    for options in ({"rotary_cos": table, "rotary_sin": table}, {"hadamard": True}, {"scale_per_block": False}):
        values, scales = fp8_block_quantize(x, block_size=16, transpose=True, backend=backend, **options)
        assert values.shape == (*shape[:-2], 8, -(-shape[-2] // 16) * 16) and bool((scales == 1).all())
        assert scales.shape == (() if "scale_per_block" in options else (*shape[:-2], -(-shape[-2] // 16)))


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256])
def test_hadamard_is_orthogonal_and_undone_by_its_inverse(dim, device):
    q, k = (torch.randn(2, 40, dim, generator=torch.Generator().manual_seed(i)).to(device) for i in (0, 1))
    options = {"seed": 5, "backend": "portable"}
    q2, k2 = hadamard_transform(q, **options), hadamard_transform(k, **options)
    assert torch.equal(q2, hadamard_reference(q, seed=5))
    scores = q.double() @ k.double().mT
    assert (q2.double() @ k2.double().mT - scores).abs().max() < 1e-5 * scores.abs().max()
    assert (hadamard_transform(q2, inverse=True, **options) - q).abs().max() < 1e-5
    matrix = hadamard_reference(torch.eye(dim), seed=5, dtype=torch.float64)
    assert (matrix @ matrix.mT - torch.eye(dim)).abs().max() < 1e-12
    block = hadamard_block(dim)
    size = matrix.abs().round(decimals=9).unique()  # zeros outside the diagonal blocks, one size inside them
    assert size.tolist() == pytest.approx(([0.0] if block < dim else []) + [block**-0.5])


def test_hadamard_spreads_an_outlier(device):
    x = torch.zeros(1, 128)
    x[0, 17] = 100.0
    assert hadamard_transform(x.to(device)).abs().max().item() == pytest.approx(100.0 / 128**0.5, rel=1e-6)


def test_hadamard_seeds_differ_and_repeat():
    assert torch.equal(random_signs(128, 1, torch.device("cpu")), random_signs(128, 1, torch.device("cpu")))
    assert not torch.equal(random_signs(128, 1, torch.device("cpu")), random_signs(128, 2, torch.device("cpu")))
    assert set(random_signs(64, 0, torch.device("cpu")).tolist()) == {-1.0, 1.0}


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**32 + 7, 2**63 - 1, -1])
def test_hadamard_signs_are_those_of_torch(seed):
    bits = torch.randint(0, 2, (700,), generator=torch.Generator().manual_seed(seed))
    assert random_signs(700, seed, torch.device("cpu")).tolist() == (1 - 2 * bits).tolist()


@pytest.mark.parametrize("backend", ["portable", "reference"])
def test_hadamard_keeps_nothing_of_the_callers_mode(backend, device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    seed = 1000 if backend == "portable" else 2000  # seeds that nothing else has used, so that nothing is cached
    x = torch.randn(4, 32, device=device)
    with FakeTensorMode():
        assert hadamard_transform(torch.empty(4, 32), seed=seed, backend=backend).shape == (4, 32)
    hadamard_transform(x, seed=seed, backend=backend)
    with torch.inference_mode():
        hadamard_transform(x, seed=seed + 1, backend=backend)
    leaf = x.clone().requires_grad_()
    hadamard_transform(leaf, seed=seed + 1, backend=backend).sum().backward()
    before = torch.get_default_device()
    torch.set_default_device("meta")
    try:
        y = hadamard_transform(x, seed=seed + 2, backend=backend)
    finally:
        torch.set_default_device(before if before.type != "cpu" else None)
    assert y.device == x.device
    assert torch.allclose(hadamard_transform(y, seed=seed + 2, inverse=True, backend=backend), x, atol=1e-5)


@pytest.mark.parametrize("backend", ["portable", "reference"])
def test_hadamard_compiles_into_one_graph(backend, device):
    x = torch.randn(4, 32, device=device)
    for dynamic in (False, True):
        compiled = torch.compile(
            lambda t: hadamard_transform(t, seed=3001, backend=backend), backend="eager", fullgraph=True,
            dynamic=dynamic,
        )  # fmt: skip
        assert torch.equal(compiled(x), hadamard_transform(x, seed=3001, backend=backend))


def test_hadamard_gradient_is_the_inverse(device):
    x = torch.randn(3, 32, device=device, requires_grad=True)
    g = torch.randn(3, 32, device=device)
    hadamard_transform(x, seed=2).backward(g)
    assert torch.equal(x.grad, hadamard_transform(g, seed=2, inverse=True))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "fp8"}, "'e4m3' or 'e5m2'"),
        ({"block_size": 0}, "positive number of rows"),
        ({"block_size": 100, "transpose": True}, "multiple of 16"),
        ({"tensor": torch.zeros(4)}, "seqlen, head_dim"),
        ({"tensor": torch.zeros(4, 4, dtype=torch.float64)}, "float64"),
        ({"tensor": torch.zeros(4, 8).T}, "stride 1"),
        ({"tensor": [1.0]}, "torch.Tensor"),
        ({"backend": "cuda"}, "auto, hopper, portable, reference"),
    ],
)
def test_wrong_arguments_are_named(change, words):
    with pytest.raises(InvalidInputError, match=words):
        fp8_block_quantize(**{"tensor": torch.zeros(4, 16), **change})


def test_the_hopper_kernel_is_refused_by_name_on_a_cpu():
    with pytest.raises(UnsupportedError, match=r"backend='hopper' needs .* 9.0 .*backend='portable'"):
        fp8_block_quantize(torch.zeros(4, 64), hadamard=True, backend="hopper")


def test_gradients_are_refused_not_dropped(device):
    x = torch.randn(4, 16, device=device, requires_grad=True)
    with pytest.raises(UnsupportedError, match="forward only.*tensor requires a gradient"):
        fp8_block_quantize(x)
    with torch.no_grad():
        fp8_block_quantize(x)
    fixed, table = torch.ones(4, 8, device=device), torch.ones(4, 8, device=device, requires_grad=True)
    for backend in ("portable", "reference"):
        for name in ("rotary_cos", "rotary_sin"):
            tables = {"rotary_cos": fixed, "rotary_sin": fixed, name: table}
            with pytest.raises(UnsupportedError, match=f"{name} requires a gradient"):
                fp8_block_quantize(x.detach(), backend=backend, **tables)


def test_custom_ops_are_well_formed(device):
    x = torch.randn(2, 20, 32, device=device)
    torch.library.opcheck(torch.ops.gpu_accel.fp8_block_quantize.default, (x, 16, True, "e4m3", True, 0, True))
    torch.library.opcheck(torch.ops.gpu_accel.fp8_block_quantize.default, (x, 16, False, "e5m2", False, 0, False))
    y = torch.randn(2, 20, 32, device=device, requires_grad=True)
    torch.library.opcheck(torch.ops.gpu_accel.hadamard_transform.default, (y, 0, False))


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the compiled form")
def test_the_butterfly_of_the_gpu_in_the_interpreter(monkeypatch):
    """The interpreter takes split and join for speed; the form that is compiled must give the same bits."""
    import triton.language as tl

    from gpu_accel.flash_attention3 import hadamard

    monkeypatch.setattr(hadamard, "_INTERPRET", tl.constexpr(False))
    x = wide((3, 16))
    assert torch.equal(hadamard_transform(x, seed=1, backend="portable"), hadamard_reference(x, seed=1))


@pytest.mark.parametrize("backend", ["portable", "reference"])
@pytest.mark.parametrize("per_block", [True, False])
@pytest.mark.parametrize("transpose", [False, True])
def test_a_block_longer_than_the_tensor(backend, per_block, transpose, device):
    x = torch.randn(2, 37, 32, device=device)
    expected = fp8_block_quantize(x, 48, per_block, transpose=transpose, backend=backend)
    for block_size in (2**40, 2**80):  # the time would show rows that do not exist
        got = fp8_block_quantize(x, block_size, per_block, transpose=transpose, backend=backend)
        assert torch.equal(got[0].view(torch.uint8), expected[0].view(torch.uint8))
        assert torch.equal(got[1], expected[1])
