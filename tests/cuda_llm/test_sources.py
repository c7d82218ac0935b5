"""What sources may contain, and 200 malformed candidates that each get a typed verdict."""

from __future__ import annotations

import os

import pytest

from gpu_accel.cuda_llm import TASKS, Kind, Verdict, check, cuda_source
from gpu_accel.cuda_llm.candidate import Candidate
from gpu_accel.cuda_llm.compiled import tensor_types_of
from gpu_accel.cuda_llm.fuzz import HEALTH, fuzz, mutants
from gpu_accel.cuda_llm.pool import Pool
from gpu_accel.cuda_llm.triton_source import canonical
from gpu_accel.cuda_llm.verdict import Rejected

FUZZED = int(os.environ.get("GPU_ACCEL_FUZZ", "16"))  # 1000 for a thorough run


def body(*lines: str) -> str:
    return "@triton.jit\ndef k(x, out, n):\n" + "".join(f"    {line}\n" for line in lines)


@pytest.mark.parametrize("name", TASKS)
def test_our_kernels_pass_and_are_printed_anew(name: str) -> None:
    kernel = canonical(TASKS[name].candidate.source)
    assert kernel.name == name and set(kernel.constants) == set(TASKS[name].candidate.launch.constants)
    again = canonical(kernel.source)
    assert again.source == kernel.source


@pytest.mark.parametrize(
    "line",
    [
        "tl.load.__globals__", "x.__class__", "tl.core", "(tl.load)(x)(n)", "x.data_ptr()", "tl.load(x, _b=None)",
        "[tl.load(x) for i in range(3)]", "f = lambda: 1", "tl.load(*x)", "tl.load(**x)", "del x", "import os",
        "assert n", "with x: pass", "x.y = 1", "x[0] = 1", "yield x", "(y := 1)", 'f"{x}"', "a = await x", "tl = 1",
        "range = 1", "for i in x: pass", "match n:\n        case 1: pass", "global g", "return x", "raise x",
        "tl.static_print(x)",
        'y = "a string that is far too long"', "y = 1j", "y = ...", "y = {1: 2}", "def inner(): pass", "class A: pass",
        "try:\n        pass\n    except E:\n        pass", "__import__('os')", "print(x)", "_y = 1", "y = b'1'",
        "tl.math.__dict__", "x.to.__self__", "tl.extra.cuda.globaltimer()", "y = x.shape",
    ],
)  # fmt: skip
def test_refused_in_a_kernel(line: str) -> None:
    with pytest.raises(Rejected) as caught:
        canonical(body(line))
    assert caught.value.verdict in (Verdict.MALFORMED, Verdict.COMPILE_ERROR, Verdict.CHEATING)
    assert caught.value.detail


@pytest.mark.parametrize(
    "source",
    [
        "", "x = 1", "def k(x): pass", "@triton.autotune\ndef k(x): pass", "@triton.jit(debug=True)\ndef k(x): pass",
        "@triton.jit\ndef k(*x): pass", "@triton.jit\ndef k(x=[]): pass", "@triton.jit\ndef k(x: int): pass",
        "@triton.jit\ndef k(x): pass\n@triton.jit\ndef l(x): pass", "import os\n@triton.jit\ndef k(x): pass",
        "from triton.language import *\n@triton.jit\ndef k(x): pass", "@triton.jit\ndef k(x) -> int: pass",
        "@triton.jit\nasync def k(x): pass",
        "@triton.jit\ndef k[T](x): pass", "@triton.jit\ndef tl(x): pass", "def", "(" * 500, "-" * 30_000 + "1",
        "@triton.jit\ndef k(x):\n" + "    if x:\n" * 5,
    ],
)  # fmt: skip
def test_refused_as_a_module(source: str) -> None:
    with pytest.raises(Rejected) as caught:
        canonical(source)
    assert caught.value.verdict in (Verdict.MALFORMED, Verdict.COMPILE_ERROR, Verdict.CHEATING)


def test_a_plain_mistake_is_not_called_cheating() -> None:
    for line in ("y = z", "foo(x)", "assert n", "y = {1: 2}"):
        with pytest.raises(Rejected) as caught:
            canonical(body(line))
        assert caught.value.verdict is not Verdict.CHEATING, line


@pytest.mark.parametrize(
    "line",
    [
        "y = tl.load(x + 1, mask=n > 0, other=0.0).to(tl.float32)",
        "while n > 3:\n        n -= 1",
        'y = float("-inf")',
        "y: tl.constexpr = 4",
        "tl.math.exp(n)",
        "a, b = n, n",
    ],
)
def test_allowed_in_a_kernel(line: str) -> None:
    assert line.split()[0] in canonical(body(line)).source


def test_cuda_comments_and_strings_do_not_count() -> None:
    naive = TASKS["reverse"].naive_cuda
    cuda_source.check(Candidate.parse(naive.replace("    if (i", "    // clock64() <<< static int\n    if (i")))
    with pytest.raises(Rejected) as caught:
        cuda_source.check(Candidate.parse(naive.replace("    if (i", "    /* */ static int k;\n    if (i")))
    assert caught.value.kind is Kind.STATE


# -- fuzz


class Refusing:
    """A sandbox that runs nothing: what reaches it has passed the reading."""

    described, gpu = "", False

    def folder(self):
        raise Rejected(Verdict.UNVERIFIED, None, "reached the sandbox")


def test_200_malformed_candidates_get_a_typed_verdict_each() -> None:
    counts: dict[Verdict, int] = {}
    for number, text in enumerate(mutants(200)):
        judged = check(text, "matrix_copy", sandbox=Refusing(), seed=number)  # type: ignore[arg-type]
        assert isinstance(judged.verdict, Verdict) and judged.detail, text
        counts[judged.verdict] = counts.get(judged.verdict, 0) + 1
    assert counts[Verdict.MALFORMED] > 40 and Verdict.ACCEPTED not in counts
    assert sum(counts.values()) == 200


def test_some_of_them_go_through_the_sandbox(sandbox) -> None:
    with Pool(own=(sandbox,)) as pool:
        found = fuzz(FUZZED, pool=pool)
    assert found.ok, found
    assert sum(found.counts.values()) == FUZZED and found.healthy == -(-FUZZED // HEALTH)
    assert "accepted" not in found.counts or found.counts["accepted"] < FUZZED / 10, "most are broken"


def test_what_machine_code_multiplies_on_tensor_cores() -> None:
    lines = {
        "FFMA R0, R1, R2, R0": [],
        "HFMA2.MMA R2, -RZ, RZ, 0, 0": [],  # how a compiler may write a constant
        "HMMA.1688.F32.TF32 R4, R8, R10, R4": ["tf32"],
        "HGMMA.64x128x8.F32.TF32 R24, gdesc[UR4]": ["tf32"],
        "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4]": ["bf16"],
        "HMMA.16816.F32 R4, R8, R10, R4": ["fp16"],
        "QGMMA.64x64x32.F32.E4M3.E4M3 R24, gdesc[UR4]": ["fp8"],
        "IMMA.16832.S8.S8 R4, R8.ROW, R10.COL, R4": ["int8"],
        "DMMA.8x8x4 R4, R8, R10, R4": ["fp64"],
    }
    for line, types in lines.items():
        assert tensor_types_of(f"        /*0450*/                   {line} ;") == types, line
    assert tensor_types_of("\n".join(lines)) == ["fp8", "int8", "fp16", "bf16", "tf32", "fp64"]
