"""Buffers of a loop that are filled again while products read them, in a few lines of intermediate code."""

from __future__ import annotations

import pytest

from gpu_accel.testing.racing import racing_copies

TTGIR = """
    %tiles = ttg.local_alloc : () -> !ttg.memdesc<{buffers}x64x64xf32, #shared, #smem, mutable>
    %to = ttg.memdesc_index %tiles[%c0] : !ttg.memdesc<{buffers}x64x64xf32> -> !ttg.memdesc<64x64xf32>
    %first = ttg.async_copy_global_to_local %p, %to mask %m other %z : tensor<64x64x!tt.ptr<f32>> -> <64x64xf32>
    %out = scf.for %i = %c0 to %c2 step %c1 iter_args(%acc = %zero) -> (tensor<64x64xf32>) : i32 {{
      %tile = ttg.memdesc_index %tiles[%i] : !ttg.memdesc<{buffers}x64x64xf32> -> !ttg.memdesc<64x64xf32>
      %b = ttg.memdesc_trans %tile {{order = array<i32: 1, 0>}} : !ttg.memdesc<64x64xf32> -> !ttg.memdesc<64x64xf32>
      {early}
      %one = ttng.warp_group_dot %a, %b, %acc {{inputPrecision = 0 : i32, isAsync = true}} : tensor<64x64xf32>
      %1 = ttng.warp_group_dot_wait %one, %b {{pendings = {pending} : i32}} : tensor<64x64xf32>
      {late}
      scf.yield %1 : tensor<64x64xf32>
    }}
"""
COPY = "%next = ttg.async_copy_global_to_local %p, %to mask %m other %z : tensor<64x64x!tt.ptr<f32>> -> <64x64xf32>"


@pytest.mark.parametrize(("given", "faults"), [
    (dict(late=COPY), 0), (dict(late=COPY, pending=1), 1), (dict(late=COPY, pending=1, buffers=2), 0),
    (dict(early=COPY), 0), (dict(early=COPY, pending=1), 1), (dict(pending=1), 0),
], ids=["waited-for", "under-way", "two-buffers", "early", "of-the-turn-before", "no-copy"])  # fmt: skip
def test_copies_over_what_products_read(given, faults):
    found = racing_copies(TTGIR.format(**(dict(buffers=1, pending=0, early="", late="") | given)))
    assert len(found) == faults and all(line.startswith("%tiles is overwritten") for line in found)
