"""The paper's experiments: grids that hold the claims' shapes, bytes, and judges that can fail."""

from __future__ import annotations

import importlib

import pytest
import torch

from gpu_accel.workbench.experiment import Settings
from gpu_accel.workbench.registry import paper

TK = paper("tk")
GPU, CPU = Settings(device="cuda"), Settings(device="cpu")
TK.experiment("norms")  # imports the folder as a package
judging, norms, sequences = (importlib.import_module(f"{TK._package()}.{n}") for n in ("judging", "norms", "sequences"))


def test_every_measurable_claim_has_its_cases_in_the_grids():
    known = [(name, case) for name in TK.experiments for case in TK.experiment(name).cases(GPU)]
    orphans = [
        claim.id
        for claim in TK.claims()
        if claim.measure
        and not any(name == claim.measure.experiment and claim.measure.covers(case) for name, case in known)
    ]
    assert not orphans


def test_claims_of_a_gpu_are_not_settled_by_a_cpu():
    assert all(claim.needs for claim in TK.claims() if claim.measure)


@pytest.mark.parametrize("name", list(TK.experiments))
def test_quick_grids_are_part_of_the_whole(name):
    whole, quick = (TK.experiment(name).cases(Settings(device="cuda", quick=q)) for q in (False, True))
    assert all(one in whole for one in quick) and 0 < len(quick) < len(whole)


@pytest.mark.parametrize(
    ("op", "pass_", "tensors"),
    [("softmax", "forward", 2), ("softmax", "backward", 3), ("add_rms_norm", "forward", 4), ("swiglu", "backward", 5)],
)
def test_bytes_of_a_case(op, pass_, tensors):
    case = {"op": op, "rows": 10, "width": 64, "pass": pass_, "dtype": "bf16"}
    assert norms.bytes_moved(case) == tensors * 10 * 64 * 2


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_the_judge_sees_one_wrong_element_and_nan(backward):
    x = torch.randn(7, 9)

    def right(t):
        return torch.softmax(t, -1)

    def wrong(t, to=0.01):
        y = torch.softmax(t, -1)
        return torch.cat([y[:-1], torch.cat([y[-1:, :-1], y[-1:, -1:] * (1 + to)], 1)])

    def verdict(function):
        return judging.judge(function, right, right, [x], 0, backward, on_gpu=True)

    assert verdict(right).ok
    assert not verdict(wrong).ok
    assert not verdict(lambda t: wrong(t, float("nan"))).ok


def test_portable_kernels_pass_their_checks():
    """One forward and one backward of the sequence experiments; `gpu-accel run tk` on a CPU runs all."""
    of_rows = [c for c in norms.list_cases(CPU) if c["op"] in ("rotary", "add_rms_norm", "conv1d", "cross_entropy")]
    for build, cases in (
        (sequences.build_attention, sequences.attention_cases(CPU)[-1:]),
        (sequences.build_mamba, sequences.mamba_cases(CPU)[:1]),
        (norms.build, of_rows),
    ):
        for case in cases:
            ours = next(i for i in build(case, CPU).implementations if i.name == "portable")
            assert ours.check(1).ok, case
