"""Every microbenchmark compiles to sm_90a, and the loop that it times holds the instruction that it measures."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch

pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC: pip install 'gpu-accel[microbenchmarks]'")

from gpu_accel.errors import HardwareError, InvalidInputError
from gpu_accel.hardware.microbenchmarks import compile as compiling
from gpu_accel.hardware.microbenchmarks import cores, launch
from gpu_accel.hardware.microbenchmarks.launch import unavailable
from gpu_accel.hardware.microbenchmarks.probe import Kernel
from gpu_accel.hardware.microbenchmarks.tensor import Shape, shapes
from gpu_accel.hardware.microbenchmarks.workload import experiment
from gpu_accel.workbench.experiment import Settings

FAMILIES = ("latency", "bandwidth", "alu", "fp8_sums", "tma", "async_product", "dsm", "dpx", "cores")
LARGEST_CODE = 64 * 16  # instructions; loops that fill an instruction cache take long to assemble
WIDEST = 64  # columns of a wgmma; so do wider ones
TENSOR = (
    Shape(n=256, dtype="bf16"),
    Shape(n=64, dtype="e4m3", a="registers"),
    Shape(n=64, dtype="e5m2", accumulator="f16"),
    Shape(n=64, dtype="tf32"),
    Shape(n=64, dtype="int8", accumulator="s32"),
    Shape(n=64, dtype="fp16", sparse=True),
    Shape(n=8, dtype="fp16", accumulator="f16", a="registers", instruction="mma.sync"),
    Shape(n=8, dtype="fp16", a="registers", instruction="mma.sync", sparse=True),
)


def family(name: str):
    return importlib.import_module(f"gpu_accel.hardware.microbenchmarks.{name}")


def kernels_of(name: str) -> list[Kernel]:
    found = dict.fromkeys(kernel for probe in family(name).probes() for kernel in probe.kernels)
    return [kernel for kernel in found if name != "cores" or kernel.at_least <= LARGEST_CODE]


@pytest.mark.parametrize("name", FAMILIES)
def test_timed_loops_hold_what_they_claim(name):
    kernels = kernels_of(name)
    assert kernels
    compiling.build_all(kernel.source for kernel in kernels)
    for kernel in kernels:
        loop = kernel.loop()
        assert loop.count(kernel.holds) >= kernel.at_least, kernel.name


@pytest.mark.parametrize("shape", TENSOR, ids=lambda s: f"{s.instruction}-n{s.n}-{s.dtype}-{s.a}{'-sp' * s.sparse}")
def test_matrix_instructions_follow_each_other(shape):
    for kernel in shape.kernels():
        loop = kernel.loop()
        assert loop.count(shape.sass()) >= kernel.at_least
        waits = loop.count("WARPGROUP.DEPBAR")
        expected = {"latency": 0, "throughput": 1, "completion": kernel.at_least}[kernel.name]
        assert waits == (expected if shape.instruction == "wgmma" else 0), (
            "the assembler waits where the source does not"
        )


def test_every_combination_of_a_matrix_instruction_compiles():
    """Of dtypes, accumulators, operands and sparsity; columns above 64 only take longer to assemble."""
    found = dict.fromkeys(replace(shape, n=min(shape.n, WIDEST)) for shape, _ in shapes())
    kernels = [kernel for shape in found if shape not in TENSOR for kernel in shape.kernels()]
    compiling.build_all(kernel.source for kernel in kernels)
    for kernel in kernels:
        assert kernel.loop().count(kernel.holds) >= kernel.at_least, kernel.holds


LONG = {
    **{f"wgmma-n{s.n}-{s.dtype}-{s.accumulator}-{s.a}{'-sp' * s.sparse}": (s.source(), s.ptx(), dict.fromkeys(
        (one.name for one in s.kernels()), s.unroll)) for s, _ in shapes() if s.n > WIDEST and s not in TENSOR},
    **{f"code-{kb}": (cores.code_source(kb), "fma.rn.f32", {"code": cores.code_kernel(kb).at_least})
       for kb in cores.CODE_KB if cores.code_kernel(kb).at_least > LARGEST_CODE},
}  # fmt: skip


@pytest.mark.parametrize("name", LONG)
def test_what_takes_long_to_assemble_holds_its_instructions_in_ptx(name):
    """Every kernel that the tests above leave out; its machine code is checked where it is run, before it is timed."""
    source, instruction, counts = LONG[name]
    _, *entries = compiling.ptx(source).split(".entry ")
    found = {text.partition("(")[0]: text.count(f"{instruction} ") for text in entries}
    assert found == counts


def test_no_kernel_is_left_out():
    """What is assembled and what is looked at in PTX are together all that any experiment runs."""
    looked_at = {source for source, *_ in LONG.values()} | {shape.source() for shape in TENSOR}
    looked_at |= {replace(shape, n=min(shape.n, WIDEST)).source() for shape, _ in shapes()}
    looked_at |= {kernel.source for name in FAMILIES for kernel in kernels_of(name)}
    every = {source for name in (*FAMILIES, "tensor") for probe in family(name).probes() for source in probe.sources()}
    assert every <= looked_at


def test_a_source_that_does_not_compile_shows_the_compilers_words():
    with pytest.raises(RuntimeError, match="undefined"):
        compiling.build('extern "C" __global__ void wrong() { undefined_name(); }')


def test_machine_code_is_kept_on_disk_and_a_broken_copy_is_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv(compiling.CACHE_VARIABLE, str(tmp_path))
    source = 'extern "C" __global__ void kept(float* x) { x[threadIdx.x] *= 3.0f; }'
    first = compiling._build.__wrapped__(source)
    (file,) = tmp_path.iterdir()
    assert compiling._build.__wrapped__(source) == first
    for broken in (b"", b"not gzip", file.read_bytes()[:-20]):
        file.write_bytes(broken)
        again = compiling._build.__wrapped__(source)
        assert again.digest == first.digest and again.cubin == first.cubin


def test_sources_compiled_in_other_processes_are_those_compiled_here(tmp_path, monkeypatch):
    monkeypatch.setenv(compiling.CACHE_VARIABLE, str(tmp_path / "kept"))
    good = [f'extern "C" __global__ void times(float* x) {{ x[threadIdx.x] *= {n}.0f; }}' for n in (5, 7)]
    with pytest.raises(RuntimeError, match="undefined"):
        compiling.build_all([*good, 'extern "C" __global__ void wrong() { undefined_name(); }'], workers=3)
    assert set(good) <= set(compiling._compiled)
    monkeypatch.setenv(compiling.CACHE_VARIABLE, str(tmp_path / "other"))
    monkeypatch.setattr(compiling, "_compiled", {})
    for source in good:
        assert compiling._build.__wrapped__(source).digest == compiling.build(source).digest


def test_without_a_gpu_it_says_what_is_needed():
    assert "needs a Hopper GPU" in unavailable("cpu")


@pytest.mark.parametrize("name", (*FAMILIES, "tensor"))
def test_cases_have_one_set_of_keys_and_quick_ones_are_among_them(name):
    one = experiment("some", "title", family(name).probes)
    cases = one.cases(Settings(device="cuda"))
    assert len({frozenset(case) for case in cases}) == 1
    assert len({str(sorted(case.items())) for case in cases}) == len(cases)
    few = one.cases(Settings(device="cuda", quick=True))
    assert 0 < len(few) < len(cases) and all(case in cases for case in few)
    workload = one.build(cases[0], Settings(device="cpu"))
    assert all("Hopper" in impl.unavailable for impl in workload.implementations)


def test_shapes_do_not_apply():
    one = experiment("some", "title", family("alu").probes)
    with pytest.raises(InvalidInputError, match="own sizes"):
        one.cases(Settings(device="cpu", shapes=({"batch": 1},)))


def test_an_integer_beyond_32_bits_is_not_cut():
    with pytest.raises(InvalidInputError, match="32 bits"):
        launch._value(1 << 40)
    assert launch._value(2**32 - 1)[0].value == -1  # the same 32 bits


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_launching_without_a_gpu_is_an_error_of_this_library():
    with pytest.raises(HardwareError, match="Hopper"):
        launch.launch("", "f", [])
