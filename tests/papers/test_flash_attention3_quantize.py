"""The `quantize` experiment on a CPU: what it judges, what it refuses, and a run that checks and times nothing."""

from __future__ import annotations

import importlib

import pytest
import torch

from gpu_accel.errors import IncorrectResultError, UnsupportedError
from gpu_accel.flash_attention3.reference_fp8 import quantize_reference
from gpu_accel.testing.quantized import hadamard_excess
from gpu_accel.workbench import runner
from gpu_accel.workbench.experiment import Settings
from gpu_accel.workbench.registry import paper

FA3 = paper("fa3")
FA3.experiment("quantize")  # imports the folder as a package
quantize = importlib.import_module(f"{FA3._package()}.quantize")

CPU = Settings(device="cpu", precision="fp8")
SUM_ERROR = 128 / 16 * 18 * 2.0**-23  # of the tensor cores at head_dim 128


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
def test_the_bound_takes_rounding_and_refuses_the_next_code(dtype):
    x = torch.randn(1, 2, 300, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    values, scales = quantize_reference(x, hadamard=True, seed=3, dtype=dtype)

    def excess(values, scales):
        return hadamard_excess(x, values, scales, sum_error=SUM_ERROR, dtype=dtype, seed=3)

    assert max(excess(values, scales)) <= 1
    wrong = values.clone()
    wrong.view(torch.uint8)[0, 1, 299, 5] ^= 1  # a step off in one place of the last, shorter block
    assert excess(wrong, scales)[0] <= 1 < excess(wrong, scales)[1]
    off = scales.clone()
    off[0, 1, 2] *= 1 + 2.0**-10
    assert excess(values, off)[0] > 1
    wrong.view(torch.uint8)[0, 1, 299, 5] = 0x7F  # NaN
    assert not excess(wrong, scales)[1] <= 1


@pytest.mark.parametrize("what", ["hadamard", "transpose"])
def test_wrong_codes_are_found(what):
    (case,) = (one for one in quantize.list_cases(CPU)[:2] if one["with"] == what)
    x = quantize.draw(case, 0, "cpu")
    options = {"hadamard": what == "hadamard", "transpose": what != "hadamard", "seed": quantize.SIGNS}
    values, scales = quantize_reference(x, **options)
    assert quantize.judge(case, x, values, scales, exact=True).ok
    assert not quantize.judge(case, x, values, scales * 1.001, exact=True).ok
    values.view(torch.uint8)[0, 0, 0, 0] ^= 1
    assert not quantize.judge(case, x, values, scales, exact=True).ok
    if what == "transpose":  # on tensor cores -0 becomes 0, and nothing else changes
        assert not quantize.judge(case, x, values, scales, exact=False).ok
        zeros = torch.where(torch.arange(x.shape[-2])[:, None] % 2 == 0, -0.0, x)
        values, scales = quantize_reference(zeros, transpose=True)
        positive = torch.where(values.float() == 0, 0.0, values.float()).to(values.dtype)
        assert quantize.judge(case, zeros, positive, scales, exact=False).ok
        assert not quantize.judge(case, zeros, positive, scales, exact=True).ok


def test_changed_inputs_are_found_and_a_model_is_refused(monkeypatch):
    case = quantize.list_cases(CPU)[0]
    found = {one.name: one for one in quantize.build(case, CPU).implementations}
    assert set(found) == {"hopper", "portable", "copy"} and "9.0" in found["hopper"].unavailable
    timed = found["portable"].make(0)
    timed()
    assert timed.verify().ok

    def careless(x, **options):
        x[0, 0, 0, 0] += 1
        return quantize_reference(x, **{k: v for k, v in options.items() if k != "backend"})

    monkeypatch.setattr(quantize, "fp8_block_quantize", careless)
    timed()
    with pytest.raises(IncorrectResultError, match="changed its input"):
        timed.verify()
    with pytest.raises(UnsupportedError, match="draws its tensors"):
        quantize.build({**case, "input": "smollm2"}, CPU)


def test_grids():
    gpu = Settings(device="cuda", precision="fp8")
    sizes = {2 * c["batch"] * c["heads"] * c["seqlen_q"] * c["head_dim"] for c in quantize.list_cases(gpu)}
    assert sizes == {1 << 23, 1 << 26, 1 << 28} and len(quantize.list_cases(gpu)) == 12
    asked = Settings(device="cuda", precision="fp8", shapes=({"seqlen": 300, "head_dim": 64},))
    assert [(c["with"], c["seqlen_k"], c["heads"], c["batch"]) for c in quantize.list_cases(asked)] == [
        ("hadamard", 300, 32, 1), ("transpose", 300, 32, 1),
    ]  # fmt: skip


def test_a_run_on_a_cpu_checks_and_times_nothing():
    result = runner.run("fa3", ["quantize"], Settings(device="cpu", precision="fp8", quick=True))
    assert result.status == "ok" and not result.incorrect
    assert {r.metric for r in result.records} == {"correct"} and {r.kind for r in result.records} == {"checked"}
    assert {r.impl for r in result.records} >= {"portable", "copy"}
    assert all(outcome.why for outcome in result.skipped)
