"""Matrix products on a GPU against float64: every layout, epilogue, tile and way to split the work."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gpu_accel.errors import UnsupportedError
from gpu_accel.testing import assert_close_to_truth, generator
from gpu_accel.thunderkittens import gemm_hopper, gemm_skinny
from gpu_accel.thunderkittens.gemm_api import explain_gemm, gemm, gemm_reference
from gpu_accel.thunderkittens.gemm_hopper import GemmConfig

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an H100 or H200"
)


def randn(rows: int, cols: int, seed: int, dtype=BF16, transposed: bool = False) -> torch.Tensor:
    shape = (cols, rows) if transposed else (rows, cols)
    x = torch.randn(*shape, generator=generator(seed, "cuda"), device="cuda").to(dtype)
    return x.t() if transposed else x


def judge(out, a, b, bias=None, activation="none"):
    truth = gemm_reference(a.double(), b.double(), bias=bias, activation=activation)
    plain = a @ b if bias is None else a @ b + bias
    ruler = gemm_reference(plain.float(), torch.eye(plain.shape[1], device="cuda"), activation=activation)
    assert_close_to_truth("out", out, truth, ruler.to(out.dtype))


LAYOUTS = {"nt": (False, True), "nn": (False, False), "tn": (True, False), "tt": (True, True)}
EPILOGUES = {
    "plain": dict(),
    "bias-gelu": dict(bias=True, activation="gelu"),
    "silu-fp32": dict(activation="silu", out_dtype=FP32),
    "bias-relu-fp16": dict(bias=True, activation="relu", out_dtype=FP16),
    "gelu-tanh": dict(activation="gelu_tanh"),
}


@hopper
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_layouts(layout, dtype):
    m, n, k = 392, 1032, 520  # no side is a multiple of a tile
    a, b = (randn(*s, seed, dtype, t) for s, seed, t in zip(((m, k), (k, n)), (1, 2), LAYOUTS[layout], strict=True))
    judge(gemm_hopper.gemm(a, b), a, b)


@hopper
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("rows", [3, 300])
def test_epilogues(epilogue, rows):
    options = dict(EPILOGUES[epilogue])
    a, b = randn(rows, 264, 1), randn(264, 1000, 2, transposed=True)
    options["bias"] = randn(1, 1000, 3)[0] if options.pop("bias", False) else None
    out = gemm(a, b, backend="hopper", **options)
    assert out.dtype == options.get("out_dtype", BF16)
    judge(out, a, b, options["bias"], options.get("activation", "none"))


@hopper
@pytest.mark.parametrize(
    "config",
    [
        GemmConfig(group=1),
        GemmConfig(stages=3, chunks=1),
        GemmConfig(bn=128, stages=6, chunks=1),
    ],
    ids=["group1", "stages3", "bn128"],
)
@pytest.mark.parametrize("k", [64, 128, 4104])
def test_configurations(config, k):
    a, b = randn(2500, k, 1), randn(k, 2056, 2, transposed=True)
    out = torch.full((2500, 2056), float("nan"), device="cuda", dtype=BF16)
    judge(gemm_hopper.gemm(a, b, config=config, out=out), a, b)


@hopper
@pytest.mark.parametrize("mnk", [(2500, 2560, 4104), (333, 1001, 8200)], ids=str)
def test_a_last_round_dealt_in_slices(mnk):
    m, n, k = mnk
    a, b, bias = randn(m, k, 1), randn(k, n, 2, transposed=True), randn(1, n, 3)[0]
    options = dict(activation="silu", config=GemmConfig(deal=True))
    out = gemm_hopper.gemm(a, b, bias, **options)
    judge(out, a, b, bias, "silu")
    assert torch.equal(out, gemm_hopper.gemm(a, b, bias, **options))  # whoever comes last


@hopper
@pytest.mark.parametrize("mnk", [(1, 8, 8), (128, 256, 64), (129, 257, 8), (5000, 1001, 1032)], ids=str)
def test_sizes(mnk):
    m, n, k = mnk
    a, b = randn(m, k, 1), randn(k, n, 2, transposed=True)
    judge(gemm_hopper.gemm(a, b), a, b)


@hopper
@pytest.mark.parametrize("m", [1, 16, 17, 64, 100, 200])
@pytest.mark.parametrize(("n", "k"), [(1, 8), (1000, 8200), (20001, 1032)])
def test_few_rows(m, n, k):
    a, b = randn(m, k, 1), randn(k, n, 2, transposed=True)
    judge(gemm_skinny.gemm(a, b), a, b)
    assert torch.equal(gemm_skinny.gemm(a, b), gemm_skinny.gemm(a, b))  # whoever comes last


@hopper
@pytest.mark.parametrize("m", [1, 64])
@pytest.mark.parametrize("halves", [1, 2])
@pytest.mark.parametrize(("sub", "box"), [(1, 64), (2, 64), (4, 64), (4, 32), (4, 16), (2, 16)])
def test_few_rows_in_every_box(sub, box, halves, m):
    a, b = randn(m, 8200, 1), randn(8200, 1000, 2, transposed=True)
    config = gemm_skinny.SkinnyConfig(halves=halves, sub=sub, box=box)
    judge(gemm_skinny.gemm(a, b, config=config), a, b)


@hopper
@pytest.mark.parametrize(("m", "halves", "sub"), [(1, 1, 4), (64, 1, 2), (200, 2, 2)])
@pytest.mark.parametrize(("n", "k"), [(1, 8), (1000, 8200), (20001, 1032), (8192, 4096)])
def test_few_rows_asked_for_early(n, k, m, halves, sub):
    """Slices before the partitions start, the bias before the slices: the same bits where the same pieces are dealt."""
    a, b, bias = randn(m, k, 1), randn(k, n, 2, transposed=True), randn(1, n, 3)[0]
    config = gemm_skinny.SkinnyConfig(halves=halves, sub=sub)
    outs = [gemm_skinny.gemm(a, b, bias, activation="gelu", config=replace(config, early=True)) for _ in range(2)]
    judge(outs[0], a, b, bias, "gelu")
    assert torch.equal(*outs)  # whoever comes last
    if n == 8192 and m <= 64:
        assert torch.equal(outs[0], gemm_skinny.gemm(a, b, bias, activation="gelu", config=config))


@hopper
def test_few_rows_with_b_as_it_is_stored():
    a, b, bias = randn(7, 1032, 1), randn(1032, 1000, 2), randn(1, 1000, 3)[0]
    judge(gemm_skinny.gemm(a, b, bias, activation="silu"), a, b, bias, "silu")


@hopper
def test_graphs_do_not_share_counters():
    a, b = randn(16, 4096, 1), randn(4096, 512, 2, transposed=True)
    want = gemm_skinny.gemm(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [gemm_skinny.gemm(a, b) for _ in range(3)]
    for _ in range(3):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(out, want) for out in outs)


@hopper
def test_offsets_beyond_two_to_the_31():
    m = (1 << 31) // 1024 + 200
    a = torch.zeros(m, 64, device="cuda", dtype=BF16)
    a[-70:] = randn(70, 64, 1)
    b = randn(64, 1024, 2, transposed=True)
    out = gemm_hopper.gemm(a, b)
    assert not out[:-70].any()
    judge(out[-70:], a[-70:], b)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("mnk", [(1, 1, 1), (37, 71, 131), (300, 257, 515)], ids=str)
def test_portable(mnk, dtype):
    m, n, k = mnk
    a, b, bias = randn(m, k, 1, dtype), randn(k, n, 2, dtype), randn(1, n, 3, dtype)[0]
    judge(gemm(a, b, bias=bias, activation="gelu", backend="portable"), a, b, bias, "gelu")


@hopper
def test_odd_rows_are_copied_or_refused_by_name():
    a, b = randn(64, 63, 1), randn(63, 64, 2)
    with pytest.raises(UnsupportedError, match="multiple of 16 bytes"):
        gemm(a, b, backend="hopper")
    assert "multiple of 16 bytes" in explain_gemm(a, b)
    assert explain_gemm(randn(512, 512, 1), randn(512, 8192, 2), backend="hopper").startswith("hopper")
    assert explain_gemm(randn(8, 512, 1), randn(512, 8192, 2), backend="hopper").startswith("skinny")
    assert "b is copied first" in explain_gemm(randn(512, 512, 1), randn(512, 8191, 2), backend="hopper")


@hopper
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mnk", [(301, 1003, 517), (2051, 2049, 1025)], ids=str)
def test_odd_sizes(mnk, layout):
    m, n, k = mnk
    a, b = (randn(*s, seed, BF16, t) for s, seed, t in zip(((m, k), (k, n)), (1, 2), LAYOUTS[layout], strict=True))
    judge(gemm(a, b, backend="hopper"), a, b)
    judge(gemm(a[1:, 1:], b[1:], backend="hopper"), a[1:, 1:], b[1:])


@hopper
def test_gradients_and_compile():
    a, b, bias = randn(264, 512, 1), randn(512, 1000, 2), randn(1, 1000, 3)[0]
    d = randn(264, 1000, 4)

    def gradients(function, *tensors):
        leaves = [x.clone().requires_grad_() for x in tensors]
        return torch.autograd.grad(function(*leaves), leaves, d.to(leaves[0].dtype))

    def product(backend):
        return lambda a, b, bias: gemm(a, b, bias=bias, activation="silu", backend=backend)

    truth = gradients(product("reference"), *(x.double() for x in (a, b, bias)))
    ruler = gradients(lambda a, b, bias: torch.nn.functional.silu(a @ b + bias), a, b, bias)
    for function in (product("hopper"), torch.compile(product("hopper"), fullgraph=True)):
        for name, *three in zip("ab", gradients(function, a, b, bias), truth, ruler, strict=False):
            assert_close_to_truth("d" + name, *three)
