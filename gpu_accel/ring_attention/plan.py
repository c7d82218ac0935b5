"""What a distributed attention will cost before it runs: schedule, bytes, memory, efficiency, and why.

    print(plan(seq=1 << 20, heads=32, kv_heads=8, gpus=64, link="nvlink+ib400").explain())

Efficiency is against one GPU that does the whole at its large-block rate. The interval spans kernels and links at their
worst and at their best, in all four combinations. Every time here is modelled, by cost_model.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gpu_accel.errors import InvalidInputError, UnsupportedError, shown
from gpu_accel.ring_attention.cost_model import (
    Setup,
    bytes_sent,
    group_ranks,
    inner_ranks,
    large_block_rate,
    least_block,
    peak_memory,
    rank_time,
)
from gpu_accel.ring_attention.costs import Link, links
from gpu_accel.ring_attention.sizes import default_mesh, share_heads

ENDS = ("value", "worst", "best")
MOST = {"gpus": 2**16, "heads": 2**16}  # the model looks at every rank and every head
_MOST_LENGTHS = 2**22  # ranks times documents of different lengths, which take a few seconds
_LARGEST_HEAD = 256
MERGES = ("fused", "separate")
CANDIDATES = ("kv_ring", "double_ring", "ulysses", "usp", "allgather", "q_ring", "mesh", "concentric")
_LITTLE = 0.005  # of work and bytes; padding that costs less is named, and no more


@dataclass(frozen=True, kw_only=True)
class Option:
    """One schedule as the model sees it. Times in seconds, (value, worst, best)."""

    schedule: str
    detail: str
    sent: int  # bytes that a rank sends
    memory: int  # bytes a rank needs, its shards included
    seconds: tuple[float, float, float]
    efficiency: tuple[float, float, float]
    exposed: float  # share of the time in which a rank only communicates
    merged: float  # share of the time that goes into merge passes
    refused: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)  # of distributed_attention, beside the schedule

    def as_dict(self) -> dict[str, Any]:
        return {
            "schedule": self.schedule,
            "detail": self.detail,
            "arguments": dict(self.arguments),
            "bytes_sent": self.sent,
            "memory_bytes": self.memory,
            "seconds": dict(zip(ENDS, self.seconds, strict=True)),
            "efficiency": dict(zip(ENDS, self.efficiency, strict=True)),
            "exposed": self.exposed,
            "merged": self.merged,
            "refused": self.refused,
        }


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer: the option chosen, and the others."""

    setup: Setup
    layout: str
    options: tuple[Option, ...]  # best first
    margin: float  # tokens of a shard over the least with which a hop of the KV ring hides
    margin_range: tuple[float, float]
    slowest: Link

    @property
    def best(self) -> Option:
        return self.options[0]

    def as_dict(self) -> dict[str, Any]:
        setup = {name: getattr(self.setup, name) for name in self.setup.__dataclass_fields__}
        return {
            "kind": "modelled",
            "setup": setup,
            "layout": self.layout,
            "schedule": self.best.schedule,
            "tokens_per_gpu": self.setup.block,
            "padding": self.setup.padding,
            "busiest": self.setup.share(),
            "margin": self.margin,
            "margin_range": list(self.margin_range),
            "link": self.slowest.name,
            "options": [option.as_dict() for option in self.options],
        }

    def title(self) -> str:
        """The question in one line."""
        setup = self.setup
        link = setup.link if setup.nodes > 1 else self.slowest.name
        return (
            f"{_count(setup.seq, 'token')}, {_count(setup.heads, 'head')}, {_count(setup.kv_heads, 'key head')}, "
            f"head_dim {setup.head_dim}, {'causal' if setup.causal else 'full'}, "
            f"{'forward and backward' if setup.backward else 'forward'}, {_count(setup.gpus, 'GPU')} in "
            f"{_count(setup.nodes, 'machine')}{f', {link}' if setup.gpus > 1 else ''}"
        )

    def explain(self) -> str:
        """The plan in words and one table."""
        setup, best = self.setup, self.best
        e, low, high = best.efficiency
        middle, worst, top = best.seconds
        even = ", the same work for each" if setup.gpus > 1 and setup.share() < 1 + _LITTLE else ""
        padded = f", {setup.padding:,} of {setup.block * setup.gpus:,} padding" if setup.padding else ""
        hides = (
            f"margin    {self.margin:.3g} (range {self.margin_range[0]:.3g} to {self.margin_range[1]:.3g}): a shard "
            f"has that many times the tokens with which a hop over {self.slowest.name} hides",
        )
        lines = [
            self.title(),
            "",
            f"layout    {self.layout}: {_count(setup.block, 'token')} a GPU{padded}{even}",
            f"schedule  {best.schedule}{f' ({best.detail})' if best.detail else ''}",
            f"call      {', '.join(f'{n}={x!r}' for n, x in {'schedule': best.schedule, **best.arguments}.items())}",
            f"sends     {_bytes(best.sent)} a GPU",
            f"memory    {_bytes(best.memory)} a GPU for attention, its shards included",
            *(hides if setup.gpus > 1 else ()),
            f"time      {_time_text(middle)} modelled, interval {_time_text(top)} to {_time_text(worst)}",
            f"efficiency {e:.0%} modelled, interval {low:.0%} to {high:.0%}; {best.exposed:.0%} of the time only "
            f"communicating, {best.merged:.0%} merging",
            "",
            "why",
            *(f"  {line}" for line in self._why()),
            "",
            f"  {'schedule':12} {'time':>8} {'efficiency':>10} {'interval':>14} {'sends':>10} {'memory':>10} "
            f"{'exposed':>8}",
        ]
        for option in self.options:
            middle, worst, top = option.efficiency
            lines.append(
                f"  {option.schedule:12} {_time_text(option.seconds[0]):>8} {middle:>10.0%} "
                f"{f'{worst:.0%} to {top:.0%}':>14} {_bytes(option.sent):>10} {_bytes(option.memory):>10} "
                f"{option.exposed:>8.0%}  {option.refused or option.detail}"
            )
        lines += [
            "",
            "Times are modelled (constants, sources: gpu_accel/ring_attention/costs.py), bytes are counted.",
        ]
        return "\n".join(lines)

    def _why(self) -> list[str]:
        setup, best = self.setup, self.best
        if setup.gpus == 1:
            return ["one GPU has every key: nothing is sent, and all schedules are one call"]
        lines = [f"a hop over {self.slowest.name}: {self.slowest.why}"]
        if setup.padding > _LITTLE * setup.seq or setup.share() > 1 + _LITTLE:
            even = setup.gpus if self.layout == "contiguous" else 2 * setup.gpus
            whose = "documents whose lengths are multiples" if self.layout == "documents" else "a multiple"
            lines.append(
                f"padding adds {setup.padding / setup.seq:.1%} to what is held and sent, and the busiest GPU has "
                f"{setup.share() - 1:.1%} more work than its share; {whose} of {even:,} would have none"
            )
        if self.margin < 1:
            lines.append("a shard is too short for a flat ring to hide its hops over that link")
        if best.schedule == "double_ring":
            lines.append("only one hop in a round crosses between machines, under way during the whole round")
        if best.schedule in ("ulysses", "usp"):
            lines.append("exchanging heads leaves long blocks for the kernel, and few or no results to merge")
        if best.schedule == "allgather":
            lines.append("all keys at once: nothing to merge, at the price of memory for all of them")
        if setup.merge == "separate" and best.merged > 0.02:
            lines.append(
                f"merging takes {best.merged:.0%} of the time in passes of its own (merge='separate'), less in a "
                "kernel's epilogue (merge='fused')"
            )
        if setup.kv_heads < setup.heads:
            lines.append(f"{setup.heads // setup.kv_heads} query heads share a key head, so keys are what to send")
        others = [o for o in self.options[1:] if not o.refused]
        if others:
            gain = best.efficiency[0] - others[0].efficiency[0]
            near = best.efficiency[1] < others[0].efficiency[2]
            lines.append(
                f"next best is {others[0].schedule}, {_count(round(100 * gain), 'point')} behind"
                + ("; the intervals overlap, so try both" if near else "")
            )
        return lines


def plan(
    *,
    seq: int,
    heads: int,
    kv_heads: int | None = None,
    gpus: int,
    link: str = "nvlink+ib400",
    head_dim: int = 128,
    batch: int = 1,
    causal: bool = True,
    backward: bool = False,
    gpus_per_node: int = 8,
    memory_gb: float = 80.0,
    merge: str = "fused",
    documents: bool | Sequence[int] = False,
) -> Plan:
    """Compare the schedules for one attention and choose.

    Args:
        seq: tokens of the whole sequence. heads, kv_heads (default: as many), head_dim, batch: as usual.
        gpus, gpus_per_node: how many in all, and in a machine.
        link: "nvlink", or with another for between machines: "nvlink+ib400" (see costs.LINKS). With one GPU a machine
            a single one is that between machines.
        backward: cost of forward and backward together.
        memory_gb: of one GPU; schedules that need more are refused.
        merge: "fused" (results merged in the kernel's epilogue) or "separate" (in a pass of their own).
        documents: lengths of packed documents, which add up to seq: the layout balances each of them, and they do not
            see one another. True: that layout, with one document.

    Raises:
        InvalidInputError: a number that makes no sense, documents that do not add up, an unknown link, or several
            machines with one link.
        UnsupportedError: no schedule fits in memory.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    numbers = {"seq": seq, "heads": heads, "kv_heads": kv_heads, "gpus": gpus, "head_dim": head_dim, "batch": batch,
               "gpus_per_node": gpus_per_node}  # fmt: skip
    for name, x in numbers.items():
        most = MOST.get(name, 2**40)
        if isinstance(x, bool) or not isinstance(x, int) or x < 1:
            raise InvalidInputError(f"{name} must be a whole number from 1 up, got {shown(x, 40)}")
        if x > most:
            raise InvalidInputError(f"{name} must be at most {most:,}, got {x:,}")
    for name, flag in (("causal", causal), ("backward", backward)):
        if not isinstance(flag, bool):
            raise InvalidInputError(f"{name} must be True or False, got {shown(flag, 40)}")
    if head_dim % 8 or head_dim > _LARGEST_HEAD:
        raise InvalidInputError(
            f"head_dim must be a multiple of 8 up to {_LARGEST_HEAD}, which the kernels take, got {head_dim}"
        )
    if heads % kv_heads:
        raise InvalidInputError(f"heads ({heads}) must be a multiple of kv_heads ({kv_heads})")
    if merge not in MERGES:
        raise InvalidInputError(f"merge must be one of {', '.join(MERGES)}, got {shown(merge, 40)}")
    if isinstance(memory_gb, bool) or not isinstance(memory_gb, int | float) or not 0 < memory_gb < 1e6:
        raise InvalidInputError(f"memory_gb must be a positive number, got {shown(memory_gb, 40)}")
    setup = Setup(
        seq=seq, heads=heads, kv_heads=kv_heads, gpus=gpus, head_dim=head_dim, batch=batch, causal=causal,
        backward=backward, link=link, gpus_per_node=gpus_per_node, memory_gb=float(memory_gb), merge=merge,
        documents=_lengths(documents, seq, gpus),
    )  # fmt: skip
    within, between = links(link)
    if gpus_per_node == 1 and between is None:
        between = within
    if setup.nodes > 1 and between is None:
        raise InvalidInputError(
            f"{gpus} GPUs with {gpus_per_node} in a machine are {setup.nodes} machines: name the link between them, "
            f"such as {link}+ib400"
        )
    slowest = between if setup.nodes > 1 and between is not None else within
    found = [_option(name, setup, within, slowest) for name in CANDIDATES]
    found.sort(key=lambda o: (bool(o.refused), -o.efficiency[0]))
    if found[0].refused:
        least = min(found, key=lambda o: o.memory)
        raise UnsupportedError(
            f"no schedule fits {memory_gb:g} GB; the least is {least.schedule} with {_bytes(least.memory)} a GPU: "
            "use more GPUs, or a shorter sequence"
        )
    margins = [setup.block / least_block(setup, slowest, end) for end in ENDS]
    return Plan(
        setup=setup, layout=setup.layout, options=tuple(found), margin=margins[0],
        margin_range=(margins[1], margins[2]), slowest=slowest,
    )  # fmt: skip


def _lengths(documents: object, seq: int, gpus: int) -> tuple[int, ...] | None:
    """The argument `documents`, checked: lengths, or None without any."""
    if isinstance(documents, bool):
        return (seq,) if documents else None
    if not isinstance(documents, Sequence) or isinstance(documents, str | bytes):
        raise InvalidInputError(f"documents must be a list of lengths, True or False, got {shown(documents, 40)}")
    wrong = [n for n in documents if isinstance(n, bool) or not isinstance(n, int) or n < 0]
    if wrong:
        raise InvalidInputError(f"a document's length must be a whole number from 0 up, got {shown(wrong[0], 40)}")
    if sum(documents) != seq:
        raise InvalidInputError(f"documents add up to {sum(documents):,} tokens, but seq is {seq:,}")
    if gpus * (different := len(set(documents))) > _MOST_LENGTHS:
        raise InvalidInputError(
            f"{different:,} different lengths of documents on {gpus:,} GPUs are more than are counted here: give fewer"
        )
    return tuple(documents)


def _option(name: str, setup: Setup, within: Link, slowest: Link) -> Option:
    refused = ""
    detail = ""
    arguments: dict[str, Any] = {}
    n = setup.gpus
    if name == "double_ring":
        inner = inner_ranks(setup)
        detail, arguments = f"inner rings of {inner}", {"inner": inner}
        if setup.nodes == 1 or inner in (1, n):
            refused = f"{'one machine' if setup.nodes == 1 else 'rings of one'}: the plain ring"
    elif name == "usp":
        u = group_ranks(setup)
        detail, arguments = f"groups of {u}, rings of {n // u}", {"ulysses": u}
        if u in (1, n):
            refused = "groups of one: the plain ring" if u == 1 else "one group: ulysses"
    elif name in ("mesh", "concentric"):
        a, b = default_mesh(n, setup.heads, setup.kv_heads)
        detail = f"{a} x {b}" if name == "mesh" else f"teams of {a}, rings of {b}"
        arguments = {"mesh": (a, b)}
        if 1 in (a, b):
            refused = f"the best mesh is one row: {'allgather' if name == 'mesh' else 'the plain ring'}"
    elif name == "ulysses":
        copies = share_heads(setup.heads, setup.kv_heads, n).copies
        if n > setup.heads:
            refused = f"more GPUs than the {setup.heads} heads"
        elif copies > 1:
            detail = f"every key head sent {copies:.3g} times"
    corners = [(a, b) for a in ENDS[1:] for b in ENDS[1:]]  # kernels and network need not be bad at the same time
    times = {pair: rank_time(name, setup, within, slowest, *pair) for pair in [("value", "value"), *corners]}
    shares = {pair: setup.flops / large_block_rate(setup, pair[0]) / (n * t.total) for pair, t in times.items()}
    middle = times["value", "value"]
    seconds = (middle.total, times["worst", "worst"].total, times["best", "best"].total)
    efficiency = (shares["value", "value"], min(shares.values()), max(shares.values()))
    sent, memory = bytes_sent(name, setup), peak_memory(name, setup)
    if not refused and memory > setup.memory_gb * 1e9:
        refused = f"needs {_bytes(memory)} of {setup.memory_gb:g} GB"
    return Option(
        schedule=name, detail=detail, sent=sent, memory=memory, seconds=seconds, efficiency=efficiency,
        exposed=middle.exposed / middle.total, merged=middle.merge / middle.total, refused=refused,
        arguments=arguments,
    )  # fmt: skip


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _time_text(seconds: float) -> str:
    for unit, scale in (("us", 1e6), ("ms", 1e3)):
        if seconds * scale < 999.5:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def seed_table(gpus: tuple[int, ...] = (8, 64, 512), *, tokens_per_gpu: int = 100_000, **options: Any) -> list[Plan]:
    """Plans for the rows of the table that this project started from: 100k tokens a GPU, more and more GPUs."""
    settings = {"heads": 32, "kv_heads": 8, **options}
    return [plan(seq=tokens_per_gpu * n, gpus=n, **settings) for n in gpus]


__all__ = ["CANDIDATES", "Option", "Plan", "Setup", "least_block", "plan", "seed_table"]
