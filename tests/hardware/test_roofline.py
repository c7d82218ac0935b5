"""Estimates from the datasheet and from records, and which of both an answer rests on."""

from __future__ import annotations

import json

import pytest

from gpu_accel.errors import HardwareError, InvalidInputError, UnsupportedError
from gpu_accel.hardware import Ceilings, Roofline, detection, measured_ceilings, profile, roofline
from gpu_accel.workbench.records import Record

H100 = {"gpu": "NVIDIA H100 80GB HBM3", "sku": "H100 SXM"}


def result(what, *, dtype="fp32", size=8192, ms=1.0, impl="torch", env=H100, day=28, experiment="ceilings"):
    flops = 2.0 * size**3 if what == "matmul" else 0.0
    moved = {"copy": 8.0 * size, "read": 4.0 * size, "write": 4.0 * size}.get(what, 0.0)
    return Record(
        kind="measured", paper="hopper_microbenchmarks", experiment=experiment, impl=impl,
        case={"what": what, "dtype": dtype, "size": size}, metric="time", unit="ms", median=ms, samples=(ms,),
        work={key: value for key, value in (("flops", flops), ("bytes", moved)) if value},
        checked={"error": 0.0, "bound": 0.0, "metric": "wrong elements"}, env=env,
        timing={"method": "events", "l2": "flushed"}, time=f"2026-11-{day}T00:00:00+00:00",
    )  # fmt: skip


RECORDS = [
    result("copy", size=2**29, ms=8.0 * 2**29 / 2900e6, impl="torch"),
    result("copy", size=2**29, ms=8.0 * 2**29 / 3000e6, impl="portable"),
    result("read", size=2**29, ms=4.0 * 2**29 / 3100e6),
    result("matmul", dtype="bf16", ms=2.0 * 8192**3 / 700e9),
    result("matmul", dtype="e4m3", ms=2.0 * 8192**3 / 1200e9, impl="torch"),
    result("matmul", dtype="e4m3", ms=2.0 * 8192**3 / 1350e9, impl="torch-fast"),
    result("launch", size=1, ms=0.0021),
]


def test_the_best_of_each_is_the_ceiling():
    found = measured_ceilings("h100", RECORDS)
    assert found.gpu == H100["gpu"] and found.launch_us == pytest.approx(2.1)
    assert found.gbps == pytest.approx({"copy": 3000, "read": 3100}) and found.bandwidth_gbs == pytest.approx(3100)
    assert found.tflops == pytest.approx({"bf16": 700, "fp8": 1350})
    assert json.loads(json.dumps(found.as_dict()))["tflops"]["fp8"] == pytest.approx(1350)


def test_only_that_gpu_whole_and_that_experiment_count():
    assert measured_ceilings("h100-pcie", RECORDS) is None
    sliced = {"gpu": "NVIDIA H100 80GB HBM3", "sku": "H100 SXM MIG 1g.10gb"}
    assert measured_ceilings("h100", [result("read", env=sliced)]) is None
    assert measured_ceilings("h100", [result("read", experiment="bandwidth")]) is None
    assert measured_ceilings("", []) is None


def test_the_newest_run_counts_not_the_luckiest():
    again = [result("matmul", dtype="bf16", ms=2.0 * 8192**3 / 650e9, day=29)]
    assert measured_ceilings("h100", [*RECORDS, *again]).tflops["bf16"] == pytest.approx(650)


def test_an_estimate_says_on_what_it_rests():
    ceilings = measured_ceilings("h100", RECORDS)
    big = roofline("matmul", (8192, 8192, 8192), "bf16", "h100", ceilings=ceilings)
    assert big.bound == "compute" and big.ms == pytest.approx(2 * 8192**3 / 700e9)
    assert (big.peak_from, big.bandwidth_from) == ("measured", "measured") and "700 TFLOP/s measured" in str(big)
    vendor = roofline("matmul", (8192, 8192, 8192), "bf16", "h100", ceilings="datasheet")
    assert vendor.ms == pytest.approx(2 * 8192**3 / 989.4e9) and "989.4 TFLOP/s datasheet" in str(vendor)
    mixed = roofline("matmul", (8192, 8192, 8192), "fp16", "h100", ceilings=ceilings)
    assert (mixed.peak_from, mixed.bandwidth_from) == ("datasheet", "measured")
    assert json.loads(json.dumps(big.as_dict()))["bound"] == "compute"


def test_operations_and_bytes_by_hand():
    options = dict(gpu="h100", ceilings="datasheet")
    thin = roofline("matmul", {"m": 1, "n": 4096, "k": 4096}, "bf16", **options)
    assert thin.bound == "memory" and thin.bytes == 2 * (4096 + 4096 * 4096 + 4096)
    fp8 = roofline("matmul", (64, 64, 64), "e4m3", **options)
    assert fp8.bytes == 2 * 64 * 64 + 2 * 64 * 64, "the result has 16 bits"
    tf32 = roofline("matmul", (64, 64, 64), "tf32", **options)
    assert tf32.bytes == 3 * 4 * 64 * 64 and tf32.peak_tflops == profile("h100").peak("tf32")
    full = roofline("attention", (2, 1024, 4, 64), "bf16", **options)
    causal = roofline("attention", {"batch": 2, "seqlen": 1024, "heads": 4, "head_dim": 64, "causal": True}, **options)
    assert full.flops == 4 * 2 * 4 * 1024 * 1024 * 64 and causal.flops == pytest.approx(full.flops / 2, rel=0.01)
    grouped = {"batch": 2, "seqlen": 1024, "heads": 4, "heads_kv": 1, "head_dim": 64}
    assert roofline("attention", grouped, **options).bytes < full.bytes
    moved = roofline("copy", (1000,), "fp32", **options)
    assert (moved.flops, moved.bytes, moved.bound, moved.tflops) == (0.0, 8000.0, "memory", 0.0)
    assert roofline("copy", (0,), **options).tflops == 0.0


@pytest.mark.parametrize(
    ("op", "shape", "dtype", "gpu", "error", "message"),
    [
        ("conv", (1,), "bf16", "h100", InvalidInputError, "op is 'conv'"),
        ("matmul", (1, 2), "bf16", "h100", InvalidInputError, "(m, n, k)"),
        ("matmul", (1, 2, -3), "bf16", "h100", InvalidInputError, "k is -3"),
        ("matmul", (1, 2, True), "bf16", "h100", InvalidInputError, "k is True"),
        ("matmul", {"m": 1, "n": 2}, "bf16", "h100", InvalidInputError, "lacks k"),
        ("copy", {"elements": 1, "rows": 2}, "bf16", "h100", InvalidInputError, "no 'rows'"),
        ("matmul", (1, 2, 3), "bf17", "h100", InvalidInputError, "bf17"),
        ("matmul", (1, 2, 3), "bf16", "h1000", InvalidInputError, "h1000"),
        ("matmul", (1, 2, 3), "fp4", "h100", UnsupportedError, "fp4"),
    ],
)  # fmt: skip
def test_what_it_refuses(op, shape, dtype, gpu, error, message):
    with pytest.raises(error) as caught:
        roofline(op, shape, dtype, gpu, ceilings="datasheet")
    assert message in str(caught.value)


def test_ceilings_by_another_word_are_refused():
    with pytest.raises(InvalidInputError, match="'measured'"):
        roofline("copy", (1,), gpu="h100", ceilings="measured")


def test_without_a_gpu_it_asks_which_one(monkeypatch):
    monkeypatch.setattr(detection, "detect", lambda index=0: None)
    with pytest.raises(HardwareError, match="gpu='h100-sxm'"):
        roofline("copy", (1,))


def test_a_roof_without_measured_ceilings_is_the_datasheet():
    roof = Roofline(profile("h100"), ceilings=Ceilings(gpu="x"))
    assert roof.basis("bf16") == ("datasheet", "datasheet") and roof.peak("bf16") == 989.4


def test_the_plot_draws_both_roofs():
    pytest.importorskip("plotly")
    from gpu_accel.workbench import plots

    figure = plots.roofline([], profile="h100", dtypes=("bf16", "fp16"), ceilings=measured_ceilings("h100", RECORDS))
    names = [trace.name for trace in figure.data]
    assert sum("measured roof bf16: 700" in name for name in names) == 1
    assert not any("measured roof fp16" in name for name in names), "fp16 was not measured"
