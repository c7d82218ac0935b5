"""Microbenchmarks on a Hopper GPU: every family gives checked results, and cycles are those that the hardware repeats.

python3 -m pytest tests/gpu/test_microbenchmarks.py -q
"""

from __future__ import annotations

import importlib

import pytest
import torch

from gpu_accel.hardware.microbenchmarks import compile as compiling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an H100 or H200"
    ),
]
FAMILIES = ("latency", "bandwidth", "alu", "tensor", "fp8_sums", "tma", "async_product", "dsm", "dpx", "cores")


def family(name: str):
    return importlib.import_module(f"gpu_accel.hardware.microbenchmarks.{name}")


# The halves of the second-level cache are told apart by what is in it.
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=pytest.mark.alone if one == "latency" else ()) for one in FAMILIES]
)
def test_a_few_of_each_family_are_right_and_positive(name):
    probes = family(name).probes(True)
    compiling.build_all(source for probe in probes for source in probe.sources())
    for probe in probes:
        outcome = probe.measure(11)
        assert outcome.check.ok, (probe.case, probe.name, outcome.check)
        for metric, series in outcome.metrics.items():
            assert series.samples and min(series.samples) >= 0, (probe.case, metric)


def latency_of(name: str, **case) -> float:
    found = [p for p in family(name).probes() if all(p.case.get(key) == value for key, value in case.items())]
    return torch.tensor(found[0].measure(0).metrics["latency"].samples).median().item()


@pytest.mark.alone
@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("latency", {"level": "l1", "load": "ld.global.ca.u64"}),
        ("latency", {"level": "shared", "load": "ld.shared.u32"}),
        ("alu", {"instruction": "FFMA"}),
        ("alu", {"instruction": "DFMA"}),
        ("dsm", {"pattern": "own"}),
    ],
    ids=["l1", "shared", "ffma", "dfma", "dsm-own"],
)
def test_two_runs_agree_within_two_percent(name, case):
    first, second = latency_of(name, **case), latency_of(name, **case)
    assert abs(first - second) <= 0.02 * first


@pytest.mark.alone
def test_a_level_further_away_takes_longer():
    levels = [latency_of("latency", level=level) for level in ("shared", "l1", "l2", "dram")]
    assert levels == sorted(levels) and levels[-1] > 5 * levels[0]
