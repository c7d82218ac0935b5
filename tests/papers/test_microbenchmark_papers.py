"""Hopper, Blackwell and core microbenchmarks as papers: a whole run settles what it should, the rest says why not."""

from __future__ import annotations

import importlib

import pytest

from gpu_accel.errors import InvalidInputError
from gpu_accel.hardware import energy as measuring
from gpu_accel.hardware.energy import Energy
from gpu_accel.workbench import runner
from gpu_accel.workbench.claims import judge_all, summary
from gpu_accel.workbench.experiment import Settings
from gpu_accel.workbench.records import Record
from gpu_accel.workbench.registry import paper

HOPPER, BLACKWELL, CORES = (paper(name) for name in ("hopper", "blackwell", "cores"))
GPU, CPU = Settings(device="cuda"), Settings(device="cpu")
H100 = {"gpu": "NVIDIA H100 80GB HBM3", "sku": "H100 SXM", "driver": "580.0", "torch": "2.11.0"}
# Metrics of a complete run, as the head of experiment.py has them. A time stands for the rates that follow from it.
CYCLES = {"latency": "clk", "throughput": "instr/clk/SM", "bandwidth": "B/clk/SM", "bandwidth_chip": "B/clk"}
METRICS = {
    "latency": {"latency"},
    "bandwidth": {"bandwidth", "bandwidth_chip", "time"},
    "instructions": {"latency", "throughput"},
    "tensor-cores": {"latency", "throughput", "time"},
    "fp8-accumulation": {"max_rel_error", "accumulator_bits"},
    "tma": {"latency", "bandwidth", "time"},
    "async-copies": {"time"},
    "dsm": {"latency", "bandwidth"},
    "dpx": {"latency", "throughput"},
    "cores": {"latency", "throughput", "wrong_fraction"},
    "ceilings": {"time"},
    "energy": {"energy_j", "efficiency", "efficiency_gross"},
}


def module(one, name):
    one.experiment(next(iter(one.experiments)))
    return importlib.import_module(f"{one._package()}.{name}")


def record(experiment, case, impl, metric):
    unit = {
        "max_rel_error": "1",
        "wrong_fraction": "1",
        "accumulator_bits": "bits",
        "time": "ms",
        "energy_j": "J",
        "efficiency": "TFLOP/J",
        "efficiency_gross": "TFLOP/J",
    }.get(metric)
    if unit is None:
        unit = "flop/clk/SM" if (experiment, metric) == ("tensor-cores", "throughput") else CYCLES[metric]
    timing = {"method": "events", "l2": "warm"} if metric == "time" else {}
    return Record(
        kind="measured", paper="hopper_microbenchmarks", experiment=experiment, case=case, impl=impl, metric=metric,
        unit=unit, median=10.0, samples=(10.0,), env=H100, timing=timing,
        work={"flops": 1e12, "bytes": 1e9} if metric == "time" else {},
        checked={"error": 0.0, "bound": 0.0, "metric": "wrong elements"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def complete():
    """A record of every metric of every case, as a run on an H100 would leave."""
    made = []
    for name, metrics in METRICS.items():
        found = HOPPER.experiment(name)
        for case in found.cases(GPU):
            for one in found.build(case, CPU).implementations:
                made += [record(name, case, one.name, metric) for metric in sorted(metrics)]
    return made


@pytest.mark.parametrize("one", [HOPPER, BLACKWELL, CORES], ids=lambda one: one.id)
def test_a_run_on_an_h100_settles_every_claim_that_one_can_settle(one, complete):
    mine = [r for r in complete if r.experiment in one.experiments]
    mine = [Record(**{**vars(r), "paper": one.id}) for r in mine]
    claims = one.claims()
    for verdict in judge_all(claims, mine):
        claim = verdict.claim
        if claim.measure and (not claim.needs or any("h100" in need for need in claim.needs)):
            assert verdict.settled, f"{claim.id}: {verdict.word}"
        elif claim.measure:
            assert "recorded on H100 SXM only" in verdict.word, f"{claim.id}: {verdict.word}"


def test_sixty_claims_and_more_get_a_verdict(complete):
    counts = summary(judge_all(HOPPER.claims(), complete))
    assert sum(counts[word] for word in ("reproduced", "within 25%", "not reproduced")) >= 90


def test_no_number_of_an_h800_is_held_against_an_h100_as_it_is():
    for claim in HOPPER.claims():
        if claim.conditions.get("gpu") == "H800 PCIe" and claim.measure and claim.unit in ("tflops", "gbps"):
            assert claim.scale and claim.scale.origin == "h800-pcie", claim.id


def test_what_the_papers_contradict_is_marked():
    by_id = {claim.id: claim for one in (HOPPER, BLACKWELL) for claim in one.claims()}
    for first, second in (("l1-latency", "l1-latency.short"), ("tma-over-load", "tma-over-load.log"),
                          ("dram-latency", "dram-latency.short"), ("gh100-fp8-8192", "fp8-unit")):  # fmt: skip
        assert second in by_id[first].contradicts and first in by_id[second].contradicts


@pytest.mark.parametrize("one", [HOPPER, BLACKWELL, CORES], ids=lambda one: one.id)
def test_seed_rows_say_what_is_true(one):
    seeds = [claim for claim in one.claims() if claim.source == "seed"]
    assert seeds
    for claim in seeds:
        assert claim.note or claim.unmeasurable, claim.id
    for claim in seeds if one is BLACKWELL else []:
        if claim.unit in ("tflops", "gbps"):
            assert "vendor" in claim.unmeasurable or "TB/s" in claim.unmeasurable, claim.id


# -- Blackwell without a card


@pytest.mark.parametrize("name", ["tcgen05", "mma-block-scaled"])
def test_blackwell_experiments_explain_themselves_and_are_not_supported(name):
    result = runner.run(BLACKWELL, [name], CPU)
    assert result.exit_code == 4 and not result.records
    assert {outcome.why for outcome in result.skipped} == {f"needs {module(BLACKWELL, 'experiment').CARDS[name][1]}"}


@pytest.mark.parametrize(
    ("name", "capability", "words"),
    [
        ("tcgen05", (9, 0), "this card is sm_90"),
        ("tcgen05", (12, 0), "this card is sm_120"),
        ("mma-block-scaled", (10, 0), "this card is sm_100"),
        ("tcgen05", (10, 0), "no kernel is written"),
        ("mma-block-scaled", (12, 0), "no kernel is written"),
        ("tcgen05", (0, 0), "this card is sm_00"),
    ],
)
def test_a_card_is_told_what_is_missing(name, capability, words):
    assert words in module(BLACKWELL, "experiment").refuse(name, capability)


# -- ceilings and energy


def test_ceilings_and_energy_are_checked_on_a_cpu():
    result = runner.run(HOPPER, ["ceilings", "energy"], CPU)
    assert result.exit_code == 0, result.incorrect
    assert {record.metric for record in result.records} == {"correct"}
    done = {(r.case.get("what") or r.case.get("op"), r.case["dtype"]) for r in result.records}
    assert done >= {("copy", "fp32"), ("matmul", "e4m3"), ("launch", "fp32"), ("attention", "bf16")}


def test_a_wrong_product_is_found(monkeypatch):
    torch = pytest.importorskip("torch")
    matmul = module(HOPPER, "matmul")
    right = matmul.multiply

    def wrong(a, b, **options):
        found = right(a, b, **options)
        found[-1, -1] = 0 if found.dtype is torch.bfloat16 else float("nan")
        return found

    for dtype in matmul.BOUNDS:
        assert matmul.check(dtype, 64, 3, device="cpu").ok
        monkeypatch.setattr(matmul, "multiply", wrong)
        assert not matmul.check(dtype, 64, 3, device="cpu").ok, dtype
        monkeypatch.setattr(matmul, "multiply", right)


def test_energy_asks_for_a_window_that_can_resolve_it(monkeypatch):
    asked = []

    def pretend(call, *, seconds):
        call()
        asked.append(seconds)
        return Energy(joules_per_call=2.0, gross_joules_per_call=2.5, idle_w=80.0, power_w=500.0, window_s=seconds,
                      resolution=0.03, step_s=0.1, calls=100)  # fmt: skip

    monkeypatch.setattr(measuring, "measure_energy", pretend)
    energy = module(HOPPER, "energy")
    case = {"op": "matmul", "dtype": "bf16", "data": "random", "size": 64}
    settings = Settings(device="cuda", seconds=0.25)
    call = energy.build(case, Settings(device="cpu")).implementations[0]
    assert call.values is None, "a CPU has no such counter"
    monkeypatch.setattr(module(HOPPER, "matmul"), "prepared", lambda *args, **options: lambda: None)
    found = energy.build(case, settings).implementations[0].values(0)
    assert asked == [3.0] and found["energy_j"] == (2.0, "J") and found["resolution_percent"] == (3.0, "%")
    assert found["efficiency"] == (pytest.approx(2 * 64**3 / 2.0 / 1e12), "TFLOP/J")
    tokens = energy.build({**case, "op": "attention"}, settings).implementations[0]
    monkeypatch.setattr(energy, "_prepared", lambda *args: lambda: None)
    assert tokens.values(0)["energy_per_token_j"] == (pytest.approx(2.0 / 64), "J")


def test_a_window_longer_than_usual_is_kept():
    with pytest.raises(InvalidInputError, match="cannot resolve"):
        measuring.measure_energy(lambda: None, seconds=0.25)
