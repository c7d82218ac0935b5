"""The model behind `plan`: what a schedule costs one rank in time, bytes and memory.

A rank's time is a sum over steps of max(compute, transfer) where the transfer hides behind the compute, and of
compute + transfer where it does not, plus merge passes and launches. Constants, with their ranges and sources, are in
costs.py. Bytes and memory are those of this library's schedules.

Causal work is counted as balanced (zigzag, or documents), which the layouts are but for padding: shards have as many
rows as the layout makes them, padding travels with the rest, and all ranks take as long as the one with most to see.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from gpu_accel.ring_attention import costs
from gpu_accel.ring_attention.costs import Link
from gpu_accel.ring_attention.sizes import (
    default_degree,
    default_inner,
    default_mesh,
    shard_rows,
    share_heads,
    visible_pairs,
)

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


def inner_ranks(setup: Setup) -> int:
    """Ranks of an inner ring of `double_ring`: those of a machine."""
    n, per_node = setup.gpus, setup.gpus_per_node
    return per_node if setup.nodes > 1 and n % per_node == 0 else default_inner(n)


def group_ranks(setup: Setup) -> int:
    """Ranks of a group of `usp`, within a machine."""
    near = min(setup.gpus, setup.gpus_per_node)
    return default_degree(near if setup.gpus % near == 0 else setup.gpus, setup.kv_heads)


def large_block_rate(setup: Setup, end: str) -> float:
    return (costs.BACKWARD if setup.backward else costs.ATTENTION).at(end)


def rank_time(name: str, setup: Setup, within: Link, slowest: Link, end: str, net: str) -> _Time:
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
        return flops / (large_block_rate(setup, end) * block / (block + half)) + setup.calls * costs.STEP.at(end)

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
        size = setup.kv_bytes * grow if name == "kv_ring" else bytes_sent(name, setup) / (hops + 1)
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
        w = inner_ranks(setup)
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
        u = n if name == "ulysses" else group_ranks(setup)
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
        collective(float(bytes_sent(name, setup)), 5 if setup.backward else 3)
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


def bytes_sent(name: str, setup: Setup) -> int:
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
        w = inner_ranks(setup)
        home = n // w * (w if w > 1 else 0) + (n // w if n > w else 0)
        return setup.kv_bytes * (n - 1) * (2 if back else 1) + (dkv * home if back else 0)
    if name in ("mesh", "concentric"):
        a, b = default_mesh(n, setup.heads, setup.kv_heads)
        if name == "concentric":
            return _gathered(setup, a) + ring(setup.hops(b))
        return _gathered(setup, a) + (b - 1) * (setup.kv_bytes * (2 if back else 1) + (dkv if back else 0))
    u = n if name == "ulysses" else group_ranks(setup)
    keys = len(share_heads(setup.heads, setup.kv_heads, u).keys[0]) * u / setup.kv_heads
    return int((u - 1) / u * _exchanged(setup, u) + keys * ring(setup.hops(n // u, u)))


def counted_memory(name: str, setup: Setup) -> int | None:
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


def peak_memory(name: str, setup: Setup) -> int:
    """Bytes of one rank: its shards (with backward also of the gradient of o) and what the schedule holds beside them.

    Counted for three schedules, and for the others more than they need.
    """
    counted = counted_memory(name, setup)
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
