"""What a distributed attention will cost before it runs: schedule, bytes, memory, efficiency, and why.

    print(plan(seq=1 << 20, heads=32, kv_heads=8, gpus=64, link="nvlink+ib400").explain())

The model: a rank's time is a sum over steps of max(compute, transfer) where the transfer hides behind the compute, and
of compute + transfer where it does not, plus merge passes and launches. Efficiency is against one GPU that does the
whole at its large-block rate. Constants, with their ranges and sources, are in costs.py; the interval spans kernels and
links at their worst and at their best, in all four combinations. Every time here is modelled. Bytes and memory are
those of this library's schedules.

Causal work is counted as balanced (zigzag, or documents), which the layouts are but for padding: shards have as many
rows as the layout makes them, padding travels with the rest, and all ranks take as long as the one with most to see.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gpu_accel.errors import InvalidInputError, UnsupportedError, shown
from gpu_accel.ring_attention import costs
from gpu_accel.ring_attention.costs import Link, links
from gpu_accel.ring_attention.sizes import (
    default_degree,
    default_inner,
    default_mesh,
    shard_rows,
    share_heads,
    visible_pairs,
)

ENDS = ("value", "worst", "best")
MOST = {"gpus": 2**16, "heads": 2**16}  # the model looks at every rank and every head
_MOST_LENGTHS = 2**22  # ranks times documents of different lengths, which take a few seconds
_LARGEST_HEAD = 256
MERGES = ("fused", "separate")
CANDIDATES = ("kv_ring", "double_ring", "ulysses", "usp", "allgather", "q_ring", "mesh", "concentric")
_LITTLE = 0.005  # of work and bytes; padding that costs less is named, and no more
_ELEMENT, _PARTIAL = 2, 4  # bytes of 16-bit tensors, and of float32 partial results and gradients that add up


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The question."""

    seq: int
    heads: int
    kv_heads: int
    gpus: int
    head_dim: int = 128
    batch: int = 1
    causal: bool = True
    backward: bool = False
    link: str = "nvlink+ib400"
    gpus_per_node: int = 8
    memory_gb: float = 80.0
    merge: str = "fused"  # in the kernel's epilogue; "separate": in a pass of its own
    documents: tuple[int, ...] | None = None  # lengths of packed documents

    @property
    def layout(self) -> str:
        return "documents" if self.documents is not None else "zigzag" if self.causal else "contiguous"

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self.seq,) if self.documents is None else self.documents

    @cached_property
    def block(self) -> int:
        """Rows of a shard: tokens, and the padding that its layout adds."""
        return shard_rows(self.layout, self.lengths, self.gpus)

    @property
    def padding(self) -> int:
        """Rows of padding of all shards."""
        return self.block * self.gpus - self.seq

    @cached_property
    def calls(self) -> int:
        """Kernel calls of a step: one a document."""
        return sum(length > 0 for length in self.lengths)

    @cached_property
    def rows(self) -> float:
        """Rows of a shard that one kernel call has, of the document to which most work goes."""
        if self.calls == 1:
            return self.block
        found = Counter(length for length in self.lengths if length)
        work = {n: times * n * n for n, times in found.items()}
        return sum(work.values()) / sum(w / shard_rows(self.layout, (n,), self.gpus) for n, w in work.items())

    @cached_property
    def _pairs(self) -> tuple[int, ...]:
        return visible_pairs(self.layout, self.lengths, self.gpus, self.causal)

    def share(self, group: int = 1) -> float:
        """Work of the ranks that have most to see, as a multiple of an even share: of groups of neighbours that divide
        theirs, if `group` is more than one. 1 without padding."""
        most = max(sum(self._pairs[i : i + group]) for i in range(0, self.gpus, group))
        return most * (self.gpus // group) / sum(self._pairs)

    @cached_property
    def _filled(self) -> int:
        """Ranks that hold tokens: the first chunks of all ranks come before the second of any."""
        chunks = self.gpus if self.layout == "contiguous" else 2 * self.gpus
        return min(self.gpus, max(-(-n // -(-n // chunks)) for n in self.lengths if n))

    def hops(self, places: int, group: int = 1) -> int:
        """Of a ring of so many places, each of `group` ranks: fewer than there are others where shards are empty."""
        filled = -(-self._filled // group)
        if self.causal:
            return min(places, filled) - 1
        return places - 1 if filled > 1 else 0

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)

    @property
    def kv_bytes(self) -> int:
        """K and V of one shard, 16 bits."""
        return 2 * self.batch * self.block * self.kv_heads * self.head_dim * _ELEMENT

    @property
    def q_bytes(self) -> int:
        """Q of one shard, 16 bits."""
        return self.batch * self.block * self.heads * self.head_dim * _ELEMENT

    @cached_property
    def flops(self) -> float:
        """Of the whole attention: 4 S^2 h a document, half of it with a causal mask, 3.5 times it with backward."""
        whole = 4.0 * self.batch * sum(n**2 for n in self.lengths) * self.heads * self.head_dim
        return whole * (0.5 if self.causal else 1.0) * (3.5 if self.backward else 1.0)


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


def least_block(setup: Setup, link: Link, end: str = "value") -> float:
    """Tokens of a shard with which a hop of keys and values takes as long as a step's attention.

    Full: 4 c^2 h / F = 4 c hkv / B bytes, c = (hkv / h) F / B (Ring Attention, section 3, with grouped heads); causal:
    half the work of a step, so twice that. The backward has 2.5 times the work and 3 times the bytes.
    """
    rate = costs.BACKWARD.at(end) if setup.backward else costs.ATTENTION.at(end)
    if end != "value":  # a fast kernel is the hard case for hiding
        rate = costs.ATTENTION.at("best" if end == "worst" else "worst")
    grow = 3.0 / 2.5 if setup.backward else 1.0
    return grow * (2 if setup.causal else 1) * setup.kv_heads / setup.heads * rate / link.hop.at(end)


@dataclass
class _Time:
    """Seconds of one rank, by what they go into."""

    compute: float = 0.0
    exposed: float = 0.0
    merge: float = 0.0

    @property
    def total(self) -> float:
        return self.compute + self.exposed + self.merge


def _option(name: str, setup: Setup, within: Link, slowest: Link) -> Option:
    refused = ""
    detail = ""
    arguments: dict[str, Any] = {}
    n = setup.gpus
    if name == "double_ring":
        inner = _inner(setup)
        detail, arguments = f"inner rings of {inner}", {"inner": inner}
        if setup.nodes == 1 or inner in (1, n):
            refused = f"{'one machine' if setup.nodes == 1 else 'rings of one'}: the plain ring"
    elif name == "usp":
        u = _degree(setup)
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
    times = {pair: _time(name, setup, within, slowest, *pair) for pair in [("value", "value"), *corners]}
    shares = {pair: setup.flops / _rate(setup, pair[0]) / (n * t.total) for pair, t in times.items()}
    middle = times["value", "value"]
    seconds = (middle.total, times["worst", "worst"].total, times["best", "best"].total)
    efficiency = (shares["value", "value"], min(shares.values()), max(shares.values()))
    sent, memory = _sent(name, setup), _memory(name, setup)
    if not refused and memory > setup.memory_gb * 1e9:
        refused = f"needs {_bytes(memory)} of {setup.memory_gb:g} GB"
    return Option(
        schedule=name, detail=detail, sent=sent, memory=memory, seconds=seconds, efficiency=efficiency,
        exposed=middle.exposed / middle.total, merged=middle.merge / middle.total, refused=refused,
        arguments=arguments,
    )  # fmt: skip


def _inner(setup: Setup) -> int:
    """Ranks of an inner ring of `double_ring`: those of a machine."""
    n, per_node = setup.gpus, setup.gpus_per_node
    return per_node if setup.nodes > 1 and n % per_node == 0 else default_inner(n)


def _degree(setup: Setup) -> int:
    """Ranks of a group of `usp`, within a machine."""
    near = min(setup.gpus, setup.gpus_per_node)
    return default_degree(near if setup.gpus % near == 0 else setup.gpus, setup.kv_heads)


def _rate(setup: Setup, end: str) -> float:
    return (costs.BACKWARD if setup.backward else costs.ATTENTION).at(end)


def _time(name: str, setup: Setup, within: Link, slowest: Link, end: str, net: str) -> _Time:
    """One rank's time under a schedule, at one end of the constants of kernels, and one of those of links."""
    n, c = setup.gpus, setup.block
    busiest = setup.share() * setup.flops / n
    out = _Time()
    count = costs.EPILOGUE if setup.merge == "fused" else costs.MERGE_PASSES
    passes = count.at(end) * 7.5 * setup.batch * c * setup.heads * setup.head_dim / costs.MEMORY.at(end)
    if setup.backward and setup.merge == "separate":
        passes *= 2  # merges forward, float32 sums of gradients backward
    grow = _traffic(setup)

    def kernel(flops: float, block: float) -> float:
        half = costs.SMALL_BLOCK.at(end)
        return flops / (_rate(setup, end) * block / (block + half)) + setup.calls * costs.STEP.at(end)

    def hop(link: Link, size: float) -> float:
        rate = link.pair if n == 2 and link.pair else link.hop
        return link.latency.at(net) + size / rate.at(net)

    def steps(count: int, compute: float, transfer: float, hides: bool) -> None:
        out.compute += count * compute
        if hides:
            busy = min(compute, transfer) * costs.COPY_SLOWDOWN.at(end)
            out.exposed += count * max(0.0, transfer - compute) + count * busy
        else:
            out.exposed += count * transfer

    def collective(size: float, times: int = 1) -> None:
        out.exposed += times * slowest.latency.at(net) + size / slowest.collective.at(net)

    rows = setup.rows / 2 if setup.causal else setup.rows
    if name in ("kv_ring", "q_ring"):
        hops = _ring_hops(name, setup)
        size = setup.kv_bytes * grow if name == "kv_ring" else _sent(name, setup) / (hops + 1)
        one = kernel(busiest / (hops + 1), rows)
        steps(hops, one, hop(slowest, size), slowest.hides)
        out.compute += one
        out.merge = hops * passes
        if hops and (setup.backward or name == "q_ring"):
            home, behind = hop(slowest, size / 2), 0.0
            if name == "kv_ring" and slowest.hides:  # three quarters of the own block's backward are kept for it
                behind = 0.75 * 2.5 / 3.5 * one
            out.exposed += max(0.0, home - behind) + min(home, behind) * costs.COPY_SLOWDOWN.at(end)
    elif name == "double_ring":
        w = _inner(setup)
        inner = _Time()
        one = kernel(busiest / n, rows)
        near = hop(within, setup.kv_bytes * grow)
        inner.compute = w * one
        gap = max(0.0, near - one) + min(near, one) * costs.COPY_SLOWDOWN.at(end) if within.hides else near
        inner.exposed = (w - 1) * gap
        far = hop(slowest, setup.kv_bytes * grow)
        rounds = n // w
        out.compute, out.merge = rounds * inner.compute, (n - 1) * passes
        wait = max(0.0, far - inner.total - w * passes) if slowest.hides else far
        out.exposed = rounds * inner.exposed + (rounds - 1) * wait
        if setup.backward:
            out.exposed += far / 2
    elif name in ("ulysses", "usp"):
        u = n if name == "ulysses" else _degree(setup)
        hops = setup.hops(n // u, u)
        shares = share_heads(setup.heads, setup.kv_heads, u)
        waste = len(shares.queries[0]) * u / setup.heads
        local = slowest if u > setup.gpus_per_node else within
        size = (u - 1) / u * _exchanged(setup, u)
        out.exposed += (4 if setup.backward else 2) * local.latency.at(net) + size / local.collective.at(net)
        compute = kernel(waste * setup.share(u) * setup.flops / n / (hops + 1), u * rows)
        if hops:
            steps(hops, compute, hop(slowest, setup.kv_bytes * shares.copies * grow), slowest.hides)
            out.merge = hops * passes
        if setup.causal and u > 1 and name == "usp":
            out.merge += 2 * _reordered(setup, u) / costs.ORDER.at(end)
        out.compute += compute
    elif name == "allgather":
        out.compute = kernel(busiest, n * rows)
        gathered, times = setup.kv_bytes * (n - 1), 2 if setup.backward else 1
        # Between machines NCCL's rings take all cards of a machine at once, each with its share of what goes round;
        # gradients go by all-to-all, to every rank its own.
        rate = within.collective.at(net)
        if setup.nodes > 1:
            rate = min(rate, setup.gpus_per_node * slowest.collective.at(net))
        out.exposed += times * (slowest.latency.at(net) + gathered / rate)
        if setup.backward:
            collective(gathered * _PARTIAL / _ELEMENT)
        out.merge = _copies(setup) / costs.MEMORY.at(end)
    elif name == "concentric":
        a, b = default_mesh(n, setup.heads, setup.kv_heads)
        hops = setup.hops(b)
        one = kernel(busiest / (hops + 1), rows)
        steps(hops, one, hop(slowest, setup.kv_bytes * grow), slowest.hides)
        out.compute += one
        out.merge = (a * hops + a - 1) * passes
        if setup.backward:
            out.exposed += hop(slowest, setup.kv_bytes * grow / 2)
        collective(float(_gathered(setup, a)), 4 if setup.backward else 2)
    else:
        a, _ = default_mesh(n, setup.heads, setup.kv_heads)
        out.compute = kernel(busiest, a * rows)
        out.merge = (a - 1) * passes
        collective(float(_sent(name, setup)), 5 if setup.backward else 3)
    return out


def _traffic(setup: Setup) -> float:
    """Bytes of a hop in units of K and V in 16 bits: with backward K, V again and their gradients in float32."""
    return 4.0 if setup.backward else 1.0


def _exchanged(setup: Setup, u: int) -> float:
    """Bytes that a shard's heads have in the all-to-alls of Ulysses: q, k, v out and o home, and back for gradients."""
    shares = share_heads(setup.heads, setup.kv_heads, u)
    rows = setup.batch * setup.block
    qkv = rows * setup.head_dim * _ELEMENT * u * (len(shares.queries[0]) + 2 * len(shares.keys[0]))
    home = rows * u * len(shares.queries[0]) * (setup.head_dim * _ELEMENT + _PARTIAL)
    if not setup.backward:
        return qkv + home
    back = qkv + rows * u * len(shares.queries[0]) * (setup.head_dim * _ELEMENT + 2 * _PARTIAL)
    grads = rows * setup.head_dim * _PARTIAL * u * (len(shares.queries[0]) + 2 * len(shares.keys[0]))
    return qkv + home + back + grads


def _reordered(setup: Setup, u: int) -> float:
    """Bytes that usp puts in order: q, k, v and o, and for gradients do, q, k, v and dq, dk, dv in float32."""
    shares = share_heads(setup.heads, setup.kv_heads, u)
    row = setup.batch * setup.block * setup.head_dim * u
    queries, keys = row * len(shares.queries[0]), row * len(shares.keys[0])
    forward = _ELEMENT * (2 * queries + 2 * keys)
    return forward + (forward + _PARTIAL * (queries + 2 * keys) if setup.backward else 0)


def _copies(setup: Setup) -> float:
    """Bytes that an all-gather reads and writes beside its kernels, counted from schedules/allgather.py: blocks are
    packed, joined and put in order; gradients of all keys, in float32, start as zeros, are added to by two calls under
    a causal mask (which see half a block more than all), split, packed, added up in rank order, and rounded."""
    n, kv, order = setup.gpus, float(setup.kv_bytes), 2 * setup.gpus if setup.causal else 0
    gathered = (2 + 2 * n + order) * kv
    if not setup.backward:
        return gathered
    wide = kv / _ELEMENT * _PARTIAL
    seen = n + 0.5 if setup.causal else n
    sums = (n + 4 * seen + order + 2 * n + 2 + 3 * (n - 1) + 1) * wide + kv
    dq = 6 * setup.q_bytes / _ELEMENT * _PARTIAL
    return 2 * gathered + sums + dq


def _gathered(setup: Setup, a: int) -> int:
    """Bytes that a rank sends along a column of a ranks: queries, results in float32, and what their gradients take."""
    rows = setup.batch * setup.block * setup.heads
    results = rows * (setup.head_dim + 1) * _PARTIAL
    back = 2 * setup.q_bytes + 2 * rows * _PARTIAL + rows * setup.head_dim * _PARTIAL
    return (setup.q_bytes + results + (back if setup.backward else 0)) * (a - 1)


def _ring_hops(name: str, setup: Setup) -> int:
    """Of a ring of all ranks: queries that go round meet keys of the past, of which a shard behind has some."""
    return setup.hops(setup.gpus) if name == "kv_ring" or setup.hops(setup.gpus) < 1 else setup.gpus - 1


def _sent(name: str, setup: Setup) -> int:
    """Bytes that one rank sends, forward (and backward): the most that any does."""
    n, rows = setup.gpus, setup.batch * setup.block
    results = rows * setup.heads * (setup.head_dim + 1) * _PARTIAL  # o and lse
    stats = 2 * rows * setup.heads * _PARTIAL
    dq, dkv = rows * setup.heads * setup.head_dim * _PARTIAL, setup.kv_bytes // _ELEMENT * _PARTIAL
    back = setup.backward

    def ring(hops: int) -> int:
        """Keys and values, and sums of their gradients with one hop more."""
        return setup.kv_bytes * hops * (2 if back else 1) + (dkv * (hops + 1) if back and hops else 0)

    if n == 1:
        return 0
    if name == "kv_ring":
        return ring(_ring_hops(name, setup))
    if name == "q_ring":
        hops = _ring_hops(name, setup)
        home = hops + 1 if hops else 0
        return setup.q_bytes * hops + results * home + ((2 * setup.q_bytes + stats) * hops + dq * home if back else 0)
    if name == "allgather":
        return setup.kv_bytes * (n - 1) * (2 if back else 1) + (dkv * (n - 1) if back else 0)
    if name == "double_ring":
        w = _inner(setup)
        home = n // w * (w if w > 1 else 0) + (n // w if n > w else 0)
        return setup.kv_bytes * (n - 1) * (2 if back else 1) + (dkv * home if back else 0)
    if name in ("mesh", "concentric"):
        a, b = default_mesh(n, setup.heads, setup.kv_heads)
        if name == "concentric":
            return _gathered(setup, a) + ring(setup.hops(b))
        return _gathered(setup, a) + (b - 1) * (setup.kv_bytes * (2 if back else 1) + (dkv if back else 0))
    u = n if name == "ulysses" else _degree(setup)
    keys = len(share_heads(setup.heads, setup.kv_heads, u).keys[0]) * u / setup.kv_heads
    return int((u - 1) / u * _exchanged(setup, u) + keys * ring(setup.hops(n // u, u)))


def _counted(name: str, setup: Setup) -> int | None:
    """Bytes at the peak beside the shards, results included, counted from the code; None where nobody has counted.

    The forward is over, but for o and lse, when the backward begins, so the larger of the two.
    """
    n, q, kv = setup.gpus, setup.q_bytes, setup.kv_bytes
    wide_q, wide_kv = q // _ELEMENT * _PARTIAL, kv // _ELEMENT * _PARTIAL
    lse = setup.batch * setup.block * setup.heads * _PARTIAL
    hops = min(setup.hops(n), 2)
    if name == "kv_ring":  # o between steps and the result; sums of dq, three of dk and dv, and the results
        forward = q + (wide_q if hops else 0) + hops * kv
        backward = q + wide_q + (3 if hops else 1) * wide_kv + hops * kv + q + kv
    elif name == "allgather":  # the own block packed, and all of them gathered, joined, and in order
        forward = q + kv * (1 + 3 * n)
        # gradients of all keys, split, packed, and those that come
        backward = q + n * kv + wide_q + 4 * n * wide_kv + wide_kv
    elif name == "ulysses":  # packed, arrived, unpacked
        forward = 3 * (q + kv)
        backward = q + 2 * q + kv + 3 * (wide_q + wide_kv)
    else:
        return None
    return lse + (max(forward, backward + 2 * lse) if setup.backward else forward)


def _memory(name: str, setup: Setup) -> int:
    """Bytes of one rank: its shards (with backward also of the gradient of o) and what the schedule holds beside them.

    Counted for three schedules, and for the others more than they need.
    """
    counted = _counted(name, setup)
    if counted is not None and setup.merge == "fused":
        return counted + setup.kv_bytes + setup.q_bytes * (2 if setup.backward else 1)
    n, rows = setup.gpus, setup.batch * setup.block
    o = rows * setup.heads * setup.head_dim
    shards = 2 * setup.q_bytes + setup.kv_bytes + rows * setup.heads * _PARTIAL
    partial = o * _PARTIAL + rows * setup.heads * _PARTIAL
    kv = setup.kv_bytes
    gradients = (setup.q_bytes + kv + o * _PARTIAL + 3 * kv * _PARTIAL // _ELEMENT) if setup.backward else 0
    base = shards + 2 * partial + gradients  # one more partial result, of the step at hand
    if name == "kv_ring":
        return base + 2 * kv
    if name == "double_ring":
        return base + 4 * kv
    if name == "q_ring":
        return base + 2 * setup.q_bytes + 2 * partial
    if name == "allgather":
        return base + 2 * n * kv + (2 * n * kv * _PARTIAL // _ELEMENT if setup.backward else 0)
    if name == "concentric":
        a, _ = default_mesh(n, setup.heads, setup.kv_heads)
        return base + a * (2 * setup.q_bytes + 3 * partial) + 2 * kv
    if name == "mesh":
        a, b = default_mesh(n, setup.heads, setup.kv_heads)
        return base + a * (setup.q_bytes + 2 * partial) + b * 2 * kv * (3 if setup.backward else 1)
    return base + 2 * (2 * setup.q_bytes + kv) + partial


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
