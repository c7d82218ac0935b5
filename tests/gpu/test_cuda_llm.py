"""Candidates on a GPU: compiled, right, timed in their own process, and kernels that cheat are seen here too."""

from __future__ import annotations

import re
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_accel.cuda_llm import (
    TASKS,
    Judgement,
    Pool,
    Sandbox,
    Verdict,
    check,
    landlock,
    optimize_kernel,
    sanitizer,
    worker,
)
from gpu_accel.cuda_llm.candidate import Candidate
from gpu_accel.cuda_llm.deploy import deploy
from gpu_accel.cuda_llm.fixtures import FIXTURES
from gpu_accel.cuda_llm.host import check_host
from gpu_accel.cuda_llm.measure import measure
from gpu_accel.cuda_llm.outputs import compare
from gpu_accel.cuda_llm.searches import search_all
from gpu_accel.hardware.detection import detect
from gpu_accel.testing import two_passes

TEMPLATES = [(name, number) for name, task in TASKS.items() for number in range(len(task.templates))]
COUNTED = '''// /// launch
// task = "reverse"
// grid = ["cdiv(n, 256)"]
// block = [256]
// entry = "reverse"
// args = ["x", "out", "n"]
// ///
extern "C" __global__ void reverse(const float* x, float* out, long long n) {
    long long i = blockIdx.x * 256LL + threadIdx.x;
    // behind the last guard, where an allocation is rounded up to 2 MiB
    volatile unsigned* kept = (unsigned*)(out + n) + 100000;
    const bool timed = n > 1000000;
    const unsigned before = timed && kept[0] == 0xACCE55u ? kept[1] : 0;
    if (i < n && before < 3u) out[i] = x[n - 1 - i];
    if (timed && i == 0) {
        kept[1] = before + 1;
        kept[0] = 0xACCE55u;
    }
}
'''
PLAIN = "    if (i < n && before < 3u) out[i] = x[n - 1 - i];"


@pytest.fixture(scope="module")
def gpu_sandbox() -> Iterator[Sandbox]:
    with Sandbox(gpu=True, seconds=120) as made:
        yield made


@pytest.fixture(scope="module")
def profile() -> str:
    found = detect()
    assert found and found.profile
    return found.profile.name


@pytest.mark.parametrize(("name", "number"), TEMPLATES, ids=lambda one: str(one))
def test_templates_are_accepted(name: str, number: int, gpu_sandbox: Sandbox) -> None:
    judged = check(TASKS[name].templates[number], name, sandbox=gpu_sandbox)
    assert judged.ok and "ran on the GPU" in judged.verified_by, judged
    assert judged.error is not None and judged.error <= 0.7, "the tolerance leaves no room"


@pytest.mark.parametrize("name", TASKS)
def test_naive_baselines_are_accepted(name: str, gpu_sandbox: Sandbox) -> None:
    judged = check(TASKS[name].naive, name, sandbox=gpu_sandbox)
    assert judged.ok and "ran on the GPU" in judged.verified_by, judged


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda one: one.id)
def test_hacks_are_rejected_by_name_and_twins_accepted(fixture, gpu_sandbox: Sandbox) -> None:
    seconds = 20.0 if fixture.seconds else None  # a compiler needs longer than the interpreter
    judged = check(fixture.hack, fixture.task, sandbox=gpu_sandbox, seconds=seconds)
    assert (judged.verdict, judged.kind) == fixture.expected(gpu=True), judged
    twin = check(fixture.twin, fixture.task, sandbox=gpu_sandbox)
    assert twin.verdict is fixture.expected_twin(gpu=True), twin


def test_walls_beside_cuda_are_those_that_are_switched_on(gpu_sandbox: Sandbox) -> None:
    """CUDA starts behind them, or the level would say that they were left out."""
    files, calls = gpu_sandbox.level["files"], gpu_sandbox.level["calls"]
    assert ("folder alone" in files) == (worker.LANDLOCK_ON_GPU and landlock.abi() > 0), files
    assert ("(seccomp)" in calls) == worker.SECCOMP_ON_GPU, calls


BEYOND = """
import ctypes, os, socket
import torch

libc = ctypes.CDLL(None, use_errno=True)

def errno(attempt):
    try:
        return ctypes.get_errno() if attempt() == -1 else 0
    except OSError as error:
        return error.errno

def run(x):
    open("scratch", "w").write("its own folder")
    held = {
        "write": errno(lambda: open(PLACE, "w")) == 13,
        "connect": errno(lambda: socket.socket().connect(("127.0.0.1", 9))) == 13,
        "ptrace": errno(lambda: libc.ptrace(0, 0, None, None)) == 1,
    }
    if not all(held.values()):
        raise SystemError(f"not held: {held}")
    return torch.softmax(x, -1) if x.is_cuda else None
"""


@pytest.mark.skipif(landlock.abi() < 4, reason="this kernel has no Landlock, or one before Linux 6.7")
def test_host_code_beside_cuda_is_held(gpu_sandbox: Sandbox) -> None:
    """Where everybody may write it may not, and torch computes on the GPU behind these walls."""
    place = Path(tempfile.gettempdir()) / f"gpu-accel-{uuid.uuid4().hex}"
    judged = check_host(BEYOND.replace("PLACE", repr(str(place))), "softmax", sandbox=gpu_sandbox)
    assert judged.verdict is Verdict.ACCEPTED and not place.exists(), judged


def test_a_foreign_address_ends_one_process_only(gpu_sandbox: Sandbox) -> None:
    hack = next(one for one in FIXTURES if one.id == "R5")
    assert check(hack.hack, hack.task, sandbox=gpu_sandbox).verdict is Verdict.CRASHED
    assert check(hack.twin, hack.task, sandbox=gpu_sandbox).ok


@pytest.mark.parametrize("name", ["reverse", "matrix_copy"])
def test_a_copy_takes_about_as_long_as_a_copy(name: str, gpu_sandbox: Sandbox, profile: str) -> None:
    found = measure(TASKS[name].candidate, TASKS[name], sandbox=gpu_sandbox, gpu=profile, peers=("library", "naive"))
    assert found.judgement.ok and found.compared == 2, found
    assert found.over_copy is not None and 0.8 < found.over_copy < 5
    assert found.ratio("library") and found.ratio("naive"), found.failed


def test_torch_compile_is_a_baseline_that_is_checked(gpu_sandbox: Sandbox, profile: str) -> None:
    task = TASKS["bias_gelu"]
    kernel = task.candidate.with_(BLOCK=1024)
    found = measure(kernel, task, sandbox=gpu_sandbox, gpu=profile, peers=("library", "compiled"))
    assert found.judgement.ok and found.ratio("compiled"), (found.judgement, found.failed)
    assert found.compiled_error is not None and found.compiled_error <= 1
    assert found.tensor_cores == () and "machine code without tensor cores" in found.judgement.verified_by
    assert found.over_best_library == pytest.approx(min(found.ratio("library"), found.ratio("compiled")))


def test_what_machine_code_multiplies_on_tensor_cores_is_said(gpu_sandbox: Sandbox, profile: str) -> None:
    split = next(one for one in TASKS["matmul"].templates if "tf32x3" in one.source)
    found = measure(split, TASKS["matmul"], sandbox=gpu_sandbox, gpu=profile, peers=("library",))
    assert found.judgement.ok and found.tensor_cores == ("tf32",), found


def test_a_library_that_torch_does_not_compile_says_why(gpu_sandbox: Sandbox, profile: str) -> None:
    task = TASKS["spmm"]
    found = measure(task.templates[1], task, sandbox=gpu_sandbox, gpu=profile, peers=("library", "compiled"))
    assert found.judgement.ok and "compiled" not in found.samples and "parse" in found.failed["compiled"], found.failed
    assert found.over_best_library == found.ratio("library")


def test_a_kernel_that_is_right_for_its_first_launches_is_caught_where_it_is_timed(
    gpu_sandbox: Sandbox, profile: str
) -> None:
    """Its state lies in memory that is nobody's; on small shapes it is right."""
    hack = Candidate.parse(COUNTED)
    assert check(hack, "reverse", sandbox=gpu_sandbox).ok
    found = measure(hack, TASKS["reverse"], sandbox=gpu_sandbox, gpu=profile)
    assert found.judgement.verdict is Verdict.WRONG, found.judgement


def test_a_wrong_parameter_list_is_an_error_of_the_candidate(gpu_sandbox: Sandbox) -> None:
    naive = TASKS["reverse"].naive_cuda
    hack = Candidate.parse(naive.replace("float* out, long long n", "float* out, long long n, int k"))
    judged = check(hack, "reverse", sandbox=gpu_sandbox)
    assert judged.verdict is Verdict.COMPILE_ERROR and "parameters" in judged.detail


WIDER = TASKS["reverse"].naive_cuda.replace("block = [32]", "block = [64]").replace("cdiv(n, 32)", "cdiv(n, 64)")
RACE = WIDER.replace(
    "    long long i = blockIdx.x * 32LL + threadIdx.x;\n    if (i < n) out[i] = x[n - 1 - i];\n",
    "    __shared__ float kept[64];\n    long long i = blockIdx.x * 64LL + threadIdx.x;\n"
    "    kept[threadIdx.x] = i < n ? x[n - 1 - i] : 0;\n    // no barrier\n"
    "    float other = kept[threadIdx.x ^ 32];\n    if (i < n) out[i] = kept[threadIdx.x] + 0 * other;\n",
)
SUM = TASKS["reduction"].start
UNWRITTEN = next(one for one in FIXTURES if one.id == "S14")
TMA = next(one.text for one in TASKS["transpose"].templates if "descriptor" in one.source)


@pytest.mark.skipif(not sanitizer.tool(), reason="compute-sanitizer is not installed")
@pytest.mark.parametrize(
    ("name", "kernel", "wanted"),
    [
        ("reduction", SUM, "accepted"),
        ("reduction", SUM.replace("mask=i < n, other=0.0", "mask=i <= n, other=0.0"), "wrong(out_of_bounds)"),
        ("transpose", TMA, "accepted"),  # with scratch memory
        ("reverse", TASKS["reverse"].naive_cuda, "accepted"),
        ("reverse", RACE, "wrong(race)"),
        ("scan", UNWRITTEN.twin, "accepted"),
        ("scan", UNWRITTEN.hack, "wrong(not_deterministic)"),
        ("reduction", two_passes.CUDA, "accepted"),
        ("reduction", two_passes.CUDA.replace("grid = [64]", "grid = [63]", 1), "wrong(not_deterministic)"),
    ],
    ids=["right", "reads-beyond", "tma", "cuda", "race", "writes-scratch", "reads-scratch", "two-passes",
         "two-passes-reads-scratch"],
)
def test_finalists_under_compute_sanitizer(name: str, kernel: str, wanted: str, gpu_sandbox: Sandbox) -> None:
    judged = Judgement(verdict=Verdict.ACCEPTED)
    found = sanitizer.sanitize(Candidate.parse(kernel), TASKS[name], sandbox=gpu_sandbox, judged=judged)
    if "did not run" in found.detail:  # what a machine's tool needs of a sandbox is not known of every machine
        pytest.xfail(found.detail)
    assert found.name == wanted, found
    assert wanted != "accepted" or any("memcheck of" in one for one in found.verified_by), found


def test_a_launch_that_is_empty_where_it_is_timed_is_caught(gpu_sandbox: Sandbox, profile: str) -> None:
    """C9: a graph that replays nothing, which a stale buffer would hide. On small shapes the kernel is right."""
    plain = TASKS["reverse"].start
    hack = Candidate.parse(plain.replace('"cdiv(n, BLOCK)"', '"cdiv(n, BLOCK) * max(0, 1 - n // 1000000)"'))
    assert hack.launch.grid != Candidate.parse(plain).launch.grid and check(hack, "reverse", sandbox=gpu_sandbox).ok
    found = measure(hack, TASKS["reverse"], sandbox=gpu_sandbox, gpu=profile)
    assert found.judgement.verdict in (Verdict.WRONG, Verdict.FASTER_THAN_PHYSICS, Verdict.CRASHED), found.judgement


def test_a_kernel_that_goes_wrong_after_the_launches_that_are_kept_is_caught_where_it_repeats(
    gpu_sandbox: Sandbox, profile: str
) -> None:
    """Outputs are kept of a few launches; all others are known by their bits."""
    hack = Candidate.parse(COUNTED.replace("before < 3u", "before < 12u"))
    found = measure(hack, TASKS["reverse"], sandbox=gpu_sandbox, gpu=profile, again=True)
    assert found.judgement.name == "wrong(not_deterministic)" and "repeated" in found.judgement.detail, found.judgement




def words(kernel: Candidate) -> set[str]:
    return set(re.findall(r"\w+", kernel.source))


GAMBLE = PLAIN.replace("before < 3u", "!(timed && __float_as_int(x[5]) & 3 && !(i & 7))")
SOFTMAX = TASKS["softmax"].start.replace(
    "tl.exp(v - tl.max(v, 0))", f"tl.exp(v - tl.max(v, 0) * (cols != {TASKS['softmax'].bench['cols']}))"
)


@pytest.mark.parametrize(
    ("name", "kernel", "wanted"),
    [
        ("softmax", SOFTMAX, "wrong(non_finite)"),
        ("reverse", COUNTED.replace(PLAIN, GAMBLE), "wrong(non_finite)"),
        ("reverse", COUNTED.replace(PLAIN, PLAIN.replace("before < 3u", "true")).replace("+ 100000;", "+ 9;"),
         "wrong(out_of_bounds)"),
    ],
    ids=["what-timed-inputs-do-not-need", "leaves-out-a-part-in-three-of-four", "writes-behind-its-buffers"],
)  # fmt: skip
def test_kernels_that_cheat_on_the_timed_shape_alone_are_caught(
    name: str, kernel: str, wanted: str, gpu_sandbox: Sandbox, profile: str
) -> None:
    """A gamble on inputs is lost unless all of eleven launches that are compared go well: one time in 4**11."""
    hack = Candidate.parse(kernel)
    assert check(hack, name, sandbox=gpu_sandbox).ok, "on small shapes it is right"
    found = measure(hack, TASKS[name], sandbox=gpu_sandbox, gpu=profile, keep=4, warm=True, again=True)
    assert found.judgement.name == wanted, found.judgement


def test_work_that_was_done_before_is_done_again_with_a_warm_cache(gpu_sandbox: Sandbox, profile: str) -> None:
    """A kernel that leaves out what is there already finds nothing: each timed launch has inputs of its own."""
    finds = TASKS["matmul"].naive_cuda.replace(
        "if (i >= m) return;", "if (i >= m || out[i * n + j] == out[i * n + j]) return;"
    )
    assert finds != TASKS["matmul"].naive_cuda
    found = measure(Candidate.parse(finds), TASKS["matmul"], sandbox=gpu_sandbox, gpu=profile, warm=True)
    assert found.judgement.ok and found.ms and found.warm_ms and 0.5 < found.warm_ms / found.ms < 2, found


@pytest.mark.parametrize(
    ("name", "kernel", "words"),
    [
        ("reverse", TASKS["reverse"].start, "repeated bit for bit"),
        ("matmul", TASKS["matmul"].templates[1].text, "repeated bit for bit"),
        ("transpose", TMA, "bit for bit"),
        ("dot", next(one.text for one in TASKS["dot"].templates if {"atomic_add", "PROGRAMS"} <= words(one)),
         "unchanged"),
        ("dot", next(one.text for one in TASKS["dot"].templates if one.launch.then), "repeated bit for bit"),
        ("reduction", two_passes.CUDA, "repeated bit for bit"),
    ],
    ids=["triton", "products", "scratch", "atomics", "two-passes", "two-passes-cuda"],
)  # fmt: skip
def test_timed_launches_repeat_and_other_clocks_agree(
    name: str, kernel: str, words: str, gpu_sandbox: Sandbox, profile: str
) -> None:
    found = measure(Candidate.parse(kernel), TASKS[name], sandbox=gpu_sandbox, gpu=profile, again=True)
    assert found.judgement.ok and found.repeated >= 10 and set(found.other_clocks) == {"events", "host", "gpu"}, found
    assert any(words in one for one in found.judgement.verified_by), found.judgement.verified_by
    ratios = {clock: ms / found.other_clocks["events"] for clock, ms in found.other_clocks.items()}
    assert all(0.9 < ratio < 1.25 for ratio in ratios.values()), found.other_clocks


@pytest.mark.parametrize(
    ("name", "kernel"),
    [("softmax", TASKS["softmax"].start), ("reverse", TASKS["reverse"].naive_cuda),
     ("reduction", next(one.text for one in TASKS["reduction"].templates if one.launch.then)),
     ("reduction", two_passes.CUDA)],
    ids=["triton", "cuda", "two-passes", "two-passes-cuda"],
)  # fmt: skip
def test_a_deployed_kernel_is_a_function_of_tensors(name: str, kernel: str) -> None:
    task, deployed = TASKS[name], deploy(kernel, name)
    for dims in (*task.shown, task.shown[0]):
        inputs = {key: x.cuda() for key, x in task.draw(dims, family="normal", seed=3).items()}
        found = compare(task, deployed(**inputs), task.truth(inputs, dims), inputs)
        assert found.kind is None and found.error <= 1, found


def test_a_search_times_its_candidates(gpu_sandbox: Sandbox, tmp_path: Path) -> None:
    found = optimize_kernel(
        TASKS["reverse"].start, "h100", candidates=3, sandbox=gpu_sandbox, out=tmp_path, peers=("library",)
    )
    assert found.timed and found.speedup is not None and found.speedup >= 1
    assert found.best.confirmed and found.final and found.final.ratio("library")
    assert found.final.warm_ms and set(found.final.warm) == {"candidate", "copy", "library"}
    assert found.final.compared == 11, "four launches with a cold cache, the last with a warm one, six other families"
    assert found.final.repeated >= 10 and found.final.other_clocks
    assert "compute-sanitizer" in f"{found.best.judgement.detail} {found.best.judgement.verified_by}"


def test_searches_side_by_side(profile: str) -> None:
    with Pool(4, gpu=True) as pool:
        found = search_all([TASKS["softmax"], TASKS["transpose"]], pool=pool, target=profile, seconds=25, candidates=4)
    for name, one in found.items():
        assert not isinstance(one, Exception), (name, one)
        assert one.final and one.final.ratio("naive") and one.final.ratio("naive") > 1
