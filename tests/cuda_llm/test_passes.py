"""Candidates of several kernels, one launched after the other: what may be in them, and that all of them run."""

from __future__ import annotations

import pytest

from gpu_accel.cuda_llm import TASKS, Sandbox, Verdict, check, harness
from gpu_accel.cuda_llm.candidate import Candidate
from gpu_accel.cuda_llm.verdict import Rejected
from gpu_accel.testing.two_passes import CUDA

TWO = [name for name, task in TASKS.items() if any(one.launch.then for one in task.templates)]


def of(name: str) -> Candidate:
    return next(one for one in TASKS[name].templates if one.launch.then)


@pytest.mark.parametrize("name", TWO)
def test_both_kernels_run_and_sums_come_in_one_order(name: str, sandbox: Sandbox) -> None:
    kernel = of(name)
    assert Candidate.parse(kernel.text) == kernel and Candidate.parse(kernel.text).digest == kernel.digest
    judged = check(kernel, name, sandbox=sandbox)
    assert judged.ok and "repeated in other memory, bit for bit" in judged.verified_by, judged
    assert [one.entry for one in harness.Program.of(kernel).passes] == [name, "finish"]
    small = kernel.with_(BLOCK=256, PROGRAMS=2)
    assert small.launch.passes[1].constants["PROGRAMS"] == 2, "constants are those of all kernels"
    assert check(small, name, sandbox=sandbox).ok
    lame = Candidate.parse(small.text.replace("(i < PROGRAMS)", "(i < PROGRAMS - 1)"))
    assert check(lame, name, sandbox=sandbox).verdict is Verdict.WRONG
    idle = Candidate.parse(small.text.replace("# grid = [1]", "# grid = [0]"))
    assert check(idle, name, sandbox=sandbox).name == "wrong(never_written)"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('# entry = "finish"', '# entry = "other"', "beside the kernel"),
        ("def finish(", "def last(", "beside the kernel"),
        ("def finish(", "def dot(", "beside the kernel|no kernel finish"),
        ('# entry = "finish"', "#", "needs entry"),
        ('# entry = "finish"', '# entry = "finish"\n# task = "dot"', "has no 'task'"),
        ("# [[then]]", "# [then]", "at most 3"),
        ("# grid = [1]", "# grid = []", "one to three sizes"),
        ("i = tl.arange(0, ALL)", "i = dot(0)", "unknown"),
        ("@triton.jit\ndef finish", "def finish", "decorated"),
        ("def finish(parts, out,", "def finish(parts, out, spare,", "nothing called 'spare'"),
        ("tl.store(out,", "tl.store(parts,", ""),
    ],
)
def test_what_is_refused(old: str, new: str, said: str, sandbox: Sandbox) -> None:
    text = of("dot").text
    assert old in text
    judged = check(text.replace(old, new), "dot", sandbox=sandbox)
    assert not judged.ok
    if said:
        assert any(one in judged.detail for one in said.split("|")), judged


def test_at_most_four_kernels(sandbox: Sandbox) -> None:
    more = '# [[then]]\n# entry = "finish"\n# grid = [1]\n'
    text = of("dot").text.replace("# [[then]]", more + "# [[then]]")
    assert len(Candidate.parse(text).launch.then) == 2, "one may run twice"
    assert check(text, "dot", sandbox=sandbox).ok
    with pytest.raises(Rejected, match="at most 3"):
        Candidate.parse(text.replace("# [[then]]", more + more + "# [[then]]", 1))


def test_cuda_names_every_kernel(sandbox: Sandbox) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC: pip install 'gpu-accel[microbenchmarks]'")
    assert Candidate.parse(Candidate.parse(CUDA).text) == Candidate.parse(CUDA)
    assert check(CUDA, "reduction", sandbox=sandbox).verdict is Verdict.UNVERIFIED
    judged = check(CUDA.replace("__global__ void finish", "__global__ void other"), "reduction", sandbox=sandbox)
    assert judged.verdict is Verdict.MALFORMED and "finish" in judged.detail
    hidden = CUDA.replace('extern "C" __global__ void finish', "__global__ void finish")
    judged = check(hidden, "reduction", sandbox=sandbox)
    assert judged.verdict is Verdict.COMPILE_ERROR and "finish" in judged.detail
    first = 'extern "C" __global__ void part'
    kept = CUDA.replace(first, f"__device__ float kept[64];\n{first}")
    assert check(kept, "reduction").name == "cheating(state)", "kernels speak through workspaces, not variables"
