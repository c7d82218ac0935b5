"""What results of microbenchmarks are compared with: models of instructions, layouts of operands, boxes of copies."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpu_accel.hardware.microbenchmarks import dpx, latency, tensor
from gpu_accel.hardware.microbenchmarks.alu_steps import STEPS
from gpu_accel.hardware.microbenchmarks.tensor import Shape
from gpu_accel.hardware.microbenchmarks.tma import Copy

WORDS = st.integers(0, 2**32 - 1)
STEP = {step.name: step for step in STEPS}


def of_word(name: str, x: int) -> int:
    step = STEP[name]
    value = torch.tensor([[x - (x >> 31 << 32)]], dtype=torch.int32)
    return int(step.model(value, step.a, step.b)) & 0xFFFFFFFF


@given(x=WORDS)
def test_models_of_integer_instructions_agree_with_python(x):
    step = STEP
    assert of_word("IMAD", x) == (x * int(step["IMAD"].a) + int(step["IMAD"].b)) % 2**32
    assert of_word("IMAD.HI", x) == ((x * int(step["IMAD.HI"].a) >> 32) + int(step["IMAD.HI"].b)) % 2**32
    assert of_word("POPC", x) == x.bit_count()
    assert of_word("BREV", x) == int(f"{x:032b}"[::-1], 2)
    assert of_word("SHF", x) == (x << 7 | int(step["SHF"].a) >> 25) % 2**32
    mine, theirs = x.to_bytes(4, "little"), int(step["PRMT"].a).to_bytes(4, "little")
    assert of_word("PRMT", x) == int.from_bytes(bytes([mine[1], mine[2], mine[0], theirs[0]]), "little")


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_a_model_keeps_type_and_shape_and_stays_finite(step):
    x = step.draw(torch.Generator().manual_seed(0), 64).reshape(-1, 2)
    for _ in range(40):
        y = step.model(x, step.a, step.b)
        assert y.dtype == x.dtype and y.shape == x.shape
        x = y
    if step.type != "u32":
        assert x.isfinite().all()


@pytest.mark.parametrize("function", dpx.FUNCTIONS, ids=lambda f: f.name)
def test_dpx_models_agree_with_python_on_each_part(function):
    x = dpx._middle(torch.Generator().manual_seed(1), 200)[:, None]
    found = dpx._model(function)(x, dpx.A, dpx.B).flatten().tolist()
    parts = ((16, 16), (0, 16)) if function.pairs else ((0, 32),)
    for word, got in zip(x.flatten().tolist(), found, strict=True):
        for shift, width in parts:
            a, b, mine, theirs = (dpx._signed(value >> shift, width) for value in (dpx.A, dpx.B, word, got))
            first = mine + a if "add" in function.name else max(mine, a) if "max" in function.name else min(mine, a)
            wanted = max(first, b) if "max" in function.name else min(first, b)
            if function.folded:  # of two arguments
                wanted = first
            assert theirs == (max(wanted, 0) if "relu" in function.name else wanted), function.name


SHAPES = [Shape(n=16, dtype="bf16"), Shape(n=8, dtype="e4m3", a="registers"), Shape(n=24, dtype="tf32")]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"n{s.n}-{s.dtype}")
def test_accumulators_go_to_the_rows_and_columns_of_the_ptx_manual(shape):
    out = torch.zeros(1, 128, shape.registers)
    for thread in range(128):
        for register in range(shape.registers):
            row = thread // 32 * 16 + thread % 32 // 4 + 8 * (register // 2 % 2)
            column = register // 4 * 8 + thread % 4 * 2 + register % 2
            out[0, thread, register] = row * 1000 + column
    found = tensor.gather(shape, out.view(torch.int32))[0]
    rows, columns = torch.arange(64)[:, None], torch.arange(shape.n)[None]
    assert torch.equal(found, (rows * 1000 + columns).double())


def test_operands_lie_where_descriptors_and_fragments_look():
    raw = torch.arange(2 * 64 * 32).remainder(251).to(torch.uint8).view(2, 64, 32)
    flat = tensor.tiled(raw).flatten()
    for slot, row, byte in ((0, 0, 0), (1, 9, 17), (1, 63, 31), (0, 8, 15)):
        place = slot * 2048 + row // 8 * 256 + byte // 16 * 128 + row % 8 * 16 + byte % 16
        assert flat[place] == raw[slot, row, byte]
    registers = tensor.fragments(raw, 4).reshape(2, 4, 128, 4)
    for register, thread in ((0, 0), (1, 37), (2, 66), (3, 127)):
        row = thread // 32 * 16 + thread % 32 // 4 + 8 * (register & 1)
        byte = 16 * (register >> 1) + thread % 4 * 4
        assert torch.equal(registers[1, register, thread], raw[1, row, byte : byte + 4])
    b = torch.arange(8 * 64).remainder(251).to(torch.uint8).view(1, 8, 64)
    assert torch.equal(tensor.columns(b).view(4, 32, 4)[3, 13], b[0, 3, 52:56])


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "tf32", "e4m3", "e5m2", "int8"])
def test_operands_are_exact_in_their_dtype_and_zeros_are_zeros(dtype):
    shape = Shape(n=16, dtype=dtype, accumulator="s32" if dtype == "int8" else "f32")
    a, b = tensor.operands(shape, "random", 3)
    assert a.shape == (tensor.SLOTS, 64, 32) and b.shape == (tensor.SLOTS, 16, 32)
    values = tensor.numbers(a, dtype)
    assert values.isfinite().all() and values.unique().numel() > 50
    assert tensor.truth(shape, a, b, 8).shape == (64, 16)
    zeros, _ = tensor.operands(shape, "zeros", 3)
    assert not tensor.numbers(zeros, dtype).any()


def test_a_sparse_operand_stands_for_the_first_two_of_four():
    shape = Shape(n=8, dtype="fp16", sparse=True)
    a, b = tensor.operands(shape, "random", 0)
    found = tensor.truth(shape, a, b, tensor.SLOTS)
    left, right = tensor.numbers(a, "fp16"), tensor.numbers(b, "fp16")
    row, column = 5, 3
    total = sum(
        float(left[s, row, 2 * group + i] * right[s, column, 4 * group + i])
        for s in range(tensor.SLOTS) for group in range(8) for i in range(2)
    )  # fmt: skip
    assert float(found[row, column]) == pytest.approx(total)


@pytest.mark.parametrize(
    ("copy", "index", "first"),
    [
        (Copy(engine="tma", box=(256,)), 3, 768),
        (Copy(engine="tma", box=(16, 8)), 65, 8 * 1024 + 16),
        (Copy(engine="tma", box=(16, 16, 4)), 257, 4 * 65536 + 16),
        (Copy(engine="bulk", box=(512,)), 2, 1024),
    ],
    ids=["1-D", "2-D", "3-D", "bulk"],
)
def test_boxes_are_cut_where_the_kernel_asks_for_them(copy, index, first):
    words = torch.arange(2**20, dtype=torch.int32).view(torch.float32)
    if copy.engine == "tma" and len(copy.box) > 1:
        words = words.view(-1, 1024) if len(copy.box) == 2 else words.view(-1, 256, 256)
    got = copy.cut(words, index).view(torch.int32)
    assert got.numel() * 4 == copy.bytes and int(got[0]) == first


def test_two_clusters_are_told_apart_and_one_is_not_lost():
    assert latency.two_means([200.0, 202.0, 204.0, 400.0, 404.0]) == (202.0, 402.0)
    assert latency.two_means([7.0, 7.0]) == (7.0, 7.0)
