"""The constants of the cost model, each with a range and where it comes from.

All times that follow from them are *modelled*. Where a source names no records, it is readings on four H100 SXM (700 W,
clocks not locked, torch 2.11, NCCL 2.28.9, cuDNN 9.19) taken before there were any. Records are those of `scaling`,
`overlap`, `schedules` and `links` on two H200s and four H100s. `worst` and `best` are the pessimistic and the
optimistic end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpu_accel.errors import InvalidInputError, shown


@dataclass(frozen=True)
class Constant:
    """A number with a pessimistic and an optimistic end."""

    value: float
    worst: float
    best: float
    unit: str
    source: str

    def at(self, end: str) -> float:
        """ "value", "worst" or "best"."""
        return float(getattr(self, end))


ATTENTION = Constant(
    700e12,
    550e12,
    760e12,
    "flop/s",
    "forward, causal, d 128, records: 736 to 749 (16k tokens), 751 to 756 (32k), 741 to 749 (64k), 692 TFLOP/s (128k, "
    "hot), steps alone 753 (32k a GPU); earlier kernels 727, 741, 713, 641; cuDNN 567 to 684",
)
BACKWARD = Constant(
    630e12, 520e12, 700e12, "flop/s",
    "both passes together, records: 672 (16k tokens), 676 to 685 (32k), 633 to 635 (64k), 628 TFLOP/s (128k), rings of "
    "two 689; earlier kernels 615 (16k), 547 to 592 (32k, 64k)",
)  # fmt: skip
SMALL_BLOCK = Constant(
    150,
    350,
    90,
    "tokens",
    "block at which attention runs at half its rate: 200 from the records of compute-only at 4k, 8k and 16k tokens "
    "each on two GPUs, 91 from those on four",
)
MERGE_PASSES = Constant(
    3.5,
    4.0,
    3.3,
    "passes",
    "ring-flash-attention's README and MagiAttention's plots lose 3.3 to 4.0 merge passes a step",
)
EPILOGUE = Constant(
    0.55,
    0.7,
    0.3,
    "passes",
    "a merge in the epilogue, forward: 0.02 to 0.06 ms a step at 8k tokens a GPU and 32 heads of 128, four H100s",
)
MEMORY = Constant(2.8e12, 2.6e12, 4.3e12, "B/s", "copies on an H100 SXM; at best on an H200")
COPY_SLOWDOWN = Constant(
    0.055, 0.06, 0.05, "1", "attention beside the copy engine is slower by 5 to 6 % while it copies"
)
STEP = Constant(20e-6, 40e-6, 10e-6, "s", "launches of a step: 20 and 25 us from the same records")
ORDER = Constant(
    2.6e12, 2.5e12, 2.8e12, "B/s",
    "rows of an all-to-all put in order of the sequence, read and written: usp less ulysses in the records of "
    "schedules, two H200s, 32k tokens: 2.51 forward, 2.77 both passes",
)  # fmt: skip


@dataclass(frozen=True)
class Link:
    """One level of the network, per GPU and direction. `hides`: whether a hop runs beside attention."""

    name: str
    hop: Constant  # point to point, B/s
    collective: Constant  # all-gather, all-to-all, B/s
    latency: Constant  # s
    hides: bool
    why: str
    pair: Constant | None = None  # hop, where there are only two ranks


LINKS = {
    "nvlink": Link(
        "nvlink",
        Constant(364e9, 356e9, 384e9, "B/s", "copy engine, 64 to 256 MB, two and four GPUs; symmetric memory 364"),
        Constant(270e9, 185e9, 324e9, "B/s", "NCCL all-gather and all-to-all of 16 to 256 MB on four GPUs"),
        Constant(11e-6, 60e-6, 8e-6, "s", "copy engine with two waits; signals read up to 60 us"),
        True,
        "written to symmetric memory by the copy engine, which takes no SM",
    ),
    "nvlink-nccl": Link(
        "nvlink-nccl",
        Constant(
            150e9, 138e9, 220e9, "B/s",
            "NCCL send/recv in a ring of four, 34 to 134 MB: 138 to 175; 216 where sums of 268 MB go round (records)",
        ),
        Constant(270e9, 185e9, 324e9, "B/s", "NCCL all-gather and all-to-all of 16 to 256 MB on four GPUs"),
        Constant(8e-6, 12e-6, 7e-6, "s", "NCCL send/recv of 1 KB"),
        False,
        "NCCL's send and receive wait for SMs that attention holds: nothing was hidden in the readings",
        Constant(
            250e9, 240e9, 302e9, "B/s", "kv_ring-nccl against kv_ring in the records: 243 to 250; 302 alone (links)"
        ),
    ),
    "ib400": Link(
        "ib400",
        Constant(28e9, 27e9, 45e9, "B/s", "fit to table 5 of arXiv 2411.01783, 400 Gb/s a GPU: 56 % of the line"),
        Constant(34e9, 27e9, 45e9, "B/s", "the same table's two all-to-alls: 27 and 41"),
        Constant(55e-6, 80e-6, 20e-6, "s", "the same fit"),
        True,
        "sent by the network card; hidden in arXiv 2411.01783 and flat from 16 to 64 GPUs in MagiAttention's plots",
    ),
}


def _ib400_times(factor: float, name: str, words: str) -> Link:
    """InfiniBand of another rate: bandwidth in proportion to ib400, which is the one there are readings of."""
    base = LINKS["ib400"]
    hop, words = base.hop, f"{words} ib400; not measured"
    rate = Constant(factor * hop.value, factor * hop.worst, factor * hop.best, "B/s", words)
    latency = replace(base.latency, source="as ib400")
    why = f"taken to be like ib400 with {factor:g} times its rate; not measured"
    return Link(name, rate, rate, latency, base.hides, why)


LINKS["ib200"] = _ib400_times(0.5, "ib200", "half of")
LINKS["ib800"] = _ib400_times(2.0, "ib800", "twice")


def links(text: str) -> tuple[Link, Link | None]:
    """ "nvlink+ib400": the link within a machine, and the one between machines (None: there is one machine)."""
    names = text.split("+") if isinstance(text, str) else [text]
    unknown = [name for name in names if not isinstance(name, str) or name not in LINKS]
    if unknown or len(names) > 2:
        raise InvalidInputError(
            f"link is {shown(text, 60)}: one of {', '.join(LINKS)}, or two with a plus for within and between "
            "machines, such as nvlink+ib400"
        )
    return LINKS[names[0]], LINKS[names[1]] if len(names) == 2 else None
