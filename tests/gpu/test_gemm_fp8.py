"""FP8 products on a GPU against float64 on the same codes: every scaling and epilogue, and sums as exact as cuBLAS'."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import gpu_accel.thunderkittens as tk
from gpu_accel.testing import assert_close_to_truth, generator
from gpu_accel.thunderkittens import gemm_skinny
from gpu_accel.thunderkittens.gemm_api import activated
from gpu_accel.transformer_engine import hopper_gemm
from gpu_accel.transformer_engine.gemm import explain_mm, scaled_mm, scaled_mm_fp8
from gpu_accel.transformer_engine.gemm_grouped import (
    group_ends,
    group_room,
    group_rows,
    grouped_mm,
    grouped_mm_fp8,
    grouped_mm_reference,
    k_grouped_mm,
    k_grouped_mm_reference,
)
from gpu_accel.transformer_engine.hopper_gemm import Fp8GemmConfig
from gpu_accel.transformer_engine.quantizer import quantize
from gpu_accel.transformer_engine.reference_gemm import hopper_fp8_sum, scaled_mm_reference

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an H100 or H200"
)
PAIRS = [
    ("fp8", "fp8"),
    ("fp8_row", "fp8_row"),
    ("fp8_row", "fp8"),
    ("fp8_e5m2", "fp8"),
    ("fp8", "fp8_e5m2"),
    ("fp8_e5m2", "fp8_e5m2"),
    ("fp8_1x128", "fp8_128x128"),
    ("fp8_128x128", "fp8_128x128"),
    ("fp8_1x128", "fp8_1x128"),
    ("fp8_128x128", "fp8_1x128"),
]
SHAPES = [(3, 200, 272), (64, 8200, 1040), (300, 1000, 528), (2500, 2500, 531)]  # few rows, few tiles, wide tiles, odd


def operands(m, n, k, pair):
    a = torch.randn(m, k, generator=generator(1, "cuda"), device="cuda") * 2
    b = torch.randn(n, k, generator=generator(2, "cuda"), device="cuda") / 8
    return [quantize(x.bfloat16(), name) for x, name in zip((a, b), pair, strict=True)]


def floor_of(truth):
    """The tensor core keeps about 14 bits of a sum over 128 of K."""
    return 2.0**-11 * truth.abs().max().item()


@pytest.mark.parametrize("mnk", SHAPES, ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_against_float64(pair, mnk):
    m, n, k = mnk
    a, b = operands(m, n, k, pair)
    truth = scaled_mm_reference(a, b)
    yardstick = scaled_mm_reference(a, b, dtype=torch.float32, out_dtype=torch.float32)
    out = scaled_mm(a, b, out_dtype=torch.float32, backend="hopper")
    assert_close_to_truth("out", out, truth, yardstick, floor=floor_of(truth))


@pytest.mark.parametrize("m", [5, 300])
def test_bias_and_odd_columns(m):
    a, b = operands(m, 1001, 528, ("fp8_row", "fp8_row"))
    bias = torch.randn(1001, device="cuda", dtype=torch.bfloat16)
    truth = scaled_mm_reference(a, b, bias=bias)
    ruler = scaled_mm_reference(a, b, bias=bias, dtype=torch.float32, out_dtype=torch.bfloat16)
    assert_close_to_truth("out", scaled_mm(a, b, bias=bias, backend="hopper"), truth, ruler)


def test_sums_are_at_least_as_exact_as_cublas():
    """Positive numbers: with 14 bits all along, a sum over 16384 would lose its small terms."""
    codes = [torch.rand(256, 16384, device="cuda").to(torch.float8_e4m3fn) for _ in range(2)]
    one = torch.ones(1, device="cuda")
    truth = codes[0].double() @ codes[1].double().t()

    def error(out):
        return ((out.double() - truth).abs() / truth).max().item()

    mine = error(hopper_gemm.gemm(*codes, one, one, out_dtype=torch.float32))
    cublas = torch._scaled_mm(codes[0], codes[1].t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
    assert mine <= 1.05 * error(cublas) + 1e-6
    assert mine < 1e-3


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_sums_have_the_bits_of_the_model(element):
    codes = [
        (torch.randn(n, 1024, generator=generator(n, "cuda"), device="cuda") * 8).to(hopper_gemm.ELEMENTS[element])
        for n in (128, 256)
    ]
    one = torch.ones(1, device="cuda")
    out = hopper_gemm.gemm(*codes, one, one, out_dtype=torch.float32)
    assert torch.equal(out.double(), hopper_fp8_sum(*(x.float() for x in codes)))


CONFIGS = {
    "narrow": Fp8GemmConfig(parts=1, stages=6, group=8),
    "narrow-deal": Fp8GemmConfig(parts=1, stages=6, deal=True),
    "wide": Fp8GemmConfig(),
    "wide-group8": Fp8GemmConfig(group=8),
    "wide-deal": Fp8GemmConfig(deal=True),
    "wide-256": Fp8GemmConfig(every=2),
    "narrow-256": Fp8GemmConfig(parts=1, stages=6, every=2),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("pair", [("fp8", "fp8"), ("fp8_row", "fp8_row"), ("fp8_1x128", "fp8_128x128")], ids="-".join)
def test_configurations(name, pair):
    a, b = operands(2500, 1920, 4096, pair)  # whose last round is dealt, with both widths
    truth = scaled_mm_reference(a, b)
    yardstick = scaled_mm_reference(a, b, dtype=torch.float32, out_dtype=torch.bfloat16)
    blocks = dict(block_a=a.scheme.block, block_b=b.scheme.block)
    out = torch.full((2500, 1920), float("nan"), device="cuda", dtype=torch.bfloat16)
    hopper_gemm.gemm(a.codes, b.codes, a.scales, b.scales, **blocks, config=CONFIGS[name], out=out)
    assert_close_to_truth("out", out, truth, yardstick, floor=floor_of(truth))


@pytest.mark.parametrize("pair", [("fp8", "fp8"), ("fp8_row", "fp8_row"), ("fp8_1x128", "fp8_128x128")], ids="-".join)
@pytest.mark.parametrize("mnk", [(4096, 2112, 1024), (2000, 4601, 531)], ids=str)
def test_narrow_tiles_for_a_short_last_round(mnk, pair):
    """As they are chosen: 5 rounds of them for 3 of wide ones."""
    m, n, k = mnk
    assert hopper_gemm.fp8_gemm_config(m, n, lines_a=pair[0] == "fp8_1x128").parts == 1
    a, b = operands(m, n, k, pair)
    truth = scaled_mm_reference(a, b)
    yardstick = scaled_mm_reference(a, b, dtype=torch.float32, out_dtype=torch.bfloat16)
    for _ in range(2):
        assert_close_to_truth("out", scaled_mm(a, b, backend="hopper"), truth, yardstick, floor=floor_of(truth))


@pytest.mark.parametrize("mnk", [(4096, 2112, 7168), (2500, 1921, 4000)], ids=str)
@pytest.mark.parametrize("parts", [1, 2])
def test_a_last_round_is_dealt_with_scales_of_slices(parts, mnk):
    """The same bits at every launch; operands take turns, so that sums that the launch before left are not right."""
    m, n, k = mnk
    config = Fp8GemmConfig(parts=parts, stages=5 if parts == 1 else 4, group=8 if parts == 1 else 16, staged=True)
    a, b = operands(m, n, k, ("fp8_1x128", "fp8_128x128"))
    blocks = dict(block_a=a.scheme.block, block_b=b.scheme.block)
    given = [hopper_gemm._addressable(x.codes.view(torch.uint8)).view(x.codes.dtype) for x in (a, b)]
    scales = [a.scales, a.scales * 2]

    def call(turn: int, deal: bool) -> torch.Tensor:
        out = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
        how = replace(config, deal=deal)
        return hopper_gemm.gemm(*given, scales[turn], b.scales, **blocks, config=how, out=out)

    truth = scaled_mm_reference(a, b)
    yardstick = scaled_mm_reference(a, b, dtype=torch.float32, out_dtype=torch.bfloat16)
    outs = [call(i % 2, True) for i in range(20)]
    for turn, factor in enumerate((1.0, 2.0)):
        floor = factor * floor_of(truth)
        assert_close_to_truth("out", outs[turn], truth * factor, yardstick * factor, floor=floor)
    assert all(torch.equal(out, outs[i % 2]) for i, out in enumerate(outs))


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("m", [5, 300])
def test_activations(activation, m):
    a, b = operands(m, 1000, 528, ("fp8", "fp8_row"))
    bias = torch.randn(1000, device="cuda", dtype=torch.bfloat16)
    truth = activated(scaled_mm_reference(a, b, bias=bias), activation)
    wide = activated(scaled_mm_reference(a, b, bias=bias, dtype=torch.float32, out_dtype=torch.float32), activation)
    out = scaled_mm(a, b, bias=bias, activation=activation, backend="hopper")
    assert_close_to_truth("out", out, truth, wide.bfloat16(), floor=floor_of(truth))


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("mnk", [(5, 1001, 528), (300, 1008, 531), (2500, 2560, 528)], ids=str)
def test_results_in_fp8(mnk, element):
    """Codes are those of the float32 result; where sums differ in their last bits, a code may be the neighbour."""
    m, n, k = mnk
    a, b = operands(m, n, k, ("fp8", "fp8"))
    bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
    truth = torch.nn.functional.silu(scaled_mm_reference(a, b, bias=bias))
    scale = (truth.abs().amax() / 200).float()  # some results of e4m3 near its largest number
    amax = torch.zeros((), device="cuda")
    got = scaled_mm_fp8(a, b, scale, element=element, bias=bias, activation="silu", amax=amax, backend="hopper")
    assert got.scheme.element == element and tuple(got.shape) == (m, n)
    step = 2.0**-4 if element == "e4m3" else 2.0**-3  # half a unit in the last place, relatively
    smallest = (2.0**-10 if element == "e4m3" else 2.0**-17) * scale.item()
    error = (got.dequantize(torch.float64) - truth).abs()
    assert (error <= 1.01 * step * truth.abs() + smallest + floor_of(truth)).all()
    assert abs(amax.item() / truth.abs().amax().item() - 1) < 1e-3
    small = scaled_mm_fp8(a, b, scale / 100, element="e4m3", bias=bias, activation="silu", backend="hopper")
    assert small.dequantize(torch.float32).abs().amax() <= 448 * scale / 100 * 1.001  # saturates, no NaN


def test_a_dealt_tile_notes_whole_sums_only():
    """Operands of which any part of K sums up to more than the whole."""
    half = torch.rand(300, 4096, generator=generator(1, "cuda"), device="cuda")
    a = torch.cat([half, -half], 1).to(torch.float8_e4m3fn)
    b = torch.ones(520, 8192, device="cuda").to(torch.float8_e4m3fn)
    one, amax = torch.ones(1, device="cuda"), torch.zeros((), device="cuda")
    config = Fp8GemmConfig(parts=1, stages=6, deal=True)
    out = hopper_gemm.gemm(a, b, one, one, amax=amax, out_dtype=torch.float32, config=config)
    assert amax.item() == out.abs().amax().item() < 100


@pytest.mark.parametrize("pair", [("fp8_e5m2", "fp8"), ("fp8_1x128", "fp8_1x128")], ids="-".join)
@pytest.mark.parametrize("mnk", [(40, 200, 272), (2500, 2560, 528), (300, 1001, 531)], ids=str)
def test_added_to_a_gradient(mnk, pair):
    m, n, k = mnk
    a, b = operands(m, n, k, pair)
    before = torch.randn(m, n, device="cuda")
    truth = scaled_mm_reference(a, b) + before.double()
    ruler = scaled_mm_reference(a, b, dtype=torch.float32, out_dtype=torch.float32) + before
    out = before.clone()
    assert scaled_mm(a, b, accumulate_into=out, backend="hopper") is out
    assert_close_to_truth("out", out, truth, ruler, floor=floor_of(truth))


@pytest.mark.parametrize("pair", [("fp8", "fp8"), ("fp8_row", "fp8_row"), ("fp8_1x128", "fp8_128x128")], ids="-".join)
@pytest.mark.parametrize("nk", [(256, 528), (2560, 1024)], ids=str)
@pytest.mark.parametrize("backend", ["hopper", "portable"])
def test_grouped(pair, nk, backend):
    n, k = nk
    groups, _ = group_rows(torch.tensor([100, 0, 300, 129], device="cuda"))
    groups = torch.cat([groups, torch.full((128,), -1, device="cuda", dtype=torch.int32)])
    x = torch.randn(len(groups), k, generator=generator(1, "cuda"), device="cuda").bfloat16()
    w = torch.randn(4, n, k, generator=generator(2, "cuda"), device="cuda").bfloat16() / 8
    a, b = quantize(x, pair[0]), quantize(w, pair[1])
    truth = grouped_mm_reference(a, b, groups)
    yardstick = grouped_mm_reference(a, b, groups, dtype=torch.float32, out_dtype=torch.bfloat16)
    out = grouped_mm(a, b, groups, backend=backend)
    assert_close_to_truth("out", out, truth, yardstick, floor=floor_of(truth))
    assert not out[-128:].any()


@pytest.mark.parametrize("pair", [("fp8", "fp8"), ("fp8_row", "fp8_row"), ("fp8_1x128", "fp8_128x128")], ids="-".join)
@pytest.mark.parametrize("activation", ["none", "gelu", "silu"])
@pytest.mark.parametrize("way", ["bf16", "fp32", "fp8"])
def test_grouped_and_finished(pair, activation, way):
    """A bias of each expert, an activation, and rounding to fp8, in the same launch."""
    groups, _ = group_rows(torch.tensor([100, 0, 300, 129], device="cuda"))
    groups = torch.cat([groups, torch.full((128,), -1, device="cuda", dtype=torch.int32)])
    x = torch.randn(len(groups), 528, generator=generator(1, "cuda"), device="cuda").bfloat16()
    w = torch.randn(4, 2560, 528, generator=generator(2, "cuda"), device="cuda").bfloat16() / 8
    a, b = quantize(x, pair[0]), quantize(w, pair[1])
    bias = torch.randn(4, 2560, generator=generator(3, "cuda"), device="cuda").bfloat16()
    truth = activated(grouped_mm_reference(a, b, groups, bias=bias), activation)
    options = dict(bias=bias, activation=activation, backend="hopper")
    if way == "fp8":
        scale, amax = (truth.abs().amax() / 300).float(), torch.zeros((), device="cuda")
        out = grouped_mm_fp8(a, b, groups, scale, amax=amax, **options).dequantize(torch.float64)
        bound = 2.0**-4 * 1.1 * truth.abs() + 2.0**-10 * scale.double() + floor_of(truth)
        assert ((out - truth).abs() <= bound).all()
        assert abs(amax.item() / truth.abs().amax().item() - 1) < 2.0**-10
    else:
        dtype = torch.bfloat16 if way == "bf16" else torch.float32
        out = grouped_mm(a, b, groups, out_dtype=dtype, **options)
        assert_close_to_truth("out", out, truth, truth.to(dtype), factor=4.0, floor=2 * floor_of(truth))
    assert not out[-128:].any()


def test_grouped_with_room_to_spare():
    """Many blocks without rows, more than SMs: each costs one slice, and what follows is right."""
    groups = group_room(torch.tensor([129, 0, 5, 1024], device="cuda"), 8192)
    x = torch.randn(len(groups), 1024, generator=generator(1, "cuda"), device="cuda").bfloat16()
    w = torch.randn(4, 512, 1024, generator=generator(2, "cuda"), device="cuda").bfloat16()
    a, b = quantize(x, "fp8_row"), quantize(w, "fp8_row")
    truth = grouped_mm_reference(a, b, groups)
    yardstick = grouped_mm_reference(a, b, groups, dtype=torch.float32, out_dtype=torch.bfloat16)
    out = grouped_mm(a, b, groups, backend="hopper")
    assert_close_to_truth("out", out, truth, yardstick, floor=floor_of(truth))
    assert not out[groups < 0].any()


def test_few_rows_in_every_box():
    """Boxes of fewer rows, more of K a slice: the same bits, since what is summed in which order is the same."""
    a, b = operands(7, 1000, 8208, ("fp8_row", "fp8_row"))
    codes = a.codes, b.codes.t()
    scales = dict(scale_x=a.scales, scale_w=b.scales, block_x=(1, 0), block_w=(1, 0), out_dtype=torch.float32)
    programs = dict(programs=16)
    wanted = gemm_skinny.gemm(*codes, **scales, config=gemm_skinny.SkinnyConfig(sub=4, **programs))
    for box in (16, 32):
        got = gemm_skinny.gemm(*codes, **scales, config=gemm_skinny.SkinnyConfig(sub=4, box=box, **programs))
        assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    "mnk", [(1, 8192, 8192), (16, 1000, 8208), (64, 2112, 7168), (33, 200, 272), (64, 512, 16384)], ids=str
)
@pytest.mark.parametrize("pair", [("fp8", "fp8"), ("fp8_row", "fp8_row"), ("fp8_1x128", "fp8_128x128")], ids="-".join)
def test_few_rows_asked_for_early(pair, mnk):
    """Slices before the partitions start, scales before the slices: of whole tiles the same bits."""
    m, n, k = mnk
    a, b = operands(m, n, k, pair)
    truth = scaled_mm_reference(a, b)
    yardstick = scaled_mm_reference(a, b, dtype=torch.float32, out_dtype=torch.float32)
    blocks = dict(block_x=a.scheme.block, block_w=b.scheme.block)
    codes, scales = (a.codes, b.codes.t()), dict(scale_x=a.scales, scale_w=b.scales, out_dtype=torch.float32)
    for programs in (0, 16, -(-n // 64)):
        config = gemm_skinny.SkinnyConfig(sub=4 if m <= 16 else 2, programs=programs, early=True)
        outs = [gemm_skinny.gemm(*codes, **scales, **blocks, config=config) for _ in range(3)]
        assert_close_to_truth("out", outs[0], truth, yardstick, floor=floor_of(truth))
        assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
    now = replace(config, early=False)
    assert torch.equal(outs[0], gemm_skinny.gemm(*codes, **scales, **blocks, config=now))


@pytest.mark.parametrize(
    "mnk", [(65, 200, 272), (128, 2112, 7168), (100, 1000, 8208), (64, 3000, 4096)], ids=str
)  # the third has more scales of blocks than lie beside its slices
@pytest.mark.parametrize("pair", [("fp8", "fp8_row"), ("fp8_1x128", "fp8_128x128")], ids="-".join)
@pytest.mark.parametrize("sub", [1, 2])
def test_up_to_128_rows(sub, pair, mnk):
    """Tiles of 64 columns by all rows: whole ones, shared ones, and as many as the kernel takes by itself."""
    m, n, k = mnk
    a, b = operands(m, n, k, pair)
    truth = scaled_mm_reference(a, b)
    blocks = dict(block_x=a.scheme.block, block_w=b.scheme.block)
    codes, scales = (a.codes, b.codes.t()), dict(scale_x=a.scales, scale_w=b.scales)
    config = replace(gemm_skinny.skinny_config(128, True, 1), sub=sub)
    for out_dtype in (torch.float32, torch.bfloat16)[0 if n == 200 else 1 :]:
        yardstick = scaled_mm_reference(a, b, dtype=torch.float32, out_dtype=out_dtype)
        for programs in (0, 16, -(-n // 64)):
            outs = [torch.full((m, n), float("nan"), device="cuda", dtype=out_dtype) for _ in range(3)]
            for out in outs:
                gemm_skinny.gemm(*codes, **scales, **blocks, out=out, config=replace(config, programs=programs))
            assert_close_to_truth("out", outs[0], truth, yardstick, floor=floor_of(truth))
            assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("mnk", [(128, 2112, 7168), (77, 1001, 2067), (128, 8192, 2048)], ids=str)
@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("pair", [("fp8", "fp8_row"), ("fp8_1x128", "fp8_128x128")], ids="-".join)
def test_up_to_128_rows_as_they_are_chosen(pair, mnk, activation):
    """With a bias, columns and K that no tile divides; in a graph, with other values at each replay."""
    m, n, k = mnk
    bias = torch.randn(n, generator=generator(3, "cuda"), device="cuda").bfloat16()
    a, b = operands(m, n, k, pair)
    assert "slices of K" in explain_mm(a, b)
    options = dict(bias=bias, activation=activation, backend="hopper")
    scaled_mm(a, b, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = scaled_mm(a, b, **options)
    for factor in (1.0, 0.5):
        a.codes.copy_((a.codes.float() * factor).to(a.codes.dtype))
        a.scales.mul_(factor)
        out.fill_(float("nan"))
        graph.replay()
        truth = activated(scaled_mm_reference(a, b, bias=bias), activation)
        wide = activated(scaled_mm_reference(a, b, bias=bias, dtype=torch.float32, out_dtype=torch.float32), activation)
        assert_close_to_truth("out", out, truth, wide.bfloat16(), floor=floor_of(truth))


@pytest.mark.parametrize(
    "mnk",
    [(128, 2112, 7168), (64, 2112, 7168), (3, 200, 8192), (64, 24576, 1536)],  # whole tiles, the last
    ids=str,
)
@pytest.mark.parametrize(
    ("pair", "held"),
    [(("fp8", "fp8"), False), (("fp8_1x128", "fp8_128x128"), False), (("fp8_1x128", "fp8_128x128"), True)],
    ids=["fp8", "blocks", "blocks-held"],
)
def test_tiles_shared_with_one_fence(pair, held, mnk):
    """The same bits at every launch, scales of W in shared memory or not. Operands take turns, so that what the launch
    before left is not what is right."""
    m, n, k = mnk
    lean = replace(gemm_skinny.skinny_config(m, True, 1), lean=True, held=held)
    calls, wanted = [], []
    a, b = operands(m, n, k, pair)
    truth = scaled_mm_reference(a, b)
    yardstick = scaled_mm_reference(a, b, dtype=torch.float32, out_dtype=torch.float32)
    for turn in (0, 1):
        a, b = operands(m, n, k, pair)
        a.scales.mul_(turn + 1)
        given = dict(block_x=a.scheme.block, block_w=b.scheme.block, scale_x=a.scales, scale_w=b.scales)
        calls.append(functools.partial(gemm_skinny.gemm, a.codes, b.codes.t(), out_dtype=torch.float32, **given))
        wanted.append(calls[-1](config=replace(lean, lean=False, held=False)))
    assert_close_to_truth("out", wanted[0], truth, yardstick, floor=floor_of(truth))
    assert not torch.equal(*wanted)
    outs = [calls[i % 2](config=replace(lean, programs=(0, 61)[i // 2 % 2])) for i in range(100)]
    for i, out in enumerate(outs):
        assert i // 2 % 2 or torch.equal(out, wanted[i % 2]), i
    odd = [calls[i](config=replace(lean, lean=False, held=False, programs=61)) for i in (0, 1)]
    assert all(torch.equal(out, odd[i % 2]) for i, out in enumerate(outs) if i // 2 % 2)


@pytest.mark.parametrize(
    "pair", [("fp8", "fp8"), ("fp8_1x128", "fp8_128x128"), ("fp8_1x128", "fp8_1x128")], ids="-".join
)
@pytest.mark.parametrize("mnk", [(128, 2112, 7168), (128, 4096, 7168), (100, 1001, 16384), (256, 1024, 8192)], ids=str)
def test_few_tiles_are_dealt(mnk, pair):
    """With scales a slice ahead and with their slice; the same every time, whoever comes last."""
    a, b = operands(*mnk, pair)
    truth = scaled_mm_reference(a, b)
    yardstick = scaled_mm_reference(a, b, dtype=torch.float32, out_dtype=torch.bfloat16)
    blocks = dict(block_a=a.scheme.block, block_b=b.scheme.block)
    given = [hopper_gemm._addressable(x.codes.view(torch.uint8)).view(x.codes.dtype) for x in (a, b)]
    found = []
    for staged in (False, True)[: 2 if pair[0] == "fp8_1x128" else 1]:
        config = Fp8GemmConfig(parts=1, stages=5, group=8, deal=True, staged=staged)
        outs = [hopper_gemm.gemm(*given, a.scales, b.scales, **blocks, config=config) for _ in range(3)]
        assert_close_to_truth("out", outs[0], truth, yardstick, floor=floor_of(truth))
        assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
        found.append(outs[0])
    assert torch.equal(found[0], found[-1])


def test_what_is_copied_first_is_said():
    a, b = operands(64, 128, 280, ("fp8", "fp8"))  # K is no multiple of 16
    assert "copied first" in explain_mm(a, b)


@pytest.mark.parametrize("layout", ["nt", "nn", "tn", "tt"])
@pytest.mark.parametrize("mnk", [(40, 1000, 528), (300, 264, 531)], ids=str)
def test_tk_gemm_in_every_layout(mnk, layout):
    """a and b as rows or as columns of memory, one scale of each or one a line, and an epilogue."""
    m, n, k = mnk
    shapes, turned = ((m, k), (k, n)), (layout[0] == "t", layout[1] == "t")
    made = [torch.randn(*(s[::-1] if t else s), generator=generator(seed, "cuda"), device="cuda")
            for seed, (s, t) in enumerate(zip(shapes, turned, strict=True))]  # fmt: skip
    codes = [x.to(torch.float8_e4m3fn) for x in made]
    a, b = (x.t() if t else x for x, t in zip(codes, turned, strict=True))
    lines = [torch.rand(size, generator=generator(5, "cuda"), device="cuda") + 0.5 for size in (m, n)]
    bias = torch.randn(n, generator=generator(6, "cuda"), device="cuda")
    for scale_a, scale_b in (lines, [x[0] for x in lines]):
        wide = (a.double() * scale_a.double().reshape(-1, 1), b.double() * scale_b.double())
        truth = activated(wide[0] @ wide[1] + bias.double(), "silu")
        yardstick = activated(wide[0].float() @ wide[1].float() + bias, "silu")
        options = dict(bias=bias, activation="silu", scale_a=scale_a, scale_b=scale_b, out_dtype=torch.float32)
        for backend in ("auto", "hopper", "portable"):
            out = tk.gemm(a, b, backend=backend, **options)
            assert_close_to_truth(backend, out, truth, yardstick, floor=floor_of(truth))
    assert "Gluon" in tk.explain_gemm(a, b)


@pytest.mark.parametrize("backend", ["hopper", "portable"])
@pytest.mark.parametrize("nk", [(512, 384), (256, 1000), (4096, 8192)], ids=str)
@pytest.mark.parametrize("pair", [("fp8", "fp8"), ("fp8_e5m2", "fp8_row"), ("fp8_1x128", "fp8_1x128")], ids="-".join)
def test_grouped_along_k(pair, nk, backend):
    """Groups of no rows, and rows behind the last group."""
    n, k = nk
    ends = group_ends(torch.tensor([300, 0, 128, 513], device="cuda"))
    m = int(ends[-1]) + 256
    x, w = (torch.randn(r, m, generator=generator(i, "cuda"), device="cuda").bfloat16() for i, r in enumerate((n, k)))
    a, b = quantize(x, pair[0]), quantize(w, pair[1])
    truth = k_grouped_mm_reference(a, b, ends)
    for dtype in (torch.bfloat16, torch.float32):
        yardstick = k_grouped_mm_reference(a, b, ends, dtype=torch.float32, out_dtype=dtype)
        out = k_grouped_mm(a, b, ends, out_dtype=dtype, backend=backend)
        assert_close_to_truth("out", out, truth, yardstick, floor=floor_of(truth))
        assert not out[1].any()
    if pair[0] == "fp8_1x128" and backend == "hopper":  # the bits of a product alone
        alone = scaled_mm(
            quantize(x[:, 384:512], pair[0]), quantize(w[:, 384:512], pair[1]), out_dtype=dtype, backend=backend
        )  # fmt: skip
        assert torch.equal(out[2], alone)


WAYS_OUT = {
    "bf16": {},
    "fp32": dict(out_dtype=torch.float32),
    "bias-gelu": dict(bias=True, activation="gelu"),
    "to-fp8": dict(out_dtype=torch.float8_e4m3fn, out_scale=True, amax=True, activation="silu"),
    "added": dict(accumulate=True),
    "groups": dict(groups=True),
    "along": dict(along=True),
}
STAGED = {True: Fp8GemmConfig(parts=1, stages=5, group=8, staged=True), False: Fp8GemmConfig(staged=True)}


@pytest.mark.parametrize("way", WAYS_OUT)
@pytest.mark.parametrize("shape", [(512, 1024, 1024), (300, 1000, 531), (4096, 4096, 2048)], ids=str)
@pytest.mark.parametrize("second", ["fp8_128x128", "fp8_1x128"])
def test_scales_that_come_with_their_slice(second, shape, way):
    """Through shared memory, on every way out: the same products and sums in the same order, so the same bits."""
    lines, (m, n, k) = second == "fp8_1x128", shape
    if way == "along" and (m % 128 or not lines) or way == "groups" and (n % 512 or lines):
        pytest.skip("no such product")
    a, b = operands(m, n, k, ("e5m2:1x128:fp32" if lines else "fp8_1x128", second))
    given = [hopper_gemm._addressable(x.codes.view(torch.uint8)).view(x.codes.dtype) for x in (a, b)]
    found = []
    for config in (Fp8GemmConfig(parts=1, stages=6, group=8) if lines else Fp8GemmConfig(), STAGED[lines]):
        options = dict(WAYS_OUT[way])
        if options.pop("bias", False):
            options["bias"] = torch.ones(n, device="cuda", dtype=torch.bfloat16)
        if options.pop("out_scale", False):
            options |= dict(out_scale=torch.full((), 2.0, device="cuda"), amax=torch.zeros((), device="cuda"))
        if way == "added":
            options["out"] = torch.ones(m, n, device="cuda")
        if options.pop("groups", False):
            groups = torch.arange(m, device="cuda", dtype=torch.int32) // 128 % 4
            options["groups"] = torch.where(groups == 2, -1, groups)
            options["out"] = torch.empty(m, n // 4, device="cuda", dtype=torch.bfloat16)
        if options.pop("along", False):
            slices = -(-k // 128)
            options["along"] = torch.tensor([0, 1, 1, slices], device="cuda", dtype=torch.int32)
            options["out"] = torch.full((3 * m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
        out = hopper_gemm.gemm(
            *given, a.scales, b.scales, block_a=(1, 128), block_b=b.scheme.block, config=config, **options
        )  # fmt: skip
        found.append((out.clone(), options.get("amax")))
    (plain, most), (staged, largest) = found
    assert not plain.float().isnan().any()
    assert torch.equal(plain.float(), staged.float())
    assert most is None or torch.equal(most, largest)


@gluon.jit
def _poison(out):
    """All shared memory of an SM becomes NaN."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [8], [0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    pages = gl.allocate_shared_memory(gl.float32, [56, 1024], FLAT)
    for i in gl.static_range(56):
        pages.index(i).store(gl.full([1024], float("nan"), gl.float32, LAYOUT))
    total = gl.zeros([1024], gl.float32, LAYOUT)
    for i in range(56):
        total += pages.index(i).load(LAYOUT)
    gl.store(out + gl.program_id(0) * 1024 + gl.arange(0, 1024, layout=LAYOUT), total)


@pytest.mark.parametrize("poisoned", [True, False])
@pytest.mark.parametrize(
    ("m", "n", "k", "second"),
    [(8192, 768, 256, "fp8_128x128"), (1024, 1024, 2048, "fp8_128x128"), (256, 768, 8192, "fp8_1x128")],
    ids=str,
)
def test_scales_that_come_with_their_slice_in_a_graph(m, n, k, second, poisoned):
    """Casts and products that follow each other at once, with other values in every replay.

    A product repeated finds its own scales in shared memory even if it does not wait for them. Here it finds NaN, or
    what the kernel before left there.
    """
    x, w = (torch.randn(rows, k, device="cuda").bfloat16() for rows in (m, n))
    sink = torch.empty(torch.cuda.get_device_properties(0).multi_processor_count, 1024, device="cuda")
    lines = second == "fp8_1x128"

    def chain():
        a, b = quantize(x, "fp8_1x128"), quantize(w, second)
        outs = []
        for config in (Fp8GemmConfig(parts=1, stages=6, group=8) if lines else Fp8GemmConfig(), STAGED[lines]):
            if poisoned:
                _poison[(sink.shape[0],)](sink, num_warps=8)
            blocks = dict(block_a=(1, 128), block_b=b.scheme.block)
            outs.append(hopper_gemm.gemm(a.codes, b.codes, a.scales, b.scales, **blocks, config=config))
        return outs

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        chain()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held, out = chain()
    for i in range(60):
        x.normal_().mul_(10.0 ** (i % 7 - 4))
        w.normal_().mul_(10.0 ** (i % 5 - 3))
        graph.replay()
        assert not held.isnan().any()
        assert torch.equal(out, held), i
    if poisoned:
        assert sink.isnan().all()
