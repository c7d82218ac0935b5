"""Run the partitions of the Hopper FP8 forward on a CPU: their Python as it stands, a thread a partition.

A Gluon function is a Python function of names (gl, mbarrier, warpgroup_mma, ...). Here these names have meanings in
numpy: barriers count arrivals and bytes and block, tensor maps copy rows, a product is computed when it is issued and
again when it is waited for, and must not have changed. So what is tested is the order of things: phases, stages, which
tile and block a buffer holds, masks of blocks, what is carried from tile to tile. Layouts and numbers are not.
"""

from __future__ import annotations

import collections
import itertools
import math
import threading
import traceback
import types

import numpy as np

from gpu_accel.flash_attention3 import hopper_device, hopper_fp8_device, hopper_fp8_forward, hopper_handover

LOG2_E = 1.4426950408889634
here = threading.local()  # program_id


class Tensor(np.ndarray):
    type = types.SimpleNamespace(layout=None)


def tensor(x) -> Tensor:
    return np.asarray(x, dtype=np.float64).view(Tensor)


class Barrier:
    def __init__(self, count: int, lock: threading.Condition):
        self.count, self.left, self.bytes, self.phase, self.lock = count, count, 0, 0, lock

    def change(self, arrivals: int, more: int) -> None:
        with self.lock:
            self.left -= arrivals
            self.bytes += more
            assert self.left >= 0, "more arrivals than the barrier counts"
            if self.left == 0 and self.bytes == 0:
                self.phase ^= 1
                self.left = self.count
                self.lock.notify_all()

    def wait(self, parity: int) -> None:
        with self.lock:
            assert self.lock.wait_for(lambda: self.phase != parity, timeout=10), "nobody completes the phase"


class Named:
    """A named barrier, on which consumers (128 threads) arrive and the producer (32) waits."""

    def __init__(self, lock: threading.Condition):
        self.threads, self.times, self.lock = 0, 0, lock

    def arrive(self, threads: int, all_threads: int, wait: bool = False) -> None:
        with self.lock:
            self.threads += threads
            assert self.threads <= all_threads, "somebody arrives twice"
            time = self.times
            if self.threads == all_threads:
                self.threads, self.times = 0, time + 1
                self.lock.notify_all()
            elif wait:
                assert self.lock.wait_for(lambda: self.times > time, timeout=10), "nobody completes the barrier"


class Barriers:
    def __init__(self, number: int, count: int, lock: threading.Condition):
        self.all = [Barrier(count, lock) for _ in range(number)]

    def index(self, i):
        return self.all[int(i)]


class View:
    dtype = "e4m3"

    def __init__(self, data: np.ndarray, flipped: bool = False):
        self.data, self.flipped, self.shape = data, flipped, data.shape

    def permute(self, _):
        return type(self)(self.data, not self.flipped)

    def slice(self, start, length, dim):
        assert dim == 1 and not self.flipped
        return type(self)(self.data[:, start : start + length])

    def read(self) -> np.ndarray:
        return (self.data.T if self.flipped else self.data).copy()


class Buffers:
    dtype = "e4m3"

    def __init__(self, *shape: int):
        self.data, self.shape = np.full(shape, np.nan), shape

    def index(self, i):
        assert 0 <= int(i) < self.shape[0]
        return View(self.data[int(i)])


class Queue:
    def __init__(self):
        self.numbers = [0, 0]

    def index(self, i):
        return types.SimpleNamespace(load=lambda layout: self.numbers[int(i)])


class Product:
    def __init__(self, compute):
        self.compute, self.at_issue = compute, compute()


def product(a, b, c, use_acc=True, is_async=False) -> Product:
    def compute():
        with np.errstate(all="ignore"):
            left = a.read() if isinstance(a, View) else np.asarray(a)
            before = c.compute() if isinstance(c, Product) else np.asarray(c)
            return tensor(left @ b.read() + (before if use_acc else 0.0))

    return Product(compute)


def wait_for_products(pending, deps):
    found = []
    for x in deps:
        if isinstance(x, Product):
            value = x.compute()
            assert np.array_equal(value, x.at_issue, equal_nan=True), "an operand changed under a product"
            x = value
        found.append(x)
    return found[0] if len(found) == 1 else tuple(found)


class Mbarrier:
    @staticmethod
    def wait(barrier, phase, pred=True):
        if pred:
            barrier.wait(int(phase))

    @staticmethod
    def arrive(barrier, count=1, pred=True):
        if pred:
            barrier.change(count, 0)

    @staticmethod
    def expect(barrier, size, pred=True):
        if pred:
            barrier.change(1, size)


def of_numbers_or_tensors(scalar, whole):
    return lambda *xs: whole(*xs).view(Tensor) if any(np.ndim(x) for x in xs) else scalar(*xs)


def nothing(*args):
    return None


GL = types.SimpleNamespace(
    minimum=of_numbers_or_tensors(min, np.minimum), maximum=of_numbers_or_tensors(max, np.maximum),
    where=of_numbers_or_tensors(lambda c, a, b: a if c else b, np.where),
    exp2=of_numbers_or_tensors(lambda x: float(np.exp2(x)), np.exp2),
    max=lambda x, axis: x.max(axis=axis).view(Tensor) if np.ndim(x) else x,
    sum=lambda x, axis: x.sum(axis=axis).view(Tensor), split=lambda x: (x[..., 0], x[..., 1]),
    full=lambda shape, value, dtype, layout=None: tensor(np.full(shape, value)), cdiv=lambda a, b: -(-a // b),
    arange=lambda a, b, layout=None: tensor(np.arange(a, b)), static_range=range, to_tensor=lambda x: x,
    convert_layout=lambda x, layout, assert_trivial=False: x, program_id=lambda i: here.program,
    num_programs=lambda i: here.programs, num_warps=lambda: 4, NVMMADistributedLayout=nothing, DotOperandLayout=nothing,
    SliceLayout=nothing, BlockedLayout=nothing, store=nothing, float32="float32", float8e5="e5m2", constexpr=None,
)  # fmt: skip


class Totals:
    """One consumer's sums in global memory, whatever is added to their address."""

    __array_ufunc__ = None
    value = 0.0

    def __add__(self, other):
        return self


class Emulation:
    """One call: tiles of 2 * `rows` queries and `block` keys, scales of k and v for every block."""

    def __init__(self, *, sq: int, sk: int, heads: int = 2, heads_kv: int = 1, batch: int = 2, dim: int = 16,
                 left: int = -1, right: int = -1, softcap: float = 0.0, dynamic: bool = False, chunk: int = 0,
                 stages: int = 3, programs: int = 2, rows: int = 16, block: int = 32, growth: float = 0.0,
                 two_level: bool = True, fold: bool = False, under: int = 0, ahead: bool = True,
                 named: bool = False, seed: int = 0):  # fmt: skip
        draw = np.random.default_rng(seed)
        self.q = draw.standard_normal((batch, heads, sq, dim))
        self.k, self.v = (draw.standard_normal((batch, heads_kv, sk, dim)) for _ in range(2))
        blocks = (batch, heads_kv, -(-sk // block))
        self.k_scale = draw.uniform(0.5, 2, blocks)
        self.v_scale = 2.0 ** draw.uniform(-1, 1, blocks)
        self.o, self.lse = np.full(self.q.shape, np.nan), np.full(self.q.shape[:3], np.nan)
        num_m = -(-sq // (2 * rows))
        tiles = num_m * batch * heads
        self.shape = (sq, sk, heads, heads // heads_kv, num_m, tiles, 1, left, right)
        self.softcap, self.dynamic, self.chunk, self.stages = softcap, dynamic, chunk, stages
        self.rows, self.block, self.programs, self.heads_kv = rows, block, min(programs, tiles), heads_kv
        self.growth, self.two_level, self.fold, self.under, self.ahead = growth, two_level, fold, under, ahead
        self.named = named
        self.drawn, self.errors = itertools.count(), []

    def names(self) -> dict:
        """What the kernel's source may refer to; `softcap`, masks and stores are written out plainly."""
        sq, sk, heads, _, _, _, _, left, right = self.shape
        unit = self.q.shape[-1] ** -0.5

        def mask_block(s, number, row0, shape, causal, window):
            key = number * self.block + np.arange(self.block)[None, :]
            row = row0 + np.arange(self.rows)[:, None] + sk - sq
            seen = (key < sk) & ((key <= row + right) | (not causal)) & ((key >= row - left) | (not window))
            return np.where(seen, s, -np.inf).view(Tensor)

        def store_tile(acc, m, l_sum, bufs, outputs, where, row0, shape, wg, shift, layout):
            for i in range(max(0, min(self.rows, sq - row0))):
                at = (*where, row0 + i)
                assert np.isnan(self.lse[at]), "a row is stored twice"
                total = float(l_sum[i].sum())
                self.o[at] = acc[i] / total if total else 0.0
                self.lse[at] = (m[i] - shift + np.log2(total)) / LOG2_E if total else -np.inf

        def put_aside(totals, acc, unit, m_total, m_row, chunks):
            totals.value = (totals.value if chunks > 0 else 0.0) * np.exp2(m_total - m_row)[:, None] + acc * unit
            return m_row

        def take_in(acc, totals, m_total, m_row, chunks):
            return acc + totals.value * np.exp2(m_total - m_row)[:, None] if chunks > 0 else acc

        def tma_load(rows, at, barrier, view, pred=True):
            if pred:
                view.data[:] = rows.read(at)
                barrier.change(0, -rows.block_type.nbytes)

        def publish_tile(k, tile, queue, full, empty):
            empty.index(k & 1).wait(((k >> 1) & 1) ^ 1)
            queue.numbers[k & 1] = tile
            full.index(k & 1).change(1, 0)

        def receive_tile(k, queue, full, empty):
            full.index(k & 1).wait((k >> 1) & 1)
            tile = int(queue.numbers[k & 1])
            empty.index(k & 1).change(1, 0)
            return tile

        names = dict(
            gl=GL, mbarrier=Mbarrier, warpgroup_mma=product, warpgroup_mma_wait=wait_for_products, tma_load=tma_load,
            tma=types.SimpleNamespace(store_wait=nothing), ROWS=self.rows, NEG_LARGE=-1e30, EARLY_DRAW=2,
            PING_PONG_BARRIER=8, KV_FREE=10, bar_sync=nothing, bar_arrive=nothing,
            pack_halves=lambda even, odd, e5m2: tensor(np.stack([even, odd], -1).reshape(len(even), -1)),
            pack_quads=lambda p, e5m2: tensor(p), unpack_quads=lambda p, dtype, layout: p,
            thread_row_sum=lambda p: tensor(p.reshape(len(p), -1, 4, 2).sum((1, 3))), tanh=np.tanh,
            rescale=lambda acc, alpha: tensor(acc * np.asarray(alpha)[:, None]), log2_fast=lambda x: float(np.log2(x)),
            row_scales=lambda *args: tensor(np.full(self.rows, unit / self.softcap if self.softcap else unit * LOG2_E)),
            head_scales=lambda scales, batch, kv: (batch, kv),
            block_scales=lambda at, number, n, per: (self.k_scale[(*at, number)], self.v_scale[(*at, number)]),
            draw=lambda counter, wanted: next(self.drawn) if wanted else 0,
            mask_block=mask_block, store_tile=store_tile, put_aside=put_aside, take_in=take_in,
            publish_tile=publish_tile, receive_tile=receive_tile,
        )  # fmt: skip
        module = hopper_fp8_forward
        own = [(module, n) for n, f in vars(module).items() if n.startswith("_") and hasattr(f, "fn")]
        shared = {
            hopper_device: ("tile_of", "key_blocks", "mask_ends", "issue_product", "release", "rewind"),
            hopper_handover: ("wait_free", "take_turn", "pass_turn", "draw_early", "draw_late"),
            hopper_fp8_device: ("first_softmax",),
        }
        for where, name in own + [(where, name) for where, names_of in shared.items() for name in names_of]:
            f = getattr(where, name).fn
            names[name] = types.FunctionType(f.__code__, names, name, f.__defaults__)
        return names

    def run(self) -> None:
        sq, sk, _, _, _, _, _, left, right = self.shape
        dim, groups = self.q.shape[-1], -(-sk // 16)
        causal, window, even = right >= 0, left >= 0, sk % self.block == 0
        threads = []

        def rows(x, start, number):
            part = x[start : start + number]
            return np.vstack([part, np.zeros((number - len(part), dim))])

        def source(read, size):
            return types.SimpleNamespace(read=read, block_type=types.SimpleNamespace(nbytes=size))

        def key_rows(at):
            head, group = divmod(at[0], groups)
            return rows(self.k[head // self.heads_kv, head % self.heads_kv], group * 16, self.block)

        sources = (
            source(lambda at: rows(self.q[at[0], at[1]], at[2], self.rows), 7),
            source(key_rows, 11),
            source(lambda at: rows(self.v[at[0], at[1]], at[3], self.block).T, 13),
        )

        def guarded(program, f, *args):
            here.program, here.programs = program, self.programs
            try:
                f(*args)
            except BaseException:
                self.errors.append(traceback.format_exc())

        for program in range(self.programs):
            names, lock, s, n = self.names(), threading.Condition(), self.stages, 2
            named = collections.defaultdict(lambda lock=lock: Named(lock))
            names["bar_arrive_at"] = lambda number, all_of, named=named: named[int(number)].arrive(128, all_of)
            names["bar_sync_at"] = lambda number, all_of, named=named: named[int(number)].arrive(32, all_of, wait=True)
            slots = 2 * n
            bufs = (Buffers(slots, self.rows, dim), Buffers(s, self.block, dim), Buffers(s, dim, self.block),
                    Buffers(n, self.rows, dim))  # fmt: skip
            full = [Barriers(s, 1, lock) for _ in range(2)]
            bars = (Barriers(slots, 1, lock), Barriers(slots, 1, lock), *full, Barriers(s, n, lock),
                    Barriers(2, 1, lock), Barriers(2, n, lock), Queue())  # fmt: skip
            scales = (0,) * 13 + (self.softcap * LOG2_E,)
            aligned = right == 0 and not window and (sk - sq) % self.block == 0 and n * self.rows <= self.block
            switches = [n, self.block, s, 128, 128, False, causal, window, self.softcap > 0, even, self.dynamic,
                        8.0, self.growth, self.under, self.ahead, self.two_level, self.chunk, self.fold,
                        aligned, self.named]  # fmt: skip
            calls = [
                (names["_consumer"], wg, bufs, bars, None, Totals(), self.shape, scales, *switches) for wg in range(n)
            ]
            calls.append((names["_producer"], bufs, bars, *sources, None, self.shape, (self.heads_kv, groups), n,
                          self.block, s, causal, window, self.dynamic, self.named))  # fmt: skip
            threads += [threading.Thread(target=guarded, args=(program, *call), daemon=True) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not self.errors, self.errors[0]

    def truth(self) -> tuple[np.ndarray, np.ndarray]:
        """o and lse of plain attention."""
        sq, sk, _, per_kv, _, _, _, left, right = self.shape

        def whole(x, scale):
            return np.repeat(x * np.repeat(scale, self.block, 2)[:, :, :sk, None], per_kv, 1)

        s = np.einsum("bhqd,bhkd->bhqk", self.q, whole(self.k, self.k_scale)) * self.q.shape[-1] ** -0.5
        s = self.softcap * np.tanh(s / self.softcap) if self.softcap else s
        row, key = np.arange(sq)[:, None] + sk - sq, np.arange(sk)[None, :]
        s = np.where(((key <= row + right) | (right < 0)) & ((key >= row - left) | (left < 0)), s, -np.inf)
        top = np.maximum(s.max(-1, keepdims=True), -1e30)
        p = np.exp(s - top)
        total = p.sum(-1)
        with np.errstate(all="ignore"):
            o = np.where(total[..., None] > 0, p @ whole(self.v, self.v_scale) / total[..., None], 0.0)
            lse = np.where(total > 0, top[..., 0] + np.log(total), -math.inf)
        return o, lse

    def check(self) -> None:
        """o and lse are those of plain attention, and every row was stored."""
        o, lse = self.truth()
        np.testing.assert_allclose(self.lse, lse, rtol=1e-8, atol=1e-8)
        np.testing.assert_allclose(self.o, o, rtol=1e-6, atol=1e-8)
