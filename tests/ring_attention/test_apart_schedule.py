"""The order of loads, products and additions of the ring's backward with dQ apart, emulated on a CPU: see
tests/flash_attention3/emulate_hopper_backward.py, from whose kernel this one differs in where results go."""

from __future__ import annotations

import threading
import types

import numpy as np
import pytest

from gpu_accel.flash_attention3 import hopper_fp8

if not hopper_fp8.gluon_available():
    pytest.skip("this Triton has no usable Gluon dialect", allow_module_level=True)

from gpu_accel.ring_attention import hopper_backward_apart
from tests.flash_attention3.emulate_hopper_backward import KEYS, LOG2_E, Emulation, NamedBarriers
from tests.flash_attention3.emulate_hopper_fp8 import here

BEFORE = (2, 1)  # blocks of rows and tiles of keys of the shard that come before those of the call


class Alias:
    """Part of a buffer as a float32 fragment: 64 x 64 numbers in the room of 64 x 128."""

    def __init__(self, data: np.ndarray):
        self.data = data

    def index(self, i) -> Alias:
        return Alias(self.data[:, int(i) * 128 : (int(i) + 1) * 128])

    def store(self, x) -> None:
        self.data[:] = np.hstack([x, x])


class RingEmulation(Emulation):
    """The same call on a part of a shard, whose sums are not zero before."""

    def __init__(self, **shape):
        super().__init__(**shape)
        batch, heads = self.q.shape[:2]
        self.all_m, self.all_n = self.num_m + BEFORE[0] + 1, 2 * (self.num_n + BEFORE[1] + 1)
        stat = self.stat.reshape(batch, heads, self.num_m, -1)
        stat = np.pad(stat, ((0, 0), (0, 0), (BEFORE[0], 1), (0, 0)), constant_values=np.nan)
        self.stat = np.ascontiguousarray(stat).reshape(-1)
        draw = np.random.default_rng(1)
        self.before = [draw.standard_normal((n, 64, 64)) for n in (
            batch * heads * self.all_m * 2, *[batch * self.k.shape[1] * self.all_n * self.dim // 64] * 2)]  # fmt: skip
        self.sums = [x.copy() for x in self.before]

    def names(self, named: NamedBarriers, lock: threading.Condition) -> dict:
        names = super().names(named, lock)

        def pending() -> list:
            return here.__dict__.setdefault("pending", [])

        def tma_add(sums, at, view):
            def take(x):
                sums[at[0] // 16] += x[:, :64]

            pending().append((view.data, view.data.copy(), take))

        def store_wait(left):
            while len(pending()) > left:
                data, before, take = pending().pop(0)
                assert np.array_equal(data, before, equal_nan=True), "changed while the copy engine read it"
                with self.lock:
                    take(before)

        def put_fragment(sums, fragment, view, x):
            view.store(x)
            tma_add(sums, [fragment * 16, 0], view)

        def send_halves(sums, fragment, even, odd, x, free):
            store_wait(free)
            put_fragment(sums, fragment, even, x[:, :64])
            store_wait(1)
            put_fragment(sums, fragment + 1, odd, x[:, 64:])

        def reinterpret(view, dtype, shape, layout):
            assert view.data.shape == (KEYS, 128 * (shape[0] if len(shape) == 3 else 1))
            return Alias(view.data)

        names |= dict(tma=types.SimpleNamespace(store_wait=store_wait), tma_add=tma_add,
                      put_fragment=put_fragment, send_halves=send_halves, reinterpret=reinterpret)  # fmt: skip
        for name in ("_consumer", "_dq", "_to_sums"):
            f = getattr(hopper_backward_apart, name).fn
            names[name] = types.FunctionType(f.__code__, names, name, f.__defaults__)
        return names

    def calls(self, names: dict, bufs: tuple, bars: tuple, slots: tuple[int, int], maps: tuple) -> list[tuple]:
        k_slots, v_slots = slots
        dq, dk_desc, dv_desc = self.sums[0], *(_Sums(x) for x in self.sums[1:])
        places = (self.all_m, BEFORE[0], self.all_n, 2 * BEFORE[1])
        whole, scales = self.shape[1] % 128 == 0, ((), self.unit * LOG2_E, 0.0)
        switches = (self.dim, self.m, k_slots, v_slots, False, self.causal, False, whole, self.dynamic, self.early)
        calls = [(128, names["_consumer"], wg, bufs, bars, dk_desc, dv_desc, self.shape, scales, places,
                  names["_to_sums"], *switches) for wg in range(2)]  # fmt: skip
        calls.append((128, names["_dq"], bufs, bars, dq, self.shape, places, self.dim, self.m, k_slots, self.causal,
                      False, self.dynamic, True))  # fmt: skip
        calls.append((32, names["producer"], bufs, bars, None, *maps, None, self.shape, places, self.m, k_slots,
                      v_slots, self.causal, False, self.dynamic, True))  # fmt: skip
        return calls

    def check(self) -> None:
        """What was added lies where the call's rows and keys are, and nothing was added anywhere else."""
        batch, dim, heads_kv = self.q.shape[0], self.dim, self.k.shape[1]
        dq, dk, dv = (after - before for after, before in zip(self.sums, self.before, strict=True))
        dq = dq.reshape(batch, -1, self.all_m, 2, 64, 64)
        assert np.abs(dq[:, :, : BEFORE[0]]).max() == 0 == np.abs(dq[:, :, BEFORE[0] + self.num_m :]).max()
        self.dq = dq[:, :, BEFORE[0] : BEFORE[0] + self.num_m]
        first, end = 2 * BEFORE[1], 2 * (BEFORE[1] + self.num_n)
        for name, x, scale in (("dk", dk, self.unit), ("dv", dv, 1.0)):
            x = x.reshape(batch, heads_kv, self.all_n, dim // 64, 64, 64)
            assert np.abs(x[:, :, :first]).max() == 0 == np.abs(x[:, :, end:]).max()
            x = x[:, :, first:end].swapaxes(3, 4).reshape(batch, heads_kv, self.num_n * 2 * KEYS, dim)
            setattr(self, name, x * scale)
        super().check()


class _Sums(np.ndarray):
    """Sums as a tensor map: with a layout that nobody looks at."""

    layout = None

    def __new__(cls, x: np.ndarray):
        return x.view(cls)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    ("sq", "sk", "heads", "heads_kv", "causal", "early"),
    [(256, 384, 4, 2, True, True), (192, 256, 2, 2, True, False), (320, 320, 2, 1, False, True)],
    ids=str,
)
def test_sums_of_a_part_of_a_shard(sq, sk, heads, heads_kv, causal, early, dim):
    shape = dict(sq=sq, sk=sk, dim=dim, heads=heads, heads_kv=heads_kv)
    call = RingEmulation(**shape, causal=causal, dynamic=causal, early=early)
    call.run()
    call.check()


def test_what_the_copy_engine_reads_may_not_change():
    """The emulation sees it: two fragments through one buffer, without a wait in between."""
    call = RingEmulation(sq=128, sk=256, dim=128)
    names = call.names(NamedBarriers(threading.Condition()), threading.Condition())
    here.pending = []
    buffer, sums = Alias(np.zeros((64, 128))), np.zeros((4, 64, 64))
    names["put_fragment"](sums, 0, buffer, np.ones((64, 64)))
    with pytest.raises(AssertionError, match="changed while the copy engine read it"):
        names["put_fragment"](sums, 1, buffer, np.full((64, 64), 2.0))
        names["tma"].store_wait(0)
