"""Controls for compute-sanitizer: numbers handed from one partition to another, partitions in turns, and meeting.

    compute-sanitizer --tool racecheck python3 tests/gpu/sanitize_control.py hand-over

The programs are right by construction and take a page: what a tool reports of them it also reports of kernels that
do the same. `no-wait` leaves a wait out, which a tool ought to tell from `hand-over`; `meet` has two partitions wait on
one named barrier, each at its own place in the code, and `tell` has each wait for the other on one of its own.
"""

from __future__ import annotations

import sys

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from gpu_accel.flash_attention3.hopper_device import bar_arrive, bar_sync, publish_tile, receive_tile


@gluon.jit
def _give(queue, full, empty, n, WAIT: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    for i in range(n):
        if WAIT:
            publish_tile(i, i, queue, full, empty)
        else:
            queue.index(i & 1).store(gl.full([1], 0, gl.int32, layout) + i)
            mbarrier.arrive(full.index(i & 1), count=1)


@gluon.jit
def _take(queue, full, empty, out, n):
    total = gl.to_tensor(0)
    for i in range(n):
        total += receive_tile(i, queue, full, empty)
    gl.store(out, total)


@gluon.jit
def hand_over(out, n, WAIT: gl.constexpr):
    queue = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize([(_take, (queue, full, empty, out, n)), (_give, (queue, full, empty, n, WAIT))], [1], [24])


@gluon.jit
def _side(out, n, WG: gl.constexpr):
    if WG == 1:
        bar_arrive(8, 256)  # lets side 0 start
    for _ in range(n):
        bar_sync(8 + WG, 256)
        bar_arrive(9 - WG, 256)
    if WG == 0:
        bar_sync(8, 256)  # takes the last arrival
    gl.store(out + WG, n)


@gluon.jit
def turns(out, n):
    gl.warp_specialize([(_side, (out, n, 0)), (_side, (out, n, 1))], [4], [24])


@gluon.jit
def _meet(out, n, WG: gl.constexpr, TELL: gl.constexpr):
    for _ in range(n):
        if TELL:  # two pairs in turn, so that nobody arrives twice before the other has waited
            for i in gl.static_range(2):
                bar_arrive(8 + 2 * i + WG, 256)
                bar_sync(9 + 2 * i - WG, 256)
        else:
            bar_sync(8, 256)
    gl.store(out + WG, n)


@gluon.jit
def meet(out, n, TELL: gl.constexpr):
    gl.warp_specialize([(_meet, (out, n, 0, TELL)), (_meet, (out, n, 1, TELL))], [4], [24])


if __name__ == "__main__":
    out = torch.zeros(2, dtype=torch.int32, device="cuda")
    name = sys.argv[1]
    if name == "turns":
        turns[(2,)](out, 10, num_warps=4, maxnreg=128)
        expected = [10, 10]
    elif name in ("meet", "tell"):
        meet[(2,)](out, 10, name == "tell", num_warps=4, maxnreg=128)
        expected = [10, 10]
    else:
        hand_over[(2,)](out, 20, name == "hand-over", num_warps=4)
        expected = [190, 0]
    assert name == "no-wait" or out.tolist() == expected, out
    torch.cuda.synchronize()
    print("ran", name)
