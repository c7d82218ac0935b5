"""What sources may contain, and 200 malformed candidates that each get a typed verdict."""

from __future__ import annotations

import contextlib
import os
import time

import pytest

from gpu_accel.cuda_llm import TASKS, Judgement, Kind, Verdict, check, cuda_source
from gpu_accel.cuda_llm.candidate import Candidate
from gpu_accel.cuda_llm.compiled import tensor_types_of
from gpu_accel.cuda_llm.fuzz import HEALTH, fuzz, mutants
from gpu_accel.cuda_llm.harness import Program, draw
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


@pytest.mark.parametrize(
    ("text", "verdict", "kind"),
    [
        ('#/**/include "in0.bin"', Verdict.CHEATING, Kind.INPUT_OUTPUT),
        ('#inc\\\nlude "in0.bin"', Verdict.CHEATING, Kind.INPUT_OUTPUT),
        ('/* a\n*/ # embed "in0.bin"', Verdict.CHEATING, Kind.INPUT_OUTPUT),
        ('#if __has_include("/etc/passwd")\n#endif', Verdict.CHEATING, Kind.INPUT_OUTPUT),
        ("int a = '/*';\n__device__ int calls;\nint b = '*/';", Verdict.CHEATING, Kind.STATE),
        ("int a = L'/*';\n__device__ int calls;\nint b = L'*/';", Verdict.CHEATING, Kind.STATE),
        ("int a = 1'0 + '\"' + sizeof(\"// \"); __device__ int calls;", Verdict.CHEATING, Kind.STATE),
        ("#if 0\n' /*\n#endif\n__device__ int calls;\n#if 0\n' */\n#endif", Verdict.MALFORMED, None),
        ('u8R"(")"', Verdict.MALFORMED, None),
        ("/* open", Verdict.MALFORMED, None),
        ('// \\\n#include "in0.bin"', None, None),
        ("// don't R\"(\n/* \" */ const int fine = 1'000; // '", None, None),
    ],
)
def test_text_is_read_as_a_compiler_reads_it(text: str, verdict: Verdict | None, kind: Kind | None) -> None:
    kernel = Candidate.parse(TASKS["reverse"].naive_cuda.replace('extern "C"', f'{text}\nextern "C"'))
    if verdict is None:
        cuda_source.check(kernel)
        return
    with pytest.raises(Rejected) as caught:
        cuda_source.check(kernel)
    assert (caught.value.verdict, caught.value.kind) == (verdict, kind)


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (".global .align 4 .u32 calls;", Kind.STATE),
        (".visible .global .align 4 .b8 kept[64];", Kind.STATE),
        ("{ .global .u32 calls; }", Kind.STATE),
        (".global /* */ .f32 calls = 0f00000000;", Kind.STATE),
        ('.pragma "/*"; .global .u32 calls; .pragma "*/";', Kind.STATE),
        (".global .attribute(.managed) .align 4 .u32 calls;", Kind.STATE),
        ("mov.u64 %rd1, %clock64;", Kind.CLOCK),
        ("nanosleep.u32 9;", Kind.CLOCK),
        ("createpolicy.fractional.L2::evict_last.b64 %rd6, 1.0;", Kind.CACHE_POLICY),
        ("prefetch.global.L2 [%rd1];", Kind.CACHE_POLICY),
        ("    @%p1 trap;", Kind.FORGED_VERDICT),
        (".extern .func (.param .b32 f) vprintf\n.global .align 1 .b8 $str[3] = {1, 2, 3};", Kind.FORGED_VERDICT),
        (".extern .func (.param .b32 f) cudaLaunchDeviceV2", Kind.HOST_CODE),
        (".visible .entry k(.param .u64 .ptr .global .align 4 k_param_0)", None),
        ("ld.global.nc.f32 %f1, [%rd4]; st.global.f32 [%rd2], %f1; cvta.to.global.u64 %rd4, %rd1;", None),
        (".const .align 4 .u32 table[4] = {1, 2, 3, 4}; ld.global.L2::128B.f32 %f1, [%rd1];", None),
    ],
)
def test_ptx_shows_what_text_hides(line: str, kind: Kind | None) -> None:
    ptx = f".version 9.0\n.target sm_90a\n{line}\n"
    if kind is None:
        cuda_source.check_ptx(ptx)
        return
    with pytest.raises(Rejected) as caught:
        cuda_source.check_ptx(ptx)
    assert (caught.value.verdict, caught.value.kind) == (Verdict.CHEATING, kind) and kind in cuda_source.PTX_KINDS


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        ('y = tl.load(x, eviction_policy="evict_" + "last")', "cheating(cache_policy)"),
        ('y = tl.load(x, eviction_policy="evict_first"[:6])', "cheating(cache_policy)"),
        ('p = "evict_first"', "cheating(cache_policy)"),
        ('y = tl.load(x, eviction_policy=tl.constexpr("evict_first"))', "cheating(cache_policy)"),
        ('y = tl.load(x, eviction_policy=max("evict_first", ""))', "cheating(cache_policy)"),
        ('y = tl.load(x, other="what")', "malformed"),
        ('y = "ieee"', "malformed"),
        ('y = tl.load(x, eviction_policy="evict_first" if n > 3 else "")', ""),
        ('y = float("nan") + float("-inf")', ""),
    ],
)
def test_text_stands_where_a_call_takes_it(line: str, verdict: str) -> None:
    if not verdict:
        canonical(body(line))
        return
    with pytest.raises(Rejected) as caught:
        canonical(body(line))
    assert caught.value.judgement.name == verdict


@pytest.mark.parametrize("word", ["__device__ ", "static __device__ ", "__asm__ ", "__global__ ", "__device__\n", "1'"])
def test_no_text_takes_long_to_read(word: str) -> None:
    """Rules are read by the controller, which nothing ends: none of them may take more than a glance."""
    naive = TASKS["reverse"].naive_cuda
    kernel = Candidate.parse(naive + word * ((65_000 - len(naive)) // len(word)))
    begin = time.process_time()
    with contextlib.suppress(Rejected):
        cuda_source.check(kernel)
    assert time.process_time() - begin < 2, "0.3 s at most, where it was 5"


def test_what_a_candidate_says_moves_no_cursor() -> None:
    judged = Judgement(verdict=Verdict.WRONG, detail="a\x1b[2J\x07\u202e b", evidence=("\rline 1",))
    assert judged.detail == "a\\x1b[2J\\x07\\u202e b" and judged.evidence == ("\\rline 1",)


def test_scratch_memory_of_a_small_shape_is_small() -> None:
    """A dozen of them are filled by the controller."""
    scratch = '# [workspace.k]\n# shape = [99999999]\n# dtype = "int8"\n# [space]'
    many = TASKS["reverse"].start.replace("# [space]", scratch)
    with pytest.raises(Rejected, match="on a small shape"):
        draw(TASKS["reverse"], Candidate.parse(many), 1)


def test_a_word_in_a_comment_is_no_atomic() -> None:
    plain = TASKS["reverse"].naive_cuda
    for more, repeats in (("// atomic\n/* red */", True), ("// \n__device__ void f() { atomicAdd; }", False)):
        assert Program.of(Candidate.parse(plain + more)).repeats(TASKS["reverse"]) is repeats
