"""`precision_report`: per layer what each recipe costs, on a model whose layers differ on purpose."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gpu_accel.errors import InvalidInputError
from gpu_accel.hardware import profile
from gpu_accel.testing import generator
from gpu_accel.transformer_engine import precision
from gpu_accel.transformer_engine.conversion import convert
from gpu_accel.transformer_engine.linear import Linear
from gpu_accel.transformer_engine.recipes import RECIPES, MXFP8BlockScaling


def precision_report(*arguments, **keywords) -> precision.PrecisionReport:
    """The reference gives the bits of the kernels, and faster than Triton's interpreter."""
    return precision.precision_report(*arguments, backend="reference", **keywords)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.unused = nn.Linear(64, 128), Linear(128, 64), nn.Linear(4, 4)

    def forward(self, x, *, factor=1.0):
        return self.down(torch.relu(self.up(x * factor)))


def values(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(0))


def test_a_report_of_each_layer_that_ran():
    model = Model()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    x = values(3, 40, 64)
    report = precision_report(model, x, rows=50)
    assert [one.name for one in report.layers] == ["up", "down"] and report.recommended("unused") == "bf16"
    up = report["up"]
    assert (up.m, up.n, up.k) == (120, 128, 64) and up.amax[0] <= x.abs().max().item()
    for one in report.layers:
        assert set(one.error) == set(RECIPES)
        assert 0.01 < one.error["mxfp8"] < one.error["nvfp4"] < 0.3
        assert all(0 <= share <= 1 for share in one.clipped.values())
    text = str(report)
    assert "up" in text and f"modelled, {report.hardware}" in text and len(text.splitlines()) == 3
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key])
    assert not model.up._forward_pre_hooks


def test_the_error_decides_and_the_card(monkeypatch):
    """Where products pay, a B200 takes NVFP4 if its error is allowed, FP8 if not, bf16 if neither or nothing pays."""
    model, x = Model(), values(64, 64)
    times = {"bf16": 4.0, "fp8": 2.0, "mxfp8": 2.0, "nvfp4": 1.0}
    monkeypatch.setattr(precision, "modelled_time", lambda name, *_: times[name])
    picked = [precision_report(model, x, hardware="b200", max_error=e)["up"] for e in (0.3, 0.06, 0.001)]
    assert picked[0].recommended == "nvfp4" and picked[0].modelled_speedup == 4.0
    assert picked[1].recommended in ("fp8_current", "fp8_delayed", "fp8_block", "mxfp8")
    assert picked[2].recommended == "bf16" and picked[2].modelled_speedup == 1.0
    monkeypatch.setattr(precision, "modelled_time", lambda name, *_: 1.0)
    assert precision_report(model, x, hardware="b200", max_error=0.3).recommended("up") == "bf16"
    monkeypatch.setattr(precision, "modelled_time", lambda name, *_: times[name])
    on_h100 = precision_report(model, x, hardware="h100", max_error=0.3)["up"]
    assert on_h100.recommended.startswith("fp8") and "nvfp4" not in on_h100.modelled_ms


def test_the_gpu_at_hand_is_the_default(monkeypatch):
    model, x = Model(), values(8, 64)
    for found, name in (("b200-sxm", "b200-sxm"), (None, "h100")):
        here = SimpleNamespace(profile=profile(found) if found else None)
        monkeypatch.setattr(precision, "detect", lambda here=here: here)
        assert precision_report(model, x, recipes=["mxfp8"]).hardware == name
    monkeypatch.setattr(precision, "detect", lambda: None)
    assert precision_report(model, x, recipes=["mxfp8"]).hardware == "h100"


def test_it_drives_convert_and_takes_keywords():
    model = Model()
    report = precision_report(model, {"x": values(8, 64), "factor": 2.0}, recipes=["mxfp8"])
    convert(model, MXFP8BlockScaling(), lambda name, _: report.recommended(name) == "bf16")
    assert isinstance(model.up, Linear)
    assert precision_report(model, (values(8, 64),), recipes=["mxfp8"])["up"].error["mxfp8"] > 0


def test_layers_may_be_called_by_keyword():
    class Named(Model):
        def forward(self, x):
            return self.down(x=torch.relu(self.up(input=x)))

    x = values(8, 64)
    by_name, by_place = (precision_report(m, x, recipes=["mxfp8"]) for m in (Named(), Model()))
    assert [one.error for one in by_name.layers] == [one.error for one in by_place.layers]


@pytest.mark.parametrize(
    "make, word",
    [
        (lambda m: precision_report(m, values(2, 64), recipes=["fp7"]), "fp7"),
        (lambda m: precision_report(3, values(2, 64)), "model"),
        (lambda m: precision_report(m, values(2, 64), rows=0), "rows"),
        (lambda m: precision_report(m, values(2, 64), max_error=0), "max_error"),
        (lambda m: precision_report(m, values(2, 64), max_error="a"), "max_error"),
        (lambda m: precision_report(m, [values(2, 64)]), "batch"),
        (lambda m: precision_report(m, None), "batch"),
        (lambda m: precision_report(m, values(2, 64), recipes=["mxfp8"])["zz"], "zz.*'up'"),
        (lambda m: precision_report(m, values(2, 64), hardware="h1000"), "h1000"),
        (lambda m: precision_report(nn.ReLU(), values(2, 64)), "Linear"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_refusals(make, word):
    with pytest.raises(InvalidInputError, match=word):
        make(Model())
