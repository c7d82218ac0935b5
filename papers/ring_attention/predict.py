"""The `predict` experiment: the cost model against readings that others, or we earlier, have taken.

A case is one reading; the model gets its shape and the rate of the one-GPU kernel it was taken with, and predicts the
time or the efficiency. The check is the relative error of the prediction. Sources:

    readme    zhuzilin/ring-flash-attention, README: 8 H800, 8k tokens each, 32:8 heads, d 128; iterations a second
    a100      the same on 8 A100, and `both`: forward and backward on the H800; neither took part in any fit, nor did
              `both-a100`, `varlen` (documents, H800) and every striped ring of that page
    magi      SandAI-org/MagiAttention, cp_benchmark.md, plots (read off, +- 5 TFLOP/s): H100, 64:8 heads, 8k tokens
    peers     four H100, torch 2.11, a hand-written zigzag ring over NCCL with cuDNN blocks: readings of this project
              before it had records, so they test the model and settle no claim
    plots     other lines of the plots of `magi`: all-gather, Ulysses and USP forward on 8 to 64 GPUs in machines of 8,
              the ring's backward, and the backward of the other two on one machine, against `gpu-accel ring plan`
    meta      arXiv 2411.01783, table 5: three hops and two all-to-alls between machines, 400 Gb/s a GPU, which gave
              ib400 in costs.py its numbers, and attention of two steps, which gave none
    helper    arXiv 2310.03294: how many times one GPU's speed the forward of eight A100s reaches on long sequences,
              with blocks in a row and with helpers
    records   the times of `scaling`, `schedules` and `overlap` in results/: what `gpu-accel ring plan` says of that
              very case, with the constants of costs.py and nothing of the case itself

All but the last three test the formula of a ring (steps, merge passes, hops) with the rate of the kernel alone given;
those test the planner as it is used (of `meta` link and kernel alone). Its interval is tested too: `inside` is 1 where
the measured time lies in it.
None of its constants was chosen by `plots`. What the planner is not asked of them is the backward of all-gather and
Ulysses across machines: gradients travel in float32 here and in 16 bits there, and it says 1.3 to 1.5 times too long.

`modelled_table` gives the model's answer to the seed's table of 8, 64 and 512 GPUs as records of kind "modelled".
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from gpu_accel.ring_attention import costs
from gpu_accel.ring_attention.plan import plan, seed_table
from gpu_accel.workbench.experiment import Case, Check, Implementation, Settings, Workload
from gpu_accel.workbench.records import Record, read_records

BOUND = 0.2  # a prediction that misses by more is wrong; the intervals of plan.py are about as wide
WIDE = 0.3  # of the planner, which is not told the rate of the kernel that day


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One published number: a causal ring against one kernel alone. A striped ring works as a zigzag one."""

    dataset: str
    gpus: int
    block: int  # tokens a GPU
    heads: int
    kv_heads: int
    step_ms: float  # attention of one step alone
    measured_ms: float
    layout: str = "zigzag"
    schedule: str = "kv_ring"
    hop_gbs: float = 0.0  # of hops that do not hide; 0: they hide
    head_dim: int = 128
    both: bool = False  # forward and backward: float32 sums of gradients too
    memory: float = costs.MEMORY.value  # B/s

    def predicted_ms(self) -> float:
        """Steps, merge passes over float32 results, and hops where nothing hides them."""
        hops = self.gpus - 1
        steps = self.gpus * self.step_ms
        if (
            self.layout == "contiguous"
        ):  # the last rank computes N - 1/2 full blocks, where a zigzag step is half of one
            steps = (2 * self.gpus - 1) * self.step_ms
        if self.schedule == "helper":  # the rank's own half block, and full ones of its own or of a rank with more
            steps = (2 * -(-hops // 2) + 1) * self.step_ms
        elements = self.block * self.heads * self.head_dim
        passes = costs.MERGE_PASSES.value * (2 if self.both else 1)  # as in `ring plan`
        merge = passes * 7.5 * elements / self.memory * 1e3
        size = 4 * self.block * self.kv_heads * self.head_dim
        exposed = size / (self.hop_gbs * 1e6) if self.hop_gbs else 0.0
        return steps + hops * (merge + exposed)


def _rate(iterations: float) -> float:
    return 1e3 / iterations


def _magi(gpus: int, tflops: float) -> Reading:
    """TFLOP/s a GPU, in ms; the kernel alone is taken at the 600 TFLOP/s of the same page's ring by all-gather."""
    flops = 2 * 8192**2 * 64 * 128  # of a causal step
    return Reading(
        dataset="magi", gpus=gpus, block=8192, heads=64, kv_heads=8, step_ms=flops / 600e9,
        measured_ms=gpus * flops / (tflops * 1e9),
    )  # fmt: skip


_README = {"block": 8192, "heads": 32, "kv_heads": 8, "gpus": 8}
_A100 = 1.7e12  # the share of an A100's 2.04 TB/s that costs.py has of an H100's 3.35
_SKUS = {
    "readme": "H800",
    "both": "H800",
    "varlen": "H800",
    "a100": "A100",
    "both-a100": "A100",
    "magi": "H100",
    "helper": "A100",
    "peers": "H100 SXM",
}
_PEERS = {"dataset": "peers", "gpus": 4, "heads": 32}


def _readme(dataset: str, alone: float, *, memory: float = costs.MEMORY.value, **layouts: float) -> list[Reading]:
    """Lines of one table of the README: iterations a second of one kernel, and of the ring with each kind of shards."""
    both = dataset.startswith("both")
    shared = {"dataset": dataset, **_README, "step_ms": _rate(alone), "memory": memory, "both": both}
    return [Reading(**shared, layout=layout, measured_ms=_rate(rate)) for layout, rate in layouts.items()]


def _speedup(schedule: str, times: float) -> Reading:
    """32k tokens a GPU, the longest; one GPU's rate is that of the README's A100s, and it computes all N steps of N."""
    step = _rate(373.4) * (32768 / 8192) ** 2
    return Reading(
        dataset="helper", gpus=8, block=32768, heads=32, kv_heads=32, layout="contiguous", schedule=schedule,
        step_ms=step, memory=_A100, measured_ms=64 * step / times,
    )  # fmt: skip


READINGS = (
    *_readme("readme", 591.5, zigzag=63.0, contiguous=38.5, striped=55.0),
    *_readme("a100", 373.4, memory=_A100, zigzag=38.2, contiguous=24.0, striped=32.5),
    *_readme("both", 154.7, zigzag=17.4, contiguous=10.4, striped=16.0),
    *_readme("both-a100", 94.7, memory=_A100, zigzag=10.6, contiguous=6.2, striped=9.75),
    *_readme("varlen", 852.4, zigzag=74.8, contiguous=52.4),
    *(_magi(gpus, rate) for gpus, rate in ((8, 421), (16, 454), (32, 451), (64, 446))),
    _speedup("kv_ring", 4.5),
    _speedup("helper", 7.5),
    Reading(**_PEERS, block=8192, kv_heads=32, step_ms=3.39 / 4, measured_ms=6.57, hop_gbs=140),
    Reading(**_PEERS, block=16384, kv_heads=32, step_ms=13.1 / 4, measured_ms=17.7, hop_gbs=150),
    Reading(**_PEERS, block=32768, kv_heads=32, step_ms=54.6 / 4, measured_ms=65.2, hop_gbs=235),
    Reading(**_PEERS, block=8192, kv_heads=8, step_ms=3.38 / 4, measured_ms=5.01, hop_gbs=149),
    Reading(**_PEERS, block=16384, kv_heads=8, step_ms=13.1 / 4, measured_ms=16.9, hop_gbs=149),
)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A time on record, and what the planner says of its case."""

    case: tuple[tuple[str, object], ...]
    measured_ms: float
    predicted_ms: tuple[float, float, float]  # value, longest, shortest

    @property
    def inside(self) -> bool:
        """Whether the time lies in the interval."""
        return self.predicted_ms[2] <= self.measured_ms <= self.predicted_ms[1]


# TFLOP/s a GPU on 8, 16, 32 and 64 of them, read off
PLOTS = {
    ("kv_ring", "backward"): (433, 475, 470, 457),
    ("allgather", "forward"): (601, 591, 592, 580),
    ("allgather", "backward"): (516,),
    ("ulysses", "forward"): (601, 557, 580, 586),
    ("ulysses", "backward"): (583,),
    ("usp", "forward"): (None, 589, 594, 586),  # of one machine it is Ulysses
}


@functools.cache
def plotted() -> tuple[Planned, ...]:
    """The lines of PLOTS. A backward is what both passes take less the forward; that ring merges in passes."""
    found = []
    for (schedule, direction), rates in PLOTS.items():
        for gpus, rate in zip((8, 16, 32, 64), rates, strict=False):
            if rate is None:
                continue
            settings = {"seq": 8192 * gpus, "heads": 64, "kv_heads": 8, "gpus": gpus, "link": "nvlink+ib400",
                        "merge": "separate" if schedule == "kv_ring" else "fused"}  # fmt: skip
            seconds = [
                next(o for o in plan(**settings, backward=both).options if o.schedule == schedule).seconds
                for both in (False, True)
            ]
            flops = 2.0 * (8192 * gpus) ** 2 * 64 * 128 / gpus
            predicted = [1e3 * forward for forward in seconds[0]]
            if direction == "backward":
                predicted = [1e3 * (both - forward) for forward, both in zip(*seconds, strict=True)]
                flops *= 2.5
            case = {
                "dataset": "plots", "sku": "H100", "schedule": schedule,
                "layout": "contiguous" if schedule == "ulysses" else "zigzag", "pass": direction, "gpus": gpus,
                "seqlen": 8192 * gpus, "heads": 64, "heads_kv": 8, "head_dim": 128, "causal": True,
            }  # fmt: skip
            value, worst, best = predicted
            found.append(
                Planned(case=tuple(case.items()), measured_ms=flops / (rate * 1e9), predicted_ms=(value, worst, best))
            )
    return tuple(found)


# arXiv 2411.01783, table 5. Four machines, whose eight GPUs share 128 heads and 8 of keys, answer 3,200 or 12,800 new
# tokens over 128,000 in all: us of a hop of keys, and for each number of tokens of a hop of queries, of the all-to-all
# that brings results home, and of attention of one step.
CONTEXT, KEYS_HOP = 128_000, 629
TABLE_5 = {
    3_200: {"q_ring-hop": 166, "home": 424, "step": 414},
    12_800: {"q_ring-hop": 544, "home": 1023, "step": 1608},
}


def between_machines(tokens: int, what: str, end: str = "value") -> float:
    """Seconds of one row of TABLE_5 by ib400 and ATTENTION, at one end of them; "kv_ring-hop": of keys and values."""
    link, machines, heads, dim = costs.LINKS["ib400"], 4, 16, 128
    queries = tokens // machines * heads * dim * 2
    if what == "home":
        return link.latency.at(end) + (machines - 1) * queries / link.collective.at(end)
    if what == "step":
        rows, half = tokens / machines, costs.SMALL_BLOCK.at(end)
        flops = 4.0 * tokens * (CONTEXT - tokens / 2) / machines**2 * heads * dim
        return costs.STEP.at(end) + flops / (costs.ATTENTION.at(end) * rows / (rows + half))
    size = queries if what == "q_ring-hop" else 2 * CONTEXT // machines * dim * 2
    return link.latency.at(end) + size / link.hop.at(end)


def passes(tokens: int) -> tuple[float, float]:
    """Seconds that keys, and that queries going round keep the GPUs of TABLE_5 waiting."""
    step = between_machines(tokens, "step")
    hops = [3 * max(0.0, between_machines(tokens, f"{name}-hop") - step) for name in ("kv_ring", "q_ring")]
    return hops[0], hops[1] + between_machines(tokens, "home")


@functools.cache
def transfers() -> tuple[Planned, ...]:
    """The rows of dataset `meta`: latency and rates of ib400, and the kernel's."""
    found = []
    rows = [(CONTEXT, "kv_ring-hop", KEYS_HOP)]
    rows += [(tokens, what, us) for tokens, times in TABLE_5.items() for what, us in times.items()]
    for tokens, what, us in rows:
        case = {
            "dataset": "meta", "sku": "H100", "schedule": what if what.endswith("hop") else f"q_ring-{what}",
            "layout": "zigzag", "pass": "forward", "gpus": 4, "seqlen": tokens, "heads": 16, "heads_kv": 1,
            "head_dim": 128, "causal": True,
        }  # fmt: skip
        value, worst, best = (1e3 * between_machines(tokens, what, end) for end in ("value", "worst", "best"))
        found.append(Planned(case=tuple(case.items()), measured_ms=us / 1e3, predicted_ms=(value, worst, best)))
    return tuple(found)


PLANNED = ("kv_ring", "kv_ring-nccl", "q_ring", "double_ring", "ulysses", "allgather", "usp", "mesh")
TIMED = ("scaling", "schedules", "overlap")
# Before this time all-gather and usp fetched the order of rows from the host in every call, and waited: records of code
# that is gone, and of a wait that the planner knows nothing of.
ORDERED, ORDERING = "2026-11-28T16:50:55+00:00", ("allgather", "usp")
_RESULTS = Path(__file__).parent / "results"


@functools.cache
def recorded(folder: Path = _RESULTS) -> tuple[Planned, ...]:
    """Every time on record that the planner has a schedule for; the newest of each case and GPU."""
    files = sorted(folder.rglob("*.jsonl")) if folder.is_dir() else []
    return _recorded(folder, tuple((file, file.stat().st_mtime_ns, file.stat().st_size) for file in files))


@functools.lru_cache(maxsize=1)  # each of a hundred cases asks
def _recorded(folder: Path, files: tuple) -> tuple[Planned, ...]:
    found: dict[tuple, Planned] = {}
    records = read_records(folder) if files else []
    for r in sorted(records, key=lambda r: r.time):
        if (r.kind, r.metric) != ("measured", "time") or r.experiment not in TIMED or r.impl not in PLANNED:
            continue
        if r.impl in ORDERING and r.time < ORDERED:
            continue
        c = r.case
        schedule, link = r.impl.removesuffix("-nccl"), "nvlink-nccl" if r.impl.endswith("-nccl") else "nvlink"
        made = plan(
            seq=int(c["seqlen"]), heads=int(c["heads"]), kv_heads=int(c["heads_kv"]), gpus=int(c["gpus"]), link=link,
            head_dim=int(c["head_dim"]), backward=c["pass"] == "both",
        )  # fmt: skip
        option = next(o for o in made.options if o.schedule == schedule)
        value, worst, best = (1e3 * s for s in option.seconds)
        layout = "contiguous" if schedule == "ulysses" else "zigzag"
        names = ("pass", "gpus", "seqlen", "heads", "heads_kv", "head_dim", "causal")
        where = {"dataset": "records", "sku": str(r.env["sku"]), "schedule": r.impl, "layout": layout}
        case = tuple({**where, **{n: c[n] for n in names}}.items())
        found[case] = Planned(case=case, measured_ms=float(r.median), predicted_ms=(value, worst, best))
    return tuple(found.values())


def list_cases(settings: Settings) -> list[Case]:
    """One case a reading."""
    chosen = READINGS[:2] if settings.quick else READINGS
    planned = recorded()[:2] if settings.quick else (*plotted(), *transfers(), *recorded())
    return _published(chosen, settings) + [dict(p.case) | {"input": settings.input} for p in planned]


def _published(chosen: tuple[Reading, ...], settings: Settings) -> list[Case]:
    return [
        {
            "dataset": r.dataset, "sku": _SKUS[r.dataset], "schedule": r.schedule, "layout": r.layout,
            "pass": "both" if r.both else "forward", "gpus": r.gpus,
            "seqlen": r.gpus * r.block, "heads": r.heads,
            "heads_kv": r.kv_heads, "head_dim": r.head_dim, "causal": True, "input": settings.input,
        }
        for r in chosen
    ]  # fmt: skip


def _reading(case: Case) -> Reading:
    """The reading of a case."""
    return next(
        r
        for r in READINGS
        if (r.dataset, r.schedule, r.layout, r.gpus, r.gpus * r.block, r.kv_heads)
        == tuple(case[name] for name in ("dataset", "schedule", "layout", "gpus", "seqlen", "heads_kv"))
    )


def build(case: Case, settings: Settings) -> Workload:
    """The model alone: it computes nothing on any device."""
    if case["dataset"] in ("records", "plots", "meta"):
        return _of_planner(case)
    reading = _reading(case)
    miss = abs(reading.predicted_ms() / reading.measured_ms - 1)
    model = Implementation(
        name="model",
        role="ours",
        check=lambda seed: Check(miss, BOUND, "relative error of the predicted time"),
        values=lambda seed: {"prediction_error": (miss, "1")},
        on_device=False,
        note=f"predicted {reading.predicted_ms():.3g} ms, read {reading.measured_ms:.3g}: arithmetic, nothing is run",
    )
    return Workload(implementations=[model])


def _of_planner(case: Case) -> Workload:
    wanted = tuple((name, x) for name, x in case.items() if name != "input")
    found = next(p for p in (*plotted(), *transfers(), *recorded()) if p.case == wanted)
    miss = abs(found.predicted_ms[0] / found.measured_ms - 1)
    planner = Implementation(
        name="planner",
        role="ours",
        check=lambda seed: Check(miss, WIDE, "relative error of the planned time"),
        values=lambda seed: {"prediction_error": (miss, "1"), "inside": (float(found.inside), "1")},
        on_device=False,
        note=f"planned {found.predicted_ms[0]:.3g} ms ({found.predicted_ms[2]:.3g} to {found.predicted_ms[1]:.3g}), "
        f"read {found.measured_ms:.3g}: arithmetic, nothing is run",
    )
    return Workload(implementations=[planner])


def modelled_table(**options) -> list[Record]:
    """The model's efficiency for the rows of the seed's table, with its interval."""
    records = []
    for made in seed_table(**options):
        setup, best = made.setup, made.best
        middle, low, high = best.efficiency
        case = {"gpus": setup.gpus, "seqlen": setup.seq, "heads": setup.heads, "heads_kv": setup.kv_heads,
                "head_dim": setup.head_dim, "causal": setup.causal, "link": setup.link}  # fmt: skip
        records.append(
            Record(
                kind="modelled", paper="ring_attention", experiment="predict", case=case, impl=best.schedule,
                metric="efficiency", unit="1", median=middle, p20=low, p80=high, note="gpu-accel ring plan",
            )
        )  # fmt: skip
    return records
