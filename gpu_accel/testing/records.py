"""Made-up records, quoted claims and verdicts, to test figures, reports and notebooks without a GPU or a paper."""

from __future__ import annotations

from gpu_accel.workbench.claims import Verdict
from gpu_accel.workbench.ledger import Claim, Measure
from gpu_accel.workbench.records import Record

GPU = "Test GPU 1"
NOON = "2026-11-27T12:00:00+00:00"
SEQLENS = (512, 1024, 2048)


def case(**changes):
    """A complete attention case."""
    known = {"pass": "forward", "batch": 2, "seqlen_q": 1024, "seqlen_k": 1024, "heads": 4, "heads_kv": 4}
    return known | {"head_dim": 64, "causal": False, "dtype": "bf16", "input": "normal"} | changes


def timed(
    impl="portable", *, tflops=100.0, gpu=GPU, time=NOON, against=None, paper="flash_attention3", **changes
) -> Record:
    """A measured time that gives `tflops`; `against` = {baseline: ratio}."""
    where = case(**changes)
    flops = 4.0 * where["batch"] * where["heads"] * where["seqlen_q"] * where["seqlen_k"] * where["head_dim"]
    ms = flops / tflops / 1e9
    return Record(
        kind="measured",
        paper=paper,
        experiment=where["pass"],
        case=where,
        impl=impl,
        metric="time",
        unit="ms",
        median=ms,
        p20=ms * 0.8,
        p80=ms * 1.25,
        samples=(ms * 0.8, ms, ms * 1.25),
        work={"flops": flops, "bytes": flops / 100},
        checked={"error": 1e-3, "bound": 2e-3, "metric": "max_abs"},
        ratio_to={name: {"median": r, "ci95": [r * 0.99, r * 1.01]} for name, r in (against or {}).items()},
        env={"gpu": gpu, "clock_mhz": {"median": 1700, "min": 1600, "max": 1800}},
        timing={"method": "events", "l2": "flushed", "interleaved": [impl, *(against or {})]},
        commit="abcdef0123",
        time=time,
    )


def grid(impls=None, **changes) -> list[Record]:
    """Three sequence lengths, two head dims, causal or not; `impls` = {name: TFLOP/s at 512}."""
    impls = impls or {"portable": 200.0, "sdpa-flash": 100.0, "sdpa-cudnn": 250.0}
    return [
        timed(impl, tflops=rate * (1 + SEQLENS.index(n) / 2), head_dim=d, causal=c, seqlen_q=n, seqlen_k=n, **changes)
        for d in (64, 128)
        for c in (False, True)
        for n in SEQLENS
        for impl, rate in impls.items()
    ]


def number(metric, value, impl="portable", *, kind="measured", unit="1", spread=0.0, **changes) -> Record:
    """A record of something that is not a time."""
    return Record(
        kind=kind,
        paper="flash_attention3",
        experiment="fp8-error" if metric == "rmse" else "memory",
        case=case(**changes),
        impl=impl,
        metric=metric,
        unit=unit,
        median=value,
        p20=value * (1 - spread),
        p80=value * (1 + spread),
        checked={"error": value if metric == "rmse" else 0.0, "bound": 1.0, "metric": "rmse"},
        env={"gpu": GPU} if kind == "measured" else {},
        commit="abcdef0123",
        time="2026-11-26T12:00:00+00:00",
    )


def correct(impl="portable", *, error=1e-3, **changes) -> Record:
    """A correctness check on a CPU."""
    return Record(
        kind="checked",
        paper="flash_attention3",
        experiment="forward",
        case=case(**changes),
        impl=impl,
        metric="correct",
        unit="1",
        checked={"error": error, "bound": 2e-3, "metric": "max_abs"},
        time="2026-11-25T12:00:00+00:00",
    )


def quote(value, *, impl="ours", source="arXiv:1234.5678", dtype="fp16", unit="tflops", **changes) -> Claim:
    """A claim that quotes one cell of a figure."""
    where = case(**changes)
    del where["dtype"]  # figures name it in their conditions
    return Claim(
        id=f"fig1.ours.{where['seqlen_q']}",
        where="Figure 1",
        statement=f"ours at {where['seqlen_q']}",
        source=source,
        value=value,
        unit=unit,
        conditions={"dtype": dtype},
        measure=Measure(experiment=where["pass"], impl=impl, metric=unit, case=where),
        figure="fig1",
        label="New",
        cell=where,
    )


def verdict(word="reproduced", *, measured=1.5, interval=(1.4, 1.6), records=(), side="", **changes) -> Verdict:
    """A judged claim; its texts need escaping in Markdown and in HTML. `changes` are fields of the claim."""
    about = {"id": "c1", "where": "Section 1", "statement": "faster | than <before>", "source": "arXiv:1234.5678"}
    return Verdict(
        claim=Claim(**about | {"value": 1.5, "unit": "x"} | changes),
        word=word,
        measured=measured,
        interval=interval,
        detail="why & how",
        records=tuple(records),
        side=side,
    )
