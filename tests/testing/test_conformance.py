"""The conformance cases find what is wrong, and what kills or stalls a library is a verdict too."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from gpu_accel.errors import InvalidInputError
from gpu_accel.flash_attention3.reference import attention_reference
from gpu_accel.testing.conformance import CASES, LIBRARIES, resolve, run_case, run_library

CPU = torch.device("cpu")
PLAIN = [name for name, case in CASES.items() if not case.gpu_only]


def right(q, k, v, **options):
    return LIBRARIES["reference"].attend(q, k, v, **options)


@pytest.mark.parametrize("name", PLAIN)
def test_the_reference_passes(name):
    assert run_case(CASES[name], right, CPU) == ("pass", "")


def causal_top_left(q, k, v, *, causal=False, **options):
    if causal and q.dim() == 4 and k.shape[1] > q.shape[1]:
        k, v = k[:, : q.shape[1]], v[:, : q.shape[1]]
    return right(q, k, v, causal=causal, **options)


def window_without_the_query(q, k, v, *, window_size=(-1, -1), **options):
    left = window_size[0] + (window_size[0] >= 0)
    return right(q, k, v, window_size=(left, window_size[1]), **options)


def strides_of_q(q, k, v, **options):
    if q.dim() == 4 and k.stride() != q.stride():
        k = torch.as_strided(k, k.shape, v.stride(), k.storage_offset())
    return right(q, k, v, **options)


def zero_instead_of_minus_infinity(q, k, v, **options):
    o, lse = right(q, k, v, **options)
    return o, lse.clamp_min(-50000.0)


def sequences_see_each_other(q, k, v, *, cu_seqlens_q=None, cu_seqlens_k=None, **options):
    if cu_seqlens_q is None:
        return right(q, k, v, **options)
    o, lse = right(q[None], k[None], v[None], **options)
    return o[0], lse[0]


def forgets(q, k, v, **options):
    o, lse = right(q, k, v, **options)
    o = o.clone()
    o[..., -1, :] = float("nan")
    return o, lse


def coin(q, k, v, **options):
    o, lse = right(q, k, v, **options)
    return o + 1e-3 * torch.randn_like(o), lse


@pytest.mark.parametrize(
    ("attend", "found_by"),
    [
        (causal_top_left, "causal-alignment"),
        (window_without_the_query, "window-counts-the-query"),
        (strides_of_q, "strides-of-their-own"),
        (zero_instead_of_minus_infinity, "more-queries-than-keys"),
        (sequences_see_each_other, "packed-rows-without-keys"),
        (forgets, "packed-head-dim-192"),
        (coin, "head-dim-72-repeats"),
    ],
)
def test_each_fault_is_found_by_the_case_made_for_it(attend, found_by):
    verdict, detail = run_case(CASES[found_by], attend, CPU)
    assert verdict == "wrong" and detail


def test_bottom_right_is_what_the_truth_means():
    q, k, v = (torch.randn(1, n, 1, 8) for n in (2, 5, 5))
    _, lse = attention_reference(q, k, v, causal=True)
    alone = (q[0, 0, 0] @ k[0, :4, 0].T * 8**-0.5).logsumexp(0)
    torch.testing.assert_close(lse[0, 0, 0], alone)


@pytest.fixture
def broken(tmp_path, monkeypatch):
    (tmp_path / "broken_attention.py").write_text(
        "import os, time\n"
        "def dies(q, k, v, **options):\n    os.kill(os.getpid(), 9)\n"
        "def stalls(q, k, v, **options):\n    time.sleep(600)\n"
        "def leaves(q, k, v, **options):\n    print('bye'); os._exit(0)\n"
        "def refuses(q, k, v, **options):\n    raise RuntimeError('head_dim not supported')\n"
        "def babbles(q, k, v, **options):\n    print('no end of line', end=''); raise NotImplementedError\n"
        "print('imported')\nnumber = 3\n"
        "def breaks(q, k, v, **options):\n    return q.no_such_attribute\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("function", "verdict", "word"),
    [
        ("dies", "crashed", "-9"),
        ("leaves", "crashed", "exit code 0"),
        ("stalls", "hung", "3 s"),
        ("breaks", "error", "no_such"),
        ("babbles", "refused", ""),
    ],
)
def test_what_a_library_does_to_its_process_is_a_verdict(broken, function, verdict, word):
    names = ["causal-alignment", "no-keys"] if function == "dies" else ["causal-alignment"]
    found = list(run_library(f"broken_attention:{function}", device="cpu", cases=names, timeout=3.0))
    assert [one.case for one in found] == names
    assert {one.verdict for one in found} == {verdict} and word in found[0].detail


def test_a_child_ends_with_its_parent(broken):
    """However that ended: the pipe to the child is closed, which nobody has to do."""
    command = [sys.executable, "-m", "gpu_accel.testing.conformance.processes", "broken_attention:stalls", "cpu"]
    child = subprocess.Popen([*command, "no-keys"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    child.stdin.close()
    assert child.wait(timeout=120) == 1


def test_a_refusal_is_no_failure():
    def refuses(*_, **__):
        raise RuntimeError("head_dim 64 is not supported")

    assert run_case(CASES["no-keys"], refuses, CPU) == ("refused", "RuntimeError: head_dim 64 is not supported")


def test_cases_for_gpus_say_so_on_a_cpu():
    (one,) = run_library("reference", device="cpu", cases=["replays-in-a-graph"])
    assert one.verdict == "not run" and "GPU" in one.detail


@pytest.mark.parametrize("name", ["sdpa", "no_such_module:attend", "torch:no_such_function"])
def test_unknown_libraries(name):
    with pytest.raises(InvalidInputError):
        resolve(name)


def test_an_import_prints_nothing_and_may_fail_in_any_way(broken, tmp_path, capsys):
    with pytest.raises(InvalidInputError, match="no function, but int"):
        resolve("broken_attention:number")
    assert capsys.readouterr().out == ""
    (tmp_path / "broken_import.py").write_text("raise ValueError('boom')")
    with pytest.raises(InvalidInputError, match="ValueError: boom"):
        resolve("broken_import:attend")


def test_the_command_prints_json_and_judges_ours():
    command = [sys.executable, "-m", "cli", "conformance", "--only", "no-keys", "--against", "sdpa-math", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    rows = json.loads(done.stdout)
    assert done.returncode == 0 and [row["library"] for row in rows] == ["gpu-accel", "sdpa-math"]
    assert all(row["verdict"] == "pass" for row in rows)
    wrong = subprocess.run([*command, "--only", "no-such-case"], capture_output=True, text=True, timeout=300)
    assert wrong.returncode == 2 and "no-such-case" in wrong.stdout
