"""Shapes that users ask for: which cases they make, on a GPU and without, and what cannot be taken is refused."""

from __future__ import annotations

import pytest
import torch

from gpu_accel.errors import UnsupportedError
from gpu_accel.thunderkittens import gemm_hopper
from gpu_accel.workbench.experiment import Case, Settings, shape_for
from gpu_accel.workbench.registry import paper

TK = paper("tk")
DEVICES = ("cuda", "cpu")


def cases(name: str, *texts: str, device: str = "cpu") -> list[Case]:
    experiment = TK.experiment(name)
    shapes = tuple(shape_for(text, [experiment]) for text in texts)
    return list(experiment.cases(Settings(device=device, shapes=shapes)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "text", "count"),
    [
        ("gemm", "m=7,n=5,k=3", 1),
        ("gemm", "m=7,n=5,k=3,layout=nn", 1),
        ("linear-attention", "2x33x3x16x24", {"cuda": 12, "cpu": 8}),
        ("linear-attention", "seqlen=33,gate=decay", 2),
        ("linear-attention", "seqlen=33,gate=delta,pass=backward", 1),
        ("mamba2", "1x33x4x16x32x2", 2),
        ("norms", "rows=5000,width=96", 18),
        ("norms", "op=rotary,rows=7", 2),
        ("longconv", "2x3x512", 1),
        ("longconv", "length=256,gated=true", 1),
    ],
)
def test_a_shape_takes_the_place_of_the_grid(device: str, name: str, text: str, count: int | dict[str, int]) -> None:
    found, own = cases(name, text, device=device), cases(name, device=device)
    assert len(found) == (count if isinstance(count, int) else count[device])
    experiment = TK.experiment(name)
    asked = shape_for(text, [experiment])
    for case in found:
        assert asked.items() <= case.items() and list(case) == list(own[0])
        same = [one for one in own if name != "norms" or one["op"] == case["op"]]
        left_out = set(experiment.axes) - set(asked)
        assert all(case[axis] == same[0][axis] for axis in left_out), "what is left out is the first size"


def test_shapes_are_taken_one_by_one() -> None:
    assert [case["k"] for case in cases("gemm", "k=3", "k=5", "k=3")] == [3, 5]
    assert [(case["op"], case["rows"]) for case in cases("norms", "op=softmax,rows=2,pass=forward", "op=geglu,rows=3")
            ] == [("softmax", 2), ("geglu", 3), ("geglu", 3)]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("gemm", "m=1048576k,n=1048576k", "beyond any memory"),
        ("linear-attention", "key_dim=257", "key_dim and value_dim are at most 256, got 257 and 40"),
        ("linear-attention", "batch=1048576k,seqlen=1048576k", "beyond any memory"),
        ("mamba2", "dstate=512", "dstate and headdim are at most 256, got 512 and 16"),
        ("mamba2", "heads=3,groups=2", "the 3 heads must be a multiple of the 2 groups"),
        ("norms", "op=rotary,width=7", "rotary turns pairs"),
        ("norms", "op=swiglu,rows=1048576k,width=1048576k", "beyond any memory"),
        ("longconv", "length=1000", "transforms of 256, 512, 1024, 2048, 4096 are made, not of 1000"),
    ],
)
def test_sizes_that_nothing_takes_are_refused(name: str, text: str, why: str) -> None:
    for case in cases(name, text):
        with pytest.raises(UnsupportedError, match=why):
            TK.experiment(name).build(case, Settings(device="cpu"))


def test_sizes_that_one_kernel_does_not_take_are_said_before_it_runs() -> None:
    settings = Settings(device="cpu")
    (case,) = cases("linear-attention", "key_dim=136,gate=delta,pass=forward")
    found = {
        one.name: one.unavailable for one in TK.experiment("linear-attention").build(case, settings).implementations
    }
    assert "hold keys of 128" in found["portable"] and not found["torch"]
    few = torch.empty(3, 7, dtype=torch.bfloat16, device="meta")
    assert "a copy would cost too much" in str(gemm_hopper.layout_refusal(few, few.t())), "known without any memory"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("norms", "op=rotary,rows=4099,width=2,pass=forward"),  # no whole number of sequences of 4096
        ("mamba2", "1x3x4x5x7x2"),
        ("linear-attention", "1x1x1x1x1"),
        ("longconv", "1x1x256"),
    ],
)
def test_portable_kernels_are_right_at_odd_shapes(name: str, text: str) -> None:
    for case in cases(name, text):
        built = TK.experiment(name).build(case, Settings(device="cpu"))
        assert next(one for one in built.implementations if one.name == "portable").check(0).ok, case
