"""Run the partitions of the Hopper backward with dQ apart on a CPU, as emulate_hopper_fp8.py does it for a forward.

Named barriers count arrivals, too, and complain of one too many; what the copy engine takes out of shared memory must
not have changed when it is waited for.
"""

from __future__ import annotations

import itertools
import threading
import traceback
import types

import numpy as np

from gpu_accel.flash_attention3 import hopper_backward_apart, hopper_backward_device, hopper_backward_producer
from tests.flash_attention3 import emulate_hopper_fp8
from tests.flash_attention3.emulate_hopper_fp8 import (
    GL,
    Barriers,
    Mbarrier,
    Queue,
    here,
    nothing,
    product,
    wait_for_products,
)

LOG2_E = 1.4426950408889634
KEYS = 64


class Tensor(np.ndarray):
    type = types.SimpleNamespace(layout=None)

    def to(self, dtype):
        return self


class View(emulate_hopper_fp8.View):
    dtype = "bf16"

    def store(self, x) -> None:
        self.data[:] = x

    def load(self, layout) -> np.ndarray:
        return self.data.copy().view(Tensor)


class Buffers:
    dtype = "bf16"

    def __init__(self, *shape: int):
        self.data, self.shape = np.full(shape, np.nan), shape

    def index(self, i):
        assert 0 <= int(i) < self.shape[0]
        return View(self.data[int(i)])


class NamedBarriers:
    def __init__(self, lock: threading.Condition):
        self.lock, self.arrived, self.turn = lock, [0] * 16, [0] * 16

    def arrive(self, barrier: int, threads: int) -> int:
        with self.lock:
            turn = self.turn[barrier]
            self.arrived[barrier] += here.threads
            assert self.arrived[barrier] <= threads, f"more arrivals than barrier {barrier} counts"
            if self.arrived[barrier] == threads:
                self.arrived[barrier] = 0
                self.turn[barrier] += 1
                self.lock.notify_all()
            return turn

    def sync(self, barrier: int, threads: int) -> None:
        turn = self.arrive(barrier, threads)
        with self.lock:
            assert self.lock.wait_for(lambda: self.turn[barrier] > turn, timeout=10), f"nobody at barrier {barrier}"


class Emulation:
    """One call: `programs` of head_dim 64 (128 query rows a step) or 128 (64 rows)."""

    def __init__(self, *, sq: int, sk: int, dim: int = 64, heads: int = 2, heads_kv: int = 1, batch: int = 1,
                 causal: bool = False, left: int = -1, dynamic: bool = False, early: bool = False, ahead: bool = False,
                 programs: int = 2, seed: int = 0):  # fmt: skip
        draw = np.random.default_rng(seed)
        self.dim, self.m = dim, 128 if dim == 64 else 64
        self.q, self.do = (draw.standard_normal((batch, heads, sq, dim)) for _ in range(2))
        self.k, self.v = (draw.standard_normal((batch, heads_kv, sk, dim)) for _ in range(2))
        self.causal, self.dynamic, self.early, self.ahead = causal, dynamic, early, ahead
        self.num_m, self.num_n = -(-sq // self.m), -(-sk // (2 * KEYS))
        tiles = self.num_n * batch * heads_kv
        self.shape = (sq, sk, heads_kv, heads // heads_kv, self.num_m, self.num_n, tiles, 1, left, 0 if causal else -1)
        self.programs = min(programs, tiles)
        self.unit = dim**-0.5
        self.s = np.einsum("bhqd,bhkd->bhqk", self.q, np.repeat(self.k, heads // heads_kv, 1))
        self.left = left
        seen = self.seen(np.arange(sq)[:, None], np.arange(sk)[None, :])
        s = np.where(seen, self.s * self.unit, -np.inf)
        top = np.maximum(s.max(-1, keepdims=True), -1e30)
        total = np.exp(s - top).sum(-1, keepdims=True)
        with np.errstate(all="ignore"):
            self.p = np.where(total > 0, np.exp(s - top) / total, 0.0)
            lse = np.where(total > 0, top + np.log(total), np.inf)[..., 0]
        self.dp = np.einsum("bhqd,bhkd->bhqk", self.do, np.repeat(self.v, heads // heads_kv, 1))
        delta = (self.p * self.dp).sum(-1)
        pad = ((0, 0), (0, 0), (0, self.num_m * self.m - sq))
        stat = np.stack([np.pad(lse * LOG2_E, pad, constant_values=np.inf), np.pad(delta, pad)], 2)
        stat = stat.reshape(batch, heads, 2, self.num_m, self.m).swapaxes(2, 3)
        self.stat, self.delta = np.ascontiguousarray(stat).reshape(-1), delta
        self.dq = np.zeros((batch * heads * self.num_m * 2, 64, 64))
        self.dk, self.dv = (np.full((batch, heads_kv, self.num_n * 2 * KEYS, dim), np.nan) for _ in range(2))
        self.drawn, self.errors, self.lock = itertools.count(), [], threading.Lock()

    def seen(self, row, key):
        """Whether a query sees a key."""
        distance = row + self.shape[1] - self.shape[0] - key
        return ((distance >= 0) | (not self.causal)) & ((distance <= self.left) | (self.left < 0))

    def names(self, named: NamedBarriers, lock: threading.Condition) -> dict:
        sq, sk, *_ = self.shape

        def probabilities(s, lse, key0, row0, shift, seqlen_k, left, right, qk_scale, *args):
            with np.errstate(all="ignore"):
                p = np.exp2(np.asarray(s) * qk_scale - np.asarray(lse)[None, :])
            key, row = key0 + np.arange(KEYS)[:, None], row0 + np.arange(self.m)[None, :]
            p = np.where((key < sk) & self.seen(row, key), p, 0.0).view(Tensor)
            return p, p

        def pending() -> list:
            return here.__dict__.setdefault("pending", [])

        def send(view, take):
            pending().append((view.data, view.data.copy(), take))

        def store_wait(left):
            assert left == 0
            for data, before, take in pending():
                assert np.array_equal(data, before, equal_nan=True), "changed while the copy engine read it"
                with self.lock:
                    take(before)
            pending().clear()

        def tma_add(desc, at, view):
            def take(x):
                self.dq[at[0] // 16] += x

            send(view, take)

        def tma_store(desc, at, view):
            def take(x):
                rows = desc[at[0], at[1], at[2] : at[2] + KEYS]
                assert np.isnan(rows).all(), "stored twice"
                rows[:] = x

            send(view, take)

        def tma_load(rows, at, barrier, view, pred=True):
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

        def ds_of(ds_bufs, wg, m):
            return types.SimpleNamespace(index=lambda stage: View(ds_bufs.data[wg][:, stage * m : (stage + 1) * m]))

        def drawn(counter, n):
            return next(self.drawn)

        gl = types.SimpleNamespace(
            **{**vars(GL), "atomic_add": drawn,
               "full": lambda shape, value, dtype, layout=None: np.full(shape, value).view(Tensor),
               "NVMMASharedLayout": types.SimpleNamespace(get_default_for=nothing), "bfloat16": "bf16"})  # fmt: skip
        names = dict(
            gl=gl, mbarrier=Mbarrier, warpgroup_mma=product, tma_load=tma_load, tma_store=tma_store,
            warpgroup_mma_wait=lambda pending, deps: _as_tensors(wait_for_products(pending, deps)),
            tma=types.SimpleNamespace(store_wait=store_wait), tma_add=tma_add, KEYS=KEYS,
            bar_sync_at=named.sync, bar_arrive_at=named.arrive, fence_async_shared=nothing,
            release=lambda empty, stage, barrier, threads: named.arrive(barrier + stage, threads),
            _sync_where=lambda wanted, *args: named.sync(*args) if wanted else None,
            stage_fragment=lambda view, x: view.store(x), _ds_of=ds_of, probabilities=probabilities,
            pack_pairs=lambda p, dtype: p, unpack_pairs=lambda p, dtype, layout: p,
            unpack_floats=lambda p, dtype, layout: p, publish_tile=publish_tile, receive_tile=receive_tile,
            zero_rows=nothing, draw=drawn,
            DS_FULL=8, DS_READ=10, ROW_FREE=6,
        )  # fmt: skip
        own = [(hopper_backward_apart, n) for n in ("_consumer", "_to_gradients", "_half_of_dq", "_dq")]
        own += [(hopper_backward_producer, n) for n in (
            "_whole_rows", "_load_rows", "_whole_keys", "_load_keys", "producer")]  # fmt: skip
        own += [(hopper_backward_device, n) for n in (
            "tile_at", "query_blocks", "first_step", "next_tile", "hand_out_tile", "reset_counter", "free_keys",
            "half_of_dq", "put_fragment", "keys_to_memory")]  # fmt: skip
        for where, name in own:
            f = getattr(where, name).fn
            names[name] = types.FunctionType(f.__code__, names, name, f.__defaults__)
        return names

    def memory(self, k_slots: int, v_slots: int, lock: threading.Condition) -> tuple[tuple, tuple]:
        """Shared memory of a program: its buffers and its barriers."""
        dim, m = self.dim, self.m
        bufs = (Buffers(2, m, dim), Buffers(2, m, dim), Buffers(2 * k_slots, KEYS, dim),
                Buffers(2 * v_slots, KEYS, dim), Buffers(2, KEYS, 2 * m), Buffers(4, m),
                Buffers(2, 64, 64))  # fmt: skip
        bars = (Barriers(k_slots, 1, lock), Barriers(k_slots, 2, lock), Barriers(v_slots, 1, lock),
                Barriers(v_slots, 2, lock), Barriers(2, 1, lock), Barriers(2, 1, lock), None,
                Barriers(2, 1, lock), Barriers(2, 3, lock), Queue())  # fmt: skip
        return bufs, bars

    def calls(self, names: dict, bufs: tuple, bars: tuple, slots: tuple[int, int], maps: tuple) -> list[tuple]:
        """The partitions of a program: how many threads each stands for, the function and its arguments."""
        k_slots, v_slots = slots
        scales = (self.unit, self.unit * LOG2_E, 0.0)
        masks = (self.causal, self.left >= 0)
        whole = self.shape[1] % 128 == 0
        switches = (self.dim, self.m, k_slots, v_slots, False, *masks, whole, self.dynamic, self.early)
        calls = [(128, names["_consumer"], wg, bufs, bars, self.dk, self.dv, self.shape, scales, (),
                  names["_to_gradients"], *switches) for wg in range(2)]  # fmt: skip
        calls.append((128, names["_dq"], bufs, bars, None, self.shape, (), self.dim, self.m, k_slots, *masks,
                      self.dynamic, False))  # fmt: skip
        calls.append((32, names["producer"], bufs, bars, None, *maps, None, self.shape, (self.num_m, 0),
                      self.m, k_slots, v_slots, *masks, self.dynamic, True, False, self.ahead))  # fmt: skip
        return calls

    def run(self) -> None:
        sq, sk, heads_kv, per_kv, num_m, *_ = self.shape
        dim, m = self.dim, self.m
        threads = []

        def rows(x, start, number):
            part = x[start : start + number]
            return np.vstack([part, np.zeros((number - len(part), dim))])

        def source(read, size):
            return types.SimpleNamespace(read=read, block_type=types.SimpleNamespace(nbytes=size))

        def rows_of(x, number, size):
            return source(lambda at: rows(x[at[0], at[1]], at[2], number), size)

        q, do = rows_of(self.q, m, 7), rows_of(self.do, m, 8)
        k, v = rows_of(self.k, KEYS, 11), rows_of(self.v, KEYS, 12)
        stat = source(lambda at: self.stat[at[0] : at[0] + m], 3)

        def guarded(program, count, f, *args):
            here.program, here.programs, here.threads, here.pending = program, self.programs, count, []
            try:
                f(*args)
                assert not here.pending, "the last copies were not waited for"
            except BaseException:
                self.errors.append(traceback.format_exc())

        all_named = []
        for program in range(self.programs):
            lock = threading.Condition()
            named = NamedBarriers(lock)
            all_named.append(named)
            names = self.names(named, lock)
            k_slots, v_slots = 2, 2 if dim == 64 else 1
            bufs, bars = self.memory(k_slots, v_slots, lock)
            calls = self.calls(names, bufs, bars, (k_slots, v_slots), (q, do, k, v, stat))
            threads += [threading.Thread(target=guarded, args=(program, *call), daemon=True) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not self.errors, self.errors[0]
        assert not any(sum(named.arrived) for named in all_named), [named.arrived for named in all_named]

    def check(self) -> None:
        """dq, dk and dv are those of plain attention."""
        sq, sk, heads_kv, per_kv, num_m, *_ = self.shape
        batch, dim = self.q.shape[0], self.dim
        ds = self.p * (self.dp - self.delta[..., None])
        dq = np.einsum("bhqk,bhkd->bhqd", ds, np.repeat(self.k, per_kv, 1))
        dk = np.einsum("bhqk,bhqd->bhkd", ds, self.q).reshape(batch, heads_kv, per_kv, sk, dim).sum(2) * self.unit
        dv = np.einsum("bhqk,bhqd->bhkd", self.p, self.do).reshape(batch, heads_kv, per_kv, sk, dim).sum(2)
        got = self.dq.reshape(batch, heads_kv * per_kv, num_m, 2, 64, 64)
        got = got.swapaxes(3, 4) if dim == 128 else got
        got = got.reshape(batch, heads_kv * per_kv, num_m * self.m, dim)[:, :, :sq]
        np.testing.assert_allclose(got, dq, rtol=1e-8, atol=1e-8)
        np.testing.assert_allclose(self.dk[:, :, :sk], dk, rtol=1e-8, atol=1e-8)
        np.testing.assert_allclose(self.dv[:, :, :sk], dv, rtol=1e-8, atol=1e-8)


def _as_tensors(found):
    if isinstance(found, tuple):
        return tuple(x.view(Tensor) if isinstance(x, np.ndarray) else x for x in found)
    return found.view(Tensor) if isinstance(found, np.ndarray) else found
