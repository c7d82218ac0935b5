"""What is read out of a compiled kernel's text."""

from __future__ import annotations

from gpu_accel.testing.compile_only import idle_barriers

BARRIER = "!ttg.memdesc<2x1xi64, #shared4, #smem, mutable>"
TTGIR = f"""
    %full = ttg.local_alloc : () -> {BARRIER} loc(#loc1)
    %queue = ttg.local_alloc : () -> {BARRIER} loc(#loc2)
    %dq_bufs = ttg.local_alloc : () -> !ttg.memdesc<2x16x256xf32, #shared2, #smem, mutable> loc(#loc3)
    %0 = ttg.memdesc_index %full[%c0_i32] : {BARRIER} -> !ttg.memdesc<1xi64, #shared4, #smem, mutable> loc(#loc4)
    ttng.init_barrier %0, 1 : !ttg.memdesc<1xi64, #shared4, #smem, mutable> loc(#loc4)
    %1 = ttg.memdesc_index %queue[%c0_i32] : {BARRIER} -> !ttg.memdesc<1xi64, #shared4, #smem, mutable> loc(#loc5)
    ttng.init_barrier %1, 2 : !ttg.memdesc<1xi64, #shared4, #smem, mutable> loc(#loc5)
    ttg.warp_specialize(%full, %dq_bufs) attributes {{requestedRegisters = array<i32: 240>}}
"""


def test_a_barrier_that_nobody_waits_for_is_found():
    assert idle_barriers(TTGIR) == ["%queue"]
    assert idle_barriers(TTGIR.replace("(%full, ", "(%full, %queue, ")) == []
    waits = "    ttng.wait_barrier %1, %phase : !ttg.memdesc<1xi64, #shared4, #smem, mutable> loc(#loc6)\n"
    assert idle_barriers(TTGIR + waits) == []
