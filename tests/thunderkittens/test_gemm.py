"""tk.gemm on a CPU: the portable kernel in the interpreter, gradients, what is refused, and how work is dealt."""

from __future__ import annotations

import pytest
import torch

import gpu_accel.thunderkittens as tk
from gpu_accel.errors import InvalidInputError, UnsupportedError
from gpu_accel.thunderkittens import gemm_hopper, gemm_skinny
from gpu_accel.thunderkittens.gemm_api import explain_gemm, gemm, gemm_op, gemm_reference
from tests.thunderkittens.helpers import close, randn, run

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES = {
    "bf16-ragged-gelu": ((37, 70, 131), BF16, dict(bias=True, activation="gelu")),
    "bf16-rows-only": ((3, 16, 64), BF16, dict(activation="silu", out_dtype=FP32)),
    "fp16-one": ((1, 1, 1), FP16, dict(bias=True)),
    "fp16-two-tiles": ((129, 130, 65), FP16, dict(activation="relu")),
    "fp32-odd": ((5, 7, 33), FP32, dict(activation="gelu_tanh", bias=True)),
    "no-rows": ((0, 8, 8), BF16, dict(bias=True)),
    "no-columns": ((8, 0, 8), BF16, {}),
    "nothing-to-sum": ((4, 8, 0), FP32, dict(bias=True, activation="silu")),
}


def operands(m, n, k, dtype, device, bias):
    tensors = [randn(m, k, seed=1, dtype=dtype, device=device), randn(k, n, seed=2, dtype=dtype, device=device)]
    return [*tensors, randn(n, seed=3, dtype=dtype, device=device) if bias else None]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_against_float64_with_gradients(case, device):
    (m, n, k), dtype, options = case
    options = dict(options)
    tensors = operands(m, n, k, dtype, device, options.pop("bias", False))
    grads = [randn(m, n, seed=4, device=device)]

    def function(backend, **more):
        return lambda a, b, bias=None: gemm(a, b, bias=bias, backend=backend, **options | more)

    given = [x for x in tensors if x is not None]
    mine = run(function("portable"), given, grads)
    truth = run(function("reference", out_dtype=None), given, grads, torch.float64)
    ruler = run(function("reference"), given, grads)
    assert mine[0].shape == (m, n) and mine[0].dtype == options.get("out_dtype", dtype)
    for name, *three in zip(("out", "da", "db", "dbias"), mine, truth, ruler, strict=False):
        close(name, *three, narrow=dtype == BF16)


def test_strides_and_leading_dimensions(device):
    a = randn(2, 9, 3, 40, seed=1, device=device)[:, ::2, :, ::2]
    b = randn(24, 20, seed=2, device=device).t()
    out = gemm(a, b, backend="portable")
    assert out.shape == (2, 5, 3, 24)
    close("out", out, gemm_reference(a.double(), b.double()), gemm_reference(a, b))
    assert torch.equal(gemm(a[0, 0, 0], b, backend="portable"), out[0, 0, 0])


def test_the_seeds_call(device):
    a, b = (randn(32, 32, seed=s, device=device) for s in (1, 2))
    assert torch.equal(tk.gemm(a, b, tile_size=16), tk.gemm(a, b))
    with pytest.raises(UnsupportedError, match="16"):
        tk.gemm(a, b, tile_size=32)


@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "gelu_tanh", "silu"])
def test_gradients_of_gradients(activation, device):
    tensors = [randn(*shape, seed=seed, device=device) for seed, shape in enumerate([(5, 8), (8, 6), (6,)])]
    directions = [randn(*x.shape, seed=7 + seed, device=device) for seed, x in enumerate(tensors)]

    def second(backend, dtype):
        a, b, bias = leaves = [x.to(dtype).requires_grad_() for x in tensors]
        y = gemm(a, b, bias=bias, activation=activation, backend=backend)
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        along = sum((x * d.to(dtype)).sum() for x, d in zip(first, directions, strict=True))
        return torch.autograd.grad(along, leaves)

    for mine, truth in zip(second("portable", torch.float32), second("reference", torch.float64), strict=True):
        torch.testing.assert_close(mine.double(), truth, rtol=1e-4, atol=1e-4 * float(truth.abs().max()))


def test_custom_op(device):
    a, b, bias = operands(5, 6, 8, FP32, device, True)
    for x in (a, b, bias):
        x.requires_grad_()
    torch.library.opcheck(gemm_op, (a, b, bias, "silu", FP32, "portable"))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (dict(b=torch.zeros(3, 4)), r"\(K, N\)"),
        (dict(b=torch.zeros(8, 4, dtype=BF16)), "one dtype"),
        (dict(bias=torch.zeros(5)), "bias must be"),
        (dict(activation="tanh"), "choose one of none, relu"),
        (dict(out_dtype=torch.int8), "out_dtype"),
        (dict(backend="cutlass"), "choose one of auto"),
        (dict(tile_size=torch.zeros(2)), "tile_size"),
        (dict(a=torch.zeros(2, 8, dtype=torch.int32)), "floating dtype"),
        *((dict(bias=x), "bias must be") for x in ([1.0] * 4, "x", 1.0, torch.zeros(4).to(torch.float8_e4m3fn))),
        *((dict(a=torch.zeros(2, 8, dtype=x), b=torch.zeros(8, 4, dtype=x)), "floating dtype")
          for x in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_wrong_calls(change, match):
    call = dict(a=torch.zeros(2, 8), b=torch.zeros(8, 4)) | change
    with pytest.raises(InvalidInputError, match=match):
        gemm(call.pop("a"), call.pop("b"), **call)


def test_hopper_is_refused_by_name_and_explained_on_a_cpu():
    a, b = torch.zeros(4, 8, dtype=BF16), torch.zeros(8, 4, dtype=BF16)
    with pytest.raises(UnsupportedError, match="compute capability 9.0"):
        gemm(a, b, backend="hopper")
    assert "hopper refused: needs an NVIDIA GPU" in explain_gemm(a, b)


def matrix(rows, cols, stride=None, transposed=False, dtype=BF16):
    x = torch.empty(rows if not transposed else cols, stride or (cols if not transposed else rows), dtype=dtype)
    x = x[:, : cols if not transposed else rows]
    return x.t() if transposed else x


@pytest.mark.parametrize(
    ("a", "b", "why"),
    [
        (matrix(64, 64), matrix(64, 72), None),
        (matrix(64, 64, transposed=True), matrix(64, 72, transposed=True), None),
        (matrix(63, 64), matrix(64, 8, stride=16), None),
        (matrix(1, 63), matrix(63, 8), None),  # one row has no stride
        (matrix(64, 63), matrix(63, 72), "a has strides"),
        (matrix(64, 64), matrix(64, 71), "b has strides"),
        (matrix(64, 64)[:, ::2], matrix(32, 72), "a has strides"),
        (matrix(64, 72)[:, 4:68], matrix(64, 72), "a has an address"),
        (matrix(64, 64, dtype=FP32), matrix(64, 64, dtype=FP32), "takes bfloat16"),
        (torch.empty(1, 64, dtype=BF16).expand(64, 64), matrix(64, 64), "a has strides"),
        (matrix(256, 63), matrix(63, 256), None),
    ],
    ids=["nn", "tt", "padded", "one-row", "odd-k", "odd-n", "every-second", "shifted", "fp32", "broadcast", "large"],
)
def test_what_the_copy_engine_can_address(a, b, why):
    got = gemm_hopper.layout_refusal(a, b)
    assert (got is None) if why is None else (why in got), got


@pytest.mark.parametrize(
    ("mnk", "along_k", "bn"),
    [
        ((4096, 4096, 4096), True, 256),
        ((4096, 4096, 128), True, 128),  # the way out takes the time
        ((4096, 4096, 256), True, 256),
        ((512, 4096, 4096), True, 128),  # 64 wide tiles for 132 SMs
        ((512, 4096, 4096), False, 256),
        ((4096, 100, 4096), False, 128),
    ],
    ids=str,
)
def test_tiles(mnk, along_k, bn):
    assert gemm_hopper.gemm_config(*mnk, along_k=along_k).bn == bn


@pytest.mark.parametrize(
    ("m", "n", "k", "kernel"),
    [(64, 8192, 8192, "skinny"), (128, 8192, 8192, "hopper"), (128, 4096, 4096, "skinny"), (128, 4096, 256, "hopper")],
)
def test_which_kernel(m, n, k, kernel):
    assert gemm_hopper.kernel_for(torch.empty(m, k, dtype=BF16), torch.empty(n, k, dtype=BF16).t()) == kernel


@pytest.mark.parametrize("k_axis", [0, 1])
def test_what_it_cannot_address_is_copied(k_axis):
    x = torch.randn(65, 63)[1:, 1:].to(BF16)
    copy = gemm_hopper.addressable(x, k_axis)
    assert torch.equal(copy, x) and copy.stride(k_axis) == 1 and copy.stride(1 - k_axis) % 8 == 0
    assert gemm_hopper.addressable(copy, k_axis) is copy
    assert gemm_hopper.copied(x, x.t()) and not gemm_hopper.copied(copy, copy)


@pytest.mark.parametrize("processors", [1, 78, 132])
@pytest.mark.parametrize(("tiles", "k_steps"), [(1, 1), (1, 3), (64, 128), (5, 7), (157, 64), (1000, 2)])
def test_slices_are_dealt_evenly(tiles, k_steps, processors):
    """The formulas of gemm_skinny_kernel.py, in Python: who has what, and who is asked for a shared tile."""
    programs = gemm_skinny.programs_for(tiles, k_steps, processors)
    units = tiles * k_steps
    first = [units * p // programs for p in range(programs + 1)]
    sizes = [end - begin for begin, end in zip(first, first[1:], strict=False)]
    assert 1 <= programs <= max(1, processors) and sum(sizes) == units
    assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1
    for tile in range(tiles):
        owners = {p for p in range(programs) if first[p] < (tile + 1) * k_steps and first[p + 1] > tile * k_steps}
        ends = [((u + 1) * programs - 1) // units for u in (tile * k_steps, (tile + 1) * k_steps - 1)]
        assert sorted(owners) == list(range(ends[0], ends[1] + 1))
    # EARLY: without a division, the first ones having one more
    base, extra = divmod(units, programs)
    first = [p * base + min(p, extra) for p in range(programs + 1)]
    longer = extra * (base + 1)
    for p in range(programs):
        for unit in {first[p], first[p + 1] - 1}:
            found = unit // (base + 1) if unit < longer else extra + (unit - longer) // max(base, 1)
            assert first[p] <= unit < first[p + 1] and found == p
    assert first[-1] == units


@pytest.mark.parametrize(
    ("tiles", "k_steps", "programs"),
    [(112, 8, 112), (384, 6, 128), (512, 2, 128), (128, 32, 128), (33, 28, 132), (64, 56, 128), (157, 64, 132)],
)  # fmt: skip
def test_programs_have_whole_tiles_where_they_divide(tiles, k_steps, programs):
    assert gemm_skinny.programs_for(tiles, k_steps, 132, 2, whole=True) == programs


@pytest.mark.parametrize(
    ("tiles", "k_blocks", "programs"),
    [(33, 56, 132), (64, 56, 128), (112, 16, 112), (16, 32, 48), (48, 24, 96), (32, 16, 64), (1, 3, 1), (160, 12, 132)],
)  # fmt: skip
def test_tiles_of_128_rows_have_as_many_programs_each(tiles, k_blocks, programs):
    assert gemm_skinny.tall_programs(tiles, k_blocks, 132) == programs


@pytest.mark.parametrize("m", [1, 16, 17, 64, 65, 128])
@pytest.mark.parametrize("blocks", [0, 8, 64, 128])  # scales of blocks of X beside the slices, a power of two
def test_few_rows_have_room_in_shared_memory(m, blocks):
    """Slices, all scales of X, a float32 result on its way out, and a KB for barriers and what partitions are given."""
    config, bm = gemm_skinny.skinny_config(m, True, 1), gemm_skinny.padded_rows(m)
    assert config.early and not gemm_skinny.skinny_config(m, True, 2).early  # in sixteen bits it was not timed
    for size in (2, 4):
        depth = config.depth(bm, blocks * bm, size)
        slices = depth * config.sub * (64 * config.halves + bm) * 128
        assert depth >= 4 and slices + 4 * blocks * bm + size * 64 * bm + 2048 <= 227 * 1024


@pytest.mark.parametrize("programs", [1, 5, 132])
@pytest.mark.parametrize(("tiles", "k_steps"), [(1, 700), (68, 128), (200, 64), (264, 16), (512, 64), (140, 4)])
def test_the_last_round_is_dealt_in_slices(tiles, k_steps, programs):
    """`pieces_of` and `item` of gemm_device.py, in Python: every slice once, and nobody has much more than others."""
    dealt = gemm_hopper.dealt_tiles(tiles, k_steps, programs)
    assert dealt in (0, tiles % programs)
    first = [dealt * k_steps * p // programs for p in range(programs + 1)]
    seen, work = [], []
    for p in range(programs):
        begin, end = first[p], first[p + 1]
        pieces = -(-end // k_steps) - begin // k_steps
        whole = -(-max(tiles - dealt - p, 0) // programs)
        mine = [(begin // k_steps + i, s) for i in range(pieces)
                for s in range(max(begin - (begin // k_steps + i) * k_steps, 0),
                               min(end - (begin // k_steps + i) * k_steps, k_steps))]  # fmt: skip
        assert pieces <= 2 and (not dealt or mine)  # no empty item, which a consumer would wait for
        mine += [(dealt + p + i * programs, s) for i in range(whole) for s in range(k_steps)]
        seen += mine
        work.append(len(mine))
    assert sorted(seen) == [(tile, s) for tile in range(tiles) for s in range(k_steps)]
    if dealt:
        assert max(work) - min(work) <= 1
